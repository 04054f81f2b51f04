"""The dense twins against formulas written another way: torch's own losses, and double loops in Python floats.

The twins are the oracle of all other tests, so nothing here may share code with them.
"""

import inspect
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from megabatch import reference

SCALE, BIAS, N, D = 3.0, -1.5, 5, 4
IDS = torch.tensor([7, 8, 7, 9, 7])
WEIGHT = torch.tensor([1.0, 0.0, 2.5, 0.5, 3.0], dtype=torch.float64)
LOSSES = ["clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss", "supcon_loss"]


def features(rows=N, dtype=torch.float64):
    return normalize(torch.randn(rows, D, dtype=torch.float64), dim=1).to(dtype).requires_grad_()


def call(name, *args, **options):
    """Any of the losses on two sets of features; supcon takes the first and IDS as labels."""
    x, y = args if args else (features(), features())
    second = IDS[: len(x)] if name == "supcon_loss" else y
    options.setdefault("logit_scale", SCALE)
    return getattr(reference, name)(x, second, **options)


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def close(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-12)


# Double loops. A pair is "self", "target", "same" or "other"; a row is a list of (logit, relation).


def loop_softmax_row(row, same_ids, smoothing):
    """(loss, hit, mean positive logit) of one row, by exp and log of Python floats."""
    columns = [(s, r) for s, r in row if r != "self" and not (r == "same" and same_ids == "mask")]
    positives = [s for s, r in columns if r in ("target", "same")]
    if not positives:
        return 0.0, 0.0, 0.0
    logits = [s for s, _ in columns]
    log_sum = math.log(sum(math.exp(s) for s in logits))
    mean_positive, mean_all = sum(positives) / len(positives), sum(logits) / len(logits)
    loss = log_sum - (1 - smoothing) * mean_positive - smoothing * mean_all
    return loss, float(max(positives) >= max(logits)), mean_positive


def loop_sigmoid_row(row, same_ids):
    loss = 0.0
    for s, relation in row:
        if relation == "same" and same_ids == "mask":
            continue
        sign = 1 if relation in ("target", "same") else -1
        loss += math.log(1 + math.exp(-sign * s))
    return loss


def plane(x, y, relation, bias=0.0):
    """relation(i, j) and the logit of every pair."""
    return [
        [(SCALE * sum(a * b for a, b in zip(p, q, strict=True)) + bias, relation(i, j)) for j, q in enumerate(y)]
        for i, p in enumerate(x)
    ]


def turned(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def paired(ids):
    return lambda i, j: "target" if i == j else "same" if ids[i] == ids[j] else "other"


def weighted_mean(values, weight):
    return sum(w * v for w, v in zip(weight, values, strict=True)) / sum(weight)


# Against torch's own losses.


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_clip_is_the_mean_of_two_cross_entropies(smoothing, reduction):
    x, y = features(), features()
    s, target = SCALE * x @ y.T, torch.arange(N)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    expected = (cross_entropy(s, target, **options) + cross_entropy(s.T, target, **options)) / 2
    loss = reference.clip_loss(x, y, SCALE, **options)
    close(loss, expected)
    for got, wanted in zip(gradients(loss.sum(), x, y), gradients(expected.sum(), x, y), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_info_nce_is_cross_entropy_over_keys_and_extra_negatives(smoothing, reduction):
    query, key, negatives = features(), features(N + 2), features(3)
    positives = torch.tensor([6, 0, 0, 5, 2])
    options = {"label_smoothing": smoothing, "reduction": reduction}
    loss = reference.info_nce_loss(query, key, SCALE, negatives=negatives, positives=positives, **options)
    expected = cross_entropy(SCALE * query @ torch.cat([key, negatives]).T, positives, **options)
    close(loss, expected)
    inputs = query, key, negatives
    for got, wanted in zip(gradients(loss.sum(), *inputs), gradients(expected.sum(), *inputs), strict=True):
        close(got, wanted)


def test_info_nce_takes_key_row_i_for_query_i_by_default():
    query, key = features(), features(N + 2)
    close(reference.info_nce_loss(query, key, SCALE), cross_entropy(SCALE * query @ key.T, torch.arange(N)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_siglip_is_the_logsigmoid_of_every_pair(reduction):
    x, y = features(), features()
    rows = -logsigmoid((2 * torch.eye(N) - 1) * (SCALE * x @ y.T + BIAS)).sum(1)
    expected = {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]
    loss = reference.siglip_loss(x, y, SCALE, BIAS, reduction=reduction)
    close(loss, expected)
    for got, wanted in zip(gradients(loss.sum(), x, y), gradients(expected.sum(), x, y), strict=True):
        close(got, wanted)


def test_siglip_without_a_bias_has_bias_zero():
    x, y = features(), features()
    close(reference.siglip_loss(x, y, SCALE), reference.siglip_loss(x, y, SCALE, 0.0))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_nt_xent_is_cross_entropy_without_the_diagonal(reduction):
    a, b = features(), features()
    x = torch.cat([a, b])
    others = ~torch.eye(2 * N, dtype=torch.bool)
    s = (SCALE * x @ x.T)[others].reshape(2 * N, 2 * N - 1)
    # Column i + N of row i moves to i + N - 1, as its own column i is gone; column i of row i + N stays.
    target = torch.cat([torch.arange(N) + N - 1, torch.arange(N)])
    expected = cross_entropy(s, target, reduction=reduction, label_smoothing=0.1)
    loss = reference.nt_xent_loss(a, b, SCALE, reduction=reduction, label_smoothing=0.1)
    close(loss, expected)
    for got, wanted in zip(gradients(loss.sum(), a, b), gradients(expected.sum(), a, b), strict=True):
        close(got, wanted)


def test_supcon_of_labelled_pairs_is_nt_xent():
    a, b = features(), features()
    labels = torch.arange(N).repeat(2)
    close(reference.supcon_loss(torch.cat([a, b]), labels, SCALE), reference.nt_xent_loss(a, b, SCALE))


# Against double loops: ids, weights, smoothing, statistics.


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("same_ids", ["mask", "positive"])
def test_clip_matches_a_double_loop(same_ids, smoothing, weight):
    x, y = features(), features()
    options = {"ids": IDS, "same_ids": same_ids, "label_smoothing": smoothing, "weight": weight}
    loss, stats = reference.clip_loss(x, y, SCALE, return_stats=True, **options)
    rows = plane(x.tolist(), y.tolist(), paired(IDS.tolist()))
    image = [loop_softmax_row(row, same_ids, smoothing) for row in rows]
    text = [loop_softmax_row(row, same_ids, smoothing) for row in turned(rows)]
    w = [1.0] * N if weight is None else weight.tolist()
    expected = {
        "loss_image_to_text": weighted_mean([r[0] for r in image], w),
        "loss_text_to_image": weighted_mean([r[0] for r in text], w),
        "accuracy_image_to_text": weighted_mean([r[1] for r in image], w),
        "accuracy_text_to_image": weighted_mean([r[1] for r in text], w),
        "positive_logit": weighted_mean([r[2] for r in image], w),
    }
    for word in ["loss", "accuracy"]:
        expected[word] = (expected[f"{word}_image_to_text"] + expected[f"{word}_text_to_image"]) / 2
    assert stats.keys() == expected.keys()
    close(loss, expected["loss"])
    for name, value in expected.items():
        close(stats[name], value)
    per_row = [wi * (a[0] + b[0]) / 2 for wi, a, b in zip(w, image, text, strict=True)]
    close(reference.clip_loss(x, y, SCALE, reduction="none", **options), per_row)
    close(reference.clip_loss(x, y, SCALE, reduction="sum", **options), sum(per_row))


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("same_ids", ["mask", "positive"])
@pytest.mark.parametrize("with_negative_ids", [False, True])
def test_info_nce_matches_a_double_loop(with_negative_ids, same_ids, weight):
    query, key, negatives = features(), features(N + 2), features(3)
    positives, key_ids = torch.tensor([6, 0, 0, 5, 2]), torch.tensor([8, 7, 1, 7, 9, 9, 7])
    negative_ids = torch.tensor([7, 3, 8]) if with_negative_ids else None
    options = {
        "negatives": negatives,
        "positives": positives,
        "query_ids": IDS,
        "key_ids": key_ids,
        "negative_ids": negative_ids,
        "same_ids": same_ids,
        "weight": weight,
        "label_smoothing": 0.2,
    }
    column_ids = [*key_ids.tolist(), *(negative_ids.tolist() if with_negative_ids else [None] * 3)]

    def relation(i, j):
        return "target" if j == positives[i] else "same" if column_ids[j] == IDS[i].item() else "other"

    rows = [
        loop_softmax_row(row, same_ids, 0.2)
        for row in plane(query.tolist(), [*key.tolist(), *negatives.tolist()], relation)
    ]
    w = [1.0] * N if weight is None else weight.tolist()
    loss, stats = reference.info_nce_loss(query, key, SCALE, return_stats=True, **options)
    close(loss, weighted_mean([r[0] for r in rows], w))
    assert stats.keys() == {"loss", "accuracy", "positive_logit"}
    for position, name in enumerate(["loss", "accuracy", "positive_logit"]):
        close(stats[name], weighted_mean([r[position] for r in rows], w))
    per_row = reference.info_nce_loss(query, key, SCALE, reduction="none", **options)
    close(per_row, [wi * r[0] for wi, r in zip(w, rows, strict=True)])


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("same_ids", ["mask", "positive"])
def test_siglip_matches_a_double_loop(same_ids, weight):
    x, y = features(), features()
    rows = plane(x.tolist(), y.tolist(), paired(IDS.tolist()), BIAS)
    losses = [loop_sigmoid_row(row, same_ids) for row in rows]
    image = [loop_softmax_row(row, same_ids, 0.0) for row in rows]
    text = [loop_softmax_row(row, same_ids, 0.0) for row in turned(rows)]
    w = [1.0] * N if weight is None else weight.tolist()
    options = {"ids": IDS, "same_ids": same_ids, "weight": weight}
    loss, stats = reference.siglip_loss(x, y, SCALE, BIAS, return_stats=True, **options)
    expected = {
        "loss": weighted_mean(losses, w),
        "accuracy": weighted_mean([(a[1] + b[1]) / 2 for a, b in zip(image, text, strict=True)], w),
        "accuracy_image_to_text": weighted_mean([r[1] for r in image], w),
        "accuracy_text_to_image": weighted_mean([r[1] for r in text], w),
        "positive_logit": weighted_mean([r[2] for r in image], w),
    }
    assert stats.keys() == expected.keys()
    close(loss, expected["loss"])
    for name, value in expected.items():
        close(stats[name], value)
    per_row = reference.siglip_loss(x, y, SCALE, BIAS, reduction="none", **options)
    close(per_row, [wi * v for wi, v in zip(w, losses, strict=True)])


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("same_ids", ["mask", "positive"])
def test_nt_xent_matches_a_double_loop(same_ids, weight):
    a, b = features(), features()
    ids = IDS.tolist() * 2

    def relation(i, j):
        if i == j:
            return "self"
        return "target" if i % N == j % N else "same" if ids[i] == ids[j] else "other"

    x = [*a.tolist(), *b.tolist()]
    rows = [loop_softmax_row(row, same_ids, 0.2) for row in plane(x, x, relation)]
    w = [1.0] * 2 * N if weight is None else weight.tolist() * 2
    options = {"ids": IDS, "same_ids": same_ids, "weight": weight, "label_smoothing": 0.2}
    loss, stats = reference.nt_xent_loss(a, b, SCALE, return_stats=True, **options)
    close(loss, weighted_mean([r[0] for r in rows], w))
    for position, name in enumerate(["loss", "accuracy", "positive_logit"]):
        close(stats[name], weighted_mean([r[position] for r in rows], w))
    per_row = reference.nt_xent_loss(a, b, SCALE, reduction="none", **options)
    close(per_row, [wi * r[0] for wi, r in zip(w, rows, strict=True)])


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_supcon_matches_a_double_loop_and_leaves_anchors_without_positives_out(smoothing, weight):
    x = features()
    ids = IDS.tolist()

    def relation(i, j):
        return "self" if i == j else "same" if ids[i] == ids[j] else "other"

    rows = [loop_softmax_row(row, "positive", smoothing) for row in plane(x.tolist(), x.tolist(), relation)]
    has_positive = [ids.count(label) > 1 for label in ids]
    assert not all(has_positive)
    w = [1.0] * N if weight is None else weight.tolist()
    w = [wi * has for wi, has in zip(w, has_positive, strict=True)]
    options = {"weight": weight, "label_smoothing": smoothing}
    loss, stats = reference.supcon_loss(x, IDS, SCALE, return_stats=True, **options)
    close(loss, weighted_mean([r[0] for r in rows], w))
    for position, name in enumerate(["loss", "accuracy", "positive_logit"]):
        close(stats[name], weighted_mean([r[position] for r in rows], w))
    per_row = reference.supcon_loss(x, IDS, SCALE, reduction="none", **options)
    close(per_row, [wi * r[0] for wi, r in zip(w, rows, strict=True)])
    close(reference.supcon_loss(x, IDS, SCALE, reduction="sum", **options), per_row.sum())


# Gradients.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": True, "label_smoothing": 0.1},
        {"ids": IDS, "weight": WEIGHT},
        {"ids": IDS, "same_ids": "positive", "label_smoothing": 0.1, "reduction": "none"},
    ],
)
@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss", "nt_xent_loss", "info_nce_loss"])
def test_gradients_are_the_derivative_of_the_value(name, options):
    options = dict(options)
    if name == "siglip_loss":
        options.pop("label_smoothing", None)
    if name == "info_nce_loss" and "ids" in options:
        options["query_ids"] = options["key_ids"] = options.pop("ids")
    scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)

    def loss(x, y, s):
        return call(name, x, y, logit_scale=s, **options)

    assert torch.autograd.gradcheck(loss, (features(), features(), scale))


@pytest.mark.parametrize("options", [{}, {"normalize": True, "label_smoothing": 0.1, "weight": WEIGHT}])
def test_gradients_of_supcon_are_the_derivative_of_its_value(options):
    temperature = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, t: reference.supcon_loss(x, IDS, temperature=t, **options), (features(), temperature)
    )


def test_gradients_of_bias_and_extra_negatives_are_the_derivative_of_the_value():
    bias = torch.tensor([BIAS], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, y, b: reference.siglip_loss(x, y, SCALE, b), (features(), features(), bias)
    )
    assert torch.autograd.gradcheck(
        lambda x, y, z: reference.info_nce_loss(x, y, SCALE, negatives=z), (features(), features(), features(3))
    )


def test_clip_ignores_a_bias_and_gives_it_a_zero_gradient():
    x, y, bias = features(), features(), torch.tensor([BIAS], requires_grad=True)
    loss, stats = reference.clip_loss(x, y, SCALE, logit_bias=bias, return_stats=True)
    expected, expected_stats = reference.clip_loss(x, y, SCALE, return_stats=True)
    assert torch.equal(loss, expected)
    assert torch.equal(stats["positive_logit"], expected_stats["positive_logit"])
    (gradient,) = gradients(loss, bias)
    assert torch.equal(gradient, torch.zeros(1))
    assert torch.equal(reference.clip_loss(x, y, SCALE, logit_bias=BIAS), expected)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_finite_logits_give_finite_losses_and_gradients(name, sign):
    x, y = features(dtype=torch.float32), features(dtype=torch.float32)
    loss = call(name, x, y, logit_scale=sign * 1e4)
    assert loss.isfinite()
    for gradient in torch.autograd.grad(loss, (x, y), allow_unused=name == "supcon_loss"):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("rows", [1, 4])
def test_supcon_without_any_positive_is_zero_with_zero_gradients(rows, reduction):
    x = features(rows)
    loss, stats = reference.supcon_loss(
        x, torch.arange(rows), SCALE, reduction=reduction, label_smoothing=0.1, return_stats=True
    )
    assert torch.equal(loss, torch.zeros_like(loss))
    assert loss.shape == ((rows,) if reduction == "none" else ())
    assert torch.equal(gradients(loss.sum(), x)[0], torch.zeros_like(x))
    assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize("name", ["clip_loss", "info_nce_loss", "nt_xent_loss"])
def test_one_row_has_nothing_to_tell_apart(name):
    x, y = features(1), features(1)
    loss = call(name, x, y)
    close(loss, 0.0)
    for gradient in gradients(loss, x, y):
        close(gradient, torch.zeros_like(x))


def test_one_row_of_siglip_is_one_pair():
    x, y = features(1), features(1)
    close(reference.siglip_loss(x, y, SCALE, BIAS), -logsigmoid(SCALE * (x * y).sum() + BIAS))


def test_all_rows_of_one_id_leave_only_the_target():
    x, y = features(), features()
    close(reference.clip_loss(x, y, SCALE, ids=torch.zeros(N)), 0.0)


# Options that are the same for all losses.


@pytest.mark.parametrize("name", LOSSES)
def test_temperature_is_one_over_the_scale(name):
    x, y = features(), features()
    expected = call(name, x, y)
    close(call(name, x, y, logit_scale=None, temperature=1 / SCALE), expected)
    for shape in [(), (1,)]:
        close(call(name, x, y, logit_scale=torch.full(shape, SCALE)), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_normalize_makes_unit_rows(name):
    x, y = 3 * torch.randn(N, D), 5 * torch.randn(N, D)
    got = call(name, x, y, normalize=True)
    torch.testing.assert_close(got, call(name, normalize(x, dim=1), normalize(y, dim=1)))
    assert not torch.isclose(got, call(name, x, y, normalize=False))
    assert torch.equal(call(name, x, y), call(name, x, y, normalize=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_inputs_are_computed_in_float32(name, dtype):
    x, y = features(dtype=dtype), features(dtype=dtype)
    scale = torch.tensor([100.0], dtype=dtype, requires_grad=True)
    loss = call(name, x, y, logit_scale=scale)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, call(name, x.float(), y.float(), logit_scale=100.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss, call(name, x, y, logit_scale=scale))
    loss.backward()
    assert x.grad.dtype == scale.grad.dtype == dtype


@pytest.mark.parametrize("name", LOSSES)
def test_result_has_the_dtype_of_the_features_not_of_the_scale(name):
    for dtype in [torch.float32, torch.float64]:
        x, y = features(dtype=dtype), features(dtype=dtype)
        assert call(name, x, y).dtype == dtype
        assert call(name, x, y, logit_scale=torch.tensor([SCALE], dtype=torch.float64)).dtype == dtype


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_statistics_are_detached_scalars_whatever_the_reduction(name, reduction):
    x, y = features(), features()
    loss, stats = call(name, x, y, reduction=reduction, return_stats=True, weight=WEIGHT)
    assert torch.equal(loss, call(name, x, y, reduction=reduction, weight=WEIGHT))
    assert all(value.shape == () and not value.requires_grad for value in stats.values())
    close(stats["loss"], call(name, x, y, weight=WEIGHT).detach())


@pytest.mark.parametrize("name", LOSSES)
def test_options_of_the_computation_change_nothing(name):
    x, y = features(), features()
    how = {
        "group": None,
        "grad_reduction": "sum",
        "exchange": "ring",
        "overlap": False,
        "tile": 2,
        "memory_budget": "1MiB",
        "backend": "eager",
    }
    assert torch.equal(call(name, x, y, **how), call(name, x, y))


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_of_several_ranks_is_refused(name):
    assert torch.isfinite(call(name, group=Group(1)))
    with pytest.raises(ValueError, match=f"^{name}: group must be one process .* got 4 ranks"):
        call(name, group=Group(4))


@pytest.mark.parametrize("name", LOSSES)
def test_exactly_one_of_scale_and_temperature_is_taken(name):
    with pytest.raises(ValueError, match=f"^{name}: exactly one of logit_scale and temperature .* got neither"):
        call(name, logit_scale=None)
    with pytest.raises(ValueError, match=f"^{name}: exactly one of logit_scale and temperature .* got both"):
        call(name, logit_scale=SCALE, temperature=0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_words_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: reduction must be one of .*'sum'.*, got 'average'"):
        call(name, reduction="average")
    if "same_ids" in inspect.signature(getattr(reference, name)).parameters:
        with pytest.raises(ValueError, match=f"^{name}: same_ids must be one of .*'positive'.*, got 'drop'"):
            call(name, same_ids="drop")


# Retrieval.


def test_ranks_count_the_keys_that_score_strictly_higher():
    query, key = features().detach(), features(N + 2).detach()
    positives = torch.tensor([6, 0, 0, 5, 2])
    ranks = reference.retrieval_ranks(query, key, positives=positives)
    assert ranks.dtype == torch.int64
    for i, positive in enumerate(positives.tolist()):
        order = (key @ query[i]).argsort(descending=True).tolist()
        assert ranks[i] == order.index(positive)


def test_ranks_take_key_row_i_by_default_and_equal_keys_tie():
    key = features().detach()
    assert reference.retrieval_ranks(key, key).tolist() == [0] * N
    assert reference.retrieval_ranks(key, torch.cat([key, key, key])).tolist() == [0] * N
    # The positive of each query is the worst key there is, and all others are better.
    assert reference.retrieval_ranks(key[:1], torch.cat([-key[:1], key])).tolist() == [N]


def test_ranks_normalise_when_asked_to():
    query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [5.0, 5.0]])
    assert reference.retrieval_ranks(query, key).tolist() == [1]
    assert reference.retrieval_ranks(query, key, normalize=True).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), [(3, 5, 7), (65, 500, 300), (31, 33, 512)])
def test_equal_keys_tie_in_every_dtype(queries, keys, width, normalized, dtype):
    query, key = torch.randn(queries, width).to(dtype), torch.randn(1, width).to(dtype).repeat(keys, 1)
    query[0] *= 1000
    ranks = reference.retrieval_ranks(query, key, positives=torch.randint(keys, (queries,)), normalize=normalized)
    assert torch.equal(ranks, torch.zeros_like(ranks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_keys_that_differ_in_the_last_digit_do_not_tie(dtype):
    width = 64
    key = torch.ones(3, width, dtype=dtype)
    key[1] += 2000 * torch.finfo(dtype).eps  # above the rounding of a float64 product of 64 numbers
    key[2] -= 2000 * torch.finfo(dtype).eps
    assert reference.retrieval_ranks(torch.ones(3, width, dtype=dtype), key).tolist() == [1, 0, 2]


def test_a_positive_that_scores_nan_comes_last_and_leaves_other_queries_alone():
    query, key = torch.randn(6, 4), torch.randn(8, 4)
    expected = reference.retrieval_ranks(query, key)
    assert expected.max() > 0
    broken = torch.cat([key, torch.full((1, 4), torch.nan), torch.full((1, 4), torch.inf)])
    assert torch.equal(reference.retrieval_ranks(query.abs(), broken[:9]), reference.retrieval_ranks(query.abs(), key))
    assert torch.equal(reference.retrieval_ranks(query.abs(), broken), reference.retrieval_ranks(query.abs(), key) + 1)
    query[2] = torch.nan
    assert reference.retrieval_ranks(query, key).tolist() == expected.index_fill(0, torch.tensor([2]), 8).tolist()


def test_topk_leaves_out_the_row_of_each_query():
    query, key = features().detach(), features(N + 2).detach()
    excluded = (query @ key.T).argmax(1)
    values, indices = reference.similarity_topk(query, key, 3, exclude=excluded)
    for i, positive in enumerate(excluded.tolist()):
        order = [j for j in (key @ query[i]).argsort(descending=True).tolist() if j != positive]
        assert indices[i].tolist() == order[:3]
        close(values[i], key[indices[i]] @ query[i])


def test_topk_leaves_out_the_keys_of_the_id_of_each_query():
    query, key = features().detach(), features(N + 2).detach()
    key_ids = torch.tensor([7, 7, 8, 9, 9, 1, 2])
    key[[1, 2, 3]] = query[[0, 1, 3]]  # each query's best key has its id
    _, indices = reference.similarity_topk(query, key, 4, exclude=(IDS, key_ids))
    for i, own in enumerate(IDS.tolist()):
        order = [j for j in (key @ query[i]).argsort(descending=True).tolist() if key_ids[j] != own]
        assert indices[i].tolist() == order[:4]


def test_topk_of_fewer_keys_than_asked_for_ends_in_minus_infinity_and_minus_one():
    query, key = features().detach(), features(3).detach()
    values, indices = reference.similarity_topk(query, key, 3, exclude=(torch.zeros(N), torch.tensor([0, 1, 0])))
    assert torch.equal(indices, torch.tensor([[1, -1, -1]]).expand(N, 3))
    assert values[:, 1:].isneginf().all()
    close(values[:, 0], query @ key[1])


def test_topk_gives_the_best_keys_in_order():
    query, key = features().detach(), features(N + 2).detach()
    values, indices = reference.similarity_topk(query, key, 3)
    assert values.shape == indices.shape == (N, 3)
    assert indices.dtype == torch.int64
    for i in range(N):
        scores = key @ query[i]
        assert indices[i].tolist() == scores.argsort(descending=True)[:3].tolist()
        close(values[i], scores[indices[i]])


def test_topk_normalises_when_asked_to():
    query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [5.0, 5.0]])
    assert reference.similarity_topk(query, key, 1)[1].tolist() == [[1]]
    assert reference.similarity_topk(query, key, 1, normalize=True)[1].tolist() == [[0]]


@pytest.mark.parametrize(("name", "extra"), [("retrieval_ranks", ()), ("similarity_topk", (2,))])
def test_retrieval_refuses_a_group_of_several_ranks(name, extra):
    with pytest.raises(ValueError, match=f"^{name}: group must be one process .* got 4 ranks"):
        getattr(reference, name)(features(), features(), *extra, group=Group(4))
