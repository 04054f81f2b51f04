"""Predictions against what the paper printed (arXiv 2410.17243) and open_clip's own counts, and the command itself."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabatch.backends.triton_backend import Triton
from megabatch.plan import command, formulas, report
from megabatch.plan.formulas import OurLoss, loss_memory, ring_only_memory
from megabatch.plan.hardware import GIB, GPUS, Gpu
from megabatch.plan.models import MODELS
from megabatch.plan.prediction import Prediction, Run, largest_chunk, memory, predict, usable

K = 1024
L14, B16, A800 = MODELS["ViT-L-14"], MODELS["ViT-B-16"], GPUS["A800-80"]

# Table 1: ViT-L/14, D = 768. (method, GPUs, data): {thousands of rows: (loss, peak)}, as printed.
TABLE_1 = {
    ("dense", 8, "gpu-float32"): {32: (16.67, 46.40), 64: (66.11, 77.94)},
    ("openclip", 8, "gpu-float32"): {32: (2.27, 43.97), 64: (8.63, 46.38), 128: (33.64, 51.23)},
    ("inf-cl", 8, "gpu-float32"): {32: (0.18, 44.20), 64: (0.36, 46.63), 128: (0.72, 51.46), 256: (1.45, 61.13)},
    ("inf-cl", 8, "host"): {
        32: (0.18, 42.40),
        64: (0.36, 42.49),
        128: (0.72, 42.69),
        256: (1.45, 43.07),
        1024: (6.53, 45.40),
    },
    ("dense", 32, "gpu-float32"): {32: (16.66, 42.85), 64: (66.11, 75.52)},
    ("openclip", 32, "gpu-float32"): {32: (0.71, 42.46), 64: (2.45, 43.06), 128: (8.98, 44.26), 256: (34.35, 46.71)},
    ("inf-cl", 32, "gpu-float32"): {
        32: (0.05, 42.48),
        64: (0.09, 43.08),
        128: (0.18, 44.30),
        256: (0.35, 46.71),
        1024: (1.44, 61.20),
    },
}
# Table 2: the largest batch and its loss. Width 512 is ViT-B/16's, 768 ViT-L/14's. That 368k prints the loss of 352k is
# probably a slip of the paper's.
TABLE_2 = [
    ("dense", 8, "gpu-float32", 512, 68, 74.39),
    ("dense", 32, "gpu-float32", 512, 68, 74.39),
    ("openclip", 8, "gpu-float32", 512, 172, 59.95),
    ("openclip", 32, "gpu-float32", 512, 360, 66.29),
    ("inf-cl", 8, "gpu-float32", 512, 800, 3.01),
    ("inf-cl", 32, "gpu-float32", 512, 3456, 3.27),
    ("dense", 8, "gpu-float32", 768, 64, 66.11),
    ("dense", 32, "gpu-float32", 768, 64, 66.11),
    ("openclip", 8, "gpu-float32", 768, 152, 47.23),
    ("openclip", 32, "gpu-float32", 768, 352, 64.13),
    ("inf-cl", 8, "gpu-float32", 768, 448, 2.52),
    ("inf-cl", 32, "gpu-float32", 768, 2048, 2.89),
    ("dense", 8, "host", 768, 64, 66.11),
    ("dense", 32, "host", 768, 64, 66.11),
    ("openclip", 8, "host", 768, 184, 69.10),
    ("openclip", 32, "host", 768, 368, 64.13),
    ("inf-cl", 8, "host", 768, 4096, 26.12),
    ("inf-cl", 32, "host", 768, 12288, 19.59),
]
# Table 4: 64k on 4 GPUs. The width is not printed; its figures are those of 768, not of ViT-B/16's 512.
TABLE_4 = {"dense": 66.21, "openclip": 16.96, "ring only": 4.81, "inf-cl": 0.81}
# Figure 4: seconds of a step, ViT-L/14 on 8 GPUs.
FIGURE_4 = {
    "dense": {32: 25.1, 64: 56.3},
    "openclip": {32: 24.9, 64: 48.9, 128: 97.9},
    "inf-cl": {32: 25.0, 64: 49.4, 128: 98.3, 256: 200.3},
}
LOSSES = [
    *(
        (method, ranks, 768, thousands, loss)
        for (method, ranks, _), row in TABLE_1.items()
        for thousands, (loss, _) in row.items()
    ),
    *((method, ranks, width, thousands, loss) for method, ranks, _, width, thousands, loss in TABLE_2),
    *((method, 4, 768, 64, loss) for method, loss in TABLE_4.items()),
]


def paper_run(ranks: int, thousands: int, data: str = "gpu-float32") -> Run:
    return Run(L14, A800, ranks, thousands * K, chunk=128, data=data)


# ---- memory of the paper's methods


@pytest.mark.parametrize(("method", "ranks", "width", "thousands", "printed"), LOSSES)
def test_loss_memory_is_near_every_printed_figure(
    method: str, ranks: int, width: int, thousands: int, printed: float
) -> None:
    """Those of Inf-CL have two decimals, 0.05 the fewest digits."""
    predict_it = ring_only_memory if method == "ring only" else lambda *sizes: loss_memory(method, *sizes)
    within = 0.10 if method in ("dense", "openclip") else 0.15
    assert predict_it(thousands * K, ranks, width) / GIB == pytest.approx(printed, rel=within)


def test_table_4_is_not_of_width_512() -> None:
    assert loss_memory("inf-cl", 64 * K, 4, 512) / GIB < 0.7 * TABLE_4["inf-cl"]


def fitted(method: str) -> list[float]:
    """By least relative squares over Table 1: matrices of logits, gathered features and, if any, own features."""
    rows = []
    for (name, ranks, _), row in TABLE_1.items():
        for thousands, (loss, _) in row.items() if name == method else ():
            batch = thousands * K
            logits, features = batch * batch * 4 / GIB, batch * 768 * 4 / GIB
            terms = [logits, features] if method == "dense" else [logits / ranks, features, features / ranks]
            rows.append([term / loss for term in terms])
    design = torch.tensor(rows, dtype=torch.float64)
    return torch.linalg.lstsq(design, torch.ones(len(rows), dtype=torch.float64)).solution.tolist()


def test_constants_are_those_that_table_1_gives() -> None:
    matrices, gathered = fitted("dense")
    assert round(matrices, 2) == formulas.MATRICES
    assert round(gathered, 2) == formulas.GATHERED["dense"]
    matrices, gathered, own = fitted("openclip")
    assert round(matrices, 2) == formulas.MATRICES
    assert [round(gathered, 2), round(own, 2)] == [formulas.GATHERED["openclip"], formulas.OWN["openclip"]]
    ratios = [
        loss * GIB / (thousands * K / ranks * 768 * 4)
        for (method, ranks, _), row in TABLE_1.items()
        for thousands, (loss, _) in row.items()
        if method == "inf-cl"
    ]
    low, high = min(ratios), max(ratios)
    assert round(2 * low * high / (low + high), 1) == formulas.OWN["inf-cl"]


def test_constants_of_the_encoders_are_those_that_table_1_gives() -> None:
    offload = TABLE_1["inf-cl", 8, "host"]
    own = K / 8 * 768 * 4 / GIB
    kept = (offload[1024][1] - offload[256][1]) / ((1024 - 256) * own)
    assert round(kept, 1) == formulas.KEPT_FEATURES
    static = formulas.total(formulas.encoder_memory(L14, 8, "amp_bf16", "adamw", "none")) / GIB
    numbers = 128 * (L14.image.numbers + L14.text.numbers) / GIB
    assert round((offload[32][1] - static - kept * 32 * own) / numbers, 1) == formulas.ACTIVATIONS["amp_bf16"]


@pytest.mark.parametrize(("method", "ranks", "data"), TABLE_1)
def test_peaks_are_near_those_of_table_1(method: str, ranks: int, data: str) -> None:
    for thousands, (_, peak) in TABLE_1[method, ranks, data].items():
        assert memory(paper_run(ranks, thousands, data), method).peak / GIB == pytest.approx(peak, rel=0.04)


def test_backbone_of_table_4_is_near() -> None:
    """Another model, another chunk: a frozen ViT-B/16 and BERT-base, whose 77 tokens are our guess; Adafactor."""
    model = replace(B16, text_width=768)
    parts = formulas.encoder_memory(model, 4, "amp_bf16", "adafactor", "image")
    backbone = formulas.total(parts) + formulas.activation_memory(model, 256, "amp_bf16", "image")
    assert backbone / GIB == pytest.approx(8.26, rel=0.10)


@pytest.mark.parametrize(("method", "ranks", "data", "width", "thousands", "loss"), TABLE_2)
def test_largest_batches_are_near_those_of_table_2(
    method: str, ranks: int, data: str, width: int, thousands: int, loss: float
) -> None:
    """All but Inf-CL with its data in host memory: by these formulas three times as much would fit, and more."""
    run = replace(paper_run(ranks, 64, data), model=L14 if width == 768 else B16)
    largest = predict(run, method).largest / K
    if (method, data) == ("inf-cl", "host"):
        assert 2.5 * thousands < largest < 4 * thousands
    else:
        assert largest == pytest.approx(thousands, rel=0.12)


# ---- time


@pytest.mark.parametrize(
    ("method", "thousands"), [(method, thousands) for method, row in FIGURE_4.items() for thousands in row]
)
def test_step_times_are_near_those_of_figure_4(method: str, thousands: int) -> None:
    time = predict(paper_run(8, thousands), method).time
    for predicted in (time.with_overlap, time.without_overlap):
        assert predicted == pytest.approx(FIGURE_4[method][thousands], rel=0.15)


def test_the_encoders_efficiency_is_what_one_figure_gives() -> None:
    time = predict(paper_run(8, 64), "openclip").time
    rest = time.with_overlap - time.encoders
    assert round(formulas.ENCODER_EFFICIENCY * time.encoders / (FIGURE_4["openclip"][64] - rest), 3) == (
        formulas.ENCODER_EFFICIENCY
    )


def test_overlap_hides_the_wire_of_a_ring_behind_the_loss_and_no_others() -> None:
    slow = replace(A800, link=1e9, network=1e9)
    for method, hides in {"dense": False, "openclip": False, "inf-cl": True, "ring": True, "gather": True}.items():
        time = predict(replace(paper_run(8, 64), gpu=slow), method).time
        beside = max(time.encoders, time.all_reduce)
        alone = max(time.loss, time.wire) if hides else time.loss + time.wire
        assert time.with_overlap == pytest.approx(beside + alone)
        assert time.with_overlap < time.without_overlap


def test_between_nodes_the_network_decides() -> None:
    inside, between = (predict(paper_run(ranks, 64), "ring") for ranks in (8, 16))
    assert inside.time.wire == pytest.approx(inside.wire / (A800.link * formulas.LINK_EFFICIENCY))
    assert between.time.wire == pytest.approx(between.wire / (A800.network * formulas.LINK_EFFICIENCY))


def test_a_frozen_tower_is_encoded_once_and_keeps_nothing() -> None:
    run = paper_run(8, 64)
    frozen = replace(run, frozen="image")
    trained, not_trained = (predict(one, "ring") for one in (run, frozen))
    rows = run.rows / (A800.half * formulas.ENCODER_EFFICIENCY)
    assert trained.time.encoders - not_trained.time.encoders == pytest.approx(3 * L14.image_flops * rows)
    assert not_trained.memory.activations == 128 * 41 * L14.text.numbers
    assert not_trained.memory.optimizer == 8 * (L14.text_parameters + 1)


def test_without_chunks_the_loss_comes_on_top_of_the_activations() -> None:
    cached, whole = (predict(replace(paper_run(8, 16), chunk=chunk), "dense").memory for chunk in (128, None))
    assert cached.peak < whole.peak
    assert {"activations", "loss"} <= set(whole.summit)
    static = whole.weights + whole.gradients + whole.optimizer + whole.data
    assert whole.peak == pytest.approx(static + whole.activations + whole.loss)
    assert predict(replace(paper_run(8, 16), chunk=2048), "dense").memory.peak == whole.peak  # one chunk of all rows


def test_without_chunks_a_step_is_three_forwards_of_work() -> None:
    whole, cached = predict(replace(paper_run(8, 64), chunk=None), "ring"), predict(paper_run(8, 64), "ring")
    assert whole.time.encoders == pytest.approx(cached.time.encoders * 3 / 4)
    assert whole.memory.activations == pytest.approx(cached.memory.activations * 64)


@pytest.mark.parametrize(
    ("data", "on_gpu", "moved"),
    [("gpu-float32", 602112 + 616, 0), ("gpu-uint8", 150528 + 616, 0), ("host", 0, 2 * (150528 + 616))],
)
def test_images_wait_on_the_gpu_or_come_twice(data: str, on_gpu: int, moved: int) -> None:
    predicted = predict(paper_run(8, 64, data), "ring")
    assert predicted.memory.data == 8 * K * on_gpu
    assert predicted.time.copies == pytest.approx(8 * K * moved / (A800.host * formulas.LINK_EFFICIENCY))


# ---- products and the wire


@pytest.mark.parametrize(
    ("method", "products", "blocks"), [("dense", 3, 14), ("openclip", 6 / 8, 28), ("inf-cl", 10 / 8, 44)]
)
def test_the_papers_methods_multiply_and_send_what_their_code_does(method: str, products: float, blocks: int) -> None:
    predicted = predict(paper_run(8, 256), method)
    assert predicted.products == products
    assert predicted.wire == blocks * 32 * K * 768 * 4


def test_our_loss_sends_a_third_of_the_papers_and_multiplies_four_times() -> None:
    ours, papers = (predict(paper_run(8, 256), method) for method in ("ring", "inf-cl"))
    assert ours.products == 4 / 8
    assert 0.30 < ours.wire / papers.wire < 0.34


def test_a_budget_that_keeps_all_logits_saves_a_product() -> None:
    default = OurLoss(8192, 512, 2, "ring", 2, 2, Triton)
    some, all_ = replace(default, budget=700 * 2**20), replace(default, budget=2**31)
    assert (default.products, all_.products) == (4, 3)
    assert 3 < some.products < 4
    assert all_.parts["kept logits"] >= 8192 * 16384 * 4


# ---- models


@pytest.mark.parametrize(
    ("name", "millions", "gigaflops"),
    [  # of open_clip's docs/model_profile.csv
        ("ViT-S-32", 63.09, 5.66),
        ("ViT-S-16", 62.26, 12.58),
        ("ViT-B-32", 151.28, 14.78),
        ("ViT-B-16", 149.62, 41.09),
        ("ViT-L-16", 427.74, 136.41),
        ("ViT-L-14", 427.62, 175.33),
        ("ViT-L-14-336", 427.94, 395.22),
        ("ViT-H-14", 986.11, 381.68),
        ("ViT-g-14", 1366.68, 581.15),
        ("ViT-bigG-14", 2539.57, 1065.36),
    ],
)
def test_parameters_and_flops_are_those_that_open_clip_counts(name: str, millions: float, gigaflops: float) -> None:
    model = MODELS[name]
    assert round(model.parameters / 1e6, 2) == millions
    assert (model.image_flops + model.text_flops) / 1e9 == pytest.approx(gigaflops, abs=0.011)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_data_sheet_is_consistent(gpu: Gpu) -> None:
    """All makers' matrix units multiply halves twice as fast as tf32, and no link is as fast as memory."""
    assert gpu.half == pytest.approx(2 * gpu.tf32, rel=0.01)
    assert gpu.network <= gpu.host <= gpu.link < gpu.memory


# ---- the largest batch


@pytest.mark.parametrize("method", formulas.METHODS)
@pytest.mark.parametrize("data", formulas.DATA)
def test_the_largest_batch_fits_and_the_next_does_not(method: str, data: str) -> None:
    run = paper_run(8, 64, data)
    largest = predict(run, method).largest
    assert largest % 8 == 0
    peaks = [memory(replace(run, batch=batch), method).peak for batch in (largest, largest + 8)]
    assert peaks[0] <= usable(A800) < peaks[1]


@pytest.mark.parametrize(
    ("changes", "method", "limits"),
    [
        ({}, "ring", ("activations", "data", "encoders")),
        ({}, "openclip", ("loss", "loss", "encoders")),
        ({"chunk": None}, "ring", ("activations", "activations", "encoders")),
        ({"data": "host"}, "ring", ("activations", "loss", "encoders")),
        ({"batch": 512 * K}, "ring", ("data", "data", "encoders")),
        ({"batch": 32 * 2**20}, "dense", ("loss", "loss", "loss")),
        ({"batch": 1024, "gpu": replace(A800, link=1e7)}, "ring", ("activations", "data", "wire")),
        ({"gpu": replace(A800, host=1e7), "data": "host"}, "ring", ("activations", "loss", "copies")),
        ({"gpu": replace(A800, capacity=1.0)}, "ring", ("activations", "all but the batch", "encoders")),
    ],
)
def test_the_limit_that_binds_is_named(changes: dict[str, object], method: str, limits: tuple[str, ...]) -> None:
    found: Prediction = predict(replace(paper_run(8, 256), **changes), method)
    assert (found.memory.limit, found.growth, found.time.limit) == limits


# ---- the command


def run_command(words: str) -> int:
    parser = argparse.ArgumentParser("megabatch plan")
    command.add_arguments(parser)
    return command.main(parser.parse_args(words.split()))


EXAMPLE = "--model ViT-L-14 --gpu A800-80 --gpus 8 --batch 256k --chunk 128"


def test_a_table_has_a_row_for_every_method_and_says_that_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(EXAMPLE) == 0
    text = capsys.readouterr().out
    assert text.count("PREDICTED") == 2
    assert [line.split()[0] for line in text.splitlines()[6:11]] == list(formulas.METHODS)
    assert max(map(len, text.splitlines()[:11])) <= 120
    assert "up to 491k would, limited by data" in text
    assert "--data host frees the GPU of images" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 8 --batch 256k --chunk 128", "openclip does not fit: it ends at 168k."),
        (
            "--gpus 8 --batch 64k --chunk 128",
            "openclip fits as well, up to 168k: megabatch is not needed for its memory.",
        ),
        ("--gpus 8 --batch 64k --chunk 128 --method openclip", "the loss is"),
        ("--gpus 8 --batch 64k", "--chunk 128 fits."),
        ("--gpus 8 --batch 64k --chunk 512", "--chunk 128 fits."),
        ("--gpus 8 --batch 64k --memory 4", "No --chunk makes it fit."),
    ],
)
def test_the_words_say_what_is_needed(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"--model ViT-L-14 --gpu A800-80 {words}") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text
    assert ("openclip fits" in text or "openclip does not" in text) == said.startswith("openclip")


def test_a_chunk_that_is_said_to_fit_does_and_twice_that_does_not() -> None:
    run = replace(paper_run(8, 64), chunk=None)
    chunk = largest_chunk(run, "ring")
    assert predict(replace(run, chunk=chunk), "ring").fits
    assert not predict(replace(run, chunk=2 * chunk), "ring").fits


def test_words_of_the_trainer_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (EXAMPLE, EXAMPLE.replace("--batch", "--global-batch-size").replace("--chunk", "--chunk-size")):
        assert run_command(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("word", ["tf32", "bfloat16", "float32"])
def test_precision_has_the_words_of_open_clip_alone(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(f"{EXAMPLE} --precision {word}")
    assert f"invalid choice: '{word}'" in capsys.readouterr().err
    predictions = {}
    for known in ("amp_bf16", "amp", "bf16", "fp32"):
        assert run_command(f"{EXAMPLE} --precision {known} --json -") == 0
        predictions[known] = json.loads(capsys.readouterr().out)["methods"][0]["memory"]["weights"]
    assert predictions["amp_bf16"] == predictions["amp"] == predictions["fp32"] == 2 * predictions["bf16"]


def test_a_batch_is_repeated_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    for batch, shown in (("20000", "batch 20,000 on"), ("256k", "batch 256k on"), ("24", "batch 24 on")):
        assert run_command(EXAMPLE.replace("256k", batch)) == 0
        assert shown in capsys.readouterr().out


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    assert f"megabatch plan {EXAMPLE}\n" in page
    assert run_command(EXAMPLE) == 0
    assert " ".join(capsys.readouterr().out.split()) in " ".join(page.split())


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(f"{EXAMPLE} --method ring --json {tmp_path / 'plan.json'}") == 0
    capsys.readouterr()
    assert run_command(f"{EXAMPLE} --method ring --json -") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "plan.json").read_text())
    assert document["kind"] == "PREDICTED, not measured"
    (ring,) = document["methods"]
    expected = predict(paper_run(8, 256), "ring")
    assert ring["memory"]["peak"] == expected.memory.peak
    assert ring["time"]["with_overlap"] == expected.time.with_overlap
    assert sum(ring["our_loss"].values()) <= ring["memory"]["loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model ViT-B-17 --gpu A100-80 --batch 1k", "--model must be one of ViT-S-32, .*Perhaps .*ViT-B-16"),
        ("--model ViT-L --gpu A100-80 --batch 1k", "got 'ViT-L'. Perhaps ViT-L-16 or ViT-L-14 or ViT-L-14-336"),
        ("--model ViT-B-16 --gpu H10 --batch 1k", "--gpu must be one of A100-80, .*Perhaps H100-80 is meant"),
        ("--gpu H100 --batch 1k --image-width 64", "missing --embed-dim, --image-layers, --patch-size, --text-layers"),
        ("--model ViT-B-16 --memory 40 --gpus 2 --batch 1k", "missing --tflops, --bandwidth, --link"),
        ("--model ViT-B-16 --gpu H100 --gpus 3 --batch 1k", "multiple of --gpus, got 1024 for 3. Use 1023 or 1026"),
        ("--model ViT-B-16 --gpu H100 --gpus 3 --batch 2", "multiple of --gpus, got 2 for 3. Use 3."),
        (
            "--model ViT-B-16 --gpu H100 --batch 8 --image-size 8",
            "--patch-size must be at most .* got 16 and 8",
        ),
        (
            "--model ViT-B-16 --gpu H100 --batch 8 --json /no/such/folder",
            "--json must be a path that can be written",
        ),
    ],
)
def test_a_mistake_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("megabatch plan: --")
    assert re.search(message, said.err)


@pytest.mark.parametrize("word", ["0", "-1", "k", "1.5k", "1G", "256kk", ""])
def test_a_batch_is_a_whole_number_with_a_unit(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 4096, 256k or 1M"):
        command._batch(word)


def test_batches_are_read_and_written_in_units() -> None:
    assert [command._batch(word) for word in ("77", "256k", "256K", "4M")] == [77, 2**18, 2**18, 2**22]
    written = [2**22, 2**18, 488_213, 5000, 17 * 2**20 + 5]
    assert [report.count(rows) for rows in written] == ["4M", "256k", "476k", "5000", "17M"]


def test_given_dimensions_and_figures_replace_those_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model vitl14 --gpu h100 --batch 8 --image-size 336 --memory 40 --gpus-per-node 4 --json -"
    assert run_command(words) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["model"] == vars(replace(MODELS["ViT-L-14-336"], name="ViT-L-14 with other dimensions"))
    assert (run["gpu"]["capacity"], run["gpu"]["per_node"], run["gpu"]["half"]) == (40 * GIB, 4, 989e12)


def test_a_model_and_a_gpu_can_be_given_by_figures_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = "--embed-dim 512 --image-layers 12 --image-width 768 --patch-size 16 --text-layers 12 --text-width 512"
    gpu = "--memory 80 --tflops 312 --bandwidth 2039 --link 200 --network 25"
    both = []
    for words in (f"{model} {gpu}", "--model ViT-B-16 --gpu A800-80"):
        assert run_command(f"{words} --gpus 16 --batch 64k --chunk 128 --json -") == 0
        both.append(json.loads(capsys.readouterr().out)["methods"])
    assert both[0] == both[1]
