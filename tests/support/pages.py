"""Pages of the documentation as blocks: what each is, why it is not run, as what it is saved; its maker."""

import importlib.util
import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks", "commands", "name_of", "table_rows"]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run:(?P<reason>.*?)-->\n+)?```(?P<kind>.*?)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
SAVED = re.compile(r"[Ss]ave\s+this\s+as\s+`([^`]+)`[^`]*\Z")


@dataclass(frozen=True)
class Block:
    """A block: its language, its text, the reason why it is not run (None if it is), the file that it is."""

    kind: str
    text: str
    reason: str | None
    file: str | None


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """Return the blocks of a page in order."""
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for match in BLOCK.finditer(text):
        saved = SAVED.search(text[end : match.start()])
        reason = None if match["reason"] is None else match["reason"].strip()
        found.append(Block(match["kind"], match["text"], reason, saved and saved[1]))
        end = match.end()
    return found


def commands(block):
    """Return the commands of a console block as lists of words; comments are left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def table_rows(page, mark):
    """Return the cells of the body of the table below the comment `<!-- table: mark -->` of a page."""
    _, _, after = page.read_text(encoding="utf-8").partition(f"<!-- table: {mark} -->\n\n")
    body = itertools.takewhile(lambda line: line.startswith("|"), after.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def generator():
    """Return the module of the script that writes generated files and pages."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
