"""pytorch-metric-learning's losses and their stand-ins: the same values and gradients, through its own machinery."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from pytorch_metric_learning.utils import loss_and_miner_utils
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor

from megabatch.integrations import pytorch_metric_learning as ours

from .ranks import LoggedLines, Pool
from .test_memory import MIB, LargestTensor, LiveBytes

NAMES = ("NTXentLoss", "SupConLoss")
LABELS = {
    "pairs": [3, 1, 4, 0, 0, 4, 1, 3],
    "unsorted": [5, 2, 5, 2, 2, 9, 5, 9, 5, 2],
    "some alone": [7, 1, 2, 7, 3, 7],
    "negative": [-1, -4, -1, -4, 0, 6, -1],
    "all equal": [3, 3, 3, 3],
    "all alone": [0, 1, 2, 3],
    "one pair": [0, 0],
    "one pair, one other": [1, 0, 0],
}


@pytest.fixture(autouse=True)
def never_a_matrix_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins list pairs by themselves; the originals are told apart by who calls."""
    convert = loss_and_miner_utils.convert_to_pairs

    def watched(*args: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")
        assert not isinstance(caller, ours._Linear)
        return convert(*args)

    monkeypatch.setattr(loss_and_miner_utils, "convert_to_pairs", watched)


def leaf(num_rows: int, dtype: torch.dtype = torch.float64, width: int = 5) -> Tensor:
    return torch.randn(num_rows, width, dtype=torch.float64).to(dtype).requires_grad_()


def outcome(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The loss, and the gradient of every input for an upstream gradient that is not 1."""
    gradients = torch.autograd.grad(3 * loss.sum(), inputs, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))]


def assert_same(name: str, call: Callable[[Any], Tensor], *inputs: Tensor, rtol: Any = None, **kwargs: Any) -> Tensor:
    """`call` gives the same with our loss and the original; returns the value."""
    expected, found = (outcome(call(getattr(module, name)(**kwargs)), *inputs) for module in (losses, ours))
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=rtol, atol=None if rtol is None else 1e-5)
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_originals(name: str) -> None:
    mine, theirs = (getattr(module, name) for module in (ours, losses))
    assert issubclass(mine, theirs)
    for method in ("__init__", "forward", "compute_loss"):
        found = inspect.signature(getattr(mine, method)).parameters
        for parameter in inspect.signature(getattr(theirs, method)).parameters.values():
            assert found[parameter.name].default == parameter.default
            assert found[parameter.name].kind == parameter.kind


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(ImportError, match=r"pip install 'megabatch\[pytorch_metric_learning\]'"):
        importlib.reload(ours)


# ---- Labels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", LABELS)
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_all_layouts(name: str, layout: str, dtype: torch.dtype) -> None:
    labels = torch.tensor(LABELS[layout])
    x = leaf(len(labels), dtype)
    value = assert_same(name, lambda loss: loss(x, labels), x)
    assert value.requires_grad is False
    assert value.dtype == dtype
    assert (value == 0) == (layout in ("all equal", "all alone", "one pair"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    labels=st.lists(st.integers(-2, 3), min_size=1, max_size=9),
    ref_labels=st.none() | st.lists(st.integers(-2, 3), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_random_labels(name: str, labels: list[int], ref_labels: list[int] | None, seed: int) -> None:
    torch.manual_seed(seed)
    x, label = leaf(len(labels)), torch.tensor(labels)
    if ref_labels is None:
        assert_same(name, lambda loss: loss(x, label), x)
    else:
        y = leaf(len(ref_labels))
        assert_same(name, lambda loss: loss(x, label, None, y, torch.tensor(ref_labels)), x, y)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    labels = torch.tensor([1, 0, 0, 1, 1]).to(dtype)
    x = leaf(5)
    assert assert_same(name, lambda loss: loss(x, labels), x) > 0


@pytest.mark.parametrize("layout", [[0, 1, 1, 0, 2, 1], [0, 1, 1, 0, 2, 2]])
@pytest.mark.parametrize("name", NAMES)
def test_what_counts_as_a_row_itself_is_the_tensor_of_labels(name: str, layout: list[int]) -> None:
    """The originals leave (i, i) out where both labels are one tensor, whatever the embeddings are."""
    labels = torch.tensor(layout)
    x, y = leaf(6), leaf(6)
    values = [
        assert_same(name, lambda loss: loss(x, labels, None, y, labels), x, y),
        assert_same(name, lambda loss: loss(x, labels, None, y), x, y),
        assert_same(name, lambda loss: loss(x, labels, None, y, labels.clone()), x, y),
        assert_same(name, lambda loss: loss(x, labels, None, x, labels), x),
        assert_same(name, lambda loss: loss(x, labels, None, x, labels.clone()), x),
    ]
    assert len({value.item() for value in values}) == 4
    assert values[0] == values[1]


@pytest.mark.parametrize("name", NAMES)
def test_one_pair_of_each_kind_is_no_loss(name: str) -> None:
    """To the originals, which ask for more than one of either."""
    x, y = leaf(1), leaf(3)
    one = (torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    zero = [
        assert_same(name, lambda loss: loss(x, torch.tensor([4]), None, y[:2], torch.tensor([4, 2])), x, y),
        assert_same(name, lambda loss: loss(x, None, one, y[:2]), x, y),
    ]
    assert zero == [0, 0]
    assert assert_same(name, lambda loss: loss(x, torch.tensor([4]), None, y, torch.tensor([4, 2, 2])), x, y) > 0


@pytest.mark.parametrize("name", NAMES)
def test_pairs_and_their_order(name: str) -> None:
    """Also in the layout of SimCLR, where the pairs are computed in another order."""
    for labels in LABELS.values():
        x, label = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
        keep = {"reducer": reducers.DoNothingReducer()}
        found, expected = (getattr(module, name)(**keep)(x, label)["loss"] for module in (ours, losses))
        assert found.pop("reduction_type") == expected.pop("reduction_type")
        if expected["indices"] is None:
            assert found == expected == {"losses": 0, "indices": None}
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_simclr_layout_forms_each_product_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows per label go by nt_xent_loss, or supcon_loss; never by info_nce_loss, which costs twice as much."""
    monkeypatch.setattr(ours.mb, "info_nce_loss", None)
    x = leaf(8)
    assert_same(name, lambda loss: losses.SelfSupervisedLoss(loss)(x[:4], x[4:]), x)
    with pytest.raises(TypeError, match="NoneType"):
        getattr(ours, name)()(x, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), None, leaf(8), torch.arange(8) % 2)


# ---- Options


@pytest.mark.parametrize("temperature", [0.01, 0.5, 3, -0.5])
@pytest.mark.parametrize("name", NAMES)
def test_temperatures(name: str, temperature: float) -> None:
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    assert_same(name, lambda loss: loss(x, labels), x, temperature=temperature)
    assert_same(name, lambda loss: loss(x, labels, None, 2 * x, labels), x, temperature=temperature)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_dot_products(name: str, normalize: bool) -> None:
    labels = torch.tensor(LABELS["some alone"])
    x, y = leaf(6), leaf(6)
    distance = distances.DotProductSimilarity(normalize_embeddings=normalize)
    assert_same(name, lambda loss: loss(x, labels), x, distance=distance, temperature=1.0)
    assert_same(name, lambda loss: loss(x, labels, None, y, labels), x, y, distance=distance, temperature=1.0)


class Twice(distances.CosineSimilarity):
    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return 2 * super().compute_mat(query_emb, ref_emb)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("distance", "told"),
    [
        (distances.LpDistance(), "must be CosineSimilarity or DotProductSimilarity, got LpDistance"),
        (distances.SNRDistance(), "got SNRDistance"),
        (Twice(), "got Twice"),
        (distances.CosineSimilarity(p=1), "p=2 and power=1, got p=1 and power=1"),
        (distances.CosineSimilarity(power=2), "got p=2 and power=2"),
    ],
)
def test_other_distances_are_refused(name: str, distance: Any, told: str) -> None:
    refused = pytest.raises(ValueError, match=rf"^{name}: .*{told}.* Use pytorch_metric_learning.losses.{name}")
    with refused:
        getattr(ours, name)(distance=distance)
    late = getattr(ours, name)()
    late.distance = distance
    with refused:
        late(leaf(4), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """The error in the gradient is at most the original's in the same dtype."""
    labels, x = torch.tensor(LABELS["unsorted"]), leaf(10, dtype)

    def run(module: Any, x: Tensor, with_reference: bool) -> list[Tensor]:
        reference = (x.detach() / 2, labels) if with_reference else ()
        return outcome(getattr(module, name)()(x, labels, None, *reference), x)

    for with_reference in (False, True):
        truth = run(losses, x.detach().double().requires_grad_(), with_reference)
        found, peer = run(ours, x, with_reference), run(losses, x, with_reference)
        assert found[0].dtype == torch.float32
        assert found[1].dtype == dtype
        torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-5, atol=1e-5)
        assert (found[1].double() - truth[1]).norm() <= (peer[1].double() - truth[1]).norm()


def test_losses_beyond_what_the_original_can_tell() -> None:
    """Each row is opposite to its positive and equal to a negative: 200 at this temperature."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(2, 1)
    labels = torch.tensor([0, 0, 1, 1])
    assert losses.NTXentLoss(temperature=0.01)(x, labels) < 90
    torch.testing.assert_close(ours.NTXentLoss(temperature=0.01)(x, labels), torch.tensor(200.0))


# ---- Through the machinery of the original

REDUCERS: dict[str, Callable[[], Any]] = {
    "mean": reducers.MeanReducer,
    "sum": reducers.SumReducer,
    "non-zero": reducers.AvgNonZeroReducer,
    "threshold": lambda: reducers.ThresholdReducer(low=0.5, high=3.0),
    "per anchor": reducers.PerAnchorReducer,
    "class-weighted": lambda: reducers.ClassWeightedReducer(torch.rand(10, generator=torch.Generator().manual_seed(1))),
    "multiple": lambda: reducers.MultipleReducers({"loss": reducers.ThresholdReducer(low=1.0)}),
}


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("name", NAMES)
def test_reducers(name: str, reducer: str) -> None:
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    assert assert_same(name, lambda loss: loss(x, labels), x, reducer=REDUCERS[reducer](), temperature=1.0) > 0


@pytest.mark.parametrize("layout", ["unsorted", "all equal"])
@pytest.mark.parametrize("name", NAMES)
def test_embedding_regularizers(name: str, layout: str) -> None:
    labels = torch.tensor(LABELS[layout])
    x = leaf(len(labels))
    regularized = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.3}
    assert assert_same(name, lambda loss: loss(x, labels), x, **regularized) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_statistics(name: str) -> None:
    x, labels = 3 * leaf(10), torch.tensor(LABELS["unsorted"])

    def statistics(module: Any) -> dict[str, Any]:
        distance = distances.CosineSimilarity(collect_stats=True)
        reducer = reducers.AvgNonZeroReducer(collect_stats=True)
        loss = getattr(module, name)(distance=distance, reducer=reducer, collect_stats=True)
        loss(x, labels)
        owners = (loss, loss.distance, loss.reducer)
        kept = [getattr(o, "_record_these", []) + getattr(o, "_record_these_stats", []) for o in owners]
        return {key: getattr(o, key) for o, keys in zip(owners, kept, strict=True) for key in keys}

    found = statistics(ours)
    assert found == pytest.approx(statistics(losses))
    assert found["initial_avg_query_norm"] > 2
    assert found["losses_size"] >= 10


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_self_supervised_loss(name: str, dtype: torch.dtype, symmetric: bool) -> None:
    x, y = leaf(7, dtype), leaf(7, dtype)
    assert_same(name, lambda loss: losses.SelfSupervisedLoss(loss, symmetric=symmetric)(x, y), x, y)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_cross_batch_memory_that_wraps_round(name: str, masked: bool) -> None:
    batches = [(leaf(6), torch.randint(4, (6,))) for _ in range(4)]
    mask = torch.tensor([True, False, True, True, False, False]) if masked else None

    def run(loss: Any) -> Tensor:
        memory = losses.CrossBatchMemory(loss, embedding_size=5, memory_size=10)
        return torch.stack([memory(x, labels, enqueue_mask=mask) for x, labels in batches])

    assert (assert_same(name, run, *(x for x, _ in batches)) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_labels_or_pairs_are_required(name: str) -> None:
    with pytest.raises(ValueError, match="labels and indices_tuple cannot both be None"):
        getattr(ours, name)()(leaf(4))


# ---- Pairs and triplets


def all_pairs(labels: Tensor) -> tuple[Tensor, ...]:
    return loss_and_miner_utils.get_all_pairs_indices(labels)


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_all_pairs(name: str, with_labels: bool) -> None:
    for layout in LABELS.values():
        labels = torch.tensor(layout)
        x = leaf(len(labels))
        pairs = all_pairs(labels)
        assert_same(name, lambda loss: loss(x, labels if with_labels else None, pairs), x)  # noqa: B023


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_pairs_with_a_reference_of_its_own(name: str, with_labels: bool) -> None:
    labels, ref_labels = torch.tensor([0, 1, 2, 0, 3]), torch.tensor([1, 1, 0, 2, 0, 2, 2])
    pairs = loss_and_miner_utils.get_all_pairs_indices(labels, ref_labels)
    x, y = leaf(5), leaf(7)
    given_labels = (labels, ref_labels) if with_labels else (None, None)
    assert_same(name, lambda loss: loss(x, given_labels[0], pairs, y, given_labels[1]), x, y)
    assert_same(name, lambda loss: loss(x, labels, pairs, y), x, y)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_out_of_order_and_more_than_once(name: str) -> None:
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    a1, p, a2, n = all_pairs(labels)
    order, again = torch.randperm(len(a1)), torch.randperm(len(a2))
    pairs = (torch.cat([a1[order], a1[:3]]), torch.cat([p[order], p[:3]]), a2[again], n[again])

    def weighted(loss: Any) -> Tensor:
        """By where in the list a loss is, so that its place matters."""
        values = loss(x, labels, pairs)["loss"]["losses"]
        return (values * torch.arange(len(values))).sum()

    assert_same(name, weighted, x, reducer=reducers.DoNothingReducer())


@pytest.mark.parametrize("name", NAMES)
def test_triplets_of_pairs(name: str) -> None:
    """One positive for every anchor: each of its negatives is listed once, its positive as often as there are."""
    labels = torch.tensor(LABELS["pairs"])
    triplets = loss_and_miner_utils.get_all_triplets_indices(labels)
    x = leaf(8)
    assert_same(name, lambda loss: loss(x, labels, triplets), x)
    assert_same(name, lambda loss: loss(x, None, triplets), x)
    labels, ref_labels, y = torch.tensor([0, 1, 2, 5]), torch.tensor([2, 0, 1, 3, 3]), leaf(5)
    triplets = loss_and_miner_utils.get_all_triplets_indices(labels, ref_labels)
    assert_same(name, lambda loss: loss(x[:4], labels, triplets, y, ref_labels), x, y)


@pytest.mark.parametrize("name", NAMES)
def test_negatives_of_rows_without_positives_do_not_count(name: str) -> None:
    labels = torch.tensor(LABELS["some alone"])
    x = leaf(6)
    a1, p, a2, n = all_pairs(labels)
    kept = (a2 != 1) | (n == 0)  # row 1 is alone of its label
    assert len(a2) - kept.sum() == 4
    a2, n = torch.cat([a2[kept], torch.tensor([1])]), torch.cat([n[kept], torch.tensor([0])])
    assert_same(name, lambda loss: loss(x, labels, (a1, p, a2, n)), x)


def test_triplets_that_weigh_a_negative_more_than_once_are_refused() -> None:
    """Two positives for an anchor list every negative twice, and the original then counts it twice."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    triplets = loss_and_miner_utils.get_all_triplets_indices(labels)
    with pytest.raises(
        ValueError, match=r"NTXentLoss: indices_tuple must leave all negatives in, .*, got 36 for anchors that have 18"
    ):
        ours.NTXentLoss()(leaf(6), labels, triplets)
    assert_same("SupConLoss", lambda loss: loss(x, labels, triplets), x := leaf(6))


@pytest.mark.parametrize("name", NAMES)
def test_miner_that_takes_all_negatives(name: str) -> None:
    """Its margins let every pair through."""
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    pairs = miners.PairMarginMiner(pos_margin=-9, neg_margin=9, distance=distances.LpDistance())(x, labels)
    assert len(pairs[2]) == len(all_pairs(labels)[2])
    assert_same(name, lambda loss: loss(x, labels, pairs), x)


@pytest.mark.parametrize("name", NAMES)
def test_miners_that_choose_negatives_are_refused(name: str) -> None:
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    for miner in (miners.BatchHardMiner(), miners.MultiSimilarityMiner(epsilon=0.01)):
        for given_labels in (labels, None):
            with pytest.raises(ValueError, match=rf"^{name}: indices_tuple must .* Use pytorch_metric_learning.losses"):
                getattr(ours, name)()(x, given_labels, miner(x, labels))


def test_miner_that_chooses_positives() -> None:
    """An anchor's own choice of positives is fine for NT-Xent; for SupCon what is left out would still be a column."""
    labels = torch.tensor(LABELS["unsorted"])
    x = leaf(10)
    a1, p, a2, n = all_pairs(labels)
    some = torch.rand(len(a1)) < 0.5
    pairs = (a1[some], p[some], a2, n)
    assert_same("NTXentLoss", lambda loss: loss(x, labels, pairs), x)
    with pytest.raises(ValueError, match="SupConLoss: indices_tuple must leave all pairs in"):
        ours.SupConLoss()(x, labels, pairs)


@pytest.mark.parametrize("change", ["one less", "one twice", "one exchanged", "of another label", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_pair_is_noticed(name: str, change: str) -> None:
    labels = torch.tensor(LABELS["unsorted"])
    a1, p, a2, n = (x.clone() for x in all_pairs(labels))
    if change == "one less":
        a2, n = a2[1:], n[1:]
    elif change == "one twice":
        a2, n = torch.cat([a2, a2[:1]]), torch.cat([n, n[:1]])
    elif change == "one exchanged":
        n[0] = n[1]
    elif change == "of another label":
        n[0] = p[0]
    else:
        a1, p = torch.cat([a1, a2[:1]]), torch.cat([p, n[:1]])
    x = leaf(10)
    if name == "SupConLoss" and change == "one twice":  # nothing to the original's masks either
        assert_same(name, lambda loss: loss(x, labels, (a1, p, a2, n)), x)
        return
    with pytest.raises(ValueError, match="indices_tuple must"):
        getattr(ours, name)(memory_budget="32KiB")(x, labels, (a1, p, a2, n))


def test_supcon_may_leave_any_one_row_out() -> None:
    """Not only the anchor itself; and positives need not be of one label."""
    num_rows, num_refs = 4, 6
    kind = torch.randint(2, (num_rows, num_refs))
    kind[:, :2] = torch.tensor([0, 1])
    kind[0, 4], kind[2, 3] = 2, 2  # of no kind
    pairs = (*torch.where(kind == 1), *torch.where(kind == 0))
    x, y = leaf(num_rows), leaf(num_refs)
    assert_same("SupConLoss", lambda loss: loss(x, None, pairs, y), x, y)


# ---- Memory


def peak(loss: Any, num_rows: int) -> int:
    """The most bytes at one time beyond the inputs, with four rows of each label."""
    x, labels = leaf(num_rows, torch.float32, width=32), torch.arange(num_rows) % (num_rows // 4)
    with LiveBytes() as live:
        loss(x, labels).backward()
    return live.peak


def test_where_the_original_takes_gigabytes() -> None:
    """Its matrices have a column for each of a million negatives in each of 3072 rows."""
    assert peak(losses.NTXentLoss(), 128) > 64 * MIB, "the meter saw nothing"
    assert peak(ours.NTXentLoss(memory_budget="2MiB"), 1024) < 6 * MIB


@pytest.mark.parametrize("per_label", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_listed_without_a_matrix(name: str, per_label: int) -> None:
    num_rows = 1024
    x, labels = leaf(num_rows, torch.float32, width=4), torch.arange(num_rows) % (num_rows // per_label)
    with LargestTensor() as largest:
        getattr(ours, name)(memory_budget="32KiB")(x, labels).backward()
        getattr(ours, name)(memory_budget="32KiB")(x, labels, None, 2 * x, labels).backward()
        getattr(ours, name)(memory_budget="32KiB")(x, labels, None, 2 * x, labels.clone()).backward()
    assert largest.numel <= num_rows * per_label * 8


def test_the_meter_of_tensors_sees_the_original() -> None:
    with LargestTensor() as largest:
        losses.SupConLoss()(leaf(128), torch.arange(128) % 32).backward()
    assert largest.numel >= 128 * 128


# ---- Ranks


def wrapped(rank: int, group: dist.ProcessGroup, mine: bool, name: str, efficient: bool) -> list[Tensor]:
    torch.manual_seed(rank)
    x, labels = leaf(5), torch.randint(4, (5,))
    loss = getattr(ours if mine else losses, name)()
    return outcome(DistributedLossWrapper(loss, efficient=efficient)(x, labels), x)


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_distributed_wrapper(name: str, efficient: bool, pool: Pool) -> None:
    expected = pool.run(4, wrapped, False, name, efficient)
    for found, theirs in zip(pool.run(4, wrapped, True, name, efficient), expected, strict=True):
        torch.testing.assert_close(found, theirs)


def logged_lines(rank: int, group: dist.ProcessGroup, name: str, gather: bool) -> list[str]:
    with LoggedLines("megabatch.integrations") as lines:
        loss = getattr(ours, name)()
        for _ in range(2):
            (DistributedLossWrapper(loss) if gather else loss)(leaf(6), torch.arange(6) // 2)
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_local_negatives_on_several_ranks_are_logged_once_by_rank_0(name: str, pool: Pool) -> None:
    (line,), *others = pool.run(2, logged_lines, name, False)
    assert line.startswith(f"{name}: each of 4 ranks uses only its own rows as negatives. Wrap it in pytorch_metric_")
    assert others == [[]]
    assert pool.run(4, logged_lines, name, True) == [[]] * 4
