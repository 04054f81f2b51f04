"""What the sections for a GPU report: one finding for each thing they looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(frozen=True)
class Finding:
    """What became of one call. `status`: ok, failed, not run.

    Attributes:
        count, allowed: What was counted and how many there may be, where something was counted.
        note: Why it failed or was not run, or what else is worth knowing.
    """

    section: str
    name: str
    status: str
    count: float | None = None
    allowed: float | None = None
    note: str = ""

    @property
    def silent(self) -> bool:
        """Passed, with nothing to tell."""
        return self.status == OK and not self.count and not self.note

    def __str__(self) -> str:
        if self.count is not None and self.allowed is not None:
            text = f"{self.name}: {self.count:g}, allowed {self.allowed:g}"
            return f"{text} ({self.note})" if self.note else text
        return f"{self.name}: {self.note}" if self.note else self.name


def counted(section: str, name: str, count: float, allowed: float, note: str = "") -> Finding:
    return Finding(section, name, OK if count <= allowed else FAILED, count, allowed, note)


def raised(section: str, name: str, error: BaseException) -> Finding:
    text = " ".join(str(error).split())
    return Finding(section, name, FAILED, note=f"raised {type(error).__name__}: {text}")


def each(section: str, calls: Sequence[Any], examine: Callable[[Any], list[Finding]]) -> list[Finding]:
    """The findings of every call. One that raises is a finding too, and the rest go on."""

    def tried(call: Any) -> list[Finding]:
        try:
            return examine(call)
        except Exception as error:
            return [raised(section, str(call), error)]

    return [found for call in calls for found in tried(call)]


def status(findings: Sequence[Finding]) -> str:
    """Of a section: failed if anything did, not run if nothing ran."""
    seen = {found.status for found in findings}
    return FAILED if FAILED in seen else OK if OK in seen else NOT_RUN


def summary(section: str, findings: Sequence[Finding]) -> str:
    """One line."""
    failed = [found for found in findings if found.status == FAILED]
    if failed:
        return f"{section}: {len(failed)} of {len(findings)} FAILED, first: {failed[0]}"
    if status(findings) == NOT_RUN:
        return f"{section}: not run" + (f": {findings[0].note}" if findings else "")
    ran = sum(found.status == OK for found in findings)
    return f"{section}: {ran} of {len(findings)} ok"
