"""The command line. A command is a module with DESCRIPTION, add_arguments(parser) and main(options) -> exit code; or
one with DESCRIPTION and COMMANDS, which are its own commands.

It is imported when it is called, so that none pays for what another needs: `megabatch --help` imports no torch. It may
have REFUSED: flags that it does not have though people look for them, and what to do instead.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from . import __version__

# Name: its module, and what it is for.
COMMANDS = {
    "check": ("megabatch.check.command", "check exactness and speed on this machine"),
    "train": ("megabatch.train.command", "train two encoders at any batch size"),
    "eval": ("megabatch.train.eval_command", "loss, retrieval and zero-shot metrics of a checkpoint"),
    "export": ("megabatch.train.export_command", "write a trained model for open_clip or transformers"),
    "report": ("megabatch.train.report_command", "draw one or more training runs: a page in one HTML file"),
    "index": ("megabatch.train.index_command", "index tar shards, once, for training"),
    "bench": ("megabatch.bench.command", "measure megabatch and other libraries on this machine"),
    "plan": ("megabatch.plan.command", "predict which batch fits which GPUs, and the time of a step"),
    "completion": ("megabatch.completion", "print a script that completes commands and flags in bash and zsh"),
}
# Modules that come with an extra, and which one.
EXTRAS = dict.fromkeys(("PIL", "yaml", "rich", "braceexpand", "tensorboard", "qtawesome"), "train")
EXTRAS |= {"matplotlib": "bench", "triton": "triton", "pyarrow": "parquet"}
EXTRAS |= {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "http"} | dict.fromkeys(("plotly", "jinja2", "numpy"), "report")
# How near a flag must be to what was typed to be suggested.
NEAR = 0.7
INTERRUPTED = 130  # by Ctrl-C, as shells have it


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one, unless its help speaks of it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, False, argparse.SUPPRESS, [], "") or not action.option_strings or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        return f"{text} (default: {shown})".replace("%", "%%").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser = argparse.ArgumentParser("megabatch", description="Contrastive learning at any batch size.")
        parser.add_argument("--version", action="version", version=f"megabatch {__version__}")
        return _choose(parser, COMMANDS, words)
    except KeyboardInterrupt:
        return INTERRUPTED


def _choose(parser: argparse.ArgumentParser, commands: Mapping[str, tuple[str, str]], words: Sequence[str]) -> int:
    """Run the one of these commands that the first word names, with the other words."""
    choices = parser.add_subparsers(title="commands", metavar="command")
    subparsers = {
        name: choices.add_parser(name, help=summary, formatter_class=Help, allow_abbrev=False)
        for name, (_, summary) in commands.items()
    }
    if not words or words[0] not in commands:
        parser.parse_args(words)
        parser.print_help()
        return 0
    subparser = subparsers[words[0]]
    try:
        command = import_module(commands[words[0]][0])
        subparser.description = command.DESCRIPTION
        if hasattr(command, "COMMANDS"):
            return _choose(subparser, command.COMMANDS, words[1:])
        command.add_arguments(subparser)
        options, unknown = subparser.parse_known_args(words[1:])
        if unknown:
            _refuse(subparser, unknown, getattr(command, "REFUSED", {}))
        code: int = command.main(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        subparser.exit(1, f"{subparser.prog}: {package} is not installed: pip install 'megabatch[{EXTRAS[package]}]'\n")
    return code


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str], refused: Mapping[str, str]) -> NoReturn:
    """Arguments that the command does not have."""
    flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if flag in refused:
        parser.error(f"{flag} is not a flag here. {refused[flag]}")
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    near = get_close_matches(flag, known, n=1, cutoff=NEAR)
    parser.error(f"{flag} is not known." + (f" Perhaps {near[0]} is meant." if near else " --help lists the flags."))
