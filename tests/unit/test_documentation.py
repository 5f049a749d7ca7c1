"""The code in the documentation runs as it stands, page by page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)")
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_python_blocks_of_a_page_run_in_order(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {"__name__": "documentation"}
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_every_link_inside_the_project_leads_somewhere():
    links = [(page, target) for page in PAGES for target in LINK.findall(page.read_text())]
    assert not [(name(page), target) for page, target in links if not (page.parent / target).exists()]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site and what the builder said."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def test_the_site_is_built_without_a_warning(site):
    assert "WARNING" not in site[1]


def test_no_page_of_the_site_loads_anything_from_another_host(site):
    pages = {path: path.read_text() for path in site[0].rglob("*.html")}
    assert len(pages) > len(PAGES) / 2
    assert not {str(path): LOADED.findall(text) for path, text in pages.items() if LOADED.findall(text)}
    styles = {str(path): path.read_text() for path in site[0].rglob("*.css")}
    assert not [
        path for path, text in styles.items() if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", text)
    ]
    # the theme would fetch the renderer of diagrams, so there are none
    assert not [str(path) for path, text in pages.items() if 'class="mermaid' in text]


def test_every_formula_is_mathml(site):
    pages = {path.parent.name: path.read_text() for path in site[0].rglob("*.html")}
    assert pages["performance-model"].count("<math") > 50
    assert not [name for name, text in pages.items() if "arithmatex" in text]
