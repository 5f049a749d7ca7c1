"""How objects show themselves in a notebook, and the notebook of the tutorial."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import makespan
from makespan.notebook import Span, object_html, schedule_svg, table_html, text_html

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "tutorial" / "notebook.ipynb"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def busy():
    scenario = makespan.scenario("base", n_jobs=8, load=10)
    return scenario, makespan.simulate(scenario, "morphling-work")


def parsed(html):
    """Return HTML as a tree; it is closed and escaped as XML is."""
    return ElementTree.fromstring(f"<body>{html}</body>")


def test_tables_are_escaped_shortened_and_say_what_they_leave_out():
    rows = [{"job": "<b>&", "time": 1.23456789}, {"job": "c", "time": float("nan")}, {"job": "d", "time": 2}]
    html = table_html(rows, most=2)
    cells = [cell.text for cell in parsed(html).iter("td")]
    assert cells == ["<b>&", "1.23457", "c", "-"]
    assert "and 1 more rows" in html
    assert table_html([]) == "<p>no rows</p>"
    assert parsed(text_html("a <b>\n c")).findtext("pre") == "a <b>\n c"
    assert parsed(object_html("<t>", "<p>x</p>")).find("div/p/strong").text == "<t>"


def test_a_chart_has_a_bar_for_each_delay_and_each_run_at_the_right_place():
    spans = [Span("a<", 10.0, 20.0, 60.0, "DP", "a < b"), Span("b", 60.0, 60.0, 110.0, "TP", "b")]
    tree = parsed(schedule_svg({"a<": 10.0, "b": 10.0}, spans))
    bars = [one for one in tree.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    left, width = ([float(one.get(name)) for one in bars] for name in ("x", "width"))
    second = 602 / 100  # pixels
    assert left == pytest.approx([110, 110 + 10 * second, 110 + 50 * second, 110 + 50 * second], abs=0.1)
    assert width == pytest.approx([10 * second, 40 * second, 0, 50 * second], abs=0.1)
    texts = [one.text for one in tree.iter(f"{SVG}text")]
    assert {"a<", "b", "DP", "TP", "restarting", "0:00:15"} <= set(texts)
    assert len({one.get("fill") for one in bars}) == 3
    again = schedule_svg({"b": 10.0}, spans)
    assert next(one for one in parsed(again).iter(f"{SVG}rect")).get("fill") == "#dddddd"
    assert bars[3].get("fill") in again  # the colour of a plan family does not depend on the others


def test_a_chart_names_the_jobs_that_it_leaves_out_and_an_empty_one_says_so():
    spans = [Span(f"j{number}", number, number, number + 1.0, "DP", "") for number in range(70)]
    html = schedule_svg({span.job: span.start_s for span in spans}, spans)
    assert "the first 60 of 70 jobs" in html and "j59" in html and "j60" not in html
    assert schedule_svg({"a": 0.0}, []) == "<p>no job held devices</p>"


def test_spans_of_a_schedule_add_up_to_what_its_jobs_did(busy):
    _, run = busy
    spans = pd.DataFrame(run.result.spans())
    outcomes = run.result.outcomes.set_index("job_id")
    assert (spans["start_s"] <= spans["ready_s"]).all() and (spans["ready_s"] <= spans["end_s"]).all()
    running = (spans["end_s"] - spans["ready_s"]).groupby(spans["job"]).sum()
    restarting = (spans["ready_s"] - spans["start_s"]).groupby(spans["job"]).sum()
    for name, found in (("running_time_s", running), ("restart_time_s", restarting)):
        pd.testing.assert_series_equal(found.sort_index(), outcomes[name].sort_index(), check_names=False)
    ends = spans.groupby("job")["end_s"].max().sort_index()
    pd.testing.assert_series_equal(ends, outcomes["finish_time_s"].sort_index(), check_names=False)


def test_objects_of_the_front_door_show_themselves(busy):
    scenario, run = busy
    for shown, text in (
        (scenario, scenario.title),
        (run, "no violation"),
        (run.result, "Schedule of 8 jobs"),
        (makespan.fit(makespan.emulate("bert")), "errors on rows that were not sampled"),
    ):
        html = shown._repr_html_()
        parsed(html)
        assert text in html
        assert not re.search(r"wall|0x[0-9a-f]{6}", html)
        assert text.lower() in repr(shown).lower()
    for shown in (repr(run), run._repr_html_()):
        assert f"{run.metrics.avg_jct_s:.6g}" in shown


def test_objects_of_any_size_are_a_screen_of_text(busy):
    scenario, _ = busy
    large = replace(scenario, jobs=30 * scenario.jobs[:1])
    lines = repr(large).splitlines()
    assert lines[0] == large.title and len(lines) == 1 + 1 + 10 + 1
    assert lines[1].split()[:2] == ["job_id", "submit_time_s"]
    assert lines[-1].strip() == "and 20 more rows"
    assert len({len(line) for line in lines[1:-1]}) == 1
    few = repr(replace(scenario, jobs=()))
    assert few.startswith(scenario.name) and len(few.splitlines()) == 1


def test_schedules_of_models_and_their_verification_show_themselves():
    torch = pytest.importorskip("torch")
    schedule = makespan.create_schedule(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with makespan.Verify(schedule, (torch.ones(2, 4),)) as verified:
        schedule["0"].checkpoint()
    assert "Linear" in parsed(schedule._repr_html_()).findtext("pre")
    assert "agrees with the original" in parsed(verified.report._repr_html_()).findtext("pre")


def test_the_cells_of_the_tutorial_show_what_the_notebook_has():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "scripts" / "notebook.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    notebook = json.loads(NOTEBOOK.read_text())
    assert script.executed(notebook) == notebook, "run python scripts/notebook.py"


def test_the_notebook_is_valid_small_and_free_of_the_machine():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    text = NOTEBOOK.read_text()
    assert len(text) < 60_000
    assert not re.search(r"/home/|/tmp/|/root/|0x[0-9a-f]{6}|wall", text)
