"""Links of the documentation lead somewhere, commands and Python run, pictures can be read."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import megabatch
from megabatch import cli
from studies import page as study_page
from tools import tables

from .ranks import PATIENCE

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
PAGES += sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "results"
)
WITH_COMMANDS = [page for page in PAGES if page != "CHANGELOG.md"]  # its commands are those of their time
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))

# Pages whose Python is run as it stands, and the names that it may use.
WITH_PYTHON = ["README.md", "docs/quickstart.md", "docs/losses.md", "docs/evaluation.md"]

FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ASIDE = re.compile(r"\s#.*$")
ELLIPSIS = "…"


# ---- reading Markdown


def prose(text: str) -> str:
    """Without blocks of code."""
    return INDENTED.sub("\n", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Targets of all links and pictures, but for those to the web."""
    return [target for target in LINK.findall(SPAN.sub("", prose(text))) if not target.startswith("http")]


@cache
def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them: lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
    before = [plain[:place].count(name) for place, name in enumerate(plain)]
    return {f"{name}-{times}" if times else name for name, times in zip(plain, before, strict=True)}


def lost(page: Path, text: str) -> list[str]:
    """Links that lead nowhere."""
    broken = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


# ---- reading commands


class Typed(NamedTuple):
    """A command as it stands on a page: the words before the first flag, and all that follows."""

    module: str
    words: tuple[str, ...]
    rest: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.module, *self.words, *self.rest])


def lines(text: str) -> Iterator[str]:
    """All that stands in code: lines of blocks, those that go on in the next one joined, and spans."""
    for block in (*FENCE.finditer(text), *INDENTED.finditer(FENCE.sub("", text))):
        yield from (ASIDE.sub("", line) for line in block[0].replace("\\\n", " ").splitlines())
    yield from (span.replace("\n", " ") for span in SPAN.findall(prose(text)))


def commands(text: str) -> list[Typed]:
    return [typed for line in lines(text) if (typed := read_command(line))]


def read_command(line: str) -> Typed | None:
    """`megabatch …`, also of srun, or `-m megabatch…` of python and torchrun."""
    try:
        words = shlex.split(line)
    except ValueError:  # an apostrophe: no shell would take it
        return None
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words.pop(0)
    if words[:1] == ["srun"]:
        words = words[words.index("megabatch") :]
    if not words or words[0] not in ("megabatch", "python", "torchrun", ".venv/bin/python"):
        return None
    module, rest = words[0], words[1:]
    if module != "megabatch":
        if "-m" not in rest or not rest[rest.index("-m") + 1].startswith(("megabatch", "tools.")):
            return None
        module, *rest = rest[rest.index("-m") + 1 :]
    if rest[:1] == ["--"]:
        rest.pop(0)
    flags = next((place for place, word in enumerate(rest) if word.startswith(("-", ELLIPSIS))), len(rest))
    return Typed(module, tuple(rest[:flags]), tuple(rest[flags:]))


def answer(*words: str) -> tuple[bool, str]:
    """Whether `megabatch words` is refused, and what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            code: object = cli.main(words)
        except SystemExit as end:
            code = end.code
    return bool(code), printed.getvalue()


@cache
def help_text(words: tuple[str, ...]) -> str:
    """Of a command; empty where there is none."""
    refused, text = answer(*words, "--help")
    return "" if refused else text


def names(text: str, flag: str) -> bool:
    return re.search(rf"{flag}(?![\w-])", text) is not None


def trouble_with(typed: Typed) -> str:
    """Why a command cannot be typed; nothing where it can."""
    if typed.module != "megabatch":
        return "" if is_program(typed.module) else f"{typed.module} is no program"
    text = help_text(typed.words)
    if not text:
        return f"there is no command {' '.join(typed.words)}"
    flags = [word.partition("=")[0] for word in typed.rest if word.startswith("--")]
    unknown = [flag for flag in flags if not names(text, flag)]
    if unknown:
        return f"{' '.join(typed.words)} has no {', '.join(unknown)}"
    if not flags or not typed.words or ELLIPSIS in " ".join(typed.rest):
        return ""  # not the whole command, which may have flags that must be given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of(typed.words), "main", lambda options: 0, raising=False)
        refused, said = answer(*typed.words, *typed.rest)
    return said.splitlines()[-1] if refused else ""


def module_of(words: tuple[str, ...]) -> ModuleType:
    """Of a command, or of a command's command."""
    module: Any = cli
    for word in words:
        module = import_module(module.COMMANDS[word][0])
        if not hasattr(module, "COMMANDS"):
            break
    return module


def is_program(module: str) -> bool:
    path = (ROOT if module.startswith("tools.") else ROOT / "src") / Path(*module.split("."))
    file = path.with_suffix(".py")
    return (path / "__main__.py").exists() or (file.exists() and '__name__ == "__main__"' in file.read_text())


# ---- the tests


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert lost(ROOT / page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_can_be_typed_as_it_stands(page: str) -> None:
    found = {str(typed): trouble_with(typed) for typed in commands((ROOT / page).read_text())}
    assert {typed: trouble for typed, trouble in found.items() if trouble} == {}


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_make_target_exists(page: str) -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = [re.fullmatch(r"make ([\w-]+)\b.*", line.strip()) for line in lines((ROOT / page).read_text())]
    assert {target[1] for target in found if target} <= known


def test_every_flag_on_the_pages_of_the_trainer_is_one_of_its_flags() -> None:
    pages = [(ROOT / f"docs/{name}.md").read_text() for name in ("training", "data", "evaluation")]
    spans = SPAN.findall(prose("\n".join(pages)))
    flags = {flag for span in spans if span.startswith("--") for flag in re.findall(r"--[\w-]+", span)}
    known = help_text(("train",)) + help_text(("eval",)) + " ".join(module_of(("train",)).REFUSED)
    assert len(flags) > 20
    assert {flag for flag in flags if not names(known, flag)} == set()


def test_the_readme_leads_to_every_page() -> None:
    """The index of the site does too, or it would not build."""
    reached = set(links((ROOT / "README.md").read_text()))
    copies = {f"docs/{page.lower()}" for page in PAGES if "/" not in page}  # docs/security.md includes SECURITY.md
    assert set(PAGES) - copies <= {*reached, "README.md", "docs/index.md"}


def test_the_pages_are_short() -> None:
    """Ten thousand words, without the measured tables and those of the study."""
    texts = [(ROOT / page).read_text() for page in PAGES if page.startswith("docs/")]
    pages = [study_page.BLOCK.sub("", tables.BLOCK.sub("", text)) for text in texts]
    assert sum(len(page.split()) for page in pages) <= 10_000


def names_of_pages() -> dict[str, Any]:
    """What the Python of the pages uses and does not make."""
    torch.manual_seed(0)
    image, text, query, view1, view2, features = (normalize(torch.randn(48, 8), dim=1) for _ in range(6))
    key, negatives = (normalize(torch.randn(64, 8), dim=1) for _ in range(2))
    leaves = {"image_features": image, "text_features": text, "query": query, "key": key, "negatives": negatives}
    leaves |= {"view1": view1, "view2": view2, "features": features, "queue": negatives.clone()}
    leaves |= {"logit_scale": torch.tensor(10.0), "logit_bias": torch.tensor(-5.0)}
    given: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
    functional = torch.nn.functional
    given |= {"positives": torch.randperm(64)[:48], "labels": torch.arange(48) % 7, "model": torch.nn.Linear(2, 2)}
    given |= {"torch": torch, "mb": megabatch, "cross_entropy": functional.cross_entropy}
    return given | {"logsigmoid": functional.logsigmoid, "log_softmax": functional.log_softmax}


def python_of(page: str) -> list[str]:
    return PYTHON.findall((ROOT / page).read_text())


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(page: str) -> None:
    given = names_of_pages()
    blocks = python_of(page)
    assert blocks
    for block in blocks:
        exec(block, given)


LOSS_SECTIONS = ["CLIP", "SigLIP", "InfoNCE", "NT-Xent (SimCLR)", "SupCon"]


@pytest.mark.parametrize("section", LOSS_SECTIONS)
def test_a_loss_equals_the_torch_beside_it(section: str) -> None:
    text = (ROOT / "docs/losses.md").read_text()
    ours, torchs = PYTHON.findall(text.partition(f"\n## {section}\n")[2].partition("\n## ")[0])
    assert "mb." in ours
    assert "mb." not in torchs
    given = names_of_pages()
    leaves = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    found = []
    for block in (ours, torchs):
        exec(block, given)
        found.append([given["loss"], *torch.autograd.grad(given["loss"], leaves, allow_unused=True)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_every_loss_has_its_section() -> None:
    text = (ROOT / "docs/losses.md").read_text()
    losses = [name for name in megabatch.__all__ if name.endswith("_loss")]
    assert len(losses) == len(LOSS_SECTIONS)
    assert [name for name in losses if f"loss = mb.{name}(" not in text] == []


def test_the_versions_of_tools_are_those_of_the_extras() -> None:
    stated = dict(
        re.findall(r"^\| ([\w-]+).* \| `([^`]+)` \| \d", (ROOT / "docs/drop-ins.md").read_text(), re.MULTILINE)
    )
    asked = re.findall(r'"([\w-]+)(?:\[\w+\])?(>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(stated) == 6
    assert {(name, versions) for name, versions in asked if name in stated} == set(stated.items())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_can_be_read_on_any_background_and_by_a_screen_reader(picture: Path) -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(picture).getroot()
    assert root.tag == f"{svg}svg"
    assert root.get("viewBox")
    assert [child.tag for child in root[:2]] == [f"{svg}title", f"{svg}desc"]
    _, _, width, height = root.attrib["viewBox"].split()
    ground = next(child for child in root if child.tag == f"{svg}rect")
    assert (ground.get("width"), ground.get("height"), ground.get("fill")) == (width, height, "#FFFFFF")
    assert [text for text in root.iter(f"{svg}text") if not text.text] == []
    assert {element.tag.removeprefix(svg) for element in root.iter()}.isdisjoint({"script", "image", "foreignObject"})


# What readers stumbled over, and what to write instead.
PRIVATE_ENGLISH = {
    "goes on to the bit": "resumes bit-exactly",
    "to the bit": "bit-exactly, bit for bit",
    "halves": "bf16/fp16",
    "the field": "other libraries",
    "every tool": "other libraries",
    "whom": "a sentence with another subject",
    "owed": "prior work",
    "tells": "reports, shows",
    "is told": "is set to",
    "takes part": "is a contender",
    "nobody": "no one, or passive",
    "everybody": "all",
    "of its own accord": "by default",
    "stands in for": "replaces",
    "by side effect": "as a side effect",
    "what is no": "other",
    "so many": "the number",
}
EXEMPT = ("docs/changelog.md", "CHANGELOG.md")  # words of their time


@pytest.mark.parametrize("page", [page for page in PAGES if page not in EXEMPT])
def test_a_page_is_in_plain_english(page: str) -> None:
    assert private_english(prose((ROOT / page).read_text())) == {}


@pytest.mark.parametrize("name", megabatch.__all__)
def test_a_docstring_is_in_plain_english(name: str) -> None:
    assert private_english(getattr(megabatch, name).__doc__) == {}


def private_english(text: str) -> dict[str, str]:
    text = " ".join(text.lower().split())
    return {words: better for words, better in PRIVATE_ENGLISH.items() if re.search(rf"\b{words}\b", text)}


# ---- every command is run, smaller than it stands, or named here

# Words that make a command small: flags given twice count as given last.
SMALLER = {
    "check": "--device cpu --quick --backend eager --only clip_loss",
    "plan": "",
    "bench list": "",
    "bench loss": "--quick --losses clip --contenders megabatch",
    "bench peers": "--quick --losses clip --contenders megabatch",
    "bench paper": "--quick --contenders ring",
    "bench ring": "--quick --contenders ring",
    "bench step": "--quick --contenders megabatch_whole",
    "bench chunked": "--quick --contenders megabatch",
    "bench gradients": "--ranks 2 --rows 8 --losses clip --packages megabatch",
    "train": "--global-batch-size 64 --train-num-samples 128 --workers 0 --val-frequency 0",
    "eval": "",
    "export": "",
    "report": "",
    "index": "",
    "bench data": "--quick",
}
# Those that no test runs, by how they begin, and why.
NOT_RUN = {
    "torchrun": "several GPUs",
    ".venv/bin/torchrun": "several GPUs",
    "srun": "a cluster",
    "megabatch bench step --model ViT-B-32": "minutes on a GPU",
    "megabatch export": "a model of open_clip or Hugging Face; tests/test_train_load.py",
    "python -m tools.kernels": "minutes to hours of compiling, --tune a GPU; tests/test_kernels.py compiles parts",
    "python -m tools.mixing": "half a minute; tests/test_train_order.py compares its figures with the page",
    "python -m tools.tables run": "minutes to hours on a quiet machine",
    "python -m tools.tables write": "writes into pages; tests/test_tables.py checks that nothing would change",
    "python -m studies.page": "writes into a page; tests/test_study.py checks that nothing would change",
    "make": "sets up an environment; it runs what the tests and the workflows run",
    "pip": "installs",
    "git": "downloads",
    "python -m pytest": "runs tests",
    ".venv/bin/python -m pytest": "runs tests",
}
PROGRAMS = ("megabatch", "python", ".venv/bin/python", ".venv/bin/torchrun", "torchrun", "srun", "make", "pip", "git")
MENTIONED = {f"megabatch {name}" for name in ("train", "eval", "export", "report", "index", "bench", "plan")}
FIRST_RUN = "--epochs 10 --name first"  # the run that other commands evaluate, export and resume


def shell_lines() -> list[str]:
    """Every command of every page, once."""
    found = [" ".join(line.split()) for page in WITH_COMMANDS for line in lines((ROOT / page).read_text())]
    return [line for line in dict.fromkeys(found) if line.partition(" ")[0] in PROGRAMS and line not in MENTIONED]


def begins(line: str, start: str) -> bool:
    return f"{line} ".startswith(f"{start} ")


def smaller(line: str) -> tuple[str, ...]:
    """The arguments of python to run a command with."""
    typed = read_command(line)
    if typed is None:
        return ()
    kind = next((kind for kind in SMALLER if begins(" ".join(typed.words), kind)), "")
    as_it_stands = {"--resume", "--help"} & set(typed.rest)
    more = [] if as_it_stands or not kind else SMALLER[kind].split()
    more += ["--steps", "2"] if "--steps" in typed.rest else []
    return ("-m", typed.module, *typed.words, *typed.rest, *more)


SHELL = [line for line in shell_lines() if " " in line]
RUN = {smaller(line): line for line in SHELL if not any(begins(line, start) for start in NOT_RUN)}


def test_every_command_is_run_or_named_as_one_that_is_not() -> None:
    assert () not in RUN, RUN[()]
    assert [start for start in NOT_RUN if not any(begins(line, start) for line in SHELL)] == []
    assert len([line for line in RUN.values() if FIRST_RUN in line]) == 1


# For what imports open_clip, whose torchvision may not fit the machine.
WITH_TORCHVISION = "from tests.shims import import_torchvision; import_torchvision()\n"
WITH_TORCHVISION += "import sys; from megabatch.cli import main; sys.exit(main(sys.argv[1:]))"


# Runs one command after the other, each as `python -m` does: most of their time would go into importing torch.
SHELL_OF_COMMANDS = """
import json, os, runpy, sys, traceback
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open("printed", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), 1)
os.dup2(1, 2)
for line in sys.stdin:
    os.truncate("printed", 0)
    module, *sys.argv[1:] = json.loads(line)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(json.dumps(code), file=answers)
"""


class Commands:
    """A process that runs commands in a folder. What imports open_clip has one of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(folder)}
        self.how: dict[str, Any] = {"cwd": folder, "text": True, "env": environment}
        self.shell = subprocess.Popen(
            [sys.executable, "-c", SHELL_OF_COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **self.how
        )

    def run(self, words: tuple[str, ...]) -> None:
        if "imagenet" in words:
            command = [sys.executable, "-c", WITH_TORCHVISION, *words[2:]]
            ended = subprocess.run(command, capture_output=True, check=False, **self.how)
            assert ended.returncode == 0, ended.stderr or ended.stdout
            return
        assert words[0] == "-m"
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        print(json.dumps(words[1:]), file=self.shell.stdin, flush=True)
        answer = self.shell.stdout.readline()
        assert answer.strip() in ("0", "null"), (self.folder / "printed").read_text()

    def end(self) -> None:
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.close()
        assert self.shell.wait(PATIENCE) == 0
        self.shell.stdout.close()


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """A server of S3, which commands find by their environment."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "none")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield
    server.stop()


def fill_bucket(folder: Path) -> None:
    import boto3

    from megabatch.bench.data import write_shard

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for number in range(4):
        write_shard(folder / "shard.tar", 70, number)
        client.upload_file(str(folder / "shard.tar"), "bucket", f"{number:05}.tar")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, store: None) -> Iterator[Commands]:
    """Commands in a folder with the data that the pages name, and their first training run."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pages")
    pictures = ["photos/cat/1.png", "photos/dog/2.png", "imagenet/val/n01440764/3.png", "coco/val2014/4.png"]
    for name in pictures:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (len(name), 90, 200)).save(folder / name)
    rows = [f"{name}\tpicture {number}\n" for number, name in enumerate(pictures)]
    (folder / "held_out.csv").write_text("filepath\ttitle\n" + "".join(rows))
    (folder / "names.txt").write_text("cat\ndog\n")
    (folder / "prompts.txt").write_text("a photo of a {}.\n")
    captions = [{"image_id": 1, "caption": "a picture"}, {"image_id": 1, "caption": "a blue picture"}]
    coco = {"images": [{"id": 1, "file_name": "4.png"}], "annotations": captions}
    (folder / "coco/val2014/coco_test_karpathy.json").write_text(json.dumps(coco))
    fill_bucket(folder)
    found = Commands(folder)
    found.run(next(words for words, line in RUN.items() if FIRST_RUN in line))
    yield found
    found.end()


@pytest.mark.parametrize("line", [line for line in RUN.values() if FIRST_RUN not in line])
def test_a_command_of_a_page_runs(line: str, workplace: Commands) -> None:
    workplace.run(smaller(line))


def test_a_command_that_fails_is_found(workplace: Commands) -> None:
    for words, said in ((("bench", "nothing"), "invalid choice: 'nothing'"), (("plan", "--gpus", "0"), "--gpus")):
        with pytest.raises(AssertionError, match=said):
            workplace.run(("-m", "megabatch", *words))
    workplace.run(("-m", "megabatch", "--version"))


# ---- the readers can tell right from wrong


def test_private_english_is_found() -> None:
    assert private_english("A run goes on\nto the bit.") == {
        words: PRIVATE_ENGLISH[words] for words in ("goes on to the bit", "to the bit")
    }
    assert private_english("A run resumes bit-exactly.") == {}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# One, two\n\n## Again\n\n## Again\n\n## Again\n\n```\n# no heading\n```\n")
    text = """\
# Here

[good](other.md), [good](other.md#one-two), [good](other.md#again-2), [good](#here), [web](https://example.org/x)
![bad](picture.svg), [bad](other.md#three), [bad](#there), [bad](other.md#no-heading)
[bad](other.md#again-3), `[code](nowhere.md)`

    [code](nowhere.md)
"""
    page.write_text(text)
    assert lost(page, text) == ["picture.svg", "other.md#three", "#there", "other.md#no-heading", "other.md#again-3"]


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("`megabatch`", ""),
        ("`megabatch check --quick --only clip_loss`", ""),
        ("`megabatch check --quikc`", "check has no --quikc"),
        ("`megabatch check\n--quikc`", "check has no --quikc"),
        ("`megabatch --version`", ""),
        ("`megabatch bench nothing --quick`", "there is no command bench nothing"),
        ("`megabatch bench --json out.json`", "invalid choice: 'out.json'"),
        ("`megabatch chekc`", "there is no command chekc"),
        ("`megabatch train --lr …`", ""),
        ("`megabatch train --loss clap --lr …`", ""),
        ("`megabatch train --loss clap`", "--loss: must be one of clip, siglip, infonce, got 'clap'"),
        ("`megabatch train --log`", "train has no --log"),
        ("`TRITON_INTERPRET=1 megabatch check --slow`", "check has no --slow"),
        ("    megabatch train --epochs ten    # --many\n", "--epochs: must be a whole number, at least 1, got 'ten'"),
        ("    megabatch train \\\n        --many 3\n", "train has no --many"),
        ("```\ntorchrun --nproc-per-node 2 -m megabatch -- train --many 3\n```", "train has no --many"),
        ("```\ntorchrun --nproc-per-node 2 -m megabatch.integrations.open_clip --many 3\n```", ""),
        ("`python -m megabatch check --many`", "check has no --many"),
        ("`python -m megabatch.tiling`", "megabatch.tiling is no program"),
        ("`python -m megabatch.nothing.at_all`", "megabatch.nothing.at_all is no program"),
    ],
)
def test_a_command_that_cannot_be_typed_is_found(text: str, trouble: str) -> None:
    (typed,) = commands(text)
    found = trouble_with(typed)
    assert trouble in found
    assert bool(trouble) == bool(found)


@pytest.mark.parametrize(
    "text", ["megabatch trains", "`megabatch.chunked`", "`import megabatch as mb`", "`python -m x`"]
)
def test_what_is_no_command_is_left_alone(text: str) -> None:
    assert commands(text) == []
