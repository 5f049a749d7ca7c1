"""EasyScale's policies on clusters small enough to follow by hand, and FIFO one job at a time."""

from dataclasses import replace

import pytest
from toy_cluster import simulate, toy_catalogue, toy_job, toy_nodes

from makespan.easyscale import JobKind, PlannedCatalogue
from makespan.hardware import cluster
from makespan.papers.easyscale.cluster import pooled
from makespan.policies import policy
from makespan.sim import NodeEvent, NodeEventKind, validate_schedule
from makespan.workloads import JobSpec

MIXED = pooled(cluster("v100-p100-t4-64"))
V100, P100, T4 = MIXED.gpu_types
SPEED = {V100: 1.0, P100: 2.0, T4: 4.0}  # seconds of a micro-batch


def nodes(**counts):
    """Return a cluster of pools of so many V100, P100 and T4 GPUs; none of those not named."""
    given = {V100: counts.get("v", 0), P100: counts.get("p", 0), T4: counts.get("t", 0)}
    chosen = [replace(node, n_gpus=given[node.gpu_type]) for node in MIXED.nodes if given[node.gpu_type]]
    return replace(MIXED, nodes=tuple(chosen), name="small")


def kind(key, n, types=(V100,), work=10_000.0):
    return JobKind(key, n, types[0], tuple(sorted((name, SPEED[name]) for name in types)), work)


def job(job_id, of, submit_time_s=0.0):
    return JobSpec(job_id, submit_time_s, of.key, of.n_logical_workers, 0, "ga", of.steps)


def run(name, spec, kinds, jobs, **options):
    """Simulate and validate; return who held what after each round: time and devices by type."""
    catalogue = PlannedCatalogue(kinds)
    values = {"restart_delay_s": 0.0, "interval_s": 60.0} | options
    result = simulate(jobs, spec, catalogue, policy(name), **values)
    cost = values.pop("restart_delay_s")
    values.pop("failures", None)
    found = validate_schedule(result.events, jobs, spec, catalogue, cost, outcomes=result.outcomes, **values)
    assert found == []
    types = [node.gpu_type[0] for node in spec.nodes]
    held = {}
    for row in result.events.itertuples():
        if row.kind in ("started", "reconfigured", "suspended", "interrupted"):
            shares = (share.split(":") for share in row.nodes.split())
            text = " ".join(f"{types[int(node)]}{count}" for node, count in shares)
            held.setdefault(row.job_id, []).append((row.time_s, text))
    return held


def test_a_job_starts_on_one_gpu_and_at_most_doubles_each_round():
    one = kind("one", 8)
    held = run("easyscale-homo", nodes(v=20), [one], [job("a", one, 5.0)])
    assert held["a"] == [(60.0, "v1"), (120.0, "v2"), (180.0, "v4"), (240.0, "v8")]


def test_a_job_does_not_take_gpus_that_it_would_waste():
    """Four logical workers on three equal GPUs are as slow as on two."""
    one = kind("one", 4)
    held = run("easyscale-homo", nodes(v=3, t=1), [one], [job("a", one)])
    assert held["a"] == [(0.0, "v1"), (60.0, "v2")]


def test_the_slowest_type_that_is_free_is_given_first():
    mixed, home = kind("mixed", 1, (V100, P100, T4)), kind("home", 1)
    jobs = [job("a", mixed), job("b", mixed), job("c", home), job("d", mixed)]
    held = run("easyscale-heter-growth", nodes(v=1, p=1, t=1), [mixed, home], jobs)
    assert [held[name][0] for name in "abc"] == [(0.0, "t1"), (0.0, "p1"), (0.0, "v1")]
    assert held["d"][0][0] > 0


def test_jobs_stay_on_their_home_type_unless_types_are_mixed():
    of = kind("k", 8, (P100, V100, T4), work=600.0)
    assert run("easyscale-homo", nodes(v=4, p=2, t=4), [of], [job("a", of)])["a"][-1][1] == "p2"
    assert "v" in run("easyscale-heter", nodes(v=4, p=2, t=4), [of], [job("a", of)])["a"][-1][1]


def test_waiting_jobs_come_before_growth_and_the_best_offer_before_others():
    """At 120 s a could grow from two GPUs and b from one, but c starts, and one GPU is left for b."""
    of = kind("k", 8)
    jobs = [job("a", of), job("b", of, 1.0), job("c", of, 100.0)]
    held = run("easyscale-homo", nodes(v=5, t=3), [of], jobs)
    assert held["a"][:2] == [(0.0, "v1"), (60.0, "v2")] and all(
        time_s > 10_000 for time_s, _ in held["a"][2:]
    )
    assert held["b"][:2] == [(60.0, "v1"), (120.0, "v2")] and held["c"][0] == (120.0, "v1")


def test_a_swap_needs_free_gpus_and_gives_its_own_back_for_the_next_round():
    """The job cannot grow beyond its one logical worker, so it can only move to a faster GPU."""
    of, t4_only = kind("k", 1, (V100, T4)), kind("t", 1, (T4,))
    jobs = [job("a", of), job("b", t4_only, 30.0)]
    spec = nodes(v=1, t=1)
    held = run("easyscale-heter", spec, [of, t4_only], jobs)
    assert held["a"] == [(0.0, "t1"), (60.0, "v1")] and held["b"] == [(120.0, "t1")]
    without = run("easyscale-heter-growth", spec, [of, t4_only], jobs)
    assert without["a"] == [(0.0, "t1")] and without["b"][0][0] > 10_000


@pytest.mark.parametrize(("slow_s", "texts"), [(1.08, ["p1"]), (1.2, ["p1", "v1"])])
def test_a_swap_must_be_a_tenth_faster(slow_s, texts):
    of = JobKind("k", 1, V100, ((P100, slow_s), (V100, 1.0)), 3000.0)
    held = run("easyscale-heter", nodes(v=1, p=1), [of], [job("a", of)])
    assert [text for _, text in held["a"]] == texts


def test_of_equal_offers_that_of_the_first_type_is_taken():
    """A second P100 would do as well as a V100 instead; one of each would leave a third unused."""
    of = kind("k", 2, (V100, P100), work=3000.0)
    held = run("easyscale-heter", nodes(v=1, p=2), [of], [job("a", of)])
    assert [text for _, text in held["a"]] == ["p1", "v1"]


def test_a_job_without_a_configuration_on_one_gpu_runs_as_requested():
    spec = toy_nodes(1, 4)
    jobs = [
        toy_job("a", 0.0, workload="roberta", n_gpus=4, steps=400),
        toy_job("b", 1.0, workload="gpt2", n_gpus=2, plan="tp+ga", steps=10),
    ]
    result = simulate(jobs, spec, toy_catalogue(), policy("easyscale-heter"), restart_delay_s=0.0)
    events = result.events[result.events["kind"].isin(["started", "reconfigured"])]
    own = events[events["job_id"] == "b"]
    assert own["n_gpus"].tolist() == [2] and own["plan"].tolist() == ["tp+ga"]
    assert events[events["job_id"] == "a"]["n_gpus"].tolist() == [1, 2, 4]


WITHDRAWN = NodeEventKind.WITHDRAWN


def test_jobs_shrink_within_the_notice_of_a_withdrawal_and_nobody_is_interrupted():
    of = kind("k", 8)
    gone = [NodeEvent(600.0, 0, WITHDRAWN, 5, 60.0), NodeEvent(1200.0, 0, NodeEventKind.RETURNED, 5)]
    held = run("easyscale-homo", nodes(v=8), [of], [job("a", of)], failures=gone)
    assert held["a"][3:] == [(180.0, "v8"), (600.0, "v3"), (1200.0, "v4"), (1260.0, "v8")]


def test_the_last_to_start_is_suspended_where_nothing_is_left_for_it():
    of = kind("k", 1, work=2000.0)
    jobs = [job("a", of), job("b", of, 10.0)]
    gone = [NodeEvent(300.0, 0, WITHDRAWN, 1, 60.0)]
    held = run("easyscale-homo", nodes(v=2), [of], jobs, failures=gone)
    assert held["a"] == [(0.0, "v1")] and held["b"][:2] == [(60.0, "v1"), (300.0, "")]


def test_one_job_at_a_time_has_the_cluster():
    jobs = [toy_job(name, float(n), n_gpus=1, steps=9) for n, name in enumerate("abc")]
    result = simulate(jobs, toy_nodes(1, 8), toy_catalogue(), policy("fifo-serial"), restart_delay_s=2.0)
    table = result.outcomes
    assert (table["first_start_s"][1:].to_numpy() == table["finish_time_s"][:-1].to_numpy()).all()


@pytest.mark.parametrize("name", ["easyscale-homo", "easyscale-heter"])
def test_nothing_is_asked_for_again_while_nothing_changes(name):
    of = kind("k", 4, work=1e5)
    jobs = [job("a", of)]
    options = {"restart_delay_s": 20.0, "interval_s": 60.0}
    result = simulate(jobs, nodes(v=4), PlannedCatalogue([of]), policy(name), **options)
    assert result.n_decisions == 4


@pytest.mark.parametrize("name", ["easyscale-heter-growth", "easyscale-heter", "easyscale-homo"])
def test_jobs_submitted_at_the_same_time_are_served_by_name_however_the_rows_are_shuffled(name):
    """Names compare with numbers by value: job 9 comes before job 10."""
    kinds = [kind("mixed", 8, (V100, P100, T4), 4000.0), kind("home", 4, work=6000.0)]
    jobs = [job(f"job-{number}", kinds[number % 2], 60.0 * (number // 6)) for number in range(12)]
    held = [
        run(name, nodes(v=3, p=2, t=3), kinds, [jobs[index] for index in order])
        for order in ((*range(12),), (*reversed(range(12)),), (5, 11, 2, 8, 0, 6, 10, 4, 3, 9, 1, 7))
    ]
    assert held[0] == held[1] == held[2]
    assert held[0]["job-9"][0][0] <= held[0]["job-10"][0][0]
