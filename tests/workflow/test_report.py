"""The report of the small run, as readers see it: in a browser, on a phone, in the dark, and on paper."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile

import pytest
from browser import CONTRAST, complaints, opened, prefer, resize
from hidden_packages import run_set
from packaging.utils import canonicalize_name

from makespan.files import read_text
from makespan.papers import PAPERS, paper_named

# One process runs them in turn: each opens a browser.
pytestmark = pytest.mark.xdist_group("report")
MARK_FIGURES = """
const figures = document.querySelectorAll('figure');
figures.forEach((figure, number) => {
  figure.style.position = 'relative';
  for (const side of ['top', 'bottom']) {
    const mark = document.createElement('a');
    mark.href = `https://mark.invalid/${number}/${side}`;
    mark.textContent = '.';
    mark.style.cssText =
      `position: absolute; ${side}: 0; left: 0; width: 2px; height: 2px; overflow: hidden`;
    figure.append(mark);
  }
});
return figures.length;
"""
# A script that puts a link at both ends of each figure: a PDF lists the links of each page as plain text.
A4_WIDTH, A4_HEIGHT = 680, 1009  # CSS pixels within margins of 15 mm


@pytest.fixture(scope="module")
def page(small_run):
    return small_run.root / "results" / "report.html"


@pytest.fixture(scope="module")
def browser(page):
    with opened(page) as driver:
        yield driver


@pytest.fixture(scope="module")
def browser_of_two_sources(small_run, tmp_path_factory):
    """Return a driver with a page on which the results of one source stand for a second one, too."""
    results = tmp_path_factory.mktemp("sources") / "results"
    shutil.copytree(small_run.root / "results" / "emulated", results / "emulated")
    shutil.copytree(results / "emulated", results / "measured", symlinks=True)
    done = written(small_run.root, "--results", results)
    assert done.returncode == 0, done.stderr
    with opened(results / "report.html") as driver:
        yield driver


@pytest.fixture
def reader(browser):
    """Return a driver with the page open as it is when it was just loaded."""
    prefer(browser)
    resize(browser, 1280, 900)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    return browser


def all_of(reader, selector, expression):
    """Return the value of an expression of ``e`` for every element that a selector finds."""
    return reader.execute_script(
        f"return [...document.querySelectorAll('{selector}')].map((e) => {expression})"
    )


def click(reader, selector):
    reader.execute_script(f"document.querySelector('{selector}').click()")


def click_on(reader, selector):
    """Move the mouse to the first element that a selector finds, and press its button."""
    element = reader.find_element("css selector", selector)
    reader.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    # Loaded here, because the page is not tested where there is no driver.
    chains = pytest.importorskip("selenium.webdriver.common.action_chains")
    chains.ActionChains(reader).move_to_element(element).click().perform()


def printed_marks(reader):
    """Print the page on A4, and return by figure on which page of the PDF each of its marks is."""
    options = {"printBackground": False, "preferCSSPageSize": True, "paperWidth": 8.27, "paperHeight": 11.69}
    pdf = base64.b64decode(reader.execute_cdp_cmd("Page.printToPDF", options)["data"])
    assert pdf.startswith(b"%PDF")
    objects = dict(re.findall(rb"\n(\d+) 0 obj\n(.*?)\nendobj", pdf, re.DOTALL))
    marks = {}
    for number, page in enumerate(one for one in objects.values() if b"/Type /Page\n" in one):
        for link in re.findall(rb"(\d+) 0 R", b"".join(re.findall(rb"/Annots \[(.*?)\]", page))):
            for figure, side in re.findall(rb"//mark\.invalid/(\d+)/(\w+)", objects[link]):
                marks.setdefault(int(figure), {})[side] = number
    return marks


def wait_for(reader, condition):
    for _ in range(200):
        if reader.execute_script(f"return {condition}"):
            return
        time.sleep(0.1)
    raise AssertionError(f"never true: {condition}")


def written(root, *arguments):
    """Return how ``makespan report`` ended in a copy of the project."""
    command = [sys.executable, "-c", "from makespan.cli import main; main()", "report", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def shown_rows(reader):
    rows = "#statements tbody tr:not([hidden])"
    return all_of(reader, rows, '[e.dataset.paper, e.querySelector(".badge").textContent, e.textContent]')


def choose(reader, name, value):
    reader.execute_script(
        f"const form = document.getElementById('filters'); form.elements.{name}.value = {json.dumps(value)};"
        "form.dispatchEvent(new Event('input'))"
    )


def test_the_default_run_writes_the_page(small_run, page):
    html = read_text(page, "a page", ValueError)
    assert len(html.encode()) < 15_000_000
    for key in PAPERS:
        assert f'<section id="{key}"' in html
    pictures = (small_run.root / "results").glob("*/*/figures/*.png")
    drawn = {f"{path.parts[-3]}-{path.stem}" for path in pictures}
    shown = set(re.findall(r'<article id="([a-z]+-\w+)"', html))
    assert drawn == shown and len(shown) > 40
    explored = {
        f"{key}-{one.name}" for key in PAPERS for one in paper_named(key).figures().values() if one.explore
    }
    assert explored & drawn == set(re.findall(r'data-chart="([a-z]+-\w+)-[a-z]+"', html))


def test_both_reports_need_no_package_of_the_developer_set(root, finished):
    """`make report` and `snakemake --report` run where requirements.txt and torch alone are installed."""
    developer = re.findall(r"^([a-z].*)==", (root / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert not {canonicalize_name(name) for name in developer} & run_set()
    archive = finished.root / "report.zip"
    small = [f"config/test/{paper}.yaml" for paper in PAPERS]
    finished.python("-m", "snakemake", "--report", archive, "--configfile", *small)
    with zipfile.ZipFile(archive) as opened_archive:
        names = opened_archive.namelist()
    assert any(name.endswith("report.html") for name in names)
    assert sum("/data/" in name for name in names) > 10
    alone = finished.root / "alone"
    shutil.copytree(finished.root / "results" / "emulated" / "slapo", alone / "emulated" / "slapo")
    finished.python("-c", "from makespan.cli import main; main()", "report", "--results", alone)
    whole = finished.root / "results" / "report.html"
    assert 0 < (alone / "report.html").stat().st_size < whole.stat().st_size


def test_nothing_is_missing_of_a_complete_run(reader):
    assert "Nothing: everything is here" in reader.execute_script(
        "return document.getElementById('overview').innerText"
    )


def test_all_pictures_load_and_the_console_stays_empty(small_run, reader):
    wait_for(reader, "document.readyState === 'complete'")
    pictures = all_of(reader, "img", "[e.complete, e.naturalWidth, e.alt]")
    assert len(pictures) == len(list((small_run.root / "results").glob("*/*/figures/*.png")))
    assert all(is_complete and width > 0 and len(text) > 20 for is_complete, width, text in pictures)
    assert complaints(reader) == []


def test_headings_go_down_one_level_at_a_time_and_names_are_unique(reader):
    levels = [int(level) for level in all_of(reader, "h1, h2, h3, h4", "e.tagName[1]")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    names = all_of(reader, "[id]", "e.id")
    assert len(names) == len(set(names))
    targets = {
        target.removeprefix("#") for target in all_of(reader, 'a[href^="#"]', 'e.getAttribute("href")')
    }
    assert targets <= set(names)
    unnamed = "button:not([hidden]), select, input"
    assert all(all_of(reader, unnamed, '(e.textContent + (e.labels?.[0]?.textContent ?? "")).trim()'))


def test_filters_leave_the_rows_they_should(reader):
    everything = shown_rows(reader)
    assert len({paper for paper, _, _ in everything}) == len(PAPERS)
    choose(reader, "paper", "Oobleck")
    assert shown_rows(reader) == [row for row in everything if row[0] == "Oobleck"]
    choose(reader, "verdict", "holds")
    both = shown_rows(reader)
    assert both == [row for row in everything if row[:2] == ["Oobleck", "holds"]] and both
    choose(reader, "text", "VARUNA as")
    found = shown_rows(reader)
    assert found == [row for row in both if "varuna" in row[2].lower() and "as" in row[2].lower()]
    assert 0 < len(found) < len(both)
    status = reader.execute_script("return document.getElementById('shown').textContent")
    assert status == f"{len(found)} of {len(everything)} statements"
    click(reader, "#filters button[type=reset]")
    wait_for(reader, "document.querySelectorAll('#statements tbody tr[hidden]').length === 0")


def test_with_a_source_its_own_verdicts_count(browser_of_two_sources):
    reader = browser_of_two_sources
    found = all_of(reader, "#statements tbody tr", "JSON.parse(e.dataset.found)")
    choose(reader, "source", "measured")
    verdicts = [verdict for _, verdict, _ in shown_rows(reader)]
    assert verdicts == [one["measured"][1] for one in found if "measured" in one] and verdicts
    choose(reader, "verdict", "undecided")
    assert {verdict for _, verdict, _ in shown_rows(reader)} <= {"undecided"}


def test_the_link_of_a_paper_leads_to_its_statements(reader):
    click(reader, "#slapo .to-ledger")
    wait_for(reader, "document.querySelectorAll('#statements tbody tr[hidden]').length > 0")
    assert {paper for paper, _, _ in shown_rows(reader)} == {"Slapo"}


@pytest.mark.parametrize(("column", "cell"), [(2, "Jobs"), (3, "Wall time"), (5, "Peak memory")])
def test_rules_sort_by_number(reader, column, cell):
    value = f"Number(e.cells[{column}].dataset.value ?? e.cells[{column}].textContent)"
    for ending, is_reverse in (("ascending", False), ("descending", True)):
        click(reader, f"#costs th:nth-child({column + 1}) button")
        values = all_of(reader, "#costs tbody tr", value)
        assert values == sorted(values, reverse=is_reverse) and len(set(values)) > 1, cell
        assert all_of(reader, "#costs th[aria-sort]", 'e.getAttribute("aria-sort")') == [ending]


def test_statements_sort_by_paper(reader):
    click(reader, "#statements th:first-child button")
    papers = [paper for paper, _, _ in shown_rows(reader)]
    assert papers == sorted(papers) and papers[0] == "EasyScale"


def test_the_table_behind_a_figure_opens_and_is_that_of_the_file(reader, small_run):
    click(reader, "#morphling-table4 .open-table")
    wait_for(reader, "document.querySelector('#morphling-table4 .values table')")
    file = small_run.root / "results/emulated/morphling/figures/table4.csv"
    header, *lines = file.read_text().splitlines()
    table = "#morphling-table4 .values table"
    assert all_of(reader, f"{table} th", "e.textContent") == header.split(",")
    assert len(all_of(reader, f"{table} tbody tr", "1")) == len(lines) <= 200
    assert all_of(reader, f"{table} tbody tr:first-child td", "e.textContent") == lines[0].split(",")


def test_every_interactive_chart_draws(reader):
    buttons = all_of(reader, ".explore", "e.dataset.chart")
    assert len(buttons) >= 5
    for name in buttons:
        click(reader, f'[data-chart="{name}"]')
        wait_for(reader, f"document.querySelector('#chart-{name} .plot')?.data?.length > 0")
    drawn = all_of(reader, ".chart .plot", "e.data.every((trace) => trace.x.length === trace.y.length)")
    assert len(drawn) == len(buttons) and all(drawn)
    assert complaints(reader) == []


def test_a_click_in_the_legend_of_a_chart_hides_a_series_and_a_second_one_shows_it(reader):
    chart = "morphling-jct_cdf-emulated"
    click(reader, f'[data-chart="{chart}"]')
    plot = f"document.querySelector('#chart-{chart} .plot')"
    wait_for(reader, f"{plot}?.data?.length > 1")
    first, second = f"{plot}.data[0].visible", f"{plot}.data[1].visible"
    lines = f"{plot}.querySelectorAll('.scatterlayer .trace path.js-line').length"
    n_lines = reader.execute_script(f"return {lines}")
    assert n_lines == reader.execute_script(f"return {plot}.data.length")
    click_on(reader, f"#chart-{chart} .legendtoggle")
    wait_for(reader, f"{first} === 'legendonly' && {lines} === {n_lines - 1}")
    assert reader.execute_script(f"return {second} ?? true") is True
    click_on(reader, f"#chart-{chart} .legendtoggle")
    wait_for(reader, f"({first} ?? true) === true && {lines} === {n_lines}")
    assert complaints(reader) == []


def test_one_source_of_a_figure_is_shown_at_a_time(browser_of_two_sources):
    reader = browser_of_two_sources
    shown = "#morphling-table2 figure:not([hidden])"
    assert all_of(reader, shown, "e.dataset.source") == ["emulated"]
    click(reader, "#morphling-table2 .choices button:last-child")
    assert all_of(reader, shown, "e.dataset.source") == ["measured"]


@pytest.mark.parametrize("width", [375, 768])
def test_a_narrow_screen_does_not_scroll_sideways(reader, width):
    resize(reader, width, 812, is_phone=True)
    assert reader.execute_script("return document.documentElement.scrollWidth") <= width
    reader.execute_script("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    click(reader, "#morphling-table4 .open-table")
    wait_for(reader, "document.querySelector('#morphling-table4 .values table')")
    assert reader.execute_script("return document.documentElement.scrollWidth") <= width
    edges = all_of(reader, ".paper-white", "e.getBoundingClientRect().right")
    assert max(edges) <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_text_has_contrast(reader, scheme, width):
    prefer(reader, prefers_color_scheme=scheme)
    resize(reader, width, 900, is_phone=width < 500)
    reader.execute_script("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    ratios = reader.execute_script(CONTRAST)
    assert len(ratios) > 20
    assert ratios[0][0] >= 4.5, ratios[:5]


def test_the_toggle_turns_the_page_dark_and_back(reader):
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = reader.execute_script(ground)
    click(reader, "#theme")
    assert reader.execute_script(ground) != light
    click(reader, "#theme")
    assert reader.execute_script(ground) == light


def test_no_figure_is_cut_on_paper(reader):
    reader.execute_script("document.querySelectorAll('.choices button:last-child').forEach((e) => e.click())")
    resize(reader, A4_WIDTH, A4_HEIGHT)
    prefer(reader, "print")
    boxes = all_of(reader, "img", "((b) => [b.left, b.right, b.height])(e.getBoundingClientRect())")
    assert all(
        left >= 0 and right <= A4_WIDTH + 1 and 0 < height <= A4_HEIGHT for left, right, height in boxes
    )
    assert not any(all_of(reader, "nav, .tools, .choices, .filters", "e.offsetHeight"))
    inside = all_of(reader, "figure", "getComputedStyle(e).breakInside")
    assert set(inside) == {"avoid"}
    assert reader.execute_script("return document.documentElement.scrollWidth") <= A4_WIDTH
    prefer(reader)
    n_figures = reader.execute_script(MARK_FIGURES)
    assert n_figures == len(all_of(reader, "figure", "1")) > 40
    pages = printed_marks(reader)
    assert set(pages) == set(range(n_figures))
    assert {number: sides for number, sides in pages.items() if len(set(sides.values())) > 1} == {}
    # Without the rule against it, figures of this height are cut, and this is noticed.
    reader.execute_script(
        "const style = document.createElement('style');"
        "style.textContent = 'figure { break-inside: auto !important; min-height: 20cm }';"
        "document.head.append(style)"
    )
    assert any(len(set(sides.values())) > 1 for sides in printed_marks(reader).values())


def test_the_page_of_one_paper_alone(finished):
    """`make report TARGETS=oobleck`: other papers are named as missing, and nothing else is needed."""
    for path in (finished.root / "results").glob("*"):
        for other in path.iterdir() if path.is_dir() else ():
            if other.name != "oobleck":
                subprocess.run(["rm", "-r", str(other)], check=True)
    (finished.root / "results/claims.csv").unlink()
    done = written(finished.root)
    assert done.returncode == 0, done.stderr
    with opened(finished.root / "results/report.html") as driver:
        assert all_of(driver, "section.paper", "e.id") == ["oobleck"]
        assert {paper for paper, _, _ in shown_rows(driver)} == {"Oobleck"}
        missing = driver.execute_script("return document.querySelector('.missing').innerText")
        assert "snakemake --cores all morphling" in missing
        assert complaints(driver) == []
