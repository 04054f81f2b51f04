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
from megabatch.train.data import open_source
from megabatch.train.data.labelled import ImageFolder
from megabatch.train.data.prepare import Prepare
from megabatch.train.towers import Towers, make_towers
from megabatch.train.towers.tiny import TinyTowers

from .ranks import run_apart
from .shims import import_torchvision
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
    table = open_source(shapes)
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
    own = torch.arange(rows)
    key = query + 0.01 * torch.randn(rows, 8)
    figures = evaluate._retrieval("a_to_b", query, key, own, (own, own), World(torch.device("cpu")))
    assert figures["val/a_to_b_R@10"] > 0.5
    assert 0 < most[0] < rows * rows / 20


def test_towers_that_say_the_same_of_everything_find_nothing():
    same, own, world = torch.ones(100, 4), torch.arange(100), World(torch.device("cpu"))
    figures = evaluate._retrieval("a_to_b", same, same, own, (own, own), world)
    assert figures["val/a_to_b_R@10"] == 0
    assert figures["val/a_to_b_median_rank"] == 50


def test_equal_captions_are_as_right_as_each_other():
    """Three rows of each, and all are found."""
    features, world = torch.eye(5).repeat(3, 1), World(torch.device("cpu"))
    own, ids = torch.arange(15), torch.arange(5).repeat(3)
    assert evaluate._retrieval("a_to_b", features, features, own, (ids, ids), world)["val/a_to_b_R@1"] == 1


def several_captions(tmp_path: Path, kind: str) -> Path:
    """20 images with 1 to 5 captions each, as a table and as COCO has them."""
    rows = []
    for number, (shape, shade) in enumerate(product(SHAPES, SHADES)):
        draw_shape(shape, shade, "middle").save(tmp_path / f"{number}.png")
        words = [f"{shade} {shape} at the {place}" for place in ("left", "right", "top", "bottom", "middle")]
        rows += [(number, words[each]) for each in range(1 + number % 5)]
    rows = rows[::2] + rows[1::2]  # captions of an image do not lie together
    if kind == "csv":
        path = tmp_path / "captions.csv"
        path.write_text("filepath\ttitle\n" + "".join(f"{number}.png\t{words}\n" for number, words in rows))
    else:
        path = tmp_path / "captions.json"
        images = [{"id": 100 + number, "file_name": f"{number}.png"} for number in range(16)]
        notes = [{"image_id": 100 + number, "caption": words} for number, words in rows]
        path.write_text(json.dumps({"images": images, "annotations": notes}))
    return path


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_all_captions_of_an_image_count(run, tmp_path, kind):
    """As for COCO and Flickr30k: an image has found its text where one of its captions is among the first."""
    path = several_captions(tmp_path, kind)
    figures = evaluated(tmp_path, "--checkpoint", str(run), "--val-data", str(path), "--workers", "0")
    table = open_source(str(path), held_out=True)
    captions = [(row, words) for row in range(16) for words in (table[row].text, *table[row].captions)]
    owners = torch.tensor([row for row, _ in captions])
    assert (figures["val/samples"], figures["val/captions"]) == (16, len(captions))
    towers = towers_of(run)
    images, _ = features_of(towers, table)
    with torch.no_grad():
        texts = towers.encode_text(towers.tokenizer([words for _, words in captions]))
    scores = normalize(texts, dim=1) @ normalize(images, dim=1).T
    for k in (1, 5, 10):
        found = scores.topk(k, dim=1).indices == owners[:, None]
        assert figures[f"val/text_to_image_R@{k}"] == pytest.approx(found.any(1).double().mean().item(), abs=0.03)
        found = owners[scores.T.topk(k, dim=1).indices] == torch.arange(16)[:, None]
        assert figures[f"val/image_to_text_R@{k}"] == pytest.approx(found.any(1).double().mean().item(), abs=0.07)


def test_a_training_table_has_a_sample_per_row(tmp_path):
    path = several_captions(tmp_path, "json")
    assert len(open_source(str(path))) > len(open_source(str(path), held_out=True)) == 16
    assert not open_source(str(path)).has_negatives
    for content in ("{", "[]", '{"images": []}', '{"images": [{"id": 1, "file_name": 2}], "annotations": [{}]}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=r"bad\.json: must be a file of COCO's captions"):
            open_source(str(tmp_path / "bad.json"))


def test_imagenet_has_names_and_prompts(tmp_path):
    import_torchvision()
    import open_clip

    for name in ("n01443537", "n01440764", "n03028079"):
        (tmp_path / name).mkdir()
        draw_shape("cross", "grey", "top").save(tmp_path / name / "0.png")
    folder = ImageFolder(tmp_path, "imagenet", "imagenet")
    names, prompts = open_clip.IMAGENET_CLASSNAMES, open_clip.OPENAI_IMAGENET_TEMPLATES
    assert folder.classnames == ["tench", "goldfish", "church"]
    assert [prompt.replace("{}", "dog") for prompt in folder.templates] == [make("dog") for make in prompts]
    assert (len(folder.templates), len(ImageFolder(tmp_path, "imagenet", "simple").templates)) == (80, 7)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / str(["n01440764", "n01443537", "n03028079"].index(path.name) * 10))
    assert ImageFolder(tmp_path, "imagenet").classnames == [names[0], names[10], names[20]]  # ImageNet-V2's folders
    (tmp_path / "0").rename(tmp_path / "dogs")
    with pytest.raises(ValueError, match=r"--classnames imagenet: must name all .*n01440764 .*lacks 1 such as 'dogs'"):
        ImageFolder(tmp_path, "imagenet")


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


def test_the_first_samples_can_be_asked_for(run, tmp_path, monkeypatch):
    def samples(*flags: str) -> float:
        return evaluated(tmp_path, "--checkpoint", str(run), "--workers", "0", *flags)["val/samples"]

    assert samples("--val-num-samples", "10") == 10
    assert samples("--val-num-samples", "1000") == 96
    monkeypatch.setattr(evaluate, "ICONS", 12)
    assert samples("--val-data", "icons") == 12


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
        (["--checkpoint", "nowhere.pt"], r"must be a file, or a run's folder with checkpoints, got nowhere.pt"),
        (["--checkpoint", "RUN", "--batch-size", "8"], "--global-batch-size"),
        (["--checkpoint", "RUN", "--model", "small"], "must fit --model small, got RuntimeError: "),
        (["--checkpoint", "EMPTY"], "a run's folder with checkpoints"),
    ],
)
def test_mistakes_are_named(run, tmp_path, words, message, capsys):
    (tmp_path / "no_data.yaml").write_text("val_data: null\n")
    places = {"RUN": str(run), "EMPTY": str(tmp_path), "NO_DATA": str(tmp_path / "no_data.yaml")}
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", *[places.get(word, word) for word in words]])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
