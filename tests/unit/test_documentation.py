"""The code and the commands of the documentation run as they stand, page by page; the site can be built."""

import codeop
import importlib.util
import io
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import chdir, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib import pyplot
from mkdocs.exceptions import PluginError
from pages import PAGES, ROOT, Block, blocks, commands, name_of

from makespan.cli import main, simulate as _view
from makespan.papers import PAPERS
from makespan.sim import EventKind
from makespan.tables import PROVENANCES, SCHEMAS, schemas_of

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)")
FETCHED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
RUN = {"python", "console"}
KINDS = {*RUN, "yaml", "text"}
ELIDED = r"(?m) \.\.\. |^\.\.\.$|^\[\d+ rows x"  # of a table in pandas
SET_UP = [
    [".", ".venv/bin/activate"],
    ["export", "MAKESPAN_PUBLISHED_DIR=/path/to/a/directory/with/the/published/files"],
]
WITH_CODE = [page for page in PAGES if any(one.kind in RUN and not one.reason for one in blocks(page))]
TRAINING_CODE = (
    r"makespan\.training|import torch|makespan (?:easyscale|oobleck) run|makespan slapo (?:show|verify)"
)
TRAINS = [page for page in WITH_CODE if re.search(TRAINING_CODE, page.read_text())]
TRAINING = pytest.mark.xdist_group("training")
TUTORIALS = sorted((ROOT / "docs/tutorial").glob("*.md"))
PICTURE = "mine.png"  # that a reader of a tutorial draws


def run_command(words):
    """Run a command of the documentation, or what can be run of it in a moment; return what it prints."""
    program, *arguments = words
    if words in SET_UP or program == "snakemake":  # planned in tests/workflow/test_targets.py
        return ""
    if program == "makespan":
        arguments += ["--root", str(ROOT)] if arguments == ["config"] else []
        where = nullcontext()
        if arguments == ["report"]:  # over nothing, since `make` and `snakemake` only plan here
            results = Path("results").resolve()
            results.mkdir(exist_ok=True)
            arguments += ["--results", str(results)]
            where = chdir(ROOT)
        with where:
            done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output
    if program == "python":
        with redirect_stdout(io.StringIO()) as output:
            runpy.run_path(*arguments, run_name="__main__")
        return output.getvalue()
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        return ""
    pytest.fail(f"nothing says how to run {program!r}; mark the block with <!-- not run: REASON -->")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def screens(words, monkeypatch):
    """Return every screen that a command shows in a terminal, and what it prints at last."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(_view, "_FRAME_S", 0.0)
        main([*words[1:], "--pace", "0"], standalone_mode=False)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())


def pattern_of(shown):
    """Return the expression for an output as a page shows it: ``...`` stands for anything."""
    return ".*?".join(re.escape(part) for part in shown.rstrip("\n").split("..."))


def compare_output(page, shown, said):
    """Compare what a page shows with what the code above it prints."""
    said = "\n".join(line.rstrip() for line in said.splitlines())
    is_same = re.search(pattern_of(shown), said, re.DOTALL)
    assert is_same, f"{page.name} shows\n{shown}\nwhere the code above it prints\n{said}"


def compare_picture(page, drawn, is_updated):
    """Compare the picture that the code of a page draws with the one that the page shows."""
    (shown,) = re.findall(r"!\[[^\]]{20,}\]\((\.\./images/.*?\.png)\)", page.read_text())
    shown = page.parent / shown
    if is_updated:
        shutil.copyfile(drawn, shown)
    ours, known = pyplot.imread(drawn), pyplot.imread(shown)
    assert ours.shape == known.shape
    assert np.abs(ours - known).mean() < 0.01, f"{shown} is another picture; pytest --update-golden writes it"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=TRAINING if page in TRAINS else ()) for page in WITH_CODE], ids=name_of
)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, request):
    if page in TRAINS:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names, modules = {"__name__": "documentation"}, set(sys.modules)
    said, found = None, blocks(page)
    for number, (block, below) in enumerate(zip(found, [*found[1:], None], strict=True), start=1):
        is_run = block.kind in RUN and not block.reason
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
        elif block.kind == "python" and is_run:
            with redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, f"{page.name}, block {number}", "exec"), names)
            said = output.getvalue()
            assert not re.search(ELIDED, said), f"a table is printed without its middle:\n{said}"
        elif block.kind == "console" and is_run:
            is_shown = below is not None and below.kind == "text"
            is_watched = is_shown and commands(block)[-1] == ["makespan", "simulate"]
            say = partial(screens, monkeypatch=monkeypatch) if is_watched else run_command
            said = "".join([say(words) for words in commands(block)])
        elif block.kind in RUN:
            said = None
        elif block.kind == "text" and said is not None:
            compare_output(page, block.text, said)
    for path in tmp_path.glob("*.py"):
        assert path.stem not in modules
        sys.modules.pop(path.stem, None)
    if PICTURE in page.read_text():
        pyplot.close("all")
        compare_picture(page, tmp_path / PICTURE, request.config.getoption("--update-golden"))


@pytest.mark.parametrize(
    ("said", "is_same"),
    [
        ("a 1\nb 2.5 s  \nc\n", True),
        ("start\na 1\nb 3\nc\n", True),
        ("a 2\nb 2.5 s\nc\n", False),
        ("", False),
    ],
)
def test_output_that_a_page_shows_is_compared_with_what_its_code_prints(tmp_path, said, is_same):
    with nullcontext() if is_same else pytest.raises(AssertionError, match=r"page\.md shows"):
        compare_output(tmp_path / "page.md", "a 1\nb ...\nc\n", said)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is_and_why_it_is_not_run(page):
    for block in blocks(page):
        assert block.kind in KINDS, block
        assert block.reason is None or len(block.reason.split()) > 3, block
        if block.kind == "console":
            assert commands(block), block
            assert all(re.match(r"\$ |\s|$", line) for line in block.text.splitlines()), block
        if block.kind == "text":
            assert not re.search(r"^(?:\$ |>>> |import |from )", block.text, re.MULTILINE), block
    assert page.read_text().count("```") == 2 * len(blocks(page))
    assert page.read_text().count("<!-- not run:") == sum(one.reason is not None for one in blocks(page))


def test_a_block_knows_why_it_is_not_run_and_where_it_is_saved(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Save this as\n`mine.py`, say:\n\n```python\na = 1\n```\n\n<!-- not run: it takes\nan hour -->\n"
        "```console\n$ makespan live   # long\n```\n\n<!-- not run: -->\n```yaml\n```\n"
    )
    first, second, third = blocks(page)
    assert first == Block("python", "a = 1\n", None, "mine.py")
    assert (second.reason, second.file, commands(second)) == (
        "it takes\nan hour",
        None,
        [["makespan", "live"]],
    )
    assert third.reason == ""


@pytest.mark.parametrize("page", TUTORIALS, ids=name_of)
def test_the_blocks_of_a_tutorial_can_be_pasted_into_the_interactive_interpreter(page):
    """Before Python 3.13 the interpreter reads line by line, and an empty line ends each indented block."""
    for block in blocks(page):
        if block.kind != "python" or block.file is not None:
            continue
        waiting = []
        for line in [*block.text.splitlines(), ""]:
            waiting.append(line)
            if codeop.compile_command("\n".join(waiting), symbol="single") is not None:
                waiting = []
        assert not "".join(waiting), f"{page.name}: incomplete:\n{block.text}"


def test_every_tutorial_for_a_kind_of_user_ends_with_a_picture_of_the_reader():
    pages = {page.stem: page.read_text() for page in TUTORIALS}
    assert sorted(name for name, text in pages.items() if PICTURE in text) == [
        "first-figures",
        "optimise-bert",
        "simulate-a-cluster",
    ]
    assert "results/report.html" in pages["first-run-on-slurm"] and "<svg" in pages["notebook"]


def test_every_link_inside_the_project_leads_somewhere():
    links = [(page, target) for page in PAGES for target in LINK.findall(page.read_text())]
    assert not [(name_of(page), target) for page, target in links if not (page.parent / target).exists()]


# words of columns that mean here what they mean everywhere
ORDINARY = """
abs after all alone at avg before began best bias bytes cores cpu cpus decision decisions delay design
difference
duration err error factor
fastest final finish first found gpu gpus high id identical idle is k kind large last left
lookahead loss low max mean memory method metric model n note p100 paper parameter pct per policy predicted
ratio reason reference repeats rows run s samples scheduler scope seed seeds seq service sha256 share size
simulations slowest start status std submit t4 threads time to total v100 validate value
"""


@pytest.fixture(scope="module")
def defined():
    """Return the terms of the glossary in lower case, and the words of which they are made."""
    pairs = re.findall(r"\*\*(.+?)\*\*|`(\w+)`", (ROOT / "docs/reference/glossary.md").read_text())
    terms = {(bold or code).lower() for bold, code in pairs}
    return terms | {word for term in terms for word in re.split(r"[ _-]", term)}


def test_every_special_word_of_a_column_is_in_the_glossary(defined):
    schemas = [
        *SCHEMAS,
        *(
            schema
            for name in PAPERS
            for table, schema in schemas_of(f"makespan.papers.{name}").items()
            if not table.startswith("published_")
        ),
    ]
    words = {word for schema in schemas for column in schema.names for word in column.split("_")}
    ordinary = set(ORDINARY.split())
    assert ordinary <= words
    assert not {word for word in words - ordinary if not {word, word.removesuffix("s")} & defined}


def test_every_kind_of_event_source_level_and_verdict_is_in_the_glossary(defined):
    words = {
        *EventKind,
        *PROVENANCES,
        "l0",
        "l1",
        "holds",
        "fails",
        "undecided",
        "not run",
    }
    printed = {
        "jct",
        "jct/b",
        "span/b",
        "sla attainment",
        "exact",
        "sampled",
        "requests",
        "clairvoyant",
        "tolerance",
        "placement",
    }
    assert words | printed <= defined


SITE = pytest.mark.site


@pytest.fixture(scope="module")
def site():
    """Return the folder of the site that `make docs` has built, which warnings would have stopped."""
    folder = ROOT / "site"
    assert (folder / "index.html").is_file(), "run make docs"
    return folder


@SITE
def test_no_page_of_the_site_loads_anything_from_another_host(site):
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(pages) > len(PAGES) / 2
    assert not {str(path): LOADED.findall(text) for path, text in pages.items() if LOADED.findall(text)}
    assert not [str(path) for path in site.rglob("*.css") if FETCHED.search(path.read_text())]
    # the theme would fetch the renderer of diagrams, so there are none
    assert not [str(path) for path, text in pages.items() if 'class="mermaid' in text]


@SITE
def test_every_formula_is_mathml(site):
    pages = {path.parent.name: path.read_text() for path in site.rglob("*.html")}
    assert pages["performance-model"].count("<math") > 50
    assert not [name for name, text in pages.items() if "arithmatex" in text]


def test_a_formula_that_cannot_be_shown_stops_the_build():
    spec = importlib.util.spec_from_file_location("maths", ROOT / "scripts" / "maths.py")
    maths = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maths)
    html = '<p>and <span class="arithmatex">\\({}\\)</span> too</p>'
    assert "<mi>a</mi>" in maths.on_page_content(html.format("a &lt; b"), page="page.md")
    with pytest.raises(PluginError, match=r"page\.md: the formula .*nonesuch.* cannot be shown"):
        maths.on_page_content(html.format(r"\nonesuch"), page="page.md")


def test_every_file_that_the_architecture_page_names_exists():
    page = (ROOT / "docs/background/architecture.md").read_text()
    walks, tables = page.split("## Five walks")[1].split("## Beside")
    walked = set(re.findall(r"`([\w/]+\.py)`", walks))
    compared = set(re.findall(r"^\| `([\w/]+\.py)` \|", tables, re.MULTILINE))
    assert len(compared) == 15 and len(walked) > 50
    files = sorted(compared | walked)
    assert [name for name in files if not (ROOT / "src/makespan" / name).is_file()] == []
