"""Act 3 of the demo: one step of the trainer at a batch whose dense matrix is many times the memory there is."""

from dataclasses import dataclass
from pathlib import Path

from ...train.data.icons import Icons
from ...train.data.order import Order
from .. import report
from . import trainings
from .learning import DATA, SEED

STORY = """\
The same trainer takes one step at batch {batch:,}, in a process that may take {limit:,} MiB and not one more, beyond
what Python and torch take themselves. Icons come again until the batch is full; rows with the same name have the same
id, and are not each other's negatives.
"""


@dataclass(frozen=True)
class Plan:
    """What is asked of the trainer. Chunks change memory and speed, not results."""

    batch: int = 65_536
    chunk: int = 1024
    workers: int = 2

    @property
    def flags(self) -> list[str]:
        settings = {"--steps": 1, "--global-batch-size": self.batch, "--chunk-size": self.chunk}
        return [*DATA, *(str(word) for setting in settings.items() for word in setting), "--workers", str(self.workers)]


FULL, QUICK = Plan(), Plan(batch=4096, chunk=256, workers=0)


def step_once(plan: Plan, limit_mib: int, folder: Path, *more: str) -> tuple[trainings.Trained, int]:
    """The run, and its peak memory in bytes beyond what Python and torch take. Raises trainings.Broke."""
    peak = folder.parent / "peak"
    launcher = ["-m", "megabatch.bench.demo.limited", str(limit_mib), str(peak)]
    run = trainings.train([*plan.flags, *more], folder, title=f"batch {plan.batch:,}", launcher=launcher)
    return run, int(peak.read_text())


def take_a_big_step(plan: Plan, limit_mib: int, folder: Path) -> bool:
    """Whether it could."""
    print(STORY.format(batch=plan.batch, limit=limit_mib), flush=True)
    try:
        run, peak = step_once(plan, limit_mib, folder)
    except trainings.Broke as broke:
        print(f"FAILED: {broke}")
        return False
    values = run.metrics[0]
    icons = Icons(held_out=False)
    _, indices = Order(icons.shards, seed=SEED).of_step(0, plan.batch)
    different = set(indices.tolist())
    names = {icons[index].text for index in different}
    rows = [
        ("rows of the batch", f"{values['train/samples']:,.0f}", ""),
        ("different icons among them", f"{len(different):,}", ""),
        ("different names (ids)", f"{len(names):,}", "rows that share one are masked"),
        ("loss", f"{values['train/loss']:.4f}", ""),
        ("time", f"{run.step_seconds:.1f} s", f"of which {values['train/data_seconds']:.1f} s to draw the samples"),
        ("peak memory", f"{report.mebibytes(peak)} MiB", "data, towers, optimizer and all"),
        ("a dense matrix alone", f"{report.mebibytes(4 * plan.batch**2)} MiB", "and a dense loss holds several"),
    ]
    print(report.table(("", "", ""), rows).lstrip("\n"))
    return True
