"""The entries of the papers' figures: complete, callable, and refused with a reason where they are not."""

import inspect
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pandas as pd
import pytest
from toy_cluster import toy_tables

from makespan.config import check_settings, load_settings
from makespan.errors import ConfigError
from makespan.papers import PAPERS, Figure, paper_named
from makespan.papers.experiment import with_counts
from makespan.tables import THROUGHPUT, shown_source, write_csv

ENTRIES = [(paper, figure) for paper in PAPERS for figure in paper_named(paper).figures().values()]
ENTRY = Figure("one", "One", "On {source}.", ("a",), cells=("a",))


def test_every_entry_names_a_function_that_takes_its_options_and_a_caption_that_can_be_filled():
    settings = load_settings()
    for paper, figure in ENTRIES:
        module, name = figure.function(paper).split(":")
        function = getattr(import_module(module), name)
        inspect.signature(function).bind({}, "emulated", **figure.arguments(settings))
        schemas = {table: paper_named(paper).schema_of(table) for table in figure.tables}
        assert schemas
        empty = {
            name: pd.DataFrame(columns=schema.names, data=[[1] * len(schema.names)])
            for name, schema in schemas.items()
        }
        caption = with_counts(figure.captioned("emulated", "emulated", settings), empty)
        assert not set("{}") & set(caption)


@pytest.mark.parametrize(
    ("paper", "name", "changes", "told"),
    [
        ("morphling", "fig8", {"fig8": {"gpus": 6}}, "share 6 GPUs"),
        ("oobleck", "guarantee", {"planning": {"studies": {"most_nodes": 48}}}, "n0 to 48 nodes"),
        (
            "oobleck",
            "bursts",
            {"losses": {"bursts": {"rack_size": 2}}},
            "in racks of 2 nodes, with pipelines",
        ),
        ("oobleck", "predictions", {"execution": {"predictions": {"most_nodes": 2}}}, "on up to 2 nodes"),
    ],
)
def test_a_caption_follows_the_configuration(paper, name, changes, told):
    figure = paper_named(paper).figures()[name]
    settings = check_settings({paper: changes})
    assert told in figure.captioned("emulated", "emulated", settings)


def test_a_figure_is_drawn_by_the_function_of_its_name_unless_it_says_otherwise():
    assert ENTRY.function("toy") == "makespan.papers.toy.figures:one"
    assert replace(ENTRY, draw="two").function("toy") == "makespan.papers.toy.figures:two"
    assert replace(ENTRY, draw="mine:two").function("toy") == "mine:two"


def test_a_figure_is_drawn_where_its_tables_are_and_only_of_its_sources():
    assert ENTRY.is_drawn("emulated", ["a", "b"]) and not ENTRY.is_drawn("emulated", ["b"])
    measured = replace(ENTRY, sources=("measured",))
    assert measured.is_drawn("measured", ["a"]) and not measured.is_drawn("emulated", ["a"])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["measured", "measured"], "measured"),
        (["emulated", "emulated"], "emulated, given as measured"),
        (["measured", "published"], "mixed published and measured, given as measured"),
        ([], "measured"),
    ],
)
def test_the_provenance_of_the_tables_decides_what_is_said_of_the_source(
    root, tmp_path, monkeypatch, kinds, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawing_of_a_test.py").write_text(
        "def draw(tables, source):\n    raise KeyError(list(tables), source)\n"
    )
    for number, kind in enumerate(kinds):
        write_csv(toy_tables()[0].assign(provenance=kind), f"{number}.csv", THROUGHPUT)
    given = {"times": [f"{number}.csv" for number in range(len(kinds))], "fig9": "a.csv"}
    schema = paper_named("slapo").schema_of("fig9")
    write_csv(pd.DataFrame(columns=schema.names), "a.csv")
    job = SimpleNamespace(
        log=["job.log"],
        input=given,
        output=SimpleNamespace(pdf="one.pdf"),
        params=SimpleNamespace(draw="drawing_of_a_test:draw", options={}, title="One", caption="On it."),
        wildcards=SimpleNamespace(source="measured", paper="slapo"),
    )
    script = root / "workflow" / "scripts" / "draw_figure.py"
    with pytest.raises(KeyError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"snakemake": job})
    assert caught.value.args == (["fig9"], expected)


def test_the_caption_says_what_the_iteration_times_are():
    assert ENTRY.captioned("emulated", "emulated", {}) == "On emulated."
    shown = shown_source("measured", ["emulated"])
    assert ENTRY.captioned("measured", shown, {}) == "On given. Iteration times: emulated, given as measured."


def test_a_caption_gets_its_numbers_from_tables_and_options():
    parts = (
        "{seeds: values a.seed}",
        "{traces: values a.seed by kind}",
        "{batches: largest a.n}",
        "{kills: rows b}",
    )
    figure = replace(ENTRY, caption=", ".join([*parts, "{timed passes: config slapo.tuner.passes}"]))
    settings = SimpleNamespace(slapo=SimpleNamespace(tuner=SimpleNamespace(passes=5)))
    caption = figure.captioned("measured", "measured", settings)
    assert caption.endswith(", 5 timed passes") and parts[0] in caption
    table = pd.DataFrame({"seed": [1, 1, 2], "kind": ["x", "y", "y"], "n": [1, 1, 0]})
    told = with_counts(caption, {"a": table, "b": table})
    assert told == "2 seeds, 1 to 2 traces, 1 batch, 3 kills, 5 timed passes"
    for missing, known in (("b", {"a": table}), ("n", {"a": table.drop(columns="n"), "b": table})):
        with pytest.raises(KeyError, match=missing):
            with_counts(caption, known)


def test_the_rule_writes_the_caption_of_the_report_beside_the_figure(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawing_of_a_caption.py").write_text(
        "import pandas as pd\n\nfrom makespan.plots import new_figure\n\n\n"
        "def draw(tables, source):\n    return new_figure(1, 1), pd.DataFrame({'a': [1]})\n"
    )
    caption = ENTRY.captioned("measured", shown_source("measured", ["emulated"]), {})
    job = SimpleNamespace(
        log=["job.log"],
        input={"times": []},
        output=SimpleNamespace(pdf="one.pdf"),
        params=SimpleNamespace(draw="drawing_of_a_caption:draw", options={}, title="One", caption=caption),
        wildcards=SimpleNamespace(source="measured", paper="slapo"),
    )
    script = root / "workflow" / "scripts" / "draw_figure.py"
    exec(compile(script.read_text(), str(script), "exec"), {"snakemake": job})
    assert (tmp_path / "one.txt").read_text() == f"One\n\n{caption}\n"


def test_an_option_that_does_not_exist_is_named():
    figure = replace(ENTRY, options={"x": "slapo.fig6.x"})
    with pytest.raises(ConfigError, match=r"'slapo\.fig6\.x'"):
        figure.arguments(load_settings())


def test_an_experiment_whose_shared_options_have_no_value_is_refused():
    from makespan.papers.experiment import Given
    from makespan.papers.oobleck.simulation import Failures

    with pytest.raises(ConfigError, match=r"Failures has no value of .* assumptions, .*resolved\(settings\)"):
        Failures().run(Given("emulated"))


def test_every_table_of_a_figure_is_written_by_an_experiment_and_every_table_has_columns():
    for paper in map(paper_named, PAPERS):
        written = {table for one in paper.EXPERIMENTS for table in one.tables}
        assert {table for figure in paper.figures().values() for table in figure.tables} <= written
        assert all(paper.schema_of(table) for table in written)
        names = [one.name for one in paper.EXPERIMENTS]
        assert all(names) and len(set(names)) == len(names)
