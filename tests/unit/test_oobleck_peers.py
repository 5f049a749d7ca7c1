"""Simulators of ReCycle and of dropped replicas: worked cases, accounts, restarts, and refusals."""

from dataclasses import replace

import pytest

from makespan.errors import InputError
from makespan.oobleck.rerouting import PeerRates, StagePasses, plain_time_s, rerouted_time_s, shared_out
from makespan.oobleck.simulator import DEFECTS, PEER_SYSTEMS, Category, Costs, repairs, simulate
from makespan.oobleck.traces import NodeEvent, NodeTrace, generate_failures, generate_repaired

FIXED = repairs("fixed")
PASSES = StagePasses.split((1.0, 1.0), (2.0, 2.0))
# Three pipelines of two stages; a step of 12 samples takes 10 s, so that the full rate is 1.2 samples/s.
PEERS = PeerRates(PASSES, n_microbatches=12, n_pipelines=3, full_samples_per_s=1.2)
COSTS = Costs(
    samples_per_step=12,
    throughput={6: 1.2},
    creation_ms=5_000,
    global_ms=3_000,
    checkpoint_ms=4_000,
    checkpoint_every=4,
    restart_ms=24_000,
    n_stages=2,
    peers=PEERS,
)


def trace(*events, n_nodes=6):
    """Return nodes 0, 1, ... at time 0, and then events ``(time_s, name)`` or ``(time_s, -name)``."""
    joined = [NodeEvent(0, True, f"n{index}") for index in range(n_nodes)]
    later = [NodeEvent(round(1e3 * time_s), kind == "+", f"n{name}") for time_s, kind, name in events]
    return NodeTrace("test", (*joined, *later))


def run(system, *events, costs=COSTS, n_nodes=6):
    return simulate(system, trace(*events, n_nodes=n_nodes), costs, FIXED)


@pytest.mark.parametrize("system", PEER_SYSTEMS)
def test_without_losses_every_step_has_the_full_rate(system):
    # Ready at 5 s, regrouped at 8 s, steps of 10 s until 108 s; a node beyond the pipelines ends the trace.
    found = run(system, (108.0, "+", 99))
    assert found.n_steps == 10
    assert found.throughput_samples_per_s == pytest.approx(120 / 103)


def test_recycle_reroutes_and_replicas_are_dropped():
    # The loss at 33 s voids the step that began at 28 s; training continues at 36 s.
    events = [(33.0, "-", 0), (96.0, "+", 99)]
    recycle, dropped = (run(system, *events) for system in PEER_SYSTEMS)
    step_s = 10.0 * rerouted_time_s(PASSES, 12, 3, (2, 3)) / plain_time_s(PASSES, (4, 4, 4))
    assert step_s == pytest.approx(10.0 * 19.0 / 15.0) and recycle.n_steps == 2 + 60 // step_s
    # The others have two thirds of the samples in steps of the same length.
    assert dropped.n_steps == 2 + 6
    assert dropped.throughput_samples_per_s == pytest.approx((2 * 12 + 6 * 8) / 91)


def test_a_new_node_takes_the_empty_place_at_the_end_of_a_step():
    # It arrives at 40 s and is ready at 45 s; the step ends at 46 s, and regrouping at 49 s.
    found = run("replica-drop", (33.0, "-", 0), (40.0, "+", 7), (99.0, "+", 99))
    assert found.n_steps == 2 + 1 + 5
    assert found.throughput_samples_per_s == pytest.approx((2 * 12 + 8 + 5 * 12) / 94)
    # A node that would not pay for its regrouping within the horizon waits.
    waits = run(
        "replica-drop", (33.0, "-", 0), (40.0, "+", 7), (99.0, "+", 99), costs=replace(COSTS, horizon_ms=3000)
    )
    assert waits.throughput_samples_per_s == pytest.approx((2 * 12 + 6 * 8) / 94)


def test_without_a_worker_in_a_stage_recycle_restarts_from_the_last_checkpoint():
    # Nodes 0, 2, 4 are all of the first stage. Five steps end until 58 s, the last checkpoint is after four.
    # The second and third loss hit a regrouping, after which a restart of 20 s begins: 58.5 + 20 = 78.5 s.
    events = [(58.2, "-", 0), (58.3, "-", 2), (58.5, "-", 4), (98.5, "+", 99)]
    found = run("recycle", *events)
    assert found.times_s[Category.RESTART] == pytest.approx(20.0)
    assert found.times_s[Category.LOST] == pytest.approx(
        10.0 + 0.2 + 20.0
    )  # the fifth, the running, the last
    # One pipeline of the three nodes that are left needs 12 micro-batches of 3 s and one more.
    step_s = 10.0 * plain_time_s(PASSES, (12,)) / plain_time_s(PASSES, (4, 4, 4))
    assert step_s > 20.0 and found.n_steps == 5
    assert found.throughput_samples_per_s == pytest.approx(4 * 12 / 93.5)


def test_replicas_restart_where_none_is_whole_and_the_job_waits_without_nodes():
    events = [(33.0, "-", 0), (33.5, "-", 2), (33.9, "-", 5), (74.0, "+", 99)]
    found = run("replica-drop", *events)  # one node of each pipeline: restart on one, at 53.9 s
    assert found.times_s[Category.RESTART] == pytest.approx(20.0)
    assert found.throughput_samples_per_s == pytest.approx(2 * 4 / 69)  # steps before it are lost
    waits = run("recycle", (18.0, "-", 0), (18.0, "-", 1), (118.0, "+", 99), n_nodes=2)
    assert waits.times_s[Category.STALLED] > 0 and waits.times_s[Category.USEFUL] == 0


@pytest.mark.parametrize("system", PEER_SYSTEMS)
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_millisecond_has_one_category_and_steps_do_not_overlap(system, seed):
    peers = PeerRates(StagePasses.split((0.1,) * 5, (0.2,) * 5), 60, 6, 10.0)
    costs = replace(COSTS, samples_per_step=600, throughput={30: 10.0}, n_stages=5, peers=peers)
    for losses in (generate_failures("10m", seed), generate_repaired(30, 900.0, 3600.0, 40, seed)):
        found = simulate(system, losses, costs, FIXED)
        spent = sum(time_s for name, time_s in found.times_s.items() if name != Category.IDLE)
        assert spent == pytest.approx(losses.end_ms / 1e3 - 5.0)
        assert min(found.times_s.values()) >= 0
        steps = found.steps()
        assert (steps[1:, 0] >= steps[:-1, 1] - 1e-9).all()
        counted = steps[steps[:, 2] > 0]
        useful_s = (counted[:, 1] - counted[:, 0]).sum()
        assert useful_s == pytest.approx(found.times_s[Category.USEFUL], abs=0.1)
        assert simulate(system, losses, costs, FIXED) == found


def test_a_schedule_never_raises_the_rate_above_that_without_losses():
    split = PeerRates(StagePasses.split((1.0,) * 8, (2.0,) * 8), 64, 8, 100.0, in_flight=16)
    assert rerouted_time_s(split.passes, 64, 8, (8,) * 7 + (7,), in_flight=16) < plain_time_s(
        split.passes, shared_out(64, 8)
    )
    assert split.samples_per_s((8,) * 7 + (7,), 8) == split.samples_per_s((8,) * 8, 8) == 100.0
    assert split.samples_per_s((4,) * 8, 4) == pytest.approx(100.0 * 15 / 23)


def test_defects_and_missing_rates_are_refused():
    for system in PEER_SYSTEMS:
        with pytest.raises(
            InputError, match=rf"0 repaired defects; expected this throughput, and all {len(DEFECTS)}"
        ):
            simulate(system, trace(), COSTS, repairs("compat"))
        with pytest.raises(InputError, match="simulation with no throughput by live workers"):
            simulate(system, trace(), replace(COSTS, peers=None), FIXED)


def test_repaired_losses_come_back_after_the_repair():
    found = generate_repaired(4, 600.0, 1800.0, 20, seed=3)
    counts = found.counts()
    assert min(counts) >= 0 and max(counts) == 4 == counts[-1]
    lost = [event.time_ms for event in found.events if not event.is_added]
    back = [event.time_ms for event in found.events[4:] if event.is_added]
    assert back == [time_ms + 1_800_000 for time_ms in lost] and found.end_ms == back[-1]
    assert [event.time_ms for event in found.events] == sorted(event.time_ms for event in found.events)
    assert (
        found
        == generate_repaired(4, 600.0, 1800.0, 20, seed=3)
        != generate_repaired(4, 600.0, 1800.0, 20, seed=4)
    )
    with pytest.raises(InputError, match=r"repaired losses: 4 nodes, 0 losses"):
        generate_repaired(4, 600.0, 1800.0, 0, seed=1)
