"""A CLIP or SigLIP from a folder in Hugging Face's layout. The hub is never asked."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .towers import WrappedTowers

# Each kind of model, and the mean and deviation of pixels that its family was trained with.
CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PIXELS = {"clip": OPENAI, "siglip": ((0.5,) * 3, (0.5,) * 3)}
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model", "vocab.txt")

_log = logging.getLogger(__name__)


class HuggingFaceTowers(WrappedTowers):
    """The model, its tokenizer and the normalisation of its pixels, from one folder.

    Without preprocessor_config.json (or processor_config.json) pixels are normalised as OpenAI's CLIP and Google's
    SigLIP were trained, and a line of the log says so.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        config = _read(folder, "config.json")
        kind = _kind(folder, config)
        transformers = _import_transformers()
        self.clip = _load(getattr(transformers, CLASSES[kind]), folder)
        text, vision = self.clip.config.text_config, self.clip.config.vision_config
        self.tokenizer = FolderTokenizer(folder, text.max_position_embeddings, text.vocab_size)
        if kind == "clip":
            self.tokenizer.check_end(text.eos_token_id)
        self.image_size, self.channels = vision.image_size, vision.num_channels
        self.mean, self.std = _pixels(folder, kind, self.channels)
        self.squashes = kind == "siglip"

    def encode_image(self, images: Tensor) -> Tensor:
        return _features(self.clip.get_image_features(pixel_values=images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Without a mask: CLIP's end mark sees nothing of the padding after it, and SigLIP is trained to see it."""
        return _features(self.clip.get_text_features(input_ids=tokens))

    def image_parts(self) -> list[nn.Module]:
        projection = getattr(self.clip, "visual_projection", None)
        return [self.clip.vision_model] if projection is None else [self.clip.vision_model, projection]

    def compiled_parts(self) -> list[nn.Module]:
        return [self.clip.vision_model, self.clip.text_model]

    def checkpoint_activations(self) -> None:
        self.clip.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class FolderTokenizer:
    """The tokenizer of a folder: texts cut and padded to what the model takes."""

    def __init__(self, folder: str, length: int, vocabulary: int) -> None:
        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(
                f"--model: {folder} must have the files of a tokenizer, got none of {', '.join(TOKENIZER_FILES)}. "
                "Save it there with tokenizer.save_pretrained."
            )
        try:
            self.tokenizer = _import_transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"--model: the tokenizer in {folder} cannot be loaded: {error}") from error
        self.folder, self.length, self.vocabulary = folder, length, vocabulary
        check_vocabulary(f"the tokenizer in {folder}", len(self.tokenizer), vocabulary)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(f"--model: the tokenizer in {folder} must have a pad token, got none.")
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
                f"tokenizer in {self.folder}. It belongs with another model."
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
                    f"{self.tokenizer.eos_token_id} from the tokenizer in {self.folder}."
                )


def check_vocabulary(name: str, tokens: int, vocabulary: int) -> None:
    """transformers returns a tokenizer of two tokens where it finds no vocabulary, instead of failing."""
    if tokens < vocabulary / 2:
        raise ValueError(
            f"--model: {name} must know most of the {vocabulary} tokens of the model, got {tokens}. "
            "Its vocabulary was not found."
        )


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"--model: transformers must be importable for a folder, got {type(error).__name__}: {error}. "
            "Run pip install 'megabatch[hugging_face]'."
        ) from error
    return transformers


def _read(folder: str, name: str) -> dict[str, Any]:
    """A JSON file of the folder; nothing where there is none."""
    path = Path(folder) / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"--model: {path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--model: {path} must be a JSON object, got {type(content).__name__}.")
    return content


def _kind(folder: str, config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    if kind in CLASSES:
        return cast(str, kind)
    if not config and (Path(folder) / "open_clip_config.json").is_file():
        hint = f"It is open_clip's: pass --model local-dir:{folder}"
    elif kind == "siglip2":
        hint = "Those take patches of images of any shape; SigLIP 2 of a fixed size is saved as siglip, and fits"
    else:
        hint = "Pass a folder that save_pretrained of CLIPModel or SiglipModel wrote"
    raise ValueError(f"--model: {folder} must have a config.json with model_type clip or siglip, got {kind}. {hint}.")


def _load(model_class: Any, folder: str) -> Any:
    with _without_progress_bar():
        try:
            model, report = model_class.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:
            raise ValueError(f"--model: {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"--model: {folder} must have all weights of a {model_class.__name__}, got none for {len(missing)}, "
            f"among them {missing[0]}."
        )
    return model


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Every rank would draw one."""
    logging = _import_transformers().utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _pixels(folder: str, kind: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixels between 0 and 1."""
    given = _read(folder, "preprocessor_config.json") or _read(folder, "processor_config.json").get("image_processor")
    if not given:
        if channels != 3:
            raise ValueError(f"--model: {folder} must have a preprocessor_config.json, because its images are not RGB.")
        _log.warning(
            "--model: %s has no preprocessor_config.json: pixels are normalised as usual for %s.", folder, kind
        )
        return PIXELS[kind]
    if not given.get("do_rescale", True) or not math.isclose(given.get("rescale_factor", 1 / 255), 1 / 255):
        raise ValueError(f"--model: rescale_factor must be 1/255, got {given.get('rescale_factor')} in {folder}.")
    if not given.get("do_normalize", True):
        return (0.0,) * channels, (1.0,) * channels
    usual = dict(zip(("image_mean", "image_std"), PIXELS[kind], strict=True))
    mean, std = (tuple(given.get(name, usual[name])) for name in usual)
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"--model: image_mean and image_std must have {channels} numbers, as many as channels, got {len(mean)} and "
            f"{len(std)} in {folder}."
        )
    return mean, std


def _features(output: Any) -> Tensor:
    """transformers 4 returns the features, 5 returns them with what they were made of."""
    return output if isinstance(output, Tensor) else cast(Tensor, output.pooler_output)
