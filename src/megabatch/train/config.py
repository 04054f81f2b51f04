"""What can be chosen about a run: one dataclass per concern. Names are OpenCLIP's where it has the thing."""

from dataclasses import dataclass, field, fields
from typing import Any


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Data:
    """Where samples come from."""

    train_data: str | None = _option(
        None, "tar shards (braces for ranges, :: between several sources), a CSV/TSV or JSONL file, or icons"
    )
    dataset_type: str = _option(
        "auto", "auto goes by the file's name", choices=("auto", "webdataset", "csv", "jsonl", "icons")
    )
    train_num_samples: int | None = _option(None, "samples that make an epoch (default: all there are)")
    dataset_resampled: bool = _option(False, "draw shards with replacement")
    train_data_upsampling_factors: str | None = _option(
        None, "how often each source of --train-data is drawn, like 1::2; needs --dataset-resampled"
    )
    csv_separator: str = _option("\t", "between columns")
    csv_img_key: str = _option("filepath", "column of the image files")
    csv_caption_key: str = _option("title", "column of the captions")
    crop_scale: float = _option(0.9, "smallest share of an image's area that a random crop keeps; 1 crops nothing")
    workers: int = _option(4, "processes that read and decode, per rank; 0: the training process itself")


@dataclass(frozen=True)
class Model:
    """The two towers."""

    model: str = _option(
        "tiny", "tiny, small, a model of open_clip by name, or a folder with a Hugging Face CLIP or SigLIP"
    )
    pretrained: str | None = _option(None, "open_clip's weights: a tag or a file")
    force_image_size: int | None = _option(None, "side of the images in pixels, where the model leaves it open")
    lock_image: bool = _option(False, "leave the image tower as it is (LiT)")
    grad_checkpointing: bool = _option(False, "form activations again in the backward")
    torchcompile: bool = _option(False, "compile the towers")


@dataclass(frozen=True)
class Loss:
    """What is minimised."""

    loss: str = _option(
        "clip", "infonce has one direction, from image (or query) to text", choices=("clip", "siglip", "infonce")
    )
    duplicates: str = _option(
        "caption", "rows that share this are not each other's negatives", choices=("caption", "image", "none")
    )
    init_logit_scale: float | None = _option(
        None, "1/temperature at the start (default: 1/0.07; siglip 10; pretrained: its own)"
    )
    max_logit_scale: float = _option(100.0, "clamped to at most this")
    memory_budget: str | None = _option(None, "of the loss, such as 512MiB")
    dense_loss: bool = _option(False, "the dense loss, with its whole matrix, to compare with; one process only")


@dataclass(frozen=True)
class Optimization:
    """How it is minimised."""

    global_batch_size: int = _option(1024, "samples of one step, of all ranks together")
    chunk_size: int = _option(
        256, "samples of a rank whose activations are held at a time; changes memory, not results"
    )
    epochs: int = _option(32, "passes over --train-num-samples")
    steps: int | None = _option(None, "steps, instead of --epochs")
    lr: float = _option(5e-4, "the highest learning rate")
    wd: float = _option(0.2, "weight decay, of parameters with two dimensions or more")
    beta1: float = _option(0.9, "of AdamW")
    beta2: float = _option(0.98, "of AdamW")
    eps: float = _option(1e-6, "of AdamW")
    warmup: int | None = _option(None, "steps until the highest learning rate (default: a tenth of all, at most 10000)")
    lr_scheduler: str = _option("cosine", "after the warm-up", choices=("cosine", "const"))
    precision: str = _option(
        "fp32", "bf16 and fp16: by autocast, weights stay float32", choices=("fp32", "bf16", "fp16", "amp", "amp_bf16")
    )
    grad_clip_norm: float | None = _option(None, "largest norm of the gradient")
    max_nonfinite: int = _option(10, "give up after so many steps in a row without a finite loss and gradient")


@dataclass(frozen=True)
class Evaluation:
    """What is held out, and how often it is asked."""

    val_data: str | None = _option(None, "as --train-data; icons: its held-out captions")
    val_num_samples: int | None = _option(None, "take the first so many (icons: 1000, else all)")
    val_frequency: int = _option(1, "in epochs; 0: at the end alone")
    val_steps: int | None = _option(None, "in steps, instead of --val-frequency")
    zeroshot_data: str | None = _option(
        None, "a folder of images, one folder per class, to be classified without training"
    )
    classnames: str | None = _option(
        None, "file with 'folder<TAB>name' or a name per line, in the folders' order (default: folder names)"
    )
    templates: str | None = _option(
        None, "file with a prompt per line, {} for the class name (default: a few photo prompts)"
    )


@dataclass(frozen=True)
class Run:
    """Where it is kept, and how it is watched."""

    seed: int = _option(0, "of weights, order and augmentation")
    logs: str = _option("./logs", "folder of all runs", alias="--logs-dir")
    name: str | None = _option(None, "folder of this run (default: time and settings)")
    resume: str | None = _option(None, "latest, or a checkpoint file")
    save_frequency: int = _option(1, "in epochs; 0: at the end alone")
    save_steps: int | None = _option(None, "in steps, instead of --save-frequency")
    keep: int = _option(3, "checkpoints kept, besides the best; 0: all")
    report_to: str = _option("", "tensorboard, or nothing", choices=("", "tensorboard"))
    log_every_n_steps: int = _option(10, "lines of out.log; metrics.jsonl has every step")
    device: str = _option("auto", "auto: cuda where there is one")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    optimization: Optimization = field(default_factory=Optimization)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)


SECTIONS: dict[str, type] = {section.name: section.default_factory for section in fields(Config)}  # type: ignore[misc]
