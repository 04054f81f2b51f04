"""`chunked` on real ranks: DistributedDataParallel in every spelling, `fully_shard`, and the complete step.

Against one process that has the whole batch, in float64.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from megabatch import callers, reference

from .ranks import Pool

NUM_STEPS = 3  # DistributedDataParallel makes its buckets anew before the second
CHUNK = 2
SIZES = {2: (3, 8), 3: (5, 0, 6), 4: (4, 9, 0, 2)}  # rows of each rank: never as many chunks
PADDED = (2, 7, 0)  # one rank that runs beyond its own chunks has rows to do so with
CLOSE = {"rtol": 1e-10, "atol": 1e-10}

Parameters = dict[str, Tensor]
Step = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Any]]


# ---- towers


class Block(nn.Module):
    """A layer that counts its forwards, and may drop."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + self.dropout(nn.functional.gelu(self.layer(x)))


class Tower(nn.Sequential):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(width, 8), Block(8, dropout), Block(8, dropout), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(x), dim=1)


class TwoTowers(nn.Module):
    """As CLIP models are: two methods, and a forward that gives all there is, the scale too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image, self.text = Tower(6, dropout), Tower(4, dropout)
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        seeded(self)

    def encode_image(self, images: Tensor) -> Tensor:
        return self.image(images)

    def encode_text(self, texts: Tensor) -> Tensor:
        return self.text(texts)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.log_scale.exp()


class SharedTower(nn.Module):
    """One tower for both sides, which come padded to one width."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(6)
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        seeded(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x), self.log_scale.exp()


class ChunksItself(TwoTowers):
    """A model whose own forward calls us."""

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = mb.chunked(self.encode_image, images, chunk_size=CHUNK)
        return image, mb.chunked(self.text, texts, chunk_size=CHUNK + 1), self.log_scale.exp()


def seeded(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    model.double()
    for name, parameter in model.named_parameters():
        if name != "log_scale":
            nn.init.normal_(parameter, std=0.4, generator=generator)


# ---- training


class Training(NamedTuple):
    """Per step: the loss and the gradients; the parameters after the last."""

    losses: list[float]
    gradients: list[Parameters]
    parameters: Parameters


def batches(num_rows: int, steps: int = NUM_STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield (
            torch.randn(num_rows, 6, generator=generator, dtype=torch.float64),
            torch.randn(num_rows, 4, generator=generator, dtype=torch.float64),
        )


def rows_of(sizes: Sequence[int], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def gradients_of(model: nn.Module) -> Parameters:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def train(
    plain: nn.Module,
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Any]],
    loss_of: Callable[..., Tensor],
    rows: slice,
    num_rows: int,
    after_step: Callable[[], None] = lambda: None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Training:
    optimizer = make_optimizer(plain.parameters())
    losses, gradients = [], []
    for images, texts in batches(num_rows):
        optimizer.zero_grad()
        loss = loss_of(*step(images[rows], texts[rows]))
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(plain))
        optimizer.step()
        after_step()
    return Training(losses, gradients, {name: whole(p) for name, p in plain.named_parameters()})


@functools.cache
def one_process(kind: type[nn.Module], num_rows: int, optimizer: Any = sgd) -> Training:
    model = kind()

    def step(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(model, SharedTower):
            return model(images)[0], *model(padded(texts))
        return model(images, texts)

    return train(model, step, reference.clip_loss, slice(None), num_rows, make_optimizer=optimizer)


def padded(texts: Tensor) -> Tensor:
    return nn.functional.pad(texts, (1, 1))


def assert_same(ours: Training, expected: Training, **tolerance: float) -> None:
    close = tolerance or CLOSE
    torch.testing.assert_close(ours.losses, expected.losses, **close)
    for step, (found, wanted) in enumerate(zip(ours.gradients, expected.gradients, strict=True)):
        assert_same_parameters(found, wanted, f"step {step}, gradient of", close)
    assert_same_parameters(ours.parameters, expected.parameters, "trained", close)


def assert_same_parameters(found: Parameters, wanted: Parameters, words: str, close: dict[str, float] = CLOSE) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], **close, msg=lambda m, name=name: f"{words} {name}: {m}")


# ---- DistributedDataParallel


class Reductions:
    """A hook that reduces as DistributedDataParallel does, and keeps books."""

    def __init__(self, ddp: DistributedDataParallel, group: Any) -> None:
        self._buckets: list[tuple[int, int]] = []
        self.steps: list[list[tuple[int, int]]] = []
        self._num_elements = sum(p.numel() for p in ddp.module.parameters() if p.requires_grad)
        self._group = group
        ddp.register_comm_hook(self, Reductions.reduce)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._buckets.append((bucket.index(), bucket.buffer().numel()))
        return default_hooks.allreduce_hook(self._group, bucket)

    def end_step(self) -> None:
        self.steps.append(self._buckets)
        self._buckets = []

    def faults(self) -> list[str]:
        """Steps in which not every bucket, and every element of every gradient, was reduced exactly once."""
        found = []
        for step, buckets in enumerate(self.steps):
            indices, sizes = [index for index, _ in buckets], [size for _, size in buckets]
            if sorted(indices) != list(range(len(indices))) or sum(sizes) != self._num_elements:
                found.append(f"step {step}: {self._num_elements} elements, reduced (bucket, elements) {buckets}")
        return found


def by_the_wrapper(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    return mb.chunked(ddp, images, texts, chunk_size=CHUNK)


def by_its_forward(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    return mb.chunked(ddp.forward, images, texts, chunk_size=CHUNK)


def by_methods(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    """The numbers of chunks differ between towers, too."""
    image = mb.chunked(ddp.module.encode_image, images, chunk_size=CHUNK, module=ddp)
    text = mb.chunked(ddp.module.encode_text, texts, chunk_size=CHUNK + 1, module=ddp)
    return image, text, ddp.module.log_scale.exp()


def by_methods_alone(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    """The scale too comes from a chunked call, as where unused parameters are looked for it must."""
    model = ddp.module
    image = mb.chunked(model.encode_image, images, chunk_size=CHUNK, module=ddp)
    text, scale = mb.chunked(
        lambda x: (model.encode_text(x), model.log_scale.exp()), texts, chunk_size=CHUNK + 1, module=ddp
    )
    return image, text, scale


def by_submodules(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(ddp.module.image, images, chunk_size=CHUNK, module=ddp)
    return image, mb.chunked(ddp.module.text, texts, chunk_size=100, module=ddp), ddp.module.log_scale.exp()


class Holder:
    """What a trainer keeps a model in: nobody who looks at a function sees it."""

    def __init__(self, model: Any) -> None:
        self.model = model


def by_a_holder(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    holder = Holder(Holder(ddp.module))
    image = mb.chunked(lambda x: holder.model.model.encode_image(x), images, chunk_size=CHUNK, module=ddp)  # noqa: PLW0108
    both = mb.chunked(lambda x, y: holder.model.model(x, y)[1:], images, texts, chunk_size=CHUNK, module=ddp)
    return image, *both


def by_one_tower_plain(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    return ddp.module.encode_image(images), *mb.chunked(ddp, images, texts, chunk_size=CHUNK, select=[1, 2])


def by_its_own_forward(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    return ddp(images, texts)


def with_one_tower(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(ddp, images, chunk_size=CHUNK, select=0)
    text, scale = mb.chunked(ddp, padded(texts), chunk_size=CHUNK + 1)
    return image, text, scale


def with_one_tower_first_plain(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    image, scale = ddp(images)
    return image, mb.chunked(ddp, padded(texts), chunk_size=CHUNK)[0], scale


def with_one_tower_then_plain(ddp: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(ddp, images, chunk_size=CHUNK, select=0)
    return image, *ddp(padded(texts))


def under_ddp(
    rank: int,
    group: Any,
    kind: type[nn.Module],
    step: Step,
    sizes: Sequence[int],
    options: dict[str, Any],
    loss_options: dict[str, Any] | None = None,
    optimizer: Any = sgd,
) -> tuple[Training, list[str], list[int]]:
    plain = kind()
    ddp = DistributedDataParallel(plain, process_group=group, **options)
    reductions = Reductions(ddp, group)

    def loss_of(image: Tensor, text: Tensor, scale: Any) -> Tensor:
        return mb.clip_loss(image, text, scale, group=group, **(loss_options or {}))

    training = train(
        plain,
        lambda images, texts: step(ddp, images, texts),
        loss_of,
        rows_of(sizes, rank),
        sum(sizes),
        reductions.end_step,
        optimizer,
    )
    return training, reductions.faults(), [len(buckets) for buckets in reductions.steps]


def assert_trains_as_one_process(
    pool: Pool, kind: type[nn.Module], step: Step, sizes: Sequence[int], **options: Any
) -> None:
    expected = one_process(TwoTowers if issubclass(kind, TwoTowers) else kind, sum(sizes))
    for training, faults, _ in pool.run(len(sizes), under_ddp, kind, step, sizes, options):
        assert_same(training, expected)
        assert not faults


SPELLINGS = {
    "a model that chunks itself": (ChunksItself, by_its_own_forward),
    "the wrapper": (TwoTowers, by_the_wrapper),
    "its forward": (TwoTowers, by_its_forward),
    "methods of its module": (TwoTowers, by_methods),
    "methods, and the scale from one": (TwoTowers, by_methods_alone),
    "submodules": (TwoTowers, by_submodules),
    "an object that holds its module": (TwoTowers, by_a_holder),
    "one method plain": (TwoTowers, by_one_tower_plain),
    "one tower for both": (SharedTower, with_one_tower),
    "one tower, first plain": (SharedTower, with_one_tower_first_plain),
    "one tower, then plain": (SharedTower, with_one_tower_then_plain),
}
ON_FOUR = ("the wrapper", "methods of its module", "one tower for both")  # also, because four take their time
NAMED = ("methods of its module", "methods, and the scale from one", "submodules", "an object that holds its module")


REFUSED: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "a method": lambda ddp, holder: ddp.module.encode_image,
    "a submodule": lambda ddp, holder: ddp.module.image,
    "a lambda of a method": lambda ddp, holder: (lambda model: lambda x: model.encode_image(x) + 0)(ddp.module),
    "a lambda of the wrapper": lambda ddp, holder: lambda x: ddp(x, x[:, :4])[0],
    "an object that holds the wrapper": lambda ddp, holder: lambda x: holder.model.model(x, x[:, :4])[0],
    "an object that holds its module": lambda ddp, holder: lambda x: holder.model.model.module.encode_image(x),  # noqa: PLW0108
}


def outside(rank: int, group: Any, spelling: str, rows: int) -> list[str]:
    """Twice, because the first step of DistributedDataParallel is special."""
    ddp = DistributedDataParallel(TwoTowers(), process_group=group)
    encoder = REFUSED[spelling](ddp, Holder(Holder(ddp)))
    texts = []
    for images, pairs in batches(rows, steps=2):
        with pytest.raises(ValueError) as caught:
            mb.chunked(encoder, images, chunk_size=CHUNK)
        texts.append(str(caught.value))
        mb.clip_loss(*ddp(images, pairs), group=group).backward()
    return texts


@pytest.mark.parametrize("rows", [6, 1], ids=["chunks", "a single row"])
@pytest.mark.parametrize("spelling", REFUSED)
def test_what_would_not_be_reduced_or_once_per_chunk_is_refused_with_the_line_to_write(
    pool: Pool, spelling: str, rows: int
) -> None:
    for texts in pool.run(2, outside, spelling, rows):
        assert all("module=ddp" in text for text in texts)
        if spelling == "a method":
            assert "chunked(ddp.module.encode_image, ..., module=ddp)" in texts[0]


def beside_no_wrapper(rank: int, group: Any) -> Tensor:
    """Ranks without a wrapper: whoever reduces gradients says so by module=model."""
    model, (images, texts) = SharedTower(), next(batches(6))
    with pytest.raises(ValueError, match="If you reduce gradients yourself, write module=model"):
        mb.chunked(model, images, chunk_size=CHUNK)
    one = mb.chunked(model, images, chunk_size=CHUNK, select=0, module=model)
    two, scale = mb.chunked(model, padded(texts), chunk_size=CHUNK, module=model)
    reference.clip_loss(one, two, scale).backward()
    return model.tower[0].weight.grad


def test_ranks_without_a_wrapper_say_so(pool: Pool) -> None:
    model, (images, texts) = SharedTower(), next(batches(6))
    one, (two, scale) = model(images)[0], model(padded(texts))
    reference.clip_loss(one, two, scale).backward()
    for gradient in pool.run(2, beside_no_wrapper):
        torch.testing.assert_close(gradient, model.tower[0].weight.grad, **CLOSE)


@pytest.mark.parametrize(
    ("spelling", "ranks"),
    [(spelling, ranks) for spelling in SPELLINGS for ranks in SIZES if ranks < 4 or spelling in ON_FOUR],
)
def test_every_spelling_under_ddp_trains_as_one_process_with_one_reduction_per_step(
    pool: Pool, spelling: str, ranks: int
) -> None:
    """Gradients of every step; different numbers of chunks, and a rank without rows."""
    assert_trains_as_one_process(pool, *SPELLINGS[spelling], SIZES[ranks])


# Where unused parameters are looked for, none may be used outside of what the wrapper has seen: nor in torch alone.
@pytest.mark.parametrize("spelling", [each for each in SPELLINGS if each not in (*NAMED, "one method plain")])
def test_every_other_spelling_works_where_ddp_looks_for_unused_parameters(pool: Pool, spelling: str) -> None:
    assert_trains_as_one_process(pool, *SPELLINGS[spelling], SIZES[3], find_unused_parameters=True)


def looking_for_unused(rank: int, group: Any, spelling: str) -> str:
    kind, step = SPELLINGS[spelling]
    ddp = DistributedDataParallel(kind(), process_group=group, find_unused_parameters=True)
    with pytest.raises(ValueError) as caught:
        step(ddp, *next(batches(6)))
    return str(caught.value)


@pytest.mark.parametrize("spelling", NAMED)
def test_a_named_wrapper_that_looks_for_unused_parameters_is_refused_by_name(pool: Pool, spelling: str) -> None:
    for text in pool.run(2, looking_for_unused, spelling):
        assert "module=ddp must not be a DistributedDataParallel with find_unused_parameters=True" in text


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_works_with_a_static_graph(pool: Pool, spelling: str) -> None:
    assert_trains_as_one_process(pool, *SPELLINGS[spelling], SIZES[3], static_graph=True)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_works_where_gradients_are_views_of_buckets(pool: Pool, spelling: str) -> None:
    assert_trains_as_one_process(pool, *SPELLINGS[spelling], SIZES[3], gradient_as_bucket_view=True)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_bucket_is_reduced_once_per_step(pool: Pool, spelling: str) -> None:
    """Buckets of a few parameters, which DistributedDataParallel makes after the first step."""
    kind, step = SPELLINGS[spelling]
    options = {"bucket_cap_mb": 32 * 8 / 2**20}
    for _, faults, buckets in pool.run(2, under_ddp, kind, step, SIZES[2], options):
        assert not faults
        assert buckets[1] > 1, "there must be several, or this proves nothing"


class Ordered:
    """Writes down in which order chunks run, gradients arrive, and buckets are reduced."""

    def __init__(self, ddp: DistributedDataParallel, group: Any, tower: nn.Module) -> None:
        self.events: list[str] = []
        self._group = group
        ddp.register_comm_hook(self, Ordered.reduce)
        tower.register_forward_hook(lambda *_: self.events.append("chunk"))
        for parameter in tower.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.events.append("gradient"))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.events.append("reduce")
        return default_hooks.allreduce_hook(self._group, bucket)


class OneTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(6)
        seeded(self)

    def forward(self, x: Tensor) -> Tensor:
        return mb.chunked(self.tower, x, chunk_size=CHUNK)


def order_of_a_step(rank: int, group: Any, options: dict[str, Any]) -> list[str]:
    model = OneTower()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=32 * 8 / 2**20, **options)
    book = Ordered(ddp, group, model.tower)
    for images, _ in batches(sum(SIZES[3])):
        book.events.clear()
        ddp(images[rows_of(SIZES[3], rank)]).square().sum().backward()
    return book.events


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_buckets_are_reduced_one_by_one_while_the_last_chunk_runs_backwards(pool: Pool, option: str) -> None:
    options = {option: True} if option else {}
    for rows, events in zip(SIZES[3], pool.run(3, order_of_a_step, options), strict=True):
        chunks = chunks_of(rows, CHUNK)
        assert events[: 2 * chunks] == ["chunk"] * 2 * chunks  # all of them, before any gradient arrives
        rest = events[2 * chunks :]
        assert rest.count("gradient") == 8
        assert rest.count("reduce") > 2
        assert rest.index("reduce") < 4, "the first bucket waits for layers that are none of its own"


def mixed_precision(rank: int, group: Any) -> str:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(TwoTowers().float(), process_group=group)
    ddp.mixed_precision = precision  # its own set-up wants a GPU
    with pytest.raises(ValueError) as caught:
        mb.chunked(ddp, *(x.float() for x in next(batches(6))), chunk_size=CHUNK)
    return str(caught.value)


def test_ddps_own_mixed_precision_is_refused_by_name(pool: Pool) -> None:
    for text in pool.run(2, mixed_precision):
        assert text.startswith("chunked: DistributedDataParallel must have no mixed_precision")


def naive_loop(ddp: Any, images: Tensor, texts: Tensor) -> None:
    """What gradient caching does where nobody cares: a backward of the wrapper for every chunk."""
    for image, text in zip(images.split(CHUNK), texts.split(CHUNK), strict=True):
        first, second, scale = ddp(image, text)
        mb.clip_loss(first, second, scale, group=None).backward()


def count_of_a_naive_loop(rank: int, group: Any) -> tuple[list[str], list[int]]:
    ddp = DistributedDataParallel(TwoTowers(), process_group=group)
    reductions = Reductions(ddp, group)
    naive_loop(ddp, *next(batches(3 * CHUNK)))
    reductions.end_step()
    return reductions.faults(), [len(buckets) for buckets in reductions.steps]


def test_the_books_show_a_naive_loop_to_reduce_once_per_chunk(pool: Pool) -> None:
    for faults, buckets in pool.run(2, count_of_a_naive_loop):
        assert faults
        assert buckets == [3]


def unwrapped(rank: int, group: Any) -> Training:
    plain = TwoTowers()
    return train(
        plain,
        lambda images, texts: mb.chunked(plain, images, texts, chunk_size=CHUNK, module=plain),
        lambda *outputs: mb.clip_loss(*outputs, group=group),
        rows_of(SIZES[2], rank),
        sum(SIZES[2]),
    )


def test_gradients_are_reduced_by_ddp_alone(pool: Pool) -> None:
    """Without it they differ between ranks, so the tests above do see a reduction."""
    first, second = pool.run(2, unwrapped)
    assert not torch.allclose(first.gradients[0]["log_scale"], second.gradients[0]["log_scale"], rtol=1e-3) or any(
        not torch.allclose(value, second.gradients[0][name], rtol=1e-3) for name, value in first.gradients[0].items()
    )


def as_on_a_gpu(rank: int, group: Any, spelling: str) -> tuple[Training, list[str]]:
    """With device_ids, as GPUs are given: the wrapper moves what it takes to that device."""
    kind, step = SPELLINGS[spelling]
    plain = kind()
    ddp = DistributedDataParallel(plain, process_group=group)
    ddp.device_ids = [0]  # of its device_type, which is cpu
    reductions = Reductions(ddp, group)
    training = train(
        plain,
        lambda images, texts: step(ddp, images, texts),
        lambda *outputs: mb.clip_loss(*outputs, group=group),
        rows_of(SIZES[2], rank),
        sum(SIZES[2]),
        reductions.end_step,
    )
    return training, reductions.faults()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_works_where_ddp_has_a_device_of_its_own(pool: Pool, spelling: str) -> None:
    kind = SPELLINGS[spelling][0]
    expected = one_process(TwoTowers if issubclass(kind, TwoTowers) else kind, sum(SIZES[2]))
    for training, faults in pool.run(2, as_on_a_gpu, spelling):
        assert_same(training, expected)
        assert not faults


def two_wrappers(rank: int, group: Any, sizes: Sequence[int], options: dict[str, Any]) -> tuple[Training, list[str]]:
    plain = TwoTowers()
    image, text = (DistributedDataParallel(t, process_group=group, **options) for t in (plain.image, plain.text))
    books = [Reductions(image, group), Reductions(text, group)]

    def step(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = mb.chunked(image, images, chunk_size=CHUNK)
        return first, mb.chunked(text, texts, chunk_size=CHUNK + 1), plain.log_scale.exp()

    def loss_of(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        # Outside of both wrappers: the gradient of the scale is the same on all ranks, and nobody averages it.
        return mb.clip_loss(image, text, scale, group=group)

    training = train(
        plain, step, loss_of, rows_of(sizes, rank), sum(sizes), lambda: [b.end_step() for b in books] and None
    )
    return training, [fault for book in books for fault in book.faults()]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("ranks", SIZES)
def test_two_wrapped_towers_train_as_one_process(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    expected = one_process(TwoTowers, sum(SIZES[ranks]))
    for training, faults in pool.run(ranks, two_wrappers, SIZES[ranks], options):
        assert_same(training, expected)
        assert not faults


def with_a_loss_module(rank: int, group: Any, sizes: Sequence[int]) -> tuple[list[float], Parameters, Tensor]:
    plain = TwoTowers()
    plain.log_scale.requires_grad_(False)
    ddp = DistributedDataParallel(plain, process_group=group)
    criterion = mb.ClipLoss(init_logit_scale=torch.tensor(1.5).exp().item(), group=group, normalize=False)
    optimizer = torch.optim.SGD([*ddp.parameters(), *criterion.parameters()], lr=0.3)
    losses = []
    for images, texts in batches(sum(sizes)):
        optimizer.zero_grad()
        rows = rows_of(sizes, rank)
        image = mb.chunked(ddp.module.encode_image, images[rows], chunk_size=CHUNK, module=ddp)
        text = mb.chunked(ddp.module.encode_text, texts[rows], chunk_size=CHUNK, module=ddp)
        loss = criterion(image, text)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    towers = {name: whole(p) for name, p in plain.named_parameters() if name != "log_scale"}
    return losses, towers, criterion.logit_scale.detach().double()


def test_a_scale_of_the_loss_module_trains_beside_ddp(pool: Pool) -> None:
    expected = one_process(TwoTowers, sum(SIZES[4]))
    towers = {name: value for name, value in expected.parameters.items() if name != "log_scale"}
    for losses, parameters, log_scale in pool.run(4, with_a_loss_module, SIZES[4]):
        # The module keeps its scale in float32.
        torch.testing.assert_close(losses, expected.losses, rtol=1e-6, atol=1e-6)
        assert_same_parameters(parameters, towers, "trained", {"rtol": 1e-6, "atol": 1e-6})
        torch.testing.assert_close(log_scale.reshape(1), expected.parameters["log_scale"], rtol=1e-6, atol=1e-6)


def in_two_parts(rank: int, group: Any, spelling: str, sizes: Sequence[int]) -> tuple[Parameters, list[int]]:
    kind, step = SPELLINGS[spelling]
    plain = kind()
    ddp = DistributedDataParallel(plain, process_group=group)
    reductions = Reductions(ddp, group)
    for index, (images, texts) in enumerate(batches(sum(sizes))):
        rows = rows_of(sizes, rank)
        with ddp.no_sync() if index < NUM_STEPS - 1 else nullcontext():
            mb.clip_loss(*step(ddp, images[rows], texts[rows]), group=group).backward()
        reductions.end_step()
    return gradients_of(plain), [len(buckets) for buckets in reductions.steps]


@pytest.mark.parametrize("spelling", ["the wrapper", "methods of its module", "a model that chunks itself"])
def test_no_sync_adds_up_on_each_rank_and_the_next_step_reduces_the_sum(pool: Pool, spelling: str) -> None:
    plain = TwoTowers()
    for images, texts in batches(sum(SIZES[3])):
        reference.clip_loss(*plain(images, texts)).backward()
    for gradients, buckets in pool.run(3, in_two_parts, spelling, SIZES[3]):
        assert_same_parameters(gradients, gradients_of(plain), "gradient of")
        assert buckets == [0, 0, 1]


def calls_in_turn(rank: int, group: Any) -> tuple[list[Parameters], list[str]]:
    """A forward whose result is dropped, one in evaluation, and one whose backward comes late."""
    plain = TwoTowers()
    ddp = DistributedDataParallel(plain, process_group=group)
    reductions = Reductions(ddp, group)
    found = []
    for images, texts in batches(sum(SIZES[2])):
        ddp.zero_grad()
        images, texts = images[rows_of(SIZES[2], rank)], texts[rows_of(SIZES[2], rank)]
        mb.chunked(ddp.module.encode_image, images, chunk_size=CHUNK, module=ddp)
        with torch.no_grad():
            assert not mb.chunked(ddp, images, texts, chunk_size=CHUNK)[0].requires_grad
        mb.clip_loss(*by_methods_alone(ddp, images, texts), group=group).backward()
        reductions.end_step()
        found.append(gradients_of(plain))
    return found, reductions.faults()


def test_forwards_without_a_backward_leave_no_trace_under_ddp(pool: Pool) -> None:
    plain, expected = TwoTowers(), []
    for images, texts in batches(sum(SIZES[2])):
        plain.zero_grad()
        reference.clip_loss(*plain(images, texts)).backward()
        expected.append(gradients_of(plain))
    for found, faults in pool.run(2, calls_in_turn):
        for step, gradients in enumerate(found):
            assert_same_parameters(gradients, expected[step], f"step {step}, gradient of")
        assert not faults


class ChunksImages(TwoTowers):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return mb.chunked(self.encode_image, images, chunk_size=CHUNK)


def only_images(rank: int, group: Any) -> tuple[Parameters, list[str]]:
    plain = ChunksImages()
    ddp = DistributedDataParallel(plain, process_group=group, find_unused_parameters=True)
    reductions = Reductions(ddp, group)
    for images, _ in batches(sum(SIZES[2])):
        ddp.zero_grad()
        ddp(images[rows_of(SIZES[2], rank)]).square().sum().backward()
        reductions.end_step()
    return gradients_of(plain), reductions.faults()


def test_a_tower_that_is_not_used_is_not_waited_for(pool: Pool) -> None:
    """As without chunks: where unused parameters are looked for, a step of one tower trains that tower alone."""
    plain = TwoTowers()
    *_, (images, _) = batches(sum(SIZES[2]))
    (plain.encode_image(images).square().sum() / 2).backward()
    for gradients, faults in pool.run(2, only_images):
        assert_same_parameters(gradients, gradients_of(plain), "gradient of")
        assert not faults


def with_a_frozen_tower(rank: int, group: Any) -> tuple[Training, list[str], int, int]:
    plain = TwoTowers()
    plain.image.requires_grad_(False)
    ddp = DistributedDataParallel(plain, process_group=group)
    reductions = Reductions(ddp, group)
    training = train(
        plain,
        lambda images, texts: by_methods(ddp, images, texts),
        lambda *outputs: mb.clip_loss(*outputs, group=group),
        rows_of(SIZES[3], rank),
        sum(SIZES[3]),
        reductions.end_step,
    )
    return training, reductions.faults(), plain.image[1].forwards, plain.text[1].forwards


def test_a_frozen_tower_inside_ddp_costs_one_forward_and_no_gradient(pool: Pool) -> None:
    plain = TwoTowers()
    plain.image.requires_grad_(False)
    expected = train(plain, plain, reference.clip_loss, slice(None), sum(SIZES[3]))
    for rank, (training, faults, image, text) in enumerate(pool.run(3, with_a_frozen_tower)):
        assert_same(training, expected)
        assert not faults
        assert image == NUM_STEPS * chunks_of(SIZES[3][rank], CHUNK)
        assert text == NUM_STEPS * 2 * chunks_of(SIZES[3][rank], CHUNK + 1)


def chunks_of(rows: int, chunk_size: int) -> int:
    return max(-(-rows // chunk_size), 1)


def manual_loop(model: TwoTowers, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every chunk with its graph, in the order of chunked calls. One that is empty where there are no rows."""
    image = torch.cat([model.encode_image(chunk) for chunk in images.split(CHUNK)])
    return image, torch.cat([model.encode_text(chunk) for chunk in texts.split(CHUNK + 1)]), model.log_scale.exp()


def averaged(plain: nn.Module, group: Any) -> Parameters:
    gradients = gradients_of(plain)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return gradients


def dropped_under_ddp(rank: int, group: Any) -> list[tuple[Parameters, Parameters, Tensor, Tensor]]:
    plain, twin = TwoTowers(dropout=0.4), TwoTowers(dropout=0.4)
    ddp = DistributedDataParallel(plain, process_group=group)
    answers = []
    for images, texts in batches(sum(SIZES[3])):
        rows = rows_of(SIZES[3], rank)
        next_numbers = []
        for model, step in ((plain, lambda *x: by_methods(ddp, *x)), (twin, lambda *x: manual_loop(twin, *x))):
            torch.manual_seed(100 + rank)
            model.zero_grad()
            mb.clip_loss(*step(images[rows], texts[rows]), group=group).backward()
            next_numbers.append(torch.rand(3))
        answers.append((gradients_of(plain), averaged(twin, group), *next_numbers))
    return answers


def test_dropout_under_ddp_equals_a_loop_over_chunks_with_graphs(pool: Pool) -> None:
    """Every rank has a seed of its own, and goes on from where its own chunks leave it."""
    answers = pool.run(3, dropped_under_ddp)
    for steps in answers:
        for ours, manual, our_next, manual_next in steps:
            assert_same_parameters(ours, manual, "gradient of", {"rtol": 1e-12, "atol": 1e-14})
            assert torch.equal(our_next, manual_next)
    assert not torch.equal(answers[0][0][2], answers[1][0][2])


# ---- buffers


class Centred(nn.Module):
    """A tower with BatchNorm, and a buffer that takes part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.register_buffer("centre", torch.ones(6))
        seeded(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.layer(x - self.centre))))


def with_buffers_apart(rank: int, group: Any, spelling: str) -> tuple[list[Parameters], Parameters]:
    plain = Centred()
    plain.norm.eval()
    ddp = DistributedDataParallel(plain, process_group=group)
    plain.centre.fill_(1.0 + rank)
    plain.norm.running_mean.fill_(0.3 * rank)
    found = []
    for images, _ in batches(sum(SIZES[3])):
        ddp.zero_grad()
        images = images[rows_of(SIZES[3], rank)]
        encoded = {
            "plain": lambda images: ddp(images),  # noqa: PLW0108
            "the wrapper": lambda images: mb.chunked(ddp, images, chunk_size=CHUNK),
            "a method of its module": lambda images: mb.chunked(
                ddp.module.forward, images, chunk_size=CHUNK, module=ddp
            ),
        }[spelling](images)
        encoded.square().sum().backward()
        found.append(gradients_of(plain))
    return found, {name: buffer.clone() for name, buffer in plain.named_buffers()}


@pytest.mark.parametrize("spelling", ["the wrapper", "a method of its module"])
def test_buffers_of_the_first_rank_hold_on_all_from_before_the_forward_on(pool: Pool, spelling: str) -> None:
    """As without chunks."""
    expected = pool.run(3, with_buffers_apart, "plain")
    for (ours, buffers), (plain, plain_buffers) in zip(
        pool.run(3, with_buffers_apart, spelling), expected, strict=True
    ):
        for step, gradients in enumerate(ours):
            assert_same_parameters(gradients, plain[step], f"step {step}, gradient of")
        assert_same_parameters(buffers, plain_buffers, "buffer")


# ---- what is refused


class Checkpointed(nn.Module):
    """A tower with a reentrant checkpoint round some of it, or all."""

    def __init__(self, everything: bool) -> None:
        super().__init__()
        self.first, self.last = Tower(6), nn.Linear(5, 5)
        self.everything = everything
        seeded(self)

    def encode(self, x: Tensor) -> Tensor:
        if self.everything:
            return checkpoint(lambda x: self.last(self.first(x)), x, use_reentrant=True)
        return checkpoint(self.last, self.first(x), use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def reentrant(rank: int, group: Any, everything: bool) -> str:
    ddp = DistributedDataParallel(Checkpointed(everything), process_group=group)
    x = next(batches(8))[0].requires_grad_(everything)
    with pytest.raises(ValueError) as caught:
        mb.chunked(ddp, x, chunk_size=CHUNK)
    return str(caught.value)


@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
def test_reentrant_checkpoints_inside_ddp_are_refused_on_every_rank(pool: Pool, everything: bool) -> None:
    """They would be reduced once per chunk."""
    for text in pool.run(2, reentrant, everything):
        assert "use_reentrant=False" in text


class Averaged(torch.autograd.Function):
    """The mean of a tensor over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return Averaged.over(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Averaged.over(gradient, ctx.group), None

    @staticmethod
    def over(x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x / dist.get_world_size(group)


class SyncBatchNormOnCpu(nn.SyncBatchNorm):
    """torch's own wants a GPU. For ranks with equally many rows in a chunk."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean, square = Averaged.apply(torch.stack([x.mean(0), x.square().mean(0)]), self.process_group)
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def wrapped_on_cpu(model: nn.Module, group: Any) -> DistributedDataParallel:
    """DistributedDataParallel would refuse to have SyncBatchNorm on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
        return DistributedDataParallel(model, process_group=group)


def synchronised(group: Any) -> Centred:
    model = Centred()
    norm, model.norm = model.norm, SyncBatchNormOnCpu(8, process_group=group).double()
    model.norm.load_state_dict(norm.state_dict())
    return model


def with_sync_batch_norm(rank: int, group: Any, sizes: Sequence[int]) -> str:
    ddp = wrapped_on_cpu(synchronised(group), group)
    x = next(batches(sum(sizes)))[0][rows_of(sizes, rank)]
    with pytest.raises(ValueError) as caught:
        mb.chunked(ddp, x, chunk_size=CHUNK)
    return str(caught.value)


def test_sync_batch_norm_with_different_numbers_of_chunks_is_refused_on_every_rank(pool: Pool) -> None:
    first, *others = pool.run(3, with_sync_batch_norm, SIZES[3])
    assert others == [first] * 2
    assert "chunks under SyncBatchNorm must be the same on every rank" in first
    assert "3" in first
    assert "1" in first


def with_equal_chunks(rank: int, group: Any) -> tuple[Parameters, Parameters, list[str]]:
    """Chunked, and a loop over chunks that keep their graphs."""
    plain, twin = synchronised(group), synchronised(group)
    ddp = wrapped_on_cpu(plain, group)
    x = next(batches(12))[0][rows_of((6, 6), rank)]
    callers.warned.discard(("chunked", "batch norm"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mb.chunked(ddp, x, chunk_size=3).pow(3).sum().backward()
    torch.cat([twin(chunk) for chunk in x.split(3)]).pow(3).sum().backward()
    ours = {**gradients_of(plain), **dict(plain.named_buffers())}
    return ours, {**averaged(twin, group), **dict(twin.named_buffers())}, [str(w.message) for w in caught]


def test_sync_batch_norm_with_equally_many_chunks_works_and_warns(pool: Pool) -> None:
    for ours, manual, messages in pool.run(2, with_equal_chunks):
        assert_same_parameters(ours, manual, "gradient or buffer")
        assert len(messages) == 1
        assert "BatchNorm in training mode" in messages[0]


def in_evaluation(rank: int, group: Any) -> Tensor:
    model = synchronised(group).eval()
    x = next(batches(sum(SIZES[3])))[0][rows_of(SIZES[3], rank)]
    with torch.no_grad():
        return mb.chunked(model, x, chunk_size=CHUNK)


def test_sync_batch_norm_in_evaluation_may_have_any_number_of_chunks(pool: Pool) -> None:
    expected = Centred().eval()(next(batches(sum(SIZES[3])))[0])
    torch.testing.assert_close(torch.cat(pool.run(3, in_evaluation)), expected.detach(), **CLOSE)


# ---- fully_shard


@contextmanager
def torch_may_warn() -> Iterator[None]:
    """FSDP2 warns of its own use of torch; our warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"torch\..*")
        yield


def mesh_of(group: Any, mesh: str = "") -> DeviceMesh:
    if mesh == "2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh.from_group(group, "cpu")


def sharded(model: nn.Module, group: Any, mesh: str = "", **options: Any) -> Any:
    device_mesh = mesh_of(group, mesh)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=device_mesh, **options)
    fully_shard(model, mesh=device_mesh, **options)
    for method in ("encode_image", "encode_text"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def by_the_model(model: Any, images: Tensor, texts: Tensor) -> Any:
    return mb.chunked(model, images, texts, chunk_size=CHUNK)


def by_its_methods(model: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(model.encode_image, images, chunk_size=CHUNK)
    text = mb.chunked(model.encode_text, texts, chunk_size=CHUNK + 1)
    return image, text, mb.chunked(model, images, texts, chunk_size=100, select=2)


def by_lambdas(model: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(lambda x: model.encode_image(x), images, chunk_size=CHUNK)  # noqa: PLW0108
    return image, *mb.chunked(lambda x, y: model(x, y)[1:], images, texts, chunk_size=CHUNK)


def by_the_shared(model: Any, images: Tensor, texts: Tensor) -> Any:
    image = mb.chunked(model, images, chunk_size=CHUNK, select=0)
    return image, *mb.chunked(model, padded(texts), chunk_size=CHUNK + 1)


def by_the_first_alone(model: Any, images: Tensor, texts: Tensor) -> Any:
    """The other tower, and the scale, without chunks."""
    image = mb.chunked(model.encode_image, images, chunk_size=CHUNK)
    return image, *model(images, texts)[1:]


def by_the_last_alone(model: Any, images: Tensor, texts: Tensor) -> Any:
    image, _, scale = model(images, texts)
    return image, mb.chunked(model.encode_text, texts, chunk_size=CHUNK), scale


def by_a_named_model(model: Any, images: Tensor, texts: Tensor) -> Any:
    holder = Holder(Holder(model))
    return mb.chunked(lambda x, y: holder.model.model(x, y), images, texts, chunk_size=CHUNK, module=model)  # noqa: PLW0108


SHARDED = {
    "the model": (TwoTowers, by_the_model),
    "its methods": (TwoTowers, by_its_methods),
    "lambdas": (TwoTowers, by_lambdas),
    "one tower for both": (SharedTower, by_the_shared),
    "an object that holds the model": (TwoTowers, by_a_named_model),
    "the last tower alone": (TwoTowers, by_the_last_alone),
}


def under_fsdp(
    rank: int, group: Any, kind: type[nn.Module], step: Step, sizes: Sequence[int], mesh: str, options: dict[str, Any]
) -> Training:
    with torch_may_warn():
        model = sharded(kind(), group, mesh, **options)
        return train(
            model,
            lambda images, texts: step(model, images, texts),
            lambda *outputs: mb.clip_loss(*outputs, group=group),
            rows_of(sizes, rank),
            sum(sizes),
        )


@pytest.mark.parametrize(
    ("spelling", "ranks", "reshard"),
    [
        pytest.param(spelling, ranks, ranks != 3, id=f"{spelling}-{ranks}")
        for spelling in SHARDED
        for ranks in (2, 3, 4)
        if ranks < 4 or spelling in ("the model", "one tower for both")
    ],
)
def test_sharded_encoders_train_as_one_process(pool: Pool, spelling: str, ranks: int, reshard: bool) -> None:
    """Gradients of every step; different numbers of chunks, and a rank without rows."""
    kind, step = SHARDED[spelling]
    expected = one_process(kind, sum(SIZES[ranks]))
    for training in pool.run(ranks, under_fsdp, kind, step, SIZES[ranks], "", {"reshard_after_forward": reshard}):
        assert_same(training, expected)


@pytest.mark.parametrize("spelling", ["its methods", "one tower for both"])
def test_encoders_on_a_mesh_of_two_dimensions_train_as_one_process(pool: Pool, spelling: str) -> None:
    """Replicas of shards. Most chunks are on a rank that shares neither group with the one with fewest."""
    kind, step = SHARDED[spelling]
    sizes = (0, 3, 5, 11)
    expected = one_process(kind, sum(sizes))
    for training in pool.run(4, under_fsdp, kind, step, sizes, "2x2", {}):
        assert_same(training, expected)


class CheckpointedTower(SharedTower):
    """Whose layers are checkpoints inside of every chunk."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.tower:
            x = checkpoint(layer, x, use_reentrant=False)
        return nn.functional.normalize(x, dim=1), self.log_scale.exp()


def writes_to_its_batch(rank: int, group: Any) -> str:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        images, _ = next(batches(6))
        with pytest.raises(RuntimeError) as caught:
            mb.chunked(lambda x: model.encode_image(x.mul_(2)), images, chunk_size=CHUNK)
        return str(caught.value)


def test_a_sharded_encoder_that_writes_to_its_batch_is_refused_by_the_forward(pool: Pool) -> None:
    for text in pool.run(2, writes_to_its_batch):
        assert text.startswith("chunked: inputs and parameters must not be written to, by the encoder")


def test_a_sharded_encoder_with_checkpoints_may_be_called_twice(pool: Pool) -> None:
    """Its checkpoints call modules in a backward, which are no calls without chunks."""
    expected = one_process(SharedTower, sum(SIZES[2]))
    for training in pool.run(2, under_fsdp, CheckpointedTower, by_the_shared, SIZES[2], "", {}):
        assert_same(training, expected)


def plain_after_chunked(rank: int, group: Any, spelling: str) -> str:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        images, texts = (side[rows_of(SIZES[3], rank)] for side in next(batches(sum(SIZES[3]))))
        if spelling == "the model":
            outputs = by_the_first_alone(model, images, texts)
        else:
            outputs = mb.chunked(model.encode_image, images, chunk_size=CHUNK), model.encode_text(texts), 3.0
        loss = mb.clip_loss(*outputs, group=group)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return str(caught.value)


@pytest.mark.parametrize("spelling", ["the model", "a method"])
def test_a_sharded_encoder_called_in_chunks_and_then_without_is_refused_on_every_rank(
    pool: Pool, spelling: str
) -> None:
    """Its backward would have to run forwards amid another backward, which fully_shard does not survive."""
    for text in pool.run(3, plain_after_chunked, spelling):
        assert "must not be called in chunks and then without" in text


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (1, 1), (1, 0)], ids=str)
def test_a_sharded_rank_with_a_single_row_trains_as_the_others(pool: Pool, sizes: tuple[int, int]) -> None:
    """Its scale of one element looks as if it were one per row."""
    expected = one_process(TwoTowers, sum(sizes))
    for training in pool.run(2, under_fsdp, TwoTowers, by_the_model, sizes, "", {}):
        assert_same(training, expected)


class Live(TorchDispatchMode):
    """The most bytes that tensors held at a time, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakSet[Any] = WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                memory = tensor.untyped_storage()
                if memory.nbytes() and memory not in self._known:
                    self._known.add(memory)
                    self.now += memory.nbytes()
                    self.peak = max(self.peak, self.now)
                    finalize(memory, self._forget, memory.nbytes())
        return made

    def _forget(self, size: int) -> None:
        self.now -= size


class Collectives(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def collectives_of(
    rank: int, group: Any, mesh: str, reshard: bool, sizes: Sequence[int], chunk_size: int
) -> dict[str, int]:
    """Of the second step, by name."""
    with torch_may_warn():
        model = sharded(TwoTowers(), group, mesh, reshard_after_forward=reshard)
        for images, texts in batches(sum(sizes), steps=2):
            rows = rows_of(sizes, rank)
            with Collectives() as collectives:
                outputs = mb.chunked(model, images[rows], texts[rows], chunk_size=chunk_size)
                sum(output.pow(3).sum() for output in outputs).backward()
        return dict(collectives.counts)


def count_of(kind: str, counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if kind in name)


@pytest.mark.parametrize(("mesh", "sizes"), [("", (4, 9)), ("2x2", (0, 3, 5, 9))], ids=["line", "replicas of shards"])
def test_shards_are_reduced_once_and_gathered_as_seldom_as_their_owner_allows(
    pool: Pool, mesh: str, sizes: Sequence[int]
) -> None:
    """Five groups of parameters: four blocks, and the rest. Five chunks on the rank with most, or one."""
    for reshard in (False, True):
        many, one = (pool.run(len(sizes), collectives_of, mesh, reshard, sizes, size) for size in (CHUNK, 100))
        for in_chunks, at_once in zip(many, one, strict=True):
            assert count_of("reduce_scatter", in_chunks) == count_of("reduce_scatter", at_once) == 5
            gathers, least = count_of("_allgather_base", in_chunks), count_of("_allgather_base", at_once)
            # Four blocks are gathered for the forward and the backward of each chunk, if they do not stay so.
            assert gathers == least if not reshard else gathers >= least + 4 * 4 * 2


def memory_of(rank: int, group: Any, rows: int, in_chunks: bool, reshard: bool) -> tuple[int, int]:
    """The peak of a step, and the bytes of all parameters."""
    with torch_may_warn():
        model = sharded(TwoTowers(), group, reshard_after_forward=reshard)
        data = next(batches(rows))
        for _ in range(2):
            model.zero_grad()
            with Live() as live:
                outputs = by_the_model(model, *data) if in_chunks else model(*data)
                outputs[0].square().sum().backward()
                del outputs
        return live.peak, sum(p.numel() * 8 for p in TwoTowers().parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_step_takes_the_memory_of_a_chunk_and_of_whole_gradients(pool: Pool, reshard: bool) -> None:
    rows = 512
    one_chunk, whole_batch, in_chunks = (
        pool.run(2, memory_of, *case, reshard)[0] for case in ((CHUNK, False), (rows, False), (rows, True))
    )
    outputs = rows * 2 * 5 * 8
    assert in_chunks[0] <= one_chunk[0] + 2 * one_chunk[1] + 4 * outputs
    assert whole_batch[0] > 1.5 * in_chunks[0], "or activations are not what is measured"


def count_forwards(rank: int, group: Any) -> tuple[int, int]:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        images, texts = (side[rows_of(SIZES[4], rank)] for side in next(batches(sum(SIZES[4]))))
        outputs = mb.chunked(model, images, texts, chunk_size=CHUNK)
        forward = model.image[1].forwards
        mb.clip_loss(*outputs, group=group).backward()
        return forward, model.image[1].forwards - forward


def test_every_sharded_rank_runs_as_many_forwards_as_the_one_with_most_chunks(pool: Pool) -> None:
    assert pool.run(4, count_forwards) == [(5, 5)] * 4


def dropped_under_fsdp(rank: int, group: Any) -> list[tuple[Parameters, Parameters]]:
    with torch_may_warn():
        ours, twin = sharded(TwoTowers(dropout=0.4), group), TwoTowers(dropout=0.4)
        answers = []
        for images, texts in batches(sum(PADDED)):
            rows = rows_of(PADDED, rank)
            for model, step in ((ours, by_its_methods), (twin, manual_loop)):
                torch.manual_seed(100 + rank)
                model.zero_grad()
                mb.clip_loss(*step(model, images[rows], texts[rows]), group=group).backward()
            answers.append((gradients_of(ours), averaged(twin, group)))
        return answers


def test_dropout_in_sharded_encoders_equals_a_loop_over_chunks_with_graphs(pool: Pool) -> None:
    for steps in pool.run(3, dropped_under_fsdp):
        for ours, manual in steps:
            assert_same_parameters(ours, manual, "gradient of", {"rtol": 1e-12, "atol": 1e-14})


def stream_of(rank: int, group: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The caller's random numbers: after a forward, and after its backward."""
    with torch_may_warn():
        model, twin = sharded(TwoTowers(dropout=0.4), group), TwoTowers(dropout=0.4)
        images = next(batches(sum(PADDED)))[0][rows_of(PADDED, rank)]
        torch.manual_seed(100 + rank)
        image = mb.chunked(model.encode_image, images, chunk_size=CHUNK)
        ours = [torch.rand(3)]
        image.square().sum().backward()
        ours.append(torch.rand(3))
        torch.manual_seed(100 + rank)
        torch.cat([twin.encode_image(chunk) for chunk in images.split(CHUNK)])
        return ours, [torch.rand(3), torch.rand(3)]


def test_padding_draws_no_random_number_of_the_callers(pool: Pool) -> None:
    for ours, own in pool.run(3, stream_of):
        assert torch.equal(torch.stack(ours), torch.stack(own))


class Counting(nn.Module):
    """Keeps state in a buffer: how many forwards, and of how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(2))
        seeded(self)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += torch.tensor([1, len(x)])
        return self.layer(x)


def state_of(rank: int, group: Any) -> list[float]:
    with torch_may_warn():
        model = fully_shard(Counting(), mesh=mesh_of(group))
        x = next(batches(sum(SIZES[3])))[0][rows_of(SIZES[3], rank)]
        mb.chunked(model, x, chunk_size=CHUNK).square().sum().backward()
        return model.seen.tolist()


def test_padding_and_replay_leave_no_trace_in_buffers(pool: Pool) -> None:
    assert pool.run(3, state_of) == [[float(chunks_of(rows, CHUNK)), float(rows)] for rows in SIZES[3]]


class CountsInside(nn.Module):
    """A model that chunks itself, and whose buffers a forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return mb.chunked(self.counting, x, chunk_size=CHUNK)


def state_inside(rank: int, group: Any) -> list[float]:
    model = CountsInside()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(next(batches(sum(SIZES[3])))[0][rows_of(SIZES[3], rank)]).square().sum().backward()
    return model.counting.seen.tolist()


def test_a_chunked_call_inside_of_ddps_forward_is_no_forward_of_its_own(pool: Pool) -> None:
    """Which would send buffers, amid a forward that has written to them."""
    assert pool.run(3, state_inside) == [[float(chunks_of(rows, CHUNK)), float(rows)] for rows in SIZES[3]]


def accumulated(rank: int, group: Any) -> Parameters:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        for index, (images, texts) in enumerate(batches(sum(SIZES[3]))):
            rows = rows_of(SIZES[3], rank)
            model.set_requires_gradient_sync(index == NUM_STEPS - 1)
            mb.clip_loss(*by_the_model(model, images[rows], texts[rows]), group=group).backward()
        return gradients_of(model)


def test_sharded_encoders_may_add_up_gradients_and_reduce_the_sum(pool: Pool) -> None:
    plain = TwoTowers()
    for images, texts in batches(sum(SIZES[3])):
        reference.clip_loss(*plain(images, texts)).backward()
    for gradients in pool.run(3, accumulated):
        assert_same_parameters(gradients, gradients_of(plain), "gradient of")


def in_bfloat16(rank: int, group: Any, step: Step | None) -> Parameters:
    with torch_may_warn():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(TwoTowers().float(), group, mp_policy=policy)
        images, texts = (side[rows_of(SIZES[2], rank)].float() for side in next(batches(sum(SIZES[2]))))
        outputs = model(images, texts) if step is None else step(model, images, texts)
        mb.clip_loss(*(output.float() for output in outputs), group=group).backward()
        return gradients_of(model)


@pytest.mark.parametrize("spelling", ["the model", "its methods"])
def test_gradients_of_a_sharded_encoder_in_bfloat16_are_no_worse_than_without_chunks(pool: Pool, spelling: str) -> None:
    exact = one_process(TwoTowers, sum(SIZES[2])).gradients[0]
    peers = pool.run(2, in_bfloat16, None)
    for ours, peer in zip(pool.run(2, in_bfloat16, SHARDED[spelling][1]), peers, strict=True):
        for name, truth in exact.items():
            assert ours[name].dtype == torch.float32
            allowed = 2 * (peer[name] - truth).norm() + 0.01 * truth.norm() + 1e-4
            error = (ours[name] - truth).norm()
            assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, size {truth.norm():.2e}"


def with_a_frozen_shard(rank: int, group: Any) -> tuple[Training, int]:
    with torch_may_warn():
        model = TwoTowers()
        model.image.requires_grad_(False)
        sharded(model, group)
        training = train(
            model,
            lambda images, texts: by_its_methods(model, images, texts),
            lambda *outputs: mb.clip_loss(*outputs, group=group),
            rows_of(SIZES[3], rank),
            sum(SIZES[3]),
        )
        model.image[1].forwards = 0
        assert not mb.chunked(model.encode_image, next(batches(6))[0], chunk_size=CHUNK).requires_grad
        return training, model.image[1].forwards


def test_a_frozen_sharded_tower_costs_one_forward_and_no_gradient(pool: Pool) -> None:
    plain = TwoTowers()
    plain.image.requires_grad_(False)
    expected = train(plain, plain, reference.clip_loss, slice(None), sum(SIZES[3]))
    for training, forwards in pool.run(3, with_a_frozen_shard):
        assert_same(training, expected)
        assert forwards == 3


def _bad_rows(odd: bool) -> dict[str, Any]:
    return {"args": (torch.ones(4, 6), torch.ones(3 if odd else 4, 4)), "chunk_size": 2}


MISTAKES: dict[str, tuple[type[Exception], Callable[[bool], dict[str, Any]], str]] = {
    "chunk_size of nothing": (ValueError, lambda odd: {"chunk_size": 0 if odd else 2}, "chunk_size"),
    "chunk_size of words": (TypeError, lambda odd: {"chunk_size": "2" if odd else 2}, "chunk_size"),
    "sides of different length": (ValueError, _bad_rows, "images: 4, texts: 3"),
    "an argument nobody knows": (ValueError, lambda odd: {"whole": "mask" if odd else (), "chunk_size": 2}, "mask"),
}
ODD = 1


def mistake(rank: int, group: Any, name: str, mesh: str) -> tuple[str, str, Parameters]:
    """The error; and a good step after it."""
    _, arguments, _ = MISTAKES[name]
    with torch_may_warn():
        model = sharded(TwoTowers(), group, mesh)
        given = {"args": (torch.ones(4, 6).double(), torch.ones(4, 4).double()), **arguments(rank == ODD)}
        with pytest.raises((ValueError, TypeError)) as caught:
            mb.chunked(model, *given.pop("args"), **given)
        size = dist.get_world_size(group)
        images, texts = (side[rows_of(SIZES[size], rank)] for side in next(batches(sum(SIZES[size]))))
        mb.clip_loss(*by_the_model(model, images, texts), group=group).backward()
        return type(caught.value).__name__, str(caught.value), gradients_of(model)


@pytest.mark.parametrize(("ranks", "mesh"), [(3, ""), (4, "2x2")], ids=["line", "mesh of two dimensions"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_sharded_rank_is_the_same_error_on_all(pool: Pool, name: str, ranks: int, mesh: str) -> None:
    kind, _, words = MISTAKES[name]
    answers = pool.run(ranks, mistake, name, mesh)
    assert len({answer[:2] for answer in answers}) == 1
    assert answers[0][0] == kind.__name__
    assert words in answers[0][1]
    assert f"rank {ODD}" in answers[0][1]
    for answer in answers:
        assert_same_parameters(answer[2], one_process(TwoTowers, sum(SIZES[ranks])).gradients[0], "gradient of")


def grad_through_shards(rank: int, group: Any) -> str:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        images = next(batches(6))[0].requires_grad_()
        image = mb.chunked(model.encode_image, images, chunk_size=CHUNK)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(image.sum(), images)
        return str(caught.value)


def test_autograd_grad_through_a_sharded_encoder_is_refused(pool: Pool) -> None:
    for text in pool.run(2, grad_through_shards):
        assert text.startswith("chunked: torch.autograd.grad")


def grad_of_inputs(rank: int, group: Any, sizes: Sequence[int]) -> Tensor:
    with torch_may_warn():
        model = sharded(TwoTowers(), group)
        images = next(batches(sum(sizes)))[0][rows_of(sizes, rank)].requires_grad_()
        mb.chunked(model.encode_image, images, chunk_size=CHUNK).pow(3).sum().backward()
        return images.grad


def test_inputs_of_a_sharded_encoder_have_their_gradient(pool: Pool) -> None:
    images = next(batches(sum(SIZES[3])))[0].requires_grad_()
    TwoTowers().encode_image(images).pow(3).sum().backward()
    torch.testing.assert_close(torch.cat(pool.run(3, grad_of_inputs, SIZES[3])), images.grad, **CLOSE)


def hidden(rank: int, group: Any, whole_model: bool) -> str:
    with torch_may_warn():
        model = TwoTowers()
        holder = Holder(Holder(fully_shard(model, mesh=mesh_of(group)) if whole_model else sharded(model, group)))
        with pytest.raises(ValueError) as caught:
            mb.chunked(lambda x, y: holder.model.model(x, y), *next(batches(6)), chunk_size=CHUNK)  # noqa: PLW0108
        return str(caught.value)


@pytest.mark.parametrize("whole_model", [False, True], ids=["blocks", "the model alone"])
def test_a_sharded_model_that_cannot_be_seen_is_refused(pool: Pool, whole_model: bool) -> None:
    for text in pool.run(2, hidden, whole_model):
        assert "write module=model" in text


def with_fsdp1(rank: int, group: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(TwoTowers(), process_group=group, device_id=torch.device("cpu"))
    texts = []
    for encoder in (model, lambda x, y: model(x, y)):  # noqa: PLW0108
        with pytest.raises(TypeError) as caught:
            mb.chunked(encoder, *next(batches(6)), chunk_size=CHUNK)
        texts.append(str(caught.value))
    return texts


def test_the_first_fsdp_is_refused_and_the_second_named(pool: Pool) -> None:
    for texts in pool.run(2, with_fsdp1):
        assert all("fully_shard" in text for text in texts)


# ---- together with the loss


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("spelling", ["the wrapper", "methods of its module", "one tower for both"])
def test_the_complete_step_on_a_ring_of_four_trains_as_one_process(pool: Pool, spelling: str, optimizer: Any) -> None:
    """Two chunked towers, a ring of uneven rows, DistributedDataParallel and a learnable scale."""
    kind, step = SPELLINGS[spelling]
    expected = one_process(kind, sum(SIZES[4]), optimizer)
    options: dict[str, Any] = {"exchange": "ring", "tile": 3}
    for training, faults, _ in pool.run(4, under_ddp, kind, step, SIZES[4], {}, options, optimizer):
        assert_same(training, expected)
        assert not faults
    assert expected.losses[-1] != expected.losses[0]


class Buffered(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def encode_image(self, images: Tensor) -> Tensor:
        return super().encode_image(images) * self.factor


def broadcasts(rank: int, group: Any, sizes: Sequence[int]) -> int:
    """How often buffers are sent in a step."""
    ddp = DistributedDataParallel(Buffered(), process_group=group)
    sent = []
    share = ddp._sync_buffers
    ddp._sync_buffers = lambda: (sent.append(1), share())
    images, texts = (x[rows_of(sizes, rank)] for x in next(batches(sum(sizes))))
    image, text, scale = mb.chunked(ddp, images, texts, chunk_size=2)
    mb.clip_loss(image, text, scale, group=group).backward()
    return len(sent)


def test_buffers_are_sent_once_per_call_whatever_the_number_of_chunks(pool: Pool) -> None:
    assert pool.run(3, broadcasts, (2, 9, 4)) == [1, 1, 1]
