"""`megabatch eval`, and evaluation in training: against plain torch, over ranks, in linear memory."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn.functional import dropout, normalize

from megabatch import cli, reference
from megabatch.distributed.world import World
from megabatch.train import checkpoint, evaluate
from megabatch.train.config import from_mapping
from megabatch.train.data import ImageFolder, Prepare
from megabatch.train.data.tables import Table
from megabatch.train.towers import Towers, make_towers
from megabatch.train.towers.tiny import TinyTowers

from .ranks import run_apart
from .training import PLACES, SHADES, SHAPES, draw_shape, evaluations, train, write_pairs, write_shapes

FLAGS = ["--global-batch-size", "48", "--chunk-size", "16", "--workers", "0", "--steps", "12", "--lr", "2e-3"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    logs = tmp_path_factory.mktemp("run")
    return train(logs, "--train-data", shapes, "--val-data", shapes, *FLAGS, "--crop-scale", "1")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Shapes in folders by their kind."""
    folder = tmp_path_factory.mktemp("classes")
    for shape, shade, place in product(SHAPES, SHADES, PLACES):
        (folder / shape).mkdir(exist_ok=True)
        draw_shape(shape, shade, place).save(folder / shape / f"{shade}-{place}.png")
    return folder


def evaluated(tmp_path: Path, *flags: str) -> dict[str, float]:
    path = tmp_path / "figures.json"
    assert cli.main(["eval", *flags, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def towers_of(run: Path) -> Towers:
    state = checkpoint.load(run / "checkpoints" / "best.pt")
    towers = make_towers(from_mapping(state["megabatch"]["config"]).model, loss="clip")
    towers.model.load_state_dict(state["state_dict"])
    return towers


def features_of(towers: Towers, source) -> tuple[torch.Tensor, torch.Tensor]:
    prepare = Prepare(towers.tokenizer, towers.preprocessing, 1.0, 0, "caption", train=False)
    piece = prepare(source, [0] * len(source), range(len(source)))
    with torch.no_grad():
        return towers.encode_image(towers.pixels(piece.first)), towers.encode_text(piece.second)


def test_figures_are_those_of_plain_torch(run, shapes, tmp_path):
    figures = evaluated(tmp_path, "--checkpoint", str(run))
    table = Table(shapes, separator="\t", image_key="filepath", caption_key="title")
    towers = towers_of(run)
    images, texts = (normalize(each, dim=1) for each in features_of(towers, table))
    loss = reference.clip_loss(images, texts, towers.logit_scale.detach().exp(), normalize=False)
    assert figures["val/loss"] == pytest.approx(loss.item(), abs=1e-4)
    for name, scores in (("image_to_text", images @ texts.T), ("text_to_image", texts @ images.T)):
        ranks = (scores > scores.diag()[:, None]).sum(1)
        for k in (1, 5, 10):
            assert figures[f"val/{name}_R@{k}"] == pytest.approx((ranks < k).double().mean().item(), abs=0.011)
        assert figures[f"val/{name}_median_rank"] == pytest.approx(ranks.double().quantile(0.5).item() + 1, abs=1)
    assert figures["val/samples"] == 96


def test_eval_says_what_training_said(run, tmp_path):
    figures = evaluated(tmp_path, "--checkpoint", str(run / "checkpoints" / "step_00000012.pt"))
    said = evaluations(run)[-1]
    assert figures == {name: value for name, value in said.items() if name != "step"}


def eval_on_a_rank(rank, group, folder, words):
    raise SystemExit(cli.main(words))


def test_ranks_do_not_change_the_figures(run, tmp_path):
    """Of 5 samples at a time two ranks of three have two, and none is left out."""
    figures = evaluated(tmp_path, "--checkpoint", str(run))
    path = tmp_path / "ranks.json"
    words = ["eval", "--checkpoint", str(run), "--chunk-size", "7", "--json", str(path)]
    assert run_apart(3, eval_on_a_rank, tmp_path, words) == [0, 0, 0]
    assert json.loads(path.read_text()) == pytest.approx(figures, abs=0.011)
    assert json.loads(path.read_text())["val/samples"] == 96


def test_memory_grows_with_the_samples_not_with_their_square(monkeypatch):
    """30,000 x 30,000 scores would take 3.4 GiB."""
    rows, most = 30_000, [0]
    original = torch.empty

    def metered(*sizes, **options):
        made = original(*sizes, **options)
        most[0] = max(most[0], made.numel())
        return made

    monkeypatch.setattr(torch, "empty", metered)
    torch.manual_seed(0)
    query = torch.randn(rows, 8)
    key = query + 0.01 * torch.randn(rows, 8)
    figures = evaluate._retrieval("a_to_b", query, key, torch.zeros(rows), World(torch.device("cpu")))
    assert figures["val/a_to_b_R@10"] > 0.5
    assert 0 < most[0] < rows * rows / 20


def test_towers_that_say_the_same_of_everything_find_nothing():
    same, world = torch.ones(100, 4), World(torch.device("cpu"))
    figures = evaluate._retrieval("a_to_b", same, same, torch.zeros(100, dtype=torch.int64), world)
    assert figures["val/a_to_b_R@10"] == 0
    assert figures["val/a_to_b_median_rank"] == 50


def test_equal_captions_are_as_right_as_each_other():
    """Three rows of each, and all are found."""
    features, world = torch.eye(5).repeat(3, 1), World(torch.device("cpu"))
    alike = evaluate._alike(torch.arange(5).repeat(3), world)
    assert alike.tolist() == [2] * 15
    assert evaluate._retrieval("a_to_b", features, features, alike, world)["val/a_to_b_R@1"] == 1


def test_zero_shot_classification_is_that_of_plain_torch(run, classes, tmp_path):
    (tmp_path / "templates.txt").write_text("grey {} at the top\nblack {} at the left\n")
    flags = ["--zeroshot-data", str(classes), "--templates", str(tmp_path / "templates.txt")]
    figures = evaluated(tmp_path, "--checkpoint", str(run), *flags)
    folder = ImageFolder(classes)
    towers = towers_of(run)
    images, _ = features_of(towers, folder)
    prompts = [[f"grey {name} at the top", f"black {name} at the left"] for name in sorted(SHAPES)]
    with torch.no_grad():
        means = torch.stack([normalize(towers.encode_text(towers.tokenizer(each)), dim=1).mean(0) for each in prompts])
    nearest = (normalize(images, dim=1) @ normalize(means, dim=1).T).argmax(1)
    labels = torch.tensor([folder[index].label for index in range(len(folder))])
    assert figures["zeroshot/top1"] == pytest.approx((nearest == labels).double().mean().item(), abs=0.02)
    assert figures["zeroshot/top1"] > 0.5  # chance is 0.25
    assert figures["zeroshot/top5"] == 1.0  # of four classes


def test_zero_shot_figures_come_in_training_too(shapes, classes, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *FLAGS, "--steps", "2", "--zeroshot-data", str(classes))
    assert 0 <= evaluations(run)[0]["zeroshot/top1"] <= 1


def test_pairs_of_texts_are_looked_for_both_ways(tmp_path):
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    run = train(tmp_path, "--train-data", pairs, *FLAGS, "--global-batch-size", "64", "--lr", "5e-3")
    figures = evaluated(tmp_path, "--checkpoint", str(run), "--val-data", pairs)
    assert figures["val/query_to_text_R@10"] > 0.3
    assert figures["val/text_to_query_median_rank"] < 20


def test_a_run_on_texts_has_no_figures_of_images(tmp_path, classes, capsys):
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    run = train(tmp_path, "--train-data", pairs, *FLAGS, "--steps", "1")
    for flags in (["--val-data", "icons"], ["--zeroshot-data", str(classes)]):
        with pytest.raises(SystemExit):
            cli.main(["eval", "--checkpoint", str(run), *flags])
        assert "got one that was trained on texts alone" in capsys.readouterr().err


def test_samples_that_cannot_be_read_at_all_are_told_in_one_line(run, tmp_path, capsys):
    table = write_shapes(tmp_path / "bad")
    for image in table.parent.glob("*.png"):
        image.write_bytes(b"nothing")
    with pytest.raises(SystemExit):
        cli.main(["eval", "--checkpoint", str(run), "--val-data", str(table)])
    assert "error: --val-data must have samples, got 96 that were all skipped" in capsys.readouterr().err


def test_towers_are_evaluated_as_they_are_used(run, tmp_path, monkeypatch):
    """Dropout is for training."""
    figures = evaluated(tmp_path, "--checkpoint", str(run))
    encode = TinyTowers.encode_image
    monkeypatch.setattr(TinyTowers, "encode_image", lambda self, x: dropout(encode(self, x), 0.9, self.training))
    assert evaluated(tmp_path, "--checkpoint", str(run)) == figures


def test_flags_of_training_are_not_evaluations(run, capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--checkpoint", str(run), "--lr", "1e-3"])
    assert "--lr is not known" in capsys.readouterr().err


def test_the_first_samples_can_be_asked_for(run, tmp_path):
    assert evaluated(tmp_path, "--checkpoint", str(run), "--val-num-samples", "10")["val/samples"] == 10


def test_bad_samples_are_counted(run, tmp_path):
    table = write_shapes(tmp_path / "bad")
    (table.parent / "black-cross-left.png").write_bytes(b"nothing")
    figures = evaluated(tmp_path, "--checkpoint", str(run), "--val-data", str(table))
    assert (figures["val/samples"], figures["val/skipped_samples"]) == (95, 1)
    assert math.isfinite(figures["val/loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--checkpoint must be given, or --model"),
        (["--model", "tiny", "--val-data", "icons"], "tiny has none of its own"),
        (["--checkpoint", "RUN", "--config", "NO_DATA"], "--val-data or --zeroshot-data must be given"),
        (["--checkpoint", "nowhere.pt"], r"there must be a file nowhere.pt"),
        (["--checkpoint", "RUN", "--batch-size", "8"], "--global-batch-size"),
        (["--checkpoint", "RUN", "--model", "small"], "--checkpoint must fit --model small"),
        (["--checkpoint", "EMPTY"], "a folder with checkpoints"),
    ],
)
def test_mistakes_are_named(run, tmp_path, words, message, capsys):
    (tmp_path / "no_data.yaml").write_text("val_data: null\n")
    places = {"RUN": str(run), "EMPTY": str(tmp_path), "NO_DATA": str(tmp_path / "no_data.yaml")}
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", *[places.get(word, word) for word in words]])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
