"""Any model of open_clip by name. Its weights keep open_clip's names, so checkpoints go both ways."""

import difflib
import json
import logging
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import must
from ..preprocessing import Preprocessing
from .hugging_face import check_vocabulary
from .towers import Tokenizer, WrappedTowers, import_library

_log = logging.getLogger(__name__)


class OpenClipTowers(WrappedTowers):
    """A model of open_clip with an image and a text tower. Arguments are those of its create_model.

    Weights that say otherwise win over `init_logit_scale` and `init_logit_bias`. Without the latter it is left to the
    model whether it has a bias.
    """

    def __init__(
        self,
        name: str,
        init_logit_scale: float,
        init_logit_bias: float | None = None,
        *,
        pretrained: str | None = None,
        force_image_size: int | None = None,
    ) -> None:
        open_clip = import_open_clip()
        _check_name(open_clip, name, pretrained)
        name = name if ":" in name else name.replace("/", "-")
        advice = "open_clip takes it from the Hugging Face hub: run once with a network."
        with must(f"--model: the tokenizer of {name!r} must be at hand", advice):
            tokenizer: Tokenizer = open_clip.get_tokenizer(name)
        options: dict[str, Any] = {"init_logit_scale": math.log(init_logit_scale), "force_image_size": force_image_size}
        if init_logit_bias is not None:
            options["init_logit_bias"] = init_logit_bias
        size = "" if force_image_size is None else f" for images of side {force_image_size}"
        advice = "open_clip.list_pretrained() names all models with their weights."
        with must(f"--model: {name!r} must be one that open_clip makes{size}", advice):
            clip = open_clip.create_model(name, pretrained=pretrained, precision="fp32", **options)
        if not isinstance(clip, (open_clip.CLIP, open_clip.CustomTextCLIP)):
            raise ValueError(_not_two_towers(name, type(clip).__name__))
        super().__init__(clip)
        self.tokenizer, self._config = tokenizer, open_clip.get_model_config(name)
        self._check_tokenizer(name)
        self._check_image_size(name, force_image_size)
        self.preprocessing = _preprocessing(self.clip.visual.preprocess_cfg)
        if init_logit_bias and self.clip.logit_bias.eq(0).all():  # open_clip's, for weights that have none
            self.clip.logit_bias.data.fill_(init_logit_bias)
            _log.warning("--pretrained: the weights have no logit_bias: it starts at %s.", init_logit_bias)

    def _check_tokenizer(self, name: str) -> None:
        vocabulary = self.clip.vocab_size
        if (inner := getattr(self.tokenizer, "tokenizer", None)) is not None:
            check_vocabulary(f"the tokenizer that open_clip has for {name!r}", len(inner), vocabulary)
        elif (own := getattr(self.tokenizer, "vocab_size", vocabulary)) > vocabulary:
            raise ValueError(
                f"--model: {name!r} must know the {own} tokens of its tokenizer, got vocab_size {vocabulary}. "
                "Set that in its configuration."
            )

    def _check_image_size(self, name: str, forced: int | None) -> None:
        size = self.clip.visual.image_size
        height, width = (size, size) if isinstance(size, int) else size
        if height != width:
            got = f"{name!r}, which takes {height} x {width}"
            raise ValueError(f"--model: images must be squares, got {got}. Give --force-image-size.")
        if forced is None:
            return
        patch, _ = getattr(self.clip.visual, "patch_size", (1, 1))
        if forced % patch:
            raise ValueError(f"--force-image-size: must be a multiple of {patch}, the patch of {name!r}, got {forced}.")
        rule = f"--force-image-size: must be a size that {name!r} takes, not {forced}"
        with must(rule, "Give another."), torch.no_grad():
            self.clip.eval().encode_image(torch.zeros(1, 3, forced, forced))

    def encode_image(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.clip.encode_image(images, normalize=False))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.clip.encode_text(tokens, normalize=False))

    def export(self, folder: Path) -> None:
        """For `open_clip.create_model_and_transforms("local-dir:folder")`."""
        from safetensors.torch import save_file

        preprocessing = self.preprocessing
        self._config["vision_cfg"]["image_size"] = preprocessing.size
        if self.logit_bias is not None:
            self._config["init_logit_bias"] = self.logit_bias.item()
        names = ("mean", "std", "interpolation", "resize_mode", "fill_color")
        config = {"model_cfg": self._config, "preprocess_cfg": {name: getattr(preprocessing, name) for name in names}}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if (tokenizer := getattr(self.tokenizer, "tokenizer", None)) is not None:
            tokenizer.save_pretrained(folder)
        weights = {name: tensor.contiguous() for name, tensor in self.clip.state_dict().items()}
        save_file(weights, folder / "open_clip_model.safetensors")

    def image_parts(self) -> list[nn.Module]:
        return [self.clip.visual]

    def compiled_parts(self) -> list[nn.Module]:
        # Where the embeddings of texts lie in the model itself, the text tower is all but them.
        return [self.clip.visual, self.clip.text if hasattr(self.clip, "text") else self.clip.transformer]

    def checkpoint_activations(self) -> None:
        """By open_clip, whose own checkpoints, timm's and transformers' are not reentrant."""
        self.clip.set_grad_checkpointing(True)
        for tower in self.compiled_parts():
            if not any(
                getattr(module, flag, False)
                for module in tower.modules()
                for flag in ("grad_checkpointing", "gradient_checkpointing")
            ):
                raise ValueError(
                    f"--grad-checkpointing: must be left out, because open_clip has none for {type(tower).__name__}, "
                    "a tower of this model. Take a smaller --chunk-size."
                )


def _preprocessing(options: dict[str, Any]) -> Preprocessing:
    """As open_clip's image_transform reads it."""

    def per_channel(value: Any) -> tuple[float, ...]:
        return tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3

    size = options["size"]
    return Preprocessing(
        size if isinstance(size, int) else size[0],
        mean=per_channel(options["mean"]),
        std=per_channel(options["std"]),
        interpolation="bilinear" if options["interpolation"] == "bilinear" else "bicubic",  # "random" is for training
        resize_mode=options["resize_mode"],
        fill_color=options["fill_color"],
    )


def import_open_clip() -> Any:
    return import_library("open_clip", extra="open_clip")


def _check_name(open_clip: Any, name: str, pretrained: str | None) -> None:
    if name.startswith(("local-dir:", "hf-hub:")):
        if pretrained is not None:
            raise ValueError(
                f"--pretrained: must be left out with --model {name}, whose weights lie beside it, got {pretrained!r}."
            )
        place = Path(name.removeprefix("local-dir:"))
        if name.startswith("local-dir:") and not (place / "open_clip_config.json").is_file():
            raise ValueError(
                f"--model: local-dir: must be a folder with an open_clip_config.json, got {str(place)!r}. megabatch "
                "export writes one."
            )
        return
    known = open_clip.list_models()
    if (plain := name.replace("/", "-")) not in known:
        near = difflib.get_close_matches(plain, ["tiny", "small", *known])
        raise ValueError(
            f"--model: must be tiny, small, a folder that exists or a model of open_clip, got {name!r}. "
            + (f"The nearest: {', '.join(near)}." if near else "open_clip.list_models() names its own.")
        )
    if "multimodal_cfg" in open_clip.get_model_config(plain):
        raise ValueError(_not_two_towers(name, "CoCa"))


def _not_two_towers(name: str, kind: str) -> str:
    return f"--model: must be an image and a text tower, got {name!r}, which is a {kind}. Take a CLIP or a SigLIP."
