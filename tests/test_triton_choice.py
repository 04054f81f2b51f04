"""Which backend runs a call, how its kernels are launched, and what is timed when, without a GPU: by fakes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megabatch
from megabatch import reference
from megabatch.backends import triton_backend, triton_settings
from megabatch.backends.backend import float32_precision, supports_half_products
from megabatch.backends.eager import Eager
from megabatch.backends.select import select
from megabatch.backends.triton_backend import Triton
from megabatch.backends.triton_settings import (
    AUTOTUNE,
    DEFAULTS,
    Settings,
    Tuning,
    architecture,
    defaults,
    precision,
    variants,
)
from megabatch.losses import spec as specs
from megabatch.tiling import call
from megabatch.tiling.options import LossOptions, Needs
from megabatch.tiling.plan import Plan, Sizes, make_plan, working_bytes

from .test_losses import LOSSES, gradients, make_inputs
from .test_structure import loaded_by

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

interpreted = pytest.mark.skipif(not triton_backend._interprets(), reason="for Triton's interpreter")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with this GPU, as far as a choice can see it."""

    def make(capability: tuple[int, int] = (9, 0), hip: str | None = None, interprets: bool = False) -> None:
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


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "meta"])
@pytest.mark.parametrize("interprets", [False, True])
def test_auto_takes_eager_on_other_devices(a_gpu: Callable[..., None], kind: str, interprets: bool) -> None:
    a_gpu(interprets=interprets)
    assert select("clip_loss", "auto", torch.device(kind), torch.float32) is Eager


@interpreted
def test_auto_takes_eager_on_the_cpu_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **how: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(Triton, "_launch", refuse)
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
        ("gfx950", "gfx942"),
        ("gfx1100", "gfx942"),
    ],
)
def test_an_unknown_architecture_is_launched_like_its_nearest_relative(unknown: str, known: str) -> None:
    assert unknown not in DEFAULTS
    for kind in ("half", "tf32", "ieee"):
        assert defaults(unknown, kind) is DEFAULTS[known][kind]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_table_has_settings_that_kernels_can_take(name: str) -> None:
    assert DEFAULTS[name].keys() == {"half", "tf32", "ieee"}
    for kind in DEFAULTS[name]:
        assert defaults(name, kind) is DEFAULTS[name][kind]
        for settings in variants(defaults(name, kind)):
            for side in (settings.rows, settings.columns, settings.width, settings.columns // settings.subtiles):
                assert side & (side - 1) == 0, settings
            assert settings.width >= 16, settings
            assert settings.columns % settings.subtiles == 0, settings


def test_what_is_tried_begins_with_the_defaults_and_has_nothing_twice() -> None:
    for kinds in DEFAULTS.values():
        for settings in kinds.values():
            tried = variants(settings)
            assert tried[0] == settings
            assert len(tried) == len(set(tried)) > 10


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


# ---- timing


@dataclass
class Bench:
    """In the place of Triton's: a clock that likes some settings best.

    Attributes:
        fits: Which settings fit the device.
        timed: What was timed, in order; `launched`: what tiles were launched with.
    """

    best: Settings
    fits: Callable[[Settings], bool] = lambda settings: True
    timed: list[Settings] = field(default_factory=list)
    launched: list[Settings] = field(default_factory=list)

    def do_bench(self, step: Callable[[], object]) -> float:
        before = len(self.launched)
        step()
        (settings,) = set(self.launched[before:])
        assert len(self.launched) - before == 2, "statistics and dlogits"
        del self.launched[before:]
        self.timed.append(settings)
        return 1.0 if self.timed[-1] == self.best else 2.0

    def start(self, backend: Triton, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        if arguments.get("x") is not None:
            names = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_WIDTH", "SUBTILES", "GROUP_ROWS", "num_warps", "num_stages")
            self.launched.append(Settings(*(arguments[name] for name in names)))
            if not self.fits(self.launched[-1]):
                from triton.runtime.errors import OutOfResources

                self.timed.append(self.launched.pop())
                raise OutOfResources(300_000, 200_000, "shared memory")
        self.original(backend, kernel, programs, arguments)

    original = staticmethod(Triton._start)


# Some of what would be tried: an interpreter takes its time.
DEFAULT, *OTHERS = variants(defaults("interpreter", "ieee"))
CANDIDATES = [DEFAULT, *OTHERS[5::8]]
BEST = CANDIDATES[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    testing = pytest.importorskip("triton.testing")
    made = Bench(BEST)
    monkeypatch.setattr(testing, "do_bench", made.do_bench)

    def start(backend: Triton, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        made.start(backend, kernel, programs, arguments)

    monkeypatch.setattr(Triton, "_start", start)
    monkeypatch.setattr(triton_settings, "variants", lambda settings: CANDIDATES)
    monkeypatch.setattr(triton_settings, "SMALLEST_TUNED", 1)
    make_plan = call.make_plan
    monkeypatch.setattr(call, "make_plan", lambda *how: make_plan(*how)._replace(kept=0, one_pass=False))
    triton_backend._tuning.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(AUTOTUNE, raising=False)
    yield made
    triton_backend._tuning.cache_clear()


def step(loss: str = "clip_loss", width: int = 6, dtype: torch.dtype = torch.float32) -> None:
    """A step on a few rows, whose results must be right."""
    inputs = make_inputs(loss, 5, width, torch.float32)
    exact = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    value = getattr(megabatch, loss)(**inputs, normalize=False, backend="triton")
    expected = getattr(reference, loss)(**exact, normalize=False)
    torch.testing.assert_close(value, expected.float())
    wanted = gradients(expected, exact)
    for name, gradient in gradients(value, inputs).items():
        torch.testing.assert_close(gradient, wanted[name].float())


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "megabatch" / "tuning.json").read_text())
    return found


@interpreted
@pytest.mark.parametrize("word", [None, "", "0"])
def test_nothing_is_timed_unless_asked_for(
    bench: Bench, word: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if word is not None:
        monkeypatch.setenv(AUTOTUNE, word)
    step()
    assert bench.timed == []
    assert set(bench.launched) == {DEFAULT}
    assert list(tmp_path.iterdir()) == []


@interpreted
def test_a_word_that_says_neither_yes_nor_no_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTOTUNE, "off")
    with pytest.raises(ValueError, match="MEGABATCH_AUTOTUNE must be 0 or 1, got 'off'"):
        step()


@interpreted
def test_small_tiles_are_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    monkeypatch.setattr(triton_settings, "SMALLEST_TUNED", 6)
    step()
    assert bench.timed == []
    assert set(bench.launched) == {DEFAULT}


@interpreted
def test_what_is_timed_once_is_known_from_then_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    step()
    assert bench.timed == CANDIDATES
    assert set(bench.launched) == {BEST}, "forward and backward form the same products"
    ((key, found),) = stored(tmp_path).items()
    assert found == asdict(BEST)
    assert Tuning().known(key) == BEST
    step()
    triton_backend._tuning.cache_clear()  # as in a new process
    step()
    assert len(bench.timed) == len(CANDIDATES)
    assert set(bench.launched) == {BEST}
    assert [path.name for path in (tmp_path / "megabatch").iterdir()] == ["tuning.json"]


@interpreted
def test_each_kind_of_call_has_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    for calls, (loss, width) in enumerate([("clip_loss", 6), ("clip_loss", 9), ("siglip_loss", 6)], 1):
        step(loss, width)
        assert len(bench.timed) == calls * len(CANDIDATES)
        assert len(stored(tmp_path)) == calls
    step("info_nce_loss")  # the same kernels as clip_loss
    assert len(stored(tmp_path)) == 3
    step("supcon_loss")  # ids matter to these
    assert len(stored(tmp_path)) == 4


@interpreted
def test_defaults_win_a_tie(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    bench.best = replace(BEST, rows=1024)
    step()
    assert set(bench.launched) == {DEFAULT}


@interpreted
def test_settings_that_do_not_fit_the_device_are_passed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    bench.fits = lambda settings: settings.rows * settings.columns < BEST.rows * BEST.columns
    step()
    assert bench.timed == CANDIDATES
    assert set(bench.launched) == {DEFAULT}


WRITTEN = {
    "half of one": '{"interpreter ieee 6 softmax": {"rows": 64, ',
    "nothing": "",
    "no table": "[1, 2]",
    "an entry of another version": '{"interpreter ieee 6 softmax": {"rows": 64, "clusters": 2}}',
    "words in an entry": json.dumps({"interpreter ieee 6 softmax": asdict(BEST) | {"rows": "64"}}),
    "a side that is no power of two": json.dumps({"interpreter ieee 6 softmax": asdict(BEST) | {"rows": 48}}),
    "an entry that is none": '{"interpreter ieee 6 softmax": 7}',
    "no text": b"\xff\xfe\x00",
}


@interpreted
@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_a_spoilt_file_is_timed_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | bytes
) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    (tmp_path / "megabatch").mkdir()
    path = tmp_path / "megabatch" / "tuning.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    step()
    assert bench.timed == CANDIDATES
    assert list(stored(tmp_path).values()) == [asdict(BEST)]


@interpreted
def test_other_entries_of_a_file_stay(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    Tuning().search("another", [BEST], lambda settings: 1.0)
    step()
    assert stored(tmp_path).keys() == {"another", "interpreter ieee 6 softmax"}


@interpreted
def test_a_step_does_not_need_a_place_to_store_what_was_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(AUTOTUNE, "1")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    step()
    assert set(bench.launched) == {BEST}
    step()
    assert len(bench.timed) == len(CANDIDATES)


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Tuning().path == tmp_path / "megabatch" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Tuning().path == tmp_path / ".cache" / "megabatch" / "tuning.json"


def test_where_nothing_fits_the_defaults_are_left(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path / "tuning.json")
    assert tuning.search("key", CANDIDATES, lambda settings: None) == CANDIDATES[0]


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
