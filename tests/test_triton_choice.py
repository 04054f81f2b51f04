"""Which backend runs a call, and how its kernels are launched, without a GPU: by fakes."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megabatch
from megabatch import reference
from megabatch.backends import backend, triton_backend
from megabatch.backends.backend import float32_precision, supports_half_products
from megabatch.backends.eager import Eager
from megabatch.backends.select import select
from megabatch.backends.triton_backend import Triton
from megabatch.backends.triton_settings import (
    ARGUMENTS,
    DEFAULTS,
    Settings,
    architecture,
    defaults,
    precision,
    tuned,
    tuning_path,
)
from megabatch.losses import spec as specs
from megabatch.losses.block import Block, Tile
from megabatch.tiling import call
from megabatch.tiling.options import LossOptions, Needs
from megabatch.tiling.plan import Plan, Sizes, make_plan, working_bytes
from tools.kernels.tuning import candidates

from .test_losses import LOSSES, gradients, make_inputs
from .test_structure import loaded_by

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

interpreted = pytest.mark.skipif(not triton_backend._interprets(), reason="for Triton's interpreter")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Whether Triton can be imported, which a process asks once."""
    real = triton_backend._import_trouble
    real.cache_clear()
    yield
    real.cache_clear()


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with this GPU, as far as a choice can see it."""

    def make(capability: tuple[int, int] = (9, 0), hip: str | None = None, interprets: bool = False) -> None:
        architecture.cache_clear()
        monkeypatch.setattr(triton_backend, "_interprets", lambda: interprets)
        monkeypatch.setattr(triton_backend, "_launch_trouble", lambda: "")
        monkeypatch.setattr(triton_backend, "supports_half_products", lambda device: True)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(gcnArchName=f"{hip}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return make


def refusal(name: str, device: torch.device, dtype: torch.dtype) -> str:
    with pytest.raises(ValueError) as caught:
        select("clip_loss", name, device, dtype)
    return str(caught.value)


# ---- the choice


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_auto_takes_triton_on_gpus(a_gpu: Callable[..., None], capability: tuple[int, int], dtype: torch.dtype) -> None:
    a_gpu(capability)
    assert select("clip_loss", "auto", CUDA, dtype) is Triton


def test_auto_takes_triton_on_rocm_whatever_its_capability_is_said_to_be(a_gpu: Callable[..., None]) -> None:
    a_gpu((6, 0), hip="gfx942")
    assert select("clip_loss", "auto", CUDA, torch.bfloat16) is Triton


def test_auto_takes_eager_where_triton_cannot_run(a_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu((7, 5))
    assert select("clip_loss", "auto", CUDA, torch.float16) is Eager
    a_gpu((9, 0), interprets=True)  # slow beyond use
    assert select("clip_loss", "auto", CUDA, torch.float16) is Eager
    a_gpu((9, 0))
    assert select("clip_loss", "auto", CUDA, torch.float64) is Eager
    for trouble in ("_launch_trouble", "_import_trouble"):
        with monkeypatch.context() as patch:
            patch.setattr(triton_backend, trouble, lambda: "it cannot")
            assert select("clip_loss", "auto", CUDA, torch.float16) is Eager
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "supports_half_products", lambda device: False)
        assert select("clip_loss", "auto", CUDA, torch.float16) is Eager
        assert select("clip_loss", "auto", CUDA, torch.float32) is Triton
        assert not Triton.multiplies_half(CUDA, False)
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    triton_backend._import_trouble.cache_clear()
    assert select("clip_loss", "auto", CUDA, torch.float16) is Eager


def test_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(triton_backend, "import_module", fail)
    found = Triton.reasons_against(CPU, torch.float32)
    assert found[0] == "triton cannot be imported (OSError: libcuda.so.1: no such file). Install it anew"


def test_kernels_that_cannot_be_launched_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_backend, "_interprets", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    triton_backend._launch_trouble.cache_clear()
    (reason,) = Triton.reasons_against(CUDA, torch.float32)
    triton_backend._launch_trouble.cache_clear()
    assert reason.startswith("triton cannot launch kernels here (")
    assert reason.endswith("It may want a C compiler: set CC")


@pytest.mark.parametrize(("refuses", "able"), [(False, True), (True, False)])
def test_whether_bf16_is_multiplied_into_float32_is_tried(
    refuses: bool, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> None:
        if refuses:
            raise RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm")

    made = torch.zeros(16, 16)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: made)
    monkeypatch.setattr(torch, "mm", multiply)
    assert supports_half_products.__wrapped__(CUDA) is able
    assert supports_half_products(CPU)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_product_of_bf16_is_added_to_float32_by_one_launch_where_torch_can(
    accumulates: bool, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []

    def addmm(*operands: torch.Tensor, **how: Any) -> torch.Tensor:
        launched.append(how)
        return operands[0]

    monkeypatch.setattr(backend, "supports_half_products", lambda device, accumulated: accumulates)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", lambda *_, out_dtype: torch.empty(4, 3, dtype=out_dtype, device="meta"))
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8), (8, 3)))
    out = torch.empty(4, 3, device="meta")
    assert backend.multiply(left, right, out, alpha=0.5, beta=beta) is out
    how = {"out_dtype": torch.float32, "alpha": 0.5, "beta": beta, "out": out}
    assert [entry.keys() for entry in launched] == ([how.keys()] if accumulates else [])
    for entry in launched:
        assert all(entry[name] is value for name, value in how.items())


@pytest.mark.parametrize(("refuses", "able"), [(False, True), (True, False)])
def test_whether_bf16_is_added_to_float32_is_tried(refuses: bool, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def addmm(*operands: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        assert [x.dtype for x in operands] == [torch.float32, torch.bfloat16, torch.bfloat16]
        if refuses:
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")

    monkeypatch.setattr(torch, "addmm", addmm)
    assert backend.supports_half_products.__wrapped__(CPU, accumulated=True) is able


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "meta"])
@pytest.mark.parametrize("interprets", [False, True])
def test_auto_takes_eager_on_other_devices(a_gpu: Callable[..., None], kind: str, interprets: bool) -> None:
    a_gpu(interprets=interprets)
    assert select("clip_loss", "auto", torch.device(kind), torch.float32) is Eager


@interpreted
def test_auto_takes_eager_on_the_cpu_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **how: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(Triton, "_start", refuse)
    for loss in LOSSES:
        getattr(megabatch, loss)(**make_inputs(loss, 5, 4, torch.float32), normalize=False).backward()
    with pytest.raises(AssertionError, match="was launched"):
        megabatch.clip_loss(torch.eye(3), torch.eye(3), 2.0, backend="triton")


def test_one_asked_for_by_name_is_taken(a_gpu: Callable[..., None]) -> None:
    a_gpu()
    assert select("clip_loss", "triton", CUDA, torch.float32) is Triton
    assert select("clip_loss", "eager", CUDA, torch.float32) is Eager
    a_gpu(interprets=True)
    assert select("clip_loss", "triton", CPU, torch.float32) is Triton


def test_a_refusal_lists_every_reason(a_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu((7, 5))
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert refusal("triton", CUDA, torch.float64) == (
        "clip_loss: backend 'triton' cannot run this call:\n"
        "  triton is not installed. Install it with pip install triton.\n"
        "  the GPU has compute capability 7.5. It needs 8.0 or newer.\n"
        "  the features are float64. Its kernels compute in float32.\n"
        "Pass backend='auto' to let the library choose."
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        ("cpu", torch.float32, "the features are on the CPU. Move them to a GPU, or set TRITON_INTERPRET=1"),
        ("mps", torch.float32, "the features are on mps. It runs on CUDA and ROCm devices"),
        ("cuda", torch.float64, "the features are float64."),
    ],
)
def test_a_refusal_has_no_reason_that_does_not_apply(
    a_gpu: Callable[..., None], kind: str, dtype: torch.dtype, reason: str
) -> None:
    a_gpu()
    first, *reasons, last = refusal("triton", torch.device(kind), dtype).splitlines()
    assert first == "clip_loss: backend 'triton' cannot run this call:"
    assert last == "Pass backend='auto' to let the library choose."
    assert len(reasons) == 1
    assert reasons[0].startswith(f"  {reason}")


@pytest.mark.parametrize(("function", "arguments"), [("retrieval_ranks", ()), ("similarity_topk", (1,))])
def test_searches_refuse_too(function: str, arguments: tuple[int, ...]) -> None:
    features = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="backend 'triton' cannot run this call"):
        getattr(megabatch, function)(features, features, *arguments, backend="triton")


ALONE = """
import sys, megabatch
features = torch.eye(3, requires_grad=True)
megabatch.clip_loss(features, features, 2.0).backward()
assert "megabatch.backends.triton_kernels" not in sys.modules, "loaded for nothing"
try:
    megabatch.clip_loss(features, features, 2.0, backend="triton")
except ValueError as error:
    assert "TRITON_INTERPRET=1" in str(error)
else:
    raise SystemExit("kernels ran without a GPU")
"""


def test_without_the_interpreter_the_cpu_loads_no_kernels_and_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: it is too late for that in this one."""
    monkeypatch.delenv("TRITON_INTERPRET")
    loaded_by(ALONE, [])


# ---- the table


def test_an_architecture_is_named_as_in_the_table(a_gpu: Callable[..., None]) -> None:
    assert architecture(CPU) == "interpreter"
    a_gpu((9, 0))
    assert architecture(CUDA) == "sm_90"
    a_gpu((10, 0))
    assert architecture(CUDA) == "sm_100"
    a_gpu(hip="gfx942")
    assert architecture(CUDA) == "gfx942"


@pytest.mark.parametrize(
    ("unknown", "known"),
    [
        ("sm_87", "sm_86"),
        ("sm_89", "sm_86"),
        ("sm_103", "sm_100"),
        ("sm_120", "sm_86"),
        ("sm_121", "sm_86"),
        ("gfx90a", "gfx942"),
        ("gfx1100", "gfx942"),
    ],
)
def test_an_unknown_architecture_is_launched_like_its_nearest_relative(unknown: str, known: str) -> None:
    assert unknown not in DEFAULTS
    for kind in ("half", "tf32", "given"):
        assert defaults(unknown, kind) is DEFAULTS[known][kind]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_table_has_settings_that_kernels_can_take(name: str) -> None:
    assert DEFAULTS[name].keys() == {"half", "tf32", "given"}
    for kind in DEFAULTS[name]:
        assert defaults(name, kind) is DEFAULTS[name][kind]
        for settings in candidates(defaults(name, kind)):
            for side in (settings.rows, settings.columns, settings.width, settings.columns // settings.subtiles):
                assert side & (side - 1) == 0, settings
            assert settings.width >= 16, settings
            assert settings.columns % settings.subtiles == 0, settings


@pytest.fixture
def _precision_put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_precision_put_back")
def test_tf32_is_the_callers_choice() -> None:
    assert float32_precision(CUDA) == "ieee"
    torch.set_float32_matmul_precision("high")
    assert float32_precision(CUDA) == "tf32"
    assert float32_precision(CPU) == "ieee"
    torch.set_float32_matmul_precision("highest")
    assert float32_precision(CUDA) == "ieee"


@pytest.mark.parametrize(("name", "taken"), [("sm_80", "tf32"), ("gfx942", "tf32"), ("gfx90a", "ieee")])
def test_float32_is_multiplied_as_the_device_can(name: str, taken: str) -> None:
    assert precision("tf32", name) == taken
    assert precision("ieee", name) == "ieee"


# ---- tuned settings

TUNED = Settings(64, 32, 16, subtiles=2, group_rows=1, warps=2, stages=2)
KEY = (
    "interpreter given D=6 epilogue=softmax ids=ignore targets=consecutive two_sided=True smoothing=False "
    "normalize=False stats=False sums=False one_pass=False"
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Settings]]:
    """The settings that tiles are launched with, where nothing is kept and no file is there yet."""
    found: list[Settings] = []
    original, make_plan = Triton._start, call.make_plan

    def start(backend: Triton, kernel: Any, num_programs: int, arguments: dict[str, Any]) -> None:
        if "BLOCK_COLUMNS" in arguments:
            found.append(Settings(*(arguments[name] for name in ARGUMENTS)))
        original(backend, kernel, num_programs, arguments)

    monkeypatch.setattr(Triton, "_start", start)
    monkeypatch.setattr(call, "make_plan", lambda *how: make_plan(*how)._replace(kept=0, one_pass=False))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned.cache_clear()
    yield found
    tuned.cache_clear()


def write(text: str | bytes) -> None:
    tuning_path().parent.mkdir()
    tuning_path().write_bytes(text if isinstance(text, bytes) else text.encode())


def step(loss: str = "clip_loss", **options: Any) -> None:
    """A step on a few rows, whose results must be right."""
    inputs = make_inputs(loss, 5, 6, torch.float32)
    exact = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    value = getattr(megabatch, loss)(**inputs, backend="triton", **{"normalize": False, **options})
    expected = getattr(reference, loss)(**exact, **{"normalize": False, **options})
    torch.testing.assert_close(value, expected.float())
    wanted = gradients(expected, exact)
    for name, gradient in gradients(value, inputs).items():
        torch.testing.assert_close(gradient, wanted[name].float())


@interpreted
def test_without_a_file_settings_are_the_defaults(launched: list[Settings], tmp_path: Path) -> None:
    step()
    assert launched == [defaults("interpreter", "given")] * 2
    assert list(tmp_path.iterdir()) == []


@interpreted
def test_tuned_settings_serve_forward_and_backward_of_their_kind_of_call(launched: list[Settings]) -> None:
    write(json.dumps({KEY: asdict(TUNED)}))
    step()
    assert launched == [TUNED] * 2
    for loss, options in OTHER_KINDS:
        launched.clear()
        step(loss, **options)
        assert set(launched) == {defaults("interpreter", "given")}, (loss, options)


OTHER_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("clip_loss", {"label_smoothing": 0.1}),
    ("clip_loss", {"normalize": True}),
    ("clip_loss", {"ids": torch.tensor([0, 0, 1, 2, 3])}),
    ("info_nce_loss", {}),
    ("siglip_loss", {}),
    ("supcon_loss", {}),
]


def test_a_key_names_all_that_kernels_differ_in() -> None:
    def key(spec: specs.Spec, width: int = 6, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        block = Block(torch.zeros(3, width), 0, inverse_norm=torch.ones(3) if options.pop("normalize", False) else None)
        block.targets = torch.zeros(3) if options.pop("explicit", False) else None
        backend = Triton(spec, 1.0, 0.0, torch.float32, dtype, CPU, **options)
        return backend.tuning_key(Tile(block, block))

    plain = specs.clip("ignore", 0.0)
    assert key(plain) == KEY
    keys = [key(plain), key(plain, 9), key(plain, dtype=torch.float16), key(plain, stats=True)]
    keys += [key(plain, normalize=True), key(specs.clip("mask", 0.0)), key(specs.clip("positive", 0.0))]
    keys += [key(specs.clip("ignore", 0.1)), key(specs.info_nce("ignore", 0.0)), key(specs.siglip("ignore"))]
    keys += [key(plain, explicit=True), key(plain, sum_for_scale=True), key(specs.siglip("ignore"), one_pass=True)]
    keys += [key(specs.nt_xent("positive", 0.0)), key(specs.supcon(0.0))]
    assert len(set(keys)) == len(keys) - 1  # the same rows with and without a symmetric plane
    assert key(specs.nt_xent("positive", 0.0)) == key(specs.clip("positive", 0.0))


SPOILT = {
    "half of one": f'{{"{KEY}": {{"rows": 64, ',
    "nothing": "",
    "no table": "[1, 2]",
    "an entry of another version": f'{{"{KEY}": {{"rows": 64, "clusters": 2}}}}',
    "words in an entry": json.dumps({KEY: asdict(TUNED) | {"rows": "64"}}),
    "a side that is no power of two": json.dumps({KEY: asdict(TUNED) | {"rows": 48}}),
    "less than one stage": json.dumps({KEY: asdict(TUNED) | {"stages": 0}}),
    "an entry that is none": f'{{"{KEY}": 7}}',
    "no text": b"\xff\xfe\x00",
}


@interpreted
@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_is_ignored_and_said_so_once(
    launched: list[Settings], text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(text)
    step()
    step()
    (message,) = caplog.messages
    assert re.search(r"tuning.json is ignored \(.+\). Run python -m tools.kernels --tune again", message)
    assert set(launched) == {defaults("interpreter", "given")}


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_path() == tmp_path / "megabatch" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_path() == tmp_path / ".cache" / "megabatch" / "tuning.json"


# ---- the plan


def planned(spec: specs.Spec, num_rows: int, width: int, budget: int | None = None) -> tuple[Plan, int]:
    """Of bf16 features on a GPU, with the bytes that it takes."""
    options = LossOptions("a_loss", spec, Needs(True, True, scale=True), memory_budget=budget)
    sizes = Sizes(
        rows=(num_rows,),
        columns=(num_rows,),
        remote=(),
        width=width,
        element=4,
        operand=2,
        copied=False,
        sum_for_scale=True,
        backend=Triton,
        threads=2,
    )
    plan = make_plan(options, sizes, may_be_one_pass=True)
    kept = plan.kept * plan.slot_size * 4
    return plan, working_bytes(options, sizes, plan.rows, plan.columns) + kept


@pytest.mark.parametrize("spec", [specs.clip("ignore", 0.0), specs.nt_xent("mask", 0.1)], ids=str)
def test_tiles_of_a_gpu_are_large(spec: specs.Spec) -> None:
    plan, _ = planned(spec, 65536, 768)
    assert plan.rows >= 4096
    assert plan.columns >= 4096


@pytest.mark.parametrize("num_rows", [4096, 16384, 32768])
def test_queries_take_one_pass_where_a_strip_of_useful_height_fits(num_rows: int) -> None:
    plan, _ = planned(specs.info_nce("ignore", 0.0), num_rows, 768)
    assert plan.one_pass
    assert plan.rows >= 1024


@pytest.mark.parametrize("budget", [None, 2**23, 2**26, 2**30])
@pytest.mark.parametrize("width", [64, 1024, 4096])
@pytest.mark.parametrize(
    "spec", [specs.clip("ignore", 0.0), specs.info_nce("mask", 0.0), specs.nt_xent("ignore", 0.0)], ids=str
)
def test_a_plan_for_a_gpu_keeps_to_its_budget(spec: specs.Spec, width: int, budget: int | None) -> None:
    for num_rows in (300, 5000, 40000):
        plan, taken = planned(spec, num_rows, width, budget)
        assert taken <= (budget or Triton.default_budget)
        # A product of bf16 before it is added to a gradient, and the dlogits.
        least = 4 * max(plan.rows, plan.columns) * width + 2 * plan.rows * plan.columns
        assert taken >= least
