"""The losses as modules, which may own the scale (and SigLIP's bias) as parameters.

The parameter `logit_scale` holds the logarithm, as in open_clip and transformers; it stays float32 whatever the module
is cast to, and has shape [1], because FSDP2 shards no 0-d parameters.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .checks import group_name
from .distributed.ranks import refuse_together
from .functional import Loss, clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss

# Keywords of the functions that belong to a batch, not to a module.
_OF_A_BATCH = {"logit_scale", "logit_bias", "temperature", "weight", "ids", "query_ids", "key_ids", "negative_ids"}
_OF_A_BATCH |= {"negatives", "positives", "labels"}


class _ContrastiveLoss(nn.Module):
    """A loss function with its options and, unless told otherwise, the scale."""

    function: Callable[..., Loss]

    def __init__(
        self, init_logit_scale: float | None, learnable: bool, max_logit_scale: float | None, options: dict[str, Any]
    ) -> None:
        super().__init__()
        name = type(self).__name__
        parameters = inspect.signature(self.function).parameters.values()
        known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - _OF_A_BATCH
        for option in options:
            if option not in known:
                in_forward = option in inspect.signature(self.forward).parameters
                where = "Pass it to forward" if in_forward else f"Options are: {', '.join(sorted(known))}"
                where = "Pass init_logit_scale=1 / temperature" if option == "temperature" else where
                raise TypeError(f"{name}: {option} must be an option of {self.function.__name__}. {where}.")
        if init_logit_scale is not None and not (init_logit_scale > 0 and math.isfinite(init_logit_scale)):
            raise ValueError(f"{name}: the scale must be positive and finite, got {init_logit_scale}.")
        if max_logit_scale is not None and not max_logit_scale > 0:
            raise ValueError(f"{name}: max_logit_scale must be positive, got {max_logit_scale}.")
        if learnable and (init_logit_scale or 0) > (max_logit_scale or math.inf):
            raise ValueError(
                f"{name}: the scale must start at or below max_logit_scale, got {init_logit_scale} and "
                f"{max_logit_scale}."
            )
        self.max_logit_scale = max_logit_scale if learnable else None
        self.options = options
        self.logit_scale: nn.Parameter | None = None
        if init_logit_scale is not None:
            self.logit_scale = _parameter(math.log(init_logit_scale), learnable)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay."""
        return {name for name, _ in self.named_parameters()}

    def extra_repr(self) -> str:
        own = "none" if self.logit_scale is None else f"{self.logit_scale.detach().exp().item():.4g}"
        return ", ".join([f"logit_scale={own}", *(f"{name}={value!r}" for name, value in self.options.items())])

    def _scale(self, given: float | Tensor | None) -> float | Tensor | None:
        if self.logit_scale is None:
            if given is None:
                self._refuse("logit_scale must be passed, because this module owns none.")
            return given
        self._refuse_another("logit_scale", given)
        if self.training and self.max_logit_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.max_logit_scale))
        return self.logit_scale.exp()

    def _refuse_another(self, name: str, given: object) -> None:
        if given is not None:
            self._refuse(
                f"{name} must not be passed, because this module owns one. Drop it, or construct the module with "
                "init_logit_scale=None."
            )

    def _refuse(self, why: str) -> None:
        """On all ranks: the others are in the function that this one does not come to."""
        function = type(self).function.__name__
        with refuse_together(function, group_name(function, self.options.get("group", ...))):
            raise ValueError(f"{type(self).__name__}: {why}")

    def _run(self, *features: Tensor, output_dict: bool = False, **keywords: Any) -> Any:
        result = type(self).function(*features, **self.options, **keywords)
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


def _parameter(value: float, learnable: bool) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float32), requires_grad=learnable)


class ClipLoss(_ContrastiveLoss):
    """`clip_loss` as a module.

    Args:
        init_logit_scale: The scale to start from. None: own none, take it in every forward.
        learnable: Whether the scale is trained.
        max_logit_scale: Upper bound, kept at the start of every forward in training. None: no bound.
        options: Of `clip_loss`, but for those that belong to a batch (`weight`, `ids`).
    """

    function = staticmethod(clip_loss)

    def __init__(
        self,
        init_logit_scale: float | None = 1 / 0.07,
        *,
        learnable: bool = True,
        max_logit_scale: float | None = 100,
        **options: Any,
    ) -> None:
        super().__init__(init_logit_scale, learnable, max_logit_scale, options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor | None = None,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
        *,
        weight: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        scale = self._scale(logit_scale)
        keywords = {"logit_scale": scale, "logit_bias": logit_bias, "weight": weight, "ids": ids}
        return self._run(image_features, text_features, output_dict=output_dict, **keywords)


class SigLipLoss(_ContrastiveLoss):
    """`siglip_loss` as a module.

    Args:
        init_logit_scale: The scale to start from. None: own neither scale nor bias, take them in every forward.
        init_logit_bias: The bias to start from.
        learnable: Whether the scale and the bias are trained.
        max_logit_scale: Upper bound, kept at the start of every forward in training. None: no bound.
        options: Of `siglip_loss`, but for those that belong to a batch (`weight`, `ids`).
    """

    function = staticmethod(siglip_loss)

    def __init__(
        self,
        init_logit_scale: float | None = 10,
        init_logit_bias: float = -10,
        *,
        learnable: bool = True,
        max_logit_scale: float | None = 100,
        **options: Any,
    ) -> None:
        super().__init__(init_logit_scale, learnable, max_logit_scale, options)
        self.logit_bias: nn.Parameter | None = None
        if init_logit_scale is not None:
            self.logit_bias = _parameter(float(init_logit_bias), learnable)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor | None = None,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
        *,
        weight: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        scale = self._scale(logit_scale)
        if self.logit_bias is not None:
            self._refuse_another("logit_bias", logit_bias)
            logit_bias = self.logit_bias
        keywords = {"logit_scale": scale, "logit_bias": logit_bias, "weight": weight, "ids": ids}
        return self._run(image_features, text_features, output_dict=output_dict, **keywords)


class _TemperatureLoss(_ContrastiveLoss):
    """A loss that people configure by temperature: normalises and keeps it fixed, unless told otherwise."""

    def __init__(
        self,
        temperature: float | None,
        *,
        learnable: bool = False,
        max_logit_scale: float | None = 100,
        normalize: bool | None = True,
        **options: Any,
    ) -> None:
        if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"{type(self).__name__}: temperature must be positive and finite, got {temperature}.")
        scale = None if temperature is None else 1 / temperature
        super().__init__(scale, learnable, max_logit_scale, {"normalize": normalize, **options})


class InfoNCELoss(_TemperatureLoss):
    """`info_nce_loss` as a module.

    Args:
        temperature: 1 / scale. None: own none, take `logit_scale` in every forward.
        learnable: Whether it is trained, as the parameter `logit_scale`.
        max_logit_scale: Upper bound of a learnable scale. None: no bound.
        normalize: True: L2-normalise inside.
        options: Of `info_nce_loss`, but for those that belong to a batch.
    """

    function = staticmethod(info_nce_loss)

    def __init__(self, temperature: float | None = 0.05, **options: Any) -> None:
        super().__init__(temperature, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | None = None,
        *,
        logit_scale: float | Tensor | None = None,
        positives: Tensor | None = None,
        weight: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        return self._run(
            query,
            key,
            output_dict=output_dict,
            logit_scale=self._scale(logit_scale),
            negatives=negatives,
            positives=positives,
            weight=weight,
            query_ids=query_ids,
            key_ids=key_ids,
            negative_ids=negative_ids,
        )


class NTXentLoss(_TemperatureLoss):
    """`nt_xent_loss` as a module.

    Args:
        temperature: 1 / scale. None: own none, take `logit_scale` in every forward.
        learnable: Whether it is trained, as the parameter `logit_scale`.
        max_logit_scale: Upper bound of a learnable scale. None: no bound.
        normalize: True: L2-normalise inside.
        options: Of `nt_xent_loss`, but for those that belong to a batch (`weight`, `ids`).
    """

    function = staticmethod(nt_xent_loss)

    def __init__(self, temperature: float | None = 0.5, **options: Any) -> None:
        super().__init__(temperature, **options)

    def forward(
        self,
        view1: Tensor,
        view2: Tensor,
        *,
        logit_scale: float | Tensor | None = None,
        weight: Tensor | None = None,
        ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        scale = self._scale(logit_scale)
        return self._run(view1, view2, output_dict=output_dict, logit_scale=scale, weight=weight, ids=ids)


class SupConLoss(_TemperatureLoss):
    """`supcon_loss` as a module.

    Args:
        temperature: 1 / scale. None: own none, take `logit_scale` in every forward.
        learnable: Whether it is trained, as the parameter `logit_scale`.
        max_logit_scale: Upper bound of a learnable scale. None: no bound.
        normalize: True: L2-normalise inside.
        options: Of `supcon_loss`, but for those that belong to a batch (`weight`).
    """

    function = staticmethod(supcon_loss)

    def __init__(self, temperature: float | None = 0.1, **options: Any) -> None:
        super().__init__(temperature, **options)

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        logit_scale: float | Tensor | None = None,
        weight: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or {"contrastive_loss": loss} with `output_dict`."""
        return self._run(features, labels, output_dict=output_dict, logit_scale=self._scale(logit_scale), weight=weight)
