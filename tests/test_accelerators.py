"""What an accelerator would be asked to do, without one: fake tensors on "cuda" run everything below the operators.

A fake tensor has no data, so that a host that reads any raises; a mode counts what would be launched.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._prims_common import wrappers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megabatch
from megabatch import callers, functional
from megabatch.backends import triton_backend, triton_settings
from megabatch.backends.backend import supports_half_products
from megabatch.tiling import engine, guards, handshake, results
from megabatch.tiling.options import LossInputs, LossOptions

N, D = 24, 8

# What starts no kernel: views, and memory of undefined content.
VIEWS = """alias as_strided detach diagonal expand permute reshape select slice split split_with_sizes squeeze t
transpose unbind unsqueeze view _unsafe_view _reshape_alias empty empty_like empty_strided new_empty new_empty_strided
lift_fresh"""
FREE = {f"aten.{name}" for name in VIEWS.split()} | {"prim.device"}
READS = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select"}


class Operators(TorchDispatchMode):
    """Counts what is launched, and what the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.reads: list[str] = []
        self.uploads: list[str] = []  # for which the host waits, unless the memory is pinned

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(function).rpartition(".")[0]
        to_host = torch.device(kwargs.get("device") or "cuda").type == "cpu" and name == "aten._to_copy"
        to_device = torch.device(kwargs.get("device") or "cpu").type == "cuda" and name == "aten._to_copy"
        by_mask = name == "aten.index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        places = {x.device.type for x in tree_leaves(args) if isinstance(x, Tensor)}
        on_host = (places or {torch.device(kwargs.get("device") or "cpu").type}) == {"cpu"}
        if (name in READS and not on_host) or to_host or by_mask:
            self.reads.append(name)
        if to_device and args[0].device.type == "cpu":
            self.uploads.append(name)
        if name not in FREE and not on_host:
            self.launched[name] += 1
        return function(*args, **kwargs)


class NoDevice(TorchFunctionMode):
    """`x[...]` and `copy_` by other operators: in C++ they ask for the device, which a torch without CUDA lacks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return self.get(*args)
        if function is Tensor.__setitem__:
            return self.get(*args[:2]).zero_()
        if function is Tensor.copy_:
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
            return args[0].zero_()
        return function(*args, **(kwargs or {}))

    def get(self, x: Tensor, index: Any) -> Tensor:
        index, dim = index if isinstance(index, tuple) else (index,), 0
        if any(isinstance(part, Tensor) for part in index):
            return torch.ops.aten.index(x, [part if isinstance(part, Tensor) else None for part in index])
        for part in index:
            if part is None:
                x = x.unsqueeze(dim)
            elif isinstance(part, int):
                x, dim = x.select(dim, part), dim - 1
            else:
                start, stop, _ = part.indices(x.shape[dim])
                x = x.narrow(dim, start, max(stop - start, 0))
            dim += 1
        return x


@pytest.fixture(autouse=True)
def cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(guards, "copy_to_host", lambda bounds: (bounds, None))
    monkeypatch.setattr(guards, "_pending", {})
    # Where an operator is decomposed, `out=` would be copied to by a device that is not there.
    monkeypatch.setattr(wrappers, "_safe_copy_out", lambda copy_from, copy_to, exact_dtype=False: copy_to)
    yield
    supports_half_products.cache_clear()  # of what it learnt of a GPU that is not there


def captured(loss: str, **keywords: Any) -> tuple[LossInputs, LossOptions]:
    """The call that a public function makes of its arguments."""
    calls: list[Any] = []

    def instead(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, None]:
        calls.append((inputs, options))
        return torch.zeros(()), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "contrastive_loss", instead)
        getattr(megabatch, loss)(**keywords, backend="eager")
    (call,) = calls
    return call


def on_cuda(x: Tensor | None, number: float | None) -> Tensor | None:
    """Without its data. A number that was given as such stays on the CPU, where the host knows it."""
    if x is None:
        return None
    if number is not None:
        return torch.tensor(number, dtype=x.dtype)
    return torch.empty(x.shape, dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)


def step(loss: str, **keywords: Any) -> Operators:
    """Forward and backward of a loss on fake tensors."""
    inputs, options = captured(loss, **keywords)
    numbers = [x.item() if x is not None and x.dim() == 0 and x.dtype == torch.float64 else None for x in inputs]
    operators = Operators()
    with FakeTensorMode(allow_non_fake_inputs=True), NoDevice():
        inputs = LossInputs(*map(on_cuda, inputs, numbers))
        with torch.no_grad(), operators:
            value, _, saved = engine.forward(inputs, options)
        upstream = torch.ones_like(value)
        with torch.no_grad(), operators:
            engine.backward(inputs, options, upstream, saved)
    return operators


FEATURES = {
    "clip_loss": ("image_features", "text_features"),
    "info_nce_loss": ("query", "key"),
    "siglip_loss": ("image_features", "text_features"),
    "nt_xent_loss": ("view1", "view2"),
    "supcon_loss": ("features",),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalize": {"normalize": True},
    "normalize, fixed scale": {"normalize": True, "logit_scale": 20.0},
    "ids mask": {"ids": torch.arange(N) // 2},
    "ids positive": {"ids": torch.arange(N) // 2, "same_ids": "positive"},
    "weight": {"weight": torch.rand(N)},
    "label_smoothing": {"label_smoothing": 0.1},
    "return_stats": {"return_stats": True},
    "positives": {"positives": torch.arange(N).flip(0)},
    "negatives": {"negatives": torch.randn(5, D)},
    "reduction none": {"reduction": "none"},
    "reduction none, weight": {"reduction": "none", "weight": torch.rand(N)},
    "logits kept": {"tile": 8},
    "logits formed again": {"tile": 8, "memory_budget": 4096},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "normalize bf16": {"dtype": torch.bfloat16, "normalize": True},
    "scale without a gradient": {"logit_scale": torch.tensor(20.0)},
    "features without a gradient": {"requires_grad": False},
}


def cases() -> Iterator[Any]:
    for loss, (name, options) in itertools.product(FEATURES, OPTIONS.items()):
        keywords = dict(options)
        if loss != "info_nce_loss" and (name in ("positives", "negatives")):
            continue
        if loss == "siglip_loss" and "label_smoothing" in keywords:
            continue
        if loss == "supcon_loss" and "ids" in keywords:
            continue
        if loss == "info_nce_loss" and "ids" in keywords:
            ids = keywords.pop("ids")
            keywords |= {"query_ids": ids, "key_ids": ids}
        yield pytest.param(loss, keywords, id=f"{loss} {name}")


def arguments(loss: str, keywords: dict[str, Any], rows: int = N, width: int = D) -> dict[str, Any]:
    keywords = dict(keywords)
    dtype, grad = keywords.pop("dtype", torch.float32), keywords.pop("requires_grad", True)
    if "negatives" in keywords:
        keywords["negatives"] = keywords["negatives"].to(dtype)
    features = {name: torch.randn(rows, width, dtype=dtype, requires_grad=grad) for name in FEATURES[loss]}
    keywords = {"logit_scale": torch.tensor(20.0, requires_grad=True), "normalize": False, **features, **keywords}
    if loss == "siglip_loss":
        keywords["logit_bias"] = torch.tensor(-10.0, requires_grad=True)
    if loss == "supcon_loss":
        keywords["labels"] = torch.arange(rows) // 2
    return keywords


@pytest.mark.parametrize(("loss", "keywords"), list(cases()))
def test_the_host_reads_nothing(loss: str, keywords: dict[str, Any]) -> None:
    found = step(loss, **arguments(loss, keywords))
    assert found.reads == found.uploads == []


def test_a_bias_that_changes_nothing_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = captured("clip_loss", **arguments("clip_loss", {}))
    with FakeTensorMode(allow_non_fake_inputs=True), NoDevice(), Operators() as operators:
        value = torch.empty((), device="cuda")
        monkeypatch.setattr(functional, "contrastive_loss", lambda *call: (value, None))
        functional._run(inputs, options, torch.tensor(-10.0))
    assert operators.uploads == []


def test_a_scale_that_only_the_device_knows_is_not_rounded_again() -> None:
    """1 / (number of rows) times a bfloat16 would be a bfloat16."""
    with FakeTensorMode():
        given = torch.ones((), dtype=torch.bfloat16, device="cuda")
        for dtype, computed in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            scale = guards.scalar(given, 1.0, torch.ones(2, 2, dtype=dtype, device="cuda"))
            assert isinstance(scale, Tensor)
            assert scale.dtype == computed


class OnCuda(Tensor):
    """A CPU tensor that says it is elsewhere."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize(("dtype", "num_keys"), [(torch.uint8, 300), (torch.int8, 200), (torch.int16, 2**16)], ids=str)
def test_indices_of_a_small_dtype_are_compared_as_numbers(dtype: torch.dtype, num_keys: int) -> None:
    indices = torch.tensor([0, 127], dtype=dtype).as_subclass(OnCuda)
    guards.check_indices("f", "positives", indices, num_keys)
    with pytest.raises(RuntimeError, match="f: positives must be rows of key, 0 to 126"):
        guards.check_indices("f", "positives", indices, 127)


def test_ranks_whose_scale_is_infinite_agree() -> None:
    call: Any = SimpleNamespace(options=SimpleNamespace(function="f"))
    results._check_equal(call, torch.tensor([[1.0, torch.inf, torch.nan]] * 3))
    with pytest.raises(ValueError, match="f: logit_scale"):
        results._check_equal(call, torch.tensor([[1.0, 2.0], [1.0, 3.0]]))


@pytest.mark.parametrize("loss", FEATURES)
def test_warnings_are_not_waited_for(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of rows, and ids, travel to the host by a copy that nobody waits for."""
    copied: list[Tensor] = []
    monkeypatch.setattr(guards, "copy_to_host", lambda bounds: (copied.append(bounds), None))
    monkeypatch.setattr(callers, "warned", set())
    keywords: dict[str, Any] = {"normalize": None}
    if loss in ("clip_loss", "siglip_loss", "nt_xent_loss"):
        keywords["ids"] = torch.arange(N) // 2
    assert step(loss, **arguments(loss, keywords)).reads == []
    assert len(copied) == 1 + ("ids" in keywords)


def test_a_read_is_seen() -> None:
    with FakeTensorMode(), Operators() as operators:
        x = torch.ones(3, device="cuda")
        x.to("cpu")
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
    assert operators.reads == ["aten._to_copy", "aten._local_scalar_dense"]


def test_a_small_step_launches_little() -> None:
    """Without the three additions to leaves' gradients, which are autograd's."""
    step("clip_loss", **arguments("clip_loss", {}))  # asks once what the device can multiply
    launched = step("clip_loss", **arguments("clip_loss", {}, rows=256, width=512)).launched
    assert launched.total() <= 45, launched


def test_a_capture_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph may not ask for events or copy to the host, and launches the same every time."""
    monkeypatch.setattr(guards, "is_capturing", lambda: True)
    monkeypatch.setattr(guards, "copy_to_host", lambda bounds: pytest.fail("copies to the host"))
    keywords = arguments("clip_loss", {"normalize": None, "ids": torch.arange(N) // 2})
    _, first, second = (step("clip_loss", **keywords) for _ in range(3))
    assert first.launched == second.launched
    assert first.reads == second.reads == []


def test_compilers_keep_the_operators_out_of_their_graphs() -> None:
    for operator in (torch.ops.megabatch.contrast.default, torch.ops.megabatch.contrast_backward.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.parametrize("loss", FEATURES)
def test_devices_without_float64_are_refused(loss: str) -> None:
    keywords = arguments(loss, {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        keywords |= {name: torch.empty(N, D, device="mps") for name in FEATURES[loss]}
        with pytest.raises(
            ValueError, match=rf"^{loss}: {FEATURES[loss][0]} must be on a device with float64, .*cpu\(\)"
        ):
            getattr(megabatch, loss)(**keywords)


# ---- kernels


@pytest.fixture
def kernels_on_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The triton backend for a GPU that is not there; its kernels are counted, not started."""
    pytest.importorskip("triton")
    started: Counter[str] = Counter()
    monkeypatch.setattr(triton_settings, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(handshake, "select", lambda *call: triton_backend.Triton)
    monkeypatch.setattr(
        triton_backend.Triton, "_start", lambda self, kernel, *rest, **options: started.update([kernel.__name__])
    )
    return started


@pytest.mark.parametrize(("loss", "keywords"), [case for case in cases() if "fp64" not in str(case.id)])
def test_the_host_reads_nothing_for_kernels(
    loss: str, keywords: dict[str, Any], kernels_on_fake_cuda: Counter[str]
) -> None:
    assert step(loss, **arguments(loss, keywords)).reads == []
    assert kernels_on_fake_cuda.total() > 0


@pytest.mark.parametrize("check", ["check_indices", "check_weight"])
def test_only_a_gpu_that_works_alone_stops_at_bad_values(check: str) -> None:
    """One rank of a group that stopped would leave the others waiting; other accelerators do not stop."""
    arguments = ("positives", 3) if check == "check_indices" else ()
    with FakeTensorMode(), Operators() as operators:
        for device, group, waits in [("cuda", "", False), ("cuda", "a group", True), ("xpu", "", True)]:
            values = torch.ones(4, dtype=torch.int64, device=device)
            call = [*arguments[:1], values, *arguments[1:], group]
            if waits:
                with pytest.raises(DataDependentOutputException):
                    getattr(guards, check)("f", *call)
            else:
                getattr(guards, check)("f", *call)
                assert operators.launched["aten._assert_async"] == 1
    assert operators.launched["aten._assert_async"] == 1
