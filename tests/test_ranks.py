"""One global batch over real ranks: every loss with every option equals one process that holds all rows."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import normalize

import megabatch
from megabatch import reference

from .ranks import Pool, RanksFailed, group_of
from .tolerance import HALF_PRECISION, eps, slack

LOSSES = ("clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss", "supcon_loss")
WIDTH = 5
SIZES = {
    "even": {1: (6,), 2: (4, 4), 3: (4, 4, 4), 4: (4, 4, 4, 4)},
    "uneven": {2: (5, 3), 3: (3, 6, 4), 4: (4, 3, 7, 5)},
    "empty": {2: (0, 6), 3: (5, 0, 3), 4: (3, 0, 6, 4)},
    "alone": {2: (7, 0), 3: (0, 7, 0), 4: (0, 0, 0, 7)},
}
SCALARS = ("logit_scale", "temperature", "logit_bias")
UPSTREAM = 3.0
HOW = ("grad_reduction", "exchange", "overlap", "tile", "memory_budget")  # what the dense twin has no use for


@dataclass(frozen=True)
class Case:
    """One call of a loss on a group.

    Attributes:
        rows: A word of SIZES, or the number of rows on each rank.
        gives: What the call is given beside features: "weight", "ids", "positives", "negatives", "negative_ids",
            "temperature", "logit_bias", "number" (for a scale that is no tensor).
    """

    loss: str
    num_ranks: int
    rows: str | tuple[int, ...] = "uneven"
    gives: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        dtype = [] if self.dtype == torch.float64 else [str(self.dtype).removeprefix("torch.")]
        return "-".join([self.loss, f"{self.num_ranks}ranks", str(self.rows), *self.gives, *options, *dtype])

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[self.rows][self.num_ranks] if isinstance(self.rows, str) else self.rows


# ---- what each rank brings, and all of it together


def shares(case: Case) -> list[dict[str, Tensor]]:
    """The tensors that every rank brings."""
    generator = torch.Generator().manual_seed(3 + case.num_ranks)

    def features(rows: int) -> Tensor:
        x = normalize(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), dim=1)
        return (1.3 * x if case.options.get("normalize") else x).to(case.dtype)

    def integers(rows: int, high: int) -> Tensor:
        return torch.randint(high, (rows,), generator=generator)

    num_ids = max(2, sum(case.sizes) // 3)
    brought = []
    for rank, rows in enumerate(case.sizes):
        share: dict[str, Tensor] = {}
        num_keys = rows + (2 * rank + 1) % 4 if rows or "positives" in case.gives else 0
        num_negatives = (2 * rank + 3) % 5
        for name in {
            "clip_loss": ("image_features", "text_features"),
            "siglip_loss": ("image_features", "text_features"),
            "info_nce_loss": ("query", "key"),
            "nt_xent_loss": ("view1", "view2"),
            "supcon_loss": ("features",),
        }[case.loss]:
            share[name] = features(num_keys if name == "key" else rows)
        if case.loss == "supcon_loss":
            share["labels"] = integers(rows, num_ids)
        if "negatives" in case.gives:
            share["negatives"] = features(num_negatives)
        if "positives" in case.gives:
            share["positives"] = integers(rows, num_keys) if rows else torch.zeros(0, dtype=torch.long)
        if "weight" in case.gives:
            share["weight"] = torch.rand(rows, generator=generator)
            share["weight"][: rows if rank == 1 and sum(case.sizes) > rows else rows // 3] = 0  # rank 1 weighs nothing
        if "ids" in case.gives and case.loss == "info_nce_loss":
            share |= {"query_ids": integers(rows, num_ids), "key_ids": integers(num_keys, num_ids)}
        elif "ids" in case.gives:
            share["ids"] = integers(rows, num_ids)
        if "negative_ids" in case.gives:
            share["negative_ids"] = integers(num_negatives, num_ids)
        brought.append(share)
    return brought


def scalars(case: Case) -> dict[str, Any]:
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    if "number" in case.gives:
        found: dict[str, Any] = {"logit_scale": 4.0}
    elif "temperature" in case.gives:
        found = {"temperature": torch.tensor(0.2, dtype=dtype)}
    else:
        found = {"logit_scale": torch.tensor([6.0], dtype=dtype)}
    if (case.loss == "siglip_loss" and "number" not in case.gives) or "logit_bias" in case.gives:
        found["logit_bias"] = torch.tensor(-1.5, dtype=dtype)
    return found


def together(brought: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch of all ranks: rows in rank order, positives as rows of all keys."""
    batch = {name: torch.cat([share[name] for share in brought]) for name in brought[0] if name != "positives"}
    if "key" in batch:
        positives, offset = [], 0
        for share in brought:
            positives.append(offset + share.get("positives", torch.arange(len(share["query"]))))
            offset += len(share["key"])
        batch["positives"] = torch.cat(positives)
    return batch


def of_ranks(loss: str, per_row: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """One value per row of the whole batch, cut into what each rank gets."""
    if loss != "nt_xent_loss":
        return list(per_row.split(list(sizes)))
    first, second = (view.split(list(sizes)) for view in per_row.chunk(2))
    return [torch.cat(views) for views in zip(first, second, strict=True)]


def upstream_of(value: Tensor, rank: int) -> Tensor:
    """What the caller makes of the loss: the same everywhere, or with one loss per row something of its own."""
    if value.dim() == 0:
        return torch.tensor(UPSTREAM, dtype=value.dtype)
    return torch.linspace(-1, 2, len(value), dtype=value.dtype) + 0.4 * rank


# ---- a step on a rank, and the same in one process


@dataclass
class Answer:
    value: Tensor
    stats: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def leaves(tensors: dict[str, Any], frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Copies; those of floating tensors collect gradients, but for weights and what is frozen."""
    return {
        name: x.clone().requires_grad_(x.is_floating_point() and name != "weight" and name not in frozen)
        if isinstance(x, Tensor)
        else x
        for name, x in tensors.items()
    }


def step(loss: Any, rank: int, inputs: dict[str, Any], **options: Any) -> Answer:
    result = loss(**inputs, **{"normalize": False, **options})
    value, stats = result if options.get("return_stats") else (result, {})
    (upstream_of(value, rank) * value).sum().backward()
    wanted = {name: x.grad for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return Answer(value.detach(), stats, {name: grad for name, grad in wanted.items() if name != "weight"})


def solve(rank: int, group: Any, cases: list[Case]) -> list[Answer | str]:
    """Every case on this rank; a text where it raised."""
    return [_solve(rank, group, case) for case in cases]


def _solve(rank: int, group: Any, case: Case) -> Answer | str:
    inputs = leaves(shares(case)[rank] | scalars(case))
    try:
        return step(getattr(megabatch, case.loss), rank, inputs, group=group, **case.options)
    except (ValueError, TypeError) as error:  # refused on all ranks alike: the next may work
        return f"{type(error).__name__}: {error}"


def expected_of(case: Case) -> list[Answer]:
    """What every rank must get, from the dense twin in float64 on the whole batch."""
    exact = [
        leaves({name: x.double() if x.is_floating_point() else x for name, x in share.items()})
        for share in shares(case)
    ]
    numbers = leaves({name: x.double() if isinstance(x, Tensor) else x for name, x in scalars(case).items()})
    options = {name: value for name, value in case.options.items() if name not in HOW}
    result = getattr(reference, case.loss)(**together(exact), **numbers, **options)
    value, stats = result if options.get("return_stats") else (result, {})
    per_row = value.dim() == 1
    values = of_ranks(case.loss, value, case.sizes) if per_row else [value] * case.num_ranks
    if per_row:
        torch.stack([(upstream_of(own, rank) * own).sum() for rank, own in enumerate(values)]).sum().backward()
    else:
        (UPSTREAM * value).backward()
    averaged = case.options.get("grad_reduction", "mean") == "mean"
    of_features = 1 if per_row or not averaged else case.num_ranks
    of_scalars = 1 if averaged and not per_row else 1 / case.num_ranks
    answers = []
    for own, share in zip(values, exact, strict=True):
        grads = {name: of_features * x.grad for name, x in share.items() if x.requires_grad}
        grads |= {name: of_scalars * x.grad for name, x in numbers.items() if isinstance(x, Tensor)}
        answers.append(Answer(own.detach(), stats, grads))
    return answers


def assert_close(ours: Tensor, expected: Tensor, what: str, largest: float) -> None:
    """As near as the dtype allows, measured by the largest number of its kind on any rank."""
    assert ours.shape == expected.shape, what
    # Of a half: the slope, which may be cut off, the gradient, and what ranks have added up.
    tolerance = (
        1e-11 if ours.dtype == torch.float64 else 2e-5 + (2 * eps(ours.dtype) if ours.dtype in HALF_PRECISION else 0)
    )
    error = (ours.double() - expected.double()).abs().max().item() if ours.numel() else 0.0
    assert error <= tolerance * max(largest, 0.1), f"{what}: off by {error:.3g}, the largest is {largest:.3g}"


def assert_answers(ours: list[Answer], expected: list[Answer]) -> None:
    def largest(tensors: Iterator[Tensor | None]) -> float:
        return max((t.abs().max().item() for t in tensors if t is not None and t.numel()), default=0.0)

    for rank, (answer, wanted) in enumerate(zip(ours, expected, strict=True)):
        assert_close(answer.value, wanted.value, f"value on rank {rank}", largest(iter([wanted.value])))
        assert answer.stats.keys() == wanted.stats.keys()
        for name, value in answer.stats.items():
            assert_close(value, wanted.stats[name], f"{name} on rank {rank}", largest(iter([wanted.stats[name]])))
            assert torch.equal(value, ours[0].stats[name]), f"{name} differs between rank 0 and rank {rank}"
        if answer.value.dim() == 0:
            assert torch.equal(answer.value, ours[0].value), f"value differs between rank 0 and rank {rank}"
        assert answer.grads.keys() == wanted.grads.keys()
        for name, grad in answer.grads.items():
            what = f"gradient of {name} on rank {rank}"
            if wanted.grads[name] is None:
                assert grad is None, what
                continue
            assert grad is not None, what
            assert_close(grad, wanted.grads[name], what, largest(other.grads.get(name) for other in expected))
            first = ours[0].grads[name]
            if name in SCALARS and first is not None:
                assert torch.equal(grad, first), f"{what} differs from that on rank 0"


# ---- the cases


def mixes(loss: str) -> Iterator[dict[str, Any]]:
    """Fields of cases, without the number of ranks and the way they meet."""

    def mix(rows: str = "uneven", *gives: str, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
        return {"rows": rows, "gives": gives, "options": options, "dtype": dtype}

    softmax, supcon, nce = loss != "siglip_loss", loss == "supcon_loss", loss == "info_nce_loss"
    smooth = {"label_smoothing": 0.2} if softmax else {}
    ids = () if supcon else ("ids",)
    yield mix("even")
    yield mix("even", tile=2, return_stats=True)
    yield mix("uneven", tile=2)
    yield mix("uneven", "weight", tile=3, return_stats=True, **smooth)
    yield mix("uneven", "number", tile=3, reduction="sum")
    yield mix("uneven", "temperature", normalize=True, tile=2)
    yield mix("uneven", grad_reduction="sum", tile=3)
    yield mix("uneven", "weight", grad_reduction="sum", reduction="sum", **smooth)
    yield mix("uneven", reduction="none", tile=2)
    yield mix("uneven", "weight", reduction="none", normalize=True, return_stats=True, grad_reduction="sum", **smooth)
    yield mix("uneven", overlap=False, tile=4)
    yield mix("uneven", memory_budget="64MiB", tile=2)
    yield mix("uneven", "weight", memory_budget="64MiB", reduction="none", **smooth)
    yield mix("uneven", memory_budget=40_000, tile=3, normalize=True)
    yield mix("empty", tile=3, return_stats=True)
    yield mix("empty", *ids, "weight", normalize=True, reduction="none", tile=2, **smooth)
    yield mix("empty", memory_budget="64MiB", grad_reduction="sum", **smooth)
    yield mix("alone", return_stats=True)
    yield mix("alone", reduction="none", tile=3)
    if not supcon:
        yield mix("uneven", "ids", same_ids="mask", tile=2, return_stats=True)
        yield mix("uneven", "ids", same_ids="positive", tile=3, return_stats=True)
        yield mix("uneven", "ids", "weight", same_ids="mask", normalize=True, reduction="sum", **smooth)
        yield mix("uneven", "ids", "weight", same_ids="positive", normalize=True, reduction="none", tile=2, **smooth)
        yield mix("empty", "ids", same_ids="positive", return_stats=True, memory_budget="64MiB", tile=3)
    if loss == "clip_loss":
        yield mix("uneven", "logit_bias", tile=2)
    if nce:
        yield mix("uneven", "negatives", tile=2, return_stats=True)
        yield mix("uneven", "positives", tile=3, return_stats=True)
        yield mix("empty", "positives", "negatives", normalize=True, tile=2)
        yield mix("empty", "positives", "negatives", "weight", reduction="none", label_smoothing=0.1)
        yield mix("uneven", "ids", "negatives", same_ids="mask", tile=3)
        yield mix("uneven", "ids", "negatives", "negative_ids", same_ids="mask", tile=2, return_stats=True)
        yield mix("uneven", "ids", "positives", "negatives", "negative_ids", same_ids="positive", reduction="none")
        yield mix("alone", "positives", "negatives", "ids", "negative_ids", "weight", grad_reduction="sum", tile=3)
        yield mix("uneven", "negatives", memory_budget="64MiB", grad_reduction="sum", tile=4)
    for dtype in (torch.float32, torch.bfloat16):
        yield mix("uneven", dtype=dtype, tile=3)
        yield mix("uneven", "weight", dtype=dtype, normalize=True, return_stats=True, reduction="sum", **smooth)
        yield mix("empty", dtype=dtype, reduction="none", tile=2)
    yield mix("uneven", dtype=torch.float16, normalize=True)


def random_mix(loss: str, num_ranks: int, seed: int) -> Case:
    """Anything that may be asked for together."""
    rng = random.Random(f"{loss} {num_ranks} {seed}")

    def perhaps(chance: float, *choices: Any) -> list[Any]:
        return [rng.choice(choices)] if rng.random() < chance else []

    rows = [rng.choice((0, 1, 2, 3, 5, 9)) for _ in range(num_ranks)]
    rows[rng.randrange(num_ranks)] += 2  # a batch of one row has nothing to contrast
    ids = [] if loss == "supcon_loss" else perhaps(0.5, "ids")
    extras = [*perhaps(0.5, "positives"), *perhaps(0.6, "negatives")] if loss == "info_nce_loss" else []
    if ids and "negatives" in extras:
        extras += perhaps(0.5, "negative_ids")
    gives = [*perhaps(0.4, "weight"), *perhaps(0.3, "temperature", "number"), *ids, *extras]
    choices = {
        "same_ids": perhaps(len(ids), "mask", "positive"),
        "label_smoothing": [] if loss == "siglip_loss" else perhaps(0.4, 0.1, 0.5, 1.0),
        "reduction": perhaps(1.0, "mean", "sum", "none"),
        "grad_reduction": perhaps(1.0, "mean", "sum"),
        "normalize": perhaps(0.4, True),
        "return_stats": perhaps(0.5, True),
        "overlap": perhaps(0.2, False),
        "tile": perhaps(0.8, 1, 2, 3, 4, 64),
        "memory_budget": perhaps(0.6, 40_000, "1MiB", "64MiB"),
        "exchange": perhaps(1.0, "ring", "ring", "gather", "auto"),
    }
    options = {name: value for name, (value,) in ((name, choice) for name, choice in choices.items() if choice)}
    dtype = rng.choice([torch.float64] * 4 + [torch.float32, torch.bfloat16])
    return Case(loss, num_ranks, tuple(rows), tuple(gives), options, dtype)


def cases(loss: str, num_ranks: int) -> list[Case]:
    found = []
    for index, mix in enumerate(mixes(loss)):
        for exchange in ("ring", "gather"):
            if exchange == "gather" and num_ranks != 3 and index % 2 == num_ranks // 4:
                continue  # two ranks show one half of the mixes, four the other, three all
            options = {**mix["options"], "exchange": exchange}
            found.append(Case(loss, num_ranks, **{**mix, "options": options}))
    found.append(Case(loss, num_ranks, options={"exchange": "auto", "return_stats": True}))
    return found + [random_mix(loss, num_ranks, seed) for seed in range(10)]


@pytest.fixture(scope="module")
def solved(pool: Pool) -> Any:
    """Answers of the ranks, asked for all cases of a loss and a number of ranks at once."""
    known: dict[tuple[str, int], dict[str, Any]] = {}

    def look_up(case: Case) -> list[Answer]:
        of_loss = (case.loss, case.num_ranks)
        if of_loss not in known:
            asked = cases(*of_loss)
            try:
                answers = zip(*pool.run(case.num_ranks, solve, asked), strict=True)
                known[of_loss] = {str(one): list(of_case) for one, of_case in zip(asked, answers, strict=True)}
            except RanksFailed as error:
                known[of_loss] = {str(one): error for one in asked}
        found = known[of_loss][str(case)]
        if isinstance(found, RanksFailed):
            raise found
        for rank, answer in enumerate(found):
            assert isinstance(answer, Answer), f"rank {rank}: {answer}"
        return found

    return look_up


ALL_CASES = list(chain.from_iterable(cases(loss, num_ranks) for loss in LOSSES for num_ranks in (2, 3, 4)))


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_ranks_equal_one_process(case: Case, solved: Any) -> None:
    assert_answers(solved(case), expected_of(case))


def test_the_cases_cross_ranks() -> None:
    """Rows of one id or label lie on different ranks, and some rows have none of their own rank."""
    for loss in LOSSES:
        case = Case(loss, 3, gives=() if loss == "supcon_loss" else ("ids",))
        name = {"supcon_loss": "labels", "info_nce_loss": "query_ids"}.get(loss, "ids")
        first, second, _ = (set(share[name].tolist()) for share in shares(case))
        assert first & second
        assert len(set(together(shares(case))[name].tolist())) < sum(case.sizes)


# ---- at home in torch, on ranks too


def compiled_and_eager(rank: int, group: Any, loss: str, exchange: str) -> list[Answer]:
    torch._dynamo.reset()  # recompilations are counted over the life of a rank
    case = Case(loss, dist.get_world_size(group))

    def call(**inputs: Any) -> Any:
        return getattr(megabatch, loss)(**inputs, group=group, exchange=exchange)

    return [
        step(function, rank, leaves(shares(case)[rank] | scalars(case)))
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_compiled_step_equals_an_eager_one(pool: Pool, loss: str) -> None:
    for num_ranks, exchange in ((2, "ring"), (3, "gather")):
        answers = pool.run(num_ranks, compiled_and_eager, loss, exchange)
        expected = expected_of(Case(loss, num_ranks))
        assert_answers([compiled for _, compiled in answers], expected)
        for eager, compiled in answers:
            assert torch.equal(eager.value, compiled.value)
            for name, grad in eager.grads.items():
                assert torch.equal(grad, compiled.grads[name]), name


def without_grad(rank: int, group: Any, loss: str, mode: str) -> Tensor:
    case = Case(loss, dist.get_world_size(group))
    with getattr(torch, mode)():
        value = getattr(megabatch, loss)(**leaves(shares(case)[rank] | scalars(case)), group=group, normalize=False)
    assert not value.requires_grad
    return value


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients_the_value_is_the_same(pool: Pool, loss: str, mode: str) -> None:
    values = pool.run(3, without_grad, loss, mode)
    for value in values:
        torch.testing.assert_close(value, expected_of(Case(loss, 3))[0].value)
        assert torch.equal(value, values[0])


# ---- groups


def on_a_mesh(rank: int, group: Any, cases: list[Case]) -> list[Answer | str]:
    size = dist.get_world_size(group)
    whole_world = size == dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,)) if whole_world else DeviceMesh.from_group(group, "cpu")
    return solve(rank, mesh, cases)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_device_mesh_of_one_dimension_is_a_group(pool: Pool, num_ranks: int) -> None:
    asked = [Case(loss, num_ranks, options={"tile": 2}) for loss in LOSSES]
    for case, *answers in zip(asked, *pool.run(num_ranks, on_a_mesh, asked), strict=True):
        assert_answers(answers, expected_of(case))


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_any_subgroup_will_do(pool: Pool, exchange: str) -> None:
    """Ranks 1 and 3 of four, while the others do nothing."""
    asked = [Case(loss, 2, options={"exchange": exchange}) for loss in LOSSES]
    for case, *answers in zip(asked, *pool.run((1, 3), solve, asked), strict=True):
        assert_answers(answers, expected_of(case))


def in_two_groups(rank: int, group: Any) -> dict[str, list[Answer]]:
    """Every rank in the world and in a smaller group, or two; the losses of all of them are added up."""
    case = Case("clip_loss", 4)
    inputs = leaves(shares(case)[rank] | scalars(case))
    groups = {"world": group}
    if rank < 2:
        groups["low"] = group_of(0, 1)
    if rank in (1, 3):
        groups["odd"] = group_of(1, 3)
    values = {name: megabatch.clip_loss(**inputs, group=one, normalize=False) for name, one in groups.items()}
    torch.stack(list(values.values())).sum().backward()
    return {
        name: [Answer(value.detach(), {}, {k: x.grad for k, x in inputs.items()})] for name, value in values.items()
    }


def test_several_groups_serve_in_one_step(pool: Pool) -> None:
    answers = pool.run(4, in_two_groups)
    case = Case("clip_loss", 4)
    expected = [leaves(share) for share in shares(case)]
    scale = [leaves(scalars(case)) for _ in expected]
    for name, members in {"world": (0, 1, 2, 3), "low": (0, 1), "odd": (1, 3)}.items():
        batch = together([expected[member] for member in members])
        number = torch.tensor([6.0], dtype=torch.float64, requires_grad=True)
        value = reference.clip_loss(**batch, logit_scale=number)
        (len(members) * value).backward()
        for member in members:
            torch.testing.assert_close(answers[member][name][0].value, value.detach())
            had = scale[member]["logit_scale"].grad
            scale[member]["logit_scale"].grad = number.grad / len(members) + (0 if had is None else had)
    for rank, share in enumerate(expected):
        grads = answers[rank]["world"][0].grads
        for name, x in (share | scale[rank]).items():
            torch.testing.assert_close(grads[name], x.grad, msg=lambda m, rank=rank, name=name: f"{rank} {name}: {m}")


def of_one_rank(rank: int, group: Any, loss: str) -> list[Answer]:
    case = Case(loss, 1, "even")
    inputs = (leaves(shares(case)[0] | scalars(case)) for _ in range(2))
    function = getattr(megabatch, loss)
    return [step(function, 0, given, group=where) for given, where in zip(inputs, (group, None), strict=True)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_of_one_rank_is_this_process_alone(pool: Pool, loss: str) -> None:
    ((in_group, alone),) = pool.run(1, of_one_rank, loss)
    assert_answers([alone], expected_of(Case(loss, 1, "even")))
    assert torch.equal(in_group.value, alone.value)
    for name, grad in alone.grads.items():
        assert torch.equal(in_group.grads[name], grad)


def alone_among_others(rank: int, group: Any, loss: str) -> Answer:
    case = Case(loss, dist.get_world_size(group))
    return step(getattr(megabatch, loss), 0, leaves(shares(case)[rank] | scalars(case)), group=None)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_a_group_every_rank_is_alone(pool: Pool, loss: str) -> None:
    case = Case(loss, 2)
    for share, answer in zip(shares(case), pool.run(2, alone_among_others, loss), strict=True):
        inputs = leaves(share | scalars(case))
        expected = step(getattr(reference, loss), 0, inputs)
        torch.testing.assert_close(answer.value, expected.value)
        for name, grad in answer.grads.items():
            torch.testing.assert_close(grad, expected.grads[name])


def left_out(rank: int, group: Any, loss: str) -> str:
    case = Case(loss, 4)
    with pytest.raises(ValueError) as caught:
        getattr(megabatch, loss)(**shares(case)[rank], **scalars(case), normalize=False)
    return str(caught.value)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_left_out_is_refused_where_there_are_several_ranks(pool: Pool, loss: str) -> None:
    for message in pool.run(4, left_out, loss):
        assert message.startswith(f"{loss}: group must be given, because torch.distributed runs with 4 ranks")
        assert "group=torch.distributed.group.WORLD" in message
        assert "group=None" in message


# ---- who needs gradients


def with_frozen(rank: int, group: Any, case: Case, frozen: tuple[tuple[str, ...], ...]) -> Answer:
    inputs = leaves(shares(case)[rank] | scalars(case), frozen[rank])
    value = getattr(megabatch, case.loss)(**inputs, group=group, normalize=False, **case.options)
    assert value.requires_grad, f"rank {rank} must join"
    (upstream_of(value, rank) * value).sum().backward()
    wanted = {name: x.grad for name, x in inputs.items() if x.is_floating_point()}
    return Answer(value.detach(), {}, wanted)


FREEZERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "one rank needs nothing": (("first", "second", "logit_scale", "logit_bias"), (), ()),
    "one rank's scale is frozen": ((), ("logit_scale", "logit_bias"), ()),
    "the second side is frozen": (("second",), ("second",), ("second",)),
    "the first side is frozen": (("first",), ("first",), ("first",)),
    "only one rank's features need any": (
        ("first", "second", "logit_scale", "logit_bias"),
        ("logit_scale", "logit_bias"),
        ("first", "second", "logit_scale", "logit_bias"),
    ),
    "only the scale needs one": (("first", "second"), ("first", "second"), ("first", "second")),
    "only one rank's scale needs one": (
        ("first", "second"),
        ("first", "second", "logit_scale", "logit_bias"),
        ("first", "second", "logit_scale", "logit_bias"),
    ),
    "every rank needs something else": (
        ("second", "logit_scale", "logit_bias"),
        ("first", "logit_scale", "logit_bias"),
        ("first", "second"),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("words", FREEZERS)
def test_ranks_may_need_different_gradients(pool: Pool, words: str, loss: str) -> None:
    for options in ({"exchange": "ring"}, {"exchange": "gather", "reduction": "none"}):
        case = Case(loss, 3, gives=("negatives",) if loss == "info_nce_loss" else (), options=options)
        names = [name for name, x in shares(case)[0].items() if x.dim() == 2]
        meant = {"first": names[:1], "second": names[1:] or names}
        frozen = tuple(tuple(n for word in rank for n in meant.get(word, [word])) for rank in FREEZERS[words])
        if all({*names, "logit_scale"} <= set(rank) for rank in frozen):
            continue  # supcon has one side: nobody needs anything
        if loss == "supcon_loss" and all(set(names) <= set(rank) for rank in frozen) and "scale" not in words:
            frozen = tuple(() for _ in frozen)
        expected = expected_of(case)
        for answer, hidden in zip(expected, frozen, strict=True):
            answer.grads |= {name: None for name in hidden if name in answer.grads}
        assert_answers(pool.run(3, with_frozen, case, frozen), expected)


# ---- graphs


def in_flight(rank: int, group: Any, order: str) -> list[dict[str, Tensor | None]]:
    """Two losses of the same features at once. Returns the gradients after their backward, in some order."""
    case = Case("siglip_loss", 3)
    inputs = leaves(shares(case)[rank] | scalars(case))
    one = megabatch.clip_loss(**inputs, group=group, normalize=False, exchange="ring")
    two = megabatch.siglip_loss(**inputs, group=group, normalize=False, exchange="ring", tile=2)
    if order == "together":
        (UPSTREAM * (one + two)).backward()
    else:
        for loss in (one, two) if order == "in order" else (two, one):
            (UPSTREAM * loss).backward()
    return [{name: x.grad for name, x in inputs.items()}]


@pytest.mark.parametrize("order", ["in order", "reversed", "together"])
def test_two_losses_may_be_in_flight(pool: Pool, order: str) -> None:
    clip = expected_of(Case("clip_loss", 3, gives=("logit_bias",)))
    siglip = expected_of(Case("siglip_loss", 3))
    for rank, (grads,) in enumerate(pool.run(3, in_flight, order)):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, clip[rank].grads[name] + siglip[rank].grads[name])


def backward_twice(rank: int, group: Any, case: Case) -> list[dict[str, Tensor | None]]:
    inputs = leaves(shares(case)[rank] | scalars(case))
    loss = UPSTREAM * getattr(megabatch, case.loss)(**inputs, group=group, normalize=False, **case.options)
    loss.backward(retain_graph=True)
    once = {name: x.grad.clone() for name, x in inputs.items() if x.grad is not None}
    loss.backward()
    return [once, {name: x.grad for name, x in inputs.items() if x.grad is not None}]


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_retained_graph_may_be_walked_again(pool: Pool, loss: str, budget: str | None) -> None:
    case = Case(loss, 3, options={"tile": 2, "memory_budget": budget})
    expected = expected_of(case)
    for rank, (once, twice) in enumerate(pool.run(3, backward_twice, case)):
        for name, grad in once.items():
            torch.testing.assert_close(grad, expected[rank].grads[name])
            assert torch.equal(twice[name], 2 * grad)


def no_extras_on_rank_1(rank: int, group: Any, case: Case) -> Answer:
    inputs = leaves(shares(case)[rank] | scalars(case))
    if rank == 1:
        assert len(inputs.pop("negatives")) == 0
    return step(megabatch.info_nce_loss, rank, inputs, group=group, **case.options)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_a_rank_without_extra_negatives_may_leave_them_out(pool: Pool, exchange: str) -> None:
    case = Case("info_nce_loss", 2, gives=("negatives",), options={"exchange": exchange})
    expected = expected_of(case)
    del expected[1].grads["negatives"]
    assert_answers(pool.run(2, no_extras_on_rank_1, case), expected)


# ---- numbers


def far_apart(case: Case, scale: float) -> list[dict[str, Tensor]]:
    """What the ranks bring: a thousand times larger on one than on another, logits from 0.02 to 5000; or, at scale 100,
    one row of one rank opposite to all others."""
    brought = shares(case)
    for share, length in zip(brought, (0.03, 30.0, 1.0), strict=True):
        share |= {name: length * x for name, x in share.items() if x.dim() == 2 and scale != 100}
    if scale == 100:
        for share in brought:
            share |= {name: normalize(1 + 0.05 * x, dim=1) for name, x in share.items() if x.dim() == 2}
        next(x for x in brought[1].values() if x.dim() == 2)[0].neg_()
    return brought


def far_apart_on(rank: int, group: Any, case: Case, scale: float) -> Answer:
    inputs = leaves(
        far_apart(case, scale)[rank] | scalars(case) | {"logit_scale": torch.tensor([scale], dtype=torch.float64)}
    )
    # Any strides will do, too.
    strided = {name: x.T.contiguous().T if x.dim() == 2 else x for name, x in inputs.items()}
    value = getattr(megabatch, case.loss)(**strided, group=group, normalize=False, **case.options)
    value.backward()
    return Answer(value.detach(), {}, {name: x.grad for name, x in inputs.items() if x.requires_grad})


@pytest.mark.parametrize("scale", [6.0, 100.0])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_any_size_meet_across_ranks(pool: Pool, loss: str, exchange: str, scale: float) -> None:
    case = Case(loss, 3, options={"exchange": exchange, "tile": 2})
    brought = [leaves(share) for share in far_apart(case, scale)]
    numbers = leaves(scalars(case) | {"logit_scale": torch.tensor([scale], dtype=torch.float64)})
    value = getattr(reference, loss)(**together(brought), **numbers)
    value.backward()
    for rank, answer in enumerate(pool.run(3, far_apart_on, case, scale)):
        torch.testing.assert_close(answer.value, value.detach())
        for name, grad in answer.grads.items():
            expected = numbers[name].grad if name in SCALARS else 3 * brought[rank][name].grad
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9)


def fitted(loss: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """A batch that is learnt: losses of 1e-4 at scale 100, between rows that are much alike."""
    case = Case(loss, 3)
    names = [name for name, x in shares(case)[0].items() if x.dim() == 2]
    generator = torch.Generator().manual_seed(8)

    def noise(rows: int) -> Tensor:
        return normalize(torch.randn(rows, 24, generator=generator, dtype=torch.float64), dim=1)

    common, brought = noise(1), []
    for rows in case.sizes:
        rows_of_both = normalize(common + 0.4 * noise(rows), dim=1)
        brought.append({name: normalize(rows_of_both + 0.03 * noise(rows), dim=1).float().to(dtype) for name in names})
    return brought


def fitted_on(rank: int, group: Any, loss: str) -> Answer:
    inputs = leaves(fitted(loss, torch.float32)[rank] | {"logit_scale": torch.tensor(100.0)})
    return step(getattr(megabatch, loss), rank, inputs, group=group, tile=2)


@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss"])
def test_a_fitted_batch_is_as_precise_as_the_dense_loss(pool: Pool, loss: str) -> None:
    found = {}
    for dtype in (torch.float64, torch.float32):
        brought = [leaves(share) for share in fitted(loss, dtype)]
        scale = torch.tensor(100.0, dtype=dtype, requires_grad=True)
        value = getattr(reference, loss)(**together(brought), logit_scale=scale)
        (UPSTREAM * value).backward()
        features = torch.cat([3 * x.grad.double() for share in brought for x in share.values() if x.requires_grad])
        found[dtype] = [value.detach().double(), scale.grad.double(), features]
    assert loss == "siglip_loss" or 1e-6 < found[torch.float64][0] < 1e-2
    answers = pool.run(3, fitted_on, loss)
    ours = [answers[0].value.double(), answers[0].grads["logit_scale"].double()]
    grads = (grad for answer in answers for name, grad in answer.grads.items() if name not in SCALARS)
    ours.append(torch.cat(list(grads)).double())
    for what, mine, dense, exact in zip(
        ("value", "d scale", "d features"), ours, found[torch.float32], found[torch.float64], strict=True
    ):
        error, peer = ((one - exact).abs().max() for one in (mine, dense))
        # As one process is judged: see tests/test_numbers.py.
        natural = 3 * 100 / 13 if exact.dim() == 2 else 1.0
        allowed = peer + slack(torch.float32, exact.abs().max().item(), UPSTREAM * natural, logits=100.0)
        assert error <= allowed, f"{what}: error {error:.2e}, dense {peer:.2e}, allowed {allowed:.2e}"


def with_nan_on_rank_1(rank: int, group: Any, case: Case) -> Tensor:
    inputs = leaves(shares(case)[rank] | scalars(case))
    if rank == 1:
        next(iter(inputs.values())).data[0, 0] = torch.nan
    value = getattr(megabatch, case.loss)(**inputs, group=group, normalize=False, **case.options)
    value.backward()
    return value.detach()


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_nan_on_one_rank_is_seen_on_all(pool: Pool, loss: str, exchange: str) -> None:
    values = pool.run(3, with_nan_on_rank_1, Case(loss, 3, options={"exchange": exchange}))
    assert all(value.isnan() for value in values)


# ---- retrieval


def find(rank: int, group: Any, asked: list[dict[str, Any]]) -> list[Any]:
    found = []
    for options in asked:
        options = dict(options)
        query, key, positives = queries_and_keys(dist.get_world_size(group), options.pop("rows"))[rank]
        dtype = options.pop("dtype")
        query, key = query.to(dtype), key.to(dtype)
        options["group"] = group
        found.append(
            (
                megabatch.retrieval_ranks(query, key, positives=positives, **options),
                *(x.double() for x in megabatch.similarity_topk(query, key, 4, **options)),
            )
        )
    return found


def queries_and_keys(num_ranks: int, rows: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Numbers that every dtype holds and adds up exactly, so that scores tie and ties are the same everywhere."""
    generator = torch.Generator().manual_seed(num_ranks)
    found = []
    for rank, size in enumerate(SIZES[rows][num_ranks]):
        query = torch.randint(-4, 5, (size, WIDTH), generator=generator).double()
        key = torch.randint(-4, 5, (size + rank, WIDTH), generator=generator).double()
        positives = torch.randint(max(len(key), 1), (size,), generator=generator)
        found.append((query, key, positives))
    return found


@pytest.mark.parametrize("rows", ["even", "uneven", "empty", "alone"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_retrieval_on_ranks_equals_the_dense_answer(pool: Pool, num_ranks: int, rows: str) -> None:
    ways: list[dict[str, Any]] = [
        {"exchange": exchange, "overlap": overlap, "normalize": normalized}
        for exchange, overlap in (("ring", True), ("ring", False), ("gather", True), ("auto", True))
        for normalized in (False, True)
    ]
    dtypes = (torch.float64, torch.float32)
    asked = [way | {"rows": rows, "dtype": dtypes[index // 2 % 2]} for index, way in enumerate(ways)]
    asked.append({"rows": rows, "dtype": torch.bfloat16, "tile": 64})
    brought = queries_and_keys(num_ranks, rows)
    all_keys = torch.cat([key for _, key, _ in brought])
    offsets = torch.tensor([0, *(len(key) for _, key, _ in brought)]).cumsum(0)
    answers = pool.run(num_ranks, find, asked)
    for index, options in enumerate(asked):
        for rank, (query, _, positives) in enumerate(brought):
            ranks, values, indices = answers[rank][index]
            normalized = options.get("normalize", False)
            if len(query) == 0:
                assert ranks.shape == (0,)
                assert values.shape == indices.shape == (0, 4)
                continue
            if not normalized:  # else equal scores are a matter of rounding
                expected = reference.retrieval_ranks(query, all_keys, positives=positives + offsets[rank])
                assert torch.equal(ranks, expected), options
            best, _ = reference.similarity_topk(query, all_keys, 4, normalize=normalized)
            torch.testing.assert_close(values, best, rtol=1e-6, atol=1e-6)
            if normalized:
                query, keys = normalize(query, dim=1), normalize(all_keys, dim=1)
            else:
                keys = all_keys
            chosen = (query[:, None] * keys[indices.long()]).sum(2)
            torch.testing.assert_close(chosen, best, rtol=1e-6, atol=1e-6)
            assert all(len(set(row)) == 4 for row in indices.tolist()), "a key twice"


def row_i_with_row_i(rank: int, group: Any) -> Tensor:
    query, key, _ = queries_and_keys(3, "uneven")[rank]
    return megabatch.retrieval_ranks(query, key, group=group)


def test_by_default_query_i_belongs_with_key_i_of_its_rank(pool: Pool) -> None:
    brought = queries_and_keys(3, "uneven")
    all_keys, offset = torch.cat([key for _, key, _ in brought]), 0
    for (query, key, _), ranks in zip(brought, pool.run(3, row_i_with_row_i), strict=True):
        positives = offset + torch.arange(len(query))
        assert torch.equal(ranks, reference.retrieval_ranks(query, all_keys, positives=positives))
        offset += len(key)


def _with_ids_of_its_own_width(rank: int, group: Any) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    sides = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.tensor([[0, 1, 2], [2, 3, 0]][rank], dtype=[torch.int64, torch.uint8][rank])
    return megabatch.clip_loss(*sides, 2.0, ids=ids, normalize=False, group=group)


def test_ids_of_different_integer_types_meet(pool: Pool) -> None:
    sides = [[torch.randn(3, 5, generator=g, dtype=torch.float64) for _ in range(2)] for g in map(_seeded, range(2))]
    first, second = (torch.cat(side) for side in zip(*sides, strict=True))
    expected = reference.clip_loss(first, second, 2.0, ids=torch.tensor([0, 1, 2, 2, 3, 0]), normalize=False)
    for value in pool.run(2, _with_ids_of_its_own_width):
        torch.testing.assert_close(value, expected)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _loss_of_frozen_inputs(rank: int, group: Any) -> tuple[bool, bool]:
    frozen = [torch.eye(4, 5) for _ in range(2)]
    trained = [side.clone().requires_grad_(rank == 1) for side in frozen]
    losses = [megabatch.clip_loss(*sides, 2.0, group=group, normalize=False) for sides in (frozen, trained)]
    losses[1].backward()
    return losses[0].requires_grad, losses[1].requires_grad


def test_a_loss_requires_grad_if_any_rank_needs_one(pool: Pool) -> None:
    assert pool.run(2, _loss_of_frozen_inputs) == [(False, True), (False, True)]


def _compiled_where_one_rank_needs_no_gradient(rank: int, group: Any, frozen: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(rank)
    rows, columns = (normalize(torch.randn(4, 8, generator=generator), dim=1) for _ in range(2))
    rows, columns = (x.requires_grad_(rank != frozen) for x in (rows, columns))

    def loss(rows: Tensor, columns: Tensor) -> Tensor:
        value = megabatch.clip_loss(rows, columns, 5.0, normalize=False, group=group)
        assert isinstance(value, Tensor)
        return value

    torch._dynamo.reset()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(rows, columns).backward()
    compiled, rows.grad, columns.grad = rows.grad, None, None
    loss(rows, columns).backward()
    if compiled is not None:
        assert torch.equal(compiled, rows.grad)
    return compiled


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_compiled_rank_without_gradients_joins_the_backward_of_the_others(pool: Pool, frozen: int) -> None:
    gradients = pool.run(2, _compiled_where_one_rank_needs_no_gradient, frozen)
    assert [gradient is None for gradient in gradients] == [rank == frozen for rank in range(2)]
