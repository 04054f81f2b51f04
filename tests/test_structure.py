"""The rooms of the library: which may import which, what importing it costs, and what it promises by name."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch
from megabatch import reference

from .shims import import_torchvision

PACKAGE = Path(megabatch.__file__).parent
PATHS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# The public names, as a room: `import megabatch`.
PUBLIC = "megabatch"

# Each room, and the rooms it may import. A room may always import itself.
MAY_IMPORT = {
    "losses": set(),
    "distributed": set(),
    "keywords": set(),
    "callers": set(),
    "tolerance": set(),
    "reference": {"keywords"},
    "backends": {"losses"},
    "tiling": {"callers", "losses", "backends", "distributed"},
    "checks": {"callers", "keywords"},
    "functional": {"callers", "keywords", "checks", "tiling", "losses", "backends", "distributed"},
    "retrieval": {"callers", "keywords", "checks", "tiling", "losses", "backends", "distributed"},
    "modules": {"functional", "keywords", "checks", "distributed"},
    "caching": {"callers", "checks", "distributed"},
    "__init__": {"functional", "modules", "retrieval", "caching", "backends", "loading"},
    "loading": {"train"},
    "machine": {PUBLIC, "distributed"},
    "integrations": {PUBLIC, "distributed"},
    "bench": {PUBLIC, "integrations", "reference", "tolerance", "machine", "distributed", "train"},
    "plan": {PUBLIC, "tiling", "backends", "losses"},
    "report": {PUBLIC},
    "train": {PUBLIC, "reference", "distributed", "machine", "plan", "report"},
    "check": {PUBLIC, "reference", "tolerance", "machine", "bench", "distributed"},
    "cli": {PUBLIC, "check", "train", "bench", "plan"},
    "completion": {"cli"},
    "__main__": {"cli"},
}

LOSSES = ["clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss", "supcon_loss"]
WITH_TWIN = [*LOSSES, "retrieval_ranks", "similarity_topk"]

# Nothing that only an extra, a backend or a benchmark needs.
HEAVY = ["triton", "matplotlib", "psutil", "pandas", "transformers", "sentence_transformers", "open_clip", "lightly"]
HEAVY += ["pytorch_metric_learning", "pytorch_lightning", "datasets", "accelerate", "torchvision"]
HEAVY += ["PIL", "yaml", "rich", "braceexpand", "tensorboard", "qtawesome", "plotly", "jinja2"]


def room_of(path: str) -> str:
    return Path(path).with_suffix("").parts[0]


def modules_imported_by(source: str, path: str) -> Iterator[str]:
    """The dotted names that the file at `path` of the package imports, wherever in the file it does so."""
    folder = ["megabatch", *Path(path).parent.parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base = [*base, *node.module.split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def rooms_imported_by(source: str, path: str) -> set[str]:
    rooms = set()
    for name in modules_imported_by(source, path):
        package, *rest = name.split(".")
        if package == "megabatch":
            rooms.add(rest[0] if rest and rest[0] in MAY_IMPORT else PUBLIC)
    return rooms


def forbidden_imports(source: str, path: str) -> set[str]:
    room = room_of(path)
    return rooms_imported_by(source, path) - MAY_IMPORT[room] - {room}


def loaded_by(statement: str, names: list[str]) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after `statement`, and had not after `import torch`."""
    code = (
        f"import sys, torch\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before) & {set(names)})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted(run.stdout.split())


def parameters(function) -> list[tuple]:
    return [(p.name, p.kind.description, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_belongs_to_a_known_room(path):
    assert room_of(path) in MAY_IMPORT, f"{path}: say in MAY_IMPORT what the room {room_of(path)!r} may import"


@pytest.mark.parametrize("path", [path for path in PATHS if room_of(path) in MAY_IMPORT])
def test_imports_point_downwards(path):
    assert forbidden_imports((PACKAGE / path).read_text(), path) == set()


@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("bench/")])
def test_benchmarks_measure_what_users_call(path):
    """Public names, and the ranks they run on; `step`, which trains, and `data` may know the trainer."""
    allowed = {"bench", PUBLIC, "integrations", "reference", "tolerance", "distributed", "machine"}
    allowed |= {"train"} if path in ("bench/step.py", "bench/data.py") else set()
    assert rooms_imported_by((PACKAGE / path).read_text(), path) <= allowed


def test_every_room_of_the_table_exists():
    assert {room_of(path) for path in PATHS} >= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("losses/spec.py", "import megabatch.tiling.layout", {"tiling"}),
        ("losses/spec.py", "from megabatch.backends import eager", {"backends"}),
        ("losses/spec.py", "from megabatch import functional", {"functional"}),
        ("losses/spec.py", "from ..distributed.ring import RingPass", {"distributed"}),
        ("losses/spec.py", "from .. import tiling", {"tiling"}),
        ("losses/spec.py", "def f():\n    from ..tiling import layout", {"tiling"}),
        ("losses/spec.py", "import megabatch as mb", {PUBLIC}),
        ("losses/spec.py", "from megabatch import clip_loss", {PUBLIC}),
        ("losses/__init__.py", "from ..tiling import layout", {"tiling"}),
        ("reference.py", "from .losses import Spec", {"losses"}),
        ("reference.py", "from . import functional", {"functional"}),
        ("modules.py", "from .tiling import layout", {"tiling"}),
        ("bench/loss.py", "from megabatch.functional import clip_loss", {"functional"}),
        ("backends/eager.py", "from ..losses.spec import Spec\nfrom . import select\nimport torch", set()),
        ("losses/spec.py", "from .state import State\nfrom . import block", set()),
        (
            "bench/loss.py",
            "import megabatch\nfrom megabatch import reference\nfrom .report import table",
            set(),
        ),
    ],
)
def test_the_import_check_can_fail(path, source, found):
    assert forbidden_imports(source, path) == found


def test_importing_the_library_does_not_import_triton_or_any_extra():
    """Another import beside it, which must be found: the check can fail."""
    assert loaded_by("import megabatch, hypothesis", [*HEAVY, "hypothesis"]) == ["hypothesis"]


def loaded_by_a_first_call(loss: str) -> list[str]:
    call = f"x = torch.randn(64, 8, requires_grad=True)\n{loss}(x, x.detach().clone(), 10.0, normalize=True).backward()"
    return loaded_by(f"import megabatch, megabatch.reference\n{call}", ["torch._dynamo", "torch._inductor"])


def test_a_first_call_imports_no_compiler():
    assert loaded_by_a_first_call("megabatch.clip_loss") == []


def test_the_check_for_compilers_can_fail():
    assert "torch._dynamo" in loaded_by_a_first_call("torch.compile(megabatch.reference.clip_loss, backend='eager')")


class FramesOfProducts(TorchDispatchMode):
    """Which frames of the package are on the stack at every matrix product, outermost first, as (file, function)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[list[tuple[str, str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            stack, frame = [], sys._getframe()
            while frame is not None:
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                    stack.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
                frame = frame.f_back
            self.stacks.append(stack[::-1])
        return func(*args, **(kwargs or {}))


def test_few_frames_lie_between_a_loss_and_its_product():
    x = torch.nn.functional.normalize(torch.randn(64, 8), dim=1).requires_grad_()
    with FramesOfProducts() as frames:
        megabatch.clip_loss(x, x.detach().clone(), 10.0)
    (stack,) = frames.stacks
    assert stack[0] == ("functional.py", "clip_loss")
    assert stack[-1][0] == "eager.py"
    assert len(stack) <= 7, stack
    assert len(set(stack)) == len(stack), stack


CORE = {"losses", "tiling", "backends", "distributed", "functional", "checks", "modules", "retrieval"}
LONG = "backends/triton_kernels.py"


@pytest.mark.parametrize("path", [path for path in PATHS if room_of(path) in CORE and path != LONG])
def test_a_file_of_the_core_can_be_read_in_one_sitting(path):
    assert len((PACKAGE / path).read_text().splitlines()) <= 400


def test_every_public_name_resolves():
    assert len(megabatch.__all__) == len(set(megabatch.__all__))
    for name in megabatch.__all__:
        assert getattr(megabatch, name) is not None


DROP_INS = ["inf_cl", "lightly", "open_clip", "pytorch_metric_learning", "sentence_transformers"]


@pytest.mark.parametrize("name", DROP_INS)
def test_a_drop_in_shows_its_public_names_only(name):
    if name == "sentence_transformers":
        import_torchvision()
    module = import_module(f"megabatch.integrations.{name}")
    assert dir(module) == sorted(module.__all__)


def test_reference_offers_exactly_the_twins():
    assert sorted(reference.__all__) == sorted(WITH_TWIN)
    assert set(WITH_TWIN) <= set(megabatch.__all__)
    assert {name for name in megabatch.__all__ if name.endswith("_loss")} == set(LOSSES)


@pytest.mark.parametrize("name", WITH_TWIN)
def test_twins_have_the_same_signature(name):
    assert parameters(getattr(megabatch, name)) == parameters(getattr(reference, name))


# Words of which only this project would know the meaning. The field's are in their place: dlogits, row_grad, handshake.
PRIVATE = {"Meeting", "Guest", "Visitor", "Visitors", "Cargo", "Parcel", "lonely", "slope", "slopes", "pull", "pulls"}
PRIVATE |= {"fold", "push", "halves", "lift"}
CORE = ["losses", "tiling", "backends", "distributed", "functional", "checks", "modules", "retrieval", "keywords"]


@pytest.mark.parametrize("path", [path for path in PATHS if room_of(path) in CORE])
def test_the_core_speaks_the_words_of_the_field(path):
    words = set(re.findall(r"[A-Za-z]+", (PACKAGE / path).read_text().replace("_", " ")))
    assert words.isdisjoint(PRIVATE), words & PRIVATE
