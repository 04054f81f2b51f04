"""Texts as their UTF-8 bytes: a vocabulary that nobody has to download, and that no text is outside of."""

from collections.abc import Sequence

import torch
from torch import Tensor

# UTF-8 never uses these bytes.
_BEGIN, _END, _NUL = b"\xfe", b"\xff", b"\xc0"


class ByteTokenizer:
    """UTF-8 bytes between a begin and an end mark, padded with 0 to `length`.

    A text too long loses its end, by whole characters; the marks are always there. The character NUL, which would
    look like padding, gets a byte of its own. What is not a character (half a surrogate pair) becomes '?'.
    """

    vocabulary = 256
    padding = 0
    begin = _BEGIN[0]
    end = _END[0]

    def __init__(self, length: int) -> None:
        if length < 6:
            raise ValueError(f"ByteTokenizer: length must be at least 6, two marks and a character, got {length}.")
        self.length = length

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Tokens `[n, length]` of n texts."""
        if isinstance(texts, str):
            raise TypeError(f"ByteTokenizer: texts must be several, got the one {texts!r}. Put it in a list.")
        rows = bytearray().join(self._row(text) for text in texts)
        if not rows:
            return torch.empty(0, self.length, dtype=torch.long)
        return torch.frombuffer(rows, dtype=torch.uint8).view(-1, self.length).long()

    def _row(self, text: str) -> bytes:
        content = text.encode("utf-8", "replace")
        room = self.length - 2
        if len(content) > room:
            content = content[:room].decode("utf-8", "ignore").encode("utf-8")
        return (_BEGIN + content.replace(b"\0", _NUL) + _END).ljust(self.length, b"\0")
