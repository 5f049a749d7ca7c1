"""The comparison of a text with a golden file: words exactly, numbers to a tolerance that the file states."""

import re

import pytest

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)")
HEADER = "# Numbers with a fraction agree to a relative tolerance of {:g}; the rest agrees exactly.\n"


def agree(text, recorded, where):
    """Compare line by line: words exactly, numbers with a fraction to the tolerance in the header."""
    header, _, expected = recorded.partition("\n")
    rtol = float(NUMBER.search(header).group())
    new, old = text.splitlines(), expected.splitlines()
    for number, (line, wanted) in enumerate(zip(new, old, strict=False), start=2):
        assert NUMBER.sub("#", line) == NUMBER.sub("#", wanted), f"{where}, line {number}"
        values, known = ([float(one) for one in NUMBER.findall(part)] for part in (line, wanted))
        assert values == pytest.approx(known, rel=rtol, abs=0), f"{where}, line {number}"
    assert len(new) == len(old), f"{where}: {len(new)} lines instead of {len(old)}"
