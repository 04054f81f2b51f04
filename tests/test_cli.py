"""The command line itself: which command runs, and what it says about arguments and packages that are not there."""

import argparse
import sys
import types
from importlib.util import find_spec

import pytest

from megabatch.cli import COMMANDS, EXTRAS, main


@pytest.fixture
def command(monkeypatch):
    """A command `try` with a flag or two, which returns 7."""
    module = types.ModuleType("a_command")
    module.DESCRIPTION = "Tries."
    module.REFUSED = {"--size": "Use --length."}

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--length", type=int, default=1)
        parser.add_argument("--light", action="store_true")

    def run(options: argparse.Namespace) -> int:
        return 7 * options.length

    module.add_arguments, module.main = add_arguments, run
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setitem(COMMANDS, "try", ("a_command", "tries"))
    return module


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["try", *words])
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: megabatch {name}" in capsys.readouterr().out


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(summary in " ".join(out.split()) for _, summary in COMMANDS.values())


def test_the_exit_code_is_that_of_the_command(command):
    assert main(["try"]) == 7
    assert main(["try", "--length", "2"]) == 14


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert "train" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lenght", "3"], "--lenght is not known. Perhaps --length is meant."),
        (["--lenght=3"], "--lenght is not known. Perhaps --length is meant."),
        (["--lightt", "--length", "3"], "--lightt is not known. Perhaps --light is meant."),
        (["--leng", "3"], "--leng is not known. Perhaps --length is meant."),
        (["-l", "3"], "-l is not known. Perhaps --"),
        (["stray"], "stray is not known. Perhaps --"),
        (["--qqq"], "--qqq is not known. Perhaps --"),
        (["--size", "3"], "--size is not a flag here. Use --length."),
        (["--size=3"], "--size is not a flag here. Use --length."),
    ],
)
def test_an_argument_that_is_not_known_is_refused_with_what_may_be_meant(capsys, words, message):
    assert refused(capsys, *words).startswith(f"megabatch try: error: {message}")


def test_a_command_need_not_refuse_anything_by_name(command, capsys):
    del command.REFUSED
    assert refused(capsys, "--size", "3").startswith("megabatch try: error: --size is not known. Perhaps --")


@pytest.mark.parametrize("where", ["add_arguments", "main"])
@pytest.mark.parametrize(("module", "shown"), [("PIL", "PIL"), ("yaml", "yaml"), ("rich.console", "rich")])
def test_a_missing_package_of_an_extra_is_named_with_what_installs_it(
    command, capsys, monkeypatch, where, module, shown
):
    def need(_):
        raise ModuleNotFoundError("any", name=module)

    monkeypatch.setattr(command, where, need)
    with pytest.raises(SystemExit, match="1"):
        main(["try"])
    assert capsys.readouterr().err == f"megabatch try: {shown} is not installed: pip install 'megabatch[train]'\n"


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="numpy"), ModuleNotFoundError("x"), ImportError("x")])
def test_other_imports_that_fail_are_not_explained_away(command, monkeypatch, error):
    def need(_):
        raise error

    monkeypatch.setattr(command, "main", need)
    with pytest.raises(type(error)) as caught:
        main(["try"])
    assert caught.value is error


@pytest.mark.parametrize("module", EXTRAS)
def test_the_modules_of_extras_are_named_as_they_are_imported(module):
    assert find_spec(module) is not None


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--batch-size", ["--global-batch-size", "--chunk-size"]),
        ("--accum-freq", ["--chunk-size"]),
        ("--siglip", ["--loss siglip"]),
        ("--imagenet-val", ["--zeroshot-data"]),
        ("--global-batchsize", ["--global-batch-size"]),
    ],
)
def test_train_names_what_is_meant_by_flags_of_others(capsys, flag, named):
    with pytest.raises(SystemExit, match="2"):
        main(["train", flag, "3"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"megabatch train: error: {flag} is not ")
    assert all(each in last for each in named)
