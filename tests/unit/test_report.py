"""The report: what it says of a run, of a part of one, and of nothing; escaping, size, and equal bytes."""

import base64
import gzip
import json
import logging
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from jinja2 import Environment
from PIL import Image

from makespan.config import check_settings, provenance
from makespan.errors import TraceError
from makespan.papers import PAPERS, paper_named
from makespan.papers.experiment import Explore
from makespan.report import collect, page, write_report
from makespan.report.charts import interactive
from makespan.report.page import _code as marked
from makespan.tables import CLAIMS, write_csv, write_result

SETTINGS = check_settings({})
HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&"
BENCHMARK = "s\th:m:s\tmax_rss\tcpu_time\n"


def add_claims(results, source, key, rows):
    """Write a ledger with rows of statement, verdict and what was found."""
    names = ("paper", "artifact", "statement", "published", "reproduced", "tolerance", "verdict", "note")
    table = pd.DataFrame(
        [(paper_named(key).title, artifact, text, "2x", found, "at least 2x", verdict, "a note")
         for artifact, text, verdict, found in rows], columns=names,
    )  # fmt: skip
    write_result(table, results / source / key / "claims.csv", CLAIMS)


def add_figure(results, source, key, name, table, caption="What it shows."):
    """Write picture, table and caption of a figure."""
    stem = results / source / key / "figures" / name
    stem.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), "white").save(stem.with_suffix(".png"))
    write_csv(table, stem.with_suffix(".csv"))
    stem.with_suffix(".txt").write_text(f"Title\n\n{caption}\n")


def over_time():
    return pd.DataFrame(
        {
            "model": ["A", "A", "A", "B"],
            "system": ["oobleck", "oobleck", "varuna", "oobleck"],
            "mode": "compat",
            "time_s": [0.0, 10.0, 0.0, 5.0],
            "n_nodes": [3, 2, 3, 3],
            "throughput_samples_per_s": [1.5, 1.0, 1.25, 0.123456789],
        }
    )


@pytest.fixture
def results(tmp_path):
    """Return the results of one paper for one source."""
    folder = tmp_path / "results"
    statements = [
        ("Fig. 14", "it is faster", "holds", "3x"),
        ("Fig. 14", "it is faster everywhere", "fails", "1.5x"),
        ("Fig. 9", "it is steady", "undecided", ""),
    ]
    add_claims(folder, "emulated", "oobleck", statements)
    add_figure(folder, "emulated", "oobleck", "fig14", over_time())
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1\n")
    (folder / "emulated/provenance.json").write_text(provenance(SETTINGS, "emulated", pins, ["emulated"] * 3))
    return folder


def written(results, settings=SETTINGS, **folders):
    """Return the text of the page over results."""
    page_path = results / "report.html"
    write_report(settings, page_path, results, **({"benchmarks": results.parent / "benchmarks"} | folders))
    return page_path.read_text("utf-8")


def unpacked(html, name):
    packed = re.search(rf'id="packed-{name}">([^<]*)<', html).group(1)
    return gzip.decompress(base64.b64decode(packed)).decode()


def plain(html):
    """Return the text of a page without tags."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


# --- What it says -----------------------------------------------------------------------------------


def test_the_page_of_one_paper_counts_its_verdicts_and_names_what_fails(results):
    text = plain(written(results))
    assert "Of 3 statements, 1 hold , 1 fail , 1 are undecided, and 0 need input that is not here." in text
    assert "Oobleck 1 1 1 0" in text and "Morphling – – – –" in text
    assert (
        "Fig. 14: it is faster everywhere. The paper has 2x. Expected: at least 2x. "
        "Found on emulated 1.5x. a note." in text
    )


def test_a_partial_run_says_what_is_missing_and_how_to_build_it(results):
    report = collect(SETTINGS, results)
    by_key = {section.key: section for section in report.sections}
    assert not by_key["morphling"].is_built and by_key["oobleck"].is_built
    (first, *_) = by_key["oobleck"].missing
    assert first.source == "emulated" and 0 < first.n_missing == len(first.files) < first.n_expected
    assert "results/emulated/oobleck/figures/fig9.png" in first.files
    assert "results/emulated/oobleck/figures/fig14.png" not in first.files
    assert first.command == "snakemake --cores all oobleck"
    text = plain(written(results))
    assert "Morphling, source emulated: nothing is built. Build with snakemake --cores all morphling" in text
    assert f"{first.n_missing} of {first.n_expected} files are missing." in text
    assert "Source published is not part" not in text  # Slapo needs no file of the authors for it


def test_few_missing_files_are_named_in_the_command(results):
    oobleck = SETTINGS.papers()["oobleck"]
    tables = oobleck.tables_of(SETTINGS, "emulated")
    stem = results / "emulated" / "oobleck"
    for name in tables:
        (stem / f"{name}.csv").write_text("x\n")
    for name, figure in oobleck.figures().items():
        if figure.is_drawn("emulated", tables) and name != "fig9":
            (stem / f"figures/{name}.png").write_bytes((stem / "figures/fig14.png").read_bytes())
    (section,) = (one for one in collect(SETTINGS, results).sections if one.key == "oobleck")
    emulated = next(gap for gap in section.missing if gap.source == "emulated")
    assert emulated.command == "snakemake --cores all results/emulated/oobleck/figures/fig9.png"


def test_an_empty_directory_gives_a_page_that_says_how_to_fill_it(tmp_path):
    (tmp_path / "results").mkdir()
    text = plain(written(tmp_path / "results"))
    assert "No statement has been judged yet. Run snakemake --cores all" in text
    assert "No ledger is built." in text and "No benchmark file is here." in text


def test_what_was_run_comes_from_the_record_of_each_source(results):
    record = json.loads((results / "emulated/provenance.json").read_text())
    facts = dict(collect(SETTINGS, results).facts)
    assert facts["Iteration times"] == ["emulated (3 rows)"] and facts["Seed"] == [str(record["seed"])]
    assert facts["Configuration"] == [record["config_sha256"][:12]]
    assert record["machine"]["processor"] in facts["Machine"][0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", facts["Recorded"][0])
    assert unpacked(written(results), "config-emulated") == json.dumps(record["config"], indent=1)


def test_sources_that_differ_in_configuration_or_lack_a_record_are_warned_of(results):
    record = json.loads((results / "emulated/provenance.json").read_text())
    add_claims(results, "published", "oobleck", [("Fig. 14", "it is faster", "fails", "1x")])
    assert collect(SETTINGS, results).warnings == (
        "Nothing records what the results of source published were made with; "
        "build results/published/provenance.json for that.",
    )
    changed = record | {"config_sha256": "0" * 64, "source": "published"}
    (results / "published/provenance.json").write_text(json.dumps(changed))
    report = collect(SETTINGS, results)
    assert report.warnings == (
        "The sources emulated and published were built with different configurations.",
    )
    faster = next(one for one in report.statements if one.statement == "it is faster")
    assert faster.verdict == "fails"
    assert faster.found == {"emulated": ("3x", "holds"), "published": ("1x", "fails")}


def test_costs_are_added_up_by_rule(tmp_path, results):
    folder = tmp_path / "benchmarks"
    files = {
        "emulated/oobleck/oobleck_spot.tsv": "60.5\t0:01:00\t100.0\t50.0\n",
        "published/oobleck/oobleck_spot.tsv": "30.0\t0:00:30\t300.0\tNA\n",
        "emulated/oobleck/draw_figure/fig14.tsv": "1.0\t0:00:01\t-\t0.5\n",
        "emulated/oobleck/draw_figure/fig15.tsv": "2.0\t0:00:02\t50.0\t0.5\n",
    }
    for name, row in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(BENCHMARK + row)
    spot, drawn = collect(SETTINGS, results, folder).costs
    assert (spot.rule, spot.n_jobs, spot.wall_s, spot.cpu_s) == ("oobleck_spot", 2, 90.5, 50.0)
    assert spot.memory_bytes == 300 * 2**20 and spot.sources == ("emulated", "published")
    assert (drawn.rule, drawn.n_jobs, drawn.wall_s) == ("draw_figure", 2, 3.0)
    assert "4 jobs took 1 min 34 s of wall time" in plain(written(results))


def test_files_have_their_rule_their_inputs_and_whether_they_changed(results):
    ledger = results / "emulated/oobleck/claims.csv"
    by_path = {one.path: one for one in collect(SETTINGS, results).products}
    drawn = by_path["emulated/oobleck/figures/fig14.png"]
    assert (drawn.rule, drawn.inputs, drawn.state) == ("draw_figure", ("fig14.csv",), "")
    assert by_path["emulated/oobleck/claims.csv"].state == "as written"
    assert not any(name.endswith(".sum") for name in by_path)
    shutil.copy(results / "emulated/oobleck/figures/fig14.csv", results / "emulated/oobleck/fig14.csv")
    seal = ledger.with_name(".claims.csv.sum")
    shutil.copy(seal, seal.with_name(".fig14.csv.sum"))
    by_path = {one.path: one for one in collect(SETTINGS, results).products}
    table = by_path["emulated/oobleck/fig14.csv"]
    assert (table.rule, table.state) == ("oobleck_spot", "changed")
    assert "1 tables were changed after they were written" in plain(written(results))


def test_a_figure_has_its_caption_published_values_and_statements(results, tmp_path):
    published = tmp_path / "published"
    published.mkdir()
    (published / "oobleck_fig14.csv").write_text("model,value\nA,2.5\n")
    (section,) = (one for one in collect(SETTINGS, results, published=published).sections if one.figures)
    (shown,) = section.figures
    assert shown.views[0].caption == ("What it shows.",)
    assert [one.statement for one in shown.statements] == ["it is faster", "it is faster everywhere"]
    ((name, table),) = shown.published
    assert (name, table.columns, table.rows) == ("oobleck_fig14.csv", ("model", "value"), (("A", "2.5"),))


@pytest.mark.parametrize("key", PAPERS)
def test_every_paper_describes_itself(key):
    about = paper_named(key).about()
    assert about.citation and about.idea and about.setting and len(about.deviations) >= 3


def test_names_of_code_in_a_deviation_are_marked_and_all_is_escaped():
    text = Environment(autoescape=True).from_string("{{ text }}").render(text=marked("a < `b<c>`, `d`"))
    assert text == "a &lt; <code>b&lt;c&gt;</code>, <code>d</code>"
    assert marked("plain") == "plain"


@pytest.mark.parametrize("key", PAPERS)
def test_backticks_in_deviations_come_in_pairs(key):
    assert all(text.count("`") % 2 == 0 for text in paper_named(key).about().deviations)


# --- Escaping, size, equal bytes --------------------------------------------------------------------


def test_everything_is_escaped(results, tmp_path):
    add_claims(results, "emulated", "oobleck", [("Fig. 14", HOSTILE, "fails", HOSTILE)])
    table = over_time().assign(model=HOSTILE)
    add_figure(results, "emulated", "oobleck", "fig14", table, caption=HOSTILE)
    record = json.loads((results / "emulated/provenance.json").read_text())
    record |= {"makespan_version": HOSTILE, "iteration_times": HOSTILE}
    record["config"]["cluster"] = HOSTILE
    (results / "emulated/provenance.json").write_text(json.dumps(record))
    (results / "emulated/oobleck" / f"{HOSTILE.replace('/', '')}.csv").write_text("x\n")
    published = tmp_path / "published"
    published.mkdir()
    (published / "oobleck_fig14.csv").write_text('a,b\n"' + HOSTILE.replace('"', '""') + '",1\n')
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "<b>rule.tsv").write_text(BENCHMARK + "1.0\t0:00:01\t1.0\t1.0\n")
    html = written(results, published=published, benchmarks=benchmarks)
    assert "alert(" in html and "&lt;script&gt;alert" in html
    assert "<script>alert" not in html and "<img src=x" not in html and "<b>rule" not in html
    # The page's own scripts, and none besides.
    assert html.count("<script>") == 1
    assert unpacked(html, "table-oobleck-fig14-emulated").count("<script>") == 4


def test_equal_results_give_equal_bytes(results, tmp_path):
    first = written(results)
    for path in results.rglob("*.png"):
        path.touch()
    shutil.copytree(results, tmp_path / "copy/results", ignore=shutil.ignore_patterns("report.html"))
    assert written(results) == first == written(tmp_path / "copy/results")


def test_the_page_needs_nothing_from_elsewhere_and_stays_small(results):
    html = written(results)
    assert len(html.encode()) < 4_000_000
    assert unpacked(html, "plotly").startswith("/**\n* plotly.js v")
    # The namespaces of pictures are names, and nothing else is an address.
    shown = re.sub(r'<script type="text/plain".*?</script>', "", html)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', shown)


def test_a_page_without_interactive_charts_has_no_plotly(results):
    shutil.rmtree(results / "emulated/oobleck/figures")
    html = written(results)
    assert "packed-plotly" not in html and len(html.encode()) < 200_000
    assert "No figure of Oobleck is built." in plain(html)


def test_a_page_that_is_too_large_is_logged(results, monkeypatch, caplog):
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", 1000)
    with caplog.at_level(logging.WARNING):
        written(results)
    assert "more than 1.0 kB" in caplog.text


def test_pictures_are_svg_where_there_is_one_of_sensible_size(results):
    stem = results / "emulated/oobleck/figures/fig14"
    assert 'src="data:image/png;base64,' in written(results)
    stem.with_suffix(".svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert 'src="data:image/svg+xml;base64,' in written(results)
    stem.with_suffix(".svg").write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg'><!--{'.' * 120_000}--></svg>"
    )
    assert 'src="data:image/png;base64,' in written(results)


def test_a_large_png_gets_a_palette(results):
    path = results / "emulated/oobleck/figures/fig14.png"
    noise = np.random.default_rng(1).integers(0, 8, (300, 300, 3), np.uint8) * 30
    Image.fromarray(noise).save(path)
    embedded = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", written(results)).group(1))
    assert len(embedded) < path.stat().st_size and embedded.startswith(b"\x89PNG")


# --- Interactive charts -----------------------------------------------------------------------------


def test_steps_have_a_chart_per_panel_and_a_line_per_system():
    explore = Explore(
        "steps", ("time_s",), ("throughput_samples_per_s",), ("system",), ("model",), "time [s]", "rate"
    )
    first, second = interactive(explore, over_time(), "fig14")
    assert [first["name"], second["name"]] == ["A", "B"]
    assert [trace["name"] for trace in first["data"]] == ["oobleck", "varuna"]
    assert first["data"][0]["x"] == [0.0, 10.0] and first["data"][0]["y"] == [1.5, 1.0]
    assert (
        first["data"][0]["line"]["shape"] == "hv" and first["layout"]["xaxis"]["title"]["text"] == "time [s]"
    )
    assert second["data"][0]["y"] == [0.12346]


def test_shares_are_those_of_rows_up_to_a_value():
    table = pd.DataFrame({"policy": ["fifo"] * 4, "jct_s": [30.0, 10.0, np.nan, 20.0]})
    (chart,) = interactive(Explore("shares", ("jct_s",), by=("policy",)), table, "jct")
    assert chart["data"][0]["x"] == [10.0, 20.0, 30.0]
    assert chart["data"][0]["y"] == [0.33333, 0.66667, 1.0]


def test_areas_stack_all_other_columns():
    table = pd.DataFrame({"policy": ["p"] * 2, "time_s": [0, 1], "DP": [1, 2], "TP+PP": [3, 4]})
    (chart,) = interactive(Explore("areas", ("time_s",), panels=("policy",)), table, "allocation")
    assert [(trace["name"], trace["y"]) for trace in chart["data"]] == [("DP", [1, 2]), ("TP+PP", [3, 4])]
    assert {trace["stackgroup"] for trace in chart["data"]} == {"all"}


def test_lines_leave_gaps_out():
    table = pd.DataFrame({"run": ["a"] * 3, "step": [1, 2, 3], "loss": [3.0, np.nan, 1.0]})
    (chart,) = interactive(Explore("lines", ("step",), ("loss",), ("run",)), table, "fig9")
    assert chart["data"][0]["x"] == [1, 3] and "shape" not in chart["data"][0]["line"]


def test_spans_are_bars_from_when_they_are_ready_to_their_end():
    table = pd.DataFrame(
        {
            "job_id": ["a", "b"],
            "plan_family": ["DP", "TP+PP"],
            "node": [0, 10],
            "gpu": [1, 0],
            "start_s": [0.0, 5.0],
            "ready_s": [2.0, 9.0],
            "end_s": [10.0, 8.0],
        }
    )
    explore = Explore("spans", ("start_s", "ready_s", "end_s"), ("node", "gpu"), ("plan_family",))
    (chart,) = interactive(explore, table, "gantt")
    first, second, waits = chart["data"]
    assert (first["y"], first["base"], first["x"], first["text"]) == (["0.1"], [2.0], [8.0], ["a"])
    assert (second["base"], second["x"]) == ([8.0], [0.0])  # stopped before it was ready
    assert waits["base"] == [0.0, 5.0] and waits["x"] == [2.0, 3.0]
    assert chart["layout"]["yaxis"]["categoryarray"] == ["10.0", "0.1"]
    labels = chart["layout"]["yaxis"]
    assert dict(zip(labels["tickvals"], labels["ticktext"], strict=True)) == {
        "0.1": "node 0",
        "10.0": "node 10",
    }


def test_a_chart_whose_column_is_missing_says_which():
    with pytest.raises(TraceError, match=r"^x\.csv: an interactive chart needs column\(s\) loss, step$"):
        interactive(Explore("lines", ("step",), ("loss",)), pd.DataFrame({"run": []}), "x.csv")
