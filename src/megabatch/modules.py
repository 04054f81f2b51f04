"""The losses as modules, which may own the scale (and SigLIP's bias) as parameters.

The parameter `logit_scale` holds the logarithm, as in open_clip and transformers; it stays float32 whatever the module
is cast to, and has shape [1], because FSDP2 shards no 0-d parameters.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from . import checks
from .distributed.ranks import refuse_together
from .functional import Loss, clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss
from .keywords import (
    ClipModuleKeywords,
    InfoNCEModuleKeywords,
    Scalar,
    SigLipModuleKeywords,
    SupConModuleKeywords,
    complete,
    with_keywords,
)

Temperature = Annotated[float | None, "1 / scale. None: the module has no scale, pass `logit_scale` to every forward."]
_OWNS_ONE = (
    "must not be passed, because this module owns one. Drop it, or construct the module with init_logit_scale=None."
)


class _ContrastiveLoss(nn.Module):
    """A loss function with its options and, unless scale and temperature are None, its own scale."""

    function: Callable[..., Loss]

    def __init__(
        self, name: str, options: Mapping[str, Any], scale: float | None = None, temperature: float | None = None
    ) -> None:
        super().__init__()
        if scale is not None:
            checks.warn_scale(name, scale, "init_logit_scale")
        if temperature is not None:
            checks.check_temperature(name, temperature)
            scale = 1 / temperature
        for option in options:
            if option in type(self).forward.__annotations__:
                raise TypeError(f"{name}: {option} is not an option of the module. Pass it to forward.")
            if option == "temperature":
                raise TypeError(f"{name}: temperature is not an option. Pass init_logit_scale=1 / temperature.")
        own = complete(name, options)
        learnable, max_logit_scale = own["learnable"], own["max_logit_scale"]
        if scale is not None and not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"{name}: the scale must be positive and finite, got {scale}.")
        if max_logit_scale is not None and not max_logit_scale > 0:
            raise ValueError(f"{name}: max_logit_scale must be positive, got {max_logit_scale}.")
        if learnable and (scale or 0) > (max_logit_scale or math.inf):
            raise ValueError(
                f"{name}: the scale must start at or below max_logit_scale, got {scale} and {max_logit_scale}."
            )
        self.max_logit_scale = max_logit_scale if learnable else None
        given = {option: value for option, value in options.items() if option not in ("learnable", "max_logit_scale")}
        self.options = given if own["normalize"] is None else {"normalize": own["normalize"], **given}
        self._start: dict[str, float] = {}
        self.logit_scale = None if scale is None else self._parameter("logit_scale", math.log(scale), learnable)
        self.logit_bias: nn.Parameter | None = None

    def _parameter(self, name: str, value: float, learnable: bool) -> nn.Parameter:
        self._start[name] = value
        return nn.Parameter(torch.tensor([value], dtype=torch.float32), requires_grad=learnable)

    def reset_parameters(self) -> None:
        """Reset scale and bias to their initial values, for modules made on the meta device."""
        for name, value in self._start.items():
            nn.init.constant_(getattr(self, name), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ContrastiveLoss":
        """Of the same group, which cannot be copied."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        group = self.options.get("group")
        memo[id(group)] = group
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay."""
        return {name for name, _ in self.named_parameters()}

    def extra_repr(self) -> str:
        scale = self.logit_scale
        own = "none" if scale is None else "meta" if scale.is_meta else f"{scale.detach().exp().item():.4g}"
        return ", ".join([f"logit_scale={own}", *(f"{name}={value!r}" for name, value in self.options.items())])

    def _scale(self, features: Tensor, given: Scalar | None) -> Scalar | None:
        if self.logit_scale is None:
            self._refuse_if(given is None, features, "logit_scale must be passed, because this module owns none.")
            return given
        self._refuse_if(given is not None, features, f"logit_scale {_OWNS_ONE}")
        if self.training and self.max_logit_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.max_logit_scale))
        return self.logit_scale.exp()

    def _refuse_if(self, wrong: bool, features: Tensor, why: str) -> None:
        """Raise on all ranks: the others have called the function, where they wait for this one."""
        if wrong:
            function = type(self).function.__name__
            with refuse_together(function, checks.group_name(function, self.options.get("group", ...)), features):
                raise ValueError(f"{type(self).__name__}: {why}")

    def _run(self, first: Tensor, second: Tensor, scale: Scalar | None, output_dict: bool, **keywords: Any) -> Any:
        result = type(self).function(first, second, self._scale(first, scale), **self.options, **keywords)
        if not output_dict:
            return result
        if isinstance(result, tuple):
            return {"contrastive_loss": result[0]}, result[1]
        return {"contrastive_loss": result}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_ContrastiveLoss":
        # A scale of 100 in bfloat16 moves in steps of 3 %: follow the module to its device, never to its dtype.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, _ in self.named_parameters():
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.dim() == 0:  # as open_clip and transformers save it
                state_dict[prefix + name] = saved[None]
        super()._load_from_state_dict(state_dict, prefix, *args)


class _ImageTextLoss(_ContrastiveLoss):
    """A loss of images and texts, which may have a bias."""

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Scalar | None = None,
        logit_bias: Scalar | None = None,
        output_dict: bool = False,
        *,
        weight: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        if self.logit_bias is not None:
            self._refuse_if(logit_bias is not None, image_features, f"logit_bias {_OWNS_ONE}")
            logit_bias = self.logit_bias
        keywords = {"logit_bias": logit_bias, "weight": weight, "ids": ids}
        return self._run(image_features, text_features, logit_scale, output_dict, **keywords)


@with_keywords
class ClipLoss(_ImageTextLoss):
    """`clip_loss` as a module.

    Args:
        init_logit_scale: Initial scale. None: the module has no scale, pass it to every forward.
    """

    function = staticmethod(clip_loss)

    def __init__(self, init_logit_scale: float | None = 1 / 0.07, **options: Unpack[ClipModuleKeywords]) -> None:
        super().__init__("ClipLoss", options, scale=init_logit_scale)


@with_keywords
class SigLipLoss(_ImageTextLoss):
    """`siglip_loss` as a module.

    Args:
        init_logit_scale: Initial scale. None: the module has no scale and no bias, pass both to forward.
        init_logit_bias: Initial bias.
    """

    function = staticmethod(siglip_loss)

    def __init__(
        self, init_logit_scale: float | None = 10, init_logit_bias: float = -10, **options: Unpack[SigLipModuleKeywords]
    ) -> None:
        super().__init__("SigLipLoss", options, scale=init_logit_scale)
        if self.logit_scale is not None:
            self.logit_bias = self._parameter("logit_bias", float(init_logit_bias), self.logit_scale.requires_grad)


@with_keywords
class InfoNCELoss(_ContrastiveLoss):
    """`info_nce_loss` as a module."""

    function = staticmethod(info_nce_loss)

    def __init__(self, temperature: Temperature = 0.05, **options: Unpack[InfoNCEModuleKeywords]) -> None:
        super().__init__("InfoNCELoss", options, temperature=temperature)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | None = None,
        *,
        logit_scale: Scalar | None = None,
        positives: Tensor | None = None,
        weight: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        ids = {"query_ids": query_ids, "key_ids": key_ids, "negative_ids": negative_ids}
        keywords = {"negatives": negatives, "positives": positives, "weight": weight, **ids}
        return self._run(query, key, logit_scale, output_dict, **keywords)


@with_keywords
class NTXentLoss(_ContrastiveLoss):
    """`nt_xent_loss` as a module."""

    function = staticmethod(nt_xent_loss)

    def __init__(self, temperature: Temperature = 0.5, **options: Unpack[InfoNCEModuleKeywords]) -> None:
        super().__init__("NTXentLoss", options, temperature=temperature)

    def forward(
        self,
        view1: Tensor,
        view2: Tensor,
        *,
        logit_scale: Scalar | None = None,
        weight: Tensor | None = None,
        ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        return self._run(view1, view2, logit_scale, output_dict, weight=weight, ids=ids)


@with_keywords
class SupConLoss(_ContrastiveLoss):
    """`supcon_loss` as a module."""

    function = staticmethod(supcon_loss)

    def __init__(self, temperature: Temperature = 0.1, **options: Unpack[SupConModuleKeywords]) -> None:
        super().__init__("SupConLoss", options, temperature=temperature)

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        logit_scale: Scalar | None = None,
        weight: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        return self._run(features, labels, logit_scale, output_dict, weight=weight)
