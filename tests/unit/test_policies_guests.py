"""Guests: where another one is fastest, and when our policies let waiting jobs be guests."""

from dataclasses import replace

import pytest
from toy_cluster import find, simulate, throughput_rows, toy_job, toy_nodes

from makespan.policies import policy
from makespan.policies.placing import GuestPlacement, PlacementCache
from makespan.sim import Allocation, Engine, Scenario, validate_schedule
from makespan.studies import TableCatalogue

OURS = ("morphling-lookahead", "morphling-work")
ROWS = throughput_rows("roberta", [("ga", "1", 1.0), ("gc", "1", 1.5), ("ga", "2", 0.6)])
HALF = TableCatalogue.from_tables([ROWS], busy={"roberta": [(0.5, 0.0), (0.2, 0.0), (0.5, 0.2)]})
ONE = TableCatalogue.from_tables([ROWS.head(1)], busy={"roberta": [(0.5, 0.0)]})
GIVEN = {"restart_delay_s": 4.0, "interval_s": 1.0}


def guests_of(spec, *held):
    """Return the room for guests beside jobs that have what is given."""
    view = Engine(Scenario("toys", (), spec, ONE, 4.0, 1.0, shares_devices=False), policy("fifo")).view
    guests = GuestPlacement(view, PlacementCache.on(spec, ONE))
    for index, allocation in enumerate(held):
        guests.add(index, allocation)
    return guests


def test_one_more_guest_goes_where_the_slowest_of_its_devices_is_fastest():
    usual, lean, pair = find(HALF, "ga", "1"), find(HALF, "gc", "1"), find(HALF, "ga", "2")
    guests = guests_of(
        toy_nodes(3, 1), *(Allocation(item, (node,)) for node, item in enumerate((usual, lean)))
    )
    assert guests.fastest(usual) == (1.0, (2,))
    guests.add(2, Allocation(usual, (2,), is_guest=True))
    assert guests.fastest(usual) == (pytest.approx(1 / (0.5 + 0.5 / 0.8)), (1,))
    assert guests.fastest(usual, least_pace=0.95) is None and guests.fastest(pair) is None
    guests.add(3, Allocation(usual, (1,), is_guest=True))
    guests.add(4, Allocation(usual, (0,), is_guest=True))
    assert guests.fastest(usual) is None
    guests.remove(4, Allocation(usual, (0,), is_guest=True))
    assert guests.fastest(usual) == (pytest.approx(1 / 1.5), (0,))
    assert guests.fastest(replace(usual, host_memory_bytes_per_gpu=1.0)) is None


def test_guests_need_memory_beside_their_holders():
    spec = toy_nodes(1, 2)
    large, small = (
        replace(find(HALF, "ga", "1"), device_memory_bytes_per_gpu=part * spec.nodes[0].gpu.usable_bytes)
        for part in (0.7, 0.4)
    )
    guests = guests_of(spec, Allocation(large, (0,)))
    assert guests.has_place(large, (0,)) and guests.has_place(small, (0,))
    guests.add(1, Allocation(small, (0,), is_guest=True))
    assert not guests.is_crowded(0) and not guests.has_place(small, (0,))  # the free device is taken
    guests.add(2, Allocation(large, (0,)))
    assert guests.is_crowded(0)
    assert not guests.has_place(replace(small, host_memory_bytes_per_gpu=1.0), (0,))


def test_a_guest_that_just_fits_is_not_turned_away():
    spec = toy_nodes(2, 1)
    there_bytes, usual = spec.nodes[0].gpu.usable_bytes, find(HALF, "ga", "1")
    holder = replace(usual, device_memory_bytes_per_gpu=0.7 * there_bytes)
    guests = guests_of(spec, *(Allocation(holder, (node,)) for node in range(2)))
    guest = replace(usual, device_memory_bytes_per_gpu=there_bytes - 0.7 * there_bytes)
    assert guests.fastest(guest)[1] == (0,)
    assert guests.fastest(replace(guest, device_memory_bytes_per_gpu=0.31 * there_bytes)) is None
    guests.remove(1, Allocation(holder, (1,)))
    assert guests.fastest(replace(guest, device_memory_bytes_per_gpu=0.31 * there_bytes)) == (1.0, (1,))


def run(name, jobs, spec, catalogue=ONE):
    """Simulate and check, and return what happened to each job."""
    result = simulate(jobs, spec, catalogue, policy(name), extra_steps=0, **GIVEN)
    checked = {"outcomes": result.outcomes, "keeps_guarantees": True, "extra_steps": 0, **GIVEN}
    assert validate_schedule(result.events, jobs, spec, catalogue, **checked) == []
    rows = result.events[["job_id", "time_s", "kind", "shared_nodes"]].itertuples(index=False, name=None)
    found = {job.job_id: [] for job in jobs}
    for job_id, *what in rows:
        found[job_id].append(tuple(what))
    return found


PAIR = [toy_job("a", steps=60, is_guaranteed=True), toy_job("b", 1.0, steps=50)]


@pytest.mark.parametrize("name", OURS)
def test_a_job_that_waits_computes_meanwhile_and_then_has_the_device_without_a_restart(name):
    assert run(name, PAIR, toy_nodes(1, 1))["b"] == [
        (1.0, "submitted", ""),
        (1.0, "started", "0:1"),
        (5.0, "ready", "0:1"),
        (64.0, "sharing", ""),
        (pytest.approx(64.0 + 50 - 59 / 1.5), "finished", ""),
    ]


@pytest.mark.parametrize("name", OURS)
def test_without_sharing_and_in_real_runs_nobody_is_a_guest(name):
    alone = run(f"{name}-s", PAIR, toy_nodes(1, 1))["b"]
    assert [row[1] for row in alone] == ["submitted", "started", "ready", "finished"] and alone[1][0] == 64.0
    options = {"extra_steps": 0, "shares_devices": False}
    live = Engine(Scenario("toys", tuple(PAIR), toy_nodes(1, 1), ONE, 4.0, 1.0, **options), policy(name))
    live.load()
    live.run()
    assert not any(row[-1] for row in live.rows)


@pytest.mark.parametrize("name", OURS)
def test_a_guaranteed_job_waits_rather_than_be_a_guest(name):
    sure = [PAIR[0], replace(PAIR[1], is_guaranteed=True)]
    assert run(name, sure, toy_nodes(1, 1))["b"][1] == (64.0, "started", "")


@pytest.mark.parametrize(("steps", "moves"), [(10, False), (60, True)])
def test_a_guest_leaves_for_other_devices_only_if_it_ends_earlier_there(steps, moves):
    busy = [toy_job("a", steps=60, is_guaranteed=True), toy_job("c", 1.0, steps=10, is_guaranteed=True)]
    found = run("morphling-work", [*busy, toy_job("b", 2.0, steps=steps)], toy_nodes(2, 1))["b"]
    assert found[1] == (2.0, "started", "0:1")  # beside a; at 15 s the device of c is free
    assert [row for row in found if row[1] == "reconfigured"] == [(15.0, "reconfigured", "")] * moves


def test_who_is_stopped_for_a_guaranteed_job_computes_on_beside_it():
    jobs = [toy_job("a", steps=500), toy_job("b", 20.0, steps=30, is_guaranteed=True)]
    found = run("morphling-work", jobs, toy_nodes(1, 1))
    assert [(time_s, kind) for time_s, kind, _ in found["a"]] == [
        (0.0, "submitted"),
        (0.0, "started"),
        (4.0, "ready"),
        (20.0, "sharing"),
        (54.0, "sharing"),
        (pytest.approx(504.0 + 34 * (1 - 1 / 1.5)), "finished"),
    ]
