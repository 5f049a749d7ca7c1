"""The examples: every one runs as it stands, names its source, and stands in the overview as it predicts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RATES = r"([\d,]+) \(([\d,]+) to ([\d,]+)\)"


def test_five_real_runs_are_shown():
    sizes = [path.stem.split("_on_")[1] for path in EXAMPLES]
    assert sorted(sizes) == ["256_h100", "32_a100", "512_h100", "64_h100", "8_h100"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.untraced
def test_an_example_prints_the_published_figure_beside_its_prediction(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    ours, theirs = done.stdout.splitlines()
    predicted = re.match(RATES.replace(" ", " tokens/s per GPU ", 1), ours.removeprefix("predicted "))
    published = re.match(r"published ([\d,]+), error ([+-]\d+%): https://git(?:hub|ee)\.com/", theirs)
    (row,) = (
        line for line in (ROOT / "examples/README.md").read_text().splitlines() if f"({path.name})" in line
    )
    shown = re.search(rf"\| {RATES} \| ([\d,]+) \| ([+-]\d+%) \|$", row)
    assert shown.groups() == (*predicted.groups(), *published.groups())
