"""The drop-ins for sentence-transformers: the originals' values and gradients, in their trainer; and what they lack."""

import functools
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .ranks import PATIENCE, LoggedLines, Pool
from .shims import import_torchvision

import_torchvision()

from datasets import Dataset  # noqa: E402, F401
from sentence_transformers import SentenceTransformer, util  # noqa: E402
from sentence_transformers.sentence_transformer import losses as originals  # noqa: E402

from megabatch.integrations import sentence_transformers as drop_ins  # noqa: E402
from megabatch.integrations.same_texts import hash_tokens, ids_of_rows  # noqa: E402

from . import sentence_transformers_training as training  # noqa: E402
from .sentence_transformers_training import ALIKE, DIRECTIONS, NEGATIVES, NEGATIVES_ALIKE, TEXTS, embeddings, tokens  # noqa: E402
from .tolerance import eps, slack  # noqa: E402

PLAIN, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SAME = {"rtol": 1e-12, "atol": 1e-12}


@functools.cache
def minilm() -> SentenceTransformer:
    model = training.minilm()
    model.eval()  # without dropout
    return model


def normal(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def of_the_model(loss: torch.nn.Module, columns: dict[str, list[str]]) -> tuple[Tensor, list[Tensor]]:
    """The loss of these texts, and the gradients of all weights."""
    model = minilm()
    model.zero_grad()
    value = loss([model.preprocess(texts) for texts in columns.values()], None)
    value.backward()
    return value.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Some weights, as the biases of keys, have a gradient of 0 but for roundings of the others'."""
    rounding = 2 * eps(torch.float32) * max(other.abs().max().item() for other in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5 * other.abs().max().item() + rounding)


# ---- the same as the originals


@pytest.mark.parametrize("name", [PLAIN, CACHED])
def test_arguments_are_those_of_the_original(name: str) -> None:
    theirs = list(inspect.signature(getattr(originals, name)).parameters.values())
    ours = list(inspect.signature(getattr(drop_ins, name)).parameters.values())
    described = [(p.name, p.kind, p.default) for p in ours]
    assert described[: len(theirs)] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(theirs) :])


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize(("similarity", "scale"), [(util.cos_sim, 20.0), (util.dot_score, 1.0)])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_value_and_gradients_of_every_direction(name: str, similarity: Any, scale: float, negatives: int) -> None:
    columns = [column.requires_grad_() for column in embeddings(9, negatives)]
    pair = [
        module.MultipleNegativesRankingLoss(None, scale, similarity, **DIRECTIONS[name]).compute_loss_from_embeddings(
            columns, None
        )
        for module in (originals, drop_ins)
    ]
    torch.testing.assert_close(pair[1], pair[0], **SAME)
    for got, wanted in zip(gradients(pair[1], columns), gradients(pair[0], columns), strict=True):
        torch.testing.assert_close(got, wanted, **SAME)


@pytest.mark.parametrize("name", ["one way", "one way and among queries", "both ways"])
def test_fitted_pairs_in_float32(name: str) -> None:
    """Where the loss is below the rounding of a logit, the positive must not be computed apart."""
    query = normal(torch.randn(64, 256))
    doc = normal(query + 0.01 * torch.randn(64, 256))
    exact = originals.MultipleNegativesRankingLoss(None, **DIRECTIONS[name])
    wanted = exact.compute_loss_from_embeddings([query.double(), doc.double()], None)
    got = drop_ins.MultipleNegativesRankingLoss(None, **DIRECTIONS[name]).compute_loss_from_embeddings([query, doc])
    assert wanted < 2e-6
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=slack(torch.float32, 0.0, natural=1.0))


@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_cached_stage_leaves_the_same_gradients(name: str) -> None:
    columns = embeddings(9, 1)
    results = []
    for module in (originals, drop_ins):
        reps = [[piece.clone().requires_grad_() for piece in column.split(4)] for column in columns]
        loss = module.CachedMultipleNegativesRankingLoss(minilm(), mini_batch_size=4, **DIRECTIONS[name])
        value = loss.calculate_loss(reps, with_backward=True)
        assert not value.requires_grad
        results.append([value, *(piece.grad for column in reps for piece in column)])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, **SAME)


@pytest.mark.parametrize(("name", "options"), [(PLAIN, {}), (CACHED, {"mini_batch_num_tokens": 40})])
def test_a_real_model(name: str, options: dict[str, Any]) -> None:
    columns = {column: texts[:5] for column, texts in training.pairs(2).items()}
    wanted, theirs = of_the_model(getattr(originals, name)(minilm(), **options), columns)
    got, ours = of_the_model(getattr(drop_ins, name)(minilm(), **options), columns)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert len(ours) == len(theirs) > 100
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize(("name", "options"), [(PLAIN, {}), (CACHED, {"mini_batch_size": 3})])
def test_inside_a_matryoshka_loss(name: str, options: dict[str, Any]) -> None:
    columns = {column: texts[:5] for column, texts in training.pairs().items()}
    results = []
    for module in (originals, drop_ins):
        inner = getattr(module, name)(minilm(), mask_duplicates=True, **options) if module is drop_ins else None
        inner = inner or getattr(module, name)(minilm(), **options)
        results.append(of_the_model(originals.MatryoshkaLoss(minilm(), inner, [384, 64]), columns))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(results[1][1], results[0][1])


def test_without_gradients() -> None:
    columns = [minilm().preprocess(texts[:4]) for texts in training.pairs().values()]
    with torch.no_grad():
        values = [
            loss(columns, None).item()
            for loss in (
                originals.CachedMultipleNegativesRankingLoss(minilm()),
                drop_ins.CachedMultipleNegativesRankingLoss(minilm()),
            )
        ]
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_embeddings_of_a_model_in_half_precision() -> None:
    query, doc = (column.bfloat16() for column in embeddings(9, 0))
    loss = drop_ins.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings([query, doc])
    exact = originals.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(
        [query.double(), doc.double()], None
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [PLAIN, CACHED])
def test_it_is_one_of_theirs_with_their_words(name: str) -> None:
    theirs, ours = (getattr(module, name)(minilm(), scale=10.0) for module in (originals, drop_ins))
    assert isinstance(ours, getattr(originals, name))
    assert ours.get_config_dict() == {**theirs.get_config_dict(), "mask_duplicates": False}
    assert ours.temperature == theirs.temperature == 0.1
    assert ours.citation.startswith(theirs.citation)
    assert "2410.17243" in ours.citation


def test_settings_changed_after_construction_count() -> None:
    columns = embeddings(6, 0)
    values = []
    for module in (originals, drop_ins):
        loss = module.CachedMultipleNegativesRankingLoss(minilm())
        loss.scale, loss.similarity_fct, loss.hardness_strength = 0.5, util.dot_score, 5.0  # the last without a mode
        values.append(loss.calculate_loss([[column] for column in columns]))
    torch.testing.assert_close(values[1], values[0], **SAME)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hardness_mode", "all_negatives"),
        ("directions", ("query_to_doc", "doc_to_doc")),
        ("similarity_fct", util.manhattan_sim),
    ],
)
def test_settings_changed_to_what_is_not_offered_are_refused(setting: str, value: Any) -> None:
    loss = drop_ins.CachedMultipleNegativesRankingLoss(minilm())
    setattr(loss, setting, value)
    with pytest.raises(ValueError, match=f"MultipleNegativesRankingLoss: {setting} must"):
        loss.calculate_loss([[column] for column in embeddings(6, 0)])


def test_the_similarity_of_the_model() -> None:
    loss = drop_ins.MultipleNegativesRankingLoss(minilm(), similarity_fct=minilm().similarity)
    assert loss.get_config_dict()["similarity_fct"] == "cos_sim"
    wanted = originals.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(embeddings(6, 0), None)
    torch.testing.assert_close(loss.compute_loss_from_embeddings(embeddings(6, 0)), wanted, **SAME)


# ---- in their trainer


def run_on_two_ranks(results: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [*TORCHRUN, "-m", "tests.sentence_transformers_training", str(results)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told: dict[str, Any] = json.loads(results.read_text())
    told["groups"] = [results.with_suffix(f".{rank}").read_text() for rank in range(2)]
    return told


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One job on two real ranks, for all tests that ask what happened there."""
    return run_on_two_ranks(tmp_path_factory.mktemp("ranks") / "results.json")


def assert_same_curves(curves: dict[str, list[list[float]]]) -> None:
    assert set(curves) == {PLAIN, CACHED}
    for theirs, ours in curves.values():
        assert len(theirs) == len(ours) == training.STEPS
        assert theirs[-1] < theirs[0] / 2, "it learns"
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_trainer_logs_the_same_losses() -> None:
    assert_same_curves(training.curves(gather=False))


def test_a_trainer_logs_the_same_losses_on_two_ranks(two_ranks: dict[str, Any]) -> None:
    assert_same_curves(two_ranks["curves"])


def test_two_ranks_equal_one_process(two_ranks: dict[str, Any]) -> None:
    assert len(two_ranks["exact"]) == 4 * len(DIRECTIONS)
    assert {case: off for case, off in two_ranks["exact"].items() if not off < 1e-12} == {}


def test_ranks_may_have_different_numbers_of_negatives(two_ranks: dict[str, Any]) -> None:
    assert set(two_ranks["negatives on one rank"]) == {
        name for name in DIRECTIONS if "doc_to_doc" not in DIRECTIONS[name]["directions"]
    }
    assert max(two_ranks["negatives on one rank"].values()) < 1e-12


def test_what_is_wrong_on_one_rank_is_raised_on_all(two_ranks: dict[str, Any]) -> None:
    for case, told in two_ranks["refusals"].items():
        assert len(told) == 2
        assert len(set(told)) == 1, case
        assert case in told[0]


def test_nothing_holds_the_group_of_a_job_that_was_trained_and_refused(two_ranks: dict[str, Any]) -> None:
    """Or its threads outlive it, want the interpreter when that has ended, and abort the process now and then."""
    assert two_ranks["groups"] == ["gone", "gone"]


def test_gathering_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True)
    with pytest.warns(
        UserWarning, match=r"torch.distributed is not initialised: this loss has only the rows of this rank as neg"
    ):
        loss.compute_loss_from_embeddings(embeddings(4, 0))


def logged_lines(rank: int, group: Any, gather: bool) -> list[str]:
    with LoggedLines("megabatch.integrations") as lines:
        for name in (PLAIN, CACHED):
            loss = getattr(drop_ins, name)([None], gather_across_devices=gather)  # a model that is never run
            for _ in range(2):
                loss.compute_loss_from_embeddings(embeddings(3 + rank, 0))
    return lines


def test_local_negatives_on_several_ranks_are_logged_once_by_rank_0(pool: Pool) -> None:
    told, *others = pool.run(4, logged_lines, False)
    rest = "each of 4 ranks uses only its own rows as negatives. Pass gather_across_devices=True to use those of all"
    assert told == [f"{name}: {rest} ranks." for name in (PLAIN, CACHED)]
    assert others == [[]] * 3
    assert pool.run(4, logged_lines, True) == [[]] * 4


def test_duplicates_on_different_ranks_are_masked(two_ranks: dict[str, Any]) -> None:
    assert max(two_ranks["duplicates"]) < 1e-12


# ---- what they lack: duplicates


def masked_softmax(query: Tensor, doc: Tensor, extra: Tensor) -> Tensor:
    """The dense loss in which rows and negatives of one id are no negatives of each other."""
    logits = 20 * normal(query) @ normal(torch.cat([doc, extra])).T
    same = ALIKE[:, None] == torch.cat([ALIKE, NEGATIVES_ALIKE])
    same[range(8), range(8)] = False
    return -logits.masked_fill(same, -torch.inf).log_softmax(1).diagonal().mean()


def of_texts(loss: Any, columns: list[Tensor], **widths: int) -> Tensor:
    with loss.knowing_the_texts_of([tokens(texts, **widths) for texts in (*TEXTS, NEGATIVES)]):
        value: Tensor = loss.compute_loss_from_embeddings(columns)
    return value


@pytest.mark.parametrize("width", [0, 9])
def test_duplicates_are_masked(width: int) -> None:
    columns = embeddings(8, 1)
    loss = drop_ins.MultipleNegativesRankingLoss(None, mask_duplicates=True)
    torch.testing.assert_close(of_texts(loss, columns, width=width), masked_softmax(*columns), **SAME)
    plain = drop_ins.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(columns)
    assert plain > masked_softmax(*columns) + 0.01


def test_duplicates_are_masked_both_ways() -> None:
    query, doc = embeddings(8, 0)
    loss = drop_ins.MultipleNegativesRankingLoss(None, mask_duplicates=True, **DIRECTIONS["both ways"])
    with loss.knowing_the_texts_of([tokens(texts) for texts in TEXTS]):
        got = loss.compute_loss_from_embeddings([query, doc])
    logits = 20 * normal(query) @ normal(doc).T
    same = (ALIKE[:, None] == ALIKE) & ~torch.eye(8, dtype=torch.bool)
    ways = [
        masked.log_softmax(1).diagonal()
        for masked in (logits.masked_fill(same, -torch.inf) for logits in (logits, logits.T))
    ]
    torch.testing.assert_close(got, -torch.stack(ways).mean(), **SAME)


@pytest.mark.parametrize(("name", "options"), [(PLAIN, {}), (CACHED, {"mini_batch_size": 3})])
def test_duplicates_of_real_texts_are_masked(name: str, options: dict[str, Any]) -> None:
    columns = {column: texts[:4] for column, texts in training.pairs().items()}
    doubled = {column: [*texts, texts[1]] for column, texts in columns.items()}
    plain = getattr(drop_ins, name)(minilm(), **options)
    masking = getattr(drop_ins, name)(minilm(), mask_duplicates=True, **options)
    with torch.no_grad():
        query, doc = (normal(minilm()(minilm().preprocess(texts))["sentence_embedding"]) for texts in doubled.values())
    logits = 20 * query @ doc.T
    logits[1, 4] = logits[4, 1] = -torch.inf
    wanted = -logits.log_softmax(1).diagonal().mean()
    torch.testing.assert_close(of_the_model(masking, doubled)[0], wanted, rtol=1e-4, atol=1e-5)
    assert of_the_model(plain, doubled)[0] > wanted + 0.05
    torch.testing.assert_close(of_the_model(masking, columns)[0], of_the_model(plain, columns)[0], rtol=1e-5, atol=1e-6)


def test_ids_of_rows_and_of_many_negatives() -> None:
    letters = torch.arange(200)  # negatives below, among and above all texts of the rows
    anchors, positives = torch.tensor([90, 91, 92, 93, 94]), torch.tensor([101, 102, 101, 104, 93])
    rows, negatives = ids_of_rows(anchors, positives, letters, gather=False)
    groups = [{90, 92, 101}, {91, 102}, {93, 94, 104}]
    assert [rows.tolist().index(row) for row in rows.tolist()] == [0, 1, 0, 3, 3]
    for text, id in zip(letters.tolist(), negatives.tolist(), strict=True):
        mine = [rows[anchors.tolist().index(min(group))].item() for group in groups if text in group]
        assert id == (mine[0] if mine else -1)


def test_rows_tied_in_a_long_chain_have_one_id() -> None:
    links = torch.randperm(1000)
    with pytest.warns(UserWarning, match=r"1000 of 1000 rows are tied together .* Pass mask_duplicates='positive'"):
        rows, _ = ids_of_rows(links, links + 1, links[:0], gather=False)
    assert len(rows.unique()) == 1


@pytest.mark.parametrize("side", ["anchor", "positive"])
def test_duplicates_of_one_side_are_masked(side: str) -> None:
    """Which rows share a text is not passed on to others here."""
    query, doc, extra = embeddings(8, 1)
    loss = drop_ins.MultipleNegativesRankingLoss(None, mask_duplicates=side)
    texts = TEXTS[0] if side == "anchor" else TEXTS[1]
    same = torch.tensor([[a == b for b in texts] for a in texts]) & ~torch.eye(8, dtype=torch.bool)
    also = torch.tensor([[side == "positive" and a == b for b in NEGATIVES] for a in texts])
    logits = 20 * normal(query) @ normal(torch.cat([doc, extra])).T
    wanted = -logits.masked_fill(torch.cat([same, also], 1), -torch.inf).log_softmax(1).diagonal().mean()
    torch.testing.assert_close(of_texts(loss, [query, doc, extra]), wanted, **SAME)


def test_texts_are_forgotten_after_their_batch() -> None:
    loss = drop_ins.MultipleNegativesRankingLoss(minilm(), mask_duplicates=True)
    loss([minilm().preprocess(texts[:3]) for texts in training.pairs().values()], None)
    with pytest.raises(ValueError, match="got embeddings alone"):
        loss.compute_loss_from_embeddings(embeddings(3, 0))


def test_the_same_tokens_have_the_same_hash_wherever_the_padding_is() -> None:
    right = {"input_ids": torch.tensor([[5, 7, 9, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    left = {"input_ids": torch.tensor([[1, 5, 7, 9]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert hash_tokens(**right) == hash_tokens(**left)


def test_other_tokens_have_another_hash() -> None:
    ids = torch.tensor([[a, b, c] for a in range(20) for b in range(20) for c in range(20)])
    everything = [ids, ids[:, :2].unique(dim=0), ids[:, :1].unique(dim=0), ids[:1, :0]]
    hashes = torch.cat([hash_tokens(each, torch.ones_like(each)) for each in everything])
    assert len(hashes.unique()) == len(hashes) == 8000 + 400 + 20 + 1


# ---- what they lack: any number of hard negatives


def test_negatives_of_any_number() -> None:
    query, doc = embeddings(6, 0)
    extra = [column[:rows].requires_grad_() for column, rows in zip(embeddings(9, 2), (9, 0, 2), strict=False)]
    loss = drop_ins.MultipleNegativesRankingLoss(None)
    got = loss.compute_loss_from_embeddings([query, doc, *extra])
    logits = 20 * normal(query) @ normal(torch.cat([doc, *extra])).T
    wanted = -logits.log_softmax(1).diagonal().mean()
    torch.testing.assert_close(got, wanted, **SAME)
    for mine, other in zip(gradients(got, extra), gradients(wanted, extra), strict=True):
        torch.testing.assert_close(mine, other, **SAME)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_trainer_with_lists_of_negatives_and_its_model_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training, "STEPS", 2)
    dataset = training.pairs()
    dataset["negatives"] = [dataset["positive"][:k] for k in ([0] * 8 + [1, 3, 0, 2]) * 6][:64]  # type: ignore[misc]
    options = {"mini_batch_size": 5, "mask_duplicates": True}
    losses = training.train(
        drop_ins.CachedMultipleNegativesRankingLoss, dataset, drop_ins.NegativeListsCollator, tmp_path, **options
    )
    assert len(losses) == 2
    card = (tmp_path / "README.md").read_text()
    assert '"mask_duplicates": true' in card
    assert "CachedMultipleNegativesRankingLoss" in card
    assert "2410.17243" in card


def test_the_collator_takes_lists_apart_and_leaves_texts_alone() -> None:
    collate = drop_ins.NegativeListsCollator(minilm().preprocess)
    rows = [{"anchor": "one", "positive": "two", "negatives": many} for many in ([], ["three", "four"], ["five"])]
    batch = collate(rows)
    assert len(batch["anchor_input_ids"]) == len(batch["positive_input_ids"]) == 3
    plain = minilm().preprocess(["three", "four", "five"])
    assert torch.equal(batch["negatives_input_ids"], plain["input_ids"])
    assert not any(key.startswith("negatives") for key in collate(rows[:1]))
    rows[0]["negatives"] = None
    assert torch.equal(collate(rows)["negatives_input_ids"], plain["input_ids"])


def test_the_collator_travels_to_the_workers_of_a_loader() -> None:
    collate = pickle.loads(pickle.dumps(drop_ins.NegativeListsCollator(as_lengths)))
    assert collate([{"anchor": "one", "negatives": ["three", "four"]}]) == {
        "anchor_lengths": [3],
        "negatives_lengths": [5, 4],
    }


def as_lengths(texts: list[str], **options: Any) -> dict[str, list[int]]:
    return {"lengths": [len(text) for text in texts]}


# ---- memory


def test_the_loss_holds_no_matrix() -> None:
    """What autograd keeps between forward and backward, of the dense loss and of ours."""
    columns = [column.requires_grad_() for column in embeddings(512, 1, width=8)]
    kept = []
    # By default ours keeps logits as far as they fit 256 MiB.
    for module, options in ((originals, {}), (drop_ins, {"memory_budget": "300K"})):
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module.MultipleNegativesRankingLoss(None, **DIRECTIONS["all"], **options)
            loss.compute_loss_from_embeddings(columns, None)
        kept.append(max(sizes.values()))
    assert kept[0] >= 512 * 512
    assert kept[1] <= 512 * 3 * 8 * 2


# ---- refusals


@pytest.mark.parametrize("name", [PLAIN, CACHED])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardness_mode": "hard_negatives", "hardness_strength": 5.0}, ValueError, "hardness_mode must be None"),
        ({"mask_duplicates": "both"}, ValueError, "mask_duplicates must be False, True, 'anchor' or 'positive', got"),
        ({"similarity_fct": util.euclidean_sim}, ValueError, "similarity_fct must be .* got euclidean_sim"),
        ({"directions": ("query_to_doc", "doc_to_doc")}, ValueError, "directions must have 'doc_to_query'"),
        ({"directions": ()}, ValueError, "At least one direction"),
        ({"scale": 0.0}, ValueError, "positive"),
        ({"temperature": 0.05}, TypeError, "options must be among .* got temperature. Pass scale=1 / temperature"),
        ({"group": None}, TypeError, "options must be among memory_budget, .*, got group"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        getattr(drop_ins, name)(minilm(), **options)
    if refused.traceback[-1].path.name != "multiple_negatives_ranking.py":  # the originals' own errors have no name
        assert str(refused.value).startswith(f"{name}: ")


def test_errors_of_a_step_have_the_name_of_the_class() -> None:
    for name in (PLAIN, CACHED):
        with pytest.raises(ValueError, match=f"^{name}: embeddings must be those of anchors and positives at least"):
            getattr(drop_ins, name)(minilm()).compute_loss_from_embeddings(embeddings(4, 0)[:1])


def test_a_loss_that_has_no_drop_in_is_named() -> None:
    told = f"has no GISTEmbedLoss, only {CACHED}, {PLAIN}, NegativeListsCollator. Import GISTEmbedLoss from sentence_tr"
    with pytest.raises(AttributeError, match=told):
        drop_ins.GISTEmbedLoss  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchLoss'"):
        drop_ins.NoSuchLoss  # noqa: B018


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'megabatch\[sentence_transformers\]'"):
        importlib.reload(drop_ins)


def test_a_package_that_is_installed_but_broken_is_not_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers raises it where torchvision does not fit torch: without a name."""
    broken = types.ModuleType("sentence_transformers")
    broken.__getattr__ = raise_(ModuleNotFoundError("Could not import module 'PreTrainedModel'."))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "sentence_transformers", broken)
    with pytest.raises(ImportError, match=r"got ModuleNotFoundError: Could not .* Repair the package that fails, for"):
        importlib.reload(drop_ins)


def raise_(error: Exception) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def test_masking_needs_texts() -> None:
    loss = drop_ins.MultipleNegativesRankingLoss(None, mask_duplicates=True)
    with pytest.raises(ValueError, match="mask_duplicates must have texts to compare, got embeddings alone"):
        loss.compute_loss_from_embeddings(embeddings(4, 0))
    with (
        pytest.raises(ValueError, match=r"padded tokens .* got a column of pixel_values"),
        loss.knowing_the_texts_of([{"pixel_values": torch.zeros(2, 3)}] * 2),
    ):
        loss.compute_loss_from_embeddings(embeddings(2, 0))


def test_documents_among_themselves_must_have_owners() -> None:
    query, doc, extra = embeddings(6, 1)
    loss = drop_ins.MultipleNegativesRankingLoss(None, **DIRECTIONS["all"])
    with pytest.raises(ValueError, match=r"one row per anchor with 'doc_to_doc'.* got \[4\] for 6"):
        loss.compute_loss_from_embeddings([query, doc, extra[:4]])
    loss = drop_ins.MultipleNegativesRankingLoss(None, mask_duplicates=True, **DIRECTIONS["all"])
    with pytest.raises(ValueError, match="mask_duplicates must be False with 'doc_to_doc' and hard negatives"):
        loss.compute_loss_from_embeddings([query, doc, extra])


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_mini_batches_must_have_rows(size: Any) -> None:
    with pytest.raises(ValueError, match="mini_batch_size must be a whole number, 1 or more, got"):
        drop_ins.CachedMultipleNegativesRankingLoss(minilm(), mini_batch_size=size)


def test_anchors_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="embeddings must be those of anchors and positives at least, got 1"):
        drop_ins.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(embeddings(4, 0)[:1])


def test_options_reach_the_loss() -> None:
    loss = drop_ins.MultipleNegativesRankingLoss(None, memory_budget="none at all")
    with pytest.raises(ValueError, match="memory_budget"):
        loss.compute_loss_from_embeddings(embeddings(4, 0))
    assert drop_ins.CachedMultipleNegativesRankingLoss(minilm(), tile=64).get_config_dict()["tile"] == 64
