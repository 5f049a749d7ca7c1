"""The study of nodes that fail: its tables, its analytic model, its figures and its statements."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from makespan.claims import Claim
from makespan.hardware import cluster
from makespan.papers.experiment import Given, paper_named
from makespan.papers.morphling import checks, figures
from makespan.papers.morphling.failures import Failures, expected_of, gains, stretched, summarised
from makespan.sim import Recovery, expected_goodput
from makespan.studies import demand, scenario
from makespan.throughput import EmulatedSource, ReferenceTimes
from makespan.units import DAY

SOURCE = EmulatedSource(cluster("a800-64"), "L1", 0, 1.0)
TIMES = ReferenceTimes({key: SOURCE.load(key) for key in ("roberta", "bert", "llama7")})


def study(**changes):
    options = {name: field.default for name, field in Failures.model_fields.items()}
    chosen = {
        "gpus": (64,),
        "jobs": 6,
        "per_day": (1.0, 200.0),
        "seeds": (1, 2),
        "policies": ("fifo", "morphling-lookahead"),
        "delay_s": 260.0,
        "interval_s": 60.0,
    }
    return Failures.model_construct(**options | chosen | changes)


@pytest.fixture(scope="module")
def made():
    base = scenario("base", n_jobs=60)
    return study().simulated({"base": base}, Given("emulated", times=TIMES.tables))


def test_every_setting_has_a_row_and_every_table_its_columns(made):
    for name, table in made.items():
        assert list(table.columns) == paper_named("morphling").schema_of(name).names
    rows = made["failures"]
    assert len(rows) == 2 * 3 * 2 * 2
    assert not rows.duplicated(["gpus", "per_day", "recovery", "policy", "seed"]).any()
    shares = rows[["goodput", "lost_share", "checkpoint_share", "recovery_share", "restart_share"]]
    assert shares.sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert (rows["expected_goodput"].notna() == (rows["recovery"] == "restart")).all()
    assert len(made["failures_summary"]) == len(rows) / 2
    assert set(made["failures_gains"]["recovery"]) == {"elastic", "resilient"}


def test_options_are_checked_and_recoveries_have_the_costs_that_are_configured():
    chosen = study(checkpoint_interval_s=60.0, checkpoint_s=5.0, resilient_pause_s=3.0, f=2)
    assert chosen.recovery("restart") == Recovery("restart", 60.0, 5.0)
    assert chosen.recovery("elastic") == Recovery("elastic", 60.0, 5.0, pause_s=78.0)
    assert chosen.recovery("resilient") == Recovery("resilient", 60.0, 5.0, pause_s=3.0, f=2)
    for wrong in ({"f": 0}, {"stretch": 0.0}, {"repair_s": -1.0}, {"recoveries": ("never",)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Failures.model_validate(wrong)


def test_a_stretched_list_has_longer_jobs_and_the_load_of_the_cluster():
    once, longer, larger = (
        stretched(gpus, 40, stretch, 7, TIMES) for gpus, stretch in ((64, 1.0), (64, 10.0), (256, 10.0))
    )
    assert [job.steps for job in longer] == pytest.approx([10 * job.steps for job in once], rel=0.01)
    assert [job.submit_time_s for job in longer] == pytest.approx([10 * job.submit_time_s for job in once])
    assert len(larger) == 4 * len(longer)
    base = scenario("base", n_jobs=60)
    loads = [
        demand(replace(base, jobs=jobs, cluster=replace(base.cluster, nodes=base.cluster.nodes * n))).load
        for jobs, n in ((once, 1), (longer, 1), (larger, 4))
    ]
    assert loads[1] == pytest.approx(loads[0], rel=0.02)
    assert loads[2] == pytest.approx(loads[1], rel=0.5)  # another draw of four times as many jobs


def test_the_analytic_model_counts_the_nodes_of_each_job_and_its_first_start():
    base = replace(scenario("base", n_jobs=6), restart_delay_s=100.0)
    (job, *_) = base.jobs
    one = replace(base, jobs=(replace(job, steps=10_000),))
    requested = one.catalogue.on(one.cluster).requested(one.jobs[0])
    recovery = Recovery("restart", 600.0, 30.0)
    work_s = 10_001 * requested.iter_time_s
    mtbf_s = DAY / 40 * 8 / requested.n_nodes
    pace = expected_goodput(recovery, mtbf_s, one.restart_delay_s)
    assert expected_of(one, one.restart_delay_s, 40.0, recovery) == pytest.approx(
        work_s / (one.restart_delay_s + work_s / pace)
    )
    assert expected_of(one, one.restart_delay_s, 0.0, recovery) > expected_of(
        one, one.restart_delay_s, 40.0, recovery
    )


def rows_of(goodput, jct_s, recovery, policy="fifo", per_day=100.0, seeds=(1, 2, 3, 4)):
    return pd.DataFrame(
        {
            "gpus": 64,
            "per_day": per_day,
            "recovery": recovery,
            "policy": policy,
            "seed": seeds,
            "goodput": goodput,
            "avg_jct_s": jct_s,
            "expected_goodput": 0.5 if recovery == "restart" else np.nan,
        }
    )


SPREAD = np.array([0.0, 0.01, 0.02, 0.03])


def test_gains_compare_the_same_list_and_failures():
    table = pd.concat([
        rows_of(0.5 + SPREAD, 100.0 + 10 * SPREAD, "restart"),
        rows_of(2 * (0.5 + SPREAD), (100.0 + 10 * SPREAD) / 4, "elastic"),
    ])  # fmt: skip
    (row,) = gains(table).to_dict("records")
    assert (row["goodput_ratio_mean"], row["jct_ratio_mean"]) == pytest.approx((2.0, 4.0))
    assert row["jct_ratio_low"] == pytest.approx(row["jct_ratio_high"])
    assert row["seeds"] == 4
    assert gains(table[table["recovery"] == "restart"]).empty
    assert summarised(table)["expected_goodput"].tolist() == pytest.approx([0.5, np.nan], nan_ok=True)


# --- statements -----------------------------------------------------------------------------------


def judged(check, tables, subject, limit=4.0, table="failures_gains"):
    return getattr(checks, f"_{check}")(tables, Claim(subject, limit, {}, table))


def better(factor):
    return {
        "failures_gains": gains(
            pd.concat([
                rows_of(0.5 + SPREAD, 100.0 + 10 * SPREAD, "restart"),
                rows_of((0.5 + SPREAD) * factor, 100.0 + SPREAD, "elastic"),
            ])
        )
    }  # fmt: skip


def test_gains_decide_by_their_interval():
    assert judged("recovery_gains", better(1.2), "elastic goodput_ratio 100").holds is True
    assert judged("recovery_gains", better(0.9), "elastic goodput_ratio 100").holds is False
    spread = better(np.array([1.5, 0.7, 1.4, 0.8]))
    assert judged("recovery_gains", spread, "elastic goodput_ratio 100").holds is None
    assert judged("recovery_gains", better(1.2), "elastic goodput_ratio 100", limit=5).holds is None
    assert judged("recovery_gains", better(1.2), "resilient goodput_ratio 100") is None


def test_recoveries_are_indifferent_within_the_limit():
    assert judged("recovery_indifferent", better(1.005), "100", 0.01).holds is True
    assert judged("recovery_indifferent", better(0.98), "100", 0.01).holds is False
    assert judged("recovery_indifferent", better(1.0), "3", 0.01) is None


def test_goodput_falls_only_if_it_falls_at_every_step():
    falling = pd.concat(
        [rows_of(0.9 - rate / 200, 1.0, "restart", per_day=rate) for rate in (1.0, 10.0, 100.0)]
    )
    tables = {"failures_summary": summarised(falling)}
    found = judged("goodput_falls", tables, "restart", table="failures_summary")
    assert found.holds and "1 of 1 cases: 0.90 to 0.40" in found.reproduced
    bumpy = pd.concat([falling, rows_of(0.9, 1.0, "restart", per_day=200.0)])
    found = judged(
        "goodput_falls", {"failures_summary": summarised(bumpy)}, "restart", table="failures_summary"
    )
    assert not found.holds and "fifo on 64 GPUs" in found.note
    assert judged("goodput_falls", tables, "elastic", table="failures_summary") is None


def test_the_model_agrees_within_the_limit():
    tables = {"failures_summary": summarised(rows_of(0.47, 1.0, "restart"))}
    assert judged("model_agrees", tables, "fifo", 0.05, "failures_summary").holds is True
    assert judged("model_agrees", tables, "fifo", 0.02, "failures_summary").holds is False
    assert judged("model_agrees", tables, "sia", 0.05, "failures_summary") is None


def test_leads_count_every_rate_recovery_and_size():
    own = rows_of(0.5, 100.0 + SPREAD, "restart", policy="morphling-lookahead")
    for jct_s, holds in ((200.0, True), (50.0, False), (np.array([200.0, 50.0, 300.0, 40.0]), None)):
        table = pd.concat([own, rows_of(0.5, jct_s, "restart", policy="sia")])
        found = judged("leads_under_failures", {"failures": table}, "morphling-lookahead", table="failures")
        assert found.holds is holds
    assert judged("leads_under_failures", {"failures": own}, "morphling-lookahead", table="failures") is None


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [figures.failures_goodput, figures.failures_jct])
def test_figures_have_a_panel_for_each_size_and_policy_with_a_line_for_each_recovery(made, draw):
    figure, table = draw(made, "emulated")
    assert isinstance(figure, Figure)
    assert table is made["failures_summary"]
    assert len(figure.axes) == 2
    for axes in figure.axes:
        marked = [line for line in axes.lines if line.get_marker() in ("o", "s", "^")]
        assert len(marked) == 3 and all(len(line.get_xdata()) == 2 for line in marked)
