"""Devices that two jobs share: progress, restarts, memory, nodes that go away, what the validator says."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from toy_cluster import Scripted, find, one_gpu_catalogue, simulate, throughput_rows, toy_job, toy_nodes

from makespan.metrics import gpu_allocation_ratio, guarantee_breaches, idle_spells, job_goodput
from makespan.plots import job_spans
from makespan.policies import policy
from makespan.sim import (
    IDLE_SHARE,
    MIN_SPEED,
    Allocation,
    Engine,
    InfeasibleDecision,
    NodeEvent,
    NodeEventKind,
    Recovery,
    Scenario,
    colocated_speed,
    colocated_speeds,
    oversubscribed_bytes,
    validate_schedule,
)
from makespan.studies import TableCatalogue

SHARE = 0.34
ONE = one_gpu_catalogue()
SPEC = toy_nodes(1, 1)


def scripted(script, **fields):
    """Return a policy that does what a script says at each time [s]: {time: {job: (node, is guest)}}."""

    def decide(view):
        changes = {}
        for name, what in script.get(view.time_s, {}).items():
            item = view.catalogue.requested(view.job(name).spec)
            changes[name] = None if what is None else Allocation(item, (what[0],), what[1])
        return changes

    return Scripted(decide, asks_every_round=True, **fields)


def run(jobs, script, spec=SPEC, catalogue=ONE, delay_s=4.0, **options):
    """Simulate and check a script with rounds of a second."""
    given = {"restart_delay_s": delay_s, "interval_s": 1.0}
    result = simulate(jobs, spec, catalogue, scripted(script), extra_steps=0, **given, **options)
    options.pop("failures", None)
    checked = {"outcomes": result.outcomes, "extra_steps": 0, **given, **options}
    assert validate_schedule(result.events, jobs, spec, catalogue, **checked) == []
    return result


def rows(result, job_id, *names):
    table = result.events[result.events["job_id"] == job_id]
    return list(table[["time_s", "kind", *names]].itertuples(index=False, name=None))


PAIR = [toy_job("a", steps=50), toy_job("b", steps=17)]
BESIDE = {0.0: {"a": (0, False), "b": (0, True)}}


def test_a_guest_computes_in_idle_moments_and_its_holder_as_if_alone():
    result = run(PAIR, BESIDE)
    assert rows(result, "a")[-1] == (54.0, "finished")
    assert rows(result, "b", "nodes", "shared_nodes", "n_gpus") == [
        (0.0, "submitted", "", "", 0),
        (0.0, "started", "", "0:1", 0),
        (4.0, "ready", "", "0:1", 0),
        (pytest.approx(4.0 + 17 / SHARE), "finished", "", "", 0),
    ]
    started = result.events[result.events["kind"] == "started"]
    assert started["iter_time_s"].tolist() == [1.0, pytest.approx(1 / SHARE)]
    assert result.outcomes["attained_service_gpu_s"].tolist() == [54.0, 0.0]


def test_the_page_of_the_engine_names_the_pace_without_a_model_and_its_source():
    text = " ".join((Path(__file__).parents[2] / "docs/background/engine.md").read_text("utf-8").split())
    assert IDLE_SHARE == SHARE
    assert f"a guest has {IDLE_SHARE} of its rate" in text
    assert f"raises the use of a cluster's computing units by {IDLE_SHARE:.0%}".replace("%", " %") in text


def test_a_policy_sees_how_many_devices_are_without_a_guest():
    seen = {}

    def script(view):
        seen[view.time_s] = (view.unshared_gpus, view.free_gpus, view.shares_devices)
        item = view.catalogue.requested(PAIR[0])
        held = Allocation(item, (0,))
        return {"a": held, "b": held.colocated(is_guest=True)} if view.time_s == 0.0 else {}

    options = {"restart_delay_s": 4.0, "interval_s": 1.0}
    simulate(PAIR, toy_nodes(2, 2), ONE, Scripted(script, asks_every_round=True), **options)
    assert seen[0.0] == ([2, 2], [2, 2], True)
    assert seen[1.0] == ([1, 2], [1, 2], True)


def test_a_guest_of_the_same_nodes_in_another_order_goes_on():
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "11", 1.0)])])
    item, seen = catalogue.all("roberta")[0], []
    jobs = [toy_job("a", n_gpus=2, steps=50), toy_job("b", n_gpus=2, steps=17)]

    def script(view):
        nodes = (0, 1) if view.time_s < 10.0 else (1, 0)
        seen.append(nodes)
        there = {job.spec.job_id for job in (*view.pending, *view.running)}
        return {name: Allocation(item, nodes, is_guest=name == "b") for name in ("a", "b") if name in there}

    chosen = Scripted(script, asks_every_round=True)
    options = {"restart_delay_s": 4.0, "interval_s": 1.0}
    events = simulate(jobs, toy_nodes(2, 1), catalogue, chosen, **options).events
    assert {(0, 1), (1, 0)} <= set(seen)
    assert set(events["kind"]) <= {"submitted", "started", "ready", "rated", "finished"}


def test_a_guest_gets_devices_and_gives_them_up_without_a_restart():
    script = BESIDE | {14.0: {"a": (0, True), "b": (0, False)}}
    result = run([PAIR[0], replace(PAIR[1], steps=30)], script)
    assert rows(result, "b")[2:] == [
        (4.0, "ready"),
        (14.0, "sharing"),
        (pytest.approx(44.0 - 10 * SHARE), "finished"),
    ]
    assert [kind for _, kind in rows(result, "a")][3:] == ["sharing", "rated", "finished"]  # alone at last
    assert result.outcomes["n_restarts"].tolist() == [0, 0]
    assert result.outcomes["restart_time_s"].tolist() == [4.0, 4.0]


def test_a_restart_goes_on_while_what_is_shared_changes():
    result = run(PAIR, BESIDE | {2.0: {"a": (0, True), "b": (0, False)}})
    assert rows(result, "b") == [
        (0.0, "submitted"),
        (0.0, "started"),
        (2.0, "sharing"),
        (4.0, "ready"),
        (21.0, "finished"),
    ]


def test_a_guest_that_moves_pays_like_everybody():
    result = run(PAIR, BESIDE | {10.0: {"b": (1, True)}}, spec=toy_nodes(2, 1))
    assert rows(result, "b")[3:5] == [(10.0, "reconfigured"), (14.0, "ready")]
    assert result.outcomes["n_restarts"].tolist() == [0, 1]


def test_a_device_takes_one_guest():
    jobs = [*PAIR, toy_job("c")]
    with pytest.raises(InfeasibleDecision, match=r"node 0 has 0 unshared GPU\(s\), 1 are needed"):
        run(jobs, {0.0: {"a": (0, False), "b": (0, True), "c": (0, True)}})
    assert rows(run(jobs[1:], {0.0: {"b": (0, True), "c": (0, False)}}), "c")  # beside nobody at first


def test_guaranteed_jobs_and_processes_are_no_guests():
    sure = [toy_job("a", is_guaranteed=True)]
    given = {"restart_delay_s": 0.0, "interval_s": 1.0}
    keeps = scripted({0.0: {"a": (0, True)}}, honours_guarantees=True)
    with pytest.raises(InfeasibleDecision, match="cannot be a guest: it is guaranteed"):
        simulate(sure, SPEC, ONE, keeps, **given)
    options = {"interval_s": 1.0, "extra_steps": 0, "shares_devices": False}
    scenario = Scenario("toys", (toy_job("a"),), SPEC, ONE, **options)
    live = Engine(scenario, scripted({0.0: {"a": (0, True)}}))
    live.load()
    with pytest.raises(InfeasibleDecision, match="cannot be a guest: this cluster does not share devices"):
        live.run()
    assert not live.view.shares_devices
    suspended = Engine(replace(scenario, jobs=tuple(PAIR)), policy("antman"))
    suspended.load()
    suspended.run()
    assert [row[2] for row in suspended.rows].count("sharing") == 0


def test_both_must_fit_into_the_memory_of_a_device():
    catalogue = memory_catalogue()
    needed = [find(catalogue, plan, "1").device_memory_bytes_per_gpu for plan in ("ga", "gc")]
    assert needed[0] == SPEC.node.gpu.usable_bytes > needed[1] > 1e9  # more than there is, and yet it ran
    with pytest.raises(
        InfeasibleDecision, match=r"needs 78\.5 GB on a device of node 0 .*; expected 78\.5 GB for both"
    ):
        run(PAIR, BESIDE, catalogue=catalogue)
    lean = [replace(job, plan="gc") for job in PAIR]
    run(lean, BESIDE, catalogue=catalogue)


def test_the_validator_finds_devices_that_are_shared_wrongly():
    result = run(PAIR, BESIDE)
    given = {"restart_delay_s": 4.0, "interval_s": 1.0, "extra_steps": 0}

    def found(catalogue=ONE, jobs=PAIR, **changed):
        events = result.events.copy()
        of_b = (events["job_id"] == "b") & events["kind"].isin(["started", "ready"])
        for name, value in changed.items():
            events.loc[of_b, name] = value
        broken = validate_schedule(events, jobs, SPEC, catalogue, keeps_guarantees=True, **given)
        return {violation.rule for violation in broken}

    assert found() == set()
    assert found(nodes="0:1", shared_nodes="", n_gpus=1) >= {"capacity", "row", "progress"}
    assert found(iter_time_s=1.0) == found(iter_time_s=0.0) == {"row", "progress"}
    assert found(n_gpus=1) == {"row"}
    assert found(nodes="0:1") >= {"row"}
    assert found(shared_nodes="0:2") >= {"row"}
    assert found(jobs=[PAIR[0], replace(PAIR[1], is_guaranteed=True)]) == {"guarantee"}
    large = throughput_rows("roberta", [("ga", "1", 1.0)])
    assert found(TableCatalogue.from_tables([large], node=SPEC.node)) == {"capacity", "row"}
    events = result.events.copy()
    events.loc[events["job_id"] == "a", "job_id"] = "c"
    both = events.assign(shared_nodes=events["shared_nodes"].where(events["nodes"] == "", "0:1"))
    both.loc[both["shared_nodes"] != "", ["nodes", "n_gpus"]] = ["", 0]
    jobs = [PAIR[1], toy_job("c", steps=50)]
    broken = validate_schedule(both, jobs, SPEC, ONE, **given)
    assert any("GPUs for guests are held; expected at most 1" in violation.message for violation in broken)


def test_the_validator_wants_a_change_of_sharing_to_change_nothing_else():
    result = run(PAIR, BESIDE | {14.0: {"a": (0, True), "b": (0, False)}}, spec=toy_nodes(2, 1))
    events = result.events.copy()
    moved = (events["job_id"] == "b") & (events["kind"] == "sharing")
    events.loc[moved, "nodes"] = "1:1"
    given = {"restart_delay_s": 4.0, "interval_s": 1.0, "extra_steps": 0}
    found, *_ = validate_schedule(events, PAIR, toy_nodes(2, 1), ONE, **given)
    assert (found.rule, found.job_id) == (
        "row",
        "b",
    ) and "expected the same devices and plan" in found.message


@pytest.mark.parametrize("kind", [NodeEventKind.FAILED, NodeEventKind.WITHDRAWN])
def test_a_guest_loses_its_place_with_the_device(kind):
    back = NodeEventKind.JOINED if kind is NodeEventKind.FAILED else NodeEventKind.RETURNED
    failures = [NodeEvent(10.0, 0, kind), NodeEvent(12.0, 0, back)]
    script = BESIDE | {13.0: {"a": (0, False), "b": (0, True)}}
    result = run(PAIR, script, failures=failures)
    assert [kind for _, kind in rows(result, "b")].count("interrupted") == 1


def test_of_devices_that_go_away_those_without_guests_go_first():
    jobs = [toy_job(name, steps=30) for name in "abc"]
    script = {0.0: {"a": (0, False), "b": (0, True)}, 1.0: {"c": (0, True)}}
    gone = [NodeEvent(10.0, 0, NodeEventKind.WITHDRAWN, 1), NodeEvent(40.0, 0, NodeEventKind.RETURNED, 1)]
    result = run(jobs, script | {41.0: {"c": (0, True)}}, spec=toy_nodes(1, 2), failures=gone)
    hit = result.events[result.events["kind"] == "interrupted"]
    assert hit["job_id"].tolist() == ["c"]  # two guests, one device: the last one goes, the holder stays


def test_guests_hold_nothing_that_could_lie_idle_beside_them():
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 8.0), ("ga", "8", 1.0)])])
    script = {0.0: {"a": (0, True)}, 400.0: {"a": (0, False)}}
    jobs, spec = [toy_job("a", steps=1000)], toy_nodes(1, 8)
    result = run(jobs, script, spec, catalogue)
    ((start_s, _, free, _),) = [
        (spell.start_s, spell.end_s, spell.gpus_free, spell.job_id)
        for spell in idle_spells(result.events, jobs, spec, catalogue, 4.0)
    ]
    assert (start_s, free) == (400.0, 7)


def test_a_chart_shows_who_holds_devices_and_restarts_only_where_there_are_some():
    result = run(PAIR, BESIDE | {14.0: {"a": (0, True), "b": (0, False)}})
    spans = job_spans(result.events)[["job_id", "start_s", "ready_s", "end_s"]]
    end_s = pytest.approx(14.0 + 17 - 10 * SHARE)
    assert list(spans.itertuples(index=False, name=None)) == [("a", 0.0, 4.0, 14.0), ("b", 14.0, 14.0, end_s)]


def test_a_guaranteed_job_that_becomes_a_guest_is_wronged():
    jobs = [replace(PAIR[0], is_guaranteed=True), PAIR[1]]
    result = run(jobs, BESIDE | {14.0: {"a": (0, True), "b": (0, False)}})
    breaches = guarantee_breaches(result.events, result.outcomes)
    assert breaches[["job_id", "kind"]].to_numpy().tolist() == [["a", "sharing"]]


def memory_catalogue():
    """Return a plan that fills the memory of a device, `ga`, and one that leaves room, `gc`."""
    rows = throughput_rows("roberta", [("ga", "1", 1.0), ("gc", "1", 1.2)])
    return TableCatalogue.from_tables([rows], node=SPEC.node)


def test_guests_and_holders_of_a_node_are_paired_as_fits():
    spec, catalogue = toy_nodes(1, 2), memory_catalogue()
    jobs = [PAIR[0], replace(PAIR[1], plan="gc"), toy_job("c", 5.0, steps=9)]
    result = run(jobs[:2], BESIDE, spec, catalogue)  # the guest is where nobody is
    assert "interrupted" not in set(result.events["kind"])
    late = {5.0: {"c": (0, False)}}
    with pytest.raises(InfeasibleDecision, match=r"job 'b': needs .* on a device of node 0 beside"):
        run(jobs, BESIDE | late, spec, catalogue)
    lean = [*jobs[:2], replace(jobs[2], plan="gc")]
    run(lean, BESIDE | late, spec, catalogue)  # beside the small one


def test_a_guest_goes_with_the_only_device_that_has_memory_for_it():
    spec, catalogue = toy_nodes(1, 2), memory_catalogue()
    jobs = [PAIR[0], replace(PAIR[1], plan="gc")]
    gone = [NodeEvent(10.0, 0, NodeEventKind.WITHDRAWN, 1), NodeEvent(70.0, 0, NodeEventKind.RETURNED, 1)]
    script = BESIDE | {71.0: {"b": (0, True)}}
    result = run(jobs, script, spec, catalogue, failures=gone)
    hit = result.events[result.events["kind"] == "interrupted"]
    assert list(zip(hit["time_s"], hit["job_id"], strict=True)) == [(10.0, "b")]


@pytest.mark.parametrize("seed", range(20))
def test_no_guest_is_crowded_where_any_pairing_has_memory_for_all(seed):
    draw = random.Random(seed)
    n_devices = draw.randint(1, 5)
    holders = [draw.randint(1, 9) for _ in range(draw.randint(0, n_devices))]
    guests = [draw.randint(1, 9) for _ in range(draw.randint(0, n_devices))]
    devices = holders + [0] * (n_devices - len(holders))
    fits = any(
        all(own + taken <= 10 for own, taken in zip(guests, order, strict=False))
        for order in itertools.permutations(devices)
    )
    assert (oversubscribed_bytes(holders, guests, n_devices, 10.0) is None) is fits


def busy_catalogue(**shares):
    """Return a catalogue with a plan on one device for each pair of shares of computing and moving."""
    rows = throughput_rows("roberta", [(plan, "1", 1.0) for plan in shares])
    return TableCatalogue.from_tables([rows], busy={"roberta": list(shares.values())})


HALF = busy_catalogue(
    ga=(1.0, 0.0), gc=(0.5, 0.0)
)  # one never idle, and one whose devices are half of the time


def test_a_guest_goes_as_fast_as_holders_let_it_and_as_alone_once_they_are_gone():
    jobs = [toy_job("a", plan="gc", steps=10), toy_job("b", steps=20), toy_job("c", 30.0, steps=5)]
    result = run(jobs, BESIDE | {30.0: {"c": (0, False)}}, catalogue=HALF)
    assert rows(result, "b", "iter_time_s", "steps_left")[1:] == [
        (0.0, "started", 2.0, 20.0),
        (4.0, "ready", 2.0, 20.0),
        (14.0, "rated", 1.0, 15.0),
        (29.0, "finished", pytest.approx(float("nan"), nan_ok=True), 0.0),
    ]
    busy = [jobs[0], replace(jobs[1], steps=18), replace(jobs[2], submit_time_s=20.0)]
    result = run(busy, BESIDE | {20.0: {"c": (0, False)}}, catalogue=HALF)
    assert rows(result, "b", "iter_time_s", "steps_left")[3:-1] == [
        (14.0, "rated", 1.0, 13.0),
        (20.0, "rated", 100.0, 7.0),
        (29.0, "rated", 1.0, pytest.approx(7.0 - 0.09)),
    ]


@pytest.mark.parametrize(
    ("guest", "holder", "pace"),
    [
        ((0.5, 0.0), (0.5, 0.0), 1 / 1.5),  # half a step of computing takes twice as long
        ((0.5, 0.5), (0.5, 0.5), 1 / 2),
        ((0.25, 0.25), (0.75, 0.0), 1 / 1.75),  # nobody else moves data
        ((0.0, 1.0), (1.0, 0.0), 1.0),
        ((0.1, 0.0), (1.0, 0.0), 0.01),
        ((0.1, 0.9), (0.5, 0.995), 0.01),
    ],
)
def test_each_phase_of_a_guest_takes_as_much_longer_as_the_holder_leaves_less_for_it(guest, holder, pace):
    item = find(ONE, "ga", "1")
    beside = colocated_speed(replace(item, busy=guest), replace(item, busy=holder))
    assert beside == pytest.approx(pace) and beside >= MIN_SPEED
    assert colocated_speed(replace(item, busy=guest), None) == 1.0
    assert colocated_speed(item, replace(item, busy=holder)) == IDLE_SHARE


def test_guests_choose_devices_on_which_they_are_fastest_the_neediest_first():
    there, known = SPEC.node.gpu.usable_bytes, find(HALF, "gc", "1")
    small, middle = (replace(known, device_memory_bytes_per_gpu=part * there) for part in (0.1, 0.5))
    busy, large = (
        replace(known, busy=(share, 0.0), device_memory_bytes_per_gpu=part * there)
        for share, part in ((0.75, 0.1), (0.5, 0.8))
    )
    slow, fast = 1 / 2.5, 1 / 1.5
    holders = [(0, 1, busy), (1, 1, large)]
    assert colocated_speeds(holders, [(2, 1, small)], 2, there) == ({2: pytest.approx(fast)}, [busy])
    assert colocated_speeds(holders, [(2, 1, middle)], 2, there) == ({2: pytest.approx(slow)}, [large])
    two = [(2, 1, small), (3, 1, middle)]
    assert colocated_speeds(holders, two, 3, there)[0] == {2: pytest.approx(fast), 3: 1.0}
    equal = [(3, 1, small), (2, 1, small)]
    assert colocated_speeds(holders, equal, 2, there)[0] == {2: pytest.approx(fast), 3: pytest.approx(slow)}
    assert colocated_speeds(holders, [(2, 2, small)], 2, there)[0] == {2: pytest.approx(slow)}
    assert colocated_speeds(holders, [(2, 2, middle)], 2, there)[0] == {
        2: MIN_SPEED
    }  # no device for one half


def test_the_slowest_device_of_a_guest_holds_it_up():
    catalogue = TableCatalogue.from_tables(
        [throughput_rows("roberta", [("ga", "1", 1.0), ("gc", "1", 1.0), ("ga", "11", 1.0)])],
        busy={"roberta": [(0.75, 0.0), (0.5, 0.0), (1.0, 0.0)]},
    )
    jobs = [toy_job("a", steps=50), toy_job("b", plan="gc", steps=50), toy_job("c", n_gpus=2, n_cpus=8)]
    wide = find(catalogue, "ga", "11")

    def script(view):
        if view.time_s > 0.0:
            return {}
        held = {name: view.catalogue.requested(view.job(name).spec) for name in "ab"}
        given = {name: Allocation(item, (rank,)) for rank, (name, item) in enumerate(held.items())}
        return given | {"c": Allocation(wide, (0, 1), is_guest=True)}

    result = simulate(jobs, toy_nodes(2, 1), catalogue, Scripted(script), restart_delay_s=0.0, extra_steps=0)
    assert rows(result, "c", "iter_time_s")[1][-1] == 4.0 and rows(result, "c")[-1][0] == 40.0


def test_an_interrupted_guest_loses_what_it_did_since_its_checkpoint_at_the_rates_of_that_time():
    jobs = [toy_job("a", plan="gc", steps=10), toy_job("b", steps=60)]
    failures = [NodeEvent(20.0, 0, NodeEventKind.FAILED), NodeEvent(22.0, 0, NodeEventKind.JOINED)]
    script = BESIDE | {23.0: {"b": (0, False)}}
    result = run(jobs, script, catalogue=HALF, failures=failures, checkpoint_interval_s=9.0)
    ((_, _, left),) = (row for row in rows(result, "b", "steps_left") if row[1] == "interrupted")
    assert left == pytest.approx(60 - 4.5)  # ready at 4, checkpoint at 13, 9 s at half the rate


def test_devices_that_a_guest_uses_and_nobody_holds_count_as_used():
    jobs = [toy_job("a", steps=50), toy_job("b", n_gpus=2, n_cpus=8, steps=17), toy_job("c", 8.0, steps=10)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 1.0), ("ga", "2", 1.0)])])
    spec = toy_nodes(1, 2)
    result = run(jobs, BESIDE | {10.0: {"c": (0, False)}}, spec, catalogue)
    # From 10 to 24 s both devices have holders; the speed of the guest stays that beside its slowest device.
    assert rows(result, "b", "shared_nodes", "n_gpus", "steps_left")[1:] == [
        (0.0, "started", "0:2", 1, 17.0),
        (4.0, "ready", "0:2", 1, 17.0),
        (10.0, "rated", "0:2", 0, pytest.approx(17.0 - 6 * SHARE)),
        (24.0, "rated", "0:2", 1, pytest.approx(17.0 - 20 * SHARE)),
        (pytest.approx(4.0 + 17 / SHARE), "finished", "", 0, 0.0),
    ]
    assert gpu_allocation_ratio(result.events, spec) == pytest.approx(1.0)
    costs = job_goodput(result.events, result.losses).set_index("job_id")
    assert costs.loc["b", ["held_gpu_s", "restart_gpu_s"]].tolist() == pytest.approx([40.0, 4.0])
    assert result.outcomes["attained_service_gpu_s"].tolist() == [54.0, 0.0, 14.0]
    for kind, value in (("rated", 2), ("started", 2)):
        events = result.events.copy()
        events.loc[(events["kind"] == kind) & (events["job_id"] == "b"), "n_gpus"] = value
        broken = validate_schedule(events, jobs, spec, catalogue, 4.0, interval_s=1.0, extra_steps=0)
        assert [item.rule for item in broken] == ["row"] * len(broken) and broken


@pytest.mark.parametrize("recovery", [None, Recovery("restart", 10.0, 0.0)])
def test_an_interrupted_guest_loses_device_time_where_nobody_held_the_devices(recovery):
    jobs = [toy_job("a", steps=6), toy_job("b", steps=60)]
    failures = [NodeEvent(20.0, 0, NodeEventKind.FAILED), NodeEvent(22.0, 0, NodeEventKind.JOINED)]
    options = {"checkpoint_interval_s": 10.0} if recovery is None else {"recovery": recovery}
    script = BESIDE | {23.0: {"b": (0, False)}}
    given = {"restart_delay_s": 0.0, "interval_s": 1.0, "extra_steps": 0}
    result = simulate(jobs, SPEC, ONE, scripted(script), failures=failures[:2], **given, **options)
    # The guest is alone from 6 s on, and the failure takes what it did since its checkpoint at 20 or 10 s.
    lost = result.losses[["lost_steps", "lost_gpu_s"]].to_numpy().tolist()
    assert lost == [pytest.approx([0.0, 0.0])]
    later = [replace(event, time_s=event.time_s - 4.0) for event in failures]
    result = simulate(jobs, SPEC, ONE, scripted(script), failures=later, **given, **options)
    assert result.losses[["lost_steps", "lost_gpu_s"]].to_numpy().tolist() == [pytest.approx([6.0, 6.0])]
    early = [replace(event, time_s=event.time_s - 12.0) for event in failures]
    result = simulate(jobs, SPEC, ONE, scripted(script), failures=early, **given, **options)
    assert result.losses["lost_steps"].tolist() == pytest.approx([6 * SHARE + 2.0])
    assert result.losses["lost_gpu_s"].tolist() == pytest.approx([2.0])
    checkpoint_s = options.get("checkpoint_interval_s")
    broken = validate_schedule(
        result.events,
        jobs,
        SPEC,
        ONE,
        0.0,
        extra_steps=0,
        checkpoint_interval_s=checkpoint_s,
        recovery_of=lambda job: recovery,
        losses=result.losses,
    )
    assert broken == []


def test_the_validator_checks_how_fast_guests_go():
    jobs = [toy_job("a", plan="gc", steps=10), toy_job("b", steps=20)]
    result = run(jobs, BESIDE, catalogue=HALF)
    given = {"restart_delay_s": 4.0, "interval_s": 1.0, "extra_steps": 0}
    assert rows(result, "b")[3] == (14.0, "rated")
    for name, value, message in (
        ("iter_time_s", 2.0, "a step as a guest takes 2.0 s; expected 1.0 s"),
        ("shared_nodes", "0:2", "expected a new speed of a guest on the same devices"),
        ("job_id", "a", "rated while finished"),
    ):
        events = result.events.copy()
        events.loc[events["kind"] == "rated", name] = value
        broken = validate_schedule(events, jobs, SPEC, HALF, **given)
        assert any(message in violation.message for violation in broken), (name, broken)
    events = result.events[result.events["kind"] != "rated"]
    broken = validate_schedule(events, jobs, SPEC, HALF, **given)
    assert {violation.rule for violation in broken} >= {"row", "progress"}
