"""What `--train-data` names: addresses of tar shards, with weight, size and tag."""

import glob
import itertools
import json
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from braceexpand import braceexpand

from .source import printable
from .storage import Missing, ask, local_path, read_all, size_and_tag, tag_of

_MOST_SHARDS = 10**6
_LARGEST_LIST = 2**28  # bytes
_WORTH_A_LISTING = 16  # shards of a remote folder, from which on it is listed rather than asked for each

_UNPACK = {".gz": "gzip -dk", ".tgz": "gzip -dk", ".zst": "zstd -d", ".bz2": "bzip2 -dk", ".xz": "xz -dk"}
_CHAIN = re.compile(r"(simplecache|filecache|blockcache|cached|zip|tar|dir|reference|libarchive)(://.*)?")

# Commands that print a file, and options that change nothing about what they print.
_PIPES = (["aws", "s3", "cp"], ["gsutil", "cat"], ["gsutil", "-m", "cat"], ["gsutil", "-q", "cat"], ["curl"])
_HARMLESS = re.compile(r"-|-[fsSL]+|--(quiet|only-show-errors|no-progress|fail|silent|show-error|location)|--retry|\d+")


@dataclass(frozen=True)
class Listed:
    """A shard.

    Attributes:
        weight: How often a sample of it is drawn, relative to others, where samples are drawn with replacement.
        tag: What changes when the shard does: an ETag, or the time of the last change.
    """

    url: str
    weight: float
    size: int
    tag: str


def expand(what: str, *, factors: str | None = None) -> list[Listed]:
    """The shards that are named, in that order; those of a folder or a star sorted by name.

    Args:
        what: Local paths or URLs of tar files, with braces for ranges, `*` or `?` for any name, and `::` between
            sources. A folder stands for its `*.tar`. `@list.txt`, or any .txt file, has one source per line. A .json
            or .yaml file is an OpenCLIP manifest.
        factors: How often a sample of each source is drawn, relative to others, with `::` between them.
    """
    sources = _manifest(what) if re.search(r"\.(json|ya?ml)$", what) else [(each, 1.0) for each in _split(what)]
    if factors is not None:
        weights = _factors(factors)
        if len(weights) != len(sources):
            counts = f"{len(weights)} for {len(sources)}"
            raise ValueError(f"--train-data-upsampling-factors: must have one number per source, got {counts}.")
        sources = [(source, weight) for (source, _), weight in zip(sources, weights, strict=True)]
    found: dict[str, tuple[int, str]] = {}
    weighted = [(url, weight) for source, weight in sources for url in _urls(source, found)]
    found |= _sizes_and_tags([url for url, _ in weighted if url not in found])
    missing = [url for url, _ in weighted if url not in found]
    if missing:
        raise ValueError(f"{missing[0]}: must be a file, but {len(missing)} of {len(weighted)} shards are not.")
    return [Listed(url, weight, *found[url]) for url, weight in weighted]


def _split(what: str) -> list[str]:
    sources = what.split("::")
    for source, following in itertools.pairwise(sources):
        if _CHAIN.fullmatch(source) and "://" in following:
            raise ValueError(f"{what}: must not be a chain: :: separates sources here. Write {following}, uncached.")
    return sources


def _factors(factors: str) -> list[float]:
    try:
        return [float(factor) for factor in factors.split("::")]
    except ValueError:
        raise ValueError(f"--train-data-upsampling-factors: must be numbers, such as 1::2, got {factors!r}.") from None


def _manifest(url: str) -> list[tuple[str, float]]:
    """OpenCLIP's: sources with weights, or with the fraction of all samples that each is to be."""
    import yaml

    text = read_all(url, _LARGEST_LIST)
    try:
        content = json.loads(text) if url.endswith(".json") else yaml.safe_load(text)
        by_fraction = {"raw": False, "mixture_fraction": True}[content.get("weight_mode", "raw")]
        return [
            (each["shards"], each["mixture_fraction"] / each["samples"] if by_fraction else each["sampling_weight"])
            for each in content["sources"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, yaml.YAMLError) as error:
        fields = "{weight_mode: raw, sources: [{shards, samples, sampling_weight}]}"
        raise ValueError(f"{url}: must be a manifest {fields}, got {type(error).__name__}: {error}.") from None


def _urls(source: str, found: dict[str, tuple[int, str]]) -> Iterator[str]:
    """The shards of a source. What a listing tells of them goes into `found`."""
    if not source:
        raise ValueError("tar shards: must have a source before and after each ::, got none.")
    if source.startswith("pipe:"):
        source = _piped(source)
    if source.startswith("@") or source.endswith(".txt"):
        lines = read_all(source.removeprefix("@"), _LARGEST_LIST).decode().splitlines()
        for line in filter(None, map(str.strip, lines)):
            yield from _urls(line, found)
        return
    for url in _braces(source):
        if "*" in url or ("?" in url and not url.startswith("http")):
            yield from _matching(url, found)
        elif _is_folder(url):
            yield from _matching(f"{url.rstrip('/')}/*.tar", found)
        else:
            suffix = os.path.splitext(url)[1]
            if suffix in _UNPACK:
                convert = f"{_UNPACK[suffix]} {shlex.quote(os.path.basename(url))}"
                raise ValueError(
                    f"{url}: must not be compressed: samples are read from its middle. Convert it: {convert}"
                )
            yield url


def _piped(source: str) -> str:
    try:
        words = shlex.split(source.removeprefix("pipe:"))
    except ValueError:
        words = []
    words = words[:-2] if words[-2:] == ["||", "true"] else words
    command = next((each for each in _PIPES if words[: len(each)] == each), None)
    rest = words[len(command) :] if command else words
    urls = [word for word in rest if "://" in word]
    others = [word for word in rest if word not in urls and not _HARMLESS.fullmatch(word)]
    if command is None or len(urls) != 1 or others:
        raise ValueError(
            f"{source}: must be `pipe:aws s3 cp URL -`, `pipe:gsutil cat URL` or `pipe:curl -s -L URL`: it is not run. "
            "Write the URL itself. Credentials and endpoints come from the environment."
        )
    return urls[0]


def _braces(source: str) -> Iterable[str]:
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
    return url.endswith("/") or (not os.path.splitext(url)[1] and ask(url, "isdir"))


def _matching(pattern: str, found: dict[str, tuple[int, str]]) -> list[str]:
    literal = pattern.replace("[", "[[]")
    path = local_path(literal)
    if path is not None:
        urls = sorted(glob.glob(path, recursive=True))
    else:
        protocol = pattern.partition("://")[0]
        infos = ask(literal, "glob", detail=True)
        named = {name if "://" in name else f"{protocol}://{name}": info for name, info in infos.items()}
        urls = sorted(url for url, info in named.items() if info["type"] == "file")
        found |= _known(named)
    if not urls:
        raise ValueError(f"{pattern}: must match uncompressed tars, matches none.")
    for url in urls:
        if printable(url) != url:
            raise ValueError(f"{pattern}: must match names that can be printed, matches {printable(url)}.")
    return urls


def _known(infos: dict[str, dict[str, Any]]) -> dict[str, tuple[int, str]]:
    return {url: (info["size"], tag_of(info)) for url, info in infos.items() if info.get("size") is not None}


def _sizes_and_tags(urls: list[str]) -> dict[str, tuple[int, str]]:
    """Sizes and tags of those that exist. Folders that have many of them are listed."""
    found: dict[str, tuple[int, str]] = {}
    folders: dict[str, list[str]] = defaultdict(list)
    for url in dict.fromkeys(urls):
        folders[os.path.dirname(url)].append(url)
    single: list[str] = []
    for folder, members in folders.items():
        if local_path(folder) is not None or folder.startswith("http") or len(members) < _WORTH_A_LISTING:
            single += members
            continue
        listing = {os.path.basename(info["name"]): info for info in ask(folder, "ls", detail=True)}
        found |= _known({url: listing[os.path.basename(url)] for url in members if os.path.basename(url) in listing})
    with ThreadPoolExecutor(32) as threads:
        return found | {url: each for url, each in zip(single, threads.map(_existing, single), strict=True) if each}


def _existing(url: str) -> tuple[int, str] | None:
    try:
        return size_and_tag(url)
    except Missing:
        return None
