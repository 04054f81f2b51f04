"""Which names of torch that are not public `chunked` rests on: these, all of them there on the torch at hand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megabatch

ROOM = Path(megabatch.__file__).parent / "caching"
FILES = sorted(ROOM.glob("*.py"))
OF_PYTHON = {"_fields"}  # which is how a named tuple is known, by its documentation

PRIVATE = {
    "_compile": lambda: torch._compile,
    "_disable_dynamo": lambda: torch._compile._disable_dynamo,
    "_is_checkpoint_valid": torch.autograd._is_checkpoint_valid,
    "_version": lambda: torch.ones(1)._version,
    "_orig_mod": lambda: torch.compile(nn.Linear(1, 1), backend="eager")._orig_mod,
    "_torchdynamo_orig_callable": lambda: torch.compile(torch.sin, backend="eager")._torchdynamo_orig_callable,
    "_compiled_call_impl": lambda: compiled_in_place()._compiled_call_impl,
}


def compiled_in_place() -> nn.Module:
    module = nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    return module


def private_names(source: str) -> Iterator[str]:
    """Those with an underscore that are taken from something else than `self`, or imported from elsewhere."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and of_self(node)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names = [node.value]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__") and name not in own)


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "other")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_other_private_name_is_used(path: Path) -> None:
    assert set(private_names(path.read_text())) <= {*PRIVATE, *OF_PYTHON}


def test_a_private_name_is_seen() -> None:
    source = "from torch._a import _b\nx._c\ngetattr(x, '_d')\nself._e\ndef _f(): y._f"
    assert set(private_names(source)) == {"_a", "_b", "_c", "_d"}


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_every_private_name(name: str) -> None:
    assert PRIVATE[name]() is not None


def test_torch_has_the_nodes_that_graphs_are_known_by() -> None:
    weight = torch.ones(1, requires_grad=True)
    output = checkpoint(torch.sin, weight, use_reentrant=True)
    assert output.grad_fn.name().startswith("CheckpointFunction")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_short_and_look_for_nothing_behind_the_scenes(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    assert not {"dis", "gc"} & {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
