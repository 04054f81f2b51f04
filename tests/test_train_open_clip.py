"""open_clip's models in the trainer, and open_clip with the trainer's checkpoints."""

import json

import pytest
import torch

from megabatch.train import checkpoint
from megabatch.train.config import Model
from megabatch.train.data import open_source
from megabatch.train.data.order import Order
from megabatch.train.data.prepare import Prepare
from megabatch.train.towers import make_towers

from .shims import import_torchvision
from .training import losses, train, write_shapes

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
FLAGS = ["--model", "megabatch-trained", "--global-batch-size", "24", "--chunk-size", "24", "--workers", "0"]
FLAGS += ["--lr", "1e-3", "--steps", "3"]


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory):
    import_torchvision()
    import open_clip

    folder = tmp_path_factory.mktemp("configs")
    (folder / "megabatch-trained.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder)
    return open_clip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


@pytest.fixture(scope="module")
def run(open_clip, shapes, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), "--train-data", shapes, *FLAGS)


def test_open_clip_loads_the_weights(open_clip, run):
    path = run / "checkpoints" / "epoch_latest.pt"
    trained = checkpoint.load(path)
    assert {"epoch", "name", "state_dict", "optimizer"} <= set(trained)
    model = open_clip.create_model("megabatch-trained", pretrained=str(path))
    assert all(torch.equal(value, trained["state_dict"][name]) for name, value in model.state_dict().items())


def test_the_program_of_open_clip_goes_on_from_a_checkpoint(open_clip, run):
    """What its main does with --resume: weights, then the optimizer's state by the order of its groups."""
    trained = checkpoint.load(run / "checkpoints" / "epoch_latest.pt")
    model = open_clip.create_model("megabatch-trained")
    model.load_state_dict(trained["state_dict"])

    def has_no_decay(name, parameter):
        return parameter.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name

    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if has_no_decay(name, p)], "weight_decay": 0.0},
        {"params": [p for name, p in named if not has_no_decay(name, p)], "weight_decay": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.load_state_dict(trained["optimizer"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
            assert optimizer.state[parameter]["step"] == 3


def test_the_loss_is_that_of_open_clip(open_clip, shapes, run):
    """The first step's, of the model that the seed gives."""
    torch.manual_seed(0)
    towers = make_towers(Model(model="megabatch-trained"), loss="clip")
    table = open_source(shapes)
    passes, indices = Order(table.counts, seed=0, batch_size=24).of_step(0)
    prepare = Prepare(towers.tokenizer, towers.preprocessing, 0.9, 0, "caption", train=True)
    piece = prepare(table, passes.tolist(), indices.tolist())
    with torch.no_grad():
        features = towers.model(towers.pixels(piece.first), piece.second)
        loss = open_clip.ClipLoss()(*features[:3])
    assert losses(run)[0] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("flags", [["--loss", "siglip"], ["--lock-image"], ["--grad-checkpointing"]], ids=" ".join)
def test_it_trains(open_clip, shapes, run, tmp_path, flags):
    again = train(tmp_path, "--train-data", shapes, *FLAGS, *flags)
    assert losses(again)[-1] < losses(again)[0]
    if flags == ["--grad-checkpointing"]:
        assert losses(again) == pytest.approx(losses(run), abs=1e-5)
