"""A CLIP or SigLIP from a folder in Hugging Face's layout. The hub is never asked."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ..config import must
from ..preprocessing import INTERPOLATIONS, Preprocessing
from .towers import WrappedTowers, import_library

# Each kind of model, and the mean and deviation of pixels that its family was trained with.
CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PIXELS = {"clip": OPENAI, "siglip": ((0.5,) * 3, (0.5,) * 3)}

_log = logging.getLogger(__name__)


class HuggingFaceTowers(WrappedTowers):
    """The model, its tokenizer and its preprocessing, from one folder.

    Without preprocessor_config.json (or processor_config.json) images are prepared as for OpenAI's CLIP and Google's
    SigLIP, and a line of the log says so.
    """

    def __init__(self, folder: str) -> None:
        kind = _kind(folder)
        super().__init__(_load(getattr(_transformers(), CLASSES[kind]), folder))
        text, vision = self.clip.config.text_config, self.clip.config.vision_config
        self.tokenizer = FolderTokenizer(folder, text.max_position_embeddings, text.vocab_size)
        if kind == "clip":
            self.tokenizer.check_end(text.eos_token_id)
        self.preprocessing = _preprocessing(folder, kind, vision)

    def encode_image(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.clip.get_image_features(pixel_values=images).pooler_output)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Without a mask: CLIP's end mark sees nothing of the padding after it, and SigLIP is trained to see it."""
        return cast(Tensor, self.clip.get_text_features(input_ids=tokens).pooler_output)

    def export(self, folder: Path) -> None:
        """For `from_pretrained(folder)` of model, tokenizer and image processor."""
        done = self.preprocessing
        edges = ("shortest_edge",) if done.resize_mode == "shortest" else ("height", "width")
        processor = {
            "image_processor_type": CLASSES[self.clip.config.model_type].replace("Model", "ImageProcessor"),
            "do_convert_rgb": True,
            "do_resize": done.resize_mode != "none",
            "size": dict.fromkeys(edges, done.resize_to or done.size),
            "resample": INTERPOLATIONS[done.interpolation],
            "do_center_crop": True,
            "crop_size": {"height": done.size, "width": done.size},
            "image_mean": done.mean,
            "image_std": done.std,
        }
        with _without_progress_bar():
            self.clip.save_pretrained(folder)
        cast(FolderTokenizer, self.tokenizer).tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")

    def image_parts(self) -> list[nn.Module]:
        projection = getattr(self.clip, "visual_projection", None)
        return [self.clip.vision_model] if projection is None else [self.clip.vision_model, projection]

    def compiled_parts(self) -> list[nn.Module]:
        return [self.clip.vision_model, self.clip.text_model]

    def checkpoint_activations(self) -> None:
        newer = getattr(self.clip, "activation_checkpointing_enable", None)  # from transformers 5.23 on
        (newer or self.clip.gradient_checkpointing_enable)({"use_reentrant": False})


class FolderTokenizer:
    """The tokenizer of a folder: texts cut and padded to what the model takes."""

    def __init__(self, folder: str, length: int, vocabulary: int) -> None:
        rule = f"--model: the tokenizer in {folder} must be one that transformers loads"
        with must(rule, "Save it there again with tokenizer.save_pretrained."):
            self.tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.folder, self.length, self.vocabulary = folder, length, vocabulary
        check_vocabulary(f"the tokenizer in {folder}", len(self.tokenizer), vocabulary)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                f"--model: the tokenizer in {folder} must have a pad token, got none. Set one and save it again."
            )
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "right"
        self(["a", "a " * length])

    def __call__(self, texts: Sequence[str]) -> Tensor:
        given = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        tokens: Tensor = given["input_ids"]
        if tokens.numel() and tokens.max() >= self.vocabulary:
            raise ValueError(
                f"--model: tokens must be below the model's vocab_size {self.vocabulary}, got {tokens.max()} from the "
                f"tokenizer in {self.folder}. Save the model's own there."
            )
        return tokens

    def check_end(self, end: int) -> None:
        """CLIP's features are those of the first end mark, or, by old configs that say 2, of the highest token."""
        for row in self(["a", "a " * self.length]):
            own = row == self.tokenizer.eos_token_id
            found = row.argmax() if end == 2 else (row == end).int().argmax()
            if not own.any() or found != own.int().argmax():
                raise ValueError(
                    f"--model: texts must end with the token that config.json calls eos_token_id, got {end} there and "
                    f"{self.tokenizer.eos_token_id} from the tokenizer in {self.folder}. Save the model's own there."
                )


def check_vocabulary(name: str, tokens: int, vocabulary: int) -> None:
    """transformers returns a tokenizer of two tokens where it finds no vocabulary, instead of failing."""
    if tokens < vocabulary / 2:
        raise ValueError(
            f"--model: {name} must know most of the {vocabulary} tokens of the model, got {tokens}. "
            "Its vocabulary was not found: look for a missing tokenizer.json."
        )


def _transformers() -> Any:
    return import_library("transformers", extra="hugging_face")


def _read(folder: str, name: str) -> dict[str, Any]:
    """A JSON file of the folder; nothing where there is none."""
    path = Path(folder) / name
    if not path.exists():
        return {}
    with must(f"--model: {path} must be a JSON object", "Save the model there again."):
        return {**json.loads(path.read_text(encoding="utf-8"))}


def _kind(folder: str) -> str:
    kind = _read(folder, "config.json").get("model_type")
    if kind in CLASSES:
        return cast(str, kind)
    advice = "Take another model, or one of open_clip by its name."
    if (Path(folder) / "open_clip_config.json").is_file():
        advice = f"It is open_clip's: pass --model local-dir:{folder}."
    raise ValueError(f"--model: {folder} must have a config.json with model_type clip or siglip, got {kind}. {advice}")


def _load(model_class: Any, folder: str) -> Any:
    advice = "Save the model there again with save_pretrained."
    with _without_progress_bar(), must(f"--model: {folder} must be one that transformers loads", advice):
        model, report = model_class.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        few = f"lacks {len(missing)}, among them {missing[0]}"
        raise ValueError(f"--model: {folder} must have all weights, {few}. {advice}")
    return model


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Every rank would draw one."""
    logging = _transformers().utils.logging
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _preprocessing(folder: str, kind: str, vision: Any) -> Preprocessing:
    """As transformers' image processor reads its file; what is not in there has the default of its class."""
    given = _read(folder, "preprocessor_config.json") or _read(folder, "processor_config.json").get("image_processor")
    channels, side = vision.num_channels, vision.image_size
    (mean, std), is_clip = PIXELS[kind], kind == "clip"
    usual: dict[str, Any] = {"image_mean": mean, "image_std": std, "resample": 3, "do_center_crop": is_clip}
    usual |= {"size": {"shortest_edge": 224} if is_clip else {"height": 224, "width": 224}, "crop_size": 224}
    if not given:
        if channels != 3:
            _refuse(folder, "images that are not RGB must come with a preprocessor_config.json", "none")
        _log.warning("--model: %s has no preprocessor_config.json: images are prepared as usual for %s.", folder, kind)
        usual |= {"size": dict.fromkeys(usual["size"], side), "crop_size": side}
        given = {}
    given = usual | {key: value for key, value in given.items() if value is not None}
    if not given.get("do_rescale", True) or not math.isclose(given.get("rescale_factor", 1 / 255), 1 / 255):
        _refuse(folder, "rescale_factor must be 1/255", given.get("rescale_factor"))
    processor = given.get("image_processor_type") or given.get("feature_extractor_type") or "CLIPImageProcessor"
    if not processor.startswith(("CLIP", "Siglip")) or given.get("do_pad"):
        _refuse(folder, "the image processor must be CLIP's or SigLIP's and not pad", processor)
    if not given.get("do_normalize", True):
        given |= {"image_mean": (0.0,) * channels, "image_std": (1.0,) * channels}
    mean, std = tuple(given["image_mean"]), tuple(given["image_std"])
    if len(mean) != channels or len(std) != channels:
        rule = f"image_mean and image_std must have {channels} numbers, as many as channels"
        _refuse(folder, rule, f"{len(mean)} and {len(std)}")
    cropped, mode, resize_to = given["do_center_crop"], "none", side
    if given.get("do_resize", True):
        mode = "shortest" if isinstance(given["size"], int) or "shortest_edge" in given["size"] else "squash"
        resize_to = _side(folder, "size", given["size"])
    if mode != "squash" and not cropped:
        _refuse(folder, "do_center_crop must be true where size is that of one edge", "false")
    made = _side(folder, "crop_size", given["crop_size"]) if cropped else resize_to
    if made != side:
        _refuse(folder, f"images must be prepared to the model's {side} pixels", made)
    interpolation = {number: name for name, number in INTERPOLATIONS.items()}[given["resample"]]
    return Preprocessing(side, mean, std, interpolation, mode, resize_to, convention="transformers")


def _side(folder: str, name: str, size: Any) -> int:
    """Of {"shortest_edge": side}, {"height": side, "width": side} or a number."""
    known = isinstance(size, dict) and set(size) in ({"shortest_edge"}, {"height", "width"})
    sides = set(size.values()) if known else {size} if isinstance(size, int) else set()
    if len(sides) != 1:
        _refuse(folder, f"{name} must be a square's height and width, or a shortest_edge", size)
    return int(sides.pop())


def _refuse(folder: str, rule: str, got: object) -> NoReturn:
    raise ValueError(
        f"--model: {rule}, got {got} in {folder}. Mend its preprocessor_config.json, or take another model."
    )
