"""The examples run as they stand, name their sources, and stand in the overviews as they predict."""

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.planning import (
    Pricer,
    Training,
    find_tables,
    parse_layout,
    read_machines,
    read_model,
    read_rows,
    software as stack_named,
)
from makespan.units import GIB

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_GPU = ROOT / "examples/one_gpu"
RATES = r"([\d,]+) \(([\d,]+) to ([\d,]+)\)"


def test_five_real_runs_are_shown():
    sizes = [path.stem.split("_on_")[1] for path in EXAMPLES]
    assert sorted(sizes) == ["256_h100", "32_a100", "512_h100", "64_h100", "8_h100"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
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


# --- steps on one GPU ------------------------------------------------------------------------------------


def rows_of(name):
    """Return the rows of a table of the steps on one GPU, as texts."""
    with (ONE_GPU / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_step_is_used_or_ran_out_of_memory():
    used, refused = read_rows([ONE_GPU / "measured.csv"])
    assert (len(used), {one.reason for one in refused}) == (34, {"ran out of memory"})
    assert len(used) + len(refused) == len(rows_of("predicted.csv")) == 40
    assert {row.stack.name for row in used} == {"transformers"}
    # What was written down before stands for the same runs, in the same order.
    for before, measured in zip(rows_of("predicted.csv"), rows_of("measured.csv"), strict=True):
        assert [before[name] for name in ("model", "seq")] == [measured[name] for name in ("model", "seq")]
        assert before["batch"] == measured["global_batch"]
        assert before["parameters"] == measured["params"]  # counted before, and by PyTorch


def test_memory_of_steps_on_one_gpu_is_counted_as_allocated():
    errors = []
    for before, measured in zip(rows_of("predicted.csv"), rows_of("measured.csv"), strict=True):
        model = read_model(ONE_GPU / "models" / f"{before['model']}.json")
        training = Training(model, int(before["seq"]), int(before["batch"]))
        pricer = Pricer(training, read_machines("1xh100-80"), stack_named("transformers"))
        one = pricer.price(parse_layout(before["layout"], 1))
        assert one.is_feasible == (measured["note"] == "")
        if one.is_feasible:
            counted = (one.total_memory_bytes - one.memory_bytes["reserve"]) / GIB
            errors.append(abs(counted / float(measured["peak_mem_gib"]) - 1))
    assert sum(errors) / len(errors) < 0.03
    assert max(errors) < 0.12


def test_what_is_predicted_with_a_model_left_out_is_what_the_fit_gives(published_dir):
    rows, _ = read_rows(find_tables(published_dir))
    own, _ = read_rows([ONE_GPU / "measured.csv"])
    left_out = runpy.run_path(str(ROOT / "scripts/fit_stacks.py"))["left_out"]
    few = [row for row in own if row.training.model.name in ("opt-1.3b", "llama-3.2-1b")]
    table = left_out(rows, own)
    assert table["predicted_s"].tolist() == pytest.approx(
        [float(row["predicted_s"]) for row in rows_of("left_out.csv")], rel=0.01
    )
    # Knowing fewer models, an odd one out is predicted differently: the others do matter.
    assert left_out(rows, few)["predicted_s"].iloc[0] != pytest.approx(
        float(next(row["predicted_s"] for row in rows_of("left_out.csv") if row["model"] == "opt-1.3b")),
        rel=0.01,
    )


def test_errors_on_steps_that_took_part_in_the_fit_are_not_taken_for_held_out(tmp_path):
    done = CliRunner().invoke(main, ["validate-public", str(ONE_GPU / "measured.csv")])
    assert done.exit_code == 0
    assert "these errors are not held out" in done.stderr
    mine = (ONE_GPU / "measured.csv").read_text().replace("\nmakespan,", "\nours,")
    (tmp_path / "mine.csv").write_text(mine)
    done = CliRunner().invoke(main, ["validate-public", str(tmp_path / "mine.csv")])
    assert (done.exit_code, done.stderr) == (0, "")
