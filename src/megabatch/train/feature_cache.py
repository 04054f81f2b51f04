"""Features of a locked image tower (LiT), computed once and kept on disk.

A feature is found by the weights of the tower, the preprocessing and the precision, which name a folder, and by the
content of the image. So other data, or other weights, never meet a feature that is not theirs.
"""

import bisect
import ctypes
import hashlib
import uuid
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import atomically
from .towers.towers import Towers

_ROWS_OF_A_FILE = 65_536


class FeatureCache:
    """Files of keys `[n, 2]` and features `[n, width]`, each whole or not there. Good after a fork, and after pickling.

    A feature that was put is found by any process after the next `flush`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unwritten: list[tuple[Tensor, Tensor]] = []
        self._paths: set[Path] = set()
        self._files: list[tuple[Tensor, Tensor]] = []
        self._starts = [0]  # numbers of the files' first rows
        self._sorted = self._order = torch.zeros(0, dtype=torch.int64)
        self._changed = -1  # when the folder was, at the last look

    @staticmethod
    def of(root: str | Path, towers: Towers, precision: str) -> "FeatureCache":
        """The part of a cache that is for these towers."""
        hash = hashlib.blake2b(repr((precision, towers.preprocessing)).encode(), digest_size=16)
        for part in towers.image_parts():
            for name, tensor in part.state_dict().items():
                content = tensor.detach().cpu().contiguous()
                hash.update(f"{name}{content.dtype}{tuple(content.shape)}".encode())
                hash.update((ctypes.c_char * content.nbytes).from_address(content.data_ptr()))
        return FeatureCache(Path(root) / hash.hexdigest())

    @staticmethod
    def key(content_key: str, rgb_first: bool) -> tuple[int, int]:
        """Of an image: 127 bits. Pixels also depend on `rgb_first`, see `Preprocessing`."""
        digest = hashlib.blake2b(f"{content_key}/{rgb_first}".encode(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "big", signed=True), int.from_bytes(digest[8:], "big", signed=True)

    def put(self, keys: Tensor, features: Tensor) -> None:
        if len(keys):
            self._unwritten.append((keys.cpu().clone(), features.detach().cpu().clone()))
        if sum(len(keys) for keys, _ in self._unwritten) >= _ROWS_OF_A_FILE:
            self.flush()

    def flush(self) -> None:
        if self._unwritten:
            keys, features = (torch.cat(each) for each in zip(*self._unwritten, strict=True))
            state = {"keys": keys, "features": features}
            atomically(self.folder / f"{uuid.uuid4().hex}.pt", lambda file: torch.save(state, file))
            self._unwritten = []

    def get(self, key: tuple[int, int]) -> Tensor | None:
        """The feature of an image, where there is one by now."""
        found = self._find(key)
        if found is None and (changed := self.folder.stat().st_mtime_ns) != self._changed:
            self._changed = changed
            self._read_new_files()
            found = self._find(key)
        return found

    def _find(self, key: tuple[int, int]) -> Tensor | None:
        place = int(torch.searchsorted(self._sorted, key[0]))
        if place == len(self._sorted):
            return None
        row = int(self._order[place])
        file = bisect.bisect_right(self._starts, row) - 1
        keys, features = self._files[file]
        row -= self._starts[file]
        return features[row] if tuple(keys[row].tolist()) == key else None

    def _read_new_files(self) -> None:
        """Features stay on disk until they are asked for."""
        for path in sorted(set(self.folder.glob("*.pt")) - self._paths):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self._paths.add(path)
            self._files.append((state["keys"], state["features"]))
            self._starts.append(self._starts[-1] + len(state["keys"]))
        if self._files:
            self._sorted, self._order = torch.cat([keys[:, 0] for keys, _ in self._files]).sort()

    def __reduce__(self) -> tuple[type["FeatureCache"], tuple[Path]]:
        return FeatureCache, (self.folder,)
