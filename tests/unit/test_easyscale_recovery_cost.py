"""The predicted cost of surviving losses, and how well it fits measurements on more processes."""

import runpy
from pathlib import Path

import pandas as pd
import pytest

from makespan.easyscale import recovery_cost
from makespan.easyscale.recovery_cost import (
    CostConstants,
    judged_costs,
    measured_constants,
    predict_recovery,
)
from makespan.errors import InputError
from makespan.runtime.messages import Shared

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_recovery_cost.py"

KNOWN = CostConstants(
    (1e-3, 2e-4),
    (5e-4, 1e-4, 5e-7),
    (1e-2, 3e-4, 2e-3),
    (1e-4, 1e-9),
    (1e-5, 5e-5, 2e-9),
    (1e-3, 2e-9),
    (0.0, 4e-9),
)


def test_constants_that_made_the_measurements_are_found_again(monkeypatch):
    rows = []
    for m in range(1, 16):
        coordinator_s = 1e-3 + 2e-4 * m
        rows.append(("loss", m, 16, 1, 0, 0, coordinator_s, 1e-2 + 3e-4 * m + 2e-3 * 16 / m, None, None))
    for m in (16, 64, 256, 1024):
        rows.append(("agree", m, m, 1, 0, 0, 5e-4 + 1e-4 * m + 5e-7 * m * m, None, None, None))
    for n, survives in ((2, 1), (4, 1), (4, 2), (4, 3), (16, 1), (16, 3)):
        for size in (0, 1 << 20):
            pack_s, copy_s = 1e-4 + 1e-9 * size, 1e-5 + survives * (5e-5 + 2e-9 * size)
            rows.append(("step", n, n, survives, size, 0, None, 1e-3 * n, pack_s, copy_s))
    for size in (1 << 20, 1 << 23, 1 << 25):
        rows.append(("join", 3, 4, 1, 0, size, 1e-3 + 2e-9 * size, 4e-9 * size, None, None))
    columns = ["kind", "n_processes", "n_logical_workers", "survives", "buffer_bytes", "parameter_bytes"]
    table = pd.DataFrame(rows, columns=[*columns, "coordinator_s", "worker_s", "pack_s", "copy_s"])
    monkeypatch.setattr(recovery_cost, "measurements", lambda: table)
    monkeypatch.setattr(recovery_cost, "measured_constants", measured_constants.__wrapped__)
    found = recovery_cost.measured_constants(on_few=True)
    for name in CostConstants.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-5, abs=1e-9), name
    judged = judged_costs()
    assert judged["predicted_s"].tolist() == pytest.approx(judged["measured_s"].tolist(), rel=1e-5)
    assert set(judged["quantity"]) == {
        "coordinator",
        "agreeing",
        "connecting",
        "sending",
        "receiving",
        "packing",
        "copying",
    }


def test_parts_add_up_with_latencies_and_transfers():
    cost = predict_recovery(
        5,
        2.0,
        parameter_bytes=1e9,
        context_bytes=1e6,
        survives=2,
        bandwidth=1e9,
        latency_s=1e-3,
        constants=KNOWN,
    )
    sent_s = 1e-3 + 2 * 1e6 / 1e9
    assert cost.keep_s == pytest.approx(1e-4 + 1e-9 * 1e6 + 1e-5 + 2 * (5e-5 + 2e-9 * 1e6) + sent_s)
    assert cost.agree_s == pytest.approx(1e-3 + 2e-4 * 4 + 5e-7 * 16 + 7e-3)
    assert cost.connect_s == pytest.approx(1e-2 + 3e-4 * 4 + 2e-3 * 5 / 4)
    assert cost.copy_s == pytest.approx(1e-3 + 1e-3 + sent_s)
    assert (cost.detect_s, cost.lost_s) == (1e-3, 1.0)
    assert cost.state_s == pytest.approx(6.0 + 3.0)
    parts = (cost.detect_s, cost.agree_s, cost.connect_s, cost.copy_s, cost.lost_s)
    assert cost.pause_s == pytest.approx(sum(parts))
    assert cost.join_s == pytest.approx(cost.agree_s + cost.connect_s + cost.copy_s + cost.state_s)
    hung = predict_recovery(5, 2.0, parameter_bytes=1, detect_s=10.0, constants=KNOWN)
    assert hung.detect_s == 10.0


def test_the_measured_constants_predict_the_coordinator_better_than_no_model():
    """It is the only part that grows with the square of the devices."""
    judged = judged_costs()
    for quantity, kind, largest, share in (("coordinator", "loss", 15, 1), ("agreeing", "agree", 2048, 0.5)):
        part = judged[judged["quantity"] == quantity]
        assert part["size"].min() > recovery_cost.MOST_FITTED[kind] and part["size"].max() == largest
        error, baseline = (
            ((part[name] / part["measured_s"] - 1).abs()).mean() for name in ("predicted_s", "baseline_s")
        )
        assert error < share * baseline


def test_each_member_gets_the_addresses_of_all_others_in_one_message(tmp_path, monkeypatch):
    script, got = runpy.run_path(str(SCRIPT)), []
    members = script["Members"]
    answer = members.answer

    def count(self, node, message):
        got.extend([(message.generation, len(message.values))] if isinstance(message, Shared) else [])
        answer(self, node, message)

    monkeypatch.setattr(members, "answer", count)
    measured = script["agree"](tmp_path, 5)
    assert measured["n_processes"] == 5 and measured["coordinator_s"] > 0.0
    assert sorted(got) == 6 * [(1, 6)] + 5 * [(2, 5)]


def test_the_script_times_the_contexts_of_a_run(tmp_path):
    pytest.importorskip("torch")
    steps = runpy.run_path(str(SCRIPT))["steps"]
    steps.__globals__.update(STEPS=22, FIRST=2)  # times are written after twenty mini-batches
    measured = steps(tmp_path, 2, 1, 4096)
    assert measured["n_processes"] == 2
    assert all(0.0 < measured[name] < measured["worker_s"] for name in ("pack_s", "copy_s"))


def test_the_page_says_which_part_of_a_pause_is_the_largest():
    few, many = (predict_recovery(n, 1.0, parameter_bytes=4e9) for n in (100, 4096))
    assert few.lost_s == max(few.agree_s, few.connect_s, few.copy_s, few.lost_s)
    assert many.agree_s == max(many.agree_s, many.connect_s, many.copy_s, many.lost_s)
    assert few.keep_s == many.keep_s
    assert few.state_s > 0.9 * few.join_s  # a join is packing and unpacking state


def test_sizes_out_of_range_are_rejected():
    for survives in (0, 4):
        with pytest.raises(InputError, match=f"survives is {survives} with 4 devices; expected 1 to 3"):
            predict_recovery(4, 1.0, parameter_bytes=1e6, survives=survives)
    with pytest.raises(InputError, match="n_devices is 1; expected at least 2"):
        predict_recovery(1, 1.0, parameter_bytes=1e6)
    with pytest.raises(InputError, match="step_s is 0; expected a number > 0"):
        predict_recovery(4, 0, parameter_bytes=1e6)
    for name in ("parameter_bytes", "context_bytes", "latency_s", "detect_s"):
        for value in (-1, float("nan"), float("inf")):
            with pytest.raises(InputError, match=f"{name} is {value}; expected a number >= 0"):
                predict_recovery(4, 1.0, **({"parameter_bytes": 1e6} | {name: value}))
    with pytest.raises(InputError, match="bandwidth is -1"):
        predict_recovery(4, 1.0, parameter_bytes=1e6, bandwidth=-1)
