"""Formatting of quantities, and errors that say what is accepted."""

import re

import pytest

from makespan import errors, units
from makespan.errors import MakespanError, raised_in, unknown_name
from makespan.user_code import load_file


@pytest.mark.parametrize(
    ("value", "text"),
    [(80e9, "80.0 GB"), (1.6e12, "1.6 TB"), (25e6, "25.0 MB"), (2500, "2.5 kB"), (12, "12 B")],
)
def test_bytes_are_formatted_with_decimal_prefixes(value: float, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7200, "2.00 h"), (90, "1.5 min"), (1.5, "1.50 s"), (0.0125, "12.5 ms"), (3.4e-6, "3.4 us")],
)
def test_durations_are_formatted_with_a_readable_unit(value: float, text: str) -> None:
    assert units.format_seconds(value) == text


def test_unknown_names_list_what_is_accepted_and_suggest_the_closest() -> None:
    error = unknown_name("model", "lama7", ["llama7", "bert"])
    assert str(error) == ("unknown model 'lama7'; expected bert, llama7. Did you mean 'llama7'?")


def test_names_of_other_kinds_are_unknown_too() -> None:
    assert str(unknown_name("device", 3, ["a800"])) == "unknown device 3; expected a800."


def test_an_error_is_placed_where_code_of_no_package_raised_it(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("import json\ndef read(): return json.loads('{')\n")
    try:
        load_file(tmp_path / "mine.py").read()
    except ValueError as error:
        assert raised_in(error.__traceback__).endswith("mine.py, line 2")


def test_unknown_names_without_a_similar_one_suggest_nothing() -> None:
    assert "Did you mean" not in str(unknown_name("model", "zzz", ["bert"]))
    assert "Did you mean" not in str(unknown_name("model", "", ["bert"]))
    devices = ["h100-80", "h100-pcie", "h200"]
    assert str(unknown_name("device", "h100", devices)).endswith("Did you mean 'h100-80' or 'h100-pcie'?")
    assert str(unknown_name("device", "H200", devices)).endswith("Did you mean 'h200'?")


def test_all_exceptions_derive_from_one_base_and_say_when_they_are_raised() -> None:
    classes = [
        one for one in vars(errors).values() if isinstance(one, type) and one.__module__ == errors.__name__
    ]
    assert len(classes) > 10
    assert all(issubclass(cls, MakespanError) for cls in classes)
    assert all(cls.__doc__ for cls in classes)


def test_a_message_leaves_out_the_middle_of_what_is_too_long_to_read() -> None:
    error = errors.cell_error("jobs.csv", 1, "plan", "a" * 2_000_000, "zero-dp")
    text = str(error)
    assert len(text) < 1_000
    assert text.startswith("jobs.csv: row 1, column 'plan': found 'a") and text.endswith("expected zero-dp")
    assert re.search(r"a \[\.\.\. 1,999,\d\d\d letters left out \.\.\.\] a", text)
    lines = str(errors.ConfigError("\n".join(f"option {number}" for number in range(5_000)))).split("\n")
    assert len(lines) == 101 and lines[50] == "[... 4,900 lines left out ...]" and lines[-1] == "option 4999"
    assert str(MakespanError("short\nand whole")) == "short\nand whole"
