"""Every number with a unit in README and docs is generated, tested, or listed with its source.

Left out are numbers of generated blocks, of code, of tables below ``<!-- table: ... -->``, which other tests
compare, and of histories, which record what was expected. All others stand in ``tests/support/numbers.csv``:
constants and options of the project are searched in the file that sets them.
"""

import csv
import re

import pytest
from pages import PAGES, ROOT, name_of

UNITS = r"(?:s|ms|min|h|hours?|minutes?|seconds?|x|times|%|percent|[KMG]i?B|samples/s|points)"
NUMBER = re.compile(rf"(?<![\w.`-])\d[\d,.]*(?: to \d[\d.,]*)? ?{UNITS}(?![\w/])")
LEFT_OUT = (
    re.compile(r"<!-- (.+?) -->\n.*?<!-- end of \1 -->", re.DOTALL),
    re.compile(r"<!-- table: .*? -->\n\n(?:\|.*\n)+"),
    re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE),
    re.compile(r"`[^`\n]+`"),
)
GENERATED = {"cli", "tables", "configuration", "api", "primitives"}
KINDS = {"setting", "paper", "goal", "derived"}
with (ROOT / "tests/support/numbers.csv").open(newline="") as file:
    LISTED = list(csv.DictReader(file))


def numbers(text):
    """Return the numbers with a unit that somebody typed."""
    for pattern in LEFT_OUT:
        text = pattern.sub(" ", text)
    return [" ".join(match[0].split()) for match in NUMBER.finditer(text)]


def test_every_typed_number_is_listed_and_every_listed_one_is_typed():
    pages = [page for page in PAGES if page.stem not in GENERATED and not page.stem.startswith("history-")]
    typed = {(name_of(page), number) for page in pages for number in numbers(page.read_text())}
    listed = {(row["page"], row["number"]) for row in LISTED}
    assert sorted(typed - listed) == [], "generate or test these numbers, or list them with their source"
    assert sorted(listed - typed) == [], "these numbers are no longer on their page"
    assert len(listed) == len(LISTED)


@pytest.mark.parametrize("row", LISTED, ids=lambda row: f"{row['page']}: {row['number']}")
def test_a_listed_number_has_a_source_and_a_setting_is_found_where_it_is_set(row):
    assert row["kind"] in KINDS and row["source"]
    if row["kind"] == "setting":
        assert row["evidence"], row
        assert re.search(row["evidence"], (ROOT / row["source"]).read_text()), row


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it took 3.5 s, or 12 % more", ["3.5 s", "12 %"]),
        ("from 2 to 20 % of 16 GB", ["2 to 20 %", "16 GB"]),
        ("Fig. 7, 64 GPUs, seeds 1 to 3, `3 s`, gpt2-1.5b", []),
        ("<!-- a -->\n| 3 s |\n<!-- end of a -->\n```text\n5 s\n```\n", []),
    ],
)
def test_numbers_are_found_in_prose_alone(text, found):
    assert numbers(text) == found
