"""The drop-ins in open_clip 4, whose tasks hold model and loss. CONTRIBUTING.md says how to run this file."""

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.integrations import open_clip as ours

from .ranks import PATIENCE
from .shims import import_torchvision
from .test_open_clip import PROGRAM, ROOT, ROWS, SHIM, arguments, make_model, write_data


def installed() -> int:
    try:
        return int(version("open_clip_torch").partition(".")[0])
    except PackageNotFoundError:
        return 0


pytestmark = pytest.mark.skipif(installed() < 4, reason="open_clip 4 is not installed")
STEPS = 10
TASKS = {"clip": ("CLIPTask", ours.ClipLoss), "siglip": ("SigLIPTask", ours.SigLipLoss)}
# It passes device_ids=[device], which torch refuses for a CPU.
WITHOUT_DEVICES = """
import torch.nn.parallel as parallel
wrapper = parallel.DistributedDataParallel
parallel.DistributedDataParallel = lambda model, device_ids, **options: wrapper(model, **options)
"""


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> None:
    import_torchvision()


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = [(torch.randn(ROWS, 3, 8, 8, generator=generator), torch.randint(1, 20, (ROWS, 7), generator=generator))]
    draw += [(torch.randn(ROWS, 3, 8, 8, generator=generator), torch.randint(1, 20, (ROWS, 7), generator=generator))]
    return [dict(zip(("image", "text"), draw[step % 2], strict=True)) for step in range(count)]


def train(task: Any) -> tuple[list[float], Tensor]:
    """The loss of every step of SGD, and all weights at the end."""
    parameters = list(task.trainable_module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
    values = []
    for batch in batches(STEPS):
        losses, _ = task.training_forward(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        values.append(losses["loss"].item())
    return values, torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("kind", TASKS)
def test_a_task_trains_with_our_loss_as_with_its_own(kind: str) -> None:
    name, loss = TASKS[kind]
    make_task = getattr(importlib.import_module("open_clip.task"), name)
    values, weights = train(make_task(make_model(kind), loss=loss()))
    their_values, their_weights = train(make_task(make_model(kind)))
    assert values[-2] < 0.95 * values[0], "it has not been trained"
    assert values == pytest.approx(their_values, rel=1e-4)
    torch.testing.assert_close(weights, their_weights, rtol=1e-4, atol=1e-5)


def factory(name: str) -> Any:
    return getattr(importlib.import_module("open_clip"), name)


def test_install_gives_every_task_our_loss_until_it_is_undone() -> None:
    places = ["open_clip", "open_clip.factory", "open_clip_train.main"]
    before = [importlib.import_module(place).create_task for place in places]
    with ours.install(), ours.install():
        assert factory("create_loss") is ours.create_loss
        for kind, (_, loss) in TASKS.items():
            for place in places:
                task = importlib.import_module(place).create_task(arguments(kind), make_model(kind))
                assert type(task.loss) is loss
    assert [importlib.import_module(place).create_task for place in places] == before


def test_a_task_whose_loss_has_no_drop_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "create_task: --model must be .* got 'genlip-b', which is trained with GenLipLoss. Run open_clip_train.main"
    task = SimpleNamespace(loss=factory("loss").GenLipLoss())
    monkeypatch.setattr(importlib.import_module("open_clip.factory"), "create_task", lambda *_: task)
    with ours.install(), pytest.raises(ValueError, match=told):
        importlib.import_module("open_clip.factory").create_task(arguments("genlip-b"), make_model("clip"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_trains_as_open_clip_train(tmp_path: Path, ranks: int) -> None:
    write_data(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(SHIM + WITHOUT_DEVICES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"] if ranks > 1 else []
    losses = []
    for module in ("open_clip_train.main", "megabatch.integrations.open_clip"):
        command = [sys.executable, *launcher, "-m", module, *PROGRAM.split(), "--name", module, "--gather-with-grad"]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        printed = ended.stdout + ended.stderr
        assert ended.returncode == 0, printed[-4000:]
        losses.append([float(x) for x in re.findall(r" Loss: (\S+)", printed)])
    assert len(set(losses[0])) >= 8 // ranks, "values that do not change say nothing"
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert "ClipLoss: ignored here: gather_with_grad" in printed
