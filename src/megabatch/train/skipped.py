"""skipped.jsonl: the samples that a run left out. A line of JSON each, with the first step that it was left out of.

A sample that is bad is bad each time. One that was lost, because it killed its worker or the disk failed, might be read
by a replay of its step: that takes it from here, and leaves it out too.
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..distributed.world import World
from .checkpoint import append
from .data.loader import RankBatch

NAMED = 5  # in a line of the log
Entry = dict[str, Any]


class SkipList:
    """Of a run, as all ranks read it when they start. `lost` has reasons, by position and number of the sample."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lost: dict[tuple[int, int], str] = {}
        self._names: set[str] = set()
        self._reasons: Counter[str] = Counter()  # as far as this rank has met them, since the file was read
        self.new: list[Entry] = []  # on this rank, not in the file yet
        content = path.read_bytes() if path.exists() else b""
        self._ends_in_line = bool(content) and not content.endswith(b"\n")  # which a killed run left unfinished
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                self._remember(json.loads(line))

    def _remember(self, entry: Entry) -> None:
        self._names.add(entry["name"])
        self._reasons[entry["reason"]] += 1
        if "position" in entry:
            self.lost[entry["position"], entry["index"]] = entry["reason"]

    def note(self, batch: RankBatch) -> None:
        """What is skipped in a batch for the first time."""
        lost = [asdict(lost) for lost in batch.lost if (lost.position, lost.index) not in self.lost]
        for entry in [*lost, *({"name": name, "reason": reason} for name, reason in batch.bad)]:
            if "position" in entry or entry["name"] not in self._names:
                self._remember(entry)
                self.new.append({"step": batch.step + 1, **entry})

    def summary(self) -> str:
        """How many of which reason, the most frequent first."""
        return ", ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common(NAMED))

    def write_new(self, world: World) -> str:
        """Of all ranks, to the disk, before a checkpoint is that knows of them. Returns some of their names."""
        new = [entry for entries in world.gather(self.new) for entry in entries]
        self.new = []
        if world.rank == 0:
            lines = "".join(json.dumps(entry) + "\n" for entry in new)
            append(self._path, "\n" * self._ends_in_line + lines, sync=True)
            self._ends_in_line = False
        names = ", ".join(f"{entry['name']} ({entry['reason']})" for entry in new[:NAMED])
        return names + (f", and {len(new) - NAMED} more" if len(new) > NAMED else "")
