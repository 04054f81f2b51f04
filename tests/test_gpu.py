"""On a real GPU: compiled kernels give the dense twin's results, every time the same, in memory linear in the batch.
The host reads nothing back, launches are few, a step can be captured in a graph, and ranks equal one process.

Run by `make test-gpu`; skipped without a GPU, and where kernels are interpreted. With MEGABATCH_REHEARSAL=1 the bodies
that need no GPU run on the CPU, with eager in the place of the kernels and gloo in that of nccl: that finds mistakes in
the tests, and nothing else.
"""

import math
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.nn.functional import normalize

import megabatch
from megabatch import reference
from megabatch.backends import triton_settings
from megabatch.backends.triton_backend import Triton
from megabatch.check import gpu
from megabatch.check.cases import cases
from megabatch.check.exactness import Way, compare
from megabatch.distributed.world import World
from tools.kernels import tuning

from .test_losses import LOSSES, make_inputs
from .test_numbers import GAPS, with_sides

REHEARSAL = os.environ.get("MEGABATCH_REHEARSAL") == "1"
DEVICE, BACKEND, TRANSPORT = ("cpu", "eager", "gloo") if REHEARSAL else ("cuda", "triton", "nccl")
pytestmark = [] if REHEARSAL else pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
LOGITS = 9.0  # no logit of make_inputs is larger: scale 7, and a bias of -2
MIB = 2**20
cuda_only = pytest.mark.skipif(REHEARSAL, reason="needs a CUDA device, also in a rehearsal")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

Inputs = dict[str, Any]
Results = dict[str, Tensor]


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_device(inputs: Inputs, dtype: torch.dtype, device: str = DEVICE) -> Inputs:
    """Features in this dtype, scale and bias in float32."""

    def moved(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(device)
        return x.detach().to(device, dtype if x.dim() == 2 else torch.float32).requires_grad_(x.requires_grad)

    return {name: moved(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def exact(inputs: Inputs) -> Inputs:
    return {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }


def results(library: Any, loss: str, inputs: Inputs, **options: Any) -> Results:
    """Value, statistics and gradients; losses per row are weighed so that no two are alike."""
    value = getattr(library, loss)(**inputs, **{"normalize": False, **options})
    value, stats = value if isinstance(value, tuple) else (value, {})
    found = {"loss": value.detach(), **stats}
    needed = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    upstream = torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
    grads = torch.autograd.grad((value * upstream).sum() if value.dim() else value, list(needed.values()))
    return found | {f"d {name}": grad for name, grad in zip(needed, grads, strict=True)}


def assert_no_worse_than_dense(loss: str, inputs: Inputs, options: Inputs, backend: str = BACKEND) -> None:
    """Our error against float64, beside the dense loss's own in the features' dtype and a few roundings: a logit is
    rounded by eps of the largest, which moves probabilities by as much, and a sum by a few eps. In bf16/fp16 the
    dlogits and the gradient are rounded by half an eps each."""
    truth = results(reference, loss, exact(inputs), **options)
    dense = results(reference, loss, inputs, **options)
    ours = results(megabatch, loss, inputs, backend=backend, **options)
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        peer, error = ((found[name].double() - truth[name]).abs().max().item() for found in (dense, ours))
        largest, slack = truth[name].abs().max().item(), EPS[torch.float32] * (LOGITS + 4)
        if value.dtype in (torch.bfloat16, torch.float16):
            slack += EPS[value.dtype]
        assert error <= peer + slack * max(largest, 0.01), f"{name}: {error:.2e}, dense {peer:.2e}, of {largest:.2e}"


def mixes(loss: str) -> list[dict[str, Any]]:
    smooth = {} if loss == "siglip_loss" else {"label_smoothing": 0.2}
    found: list[dict[str, Any]] = [
        {"return_stats": True},
        {"tile": 190, "normalize": True},
        {"reduction": "none", "weight": True, **smooth},
        {"reduction": "sum", "memory_budget": "512MiB", **smooth},
    ]
    if loss != "supcon_loss":
        found += [{"same_ids": same, "return_stats": True, "tile": 150} for same in ("mask", "positive")]
    return found


def completed(loss: str, mix: dict[str, Any], num_rows: int) -> dict[str, Any]:
    options = dict(mix)
    if "same_ids" in options:
        ids, key_ids = torch.randint(90, (num_rows,)).to(DEVICE), torch.randint(90, (num_rows + 3,)).to(DEVICE)
        options |= {"query_ids": ids, "key_ids": key_ids} if loss == "info_nce_loss" else {"ids": ids}
    if options.get("weight"):
        options["weight"] = torch.rand(num_rows).to(DEVICE)
    return options


# ---- results


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("loss", "mix"), [(loss, mix) for loss in LOSSES for mix in mixes(loss)], ids=str)
def test_every_option_is_no_worse_than_dense(loss: str, mix: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = to_device(make_inputs(loss, 301, 96), dtype)
    assert_no_worse_than_dense(loss, inputs, completed(loss, mix, 301))


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (65, 100), (129, 384), (257, 640), (1000, 1152)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_shape_is_no_worse_than_dense(loss: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_no_worse_than_dense(loss, to_device(make_inputs(loss, *shape), dtype), {})


@pytest.mark.parametrize("loss", LOSSES)
def test_eager_on_the_gpu_is_no_worse_than_dense_either(loss: str) -> None:
    for dtype in DTYPES:
        assert_no_worse_than_dense(loss, to_device(make_inputs(loss, 301, 96), dtype), {}, backend="eager")


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("tile", [None, 100])
def test_rows_and_columns_far_below_their_tile(gap: int, tile: int | None) -> None:
    rows, columns = normalize(torch.randn(2, 300, 34), dim=2).unbind()
    rows[:, -2:], columns[:, -2:] = 0.0, 0.0
    rows[:, -1], columns[:, -2] = 1.0, 1.0
    low = torch.arange(300) % 5 == 1
    rows[low, -2], columns[low, -1] = -float(gap), -float(gap)
    inputs = to_device(with_sides("clip_loss", [rows.requires_grad_(), columns.requires_grad_()], 1.0), torch.float32)
    truth = results(reference, "clip_loss", exact(inputs))
    for name, value in results(megabatch, "clip_loss", inputs, backend=BACKEND, tile=tile).items():
        # Logits of `gap` are rounded by eps of it: those of the row, of the column, and of their maxima.
        assert (value - truth[name]).abs().max() <= 8 * EPS[torch.float32] * gap * truth[name].abs().max(), name


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_ten_thousand_stay_finite(loss: str, sign: int) -> None:
    rows = normalize(torch.randn(150, 40), dim=1)
    sides = [(rows * sign).requires_grad_(), rows.clone().requires_grad_()]
    for dtype in DTYPES:
        inputs = to_device(with_sides(loss, sides, 1e4), dtype)
        for name, value in results(megabatch, loss, inputs, backend=BACKEND).items():
            assert value.isfinite().all(), name


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_in_the_features_gives_nan(loss: str) -> None:
    """A maximum on a GPU does not see NaN; the sums must."""
    inputs = to_device(make_inputs(loss, 200, 40), torch.float32)
    name = next(name for name, x in inputs.items() if x.dim() == 2)
    inputs[name].data[150, 7] = math.nan
    if loss == "supcon_loss":
        inputs["labels"].zero_()
    assert getattr(megabatch, loss)(**inputs, normalize=False, backend=BACKEND).isnan()


@cuda_only
def test_float16_at_32768_rows() -> None:
    num_rows, width = 32768, 64
    image, text = (normalize(torch.randn(num_rows, width), dim=1).to(DEVICE).half().requires_grad_() for _ in range(2))
    value = megabatch.clip_loss(image, text, 10.0, normalize=False, backend=BACKEND)
    (1024 * value).backward()
    few = 64
    images, texts = image.detach().double(), text.detach().double()
    logits = 10.0 * images[:few] @ texts.T
    of_columns = torch.cat([(10.0 * strip @ images.T).logsumexp(1) for strip in texts.split(1024)])
    dlogits = logits.softmax(1) + torch.exp(logits - of_columns) - 2 * torch.eye(few, num_rows).to(DEVICE)
    expected = 1024 * 10 * (dlogits @ text.detach().double()) / num_rows / 2
    assert image.grad is not None
    assert (image.grad[:few] - expected).abs().max() <= 3 * EPS[torch.float16] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_equal_keys_tie(dtype: torch.dtype) -> None:
    query, key = torch.randn(300, 96).to(DEVICE).to(dtype), torch.randn(1, 96).to(DEVICE).to(dtype).expand(500, 96)
    positives = torch.randint(500, (300,)).to(DEVICE)
    ranks = megabatch.retrieval_ranks(query, key, positives=positives, tile=128, backend=BACKEND)
    assert torch.equal(ranks, torch.zeros_like(ranks))


def test_topk_equals_the_dense_answer() -> None:
    query, key = torch.randn(300, 96).to(DEVICE), torch.randn(501, 96).to(DEVICE)
    values, _ = megabatch.similarity_topk(query, key, 5, backend=BACKEND, tile=128)
    torch.testing.assert_close(values, reference.similarity_topk(query.double(), key.double(), 5)[0].float())


@cuda_only
def test_tf32_where_the_caller_allows_it() -> None:
    inputs = to_device(make_inputs("clip_loss", 301, 96), torch.float32)
    truth = results(reference, "clip_loss", exact(inputs))
    errors = []
    for word in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(word)
        found = results(megabatch, "clip_loss", inputs, backend=BACKEND)
        errors.append(max((found[name] - value).abs().max().item() for name, value in truth.items()))
    largest = max(value.abs().max().item() for value in truth.values())
    assert errors[0] == errors[2] < EPS[torch.float32] * (LOGITS + 4) * largest
    assert errors[1] < 2**-10 * LOGITS * largest  # the eps of tf32


# ---- the same bits, linear memory


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_run_gives_the_same_bits(loss: str, dtype: torch.dtype) -> None:
    inputs = to_device(make_inputs(loss, 1500, 128), dtype)
    first, *others = (results(megabatch, loss, inputs, backend=BACKEND, tile=600) for _ in range(4))
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def peak_bytes(loss: str, num_rows: int, **options: Any) -> int:
    """Beyond the inputs, while a step runs."""
    inputs = to_device(make_inputs(loss, num_rows, 64, torch.float32), torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    getattr(megabatch, loss)(**inputs, normalize=False, backend=BACKEND, **options).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@cuda_only
@pytest.mark.parametrize("loss", LOSSES)
def test_memory_is_linear_in_the_batch(loss: str) -> None:
    peak_bytes(loss, 1000, memory_budget="64MiB")  # what libraries take once
    small, large = (peak_bytes(loss, num_rows, memory_budget="64MiB") for num_rows in (16384, 32768))
    # Twice the budget's own rounding, and of every row: float32 and bfloat16 gradients of both sides, vectors.
    assert small <= 80 * MIB + 16384 * (2 * 64 * 6 + 512)
    assert large - small <= 16 * MIB + 16384 * (2 * 64 * 6 + 512)


# ---- the choice


class Spy:
    """Counts the tiles whose statistics kernels compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiles = 0
        accumulate_statistics = Triton.accumulate_statistics

        def counted(*arguments: Any, **options: Any) -> None:
            self.tiles += 1
            accumulate_statistics(*arguments, **options)

        monkeypatch.setattr(Triton, "accumulate_statistics", counted)


@cuda_only
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=named)
def test_auto_takes_triton_where_it_can(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    results(megabatch, "clip_loss", to_device(make_inputs("clip_loss", 40, 32), dtype))
    old = torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0)
    assert (spy.tiles > 0) == (dtype != torch.float64 and not old)


@cuda_only
def test_autocast_multiplies_in_its_dtype() -> None:
    inputs = to_device(make_inputs("clip_loss", 301, 96), torch.float32)
    plain = results(megabatch, "clip_loss", inputs, backend=BACKEND)
    with torch.autocast(DEVICE, torch.bfloat16):
        cast = results(megabatch, "clip_loss", inputs, backend=BACKEND)
    for name, value in plain.items():
        assert cast[name].dtype == value.dtype
        assert (cast[name] - value).abs().max() <= EPS[torch.bfloat16] * LOGITS * value.abs().max(), name
    assert not torch.equal(cast["loss"], plain["loss"])


def test_autocast_normalises_before_it_rounds() -> None:
    """Lengths that float16 has no numbers for."""
    image, text = (normalize(torch.randn(200, 96), dim=1).to(DEVICE) for _ in range(2))
    lengths = torch.logspace(-9, 9, 200).to(DEVICE)[:, None]
    plain = megabatch.clip_loss(image, text, 10.0, normalize=True, backend=BACKEND)
    with torch.autocast(DEVICE, torch.float16):
        cast = megabatch.clip_loss(lengths * image, text, 10.0, normalize=True, backend=BACKEND)
    torch.testing.assert_close(cast, plain, rtol=0, atol=EPS[torch.float16] * 10)  # of logits of 10


@cuda_only
def test_timed_settings_give_the_same_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = to_device(make_inputs("clip_loss", 2500, 64), torch.bfloat16)
    plain = results(megabatch, "clip_loss", inputs, backend=BACKEND)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    triton_settings.tuned.cache_clear()
    assert tuning.main(["clip forward"], ["bfloat16"], [64]) == 0
    triton_settings.tuned.cache_clear()
    tuned = results(megabatch, "clip_loss", inputs, backend=BACKEND)
    assert len(triton_settings.tuned()) == 1
    triton_settings.tuned.cache_clear()
    for name, value in plain.items():
        # A rounding up instead of down, of a dlogit and of the gradient.
        assert (tuned[name] - value).abs().max() <= 2 * EPS[torch.bfloat16] * value.abs().max(), name


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_gives_the_same_results() -> None:
    inputs = to_device(make_inputs("clip_loss", 301, 96), torch.bfloat16)

    def step(**inputs: Tensor) -> Tensor:
        return megabatch.clip_loss(**inputs, normalize=False, backend=BACKEND)

    assert torch.equal(torch.compile(step, fullgraph=True)(**inputs), step(**inputs))


@two_gpus
def test_kernels_run_where_the_features_are() -> None:
    """Which need not be the current device."""
    found = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        found.append(
            results(megabatch, "clip_loss", to_device(make_inputs("clip_loss", 301, 96), torch.float32, device))
        )
    assert torch.cuda.current_device() == 0
    for name, value in found[0].items():
        assert found[1][name].device.index == 1
        torch.testing.assert_close(found[1][name].cpu(), value.cpu())


# ---- host reads


def host_read(step: Callable[[], object]) -> str:
    """In a rehearsal, only that the step runs."""
    if REHEARSAL:
        step()
        return ""
    return gpu.host_read(step)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_host_reads_nothing_back(
    loss: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all cases of `megabatch check`, whose results are right, too."""
    if REHEARSAL and backend == "triton":
        pytest.skip("kernels need a GPU")
    if REHEARSAL:
        monkeypatch.setattr(gpu, "no_host_reads", nullcontext)
    for case in cases(loss, quick=False):
        found = compare(case, named(dtype), Way(backend), World(torch.device(DEVICE)), watched=True)
        assert [str(one) for one in found if not one.ok] == []


@pytest.mark.parametrize("loss", LOSSES)
def test_the_host_reads_nothing_back_of_numbers_that_it_knows(loss: str) -> None:
    inputs = with_numbers(to_device(make_inputs(loss, 293, 72), torch.float32))
    results(megabatch, loss, inputs, backend=BACKEND)  # compiles
    assert host_read(lambda: results(megabatch, loss, inputs, backend=BACKEND)) == ""


def with_numbers(inputs: Inputs) -> Inputs:
    """Scale and bias as numbers of the host."""
    return {name: x.item() if name.startswith("logit_") else x for name, x in inputs.items()}


@cuda_only
def test_the_meter_of_host_reads_can_fail() -> None:
    x = torch.ones(3, device=DEVICE)
    assert host_read(x.sum) == ""
    assert host_read(x.sum().item) != ""


# ---- launches

# What the profiler does on its own account.
OVERHEAD = ("Activity Buffer", "Command Buffer", "Lazy Function", "Instrumentation", "Resource")
# A batch of so many tiles a side. Kept: all logits fit the default budget. Else fewer fit than are worth keeping.
TILES = [(256, (2, 4, 6), {}), (2048, (8, 12, 16), {"memory_budget": "48MiB"})]


def launched(work: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None) -> Counter[str]:
    """What ran on the device, by name: kernels, copies and fills, but no sums of a library's split product."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the first compiles, and starts the profiler
        given = prepare()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            work(given)
            torch.cuda.synchronize()
    events = [event for event in profile.events() or [] if event.device_type == DeviceType.CUDA]
    names = [event.name for event in events if not getattr(event, "is_user_annotation", False)]
    return Counter(name for name in names if not name.startswith(OVERHEAD) and "splitkreduce" not in name.lower())


@cuda_only
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_small_step_launches_at_most_45_kernels(backend: str) -> None:
    inputs = to_device(make_inputs("clip_loss", 256, 512), torch.float32)
    seen = launched(lambda _: results(megabatch, "clip_loss", inputs, backend=backend))
    assert 0 < seen.total() <= 45, seen


@cuda_only
@pytest.mark.parametrize(("tile", "sides", "options"), TILES, ids=["logits kept", "logits computed again"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_tile_launches_at_most_three_kernels_forward_and_three_backward(
    loss: str, tile: int, sides: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Launches grow by a constant, by strips of tiles and by tiles. The second difference leaves the tiles alone."""
    counts, tiles = [], []
    for side in sides:
        inputs = with_numbers(to_device(make_inputs(loss, side * tile, 72), torch.bfloat16))
        wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        how = {"normalize": False, "backend": "triton", "tile": tile, **options}
        forward = partial(getattr(megabatch, loss), **inputs, **how)
        backward = launched(lambda value, wanted=wanted: torch.autograd.grad(value, wanted), forward)
        counts.append((launched(lambda _, forward=forward: forward()).total(), backward.total()))
        strips = side * (2 if loss == "nt_xent_loss" else 1)
        tiles.append(strips * (strips + 1) / 2 if loss in ("nt_xent_loss", "supcon_loss") else strips**2)
    assert counts[-1] > (0, 0)
    per_tile = [(a - 2 * b + c) / (tiles[0] - 2 * tiles[1] + tiles[2]) for a, b, c in zip(*counts, strict=True)]
    # Both passes of these are one walk over the tiles: the forward may launch what others do in the backward.
    one_pass = loss in ("siglip_loss", "info_nce_loss")
    assert sum(per_tile) <= 6 if one_pass else max(per_tile) <= 3, per_tile


@cuda_only
def test_the_meter_of_launches_can_fail() -> None:
    x = torch.ones(3, device=DEVICE)
    assert launched(lambda _: [x.add_(1) for _ in range(7)]).total() == 7


# ---- ranks

ROWS = {2: (200, 101), 3: (120, 101, 80), 4: (120, 90, 60, 31)}
NUM_ROWS = 301
WAYS: list[dict[str, Any]] = [{"exchange": "ring"}, {"exchange": "ring", "overlap": False}, {"exchange": "gather"}]


def rank_mixes(loss: str) -> list[dict[str, Any]]:
    smooth = {} if loss == "siglip_loss" else {"label_smoothing": 0.1}
    ids = {} if loss == "supcon_loss" else {"same_ids": "mask"}
    return [{"return_stats": True}, {"weight": True, **smooth, **ids}]


def whole_batch(loss: str, mix: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[Inputs, dict[str, Any]]:
    """The same on all ranks."""
    torch.manual_seed(5)
    inputs = make_inputs(loss, NUM_ROWS, 96)
    if loss == "info_nce_loss":
        inputs["key"] = inputs["key"].detach()[:NUM_ROWS].requires_grad_()
    options = {name: x for name, x in mix.items() if name != "weight"}
    if "same_ids" in mix:
        ids = torch.randint(90, (NUM_ROWS,))
        inputs |= {"query_ids": ids, "key_ids": ids} if loss == "info_nce_loss" else {"ids": ids}
    if "weight" in mix:
        inputs["weight"] = torch.rand(NUM_ROWS)
    return to_device(inputs, dtype, device), options


def share(inputs: Inputs, rank: int, size: int) -> Inputs:
    """The rows of this rank."""
    start = sum(ROWS[size][:rank])
    rows = slice(start, start + ROWS[size][rank])
    return {
        name: x.detach()[rows].clone().requires_grad_(x.requires_grad) if x.dim() and len(x) == NUM_ROWS else x
        for name, x in inputs.items()
    }


def rank_main(rank: int, size: int, port: int, folder: str, dtypes: list[torch.dtype]) -> None:
    place = "cpu" if REHEARSAL else f"cuda:{rank}"
    if not REHEARSAL:
        torch.cuda.set_device(rank)
    dist.init_process_group(TRANSPORT, init_method=f"tcp://localhost:{port}", rank=rank, world_size=size)
    found = {}
    for loss in LOSSES:
        for dtype in dtypes:
            for number, mix in enumerate(rank_mixes(loss)):
                inputs, options = whole_batch(loss, mix, dtype, place)
                for way, how in enumerate(WAYS):
                    how = {"group": dist.group.WORLD, "backend": BACKEND, "grad_reduction": "sum", **how}
                    answer = results(megabatch, loss, share(inputs, rank, size), tile=64, **how, **options)
                    found[loss, dtype, number, way] = {name: value.cpu() for name, value in answer.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def assert_ranks_equal_one_process(size: int, folder: Path, dtypes: list[torch.dtype]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (size, port, str(folder), dtypes), nprocs=size)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    assert len(ranks[0]) == len(LOSSES) * len(dtypes) * 2 * len(WAYS)
    for loss, dtype, number, way in ranks[0]:
        mix = rank_mixes(loss)[number]
        inputs, options = whole_batch(loss, mix, dtype, "cpu")
        answers = [rank[loss, dtype, number, way] for rank in ranks]
        for name, truth in results(reference, loss, exact(inputs), **options).items():
            about = f"{loss}, {named(dtype)}, {mix}, {WAYS[way]}: {name}"
            found = [answer[name] for answer in answers]
            if not name.startswith("d "):
                assert all(torch.equal(value, found[0]) for value in found), about
                ours = found[0].double()
            elif truth.dim() == 2:
                ours = torch.cat(found).double()
            else:  # each has its part of the scale's and the bias's
                ours = torch.stack(found).double().sum(0)
            slack = 4 * EPS[torch.float32] * (LOGITS + 4)
            if dtype != torch.float32:  # of dlogits, and of the gradient of every rank's rows
                slack += 2 * EPS[dtype]
            error = (ours - truth).abs().max()
            assert error <= slack * max(truth.abs().max(), 0.01), f"{about}: off by {error:.1e}"


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=pytest.mark.skipif(not enough, reason=f"needs {size} GPUs"))
        for size in ROWS
        for enough in [REHEARSAL or torch.cuda.device_count() >= size]
    ],
)
def test_ranks_equal_one_process(size: int, tmp_path: Path) -> None:
    """nt_xent_loss and supcon_loss meet half of the ranks: with 3 each pair once, with 4 the opposite rank twice."""
    assert_ranks_equal_one_process(size, tmp_path, [torch.float32, torch.bfloat16])


# ---- graphs: last, for a capture that fails may leave the device unusable


def captured(step: Callable[[Inputs], Results], inputs: Inputs) -> Callable[[Inputs], Results]:
    """The step as a graph that is captured with these inputs, and replayed with those that it is given."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs)

    def replay(others: Inputs) -> Results:
        with torch.no_grad():
            for name, x in others.items():
                if isinstance(x, Tensor):
                    inputs[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        return found

    return replay


def reduced(step: Callable[[Inputs], Results], inputs: Inputs) -> Callable[[Inputs], Results]:
    """The same by the compiler, which records after the first few calls. Its forward alone is compiled."""
    torch.compiler.reset()
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        step(inputs)

    def replay(others: Inputs) -> Results:
        torch.compiler.cudagraph_mark_step_begin()
        return {name: x.clone() for name, x in step(others).items()}

    return replay


def assert_replays(capture: Any, library: Any, loss: str, numbers: bool, backend: str) -> None:
    """Captured with some numbers, replayed with others. Another order of a sum at most: numbers of the captured batch
    would be off by their own size."""
    first, others = (to_device(make_inputs(loss, 293, 72), torch.float32) for _ in range(2))
    if numbers:
        first, others = with_numbers(first), with_numbers(others)

    def step(inputs: Inputs) -> Results:
        return results(library, loss, inputs, backend=backend, tile=160)

    expected = results(megabatch, loss, others, backend=backend, tile=160)
    got = capture(step, first)(others)
    for name, right in expected.items():
        error = (got[name].double() - right.double()).abs().max().item()
        assert error <= 100 * EPS[torch.float32] * right.abs().max().item(), f"{name} is off by {error:.1e}"


@cuda_only
@pytest.mark.parametrize("numbers", [True, False], ids=["scale known to the host", "scale with a gradient"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_can_be_captured_in_a_graph_and_compiled_with_reduce_overhead(
    loss: str, backend: str, numbers: bool
) -> None:
    assert_replays(captured, megabatch, loss, numbers, backend)
    compiled = SimpleNamespace(**{loss: torch.compile(getattr(megabatch, loss), mode="reduce-overhead")})
    assert_replays(reduced, compiled, loss, numbers, backend)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_check_of_captures_can_fail(loss: str) -> None:
    """A replay without the new numbers gives the results of the captured ones."""

    def stale(step: Callable[[Inputs], Results], inputs: Inputs) -> Callable[[Inputs], Results]:
        found = step(inputs)
        return lambda others: found

    assert_replays(lambda step, inputs: step, megabatch, loss, False, BACKEND)
    with pytest.raises(AssertionError, match="is off by"):
        assert_replays(stale, megabatch, loss, False, BACKEND)
