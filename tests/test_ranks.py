"""One global batch over real ranks: what runs of it so far."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import normalize

import megabatch
from megabatch import reference

NUM_ROWS, WIDTH = 11, 6


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    image, text = torch.randn(2, 2 * NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()
    return normalize(image, dim=1) * 1.5, normalize(text, dim=1) * 0.7


def step(loss: Any, rows: slice, **options: Any) -> dict[str, torch.Tensor]:
    image, text = (features[rows].clone().requires_grad_() for features in batch())
    scale = torch.tensor([5.0], dtype=torch.float64, requires_grad=True)
    value = loss(image, text, scale, **{"normalize": False, **options})
    (3 * value).backward()
    return {"value": value.detach(), "image": image.grad, "text": text.grad, "scale": scale.grad}


def _worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        rows = slice(rank * NUM_ROWS, (rank + 1) * NUM_ROWS)
        results = {}
        for name, loss in {
            "eager": megabatch.clip_loss,
            "compiled": torch.compile(megabatch.clip_loss, fullgraph=True, backend="aot_eager"),
        }.items():
            for tile in (None, 4):
                for normalized in (False, True):
                    options = {"tile": tile, "normalize": normalized}
                    results[name, tile, normalized] = step(loss, rows, group=dist.group.WORLD, **options)
        messages = []
        refused = [
            lambda: step(megabatch.clip_loss, rows),
            lambda: step(megabatch.clip_loss, slice(0, 4 + rank), group=dist.group.WORLD),
            lambda: step(megabatch.siglip_loss, rows, group=dist.group.WORLD),
            lambda: megabatch.retrieval_ranks(*batch(), group=dist.group.WORLD),
        ]
        for call in refused:
            with pytest.raises(ValueError) as caught:
                call()
            messages.append(str(caught.value))
        alone = step(megabatch.clip_loss, rows, group=None)
        torch.save((results, messages, alone), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_worker, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_equal_one_process(two_ranks: list[Any]) -> None:
    (first, _, _), (second, _, _) = two_ranks
    for way in first:
        expected = step(reference.clip_loss, slice(None), normalize=way[-1])
        for name in ("image", "text"):
            averaged = torch.cat([first[way][name], second[way][name]]) / 2
            torch.testing.assert_close(averaged, expected[name], msg=lambda m, way=way, name=name: f"{way} {name}: {m}")
        for name in ("value", "scale"):
            torch.testing.assert_close(first[way][name], expected[name])
            assert torch.equal(first[way][name], second[way][name])


def test_without_a_group_every_rank_is_alone(two_ranks: list[Any]) -> None:
    for rank, (_, _, alone) in enumerate(two_ranks):
        expected = step(reference.clip_loss, slice(rank * NUM_ROWS, (rank + 1) * NUM_ROWS), group=None)
        for name, value in alone.items():
            torch.testing.assert_close(value, expected[name])


def test_what_several_ranks_cannot_do_is_refused_on_all_of_them(two_ranks: list[Any]) -> None:
    for _, messages, _ in two_ranks:
        left_out, uneven, siglip, ranks = messages
        assert "clip_loss: group must be given, because torch.distributed runs with 2 ranks" in left_out
        assert "group=torch.distributed.group.WORLD" in left_out
        assert "group=None" in left_out
        assert "clip_loss: every rank of the group must bring the same rows, got [4, 5]" in uneven
        assert siglip.startswith("siglip_loss: group must be None in this version")
        assert ranks.startswith("retrieval_ranks: group must be None in this version")
