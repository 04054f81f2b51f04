"""The configuration of a run, as flags and YAML files give it: defaults < a saved run < --config < flags."""

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

from .config import OPTIONS, SECTIONS, Config, Option, check

# Flags of other programs that are not flags here, and what to do instead.
_ADVICE = {
    "batch-size": "It means per GPU elsewhere. Use --global-batch-size for the samples per step on all ranks together, "
    "and --chunk-size for those per rank whose activations are held at a time.",
    "accum-freq": "Use --chunk-size: it limits memory, and the loss still sees the whole --global-batch-size.",
    "local-loss gather-with-grad loss-dist-impl": "Leave it out: loss and gradients always cover all ranks, and no "
    "rank holds the whole matrix.",
    "siglip": "Use --loss siglip.",
    "zeroshot-frequency": "Use --val-frequency: both are evaluated at the same steps.",
    "fsdp ddp-static-graph use-bn-sync": "Leave it out: towers are replicated (DDP), and reduced once a step.",
    "horovod dist-url dist-backend no-set-device-rank": "Use torchrun or srun: a rank takes the GPU of its local rank.",
    "delete-previous-checkpoint save-most-recent": "Use --keep: so many of the last checkpoints are kept.",
    "aug-cfg": "Use --crop-scale: a random crop is the only augmentation.",
    "image-mean image-std image-interpolation image-resize-mode": "Leave it out: pixels are the model's own.",
    "skip-scheduler": "Use --lr-scheduler const.",
    "model-ema": "Use --ema-decay.",
    "opt opt-kwargs momentum": "Use --beta1, --beta2, --eps and --wd: the optimizer is AdamW.",
    "wd-exclude layer-decay image-layer-decay text-layer-decay": "Use --lr and --wd, which are those of all layers.",
    "lock-text lock-text-unlocked-layers lock-text-freeze-layer-norm lock-image-unlocked-groups "
    "lock-image-freeze-bn-stats": "Use --lock-image: it locks the whole image tower. The text tower is always trained.",
    "pretrained-image": "Use --pretrained, which loads both towers.",
    "force-custom-text force-patch-dropout": "Use a --model whose configuration has it.",
    "force-quick-gelu": "Use the model's -quickgelu name.",
    "torchscript trace": "Use --torchcompile.",
    "use-bnb-linear": "Use --precision, which is that of products.",
    "imagenet-val imagenet-v2": "Use --zeroshot-data FOLDER --classnames imagenet --templates imagenet.",
    "distill-model distill-pretrained": "Leave it out: there is no distillation.",
    "coca-caption-loss-weight coca-contrastive-loss-weight": "Leave it out: there is no captioning.",
    "cache-dir": "Set HF_HOME.",
    "wandb-notes": "Set WANDB_NOTES.",
    "copy-codebase debug log-local remote-sync remote-sync-frequency remote-sync-protocol": "Use --logs: rank 0 writes "
    "all there is of a run to its folder there.",
}
REFUSED = {f"--{flag}": advice for flags, advice in _ADVICE.items() for flag in flags.split()}

# Where the first is given, the second counts for nothing.
_INSTEAD = {"steps": "epochs", "val_steps": "val_frequency", "save_steps": "save_frequency"}


# ---- flags


def add_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """--config, and a flag for each field but those in `leave_out`. One that is not given is not in the namespace."""
    parser.usage = "%(prog)s [--config FILE] [--flag value ...]"  # all of them would bury an error
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with the same names; flags win over it"
    )
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section, kind.__doc__)
        for option in OPTIONS.values():
            if option.section == section and option.name not in leave_out:
                _add_flag(group, option)


def _add_flag(group: Any, option: Option) -> None:
    names = [option.flag, *filter(None, [option.rules.get("alias")])]
    help = option.rules["help"]
    if option.default not in (None, ""):
        help += f" (default: {option.default!r})" if option.default == "\t" else f" (default: {option.default})"
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    if option.kind is bool:
        action = group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        action.help = common["help"]  # Python 3.10 adds a default of its own
        return
    choices = [choice for choice in option.rules.get("choices", ()) if choice]
    metavar = "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}[option.kind]

    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group.add_argument(*names, type=parse, metavar=metavar, **common)


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Those of add_flags that were given, for read_config."""
    return {name: value for name, value in vars(options).items() if name in OPTIONS or name == "config"}


# ---- all together


def read_config(given: Mapping[str, Any], *, base: Config | None = None, training: bool = True) -> Config:
    """The configuration of a run, checked.

    Args:
        given: What given_flags found: fields by name, and `config`, the path of a YAML file.
        base: The configuration of the run that goes on.
        training: Whether --train-data must be there.
    """
    flags = dict(given)
    path = flags.pop("config", None)
    for one, other in _INSTEAD.items():
        if one in flags and other in flags:
            raise ValueError(f"{OPTIONS[one].flag} must come without {OPTIONS[other].flag}, got both. Drop one.")
    config = base or Config()
    for layer in ({} if path is None else read_yaml(path), flags):
        # --epochs over a file that says steps means epochs.
        changes = {**{one: None for one, other in _INSTEAD.items() if other in layer}, **layer}
        for name, value in changes.items():
            section = OPTIONS[name].section
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    check(config, training=training)
    return config


# ---- YAML


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Fields by name. A key of the file is a field, or a section with fields in it.

    Values are read by the type of the field, as those of flags are, not by YAML's guess: 1e-3 is a number, and a run
    whose name is `no` or 007 keeps it.
    """
    import yaml

    values: dict[str, Any] = {}
    seen: set[tuple[str, bool]] = set()

    def refuse(node: Any, why: str) -> NoReturn:
        raise ValueError(f"{path}, line {node.start_mark.line + 1}: {why}")

    def read(node: Any, what: str) -> None:
        if node.tag == _NULL:
            return
        if not isinstance(node, yaml.MappingNode):
            refuse(node, f"{what} must be made of keys and values, got {_shown(node)}.")
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                refuse(key, "a key must be a word.")
            name = key.value
            is_section = name in SECTIONS and (isinstance(value, yaml.MappingNode) or name not in OPTIONS)
            if (name, is_section) in seen:
                refuse(key, f"{name} is there twice. Keep one.")
            seen.add((name, is_section))
            if is_section:
                read(value, name)
            else:
                values[name] = parsed(name, value)

    def parsed(name: str, node: Any) -> Any:
        if advice := REFUSED.get("--" + name.replace("_", "-")):
            refuse(node, f"{name} is not a key here. {advice}")
        if name not in OPTIONS:
            (near,) = get_close_matches(name, [*OPTIONS, *SECTIONS], n=1, cutoff=0)
            refuse(node, f"{name} is not known. Perhaps {near} is meant.")
        if node.tag not in _PLAIN:
            refuse(node, f"{name} must be {OPTIONS[name].rule}, got {_shown(node)}.")
        try:
            return OPTIONS[name].checked(None) if node.tag == _NULL else OPTIONS[name].parse(node.value)
        except (TypeError, ValueError) as error:
            refuse(node, f"{name} {error}")

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config must be YAML, got {path}: {error}") from None
    except OSError as error:
        raise ValueError(f"--config must be a file that can be read, got {path}: {error.strerror}.") from None
    if root is not None:
        read(root, "the file")
    return values


_NULL = "tag:yaml.org,2002:null"
_PLAIN = {_NULL, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "value"))}


def _shown(node: Any) -> str:
    """A node in words."""
    collections = {"tag:yaml.org,2002:seq": "a list", "tag:yaml.org,2002:map": "keys and values"}
    return repr(node.value) if node.tag in _PLAIN else collections.get(node.tag, f"a tag {node.tag}")


# ---- mistakes


@contextmanager
def usage_errors(command: str) -> Iterator[None]:
    """For what comes before a run: what this package refuses there, or cannot open, is the user's to mend. It is said
    in one line on stderr, with exit code 2; errors that arise in other packages keep their traceback."""
    try:
        yield
    except (TypeError, ValueError, OSError, ImportError) as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if not isinstance(error, OSError) and frame.f_globals["__name__"].partition(".")[0] != "megabatch":
            raise
        print(f"megabatch {command}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
