"""Metrics against schedules made by hand."""

import math

import pandas as pd
import pytest
from toy_cluster import (
    FAST,
    mixed_nodes,
    one_gpu_catalogue,
    simulate,
    throughput_rows,
    toy_catalogue,
    toy_job,
    toy_nodes,
)

from makespan.errors import TraceError
from makespan.metrics import (
    allocation_by_family,
    allocation_over_time,
    fragmentation_over_time,
    fragmentation_ratio,
    gpu_allocation_ratio,
    guarantee_breaches,
    idle_spells,
    integral,
    job_metrics,
    sla_attainment,
    summary,
    time_average,
)
from makespan.policies import REGISTRY
from makespan.sim import NodeEvent, NodeEventKind
from makespan.studies import TableCatalogue
from makespan.tables import EVENTS, JOB_METRICS, OUTCOMES


def events(*rows):
    """Build an events table of (time, kind, job, nodes, devices, family, seconds a step)."""
    return pd.DataFrame(
        [
            (time_s, seq, kind, job, nodes, n, "ga" if n else "", "", family, 4 if n else 0, step_s, 1.0, "")
            for seq, (time_s, kind, job, nodes, n, family, step_s) in enumerate(rows)
        ],
        columns=list(EVENTS.names),
    )


def outcomes(*rows):
    """Build an outcomes table of (job, submission, devices, steps, guaranteed, reference, start, finish)."""
    return pd.DataFrame(
        [
            (
                job,
                submit,
                "roberta",
                n,
                "ga",
                steps,
                sure,
                "",
                ref,
                "ga",
                4,
                "emulated",
                start,
                end,
                0,
                0.0,
                start - submit,
                0.0,
                0.0,
            )
            for job, submit, n, steps, sure, ref, start, end in rows
        ],
        columns=list(OUTCOMES.names),
    )


NONE = ("", 0, "", math.nan)

# Two jobs on 2 nodes of 2 GPUs: a holds 2 of DP in [0, 10), then 1 of GC until 20; b holds 2 in [10, 20).
TWO = events(
    (0.0, "submitted", "a", *NONE),
    (0.0, "started", "a", "0:2", 2, "DP", 1.0),
    (1.0, "ready", "a", "0:2", 2, "DP", 1.0),
    (4.0, "submitted", "b", *NONE),
    (10.0, "reconfigured", "a", "0:1", 1, "GC", 2.0),
    (10.0, "started", "b", "1:2", 2, "DP", 1.0),
    (20.0, "finished", "a", *NONE),
    (20.0, "finished", "b", *NONE),
)
TWO_DONE = outcomes(
    ("a", 0.0, 2, 9, True, 1.0, 0.0, 20.0),
    ("b", 4.0, 2, 3, True, 1.0, 10.0, 20.0),
)


def test_the_integral_of_a_step_function_is_exact_before_inside_and_after() -> None:
    found = integral([1.0, 3.0, 4.0], [2.0, 0.0, 5.0], [0.0, 1.0, 2.0, 3.5, 6.0])
    assert found.tolist() == [0.0, 0.0, 2.0, 4.0, 14.0]


def test_the_average_over_an_empty_span_is_missing() -> None:
    assert math.isnan(time_average([0.0], [1.0], 3.0, 3.0))
    assert time_average([0.0, 2.0], [1.0, 3.0], 1.0, 3.0) == 2.0


def test_allocation_over_time_counts_what_is_held_after_each_instant() -> None:
    series = allocation_over_time(TWO, toy_nodes(2, 2))
    assert series["time_s"].tolist() == [0.0, 1.0, 4.0, 10.0, 20.0]
    assert series["gpus_held"].tolist() == [2, 2, 2, 3, 0]
    assert series["gpus_present"].tolist() == [4] * 5
    assert series["gpu_allocation_ratio"].tolist() == [0.5, 0.5, 0.5, 0.75, 0.0]
    assert gpu_allocation_ratio(TWO, toy_nodes(2, 2)) == pytest.approx((10 * 2 + 10 * 3) / (20 * 4))


def test_nodes_that_fail_or_join_change_what_is_present() -> None:
    table = events(
        (0.0, "submitted", "a", *NONE),
        (0.0, "started", "a", "0:2", 2, "DP", 1.0),
        (2.0, "node_joined", "", "1", 0, "", math.nan),
        (4.0, "node_failed", "", "0", 0, "", math.nan),
        (4.0, "interrupted", "a", *NONE),
        (8.0, "started", "a", "1:2", 2, "DP", 1.0),
        (10.0, "finished", "a", *NONE),
    )
    series = allocation_over_time(table, toy_nodes(2, 2))
    assert series["gpus_present"].tolist() == [2, 4, 2, 2, 2]
    assert series["gpus_held"].tolist() == [2, 2, 0, 2, 0]
    ratio = gpu_allocation_ratio(table, toy_nodes(2, 2))
    assert ratio == pytest.approx((2 * 4 + 2 * 2) / (2 * 2 + 4 * 2 + 2 * 6))


def test_a_node_event_on_a_node_that_is_not_there_is_refused() -> None:
    table = events((0.0, "node_failed", "", "7", 0, "", math.nan))
    with pytest.raises(TraceError, match=r"'7'.*expected 0 to 1"):
        allocation_over_time(table, toy_nodes(2, 2))


def test_allocation_by_family_moves_devices_from_one_family_to_the_next() -> None:
    stacked = allocation_by_family(TWO)
    assert list(stacked) == ["time_s", "DP", "GC"]
    assert stacked["DP"].tolist() == [2, 2, 2, 2, 0]
    assert stacked["GC"].tolist() == [0, 0, 0, 1, 0]


def test_families_add_up_to_what_is_held_under_a_real_policy() -> None:
    jobs = [toy_job(f"j{i}", i * 0.5, workload="t5", n_gpus=2, plan="ga", steps=20 + i) for i in range(12)]
    spec = toy_nodes(2, 4)
    result = simulate(jobs, spec, toy_catalogue(), REGISTRY["sia"], restart_delay_s=2.0, interval_s=3.0)
    stacked = allocation_by_family(result.events).drop(columns="time_s")
    assert stacked.sum(axis=1).tolist() == allocation_over_time(result.events, spec)["gpus_held"].tolist()


def test_job_metrics_by_hand() -> None:
    # a: 1 s delay and 10 steps of 1 s alone; b: 1 s and 4 steps.
    found = job_metrics(TWO_DONE, n_gpus=4, restart_delay_s=1.0).set_index("job_id")
    assert found["jct_s"].tolist() == [20.0, 16.0]
    assert found["queueing_delay_s"].tolist() == [0.0, 6.0]
    assert found["run_alone_s"].tolist() == [11.0, 5.0]
    assert found["slowdown"].tolist() == pytest.approx([20 / 11, 16 / 5])
    # a meets 1 job for 4 s and 2 for 16 s: 1.8 on average, a share of 4 / 1.8 GPUs, more than it asked for.
    # b meets 2 all the time: a share of 2 GPUs, what it asked for.
    assert found["finish_time_fairness"].tolist() == pytest.approx([20 / 11, 16 / 5])
    assert found["n_reconfigurations"].tolist() == [1, 1]
    JOB_METRICS.validate(found.reset_index(), where="test")


def test_a_share_below_the_request_stretches_the_fair_run_but_not_the_delay() -> None:
    # Four equal jobs for 4 GPUs, each asks for 2: each owns 1, so its 6 s of work take 12 s.
    rows = [(f"j{i}", 0.0, 2, 5, False, 1.0, 0.0, 26.0) for i in range(4)]
    found = job_metrics(outcomes(*rows), n_gpus=4, restart_delay_s=1.0)
    assert found["finish_time_fairness"].tolist() == pytest.approx([26 / 13] * 4)


def test_a_job_without_work_or_delay_is_neither_slowed_nor_undefined() -> None:
    rows = [("done", 3.0, 1, 0, False, 1.0, 3.0, 3.0), ("late", 3.0, 1, 0, False, 1.0, 5.0, 5.0)]
    found = job_metrics(outcomes(*rows), n_gpus=1, restart_delay_s=0.0, extra_steps=0)
    assert found["slowdown"].tolist() == [1.0, math.inf]


def test_a_slower_configuration_breaks_a_guarantee() -> None:
    breaches = guarantee_breaches(TWO, TWO_DONE)
    assert breaches[["job_id", "kind", "time_s"]].values.tolist() == [["a", "reconfigured", 10.0]]
    assert sla_attainment(TWO, TWO_DONE) == 0.5


@pytest.mark.parametrize(("kind", "kept"), [("suspended", 0.0), ("interrupted", 1.0)])
def test_taking_the_devices_breaks_a_guarantee_unless_a_node_failed(kind, kept) -> None:
    table = events(
        (0.0, "submitted", "a", *NONE),
        (0.0, "started", "a", "0:2", 2, "DP", 1.0),
        (5.0, kind, "a", *NONE),
        (9.0, "started", "a", "0:2", 2, "DP", 1.0),
        (12.0, "finished", "a", *NONE),
    )
    assert sla_attainment(table, outcomes(("a", 0.0, 2, 9, True, 1.0, 0.0, 12.0))) == kept
    assert math.isnan(sla_attainment(table, outcomes(("a", 0.0, 2, 9, False, 1.0, 0.0, 12.0))))


def test_waiting_before_the_first_start_breaks_no_guarantee() -> None:
    assert sla_attainment(*_only_b()) == 1.0


def _only_b():
    return TWO[TWO["job_id"] == "b"], TWO_DONE[TWO_DONE["job_id"] == "b"]


def test_free_devices_are_fragmented_while_no_waiting_job_fits() -> None:
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 1.0), ("ga", "2", 0.6)])])
    jobs = [toy_job("a"), toy_job("b", 1.0), toy_job("c", 2.0, n_gpus=2)]
    table = events(
        (0.0, "submitted", "a", *NONE),
        (0.0, "started", "a", "0:1", 1, "DP", 1.0),
        (1.0, "submitted", "b", *NONE),
        (1.0, "started", "b", "1:1", 1, "DP", 1.0),
        (2.0, "submitted", "c", *NONE),  # 1 GPU is free on each node, but c wants 2 on one
        (6.0, "finished", "a", *NONE),  # now node 0 could take it
        (7.0, "started", "c", "0:2", 2, "DP", 0.6),
        (10.0, "finished", "b", *NONE),
        (12.0, "finished", "c", *NONE),
    )
    series = fragmentation_over_time(table, jobs, toy_nodes(2, 2), catalogue)
    assert series["gpus_free"].tolist() == [3, 2, 2, 3, 1, 2, 4]
    assert series["gpus_fragmented"].tolist() == [0, 0, 2, 0, 0, 0, 0]
    assert fragmentation_ratio(series) == pytest.approx((4.0 * 2 / 4) / 12.0)


def test_free_devices_of_another_type_are_fragmented() -> None:
    rows = [("ga", "1", 2.0), ("ga", "11", 1.0)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", rows)], gpu_type=FAST)
    jobs, spec = [toy_job("a"), toy_job("b", 1.0, n_gpus=2)], mixed_nodes(2, 1)
    table = events(
        (0.0, "submitted", "a", *NONE),
        (0.0, "started", "a", "0:1", 1, "DP", 1.0),
        (1.0, "submitted", "b", *NONE),  # 3 GPUs are free, one of which is fast
        (5.0, "finished", "a", *NONE),
        (6.0, "finished", "b", *NONE),
    )
    series = fragmentation_over_time(table, jobs, spec, catalogue)
    assert series["gpus_fragmented"].tolist() == [0, 3, 0, 0]


def test_guests_do_not_wait_for_devices() -> None:
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "2", 1.0)])])
    jobs, spec = [toy_job("a", n_gpus=2), toy_job("b", 1.0, n_gpus=2)], toy_nodes(1, 3)
    table = events(
        (0.0, "submitted", "a", *NONE),
        (0.0, "started", "a", "0:2", 2, "DP", 1.0),
        (1.0, "submitted", "b", *NONE),
        (2.0, "started", "b", "", 0, "DP", 2.0),
        (8.0, "suspended", "b", *NONE),
        (9.0, "finished", "b", *NONE),
    )
    table.loc[3, "shared_nodes"] = "0:2"
    series = fragmentation_over_time(table, jobs, spec, catalogue)
    assert series["gpus_fragmented"].tolist() == [0, 1, 0, 1, 0]


def test_devices_of_a_node_that_is_down_are_not_free() -> None:
    failures = [NodeEvent(5.0, 1, NodeEventKind.FAILED), NodeEvent(9.0, 1, NodeEventKind.JOINED)]
    jobs, spec = [toy_job("a", steps=19)], toy_nodes(2, 2)
    result = simulate(
        jobs, spec, one_gpu_catalogue(), REGISTRY["fifo"], restart_delay_s=0.0, failures=failures
    )
    series = fragmentation_over_time(result.events, jobs, spec, one_gpu_catalogue())
    assert series["gpus_free"].tolist() == [3, 1, 3, 4]
    assert series["gpus_fragmented"].sum() == 0


def test_a_table_without_rows_has_no_metrics_but_raises_nothing() -> None:
    spec = toy_nodes(1, 2)
    result = simulate([], spec, toy_catalogue(), REGISTRY["fifo"], restart_delay_s=1.0)
    found = summary(result.events, result.outcomes, spec, restart_delay_s=1.0)
    assert found.n_jobs == 0
    assert math.isnan(found.avg_jct_s) and math.isnan(found.p99_jct_s) and math.isnan(found.makespan_s)
    assert math.isnan(found.gpu_allocation_ratio) and math.isnan(found.sla_attainment)
    assert allocation_over_time(result.events, spec).empty and allocation_by_family(result.events).empty
    assert math.isnan(fragmentation_ratio(fragmentation_over_time(result.events, [], spec, toy_catalogue())))


def test_the_summary_collects_the_metrics_of_a_schedule() -> None:
    found = summary(TWO, TWO_DONE, toy_nodes(2, 2), restart_delay_s=1.0)
    assert (found.n_jobs, found.avg_jct_s, found.p50_jct_s, found.makespan_s) == (2, 18.0, 18.0, 20.0)
    assert found.p95_jct_s == pytest.approx(19.8) and found.p99_jct_s == pytest.approx(19.96)
    assert found.avg_queueing_delay_s == found.avg_waiting_time_s == 3.0
    assert found.avg_slowdown == pytest.approx((20 / 11 + 16 / 5) / 2)
    assert found.max_finish_time_fairness == pytest.approx(16 / 5)
    assert (found.reconfigurations_per_job, found.sla_attainment) == (1.0, 0.5)


def test_metrics_refuse_a_table_of_another_kind() -> None:
    with pytest.raises(TraceError, match="lacks column"):
        job_metrics(TWO, n_gpus=4, restart_delay_s=1.0)


# --- idle devices ---------------------------------------------------------------------------


def idle(*rows, known=None, delay_s=100.0, n_nodes=1, **options):
    """Spells of one or two jobs on nodes of eight devices, 8 s a step on one device and 1 s on eight."""
    marks = None if known is None else {"roberta": known}
    catalogue = TableCatalogue.from_tables(
        [throughput_rows("roberta", [("ga", "1", 8.0), ("ga", "4", 2.5), ("ga", "8", 1.0)])], known=marks
    )
    jobs = [toy_job(name) for name in "ab"]
    columns = [
        (time_s, seq, kind, job, nodes, n, "ga" if n else "", "", "", 4 if n else 0, math.nan, left, "")
        for seq, (time_s, kind, job, nodes, n, left) in enumerate(rows)
    ]
    table = pd.DataFrame(columns, columns=list(EVENTS.names))
    spells = idle_spells(table, jobs, toy_nodes(n_nodes, 8), catalogue, delay_s, **options)
    return [(spell.start_s, spell.end_s, spell.gpus_free, spell.job_id) for spell in spells]


def lone(delay_s=100.0):
    """Return the schedule of one job of a thousand steps on one of eight devices."""
    return (
        (0.0, "submitted", "a", "", 0, 1000.0),
        (0.0, "started", "a", "0:1", 1, 1000.0),
        (delay_s, "ready", "a", "0:1", 1, 1000.0),
        (delay_s + 8000.0, "finished", "a", "", 0, 0.0),
    )


LONE = lone()


def test_a_job_beside_idle_devices_gains_until_the_restart_no_longer_pays():
    ((start_s, end_s, free, job),) = idle(*LONE)
    assert (start_s, free, job) == (0.0, 7, "a")
    left_s = 8100.0 - end_s  # then restart and an eighth of the time take nine tenths of what is left
    assert 100.0 + left_s / 8 == pytest.approx(0.9 * left_s)
    ((_, never_s, _, _),) = idle(*lone(0.0), delay_s=0.0)
    assert never_s == pytest.approx(8000.0)
    ((_, early_s, _, _),) = idle(*LONE, saving=0.5)
    assert early_s < end_s
    assert idle(*LONE, saving=0.9) == []


def test_before_a_job_is_ready_waiting_costs_it_nothing_but_time():
    ((_, end_s, _, _),) = idle(*lone(7000.0), delay_s=7000.0)
    assert 0.0 < end_s < 7000.0
    # A restart and a thousand steps of 1 s against nine tenths of what is left.
    assert pytest.approx(0.9 * (15_000.0 - end_s)) == 7000.0 + 1000.0


def test_only_what_could_be_known_counts():
    assert idle(*LONE, known=[True, False, False]) == []
    ((_, four_s, _, _),) = idle(*LONE, known=[False, True, False])
    ((_, eight_s, _, _),) = idle(*LONE)
    assert four_s < eight_s
    shrunk = (
        (0.0, "submitted", "a", "", 0, 1000.0),
        (0.0, "started", "a", "0:8", 8, 1000.0),
        (100.0, "ready", "a", "0:8", 8, 1000.0),
        (200.0, "reconfigured", "a", "0:1", 1, 900.0),
        (300.0, "ready", "a", "0:1", 1, 900.0),
        (7500.0, "finished", "a", "", 0, 0.0),
    )
    ((start_s, _, free, _),) = idle(*shrunk, known=[False, False, False])  # it has run on eight devices
    assert (start_s, free) == (200.0, 7)


def test_spells_need_most_devices_and_room_and_join_without_a_break():
    beside = (
        (0.0, "submitted", "a", "", 0, 1000.0),
        (0.0, "started", "a", "0:1", 1, 1000.0),
        (100.0, "ready", "a", "0:1", 1, 1000.0),
        (200.0, "submitted", "b", "", 0, 100.0),
        (200.0, "started", "b", "0:4", 4, 100.0),
        (300.0, "ready", "b", "0:4", 4, 100.0),
        (550.0, "finished", "b", "", 0, 0.0),
        (8100.0, "finished", "a", "", 0, 0.0),
    )
    spells = idle(*beside)  # three of eight devices are free while the second job runs
    assert [(start_s, free) for start_s, _, free, _ in spells] == [(0.0, 7), (550.0, 7)]
    assert spells[0][1] == 200.0
    assert len(idle(*beside, share=0.3)) == 1
    spread = [(*row[:3], row[3].replace("0:4", "1:4"), *row[4:]) for row in beside]
    assert len(idle(*spread, n_nodes=2)) == 1  # more than half are free throughout, and a node has room


def test_a_schedule_that_is_not_of_the_catalogue_is_refused():
    odd = [(*row[:3], row[3].replace("0:1", "0:2"), row[4] * 2, row[5]) for row in LONE]
    with pytest.raises(TraceError, match="expected a configuration of the catalogue"):
        idle(*odd)
