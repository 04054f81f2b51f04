"""The configuration of a run: flags, YAML, saved runs, and what is refused in which words."""

import argparse
import re
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.train.config import (
    OPTIONS,
    SECTIONS,
    Config,
    Data,
    Evaluation,
    Loss,
    Optimization,
    Option,
    Run,
    check,
    from_mapping,
    to_yaml,
)
from megabatch.train.flags import REFUSED, add_flags, given_flags, read_config, read_yaml, usage_errors

ICONS = {"train_data": "icons"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("megabatch train", allow_abbrev=False)
    add_flags(made)
    return made


def flags(*words: str) -> dict[str, Any]:
    return given_flags(parser().parse_args(words))


def config(*words: str, **more: Any) -> Config:
    return read_config(flags("--train-data", "icons", *words), **more)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def values_of(option: Option) -> st.SearchStrategy[Any]:
    """Any that the field takes and keeps as it is."""
    rules = option.rules
    if option.name == "precision":
        found: st.SearchStrategy[Any] = st.sampled_from(["fp32", "amp", "amp_bf16"])
    elif "choices" in rules:
        found = st.sampled_from(rules["choices"])
    elif option.kind is bool:
        found = st.booleans()
    elif option.kind is int:
        found = st.integers(rules.get("at_least"), rules.get("at_most", rules.get("below", 2**63) - 1))
    elif option.kind is float:
        low, high = rules.get("above", rules.get("at_least")), rules.get("below", rules.get("at_most"))
        exclude = {"exclude_min": "above" in rules, "exclude_max": "below" in rules}
        found = st.floats(low, high, allow_nan=False, allow_infinity=False, **exclude)
    else:
        text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
        found = (text | st.sampled_from(["null", "no", "007", "1e-3", "~", "- a", "a: b"])).filter(lambda t: t != "\\t")
    return found | st.none() if option.optional else found


def configs() -> st.SearchStrategy[Config]:
    def section(kind: type) -> st.SearchStrategy[Any]:
        return st.builds(kind, **{each.name: values_of(OPTIONS[each.name]) for each in fields(kind)})

    return st.builds(Config, **{name: section(kind) for name, kind in SECTIONS.items()})


# ---- fields


def test_no_two_sections_share_a_field():
    """Or a key without a section would mean two things."""
    assert len(OPTIONS) == sum(len(fields(section)) for section in SECTIONS.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_default_is_one_that_its_field_takes(name):
    assert OPTIONS[name].checked(OPTIONS[name].default) == OPTIONS[name].default


# ---- flags


@pytest.mark.parametrize("name", OPTIONS)
def test_every_field_has_a_flag_in_kebab_case(name):
    assert "--" + name.replace("_", "-") in parser()._option_string_actions


def test_flags_that_are_not_given_are_not_there():
    assert flags() == {}
    assert flags("--lr", "1e-3", "--config", "run.yaml") == {"lr": 1e-3, "config": "run.yaml"}


def test_values_of_flags_have_the_types_of_their_fields():
    given = flags("--lr", "1", "--steps", "1_000", "--name", "007", "--lock-image", "--no-torchcompile")
    assert given == {"lr": 1.0, "steps": 1000, "name": "007", "lock_image": True, "torchcompile": False}
    assert [type(value) for value in given.values()] == [float, int, str, bool, bool]


def test_logs_dir_is_another_name_of_logs():
    """torchrun takes --logs for one of its own."""
    assert flags("--logs-dir", "runs") == {"logs": "runs"}


def test_a_command_may_leave_flags_out():
    some = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(some, leave_out={"lr"})
    assert some.parse_known_args(["--lr", "1", "--val-data", "x"])[1] == ["--lr", "1"]


def test_help_groups_flags_by_section_and_shows_defaults():
    text = " ".join(parser().format_help().split())
    assert "optimization: Batch, optimizer and precision. --global-batch-size N" in text
    assert "peak learning rate (default: 0.0005)" in text
    assert r"column separator (default: '\t')" in text
    assert "--lock-image, --no-lock-image" in text
    assert "--precision {fp32,amp,amp_bf16,amp_bfloat16}" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "fast"], "argument --lr: must be a number, at least 0, got 'fast'."),
        (["--lr", "nan"], "argument --lr: must be a number, at least 0, got nan."),
        (["--lr", "inf"], "argument --lr: must be a number, at least 0, got inf."),
        (["--lr=-1"], "argument --lr: must be a number, at least 0, got -1.0."),
        (["--steps", "1e3"], "argument --steps: must be a whole number, at least 1, got '1e3'."),
        (["--global-batch-size", "0"], "argument --global-batch-size: must be a whole number, at least 1, got 0."),
        (["--beta2", "1"], "argument --beta2: must be a number, at least 0 and below 1, got 1.0."),
        (["--crop-scale", "0"], "argument --crop-scale: must be a number, above 0 and at most 1, got 0.0."),
        (["--crop-scale", "1.1"], "argument --crop-scale: must be a number, above 0 and at most 1, got 1.1."),
        (["--loss", "siglib"], "argument --loss: must be one of clip, siglip, infonce, got 'siglib'."),
        (
            ["--report-to", "mlflow"],
            f"argument --report-to: must be {OPTIONS['report_to'].rule}, got 'mlflow'.",
        ),
        (["--train-data", ""], "argument --train-data: must be text that is not empty, got ''."),
    ],
)
def test_a_flag_with_a_wrong_value_is_refused(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    assert capsys.readouterr().err.splitlines()[-1] == f"megabatch train: error: {message}"


# ---- what wins


def test_flags_win_over_yaml_over_the_saved_run_over_defaults(yaml_file):
    base = Config(optimization=Optimization(lr=1.0, wd=1.0, beta1=0.1))
    path = yaml_file("optimization:\n  lr: 2\nwd: 2\n")
    found = config("--config", str(path), "--lr", "3", base=base).optimization
    assert (found.lr, found.wd, found.beta1, found.beta2) == (3.0, 2.0, 0.1, 0.98)


def test_flags_can_take_back_what_yaml_switches_on(yaml_file):
    path = str(yaml_file("lock_image: true\ntorchcompile: true\n"))
    found = config("--config", path, "--no-lock-image").model
    assert (found.lock_image, found.torchcompile) == (False, True)


@pytest.mark.parametrize(
    ("one", "other"), [("steps", "epochs"), ("val_steps", "val_frequency"), ("save_steps", "save_frequency")]
)
def test_epochs_take_back_the_steps_of_a_file(yaml_file, one, other):
    def found(*words: str, text: str = f"{one}: 7") -> int | None:
        read = config("--config", str(yaml_file(text)), *words)
        return getattr(getattr(read, OPTIONS[one].section), one)

    assert found() == 7
    assert found(OPTIONS[other].flag, "2") is None
    assert found(text=f"{one}: 7\n{other}: 2") == 7
    with pytest.raises(ValueError, match=f"^{OPTIONS[one].flag} must come without {OPTIONS[other].flag}, got both"):
        found(OPTIONS[other].flag, "2", OPTIONS[one].flag, "3")


@pytest.mark.parametrize(("given", "kept"), [("amp_bfloat16", "amp_bf16"), ("amp", "amp"), ("fp32", "fp32")])
def test_precisions_by_their_older_names_are_the_same(given, kept):
    assert config("--precision", given).optimization.precision == kept


def test_a_tab_can_be_written_as_shells_hand_it_over():
    assert config("--csv-separator", r"\t").data.csv_separator == "\t"
    assert config("--csv-separator", ",").data.csv_separator == ","


# ---- YAML


def test_yaml_is_read_by_the_type_of_the_field(yaml_file):
    text = "lr: 1e-3\neps: 1\nname: no\nseed: 010\nlogs: 2026-01-01\nlock_image: yes\nwarmup: null\nval_steps: ~\n"
    assert read_yaml(yaml_file(text)) == {
        "lr": 1e-3,
        "eps": 1.0,
        "name": "no",
        "seed": 10,
        "logs": "2026-01-01",
        "lock_image": True,
        "warmup": None,
        "val_steps": None,
    }


def test_yaml_may_have_sections_and_keys_without_one(yaml_file):
    text = "data:\n  workers: 0\nlr: 1.0\nloss:\n  loss: siglip\nmodel: small\nevaluation:\n"
    assert read_yaml(yaml_file(text)) == {"workers": 0, "lr": 1.0, "loss": "siglip", "model": "small"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_changes_nothing(yaml_file, text):
    assert read_yaml(yaml_file(text)) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: fast", "line 1: lr must be a number, at least 0, got 'fast'."),
        ("\n\nlr: -1", "line 3: lr must be a number, at least 0, got -1.0."),
        ("steps: 1.5", "line 1: steps must be a whole number, at least 1, got '1.5'."),
        ("workers: null", "line 1: workers must be a whole number, at least 0 and at most 1024, got None."),
        ("lock_image: 1", "line 1: lock_image must be true or false, got '1'."),
        ("loss: dense", "line 1: loss must be one of clip, siglip, infonce, got 'dense'."),
        ("loss:", "line 1: loss must be one of clip, siglip, infonce, got None."),
        ("lr: [1, 2]", "line 1: lr must be a number, at least 0, got a list."),
        ("lr: {a: 1}", "line 1: lr must be a number, at least 0, got keys and values."),
        ("global_batch: 3", "line 1: global_batch is not known. Perhaps global_batch_size is meant."),
        ("qqqq: 3", "line 1: qqqq is not known. Perhaps "),
        ("optimisation: {lr: 1}", "line 1: optimisation is not known. Perhaps optimization is meant."),
        ("optimization: {lrr: 1}", "line 1: lrr is not known. Perhaps lr is meant."),
        ("optimization: fast", "line 1: optimization must be made of keys and values, got 'fast'."),
        ("lr: 1\nlr: 2", "line 2: lr is there twice. Keep one."),
        ("lr: 1\noptimization:\n  lr: 2", "line 3: lr is there twice. Keep one."),
        ("run: {seed: 1}\nrun: {name: a}", "line 2: run is there twice. Keep one."),
        ("batch_size: 3", "line 1: batch_size is not a key here. It means per GPU elsewhere. Use --global-batch-size"),
        ("optimization: {batch_size: 3}", "line 1: batch_size is not a key here. It means per GPU elsewhere."),
        ("accum-freq: 3", "line 1: accum-freq is not a key here. Use --chunk-size"),
        ("- lr", "line 1: the file must be made of keys and values, got a list."),
        ("lr", "line 1: the file must be made of keys and values, got 'lr'."),
        ("[a]: 1", "line 1: a key must be a word."),
        ("name: !!python/name:os.system ''", "line 1: name must be text that is not empty, got a tag "),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_line_key_rule_and_value(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(ValueError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}, {message}")


def test_yaml_makes_no_objects(yaml_file, tmp_path):
    made = tmp_path / "made"
    with pytest.raises(ValueError, match="a tag"):
        read_yaml(yaml_file(f"name: !!python/object/apply:os.mkdir ['{made}']"))
    assert not made.exists()


@pytest.mark.parametrize(("content", "message"), [(b"a: [", "must be YAML"), (b"\xff\xfe\x00\xd8", "must be YAML")])
def test_a_file_that_is_not_yaml_is_refused(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        config("--config", str(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ValueError, match=f"--config must be a file that can be read, got {path}: "):
            config("--config", str(path))


# ---- refused by name


def test_nothing_that_is_refused_by_name_exists():
    assert not set(REFUSED) & set(parser()._option_string_actions)


def test_every_flag_of_open_clip_is_one_here_or_refused_by_name():
    source = Path(find_spec("open_clip_train").origin).with_name("params.py").read_text()
    flags = set(re.findall(r'"(--[a-z0-9-]+)"', source))
    assert len(flags) > 80
    assert flags <= set(REFUSED) | set(parser()._option_string_actions)


def test_a_cooldown_has_a_length_and_a_schedule():
    for words in (["--epochs-cooldown", "2"], ["--lr-scheduler", "const-cooldown"]):
        with pytest.raises(ValueError, match="--epochs-cooldown must come with --lr-scheduler const-cooldown"):
            config(*words)


def test_advice_names_flags_that_exist():
    named = {word.strip(".,:") for advice in REFUSED.values() for word in advice.split() if word.startswith("--")}
    assert named <= set(parser()._option_string_actions)
    assert {"--global-batch-size", "--chunk-size"} <= named


# ---- what goes together


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": Data()}, "--train-data must be given. --train-data icons needs no files."),
        (
            {"data": Data("a::b", train_data_upsampling_factors="1::2")},
            "--train-data-upsampling-factors must come with --dataset-resampled, got it without.",
        ),
        (
            {"data": Data("a.csv"), "run": Run(logs="s3://bucket/logs")},
            "--logs-dir must be a local folder, got s3://bucket/logs.",
        ),
        ({"data": Data("a.csv", csv_separator="ab")}, "--csv-separator must be one character, got 'ab'."),
        (
            {"loss": Loss(init_logit_scale=200.0)},
            "--init-logit-scale must be at most --max-logit-scale, got 200.0 and 100.0.",
        ),
        ({"evaluation": Evaluation(classnames="c")}, "--classnames must come with --zeroshot-data, got 'c' without."),
        ({"evaluation": Evaluation(templates="t")}, "--templates must come with --zeroshot-data, got 't' without."),
        ({"optimization": Optimization(chunk_size=0)}, "--chunk-size must be a whole number, at least 1, got 0."),
        ({"run": Run(log_every_n_steps=0)}, "--log-every-n-steps must be a whole number, at least 1, got 0."),
    ],
)
def test_settings_that_do_not_go_together_are_refused(sections, message):
    whole = replace(Config(data=Data("icons")), **sections)
    with pytest.raises(ValueError) as caught:
        check(whole)
    assert str(caught.value).startswith(message)


def test_settings_that_go_together_are_not_refused():
    check(
        Config(
            data=Data("a::b", dataset_resampled=True, train_data_upsampling_factors="1::2"),
            evaluation=Evaluation(zeroshot_data="z", classnames="c", templates="t"),
        )
    )


def test_only_training_needs_training_data():
    check(Config(), training=False)
    assert read_config({}, training=False) == Config()


def test_kinds_are_checked_too():
    with pytest.raises(TypeError, match="--steps must be a whole number, at least 1, got True"):
        check(Config(data=Data("icons"), optimization=Optimization(steps=True)))


# ---- what is kept


@given(configs())
@settings(max_examples=50, deadline=None)
def test_a_saved_configuration_is_read_back_exactly(whole):
    mapping = asdict(whole)
    assert from_mapping(mapping) == whole
    assert from_mapping(yaml.safe_load(to_yaml(whole))) == whole


@given(configs())
@settings(max_examples=50, deadline=None)
def test_params_yaml_can_be_given_as_config(tmp_path_factory, whole):
    path = tmp_path_factory.getbasetemp() / "params.yaml"
    path.write_text(to_yaml(whole), encoding="utf-8")
    read = read_yaml(path)
    assert read == {name: value for values in asdict(whole).values() for name, value in values.items()}


@pytest.mark.parametrize(
    "name", ["\x85", "a\u2028b", "\u2029 ", "\t", "图像", "a\nb", " a", "'", '"', "#", "\ufeff", "x" * 200]
)
def test_odd_names_are_kept_exactly(tmp_path, name):
    whole, path = Config(run=Run(name=name)), tmp_path / "params.yaml"
    path.write_text(to_yaml(whole), encoding="utf-8")
    assert from_mapping(yaml.safe_load(to_yaml(whole))) == whole
    assert read_yaml(path)["name"] == name


def test_names_in_any_language_stay_readable():
    assert "name: 图像\n" in to_yaml(Config(run=Run(name="图像")))


def test_a_saved_configuration_that_knows_less_keeps_defaults():
    assert from_mapping({"optimization": {"lr": 1}}) == Config(optimization=Optimization(lr=1.0))
    assert type(from_mapping({"optimization": {"lr": 1}}).optimization.lr) is float


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"optimisation": {}}, "from_mapping: optimisation must be a section with its names, got ."),
        ({"run": {"sed": 1}}, "from_mapping: run must be a section with its names, got sed."),
        ({"run": {"seed": "1"}}, "from_mapping: seed must be a whole number, at least 0 and below 9223"),
    ],
)
def test_a_saved_configuration_of_something_else_is_refused(mapping, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        from_mapping(mapping)
    assert str(caught.value).startswith(message)


# ---- mistakes


def from_this_package() -> None:
    read_config({})


def from_another_package() -> None:
    raise ValueError("not the user's")


def test_what_this_package_refuses_is_said_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"), usage_errors("train"):
        from_this_package()
    assert capsys.readouterr().err == (
        "megabatch train: error: --train-data must be given. --train-data icons needs no files.\n"
    )


def test_a_file_that_cannot_be_opened_is_said_in_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"), usage_errors("eval"):
        (tmp_path / "none").read_text()
    assert capsys.readouterr().err.startswith("megabatch eval: error: [Errno 2] No such file")


def test_errors_of_other_packages_keep_their_traceback():
    with pytest.raises(ValueError, match="not the user's"), usage_errors("train"):
        from_another_package()
