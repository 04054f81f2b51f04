"""Small real encoders, and what a step through them gives: in one piece, in a loop over chunks, and by `chunked`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

EXACT = {"rtol": 1e-10, "atol": 1e-10}


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 16, out: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.first(x).tanh()))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Vit(nn.Module):
    """Images of 3 x 8 x 8."""

    def __init__(self, dropout: float = 0.0, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls, self.places = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(5, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Text(nn.Module):
    """Tokens from 0 to 19, at most 7 of them; the mask is True where there is one."""

    def __init__(self, dropout: float = 0.0, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, width), nn.Parameter(torch.randn(7, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask)
        weight = attention_mask[:, :, None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


def make_inputs(kind: str, rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    if kind == "mlp":
        return (torch.randn(rows, 6, dtype=dtype),)
    if kind == "vit":
        return (torch.randn(rows, 3, 8, 8, dtype=dtype),)
    lengths = 1 + torch.arange(rows) % 7
    return torch.randint(20, (rows, 7)), torch.arange(7) < lengths[:, None]


def make_encoder(kind: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    return {"mlp": Mlp, "vit": Vit, "text": Text}[kind](dropout).to(dtype)


KINDS = ["mlp", "vit", "text"]


class Recorded(nn.Module):
    """An encoder round another one that writes down how it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((len(x), torch.is_grad_enabled()))
        return self.inner(x)

    @property
    def rows(self) -> list[int]:
        return [rows for rows, _ in self.calls]


def contrast(features: Tensor) -> Tensor:
    """A loss in which every row meets every other; it can be had of no rows at all."""
    features = features.double()
    return (features @ features.T).tanh().sum() + features.square().sum()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def backward(loss: Tensor, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor | None]:
    """The loss and what it leaves in .grad, which is then as before."""
    before = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    loss.backward(**options)
    found = {"loss": loss.detach(), **{name: tensor.grad for name, tensor in tensors.items()}}
    for name, tensor in tensors.items():
        tensor.grad = before[name]
    return found


def assert_same(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], **tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, f"{name} has a gradient, and should have none"
        else:
            assert got[name] is not None, f"{name} has no gradient"
            torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_identical(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert_same(got, wanted, rtol=0.0, atol=0.0)


def step(
    encode: Callable[..., Tensor], model: nn.Module, *inputs: Tensor, loss: Callable[[Tensor], Tensor] = contrast
) -> dict[str, Tensor | None]:
    """Loss and all gradients: of the parameters, and of the inputs that want one."""
    tensors = trained(model) | {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}
    return backward(loss(encode(*inputs)), tensors)


def loop_step(
    encoder: Callable[..., Tensor], model: nn.Module, *inputs: Tensor, chunk_size: int
) -> dict[str, Tensor | None]:
    """The same by hand: encode chunk by chunk with a graph, and run these graphs back, the last first, as autograd."""
    pieces = [encoder(*chunk) for chunk in zip(*(x.split(chunk_size) for x in inputs), strict=True)]
    features = torch.cat(pieces).detach().requires_grad_()
    loss = contrast(features)
    (gradient,) = torch.autograd.grad(loss, features)
    for p in model.parameters():
        p.grad = None
    for piece, part in reversed([*zip(pieces, gradient.split(chunk_size), strict=True)]):
        piece.backward(part)
    found = {"loss": loss.detach(), **{name: p.grad for name, p in trained(model).items()}}
    for p in model.parameters():
        p.grad = None
    return found


def worst(got: dict[str, Tensor | None], exact: dict[str, Tensor | None]) -> float:
    """The largest error over all entries, each relative to its largest value."""
    return max(
        float((got[name].double() - value).abs().max() / value.abs().max())  # type: ignore[union-attr]
        for name, value in exact.items()
        if value is not None and value.numel()
    )


def in_float64(model: nn.Module, make: Callable[[], nn.Module], inputs: Iterable[Tensor]) -> dict[str, Tensor | None]:
    """The step of a twin with the same weights and inputs."""
    twin = make().double()
    twin.load_state_dict(model.state_dict())
    return step(twin, twin, *(x.double() if x.is_floating_point() else x for x in inputs))
