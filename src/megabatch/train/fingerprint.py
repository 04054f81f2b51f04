"""What changes when the data does. It is kept with a run and in its checkpoints, so that none resumes on other data."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

# Of a source: a line per file. Of a run: by "train", "val" and "zeroshot".
Fingerprint = Mapping[str, Sequence[str]]


def data_line(file: Path | str, samples: int, *content: object, size: int | None = None) -> str:
    """Of a file, or of data that is in none: name, size, samples, and a digest of what else is known of it."""
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part if isinstance(part, bytes) else repr(part).encode(errors="surrogatepass"))
        digest.update(b"\0")
    name = file.name if isinstance(file, Path) else file
    size = file.stat().st_size if isinstance(file, Path) else size
    return f"{name}: " + (f"{size} bytes, " if size is not None else "") + f"{samples} samples, {digest.hexdigest()}"


def difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """In words, or None. Data that one of the two does not have is not compared."""
    for name in before:
        if name not in now or list(before[name]) == list(now[name]):
            continue
        old, new = dict.fromkeys(before[name]), dict.fromkeys(now[name])
        gone, come = [line for line in old if line not in new], [line for line in new if line not in old]
        if not gone and not come:
            return f"--{name}-data has its files in another order"
        return (
            f"of --{name}-data {len(gone)} files are gone or changed and {len(come)} are new or changed, such as "
            f"{(come or gone)[0]!r}" + (f", where there was {gone[0]!r}" if gone and come else "")
        )
    return None
