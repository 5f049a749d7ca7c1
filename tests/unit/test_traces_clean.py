"""The anomaly rule: what it flags, what it leaves alone, what it never looks at."""

import numpy as np
import pandas as pd
import pytest

from makespan.tables import THROUGHPUT
from makespan.throughput import flag_anomalies
from makespan.throughput.sources import FLAG_FAILED, FLAG_HALF_BATCH, FLAG_SLOW_FORWARD
from makespan.workloads import workload

PLACEMENTS = ("1", "2", "11", "4", "22", "112", "1111", "8", "44", "35", "2222", "11222", "11111111")


def healthy(key="bert"):
    """Return a table whose phases are proportional to the samples of a replica."""
    spec = workload(key)
    rows = []
    for plan in ("ga", "gc", "zero-dp", "zero-offload"):
        for place in PLACEMENTS:
            batch = spec.global_batch_size / sum(int(digit) for digit in place)
            phases = (0.002 * batch, 0.005 * batch, 0.03)
            rows.append((key, plan, place, 12, spec.global_batch_size, sum(phases) + 0.01, *phases))
    frame = pd.DataFrame(rows, columns=THROUGHPUT.names[:9])
    return frame.assign(feasible=True, clean=True, flag="", provenance="made up")


def is_odd(frame):
    return frame["placement"].map(lambda text: len(text) > 1 and any(int(digit) % 2 for digit in text))


def test_healthy_rows_stay_clean():
    flagged = flag_anomalies(healthy(), workload("bert"))
    assert flagged["clean"].all()
    assert (flagged["flag"] == "").all()


@pytest.mark.parametrize("factor", [1.4, 9.0])
def test_a_family_with_slow_odd_placements_is_flagged_whole(factor):
    frame = healthy()
    slow = is_odd(frame) & (frame["exec_plan"] == "gc")
    frame.loc[slow, "forward_s"] *= factor
    flagged = flag_anomalies(frame, workload("bert"))
    assert set(flagged.index[flagged["flag"] == FLAG_SLOW_FORWARD]) == set(frame.index[slow])
    assert flagged.loc[~slow, "clean"].all()


def test_one_slow_row_does_not_condemn_its_family():
    frame = healthy()
    row = (frame["exec_plan"] == "ga") & (frame["placement"] == "11222")
    frame.loc[row, "forward_s"] *= 3.0
    assert flag_anomalies(frame, workload("bert"))["clean"].all()


def test_even_placements_are_never_flagged_as_odd():
    frame = healthy()
    frame.loc[frame["placement"] == "2222", "forward_s"] *= 3.0
    flagged = flag_anomalies(frame, workload("bert"))
    assert flagged.loc[frame["placement"] == "2222", "clean"].all()


def test_a_row_on_one_gpu_that_ran_half_the_batch_is_flagged():
    frame = healthy("roberta")
    half = (frame["placement"] == "1") & (frame["exec_plan"] != "gc")
    frame.loc[half, ["forward_s", "overlap_sync_s"]] /= 2.0
    flagged = flag_anomalies(frame, workload("roberta"))
    assert (flagged["flag"] == FLAG_HALF_BATCH).tolist() == half.tolist()


def test_failed_runs_are_flagged_even_if_their_plan_cannot_be_built():
    frame = healthy()
    failed = frame.iloc[[0]].assign(
        exec_plan="zero-offload", placement="888888888", iter_time_s=np.nan, feasible=False
    )
    flagged = flag_anomalies(pd.concat([frame, failed], ignore_index=True), workload("bert"))
    assert flagged["flag"].tolist().count(FLAG_FAILED) == 1
    assert not flagged["clean"].iloc[-1]
    assert flagged["clean"].iloc[:-1].all()


def test_iteration_times_do_not_matter():
    frame = healthy()
    doubled = frame.assign(iter_time_s=frame["iter_time_s"] * np.where(is_odd(frame), 5.0, 1.0))
    assert flag_anomalies(doubled, workload("bert"))["clean"].all()


def test_rows_without_phases_stay_clean():
    frame = healthy().assign(forward_s=np.nan, overlap_sync_s=np.nan)
    assert flag_anomalies(frame, workload("bert"))["clean"].all()


def test_order_of_rows_does_not_matter_and_the_input_is_left_alone():
    frame = healthy()
    frame.loc[is_odd(frame) & (frame["exec_plan"] == "ga"), "forward_s"] *= 2.0
    before = frame.copy()
    turned = flag_anomalies(frame.iloc[::-1], workload("bert")).iloc[::-1]
    pd.testing.assert_frame_equal(turned, flag_anomalies(frame, workload("bert")))
    pd.testing.assert_frame_equal(frame, before)
