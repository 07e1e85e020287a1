"""The documentation's site: `make docs` builds it into out/site."""

import re
from importlib.metadata import version as version_of
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

project = "spmdzero"
copyright = "the spmdzero authors"
version = release = version_of("spmdzero")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The source is the whole checkout, so that a link works here as it does in the repository.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "notebooks/**"]
exclude_patterns = [".*", "out", "build", "docs/root", "docs/theme"]

html_theme = "furo"
html_title = f"spmdzero {version}"
html_extra_path = ["root"]
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# The notebooks are executed, and compared with what is committed, by tests/notebooks.
nb_execution_mode = "off"
myst_heading_anchors = 3

# Docstrings write code in single backticks.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints = "signature"
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
# The engine alone has two hundred.
toc_object_entries = False


def _one_name_a_line(app: Sphinx, *what: Any) -> None:
    # Napoleon takes "audit, doctor: text" below "Attributes:" for a name with a type.
    lines: list[str] = what[-1]
    together = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)")
    lines[:] = [
        f"{found[1]}{name}: {found[3]}" if found else line
        for line in lines
        for found in [together.match(line)]
        for name in (found[2].split(", ") if found else [""])
    ]


def _is_refused(app: Sphinx, kind: str, name: str, member: Any, *rest: Any) -> bool | None:
    # docs/api_surface.md has them, with what to use in their place.
    return (member.__doc__ or "").startswith("Refused:") or None


def _mark_printed_tables(app: Sphinx, page: nodes.document, name: str) -> None:
    # site.css wraps long lines, which would tear the columns of these apart.
    for block in page.findall(nodes.literal_block):
        if "─" in block.astext():
            block["classes"].append("lined")


def _let_keys_break(
    app: Sphinx, name: str, template: str, context: dict[str, Any], *rest: Any
) -> None:
    # A key of the JSON has no space. Without a place to break it takes the room of its meaning.
    def in_code(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([._=/])(?=\w)", r"\1<wbr>", code[0])

    def in_cell(cell: re.Match[str]) -> str:
        return re.sub(r'(?<=<span class="pre">)[^<]{12,}(?=</span>)', in_code, cell[0])

    if "body" in context:
        context["body"] = re.sub(r"<td>.*?</td>", in_cell, context["body"], flags=re.DOTALL)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", _mark_printed_tables)
    app.connect("html-page-context", _let_keys_break)
    app.connect("autodoc-process-docstring", _one_name_a_line, priority=400)
    app.connect("autodoc-skip-member", _is_refused)
