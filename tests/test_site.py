"""The documentation builds as a site without a warning, all its links lead somewhere, and its picture is up to date."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "docs", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_every_link_of_the_site_leads_somewhere(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("check_site").main(site) == 0, capsys.readouterr().out


def test_every_page_and_every_public_name_is_on_the_site(site: Path) -> None:
    import megabatch

    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    text = (site / "api.html").read_text()
    assert [name for name in megabatch.__all__ if f'id="megabatch.{name}"' not in text] == []


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("other.html", ""),
        ("other.html#here", ""),
        ("other.html#there", "no such anchor"),
        ("nowhere.html", "no such file"),
        ("#here", "no such anchor"),
        ("https://example.org/x", ""),
        ("https://example", "not an address"),
        ("mailto:someone", ""),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, why: str) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1>')
    page = tmp_path / "page.html"
    page.write_text(f'<a href="{link}">link</a>')
    check = tool("check_site")
    assert check.read(page).links == [link]
    assert check.trouble(page, link) == why
    assert check.main(tmp_path) == (1 if why else 0)


def test_picture_and_table_of_the_readme_show_the_results() -> None:
    summary = tool("loss_summary")
    results = json.loads(summary.RESULTS.read_text())
    assert summary.BLOCK.findall(summary.README.read_text()) == [summary.table(results)], "run tools/loss_summary.py"
    assert summary.PICTURE.read_text() == summary.picture(results), "run tools/loss_summary.py"


def test_unknown_addresses_stand_in_one_place() -> None:
    """Invented ones stand nowhere."""
    texts = {
        path: path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *(ROOT / "docs").glob("*.md")]
    }
    invented = [path.name for path, text in texts.items() if "github.com/megabatch" in text or "example.com" in text]
    assert invented == []


def test_the_citation_has_the_version_of_the_package() -> None:
    import megabatch

    assert f"\nversion: {megabatch.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 180
