"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import dtorch_ops

DOCS = Path(__file__).resolve().parent

project = "dtorch_ops"
author = "the authors of dtorch_ops"
version = release = dtorch_ops.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "dtorch_ops"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["sides.css"]

autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

# Every reference must lead somewhere, but for those to other projects, whose lists of names would
# have to be fetched from their sites.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(asyncio|collections\.abc|concurrent\.futures|logging|os|torch|typing)(\..*)?"),
    (r"py:class", r"(dtorch_ops\.\w+\.)?[FST]|Source|Tensor|TorchFuture|Work"),
    (r"py:class", r"dtorch_ops\.shared_memory\.Stats"),
]

# ---- Links that leave this folder ---------------------------------------------------------------
# They are written for a reader of the repository. What one of the pages includes is that page
# here; links to other files give the file.

_INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+\.md)(?=[)#])")


def _included() -> dict[Path, Path]:
    """The page that shows each file that lies elsewhere in the repository."""
    found = {}
    for page in DOCS.rglob("*.md"):
        for name in _INCLUDE.findall(page.read_text()):
            found[(page.parent / name).resolve()] = page
    return found


_PAGES = _included()


def _to_pages(text: str, folder: Path) -> str:
    """``text`` of a file in ``folder``, with links to what is shown here."""

    def target(link: re.Match[str]) -> str:
        file = (folder / link[1]).resolve()
        shown = _PAGES.get(file, file)
        return f"/{shown.relative_to(DOCS)}" if shown.is_relative_to(DOCS) else link[1]

    return _LINK.sub(target, text)


def _read_page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _to_pages(source[0], Path(app.env.doc2path(name)).parent)


def _read_included(app: Sphinx, file: Path, page: str, source: list[str]) -> None:
    source[0] = _to_pages(source[0], (Path(app.srcdir) / file).resolve().parent)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
