"""The command line itself: which command runs, and what it says about arguments and packages that are not there."""

import argparse
import io
import shutil
import subprocess
import sys
import types
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from megabatch.cli import COMMANDS, EXTRAS, Help, main


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
        (["-l", "3"], "-l is not known. --help lists the flags."),
        (["stray"], "stray is not known. --help lists the flags."),
        (["--qqq"], "--qqq is not known. --help lists the flags."),
        (["--size", "3"], "--size is not a flag here. Use --length."),
        (["--size=3"], "--size is not a flag here. Use --length."),
    ],
)
def test_an_argument_that_is_not_known_is_refused_with_what_may_be_meant(capsys, words, message):
    assert refused(capsys, *words).startswith(f"megabatch try: error: {message}")


def test_a_command_need_not_refuse_anything_by_name(command, capsys):
    del command.REFUSED
    assert refused(capsys, "--size", "3").startswith("megabatch try: error: --size is not known.")


@pytest.mark.parametrize("program", [["-m", "megabatch"], [str(Path(sys.executable).with_name("megabatch"))]], ids=str)
def test_help_imports_no_torch(program):
    """So it answers at once."""
    for words in (["--help"], ["--version"], ["bench"], ["bench", "--help"]):
        command = [sys.executable, "-Ximporttime", *program, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "megabatch.cli" in imported
        assert "torch" not in imported, words


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("ben", "bench"),
        ("bench lo", "loss"),
        ("bench loss --er", "--error-rows"),
        ("bench loss --rows 40 --er", "--error-rows"),
        ("train --global", "--global-batch-size"),
        ("eval --check", "--checkpoint"),
        ("bench qqq", ""),
    ],
)
def test_the_shell_completes_commands_and_flags(typed, found, completion):
    words = ["megabatch", *typed.split()]
    script = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _megabatch; echo ${{COMPREPLY[@]}}"
    ended = subprocess.run(["bash", "-c", f"{completion}\n{script}"], capture_output=True, text=True, check=True)
    assert (ended.stdout.strip(), ended.stderr) == (found, "")


def test_commands_that_cannot_be_imported_are_completed_without_flags(monkeypatch, capsys):
    def without_pillow(path: str) -> object:
        if "train" in path:
            raise ModuleNotFoundError("No module named 'PIL'", name="PIL")
        return import_module(path)

    monkeypatch.setattr("megabatch.completion.import_module", without_pillow)
    assert main(["completion"]) == 0
    printed = capsys.readouterr()
    assert "train" in printed.out
    assert "--csv-img-key" not in printed.out
    assert "completion: train has no flags, because PIL is not installed." in printed.err


@pytest.fixture(scope="module")
def completion() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["completion"]) == 0
    return printed.getvalue()


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of every command, and of every benchmark."""
    from megabatch.bench.command import COMMANDS as BENCHMARKS

    found = {}
    for name, (module, _) in {**COMMANDS, **{f"bench {name}": entry for name, entry in BENCHMARKS.items()}}.items():
        if name != "bench":
            found[name] = argparse.ArgumentParser(name, formatter_class=Help, allow_abbrev=False)
            import_module(module).add_arguments(found[name])
    return found


def test_every_flag_shows_its_default():
    for name, parser in parsers().items():
        for action in parser._actions:
            if action.option_strings and action.default not in (None, False, argparse.SUPPRESS, []):
                assert "default" in Help("x")._get_help_string(action), (name, action.option_strings)


def test_every_description_has_at_most_six_lines():
    from megabatch.bench.command import COMMANDS as BENCHMARKS

    for module, _ in [*COMMANDS.values(), *BENCHMARKS.values()]:
        assert len(import_module(module).DESCRIPTION.splitlines()) <= 6, module


def test_one_word_has_one_meaning():
    everything = parsers()
    helps = {flag: set() for flag in ("--rows", "--dtype", "--limit", "--width", "--precision")}
    for parser in everything.values():
        for flag, found in helps.items():
            if flag in parser._option_string_actions:
                found.add(parser._option_string_actions[flag].help)
        assert not {"--dtypes", "--widths", "--markdown"} & set(parser._option_string_actions)
    assert all(words.startswith("rows of the batch") for words in helps["--rows"])
    assert helps["--dtype"] == {"dtype of the features"}
    assert len(helps["--limit"]) == 1
    assert {flag for flag in ("--precision",) if any("OpenCLIP" not in words for words in helps[flag])} == set()


def test_no_flag_of_train_is_taken_by_torchrun():
    """torchrun abbreviates: a flag that is the beginning of several of its own is an error to it. `--logs` is, and has
    `--logs-dir` beside it."""
    from torch.distributed.run import get_args_parser

    theirs = [flag for flag in get_args_parser()._option_string_actions if flag.startswith("--")]
    for name in ("train", "eval", "check"):
        for flag in parsers()[name]._option_string_actions:
            if flag.startswith("--") and flag not in theirs and flag != "--logs":
                assert len([other for other in theirs if other.startswith(flag)]) == 0, (name, flag)
    words = ["--nproc-per-node", "2", "-m", "megabatch", "train", "--logs-dir", "x", "--name", "y"]
    assert get_args_parser().parse_args(words).training_script_args == words[4:]


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


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="scipy"), ModuleNotFoundError("x"), ImportError("x")])
def test_other_imports_that_fail_are_not_explained_away(command, monkeypatch, error):
    def need(_):
        raise error

    monkeypatch.setattr(command, "main", need)
    with pytest.raises(type(error)) as caught:
        main(["try"])
    assert caught.value is error


@pytest.mark.parametrize("module", sorted(set(EXTRAS) - {"gcsfs"}))  # which is not installed for tests
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
