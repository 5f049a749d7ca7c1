"""The engine for other systems: typed devices, spot capacity, costs, catalogues that plan on demand."""

from dataclasses import replace

import pytest
from toy_cluster import (
    Scripted,
    find,
    mixed_nodes,
    one_gpu_catalogue,
    simulate,
    toy_catalogue,
    toy_job,
    toy_nodes,
    typed_catalogue,
)

from makespan.errors import InputError, MakespanError
from makespan.metrics import fragmentation_over_time, summary
from makespan.plans import Placement
from makespan.policies import REGISTRY, policy
from makespan.sim import (
    Allocation,
    Configuration,
    Decision,
    InfeasibleDecision,
    NodeEvent,
    NodeEventKind,
    RestartDelays,
    Scenario,
    validate_schedule,
)
from makespan.sim.state import EventQueue
from makespan.studies import run as run_scenario

WITHDRAWN, RETURNED = NodeEventKind.WITHDRAWN, NodeEventKind.RETURNED


def run(jobs, script, spec, catalogue, **options):
    """Simulate and validate; return the result."""
    values = {"restart_delay_s": 4.0} | options
    chosen = Scripted(script) if callable(script) else script
    result = simulate(jobs, spec, catalogue, chosen, **values)
    checks = {name: values[name] for name in ("checkpoint_interval_s", "extra_steps") if name in values}
    found = validate_schedule(
        result.events, jobs, spec, catalogue, values["restart_delay_s"], outcomes=result.outcomes, **checks
    )
    assert found == []
    return result


def kinds(result, job_id="a"):
    rows = result.events[result.events["job_id"] == job_id]
    return list(zip(rows["time_s"], rows["kind"], strict=True))


# --- types of devices ---------------------------------------------------------------------------


def on_type(view, gpu_type):
    return next(item for item in view.catalogue.as_requested(toy_job()) if item.gpu_types == (gpu_type,))


def test_a_job_runs_at_the_rate_of_the_devices_that_it_holds():
    spec = mixed_nodes(1, 2)  # node 0 has a800-80, node 1 the slower v100-32
    assert [node.gpu.name for node in spec.nodes] == ["a800-80", "v100-32"]

    def script(view):
        if view.time_s == 0.0:
            return Decision({"a": Allocation(on_type(view, "v100-32"), (1,))}, 14.0)
        return {"a": Allocation(on_type(view, "a800-80"), (0,))} if view.time_s == 14.0 else {}

    result = run([toy_job(steps=9)], script, spec, typed_catalogue())
    slow, fast = (on_type(_View(spec), name).iter_time_s for name in ("v100-32", "a800-80"))
    assert slow == 2 * fast
    assert result.outcomes["finish_time_s"].item() == pytest.approx(18.0 + (10 - 10 / slow) * fast)


class _View:
    def __init__(self, spec):
        self.catalogue = typed_catalogue().on(spec)


def test_a_configuration_runs_on_devices_of_its_types_only():
    def wrong(view):
        return {"a": Allocation(on_type(view, "v100-32"), (0,))}

    with pytest.raises(
        InfeasibleDecision, match="node 0 has devices of type 'a800-80', 'v100-32' are needed"
    ):
        run([toy_job()], wrong, mixed_nodes(1, 2), typed_catalogue())
    assert not [
        item for item in typed_catalogue().on(toy_nodes(2, 8)).all("roberta") if "v100-32" in item.gpu_types
    ]


def test_the_validator_finds_a_configuration_on_devices_of_another_type():
    spec = mixed_nodes(1, 2)
    jobs = [toy_job(steps=9)]
    good = simulate(jobs, spec, typed_catalogue(), policy("fifo"), restart_delay_s=4.0)
    swapped = good.events.assign(nodes=good.events["nodes"].replace({"0:1": "1:1", "1:1": "0:1"}))
    found = validate_schedule(swapped, jobs, spec, typed_catalogue(), 4.0)
    assert {violation.rule for violation in found} >= {"row"}


def test_types_are_given_one_a_node_in_order():
    item = find(toy_catalogue(), "ga", "11")
    mixed = replace(item, gpu_types=("a800-80", "v100-32"), key=None)
    assert mixed.types_by_count == ("v100-32", "a800-80") and mixed.rate == 1 / item.iter_time_s
    for types in (("a800-80",), ("v100-32", "a800-80")):
        with pytest.raises(InputError, match="one name per node, in alphabetical order"):
            replace(item, gpu_types=types, key=None)


@pytest.mark.parametrize("name", REGISTRY)
def test_policies_serve_a_cluster_of_two_types(name):
    jobs = [
        toy_job(f"job-{n}", 3.0 * n, n_gpus=1 + n % 2, steps=20 + n, is_guaranteed=n % 3 == 0)
        for n in range(12)
    ]
    result = run(jobs, policy(name), mixed_nodes(2, 4), typed_catalogue())
    nodes = {share.split(":")[0] for text in result.events["nodes"] for share in text.split()}
    first = {"fifo-serial": {"0"}, "easyscale-heter": {"2", "3"}, "easyscale-heter-growth": {"2", "3"}}
    assert len(result.outcomes) == 12 and nodes >= first.get(name, {"0", "1"})


# --- capacity that comes and goes ---------------------------------------------------------------


def start_all(view):
    free, changes = view.free_gpus, {}
    for job in view.pending:
        node = next((node for node, count in enumerate(free) if count), None)
        if node is not None:
            free[node] -= 1
            changes[job.spec.job_id] = Allocation(find(view.catalogue, "ga", "1"), (node,))
    return changes


EVENTS = [NodeEvent(6.0, 0, WITHDRAWN, 1, notice_s=4.0), NodeEvent(15.0, 0, RETURNED, notice_s=5.0)]
JOBS = [toy_job("a", steps=19), toy_job("b", steps=19)]


def test_a_withdrawal_interrupts_only_who_still_holds_what_goes():
    seen = []

    def script(view):
        seen.append((view.time_s, len(view.announced), view.n_gpus, view.gpus_per_node))
        return start_all(view)

    result = run(
        JOBS, script, toy_nodes(1, 2), one_gpu_catalogue(), failures=EVENTS, checkpoint_interval_s=4.0
    )
    assert seen[:5] == [
        (0.0, 0, 2, [2]),
        (6.0, 1, 2, [2]),
        (10.0, 0, 1, [1]),
        (15.0, 1, 1, [1]),
        (20.0, 0, 2, [2]),
    ]
    assert kinds(result, "a") == [(0.0, "submitted"), (0.0, "started"), (4.0, "ready"), (24.0, "finished")]
    # b started last; of the six steps done at 10 s a checkpoint holds four.
    assert kinds(result, "b")[3:] == [
        (10.0, "interrupted"),
        (20.0, "started"),
        (24.0, "ready"),
        (40.0, "finished"),
    ]
    rows = result.events[result.events["job_id"] == ""]
    assert rows["kind"].tolist() == [
        "capacity_announced",
        "capacity_withdrawn",
        "capacity_announced",
        "capacity_returned",
    ]
    assert rows["n_gpus"].tolist() == [1, 1, 1, 1]


def test_who_leaves_within_the_notice_is_not_interrupted():
    def script(view):
        if view.time_s == 6.0:
            (event,) = view.announced
            assert (event.node_id, event.n_gpus, event.in_force_s) == (0, 1, 10.0)
            return {"b": Allocation(find(view.catalogue, "ga", "1"), (1,))}
        return {job.spec.job_id: Allocation(find(view.catalogue, "ga", "1"), (0,)) for job in view.pending}

    result = run(JOBS, script, toy_nodes(2, 2), one_gpu_catalogue(), failures=EVENTS[:1])
    assert "interrupted" not in set(result.events["kind"])


def test_metrics_count_the_devices_that_are_there():
    jobs = [toy_job("a", steps=99, n_gpus=1), toy_job("b", 1.0, steps=9)]
    spec, catalogue = toy_nodes(1, 2), one_gpu_catalogue()
    gone = [NodeEvent(0.0, 0, WITHDRAWN, 1)]
    result = run(jobs, start_all, spec, catalogue, failures=gone)
    assert summary(
        result.events, result.outcomes, spec, restart_delay_s=4.0
    ).gpu_allocation_ratio == pytest.approx(1.0)
    assert not fragmentation_over_time(result.events, jobs, spec, catalogue)["gpus_free"].iloc[:-1].any()


def test_a_node_that_fails_and_joins_keeps_what_was_withdrawn():
    seen = []

    def script(view):
        seen.append((view.time_s, view.n_gpus, view.n_free_gpus, view.free_histogram))
        return start_all(view)

    events = [
        NodeEvent(3.0, 0, WITHDRAWN, 1),
        NodeEvent(5.0, 0, NodeEventKind.FAILED),
        NodeEvent(7.0, 0, NodeEventKind.JOINED),
        NodeEvent(9.0, 0, RETURNED),
    ]
    run([toy_job(steps=9)], script, toy_nodes(1, 3), one_gpu_catalogue(), failures=events)
    assert seen == [
        (0.0, 3, 3, [0, 0, 0, 1]),
        (3.0, 2, 1, [0, 1, 0, 0]),
        (5.0, 0, 0, [1, 0, 0, 0]),
        (7.0, 2, 2, [0, 0, 1, 0]),
        (9.0, 3, 2, [0, 0, 1, 0]),
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([NodeEvent(1.0, 0, WITHDRAWN, 3)], "3 device.s. withdrawn; expected 1 to 2"),
        ([NodeEvent(1.0, 0, RETURNED)], "0 device.s. returned; expected 1 to 0"),
        ([NodeEvent(1.0, 0, WITHDRAWN), NodeEvent(2.0, 0, WITHDRAWN, 1)], "expected 1 to 0"),
    ],
)
def test_no_more_is_withdrawn_than_there_is(events, message):
    with pytest.raises(InputError, match=message):
        run(JOBS, start_all, toy_nodes(1, 2), one_gpu_catalogue(), failures=events)


@pytest.mark.parametrize(
    "wrong", [{"n_gpus": 0}, {"notice_s": -1.0}, {"kind": NodeEventKind.FAILED, "notice_s": 3.0}]
)
def test_a_change_of_capacity_is_checked(wrong):
    with pytest.raises(InputError, match="expected"):
        NodeEvent(**({"time_s": 1.0, "node_id": 0, "kind": WITHDRAWN} | wrong))


def test_the_validator_finds_capacity_that_is_used_although_it_is_gone():
    result = run(JOBS, start_all, toy_nodes(1, 2), one_gpu_catalogue(), failures=EVENTS)
    options = (JOBS, toy_nodes(1, 2), one_gpu_catalogue(), 4.0)
    interrupted = result.events["kind"] == "interrupted"
    found = validate_schedule(result.events[~interrupted], *options)
    assert "capacity" in {violation.rule for violation in found}
    withdrawn = result.events["kind"] == "capacity_withdrawn"
    found = validate_schedule(result.events[~withdrawn], *options)
    assert {violation.rule for violation in found} == {"failure"}


# --- what a restart costs -----------------------------------------------------------------------


def moves(view):
    """Start, move, change the plan, suspend and start again."""
    ga, gc = find(view.catalogue, "ga", "1"), find(view.catalogue, "gc", "1")
    steps = {
        0.0: Allocation(ga, (0,)),
        20.0: Allocation(ga, (1,)),
        40.0: Allocation(gc, (1,)),
        60.0: None,
        80.0: Allocation(gc, (1,)),
    }
    later = [time_s for time_s in steps if time_s > view.time_s]
    return Decision({"a": steps[view.time_s]}, later[0] if later else None)


@pytest.mark.parametrize(
    ("cost", "total_s"),
    [
        (5.0, 20.0),
        (RestartDelays.constant(5.0), 20.0),
        (RestartDelays.first_start_only(5.0), 5.0),
        (RestartDelays.changes_only(5.0), 15.0),
        (RestartDelays(first_start_s=7.0, replan_s=3.0, move_s=1.0), 7.0 + 1.0 + 3.0 + 1.0),
    ],
)
def test_a_restart_costs_what_its_kind_costs(cost, total_s):
    jobs, spec = [toy_job(steps=99)], toy_nodes(2, 1)
    result = run(jobs, moves, spec, toy_catalogue(), restart_delay_s=cost)
    assert result.outcomes["restart_time_s"].item() == pytest.approx(total_s)
    other = RestartDelays(first_start_s=5.0, replan_s=2.0, move_s=5.0)
    found = validate_schedule(result.events, jobs, spec, toy_catalogue(), other)
    assert "restart" in {violation.rule for violation in found}


def test_a_job_alone_is_not_slowed_down_whatever_its_first_start_costs():
    jobs, spec = (toy_job(steps=9),), toy_nodes(1, 1)
    for cost, jct_s in (
        (RestartDelays.changes_only(90.0), 10.0),
        (RestartDelays.first_start_only(90.0), 100.0),
    ):
        scenario = Scenario("alone", jobs, spec, one_gpu_catalogue(), restart_delay_s=cost)
        found = run_scenario(scenario, "fifo")
        assert (found.metrics.avg_jct_s, found.restart_delay_s) == (jct_s, 90.0)
        assert (found.metrics.avg_slowdown, found.metrics.avg_finish_time_fairness) == (1.0, 1.0)


def test_a_delay_out_of_range_is_refused():
    with pytest.raises(InputError, match=r"move_s is -1.0; expected"):
        RestartDelays(1.0, 1.0, -1.0)


def test_work_is_a_real_number():
    result = run([toy_job(steps=9)], start_all, toy_nodes(1, 1), one_gpu_catalogue(2.0), extra_steps=0.25)
    assert result.outcomes["finish_time_s"].item() == 4.0 + 9.25 * 2.0


# --- catalogues that plan on demand -------------------------------------------------------------


class Planner:
    """Plans a configuration for any number of whole nodes when somebody asks, and keeps what it planned."""

    workloads = ("roberta",)

    def __init__(self, cluster=None):
        self.cluster, self.planned = cluster, {}

    def on(self, cluster):
        return Planner(cluster)

    def plan(self, n_nodes):
        if n_nodes not in self.planned:
            size = self.cluster.nodes[0].n_gpus
            placement, time_s = Placement((size,) * n_nodes), 1.0 / n_nodes
            labels = ("roberta", f"template-{n_nodes}", "pipelines", placement)
            self.planned[n_nodes] = Configuration(*labels, 1, 0.0, time_s, time_s, "planned", key=n_nodes)
        return self.planned[n_nodes]

    def all(self, workload_key):
        return tuple(self.plan(n_nodes) for n_nodes in range(1, self.cluster.n_nodes + 1))

    def holding(self, workload_key, devices):
        return tuple(item for item in self.all(workload_key) if item.devices == devices)

    def requested(self, job):
        return self.plan(job.n_gpus // self.cluster.nodes[0].n_gpus)

    def as_requested(self, job):
        return (self.requested(job),)

    def accepts(self, configuration):
        return self.planned.get(configuration.key) is configuration

    def find(self, workload_key, plan, placement, cpu_threads, gpu_types=()):
        n_nodes = int(plan.removeprefix("template-"))
        return self.plan(n_nodes) if Placement.parse(placement).n_nodes == n_nodes else None


def test_a_catalogue_may_plan_when_it_is_asked():
    def script(view):
        """Use all nodes that are up, for one job."""
        up = [node for node in range(view.n_nodes) if view.is_up(node)]
        job = next(iter((*view.running, *view.pending)))
        return {job.spec.job_id: Allocation(view.catalogue.plan(len(up)), tuple(up))}

    failures = [NodeEvent(20.0, 1, NodeEventKind.FAILED)]
    jobs = [toy_job(n_gpus=4, steps=99)]
    planner = Planner()
    result = run(jobs, script, toy_nodes(3, 4), planner, failures=failures)
    assert planner.planned == {}
    assert result.events.query("kind == 'started'")["plan"].tolist() == ["template-3", "template-2"]
    fifo = run(jobs, policy("fifo"), toy_nodes(3, 4), Planner())
    assert fifo.events.query("kind == 'started'")["plan"].tolist() == ["template-1"]


# --- views and events ---------------------------------------------------------------------------


def test_what_a_policy_sees_cannot_be_written_to():
    def script(view):
        job = next(iter((*view.pending, *view.running)))
        for target, name in (
            (view, "time_s"),
            (view, "announced"),
            (job, "allocation"),
            (job, "_steps_left"),
            (job, "__class__"),
        ):
            with pytest.raises(MakespanError, match=rf"{name} is read-only; return a Decision instead"):
                setattr(target, name, None)
            with pytest.raises(MakespanError, match="read-only"):
                delattr(target, name)
        with pytest.raises(AttributeError):
            view.running = []
        return start_all(view)

    with pytest.raises(MakespanError, match="running is read-only"):
        run([toy_job()], script, toy_nodes(1, 1), one_gpu_catalogue())


def test_events_come_by_time_then_priority_then_order_of_entry():
    queue = EventQueue()
    for time_s, priority, name in ((2.0, 0, "d"), (1.0, 1, "b"), (1.0, 1, "c"), (1.0, 0, "a")):
        queue.push(time_s, priority, name)
    assert (len(queue), queue.next_time_s()) == (4, 1.0)
    assert [queue.pop() for _ in range(4)] == [(1.0, "a"), (1.0, "b"), (1.0, "c"), (2.0, "d")]
    queue.push(1.0, 0, "e")
    queue.clear()
    assert not queue and queue.next_time_s() == float("inf")
