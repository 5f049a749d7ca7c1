"""The entries of the papers' figures: complete, callable, and refused with a reason where they are not."""

import inspect
from importlib import import_module, resources

import pytest

from makespan.config import load_settings
from makespan.errors import ConfigError
from makespan.papers import FigureEntry, figures

ENTRIES = [entry for paper in ["morphling"] for entry in figures(paper).values()]
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
