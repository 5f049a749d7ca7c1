"""Fig. 8: GPUs are divided equally or by sensitivity, and the speed-ups come from the tables."""

import numpy as np
import pandas as pd
import pytest

from makespan.errors import InputError, TraceError
from makespan.papers.experiment import Given
from makespan.papers.morphling.sharing import Fig8

PUBLISHED = pd.DataFrame(
    {
        "scheduler": ["Simple", "Morphling"],
        "job": ["flat", "flat"],
        "published_gpus": [2, 1],
        "published_plan": ["ga", ""],
        "published_speedup": [0.9, 0.8],
        "source": "test",
    }
)


def job(rows, batch=8):
    frame = pd.DataFrame(rows, columns=["exec_plan", "placement", "iter_time_s", "clean"])
    return frame.assign(
        workload="x",
        global_batch_size=batch,
        feasible=frame["iter_time_s"] > 0,
        flag=np.where(frame["clean"], "", "odd"),
    )


FLAT = job([("ga", "1", 1.25, True), ("gc", "1", 2.0, True), ("ga", "2", 1.1, True), ("ga", "4", 1.0, True)])
STEEP = job(
    [
        ("zero-offload", "1", 20.0, True),
        ("zero-offload", "2", 10.0, True),
        ("tp+ga", "2", 12.0, True),
        ("tp+ga", "3", 2.2, True),
        ("tp+ga", "4", 2.0, True),
    ]
)


def fig8(jobs, gpus):
    """Return the table of jobs with given iteration times."""
    given = Given("emulated", times=jobs, cells={"fig8": PUBLISHED})
    experiment = Fig8.model_construct(gpus=gpus, known=())
    return experiment.run(given)["fig8"]


def pick(table, scheduler, name):
    return table[(table["scheduler"] == scheduler) & (table["job"] == name)].iloc[0]


def test_simple_divides_equally_and_takes_the_best_plan():
    table = fig8({"flat": FLAT, "steep": STEEP}, 4)
    flat, steep = pick(table, "Simple", "flat"), pick(table, "Simple", "steep")
    assert (flat["gpus"], steep["gpus"]) == (2, 2)
    assert (flat["plan"], steep["plan"]) == ("ga", "zero-offload")
    assert flat["speedup"] == pytest.approx(1 / 1.1)
    assert steep["speedup"] == pytest.approx(0.2)


def test_morphling_gives_gpus_to_the_steeper_job():
    table = fig8({"flat": FLAT, "steep": STEEP}, 4)
    assert (pick(table, "Morphling", "flat")["gpus"], pick(table, "Morphling", "steep")["gpus"]) == (1, 3)
    total = table.groupby("scheduler")["speedup"].sum()
    assert total["Morphling"] == pytest.approx(1 / 1.25 + 2.0 / 2.2)
    assert total["Morphling"] > total["Simple"]


def test_division_is_the_best_of_all_divisions():
    rng = np.random.default_rng(3)
    for _ in range(20):
        jobs = {
            name: job([("ga", str(g), float(rng.uniform(1, 5)), True) for g in range(1, 7)])
            for name in ("a", "b", "c")
        }
        table = fig8(jobs, 6)
        own = table[table["scheduler"] == "Morphling"]
        assert own["gpus"].sum() == 6 and own["gpus"].min() >= 1
        alone = {name: float(frame["iter_time_s"].iloc[5]) for name, frame in jobs.items()}
        best = max(
            sum(alone[n] / float(jobs[n]["iter_time_s"].iloc[g - 1]) for n, g in zip("abc", d, strict=True))
            for d in [(i, j, 6 - i - j) for i in range(1, 5) for j in range(1, 6 - i)]
        )
        assert own["speedup"].sum() == pytest.approx(best)


def test_of_equal_divisions_the_most_even_one_is_taken():
    linear = job([("ga", str(g), 4.0 / g, True) for g in range(1, 5)])
    table = fig8({"a": linear, "b": linear}, 4)
    assert table["gpus"].tolist() == [2, 2, 2, 2]


def test_with_a_count_that_cannot_run_the_job_keeps_fewer():
    large = job([("tp+ga", "1", 9.0, True), ("tp+ga", "3", 3.0, True), ("tp+ga", "6", 2.0, True)])
    row = pick(fig8({"flat": FLAT, "large": large}, 6), "Simple", "flat")
    assert (row["gpus"], row["plan"]) == (3, "ga")
    assert row["speedup"] == pytest.approx(1 / 1.1)


def test_published_cells_stand_beside():
    table = fig8({"flat": FLAT, "steep": STEEP}, 4)
    assert pick(table, "Simple", "flat")["published_speedup"] == 0.9
    assert np.isnan(pick(table, "Simple", "steep")["published_speedup"])
    assert pick(table, "Simple", "steep")["published_plan"] == ""
    three = fig8({"flat": FLAT, "steep": STEEP}, 3)  # the paper has four
    assert three["published_speedup"].isna().all() and set(three["published_plan"]) == {""}


def test_flagged_rows_count_and_the_speedup_without_them_stands_beside():
    flagged = job(
        [("ga", "1", 0.9, False), ("gc", "1", 2.0, True), ("ga", "2", 1.1, True), ("ga", "4", 1.0, True)]
    )
    table = fig8({"flat": flagged, "steep": STEEP}, 4)
    row = pick(table, "Morphling", "flat")
    assert (row["plan"], row["clean"], row["flag"]) == ("ga", False, "odd")
    assert row["speedup"] == pytest.approx(1 / 0.9)
    assert row["clean_speedup"] == pytest.approx(0.5)
    only = job([("ga", "1", 0.9, False), ("ga", "2", 1.1, True), ("ga", "4", 1.0, True)])
    table = fig8({"flat": only, "steep": STEEP}, 4)
    assert np.isnan(pick(table, "Morphling", "flat")["clean_speedup"])


def test_infeasible_rows_are_not_plans():
    rows = [("ga", "1", 0.0, True), ("ga", "2", 1.1, True), ("ga", "4", 1.0, True)]
    with pytest.raises(TraceError, match=r"job 'flat': .* no feasible plan on one node with 1 GPU"):
        fig8({"flat": job(rows), "steep": STEEP}, 4)


def test_more_gpus_than_a_node_of_the_tables_has():
    with pytest.raises(InputError, match=r"fig8\.gpus is 6; expected a number that a job has on one node"):
        fig8({"flat": FLAT, "steep": STEEP}, 6)


def test_fewer_gpus_than_jobs():
    with pytest.raises(InputError, match="1 GPUs for 2 jobs"):
        fig8({"flat": FLAT, "steep": STEEP}, 1)
