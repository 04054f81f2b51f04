"""`megabatch bench gradients`: do gradients over ranks equal those of one process? Ours and others'."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from ..distributed.world import World
from . import contenders, flags
from .cases import LOSSES, Case, LossWork, Results, Step, results
from .contenders import PACKAGES, CannotRun, Contender, NotInstalled
from .processes import Failed, Runner, launch, runner
from .session import Session
from .trial import combined

DESCRIPTION = """\
Every loss is run once on ranks that hold a few rows each, in its own settings for ranks; gradients are averaged over
ranks, as DDP does, or summed if the loss is set to that, and compared with one process that holds all rows in float64.
gradient: length of the features' gradient over that of one process, 1 is right; cosine: between them; logit_scale: the
same ratio for the scale (and the bias). value: what a rank's loss is, that of the whole batch ("global") or of its own
rows against all ("local rows"). uneven: what happens when ranks have different numbers of rows.
"""
# Figures this near to what they should be are equal to it: they are float32.
NEAR = 1e-3
HEAD = ("", "gradient", "cosine", "logit_scale", "value", "uneven")


def inf_cl_ring(work: LossWork) -> Step:
    """Its ring in plain torch: the one with kernels needs CUDA."""
    try:
        ring = contenders.package("inf_cl").cal_ring_loss
    except ImportError as error:
        raise CannotRun(f"needs {error.name}") from None
    width = work.case.width
    return contenders.both_ways(work, lambda query, key, scale: ring(query, key, scale=scale, head_dim=width))


def _settings() -> Iterator[Contender]:
    for reduction, name in product(("mean", "sum"), LOSSES):
        title = f"megabatch {name}_loss" + (', grad_reduction="sum"' if reduction == "sum" else "")
        made: Any = partial(contenders.ours, grad_reduction=reduction)
        yield Contender(title, "", made, (name,), package="megabatch", ours=True, grad_reduction=reduction)
    for local, grad in product((False, True), repeat=2):
        title = f"open_clip ClipLoss, local_loss={local}, gather_with_grad={grad}"
        made = partial(contenders.open_clip, local_loss=local, gather_with_grad=grad)
        yield Contender(title, "", made, ("clip",), package="open_clip_torch")
    for way in ("bidir", "shift", "reduce", "gather"):
        made = partial(contenders.open_clip, dist_impl=way)
        yield Contender(f"open_clip SigLipLoss, dist_impl={way}", "", made, ("siglip",), package="open_clip_torch")
    both: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    for loss, words, more in (("info_nce", "one direction", {}), ("clip", "both directions", both)):
        title = f"sentence-transformers MultipleNegativesRankingLoss, {words}, gather_across_devices"
        made = partial(contenders.sentence_transformers, gather_across_devices=True, **more)
        yield Contender(title, "", made, (loss,), package="sentence-transformers", normalizes=True)
    for (loss, kind), efficient in product((("nt_xent", "NTXentLoss"), ("supcon", "SupConLoss")), (False, True)):
        title = f"pytorch-metric-learning {kind}, DistributedLossWrapper(efficient={efficient})"
        made = partial(contenders.metric_learning, efficient=efficient)
        yield Contender(title, "", made, (loss,), package="pytorch-metric-learning", normalizes=True)
    made = partial(contenders.lightly, gather_distributed=True)
    title = "lightly NTXentLoss, gather_distributed"
    yield Contender(title, "", made, ("nt_xent",), package="lightly", normalizes=True)
    made = partial(contenders.grad_cache, kind="DistributedContrastiveLoss")
    yield Contender("GradCache DistributedContrastiveLoss", "", made, ("info_nce",), package="GradCache")
    yield Contender("inf_cl cal_ring_loss, both directions", "", inf_cl_ring, ("clip",), package="inf_cl")


SETTINGS = {contender.name: contender for contender in _settings()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    packages = ["megabatch", *PACKAGES]
    parser.add_argument("--ranks", type=flags.positive, default=4, metavar="n", help="number of ranks")
    words = "rows of the batch, on all ranks together"
    parser.add_argument("--rows", type=flags.positive, default=32, metavar="N", help=words)
    parser.add_argument("--width", type=flags.positive, default=16, metavar="D", help="width of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="which losses")
    parser.add_argument("--packages", nargs="+", choices=packages, default=packages, help="whose losses")
    flags.add_device(parser)
    words = "seconds to wait for a rank that does not answer"
    parser.add_argument("--timeout", type=float, default=20.0, metavar="S", help=words)
    flags.add_files(parser, plots=False)


@dataclass
class Outcome:
    """What is known of one loss in its setting. `status`: ok, or why nothing is known."""

    name: str
    package: str
    ours: bool
    status: str = "ok"
    gradient: float | None = None
    cosine: float | None = None
    scale: float | None = None
    bias: float | None = None
    value: str = ""
    uneven: str = ""

    @property
    def wrong(self) -> bool:
        """Only ours can be: others do what they say, whatever that is."""
        right = self.status == "ok" and all(_near(x, 1) for x in (self.gradient, self.cosine, self.scale, self.bias))
        return self.ours and not (right and self.value == "global" and self.uneven == "works")


def main(options: argparse.Namespace) -> int:
    chosen = [one for one in SETTINGS.values() if one.package in options.packages and one.losses[0] in options.losses]
    body = []
    with runner(options.device) as where:
        ranks, rows, width = where.world.size if where.under_torchrun else options.ranks, options.rows, options.width
        if ranks < 2 or rows % ranks:
            got = f"{rows} rows for {ranks} ranks"
            print(f"gradients: --ranks must be 2 or more and divide --rows, got {got}.", file=sys.stderr)
            return 2
        with Session("gradients", options, where, len(chosen), PACKAGES) as session:
            try:
                for contender in chosen:
                    outcome = examine(contender, rows, width, ranks, where, options.timeout)
                    body.append(_cells(outcome))
                    records = [{**asdict(outcome), "wrong": outcome.wrong}]
                    session.add({"rows": rows, "ranks": ranks, "width": width}, records, healthy=not outcome.wrong)
                    session.reached()
            finally:  # Ctrl-C leaves those that are done
                session.show(f"{ranks} ranks, N={rows}, D={width}", HEAD, body)
    return session.exit_code


def examine(contender: Contender, rows: int, width: int, ranks: int, where: Runner, timeout: float = 20.0) -> Outcome:
    outcome = Outcome(contender.name, contender.package, contender.ours)
    # Every other rank has about a third less.
    even = [rows // ranks] * ranks
    uneven = [size - (rank % 2) * max(size * 3 // 8, 1) for rank, size in enumerate(even)]
    try:
        vars(outcome).update(compare(contender, even, width, where, timeout))
    except (Failed, CannotRun) as failure:
        outcome.status = str(failure)
        return outcome
    if where.under_torchrun and not contender.ours:
        outcome.uneven = "not run: a crash would end all ranks of torchrun"
        return outcome
    try:
        other = compare(contender, uneven, width, where, timeout)
        right = _near(other["gradient"], 1) and _near(other["cosine"], 1)
        outcome.uneven = "works" if right else "runs; gradient {gradient:.3f}, cosine {cosine:.3f}".format(**other)
    except Failed as failure:
        outcome.uneven = str(failure)
    return outcome


def step(world: World, contender: Contender, sizes: list[int], width: int) -> Results | str:
    """The results of one rank, or why there are none."""
    case = Case(contender.losses[0], sum(sizes), width, device=str(world.device), ranks=world.size)
    work = case.work(world, sizes)
    try:
        return {name: x.cpu() for name, x in results(contender.make(work), work).items()}
    except (NotInstalled, CannotRun) as reason:
        return str(reason) or "not installed"


def compare(contender: Contender, sizes: list[int], width: int, where: Runner, timeout: float) -> dict[str, Any]:
    """Fields of an outcome. In separate processes, because some crash or hang; under torchrun in its ranks. Raises
    Failed or CannotRun."""
    run = where.run if where.under_torchrun else partial(launch, where.device, patience=timeout)
    found: list[Any] = run(len(sizes), step, contender, sizes, width)
    if isinstance(found[0], str):
        raise CannotRun(found[0])
    case = Case(contender.losses[0], sum(sizes), width, device=where.device)
    truth = {name: x.cpu() for name, x in case.expected(contender.normalizes).items()}
    got = combined(found, contender.grad_reduction)
    mine, exact = (torch.cat([x[name].flatten() for name in truth if "features" in name]) for x in (got, truth))
    scalars = {name: key for name in ("scale", "bias") if (key := f"gradient of the {name}") in got}
    return {
        "gradient": (mine.norm() / exact.norm()).item(),
        "cosine": torch.nn.functional.cosine_similarity(mine, exact, dim=0).item(),
        "value": value_of([each["loss"].item() for each in found], truth["loss"].item()),
        **{name: (got[key] / truth[key]).item() for name, key in scalars.items()},
    }


def value_of(losses: list[float], whole: float) -> str:
    """What the ranks' losses are, seen from the loss of the whole batch."""
    mean, ranks = sum(losses) / len(losses), len(losses)
    kind = "global" if all(_near(loss, losses[0]) for loss in losses) else "local rows"
    if _near(mean, whole):
        return kind
    return f"{kind} × {ranks}" if _near(mean, ranks * whole) else f"{kind} × {mean / whole:.2f}"


def _near(value: float | None, goal: float) -> bool:
    return value is None or math.isclose(value, goal, rel_tol=NEAR)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    last = ("WRONG: " if outcome.wrong else "") + (outcome.uneven if outcome.status == "ok" else outcome.status)
    scale = number(outcome.scale) + ("" if outcome.bias is None else f", bias {number(outcome.bias)}")
    return outcome.name, number(outcome.gradient), number(outcome.cosine), scale, outcome.value or "-", last[:100]
