"""What `--train-data` names: tar shards, with the weight, size and tag of each."""

import glob
import itertools
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from braceexpand import braceexpand

from .source import printable
from .storage import Known, Missing, ask, known_by_info, known_by_status, local_path, read_all, size_and_tag

_LOGGER = logging.getLogger("megabatch")
_MOST_SHARDS = 10**6
_WORTH_LISTING = 16  # shards of a remote folder: it is listed from here on, below each is asked for
_UNPACK = {".gz": "gzip -dk", ".tgz": "gzip -dk", ".zst": "zstd -d", ".bz2": "bzip2 -dk", ".xz": "xz -dk"}
_CHAIN = re.compile(r"(simplecache|filecache|blockcache|cached|zip|tar|dir|reference|libarchive)(://.*)?")

# Commands that print a file, and options that do not change what is printed.
_PIPE = re.compile(r"aws s3 cp|gsutil( -[mq])* cat|curl")
_HARMLESS = re.compile(r"-|-[fsSL]+|--(quiet|only-show-errors|no-progress|fail|silent|show-error|location|retry)|\d+")


@dataclass(frozen=True)
class Listed:
    """A shard.

    Attributes:
        weight: How often a sample of it is drawn where samples are drawn with replacement, relative to others.
        tag: What changes when the shard does: its ETag, or the time of its last change.
    """

    url: str
    weight: float
    size: int
    tag: str


def expand(what: str, *, factors: str | None = None, skip_missing: bool = False) -> list[Listed]:
    """The shards that are named, in this order; those of a folder or a glob are sorted by name.

    Args:
        what: Local paths or URLs of tar files, with braces for ranges, `*` or `?` for any name, and `::` between
            sources. A folder stands for its `*.tar`. A .txt file, or `@file`, has one source per line. A .json or
            .yaml file is an OpenCLIP manifest.
        factors: Weights of the sources, with `::` between them.
        skip_missing: Leave out shards that are not there.
    """
    sources = _manifest(what) if re.search(r"\.(json|ya?ml)$", what) else [([each], 1.0) for each in _split(what)]
    if factors is not None:
        weights = _factors(factors, len(sources))
        sources = [(patterns, weight) for (patterns, _), weight in zip(sources, weights, strict=True)]
    known: dict[str, Known] = {}
    shards = [(url, weight) for patterns, weight in sources for url in _urls(patterns, known)]
    if not shards:
        raise ValueError(f"{what}: must name at least one shard, names none.")
    for url, _ in shards:
        suffix = os.path.splitext(url)[1]
        if suffix in _UNPACK:
            words = "must not be compressed: samples are read from its middle. Convert it:"
            raise ValueError(f"{printable(url)}: {words} {_UNPACK[suffix]} {shlex.quote(os.path.basename(url))}")
    known |= _sizes_and_tags(dict.fromkeys(url for url, _ in shards if url not in known))
    missing = [url for url, _ in shards if url not in known]
    if missing and not skip_missing:
        words = f"must be a file, but {len(missing)} of {len(shards)} shards are not."
        raise ValueError(f"{printable(missing[0])}: {words} Look at the name, or go on without: --skip-bad-shards.")
    for url in missing:
        _LOGGER.warning("data: left out %s: there is no such file", printable(url))
    return [Listed(url, weight, *known[url]) for url, weight in shards if url in known]


def _split(what: str) -> list[str]:
    sources = what.split("::")
    for source, following in itertools.pairwise(sources):
        if _CHAIN.fullmatch(source) and "://" in following:
            raise ValueError(f"{what}: must not be a chain: :: separates sources. Write {following} without a cache.")
    if "" in sources:
        raise ValueError("tar shards: must have a source before and after each ::, got none.")
    return sources


def _factors(factors: str, count: int) -> list[float]:
    try:
        weights = [float(factor) for factor in factors.split("::")]
    except ValueError:
        raise ValueError(f"--train-data-upsampling-factors: must be numbers, such as 1::2, got {factors!r}.") from None
    if len(weights) != count:
        counts = f"{len(weights)} for {count}"
        raise ValueError(f"--train-data-upsampling-factors: must have one number per source, got {counts}.")
    return weights


def _manifest(url: str) -> list[tuple[list[str], float]]:
    """OpenCLIP's: sources with their weights, or with the fraction of all drawn samples that each is to have."""
    import yaml

    text = read_all(url)
    sources = []
    try:
        content = json.loads(text) if url.endswith(".json") else yaml.safe_load(text)
        by_fraction = {"raw": False, "mixture_fraction": True}[content.get("weight_mode", "raw")]
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        for each in content["sources"]:
            patterns = [each["shards"]] if isinstance(each["shards"], str) else list(map(str.strip, each["shards"]))
            weight = each["mixture_fraction"] / each["samples"] if by_fraction else each.get("sampling_weight", 1.0)
            sources.append((patterns, float(weight)))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, yaml.YAMLError) as error:
        fields = "{version: 1, sources: [{shards, samples, sampling_weight}]}"
        raise ValueError(f"{url}: must be a manifest {fields}, got {type(error).__name__}: {error}.") from None
    return sources


def _lines(source: str) -> list[str]:
    """The sources in a file, or the source itself where it is no such file."""
    if not source.startswith("@") and not source.endswith(".txt"):
        return [source]
    lines = map(str.strip, read_all(source.removeprefix("@")).decode(errors="replace").splitlines())
    return list(filter(None, lines))


def _urls(patterns: list[str], known: dict[str, Known]) -> Iterator[str]:
    """The shards of a source. Sizes and tags that a listing has are added to `known`."""
    sources = itertools.chain.from_iterable(map(_lines, patterns))
    for url in itertools.chain.from_iterable(_braces(_unpiped(source)) for source in sources):
        if "*" in url or ("?" in url and not url.startswith("http")):
            yield from _matching(url, known)
        elif _is_folder(url):
            yield from _matching(f"{url.rstrip('/')}/*.tar", known)
        else:
            yield url


def _unpiped(source: str) -> str:
    """The URL that a command would print."""
    if not source.startswith("pipe:"):
        return source
    command = source.removeprefix("pipe:").strip().removesuffix("|| true")
    program = _PIPE.match(command)
    try:
        words = shlex.split(command[program.end() :]) if program else []
    except ValueError:  # a quote that is not closed
        words = []
    urls = [word for word in words if "://" in word]
    if len(urls) != 1 or not all(word in urls or _HARMLESS.fullmatch(word) for word in words):
        raise ValueError(
            f"{source}: must be `pipe:aws s3 cp URL -`, `pipe:gsutil cat URL` or `pipe:curl -s -L URL`: it is not run. "
            "Write the URL itself. Credentials and endpoints come from the environment."
        )
    return urls[0]


def _braces(source: str) -> list[str]:
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", source)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) > _MOST_SHARDS:
        raise ValueError(f"{source}: must be at most {_MOST_SHARDS} shards, got more.")
    try:
        return list(braceexpand(source))
    except ValueError:
        raise ValueError(f"{source}: must have a closing brace for each opening one.") from None


def _is_folder(url: str) -> bool:
    path = local_path(url)
    if path is not None:
        return os.path.isdir(path)
    has_suffix = url.startswith("http") or os.path.splitext(url)[1]  # a web server is not asked: it would send the file
    return url.endswith("/") or (not has_suffix and ask(url, "isdir"))


def _matching(pattern: str, known: dict[str, Known]) -> list[str]:
    literal = pattern.replace("[", "[[]")
    path = local_path(literal)
    if path is not None:
        urls = glob.glob(path, recursive=True)
    else:
        protocol = pattern.partition("://")[0]
        infos = {
            re.sub(rf"^(?!{protocol}://)", f"{protocol}://", name): info
            for name, info in ask(literal, "glob", detail=True).items()
            if info["type"] == "file"
        }
        known |= {url: found for url, info in infos.items() if (found := known_by_info(info))}
        urls = list(infos)
    if not urls:
        raise ValueError(f"{pattern}: must match at least one tar that is not compressed, matches none.")
    return sorted(urls)


def _sizes_and_tags(urls: Iterable[str]) -> dict[str, Known]:
    """Of those that exist."""
    found: dict[str, Known] = {}
    single: list[str] = []
    for folder, group in itertools.groupby(sorted(urls, key=os.path.dirname), os.path.dirname):
        members = list(group)
        if folder.startswith("http") or len(members) < _WORTH_LISTING:
            single += members
        else:
            listed = _listing(folder)
            found |= {url: listed[name] for url in members if (name := os.path.basename(url)) in listed}
    with ThreadPoolExecutor(32) as threads:
        answers = zip(single, threads.map(_if_there, single), strict=True)
        return found | {url: known for url, known in answers if known}


def _listing(folder: str) -> dict[str, Known]:
    path = local_path(folder)
    try:
        if path is None:
            entries = [(info["name"], known_by_info(info)) for info in ask(folder, "ls", detail=True)]
        else:
            with os.scandir(path or ".") as files:
                entries = [(file.name, known_by_status(file.stat())) for file in files if file.is_file()]
    except (Missing, FileNotFoundError, NotADirectoryError):
        return {}
    return {os.path.basename(name): known for name, known in entries if known}


def _if_there(url: str) -> Known | None:
    try:
        return size_and_tag(url)
    except Missing:
        return None
