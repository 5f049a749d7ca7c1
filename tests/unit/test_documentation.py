"""The code in the documentation runs as it stands, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
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
