"""Act 2 of the demo: the trainer learns, and it learns the same with the dense loss, with ours, and on two ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import report
from . import trainings
from .retrieved import draw_retrieved
from .trainings import Trained

STORY = """\
`megabatch train --model tiny` on {icons:,} icons and their names, {steps} steps at batch {batch:,}, three times with
one seed: with the dense loss, with megabatch, and with megabatch on two ranks that pass their features round a ring.
Then {held_out:,} names that were held out are looked for among their icons, and the icons among the names.
"""
NO_CLAIM = """\
This is no claim that larger batches are better: on {icons:,} icons they are not (in trials at equal time, batch 128 to
512 won by far, and 8,192 learned next to nothing)."""

SEED = 0
DATA = ["--train-data", "icons", "--model", "tiny", "--seed", str(SEED)]
SAME_STEPS, SAME = 10, 1e-5  # over so many steps, loss curves may differ by so much
RECALLS, LEARNED = (1, 5, 10), 0.10  # the last recall, at least, both ways
WAYS = {"text_to_image": "name to icon", "image_to_text": "icon to name"}


@dataclass(frozen=True)
class Plan:
    """What is asked of the trainer, three times."""

    steps: int = 80
    batch: int = 1024
    chunk: int = 1024  # everything at once: 1,024 icons are small
    lr: float = 4e-3
    wd: float = 0.2
    held_out: int = 1000
    must_learn: bool = True

    @property
    def flags(self) -> list[str]:
        settings = {"--steps": self.steps, "--global-batch-size": self.batch, "--chunk-size": self.chunk}
        settings |= {"--warmup": self.steps // 10, "--val-num-samples": self.held_out, "--workers": 0}
        rates = {"--lr": self.lr, "--wd": self.wd}
        at_the_end = ["--val-data", "icons", "--val-frequency", "0", "--save-frequency", "0"]
        return [*DATA, *(str(word) for setting in {**settings, **rates}.items() for word in setting), *at_the_end]


FULL, QUICK = Plan(), Plan(steps=3, batch=128, chunk=128, held_out=100, must_learn=False)


@dataclass(frozen=True)
class Variant:
    title: str
    ranks: int = 1
    more: tuple[str, ...] = ()


DENSE, OURS, RING = "dense loss", "megabatch", "megabatch, 2 ranks"
VARIANTS = (Variant(DENSE, more=("--dense-loss",)), Variant(OURS), Variant(RING, ranks=2))


def learn(plan: Plan, folder: Path, picture: Path) -> bool:
    """Whether all three learned, and learned the same."""
    from ...train.data.icons import Icons

    print(STORY.format(icons=len(Icons(held_out=False)), **vars(plan)), flush=True)
    runs: dict[str, Trained] = {}
    for number, variant in enumerate(VARIANTS, start=1):
        try:
            run = trainings.train(
                [*plan.flags, *variant.more], folder / str(number), title=variant.title, ranks=variant.ranks
            )
        except trainings.Broke as broke:
            print(f"FAILED: {broke}")
            return False
        runs[variant.title] = run
        print(f"{variant.title}: {len(run.losses)} steps, loss {run.losses[-1]:.4f}, {run.seconds:.0f} s", flush=True)
    apart, unlearned = differences(runs), too_little(runs) if plan.must_learn else []
    print(f"\n{losses_table(runs)}\n{_verdict(apart, f'All are within {SAME:g} over the first {SAME_STEPS} steps.')}")
    print(f"\n{recalls_table(runs, plan.held_out)}\n{_verdict(unlearned, '')}")
    print(NO_CLAIM.format(icons=len(Icons(held_out=False))))
    draw_retrieved(runs[OURS].folder, picture)
    print(f"\npicture: {picture}")
    return not apart + unlearned


def _verdict(faults: list[str], good: str) -> str:
    return "\n".join(f"FAILED: {fault}" for fault in faults) or good


# ---- are they the same?


def largest_difference(run: Trained, dense: Trained, steps: int | None = None) -> float:
    """Of two loss curves. NaN where either has one, infinite where they are not of one length."""
    ours, theirs = (torch.tensor(each.losses[:steps], dtype=torch.float64) for each in (run, dense))
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


def differences(runs: Mapping[str, Trained]) -> list[str]:
    """What is wrong with the curves."""
    apart = {title: largest_difference(run, runs[DENSE], SAME_STEPS) for title, run in runs.items()}
    return [
        f"{title}: the loss curve is NOT within {SAME:g} of the dense one's over the first {SAME_STEPS} steps, but "
        f"{most:.1e} off"
        for title, most in apart.items()
        if not most <= SAME  # NaN is wrong too
    ]


def losses_table(runs: Mapping[str, Trained]) -> str:
    head = ("", "training", "last loss", f"apart in {SAME_STEPS} steps", "in all steps", "")
    body = []
    for title, run in runs.items():
        apart = [f"{largest_difference(run, runs[DENSE], steps):.1e}" for steps in (SAME_STEPS, None)]
        cells = ["", ""] if title == DENSE else apart
        body.append((title, f"{run.step_seconds:.1f} s", f"{run.losses[-1]:.6f}", *cells, ""))
    return f"Loss, and how far it ever is from the dense run's:\n\n{report.table(head, body)}"


# ---- did they learn?


def too_little(runs: Mapping[str, Trained]) -> list[str]:
    """Who has not learned enough."""
    best = RECALLS[-1]
    found = {(title, way): run.held_out[f"val/{way}_R@{best}"] for title, run in runs.items() for way in WAYS}
    return [
        f"{title}: R@{best}, {WAYS[way]}, must be at least {LEARNED:.2f}, got {value:.3f}: it has NOT learned"
        for (title, way), value in found.items()
        if not value >= LEARNED
    ]


def recalls_table(runs: Mapping[str, Trained], held_out: int) -> str:
    head = ("", *(f"{name}: R@{k}" if k == RECALLS[0] else f"R@{k}" for name in WAYS.values() for k in RECALLS), "")
    body: list[Sequence[str]] = [
        (title, *(f"{run.held_out[f'val/{way}_R@{k}']:.3f}" for way in WAYS for k in RECALLS), "")
        for title, run in runs.items()
    ]
    body.append(("by chance", *(f"{k / held_out:.3f}" for _ in WAYS for k in RECALLS), ""))
    return f"Found among {held_out:,} held-out ones, at place 1, up to 5, up to 10:\n\n{report.table(head, body)}"
