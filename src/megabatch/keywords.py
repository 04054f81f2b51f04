"""The options of the public functions. Each is declared once: `name: Annotated[type, default, meaning]`.

`with_keywords` shows a function's options in its signature and docstring; `complete` adds the defaults to those given.
"""

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypedDict, get_type_hints

# Order of the options in signatures.
_ORDER = ["learnable", "max_logit_scale", "temperature", "normalize", "label_smoothing", "weight", "ids", "query_ids"]
_ORDER += ["key_ids", "negative_ids", "same_ids", "reduction", "return_stats", "group", "grad_reduction", "exchange"]
_ORDER += ["overlap", "tile", "memory_budget", "backend"]


class LeftOut(Enum):
    """The default of `group`. Unlike None, it is refused when torch.distributed runs with several ranks."""

    GROUP = "group"

    def __repr__(self) -> str:
        return "<required if several ranks run>"


Scalar = float | Tensor
Group = dist.ProcessGroup | dist.device_mesh.DeviceMesh | None
LogitScale = Annotated[Scalar | None, "1 / temperature, already exponentiated. A 0-d or [1] tensor gets its gradient."]
MaxLogitScale = Annotated[float | None, 100, "Upper bound of a learnable scale, applied in training. None: no bound."]
Normalize = Annotated[
    bool | None,
    None,
    "True: L2-normalise rows, in float32. False: use them as given. None: use them as given, and warn once when rows "
    "first appear that are not of unit length.",
]


class ExecutionKeywords(TypedDict, total=False):
    group: Annotated[
        Group,
        LeftOut.GROUP,
        "Ranks whose rows make up the batch, any number of rows on each. The value is the same on all. None: this "
        "process alone. May be left out unless torch.distributed runs with several ranks.",
    ]
    exchange: Annotated[
        str,
        "auto",
        '"ring": columns pass from rank to rank. "gather": all at once. "auto": gather if the budget allows '
        "and a ring's steps would be short.",
    ]
    overlap: Annotated[bool, True, "False: transfers between ranks are blocking."]
    tile: Annotated[
        int | tuple[int, int] | None, None, "Side, or (height, width), of a tile. None: chosen by the plan."
    ]
    memory_budget: Annotated[
        int | str | None,
        None,
        'Bytes for tiles: a number, "512MiB", "512M" (the same) or "512MB" (512 * 10**6). Logits that also fit are '
        "kept for the backward pass instead of computed again.",
    ]
    backend: Annotated[str, "auto", '"auto", "eager" or "triton". A backend given by name is used or refused.']


class SearchKeywords(ExecutionKeywords, total=False):
    normalize: Annotated[bool, False, "True: L2-normalise rows first."]


class ResultKeywords(ExecutionKeywords, total=False):
    reduction: Annotated[
        str,
        "mean",
        '"mean", "sum", or "none" for `weight * loss` of every row of this rank. The result is float32, or float64 for '
        "float64 features.",
    ]
    return_stats: Annotated[
        bool,
        False,
        "Return (loss, stats). `stats` holds detached values over all rows of the group: loss, top-1 accuracy and "
        "positive_logit, per direction if there are two.",
    ]
    grad_reduction: Annotated[
        str,
        "mean",
        '"mean" if the trainer averages gradients over ranks (DDP, FSDP), "sum" if it adds them. Parameters then get '
        "the gradients of one process with all rows.",
    ]


class _Smoothing(TypedDict, total=False):
    label_smoothing: Annotated[float, 0.0, "As in torch.nn.functional.cross_entropy, over the columns not masked."]


class _SameIds(TypedDict, total=False):
    same_ids: Annotated[
        str, "mask", '"mask": pairs of equal ids are not negatives. "positive": they are positives too.'
    ]


class _LearnedScale(TypedDict, total=False):
    learnable: Annotated[bool, True, "Whether the module's scale and bias are trained."]
    max_logit_scale: MaxLogitScale
    normalize: Normalize


class _FixedTemperature(TypedDict, total=False):
    learnable: Annotated[bool, False, "Whether the temperature is trained, as the parameter `logit_scale`."]
    max_logit_scale: MaxLogitScale
    normalize: Annotated[bool | None, True, "True: L2-normalise rows, in float32. False: use them as given."]


class SigLipModuleKeywords(ResultKeywords, _LearnedScale, _SameIds): ...


class ClipModuleKeywords(SigLipModuleKeywords, _Smoothing): ...


class SupConModuleKeywords(ResultKeywords, _FixedTemperature, _Smoothing): ...


class InfoNCEModuleKeywords(SupConModuleKeywords, _SameIds): ...


class LossKeywords(ResultKeywords, total=False):
    temperature: Annotated[Scalar | None, None, "1 / logit_scale; pass one of the two."]
    normalize: Normalize
    weight: Annotated[
        Tensor | None,
        None,
        "`[N]` weight per row, in every direction: the mean is sum(weight * loss) / sum(weight). A row of weight 0 is "
        "still a negative for others.",
    ]


class SupConKeywords(LossKeywords, _Smoothing): ...


class SigLipKeywords(LossKeywords, _SameIds, total=False):
    ids: Annotated[Tensor | None, None, "`[N]` integers. Rows of equal ids are the same item."]


class ClipKeywords(SigLipKeywords, _Smoothing): ...


class InfoNCEKeywords(LossKeywords, _Smoothing, _SameIds, total=False):
    query_ids: Annotated[Tensor | None, None, "`[N]` integers. Rows of equal ids are the same item."]
    key_ids: Annotated[Tensor | None, None, "`[M]` integers, of `key`."]
    negative_ids: Annotated[Tensor | None, None, "`[K]` integers. Without them `negatives` are never masked."]


_Target = TypeVar("_Target", bound=Callable[..., Any])
_Given = TypeVar("_Given", bound=Mapping[str, object])
# By function or class; a function of `reference` shares the entry of its twin.
_defaults: dict[str, dict[str, Any]] = {}
_signatures: dict[str, inspect.Signature] = {}


def with_keywords(target: _Target) -> _Target:
    """Decorate a function that ends in `**options: Unpack[...]`, or a class whose `__init__` does."""
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    signature = inspect.signature(function)
    *parameters, options = signature.parameters.values()
    hints = get_type_hints(get_args(options.annotation)[0], include_extras=True)
    for name in sorted(hints, key=_ORDER.index):
        default = hints[name].__metadata__[0]
        parameters.append(
            options.replace(name=name, kind=options.KEYWORD_ONLY, default=default, annotation=hints[name])
        )
    documented = [p for p in parameters if get_origin(p.annotation) is Annotated]
    shown = [p.replace(annotation=p.annotation.__origin__) if p in documented else p for p in parameters]
    function.__signature__ = _signatures[target.__name__] = signature.replace(parameters=shown)
    _defaults[target.__name__] = {p.name: p.default for p in parameters if p.name in hints}
    text, returns, rest = inspect.cleandoc(target.__doc__ or "").partition("\n\nReturns:")
    lines = [f"{p.name}: {p.annotation.__metadata__[-1]}" for p in documented]
    lines = [textwrap.fill(line, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines]
    heading = [] if "\nArgs:\n" in text else ["", "Args:"]
    target.__doc__ = "\n".join([text, *heading, *lines]) + returns + rest
    return target


def complete(function: str, given: _Given) -> _Given:
    """The options that were given, checked to be options of `function`, and the defaults of all others."""
    defaults = _defaults[function]
    for name in given:
        if name not in defaults:
            raise TypeError(f"{function}: {name} is not an option. {_suggestion(function, name)}")
    return cast(_Given, {**defaults, **given})


def _suggestion(function: str, name: str) -> str:
    parameters = _signatures[function].parameters
    near = [] if torch.compiler.is_compiling() else difflib.get_close_matches(name, parameters, n=1)
    known = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    return f"{f'Perhaps {near[0]} is meant. ' if near else ''}Options are: {', '.join(known)}."
