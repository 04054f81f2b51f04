"""The settings of a run: one dataclass per concern. Names follow OpenCLIP where an equivalent exists.

A field's type and what _option says about it is all that is known of it elsewhere: flags, YAML files (flags.py) and
saved runs are read by it, and refused by it.
"""

import math
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

# Of data. "folder": images with captions beside them.
KINDS = ("webdataset", "parquet", "csv", "jsonl", "folder", "icons")


def _option(default: Any, help: str, **rules: Any) -> Any:
    """A field. Rules: choices, at_least, above, below, at_most; alias is another name of its flag."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True)
class Data:
    """Where samples come from."""

    train_data: str | None = _option(
        None,
        "tar shards (a folder, braces or * for several, :: between sources, s3:// and other addresses), Parquet, CSV, "
        "TSV or JSONL files, a folder of images or of Hugging Face datasets, COCO's JSON, or icons",
    )
    dataset_type: str = _option("auto", "auto: by the name", choices=("auto", *KINDS))
    train_num_samples: int | None = _option(None, "samples per epoch (default: all)", at_least=1)
    dataset_resampled: bool = _option(False, "draw shards with replacement")
    train_data_upsampling_factors: str | None = _option(
        None, "weight per shard of each source in --train-data, such as 1::2; needs --dataset-resampled"
    )
    image_key: str | None = _option(
        None, "suffix or column of images; several with ; between (default: jpg;png;jpeg;webp)"
    )
    text_key: str | None = _option(None, "suffix or column of captions; several with ; between (default: txt)")
    json_text_key: str | None = _option(None, "keys of the json file that are captions, instead of --text-key: a;b")
    json_text_key_probs: str | None = _option(None, "weight of each key of --json-text-key: 0.7 0.3")
    captions: str = _option(
        "one", "of several captions per image: one: draw one for each pass; all: train on all", choices=("one", "all")
    )
    max_image_pixels: int = _option(25_000_000, "largest image, by its header; 0: any", at_least=0)
    skip_bad_shards: bool = _option(False, "go on without shards that cannot be read; otherwise they are an error")
    max_skipped: float = _option(0.1, "share of samples that may be skipped before the run ends", at_least=0, at_most=1)
    csv_separator: str = _option("\t", "column separator")
    csv_img_key: str = _option("filepath", "column of the image files")
    csv_caption_key: str = _option("title", "column of the captions")
    crop_scale: float = _option(0.9, "least share of the area in a random crop; 1: centre crop", above=0, at_most=1)
    workers: int = _option(4, "data processes per rank; 0: use the training process", at_least=0, at_most=1024)

    def __post_init__(self) -> None:
        if self.csv_separator == r"\t":  # as a shell hands it over
            object.__setattr__(self, "csv_separator", "\t")


@dataclass(frozen=True)
class Model:
    """The two towers."""

    model: str = _option("tiny", "tiny, small, a model of open_clip, or a folder with a Hugging Face CLIP or SigLIP")
    pretrained: str | None = _option(None, "open_clip's weights: a tag or a file")
    force_image_size: int | None = _option(None, "in pixels, if the model allows a choice", at_least=1, at_most=8192)
    lock_image: bool = _option(False, "freeze the image tower (LiT)")
    feature_cache: str | None = _option(None, "folder for the features of a locked image tower; needs --crop-scale 1")
    grad_checkpointing: bool = _option(False, "recompute activations in the backward pass")
    torchcompile: bool = _option(False, "compile the towers")


@dataclass(frozen=True)
class Loss:
    """The objective."""

    loss: str = _option("clip", "infonce: from image (or query) to text alone", choices=("clip", "siglip", "infonce"))
    duplicates: str = _option("caption", "rows that share it are no negatives", choices=("caption", "image", "none"))
    init_logit_scale: float | None = _option(
        None, "1/temperature at the start (default: 1/0.07; siglip 10; pretrained: its own)", at_least=1
    )
    max_logit_scale: float = _option(100.0, "upper bound of the scale; the lower bound is 1", at_least=1)
    memory_budget: str | None = _option(None, "memory of the loss, such as 512MiB")
    exchange: str = _option("auto", "how ranks exchange blocks in the loss", choices=("auto", "ring", "gather"))
    dense_loss: bool = _option(False, "use the dense loss with the whole matrix, for comparison; one process only")


@dataclass(frozen=True)
class Optimization:
    """Batch, optimizer and precision."""

    global_batch_size: int = _option(1024, "samples per step on all ranks together", at_least=1)
    chunk_size: int = _option(256, "samples per rank in memory at a time; changes no result", at_least=1)
    epochs: int = _option(32, "passes over --train-num-samples", at_least=1)
    steps: int | None = _option(None, "steps, instead of --epochs", at_least=1)
    lr: float = _option(5e-4, "peak learning rate", at_least=0)
    wd: float = _option(0.2, "weight decay of parameters with two or more dimensions", at_least=0)
    beta1: float = _option(0.9, "beta1 of AdamW", at_least=0, below=1)
    beta2: float = _option(0.98, "beta2 of AdamW", at_least=0, below=1)
    eps: float = _option(1e-6, "eps of AdamW", above=0)
    warmup: int | None = _option(None, "warm-up steps (default: a tenth of the run, at most 10000)", at_least=0)
    lr_scheduler: str = _option("cosine", "after the warm-up", choices=("cosine", "const", "const-cooldown"))
    epochs_cooldown: float | None = _option(None, "epochs at the end in which const-cooldown falls", above=0)
    lr_cooldown_end: float = _option(0.0, "learning rate that it falls to", at_least=0)
    lr_cooldown_power: float = _option(1.0, "of the polynomial that it falls by; 1: a straight line", above=0)
    ema_decay: float | None = _option(None, "of a moving average of the weights, which is evaluated", above=0, below=1)
    precision: str = _option(
        "fp32",
        "amp: autocast to float16; amp_bf16: to bfloat16. Weights stay float32: OpenCLIP's bf16 and fp16 are refused",
        choices=("fp32", "amp", "amp_bf16", "amp_bfloat16"),
    )
    tf32: bool = _option(False, "float32 products as TF32 on GPUs that have it, which OpenCLIP always does")
    grad_clip_norm: float | None = _option(None, "clip the gradient to this norm", above=0)
    max_nonfinite: int = _option(10, "end the run after this many non-finite steps in a row", at_least=1)

    def __post_init__(self) -> None:
        if self.precision == "amp_bfloat16":  # OpenCLIP's other word for it
            object.__setattr__(self, "precision", "amp_bf16")


@dataclass(frozen=True)
class Evaluation:
    """Held-out data, and how often it is evaluated."""

    val_data: str | None = _option(None, "as --train-data; icons: the held-out ones")
    val_num_samples: int | None = _option(None, "use the first N samples (icons: 1000, else all)", at_least=1)
    val_frequency: int = _option(1, "evaluate every N epochs; 0: only at the end", at_least=0)
    val_steps: int | None = _option(None, "evaluate every N steps, instead of --val-frequency", at_least=1)
    zeroshot_data: str | None = _option(None, "folder of images for zero-shot classification, one folder per class")
    classnames: str | None = _option(
        None, "file with 'folder<TAB>name' or a name per line, or imagenet (default: the folders' names)"
    )
    templates: str | None = _option(
        None, "file with a prompt per line, {} for the class name, or imagenet (80 prompts) or simple (7)"
    )


@dataclass(frozen=True)
class Run:
    """Output and logging."""

    seed: int = _option(0, "seed of weights, data order and augmentation", at_least=0, below=2**63)
    logs: str = _option("./logs", "folder that holds all runs", alias="--logs-dir")
    name: str | None = _option(None, "name of this run's folder (default: time and settings)")
    resume: str | None = _option(None, "latest, or a checkpoint file")
    allow_changed_data: bool = _option(False, "resume although the data has changed; otherwise that is an error")
    save_frequency: int = _option(1, "save every N epochs; 0: only at the end", at_least=0)
    save_steps: int | None = _option(None, "save every N steps, instead of --save-frequency", at_least=1)
    keep: int = _option(3, "number of checkpoints to keep besides the best; 0: all", at_least=0)
    report_to: str = _option(
        "",
        "besides metrics.jsonl",
        choices=("", "tensorboard", "wandb", "wandb,tensorboard", "tensorboard,wandb", "all"),
    )
    report: bool = _option(False, "write report.html at every evaluation and at the end; needs megabatch[report]")
    wandb_project_name: str = _option("megabatch", "project of --report-to wandb; its own settings are WANDB_…")
    log_every_n_steps: int = _option(10, "lines of out.log besides the first; metrics.jsonl has every step", at_least=1)
    device: str = _option("auto", "auto: cuda if available")


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


@dataclass(frozen=True)
class Option:
    """A field of a section, and what may stand in it."""

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    rules: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def rule(self) -> str:
        """What a value must be."""
        if "choices" in self.rules:
            return "one of " + ", ".join(choice or "''" for choice in self.rules["choices"])
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text that is not empty"}
        bounds = [f"{name.replace('_', ' ')} {bound}" for name, bound in self.rules.items() if name in _BOUNDS]
        return words[self.kind] + (f", {' and '.join(bounds)}" if bounds else "")

    def parse(self, text: str) -> Any:
        """The value that is written so. ValueError says what it must be."""
        try:
            value = _TRUTH[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"must be {self.rule}, got {text!r}.") from None
        return self.checked(value)

    def checked(self, value: Any, where: str = "") -> Any:
        """The value, if it may stand here. TypeError and ValueError say what it must be; `where` goes before."""
        if value is None and self.optional:
            return None
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise TypeError(f"{where}must be {self.rule}, got {value!r}.")
        if not self._allows(value):
            raise ValueError(f"{where}must be {self.rule}, got {value!r}.")
        return value

    def _allows(self, value: Any) -> bool:
        if "choices" in self.rules:
            return value in self.rules["choices"]
        if self.kind is str:
            return len(value) > 0
        if not math.isfinite(value) or (self.kind is int and abs(value) >= 2**63):  # which counters hold
            return False
        return all(_BOUNDS[name](value, bound) for name, bound in self.rules.items() if name in _BOUNDS)


_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt, "at_most": operator.le}
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _options() -> Iterator[Option]:
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        for each in fields(kind):
            kinds = get_args(hints[each.name]) or (hints[each.name],)
            yield Option(section, each.name, kinds[0], len(kinds) > 1, each.default, each.metadata)


OPTIONS = {option.name: option for option in _options()}


def said(error: Exception) -> str:
    """On one line, to be followed by a full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


@contextmanager
def must(rule: str, advice: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """What fails within becomes a ValueError: what must be, what came, and what to do."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{rule}, got {said(error)}. {advice}") from error


# ---- what is kept with a run


def from_mapping(sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration that asdict has taken apart. What is missing keeps its default."""
    read: dict[str, Any] = {}
    for section, values in sections.items():
        if section not in SECTIONS or not set(values) <= {each.name for each in fields(SECTIONS[section])}:
            raise ValueError(f"from_mapping: {section} must be a section with its names, got {', '.join(values)}.")
        checked = {name: OPTIONS[name].checked(value, f"from_mapping: {name} ") for name, value in values.items()}
        read[section] = SECTIONS[section](**checked)
    return Config(**read)


_PATHS = ("train_data", "val_data", "zeroshot_data", "classnames", "templates", "feature_cache", "logs")
_NO_PATHS = {None, "icons", "imagenet", "simple", "tiny", "small"}


def absolute(config: Config) -> Config:
    """The same, wherever it is read from: paths are absolute. --model and --pretrained are paths where there is one."""
    for name in (*_PATHS, "model", "pretrained"):
        section = OPTIONS[name].section
        values = getattr(config, section)
        value = getattr(values, name)
        if value not in _NO_PATHS and (name in _PATHS or Path(value).exists()):
            paths = "::".join(map(_absolute, value.split("::")))
            config = replace(config, **{section: replace(values, **{name: paths})})
    return config


def _absolute(path: str) -> str:
    """Not of a URL, nor of braces that have absolute paths in them."""
    if path.startswith("@"):  # a file that has paths in it
        return "@" + _absolute(path[1:])
    return path if not path or re.match(r"\w{2,}:|\{/", path) else str(Path.cwd() / path)


def to_yaml(config: Config) -> str:
    """For params.yaml, which --config reads."""
    import yaml

    mapping = asdict(config)
    text = yaml.safe_dump(mapping, sort_keys=False, width=math.inf, allow_unicode=True)
    if yaml.safe_load(text) != mapping:  # rare line breaks of Unicode: they come back as spaces unless escaped
        text = yaml.safe_dump(mapping, sort_keys=False, width=math.inf)
    return str(text)


# ---- what goes together


def check(config: Config, *, training: bool = True) -> None:
    """ValueError or TypeError for what no run can be made of. Not `training`: nothing is asked of --train-data."""
    for name, option in OPTIONS.items():
        option.checked(getattr(getattr(config, option.section), name), option.flag + " ")
    data, loss, evaluation = config.data, config.loss, config.evaluation
    if training and data.train_data is None:
        raise ValueError("--train-data must be given. --train-data icons needs no files.")
    if "://" in config.run.logs:
        raise ValueError(
            f"--logs-dir must be a local folder, got {config.run.logs}. Copy it from there to the bucket, or mount it."
        )
    if len(data.csv_separator) != 1:
        raise ValueError(f"--csv-separator must be one character, got {data.csv_separator!r}.")
    if data.train_data_upsampling_factors is not None and not data.dataset_resampled:
        raise ValueError("--train-data-upsampling-factors must come with --dataset-resampled, got it without.")
    if loss.init_logit_scale is not None and loss.init_logit_scale > loss.max_logit_scale:
        limits = f"{loss.init_logit_scale} and {loss.max_logit_scale}"
        raise ValueError(f"--init-logit-scale must be at most --max-logit-scale, got {limits}.")
    if config.model.feature_cache is not None and (not config.model.lock_image or data.crop_scale < 1):
        raise ValueError(
            "--feature-cache must come with --lock-image and --crop-scale 1: other features are new each time."
        )
    options = config.optimization
    if (options.lr_scheduler == "const-cooldown") != (options.epochs_cooldown is not None):
        raise ValueError("--epochs-cooldown must come with --lr-scheduler const-cooldown, got one without the other.")
    for name in ("classnames", "templates"):
        value = getattr(evaluation, name)
        if value is not None and evaluation.zeroshot_data is None:
            raise ValueError(f"--{name} must come with --zeroshot-data, got {value!r} without.")
