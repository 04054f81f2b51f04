"""The examples run as their first lines say, alone and on ranks, and learn what they are to learn."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .ranks import PATIENCE

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
LONGEST = 65  # lines, but for the one that is a complete script
COMPLETE = "two_towers"
NOTEBOOK = ROOT / "examples/quickstart.ipynb"

# The tool that each is for. Warnings are errors, but for those of the tool itself that no argument avoids.
TOOLS = {
    "ddp": "torch",
    "hf_trainer": "transformers",
    "lightning_module": "lightning",
    "open_clip_train": "open_clip",
    "plain_pytorch": "torch",
    "sentence_transformers_train": "sentence_transformers",
    "simclr": "lightly",
    "two_towers": "torch",
}
ALLOWED_WARNINGS = {
    "lightning": [
        "`isinstance(treespec",  # its own use of torch
        "The 'train_dataloader' does not have many workers",  # from four cores on
        "The `srun` command is available",  # where SLURM is installed
    ],
    "sentence_transformers": ["'pin_memory' argument is set as true"],  # where there is no GPU
}
IMPORT_TORCHVISION = {"lightning", "open_clip", "sentence_transformers", "transformers"}
CHEAPER = {COMPLETE: ["--steps", "16", "--batch", "512", "--chunk", "100"]}

# In every process that they start: no thread of a group is left to want the interpreter when that ends.
ENDED = """import atexit, os, pathlib, sys
def end():
    threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]  # of Linux; elsewhere none
    if any("gloo" in name for name in threads):
        os.write(2, b"the group was not destroyed, or is held by something\\n")
        os._exit(3)
atexit.register(end)
"""
# Where torchvision fails to load, these need it mended before they are imported.
SHIM = """if "torch.distributed.run" not in sys.orig_argv:  # the launcher loads none of them
    from tests.shims import import_torchvision
    import_torchvision()
"""


def commands_of(source: str) -> list[str]:
    """Those of its docstring, but for one with a path that the reader is to put in."""
    told = ast.get_docstring(ast.parse(source)) or ""
    found = re.findall(r"^    ((?:python|torchrun) .*?)(?:  +#.*)?$", told, re.MULTILINE)
    return [command for command in found if "path/to" not in command]


COMMANDS = {command: name for name, source in EXAMPLES.items() for command in commands_of(source)}


def run(command: str, folder: Path) -> str:
    """What it prints."""
    launcher, *arguments = command.split()
    started = [] if launcher == "python" else ["-m", "torch.distributed.run", "--standalone"]
    tool = TOOLS[COMMANDS[command]]
    ignored = [f"ignore:{message}" for message in ALLOWED_WARNINGS.get(tool, [])]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ",".join(["error", *ignored])}
    shim = folder / ("mended" if tool in IMPORT_TORCHVISION else "plain")
    environment["PYTHONPATH"] = os.pathsep.join([str(shim), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *started, *arguments, *CHEAPER.get(COMMANDS[command], [])],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **environment},
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """Those of all tests that were asked for, two at a time: they take their time for imports."""
    folder = tmp_path_factory.mktemp("shim")
    for name, customized in (("mended", ENDED + SHIM), ("plain", ENDED)):
        (folder / name).mkdir()
        (folder / name / "sitecustomize.py").write_text(customized)
    wanted = [item.callspec.params["command"] for item in request.session.items if "runs" in item.fixturenames]
    with ThreadPoolExecutor(2) as executor:
        yield {command: executor.submit(run, command, folder) for command in wanted}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    assert name == COMPLETE or EXAMPLES[name].count("\n") < LONGEST
    assert name in TOOLS, "say for which tool it is"
    commands = commands_of(EXAMPLES[name])
    assert commands
    assert all(f" examples/{name}.py" in command for command in commands)


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell in one namespace, as a kernel does; `make test` needs no Jupyter."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
            assert cell["outputs"] == [], "commit it without outputs"
    told = capsys.readouterr().out
    dense, ours = re.findall(r"dense (\S+), megabatch (\S+),", told)[0]
    first, last = re.findall(r"loss (\S+) -> (\S+)", told)[0]
    assert float(ours) == pytest.approx(float(dense), rel=1e-5)
    assert float(last) < float(first) / 2
    assert float(re.findall(r"recall@5 (\S+)", told)[0]) > 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_learns(runs: dict[str, Future[str]], command: str) -> None:
    told = runs[command].result()
    losses = [float(number) for number in re.findall(r"\bloss\b\W*([\d.]+)", told)]
    assert 3 <= len(losses) <= 10, "a line now and then, from one rank"
    assert losses[-1] < 0.75 * losses[0]
    if COMMANDS[command] == COMPLETE:
        scales = [float(number) for number in re.findall(r"scale (\S+)", told)]
        found = float(re.findall(r"(\S+)% of unseen images", told)[0])
        assert len(losses) == 4, "one line per five steps"
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 2
        assert scales[-1] != scales[0]
        assert found > 50
