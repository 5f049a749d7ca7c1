"""What policies know of the time of a step: what was sampled, stated, or run by the very job."""

import pytest
from toy_cluster import Scripted, find, simulate, throughput_rows, toy_job, toy_nodes, toy_tables

from makespan.policies import REGISTRY
from makespan.sim import Allocation, InfeasibleDecision
from makespan.studies import TableCatalogue

ROWS = [("ga", "1", 2.0), ("gc", "1", 1.0), ("zero-dp", "1", 3.0)]
PREDICTED = [2.5, 1.2, 1.1]
"""Seconds of a step as predicted; of the last plan far too good."""

IS_SAMPLED = [False, True, False]
DELAY_S = 4.0


def catalogue(sampled=tuple(IS_SAMPLED)):
    table = throughput_rows("roberta", ROWS)
    return TableCatalogue.from_tables([table], {"roberta": PREDICTED}, known={"roberta": list(sampled)})


def run(script, jobs, spec=None, known=None, **options):
    own = {name: options.pop(name) for name in ("honours_guarantees",) if name in options}
    scripted = Scripted(script, **own)
    values = {"restart_delay_s": DELAY_S, "extra_steps": 0, "interval_s": 1.0} | options
    return simulate(jobs, spec or toy_nodes(1, 2), known or catalogue(), scripted, **values)


def told(plans, jobs, **options):
    """Run job a under the plan of each moment, and return what it shows of each plan at each second."""
    seen = {}

    def script(view):
        job = view.job("a") if any(job.spec.job_id == "a" for job in (*view.pending, *view.running)) else None
        if job is not None:
            items = [find(view.catalogue, plan, "1") for plan, _, _ in ROWS]
            seen[view.time_s] = [
                (job.has_observed(item), job.is_time_known(item), job.step_s(item)) for item in items
            ]
        return (
            {"a": Allocation(find(view.catalogue, plans[view.time_s], "1"), (0,))}
            if view.time_s in plans
            else {}
        )

    policy = Scripted(script, asks_every_round=True)
    values = {"restart_delay_s": DELAY_S, "extra_steps": 0, "interval_s": 1.0} | options
    simulate(jobs, toy_nodes(1, 2), catalogue(), policy, **values)
    return seen


def test_a_job_knows_a_time_once_it_has_done_a_step_so_and_keeps_it():
    seen = told({0.0: "ga", 8.0: "zero-dp"}, [toy_job(steps=9)])
    before = [(False, False, 2.5), (False, True, 1.0), (False, False, 1.1)]
    assert seen[0.0] == seen[5.0] == before  # its delay is over at 4 s, its first step at 6 s
    assert seen[6.0][0] == seen[8.0][0] == seen[9.0][0] == (True, True, 2.0)
    assert seen[14.0][2] == (False, False, 1.1) and seen[15.0][2] == (True, True, 3.0)  # ready at 12 s
    assert seen[15.0][:2] == [(True, True, 2.0), (False, True, 1.0)]


def test_a_job_that_is_moved_within_its_first_step_has_learned_nothing():
    seen = told({0.0: "ga", 5.0: "gc"}, [toy_job(steps=9)])
    assert {rows[0] for rows in seen.values()} == {(False, False, 2.5)}


def test_no_job_learns_from_another():
    def script(view):
        seen.append(
            [job.is_time_known(find(view.catalogue, "ga", "1")) for job in (*view.running, *view.pending)]
        )
        starts = view.time_s in (0.0, 40.0)
        return (
            {job.spec.job_id: Allocation(view.catalogue.requested(job.spec), (0,)) for job in view.pending}
            if starts
            else {}
        )

    seen = []
    run(script, [toy_job("a", steps=9), toy_job("b", 10.0, steps=9), toy_job("c", 40.0)])
    assert [True, False] in seen and [False, False] in seen  # b, c like a ask for what a has run


def test_users_may_state_what_their_requests_take_with_the_job():
    for states, expected in ((True, (True, True, 2.0)), (False, (False, False, 2.5))):
        seen = told(
            {5.0: "gc"}, [toy_job(submit_time_s=1.0)], predictions="requests" if states else "sampled"
        )
        assert seen[1.0][0] == expected
        assert seen[1.0][2] == (False, False, 1.1)


def keep(plans, sampled=tuple(IS_SAMPLED), **options):
    """Run a guaranteed job under a policy that keeps guarantees, by the plan of each moment."""

    def script(view):
        plan = plans.get(view.time_s)
        return {"a": Allocation(find(view.catalogue, plan, "1"), (0,))} if plan else {}

    policy = Scripted(script, asks_every_round=True, honours_guarantees=True)
    values = {"restart_delay_s": DELAY_S, "interval_s": 1.0} | options
    jobs = [toy_job("a", steps=20, is_guaranteed=True)]
    return simulate(jobs, toy_nodes(1, 2), catalogue(sampled), policy, **values)


@pytest.mark.parametrize(
    ("plans", "options", "problem"),
    [
        ({0.0: "gc"}, {}, "guaranteed 2.5 s per step.* takes 1.0 s, by prediction only"),
        ({0.0: "ga", 5.0: "gc"}, {}, "guaranteed 2.5 s per step.* takes 1.0 s, by prediction only"),
        ({0.0: "ga", 6.0: "zero-dp"}, {}, "guaranteed 2.0 s per step.* takes 1.1 s, by prediction only"),
        ({0.0: "zero-dp"}, {"sampled": (True,) * 3}, "guaranteed 2.0 s per step.* takes 3.0 s$"),
        ({0.0: "ga", 6.0: "gc"}, {}, ""),
        ({0.0: "gc"}, {"predictions": "requests"}, ""),
    ],
)
def test_a_guarantee_rests_on_what_the_job_knows(plans, options, problem):
    if problem:
        with pytest.raises(InfeasibleDecision, match=problem):
            keep(plans, **options)
    else:
        assert set(keep(plans, **options).events["plan"]) == {"", *plans.values()}


def half_known(factor=None):
    """Return the toy catalogue with every third row sampled; ``factor`` of true times by configuration."""
    tables, predicted, known = [], {}, {}
    for table in toy_tables():
        key, times = str(table["workload"].iloc[0]), table["iter_time_s"].tolist()
        predicted[key] = [time_s * (0.8 + 0.45 * (17 * row % 10) / 9) for row, time_s in enumerate(times)]
        known[key] = [row % 3 == 0 for row in range(len(times))]
        rows = zip(table["exec_plan"], table["placement"], strict=True)
        scales = [1.0 if factor is None else factor(key, plan, placement, is_known)
                  for (plan, placement), is_known in zip(rows, known[key], strict=True)]  # fmt: skip
        tables.append(table.assign(iter_time_s=table["iter_time_s"] * scales))
    return TableCatalogue.from_tables(tables, predicted, known=known)


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("states", [False, True])
def test_what_no_job_has_run_makes_no_difference(name, states):
    workloads, sizes = ("roberta", "t5", "gpt2"), (2, 8, 4, 2, 4)
    jobs = {
        f"job-{number}": toy_job(
            f"job-{number}",
            7.0 * number,
            workload=workloads[number % 3],
            n_gpus=sizes[number % 5],
            steps=20 + 37 * number % 90,
            is_guaranteed=number % 4 == 0,
        )
        for number in range(14)
    }

    def events_with(known):
        options = {"restart_delay_s": 5.0, "interval_s": 10.0}
        options["predictions"] = "requests" if states else "sampled"
        return simulate(list(jobs.values()), toy_nodes(2, 8), known, REGISTRY[name], **options).events

    usual = half_known()
    once = events_with(usual)
    asked = [usual.requested(job) for job in jobs.values()] if states else []
    seen = {(item.workload, item.plan, item.placement.text) for item in asked}
    where = once["nodes"] + once["shared_nodes"]
    held = once[where != ""]
    for job_id, plan, nodes in zip(held["job_id"], held["plan"], where[where != ""], strict=True):
        counts = sorted(pair.partition(":")[2] for pair in nodes.split())
        seen.add((jobs[job_id].workload, plan, "".join(counts)))

    def factor(key, plan, placement, is_known):
        return 1.0 if is_known or (key, plan, placement) in seen else 3.0

    other = half_known(factor)
    pairs = [pair for key in workloads for pair in zip(usual.all(key), other.all(key), strict=True)]
    assert sum(mine.iter_time_s != changed.iter_time_s for mine, changed in pairs) > 20
    assert events_with(other).to_csv() == once.to_csv()
