"""The losses of open_clip as drop-ins: their values, open_clip's own training step and program with them, refusals."""

import copy
import importlib
import inspect
import json
import logging
import os
import pickle
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from megabatch import callers
from megabatch.bench import measure, processes
from megabatch.distributed.world import World
from megabatch.integrations import open_clip as ours

from .ranks import PATIENCE, run_apart
from .shims import import_torchvision
from .test_structure import HEAVY, loaded_by

ROOT = Path(__file__).parent.parent
EPS = {torch.float64: 1e-12, torch.float32: 1e-5}
NAMES = ["ClipLoss", "SigLipLoss", "CoCaLoss"]
STEPS, ROWS = 20, 6
MIB = 2**20

TINY = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 7, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
PROGRAM = "--dataset-type csv --train-data pairs.csv --model local-dir:model --device cpu --precision fp32 --workers 0 "
PROGRAM += "--batch-size 8 --epochs 1 --lr 0.01 --warmup 1 --log-every-n-steps 1"


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> None:
    """Before all that imports it."""
    import_torchvision()


def original(name: str) -> Any:
    """A class or function of open_clip."""
    return getattr(importlib.import_module("open_clip.factory"), name)


def inputs(dtype: torch.dtype, shape: tuple[int, ...] = (), bias: float | None = None, rows: int = 33) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(rows, 12, dtype=torch.float64, generator=generator) for _ in range(2)]
    scalars = [torch.full(shape, value, dtype=torch.float64) for value in (20.0, bias) if value is not None]
    made = [x.to(dtype).requires_grad_() for x in [*(normalize(x, dim=1) for x in features), *scalars]]
    return made if bias is not None else [*made, None]


def value_and_gradients(loss: nn.Module, given: list[Any], **options: Any) -> list[Tensor]:
    out = loss(*given, **options)
    value = out["contrastive_loss"] if options.get("output_dict") else out
    assert value.shape == ()
    leaves = [x for x in given if x is not None]
    return [value.detach(), *torch.autograd.grad(value, leaves)]


# ---- one process: the same as the original


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_takes_the_arguments_of_the_original(name: str, method: str) -> None:
    theirs = list(inspect.signature(getattr(original(name), method)).parameters.values())
    mine = list(inspect.signature(getattr(getattr(ours, name), method)).parameters.values())
    for parameter, own in zip(theirs, mine, strict=False):
        assert (own.name, own.kind) == (parameter.name, parameter.kind)
        assert parameter.default in (parameter.empty, own.default)
    assert len(mine) >= len(theirs)
    optional = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert {own.name for own in mine[len(theirs) :] if own.kind not in optional} <= {"chunk_size"}


@pytest.mark.parametrize("output_dict", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "[1]"])
@pytest.mark.parametrize(("name", "bias"), [("ClipLoss", None), ("ClipLoss", -2.0), ("SigLipLoss", -2.0)])
@pytest.mark.parametrize("dtype", EPS)
def test_equals_the_original(
    dtype: torch.dtype, name: str, bias: float | None, shape: tuple[int, ...], output_dict: bool
) -> None:
    given = inputs(dtype, shape, bias)
    wanted = value_and_gradients(original(name)(), given, output_dict=output_dict)
    got = value_and_gradients(getattr(ours, name)(), given, output_dict=output_dict)
    for theirs, mine in zip(wanted, got, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=EPS[dtype], atol=EPS[dtype])


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_features_are_taken_as_they_are(name: str) -> None:
    """Neither normalised nor warned of, as in the original."""
    images, texts, scale, bias = inputs(torch.float64, bias=-2.0)
    given = [3 * images, texts, scale, bias]
    torch.testing.assert_close(getattr(ours, name)()(*given), original(name)()(*given))
    normalised = getattr(ours, name)(normalize=True)(*given)
    torch.testing.assert_close(normalised, original(name)()(images, texts, scale, bias))


def test_owns_nothing_and_travels_as_the_original_does() -> None:
    loss = ours.ClipLoss(memory_budget="1MiB")
    assert not list(loss.parameters())
    assert loss.state_dict() == original("ClipLoss")().state_dict()
    given = inputs(torch.float64)
    assert pickle.loads(pickle.dumps(loss))(*given) == loss(*given)
    with pytest.raises(ValueError, match="ClipLoss: logit_scale must be passed"):
        loss(*given[:2])


def test_options_are_those_of_megabatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "warned", set())
    given = inputs(torch.float64)
    assert ours.ClipLoss(reduction="none")(*given).shape == (33,)
    with pytest.warns(UserWarning, match="all ids are equal"):
        assert ours.ClipLoss()(*given, ids=torch.zeros(33, dtype=torch.long)) == 0
    with pytest.raises(TypeError, match="SigLipLoss: memory is not an option"):
        ours.SigLipLoss(memory=1)


@pytest.mark.parametrize("weights", [(2.0, 1.0), (2.0, 0.5), (1, 0), (0, 1)])
@pytest.mark.parametrize("output_dict", [False, True])
def test_coca_equals_the_original(weights: tuple[float, float], output_dict: bool) -> None:
    images, texts, scale, _ = inputs(torch.float64)
    logits = torch.randn(33, 5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (33, 5))
    results = []
    for losses in (original("CoCaLoss"), ours.CoCaLoss):
        out = losses(*weights, pad_id=3)(images, texts, logits, labels, scale, output_dict=output_dict)
        assert not output_dict or list(out) == ["contrastive_loss", "caption_loss"]
        contrastive, caption = out.values() if output_dict else out
        leaves = [images, texts, scale, logits]
        gradients = torch.autograd.grad(contrastive + caption, leaves, allow_unused=True, materialize_grads=True)
        results.append([contrastive, caption, *gradients])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# ---- open_clip's own training step


def make_model(kind: str) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=4, image_size=8)
    text = CLIPTextCfg(context_length=7, vocab_size=20, width=16, heads=2, layers=1)
    start = {"init_logit_scale": 2.3, "init_logit_bias": -10} if kind == "siglip" else {}
    return CLIP(8, vision, text, output_dict=True, **start)


class Batches(list[tuple[Tensor, Tensor]]):
    """In place of open_clip_train's data: pairs of this rank alone, the same for both losses."""

    def __init__(self, count: int, rank: int, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(1 + rank)
        texts = [torch.randint(1, 20, (rows, 7), generator=generator) for _ in range(count)]
        super().__init__((torch.randn(rows, 3, 8, 8, generator=generator), text) for text in texts)
        self.num_batches, self.num_samples, self.dataloader = count, count * rows, self

    def set_epoch(self, epoch: int) -> None:
        pass


def arguments(kind: str, rank: int = 0, world_size: int = 1, **more: Any) -> SimpleNamespace:
    """What open_clip_train parses, as far as its training step and its losses read it."""
    told = {"model": kind, "siglip": kind == "siglip", "loss_dist_impl": None, "local_loss": True, "horovod": False}
    told |= {"gather_with_grad": True, "distill": False, "rank": rank, "local_rank": rank, "world_size": world_size}
    told |= {"device": "cpu", "precision": "fp32", "batch_size": ROWS, "accum_freq": 1, "grad_clip_norm": None}
    told |= {"skip_scheduler": True, "log_every_n_steps": 10**6, "wandb": False}
    told |= {"coca_caption_loss_weight": 2.0, "coca_contrastive_loss_weight": 1.0}
    return SimpleNamespace(**(told | more))


def train(create_loss: Callable[[Any], nn.Module], args: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The loss of every call, and all weights after 20 steps of SGD, which hides no factor of a gradient."""
    from open_clip_train.train import train_one_epoch

    model = make_model(args.model)
    wrapped = DistributedDataParallel(model) if args.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values: list[float] = []
    loss = create_loss(args)
    loss.register_forward_hook(lambda _module, _given, out: values.append(out["contrastive_loss"].item()))
    data = {"train": Batches(STEPS * args.accum_freq, args.rank)}
    train_one_epoch(wrapped, data, loss, 0, optimizer, None, None, None, args)
    return torch.tensor(values), torch.cat([p.detach().flatten() for p in model.parameters()])


def train_both(**told: Any) -> list[tuple[Tensor, Tensor]]:
    return [train(create_loss, arguments(**told)) for create_loss in (original("create_loss"), ours.create_loss)]


def assert_same_training(theirs: tuple[Tensor, Tensor], mine: tuple[Tensor, Tensor], kind: str, accum: int) -> None:
    assert len(mine[0]) == STEPS * accum
    start = torch.cat([p.detach().flatten() for p in make_model(kind).parameters()])
    assert (mine[1] - start).norm() > 0.1, "it has not been trained"
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-5)


RUNS = [("clip", 1), ("siglip", 1), ("clip", 2), ("siglip", 2)]


@pytest.mark.parametrize(("kind", "accum"), RUNS)
def test_trains_as_the_original(kind: str, accum: int) -> None:
    assert_same_training(*train_both(kind=kind, accum_freq=accum), kind, accum)


def test_trains_under_autocast() -> None:
    """Where the original's logits are bfloat16: near it."""
    theirs, mine = train_both(kind="clip", precision="amp_bf16")
    torch.testing.assert_close(mine[0], theirs[0], rtol=0.03, atol=0.0)


def write_data(folder: Path) -> None:
    """A model and pairs. open_clip's synthetic ones are all alike: every loss of theirs is log(rows)."""
    from PIL import Image

    (folder / "model").mkdir()
    (folder / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY}))
    numbers = random.Random(0)
    lines = ["filepath\ttitle"]
    for index in range(64):
        Image.frombytes("RGB", (16, 16), numbers.randbytes(3 * 16 * 16)).save(folder / f"{index}.png")
        lines.append(f"{index}.png\tnumber {numbers.randrange(1000)}")
    (folder / "pairs.csv").write_text("\n".join(lines))


def run_program_here(rank: int, folder: Path, whose: str) -> None:
    """open_clip_train's program on one of two ranks, which finds the other as under SLURM."""
    program = importlib.import_module("open_clip_train.main")
    os.environ |= {"SLURM_PROCID": f"{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": f"{rank}"}
    sys.argv = [
        whose,
        *PROGRAM.split(),
        "--dist-url",
        f"file://{folder}/{whose}",
        "--name",
        whose,
        "--gather-with-grad",
    ]
    # It passes device_ids=[device], which torch refuses for a CPU.
    torch.nn.parallel.DistributedDataParallel = lambda model, device_ids: DistributedDataParallel(model)  # type: ignore[misc,assignment]
    os.chdir(folder)
    logging.root.handlers.clear()
    ours.main() if whose == "ours" else program.main(sys.argv[1:])
    dist.destroy_process_group()


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    return str(refused.value)


def on_two_ranks(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """All that needs a world of two, in one: training, refusals, a loss that is older than the world."""
    import_torchvision()
    torch.save(
        {(kind, accum): train_both(kind=kind, accum_freq=accum, rank=rank, world_size=2) for kind, accum in RUNS},
        folder / f"trained-{rank}.pt",
    )
    refused = [
        refusal_of(ours.ClipLoss),
        refusal_of(lambda: ours.ClipLoss(rank=rank, world_size=4)),
        refusal_of(lambda: ours.ClipLoss(rank=1 - rank, world_size=2)),
    ]
    given = inputs(torch.float64, bias=-2.0)
    alone = [ours.SigLipLoss(group=None)(*given).item(), original("SigLipLoss")()(*given).item()]

    dist.destroy_process_group()
    late, lone = ours.SigLipLoss(rank=rank, world_size=2), ours.SigLipLoss()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=2)
    mine = [x.detach()[rank::2] for x in given[:2]]  # 17 rows and 16
    together = [late(*mine, *given[2:]).item(), original("SigLipLoss")()(*given).item()]
    together += [copied(*mine, *given[2:]).item() for copied in (copy.deepcopy(late), pickle.loads(pickle.dumps(late)))]
    refused.append(refusal_of(lambda: lone(*given)))
    (folder / f"told-{rank}.json").write_text(json.dumps([refused, alone, together]))
    dist.destroy_process_group()

    run_program_here(rank, folder, "original")
    run_program_here(rank, folder, "ours")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_data(folder)
    assert run_apart(2, on_two_ranks, folder) == [0, 0]
    return folder


@pytest.mark.parametrize(("kind", "accum"), RUNS)
def test_trains_as_the_original_on_two_ranks(world: Path, kind: str, accum: int) -> None:
    """The original reports each rank's own rows, so its values are averaged over the ranks."""
    trained = [torch.load(world / f"trained-{rank}.pt")[kind, accum] for rank in range(2)]
    mine = [both[1] for both in trained]
    values = torch.stack([both[0][0] for both in trained])
    assert (values[0] - values[1]).abs().max() > 0.01, "the ranks have the same pairs"
    assert torch.equal(mine[0][0], mine[1][0])
    assert torch.equal(mine[0][1], mine[1][1])
    assert_same_training((values.mean(0), trained[0][0][1]), mine[0], kind, accum)


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_that_torch_distributed_does_not_know_are_refused(world: Path, rank: int) -> None:
    refused, _, _ = json.loads((world / f"told-{rank}.json").read_text())
    left_out, too_many, other_rank, in_forward = refused
    help = "Pass world_size=torch.distributed.get_world_size() and the rank for the rows of all ranks together, or "
    help += "group=None for those of this rank alone."
    assert left_out == f"ClipLoss: world_size must be that of torch.distributed, 2, got 1. {help}"
    assert too_many == f"ClipLoss: world_size must be that of torch.distributed, 2, got 4. {help}"
    assert other_rank == (
        f"ClipLoss: rank must be that of torch.distributed, {rank}, got {1 - rank}. Pass "
        "rank=torch.distributed.get_rank()."
    )
    assert in_forward == left_out.replace("ClipLoss", "SigLipLoss")


def test_a_group_wins_over_the_numbers(world: Path) -> None:
    _, (mine, theirs), _ = json.loads((world / "told-1.json").read_text())
    assert mine == pytest.approx(theirs, rel=1e-12)


def test_a_loss_may_be_older_than_the_world_and_be_copied_in_it(world: Path) -> None:
    _, _, (mine, theirs, *copied) = json.loads((world / "told-0.json").read_text())
    assert mine == pytest.approx(theirs, rel=1e-12)
    assert copied == [mine, mine]


# ---- its program


SHIM = "from tests.shims import import_torchvision\nimport_torchvision()\n"


def run_programs(folder: Path, *options: str) -> list[str]:
    """What the original and ours print, side by side."""
    (folder / "sitecustomize.py").write_text(SHIM)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "src"))),
    }
    running = []
    for module in ("open_clip_train.main", "megabatch.integrations.open_clip"):
        command = [sys.executable, "-m", module, *PROGRAM.split(), "--name", module, *options]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(command, cwd=folder, env=environment, **streams))
    try:
        printed = [program.communicate(timeout=PATIENCE)[0] for program in running]
    finally:
        for program in running:
            program.kill()  # one that takes too long, or whose twin did
            program.communicate()
    for program, text in zip(running, printed, strict=True):
        assert program.returncode == 0, text
    return printed


def assert_same_log(theirs: str, mine: str, steps: int) -> None:
    wanted, got = ([float(x) for x in re.findall(r" Loss: (\S+)", text)] for text in (theirs, mine))
    assert len(got) == steps
    assert len(set(got)) == steps, "values that do not change say nothing"
    assert got == pytest.approx(wanted, rel=1e-4)
    scales = [re.findall(r"Logit Scale: (\S+)", text) for text in (theirs, mine)]
    assert scales[0] == scales[1]


def test_the_program_trains_as_open_clip_train(tmp_path: Path) -> None:
    write_data(tmp_path)
    theirs, mine = run_programs(tmp_path, "--siglip", "--loss-dist-impl", "shift")
    assert_same_log(theirs, mine, steps=8)
    assert "SigLipLoss: ignored here: dist_impl" in mine


def test_the_program_trains_as_open_clip_train_on_two_ranks(world: Path) -> None:
    """With gather_with_grad alone the original reports the value of all ranks, too."""
    theirs, mine = ((world / "logs" / whose / "out.log").read_text() for whose in ("original", "ours"))
    assert_same_log(theirs, mine, steps=4)
    assert "ClipLoss: ignored here: gather_with_grad" in mine


# ---- where the original runs out of memory


def step_within(world: World, limit: int, kind: str, whose: str) -> float:
    """open_clip's training step at 8,192 pairs, while this process may take `limit` bytes more."""
    import_torchvision()
    torch.set_num_threads(1)
    from open_clip_train.train import train_one_epoch

    args, model = arguments(kind), make_model(kind)
    loss = (original("create_loss") if whose == "original" else ours.create_loss)(args)
    values: list[float] = []
    loss.register_forward_hook(lambda _module, _given, out: values.append(out["contrastive_loss"].item()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows: int) -> None:
        train_one_epoch(model, {"train": Batches(1, 0, rows)}, loss, 0, optimizer, None, None, None, args)

    step(64)  # loads what it needs
    allowed = measure.private_bytes() + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    step(8192)
    return values[-1]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_goes_on_where_the_original_runs_out_of_memory(kind: str) -> None:
    """A matrix of logits is 256 MiB, and the activations of the towers take less than another."""
    with pytest.raises(processes.OutOfMemory):
        processes.launch("cpu", 1, step_within, 500 * MIB, kind, "original")
    assert processes.launch("cpu", 1, step_within, 500 * MIB, kind, "ours")[0] > 0


# ---- what is answered by a line, and what is refused


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (ours.ClipLoss, None),
        (lambda: ours.SigLipLoss(dist_impl=None, chunk_size=0), None),
        (lambda: ours.ClipLoss(True, True, cache_labels=True), "ClipLoss: local_loss, gather_with_grad, cache_labels"),
        (lambda: ours.ClipLoss(local_loss=True), "ClipLoss: local_loss"),
        (lambda: ours.SigLipLoss(dist_impl="shift", chunk_size=64), "SigLipLoss: dist_impl, chunk_size"),
        (lambda: ours.CoCaLoss(1, 1, gather_with_grad=True), "CoCaLoss: gather_with_grad"),
        (lambda: ours.create_loss(arguments("siglip")), None),
        (lambda: ours.create_loss(arguments("clip")), "ClipLoss: local_loss, gather_with_grad"),
    ],
)
def test_one_line_for_all_that_does_not_matter(
    make: Callable[[], nn.Module], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make()
    lines = [record.getMessage() for record in caplog.records]
    if told is None:
        assert lines == []
    else:
        name, arguments = told.split(": ")
        rest = "The gradient is always exact, and the value is that of all ranks."
        assert lines == [f"{name}: ignored here: {arguments}. {rest}"]


@pytest.mark.parametrize("local_loss", [False, True])
def test_gradients_larger_than_the_originals_are_warned_of(local_loss: bool, caplog: pytest.LogCaptureFixture) -> None:
    ours.ClipLoss(local_loss, world_size=8)
    ours.ClipLoss(local_loss, rank=1, world_size=8)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = (
        "ClipLoss: gradients are always exact here. open_clip's are smaller without gather_with_grad, by a factor of 8"
    )
    assert record.getMessage().startswith(told)


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_what_it_was_told_can_be_read_as_in_the_original(name: str) -> None:
    theirs, mine = original(name)(), getattr(ours, name)()
    told = set(inspect.signature(original(name)).parameters) - {"dist_impl"}  # of which the original makes "bidir"
    assert {argument: getattr(mine, argument) for argument in told} == {
        argument: getattr(theirs, argument) for argument in told
    }


@pytest.mark.parametrize(
    ("argument", "told"),
    [("--distill-model=RN50 --distill-pretrained=openai", "--distill-model must"), ("--horovod", "--horovod must")],
)
def test_the_program_refuses_before_it_begins(argument: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megabatch", "--model", "RN50", *argument.split()])
    with pytest.raises(ValueError, match=told):
        ours.main()


def test_horovod_is_refused() -> None:
    for make in (ours.ClipLoss, lambda **told: ours.CoCaLoss(1, 1, **told)):
        with pytest.raises(ValueError, match=r"Loss: use_horovod must be False, .*got True. Start them with torchrun"):
            make(use_horovod=True)
    for kind in ("clip", "siglip"):
        with pytest.raises(ValueError, match="create_loss: --horovod must be left out"):
            ours.create_loss(arguments(kind, horovod=True))


def test_distillation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"create_loss: --distill-model must be left out, because megabatch has no"):
        ours.create_loss(arguments("clip", distill=True))


def test_an_unknown_dist_impl_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SigLipLoss: dist_impl must be one of 'bidir', .*'gather', got 'ring'"):
        ours.SigLipLoss(dist_impl="ring")


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_several_ranks_without_torch_distributed_are_refused_in_forward(name: str) -> None:
    loss = getattr(ours, name)(rank=1, world_size=2)
    with pytest.raises(ValueError, match=f"{name}: world_size must be .*which is not initialised, got 2. Call torch"):
        loss(*inputs(torch.float64))


@pytest.mark.parametrize("method", ["get_logits", "get_ground_truth"])
@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_there_are_no_logits_to_get(name: str, method: str) -> None:
    assert hasattr(original(name), method)
    with pytest.raises(NotImplementedError, match=f"{name}: get_logits and get_ground_truth must not be called"):
        getattr(getattr(ours, name)(), method)("cpu", 8)


@pytest.mark.parametrize("kind", ["clip", "siglip", "coca_ViT-B-32"])
def test_create_loss_reads_the_arguments_as_the_original(kind: str) -> None:
    for siglip in (kind == "siglip", kind != "clip"):
        args = arguments(kind, siglip=siglip)
        theirs, mine = original("create_loss")(args), ours.create_loss(args)
        assert type(mine).__name__ == type(theirs).__name__
        assert (mine.rank, mine.world_size) == (theirs.rank, theirs.world_size)
        if kind.startswith("coca"):
            assert mine.caption_loss_weight == theirs.caption_loss_weight == 2.0
            assert mine.clip_loss_weight == theirs.clip_loss_weight == 1.0
            assert mine.caption_loss.ignore_index == theirs.caption_loss.ignore_index


# ---- installing it

PLACES = ["open_clip", "open_clip.factory", "open_clip_train.main"]


def found() -> list[Any]:
    return [importlib.import_module(place).create_loss for place in PLACES]


def test_install_replaces_the_factory_until_it_is_undone() -> None:
    before = found()
    assert ours.create_loss not in before
    with ours.install():
        assert found() == [ours.create_loss] * 3
        with ours.install():  # once more changes nothing, at its end neither
            assert found() == [ours.create_loss] * 3
        assert found() == [ours.create_loss] * 3
    assert found() == before
    undo = ours.install()
    assert found() == [ours.create_loss] * 3
    undo.close()
    assert found() == before


def test_install_is_undone_in_a_program_that_it_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    before = found()
    monkeypatch.delitem(sys.modules, "open_clip_train.main")
    with ours.install():
        assert found() == [ours.create_loss] * 3
    assert found() == before


def test_install_goes_without_what_only_the_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip_train.main", None)
    with ours.install():
        assert original("create_loss") is ours.create_loss
    with pytest.raises(
        ImportError, match=r"open_clip_train.main must be importable.*pip install 'megabatch\[open_clip\]'"
    ):
        ours.main()


def test_install_refuses_a_version_that_has_no_such_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = original("create_loss")
    monkeypatch.delattr(importlib.import_module("open_clip_train.main"), "create_loss")
    with pytest.raises(ImportError, match=r"whose open_clip_train.main has create_loss or create_task, got \d"):
        ours.install()
    assert original("create_loss") is before


def test_a_missing_open_clip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match=r"open_clip must be importable, .* Run pip install 'megabatch\[open_clip\]'"):
        ours.install()


def test_a_broken_torchvision_is_not_answered_by_an_installation_of_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(ours, "import_module", broken)
    with pytest.raises(ImportError, match=r"got RuntimeError: operator torchvision::nms does not exist\. Repair"):
        ours.install()


def test_the_classes_need_no_open_clip() -> None:
    assert loaded_by("import megabatch.integrations.open_clip as oc; oc.ClipLoss()", HEAVY) == []
