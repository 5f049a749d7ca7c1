"""The entries of the papers' figures: complete, callable, and refused with a reason where they are not."""

import inspect
from dataclasses import replace
from importlib import import_module, resources
from types import SimpleNamespace

import pytest
from toy_cluster import toy_tables

from makespan.config import load_settings
from makespan.errors import ConfigError
from makespan.papers import PAPERS, FigureEntry, figures
from makespan.tables import THROUGHPUT, shown_source, write_csv

ENTRIES = [entry for paper in PAPERS for entry in figures(paper).values()]
ENTRY = FigureEntry("toy", "one", "One", "On {source}.", "toy:one", ("a",), published=("a",))


def test_every_entry_names_a_function_that_takes_its_options_and_a_caption_that_can_be_filled():
    settings = load_settings()
    for entry in ENTRIES:
        module, name = entry.draw.split(":")
        function = getattr(import_module(module), name)
        inspect.signature(function).bind({}, "emulated", **entry.options(settings))
        assert "{" not in entry.caption.format(source="emulated")
        assert entry.tables, entry.name


def test_inputs_are_the_tables_of_the_source_and_the_printed_values():
    assert ENTRY.inputs("emulated") == {
        "a": "results/emulated/toy/a.csv",
        "published_a": "config/published/toy_a.csv",
    }


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
        "def draw(paths, source):\n    raise KeyError(paths, source)\n"
    )
    for number, kind in enumerate(kinds):
        write_csv(toy_tables()[0].assign(provenance=kind), f"{number}.csv", THROUGHPUT)
    given = {"times": [f"{number}.csv" for number in range(len(kinds))], "a": "a.csv"}
    job = SimpleNamespace(
        log=["job.log"],
        input=given,
        output=SimpleNamespace(pdf="one.pdf"),
        params=SimpleNamespace(draw="drawing_of_a_test:draw", options={}, title="One", caption="On it."),
        wildcards=SimpleNamespace(source="measured"),
    )
    script = root / "workflow" / "scripts" / "draw_figure.py"
    with pytest.raises(KeyError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"snakemake": job})
    assert caught.value.args == ({"a": "a.csv"}, expected)


def test_the_caption_says_what_the_iteration_times_are():
    assert ENTRY.captioned("emulated", "emulated") == "On emulated."
    shown = shown_source("measured", ["emulated"])
    assert ENTRY.captioned("measured", shown) == "On given. Iteration times: emulated, given as measured."


def test_the_rule_writes_the_caption_of_the_report_beside_the_figure(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawing_of_a_caption.py").write_text(
        "import pandas as pd\n\nfrom makespan.plots import new_figure\n\n\n"
        "def draw(paths, source):\n    return new_figure(1, 1), pd.DataFrame({'a': [1]})\n"
    )
    caption = ENTRY.captioned("measured", shown_source("measured", ["emulated"]))
    job = SimpleNamespace(
        log=["job.log"],
        input={"times": []},
        output=SimpleNamespace(pdf="one.pdf"),
        params=SimpleNamespace(draw="drawing_of_a_caption:draw", options={}, title="One", caption=caption),
        wildcards=SimpleNamespace(source="measured"),
    )
    script = root / "workflow" / "scripts" / "draw_figure.py"
    exec(compile(script.read_text(), str(script), "exec"), {"snakemake": job})
    assert (tmp_path / "one.txt").read_text() == f"One\n\n{caption}\n"


def test_a_setting_that_does_not_exist_is_named():
    entry = FigureEntry("toy", "one", "One", "", "toy:one", ("a",), settings={"x": "morphling.fig6.x"})
    with pytest.raises(ConfigError, match=r"'morphling\.fig6\.x'"):
        entry.options(load_settings())


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [("{title: A, caption: b, draw: 'c:d'}", "tables"), ("{title: A, caption: b, colour: red}", "colour")],
)
def test_an_entry_with_a_wrong_key_is_refused(entry, wrong, tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "figures.yaml").write_text(f"one: {entry}\n")
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match=f"toy/figures.yaml: figure 'one' has .*{wrong}"):
        figures("toy")
