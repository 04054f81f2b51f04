"""`megabatch completion`: a script for the shell. It holds all commands and flags, so that TAB starts no Python."""

import argparse
import sys
from collections.abc import Mapping
from importlib import import_module

from . import cli

DESCRIPTION = """\
Prints a script that completes commands and flags in bash and zsh. Append it to ~/.bashrc or ~/.zshrc, or write it to a
file that these source. Print it again after an update.
"""
SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_megabatch() {{
    local words="" typed="${{COMP_WORDS[*]:1:COMP_CWORD-1}} "
    case "${{typed# }}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _megabatch megabatch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def main(options: argparse.Namespace) -> int:
    # The longest first: the shell takes the first that fits.
    known = sorted(completions(cli.COMMANDS).items(), key=lambda item: -len(item[0]))
    cases = [f'        "{typed}"*) words="{" ".join(words)}" ;;' for typed, words in known]
    print(SCRIPT.format(cases="\n".join(cases)), end="")
    return 0


def completions(commands: Mapping[str, tuple[str, str]], typed: str = "") -> dict[str, list[str]]:
    """What may follow what was typed."""
    found = {typed: [*commands]}
    for name, (path, _) in commands.items():
        before = f"{typed}{name} "
        try:
            command = import_module(path)
        except ModuleNotFoundError as error:
            print(f"completion: {before}has no flags, because {error.name} is not installed.", file=sys.stderr)
            continue
        if hasattr(command, "COMMANDS"):
            found |= completions(command.COMMANDS, before)
        else:
            parser = argparse.ArgumentParser()
            command.add_arguments(parser)
            found[before] = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    return found
