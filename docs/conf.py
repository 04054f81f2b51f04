"""Sphinx settings of the documentation: `make docs` writes it to build/docs."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import megabatch

project = "megabatch"
author = "The megabatch authors"
copyright = author
version = release = megabatch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["results"]
html_theme = "furo"
html_title = f"megabatch {release}"
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # an included page begins with its own title

default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and types are in the text
autodoc_mock_imports = ["sentence_transformers", "pytorch_metric_learning"]
python_maximum_signature_line_length = 100
python_trailing_comma_in_multi_line_signatures = False
napoleon_numpy_docstring = False


def code_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings show code as an indented paragraph, which Sphinx would take for a quotation."""
    marked: list[str] = []
    in_code = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not in_code and marked and not marked[-1]:
            marked += [f".. code-block:: {'text' if what == 'module' else 'python'}", ""]
            in_code = True
        elif line and not indented:
            in_code = False
        marked.append(line)
    lines[:] = marked


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", code_blocks, priority=400)  # before napoleon reads the sections
