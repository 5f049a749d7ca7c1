"""Traces and tables at which a simulator could stumble, and laws of all three on any trace.

Where the cases are, of those that a simulator of nodes that come and go must bear:

- a trace that is empty, falls in time, adds a node twice, removes one that is not there, or has no number:
  `test_a_trace_that_cannot_be_is_refused_with_its_line` and, of an empty one, `test_oobleck_simulators`
- only additions; a removal before a node is ready; an addition and a removal of one node at once; all nodes
  removed; fewer than twelve nodes; more than thirty: `EDGES`, under `test_every_edge_is_borne`
- the last event is not the latest: refused, since times must not fall
- no step ever completes: `test_no_step_is_a_throughput_of_zero`
- a system that does not fit: `test_oobleck_simulators`, ends at once
- equal input gives equal output, whatever order
  hashes have: `test_output_does_not_depend_on_the_order_of_hashes`
- categories of time sum to the wall time, on any trace: `test_laws_on_any_trace`
- several steps at once are as many steps one by one: `test_steps_taken_together_are_those_taken_alone`
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from makespan.config import load_settings
from makespan.errors import InputError, TraceError
from makespan.files import read_preset
from makespan.oobleck.simulator import (
    DEFECTS,
    MODES,
    SYSTEMS,
    BambooMachine,
    OobleckMachine,
    Systems,
    VarunaMachine,
    expected_share,
    repairs,
    simulate,
    switches,
    unused_nodes,
    young_daly_steps,
)
from makespan.oobleck.traces import (
    SPOT_TRACES,
    NodeEvent,
    NodeTrace,
    generate_failures,
    generate_spot,
    generate_steady,
    read_trace,
)
from makespan.papers.oobleck import PAPER
from makespan.papers.oobleck.simulation import generated_traces

ROOT = Path(__file__).parents[2]
OPTIONS = load_settings([], ROOT).oobleck.simulation.systems()
TABLE = PAPER.read_published("throughput", ROOT / "config/published/oobleck_throughput.csv")
SIM = Systems(TABLE, **OPTIONS)
HOUR_MS = 3_600_000


def trace(*parts):
    """Return a trace of (time_ms, +n or names to remove); added nodes are n1, n2, ... in order."""
    events, n_named = [], 0
    for time_ms, what in parts:
        if isinstance(what, int):
            events += [NodeEvent(time_ms, True, f"n{n_named + index + 1}") for index in range(what)]
            n_named += what
        else:
            events += [NodeEvent(time_ms, False, name) for name in what.split()]
    return NodeTrace("own", tuple(events))


def numbered(first, last):
    return " ".join(f"n{index}" for index in range(first, last + 1))


EDGES = {
    "only additions": trace((0, 20), (HOUR_MS, 5), (2 * HOUR_MS, 3)),
    "one event": trace((0, 1)),
    "removed before it is ready": trace((0, 24), (30_000, "n3"), (HOUR_MS, "n4")),
    "all removed before they are ready": trace((0, 15), (10_000, numbered(1, 15)), (HOUR_MS, 2)),
    "added and removed at once": trace((0, 24), (HOUR_MS, 1), (HOUR_MS, "n25"), (2 * HOUR_MS, "n1")),
    "all removed": trace((0, 24), (HOUR_MS, numbered(1, 24)), (2 * HOUR_MS, 1)),
    "all removed and others come": trace(
        (0, 20), (HOUR_MS, numbered(1, 20)), (2 * HOUR_MS, 20), (3 * HOUR_MS, 1)
    ),
    "too few for a pipeline": trace((0, 11), (HOUR_MS, "n1")),
    "fewer than the table has": trace((0, 13), (HOUR_MS, "n1"), (2 * HOUR_MS, 4), (3 * HOUR_MS, "n2")),
    "more than the table has": trace((0, 40), (HOUR_MS, "n1"), (2 * HOUR_MS, "n2")),
    "one after the other within a restart": trace(
        (0, 30), *((HOUR_MS + turn * 1000, f"n{turn + 1}") for turn in range(12)), (2 * HOUR_MS, 1)
    ),
    "all at one instant": trace((0, 30), (0, "n1"), (0, "n2")),
}


def conserves(found, there, first_ready_ms):
    wall_s = max(there.end_ms - first_ready_ms, 0) / 1000 if first_ready_ms is not None else 0.0
    total_s = sum(time_s for name, time_s in found.times_s.items() if name != "idle")
    return total_s == pytest.approx(wall_s, abs=1e-6)


def first_ready_ms(there):
    """Return when the first node is ready that is there for so long."""
    removed = {event.node: event.time_ms for event in there.events if not event.is_added}
    added = [(event.time_ms, event.node) for event in there.events if event.is_added]
    times = [time + 45_000 for time, node in added if removed.get(node, 10**15) > time + 45_000]
    return min([time for time in times if time <= there.end_ms], default=None)


@pytest.mark.parametrize("name", list(EDGES))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_edge_is_borne(name, mode, system):
    there = EDGES[name]
    for model in ("GPT-2", "GPT-3 6.7B"):
        found = simulate(system, there, SIM.costs(system, model), repairs(mode))
        if not found.is_feasible:
            continue
        assert (
            0.0 <= found.throughput_samples_per_s <= max(SIM.costs(system, model).throughput.values()) * 1.01
        )
        assert found.n_failures <= sum(not event.is_added for event in there.events)
        if mode == "fixed":
            assert conserves(found, there, first_ready_ms(there)), found.times_s


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_step_is_a_throughput_of_zero(system):
    for name in (
        "one event",
        "all removed before they are ready",
        "too few for a pipeline",
        "all at one instant",
    ):
        for mode in MODES:
            found = simulate(system, EDGES[name], SIM.costs(system, "GPT-2"), repairs(mode))
            assert found.throughput_samples_per_s == 0.0 and found.n_steps == 0
            assert found.steps().shape == (0, 3)


def test_too_few_nodes_for_the_largest_model_wait_where_that_is_repaired():
    there = trace((0, 15), (HOUR_MS, 1), (2 * HOUR_MS, 1))
    costs = SIM.costs("oobleck", "GPT-3 6.7B")
    released = simulate("oobleck", there, costs, repairs("compat"))
    repaired = simulate("oobleck", there, costs, repairs("fixed"))
    assert released.n_steps == 0 and repaired.n_steps > 0
    assert repaired.times_s["stalled"] == pytest.approx(3600.0 - 45.0 + 45.0 - 10.0, abs=15.0)


@pytest.mark.parametrize("n_nodes", [12, 13, 14, 15])
def test_a_released_job_without_throughput_begins_an_endless_step_also_below_the_table(n_nodes):
    """The release takes the first row of the table for fewer nodes: nodes that join later are not used."""
    there = trace((0, n_nodes), (HOUR_MS, 17 - n_nodes), (2 * HOUR_MS, 1))
    costs = SIM.costs("oobleck", "GPT-3 6.7B")
    released = simulate("oobleck", there, costs, repairs("compat"))
    assert released.n_steps == 0 and released.times_s["useful"] == 1e9
    for one in ("D7", "D10"):
        waiting = simulate("oobleck", there, costs, repairs("compat", switches(one)))
        assert (waiting.n_steps > 0) is (one == "D7" or n_nodes < 15)


def test_below_the_table_a_job_waits_only_where_that_is_repaired():
    there = EDGES["fewer than the table has"]
    costs = SIM.costs("oobleck", "BERT-Large")
    clamped, waiting = (
        simulate("oobleck", there, costs, repairs("compat", switches(one))) for one in ("", "D10")
    )
    assert clamped.throughput_samples_per_s > 0
    assert waiting.n_steps < clamped.n_steps


def test_nodes_beyond_the_table_are_idle_and_said_to_be():
    costs = SIM.costs("oobleck", "GPT-2")
    there = trace((0, 40), (HOUR_MS, "n1"))
    assert unused_nodes(there, costs) == 10 and unused_nodes(trace((0, 30), (1, "n1")), costs) == 0
    as_many = simulate("oobleck", there, costs, repairs("compat"))
    full = simulate("oobleck", trace((0, 30), (HOUR_MS, "n1")), costs, repairs("compat"))
    assert as_many.throughput_samples_per_s == full.throughput_samples_per_s
    of_spares = trace((0, 40), (HOUR_MS, "n40"), (2 * HOUR_MS, "n1"), (3 * HOUR_MS, 1))
    found = simulate("oobleck", of_spares, costs, repairs("fixed"))
    assert found.n_failures == 2 and found.times_s["rebalance"] == 2 * 2.0


@pytest.mark.parametrize(
    ("lines", "row", "found"),
    [
        ("0,add,a\n5,remove,b\n", 2, "b"),
        ("0,add,a\n5,add,a\n", 2, "a"),
        ("9,add,a\n5,add,b\n", 2, "5"),
        ("0,add,a\n-5,add,b\n", 2, "-5"),
        ("0,add,a\n1.5,add,b\n", 2, "1.5"),
        ("0,add,a\n5,stop,a\n", 2, "stop"),
        ("0,add,a\n5,remove,a\n6,add,a\n", 3, "a"),
        (f"0,add,a\n{10**12},add,b\n", 2, "ten years"),
        (f"0,add,a\n{'9' * 5000},add,b\n", 2, "ten years"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_its_line(tmp_path, lines, row, found):
    (tmp_path / "own.csv").write_text(lines)
    with pytest.raises(TraceError, match=rf"row {row}.*{found}"):
        read_trace(tmp_path / "own.csv", "own")


def test_a_table_of_throughput_with_a_row_that_cannot_be_is_refused():
    import pandas as pd

    for wrong, message in (
        (pd.concat([TABLE, TABLE.head(1)]), "twice"),
        (TABLE.assign(published_samples_per_s=-1.0), "below 0"),
        (TABLE.assign(published_samples_per_s=float("inf")), "not finite"),
        (TABLE.assign(n_nodes=0).drop_duplicates(["model", "system", "n_nodes"]), "too few nodes"),
        (TABLE.assign(system=TABLE["system"].replace("varuna", "varun")), "varun, .* unknown system"),
        (TABLE.assign(published_restart_s=float("inf")), "published_restart_s below 0 or not finite"),
        (TABLE.assign(published_idle_gpus=-1.0), "published_idle_gpus that are not a whole"),
        (TABLE.assign(published_idle_gpus=0.5), "published_idle_gpus that are not a whole"),
    ):
        with pytest.raises(InputError, match=message):
            Systems(wrong, **OPTIONS)


@st.composite
def any_traces(draw):
    """Draw nodes that come and go at random times, some of them at one instant."""
    n_nodes = draw(st.integers(1, 36))
    events, alive = (
        [NodeEvent(0, True, f"n{index}") for index in range(n_nodes)],
        [f"n{i}" for i in range(n_nodes)],
    )
    time_ms = 0
    for _ in range(draw(st.integers(1, 25))):
        time_ms += draw(
            st.sampled_from([0, 1, 999, 30_000, 44_999, 45_000, 45_001, 61_000, 600_000, 2_500_000])
        )
        if alive and draw(st.booleans()):
            events.append(NodeEvent(time_ms, False, alive.pop(draw(st.integers(0, len(alive) - 1)))))
        else:
            n_nodes += 1
            alive.append(f"n{n_nodes}")
            events.append(NodeEvent(time_ms, True, alive[-1]))
    return NodeTrace("drawn", tuple(events))


MODELS = ("BERT-Large", "GPT-2", "GPT-3 6.7B")


@settings(max_examples=120, deadline=None)
@given(
    any_traces(),
    st.sampled_from(SYSTEMS),
    st.sampled_from(MODELS),
    st.booleans(),
    st.sets(st.sampled_from(DEFECTS)),
)
def test_laws_on_any_trace(there, system, model, falls_back, switched):
    """Nothing raises, whatever is repaired; with all repaired, time is conserved and no sample made up."""
    costs = SIM.costs(system, model, falls_back=falls_back)
    simulate(system, there, costs, repairs("compat", switched))
    found = simulate(system, there, costs, repairs("fixed"))
    if not found.is_feasible:
        return
    assert conserves(found, there, first_ready_ms(there))
    assert min(found.times_s.values()) >= 0
    steps = found.steps()
    assert (steps[:, 1] >= steps[:, 0]).all()
    ready_ms = first_ready_ms(there)
    if ready_ms is not None and there.end_ms > ready_ms:
        wall_s = (there.end_ms - ready_ms) / 1000
        assert steps[:, 2].sum() == pytest.approx(found.throughput_samples_per_s * wall_s)
        fastest = max(costs.throughput.values())
        busy_s = found.times_s["useful"] + found.times_s["redundant"]
        assert steps[:, 2].sum() <= fastest * busy_s * 1.001 + 1e-6


@settings(max_examples=60, deadline=None)
@given(any_traces(), st.sampled_from(SYSTEMS), st.sampled_from(MODELS), st.sets(st.sampled_from(DEFECTS)))
def test_steps_taken_together_are_those_taken_alone(there, system, model, left_in):
    machines = {"oobleck": OobleckMachine, "varuna": VarunaMachine, "bamboo": BambooMachine}
    costs, repaired = SIM.costs(system, model), repairs("fixed", left_in)
    if not costs.throughput:
        return
    alone = machines[system](there, costs, repaired)
    alone.alike = lambda: 0
    alone.run()
    together = simulate(system, there, costs, repaired)
    assert together.n_steps == alone.n_steps
    assert sum(n * samples for *_, n, samples in together.runs) == pytest.approx(
        sum(n * samples for *_, n, samples in alone.steps.runs())
    )
    expected = alone.account.times_s(counts_once="D5" in {str(one) for one in repaired})
    assert {name: time_s for name, time_s in together.times_s.items() if name != "idle"} == pytest.approx(
        {name: time_s for name, time_s in expected.items() if name != "idle"}
    )


def test_output_does_not_depend_on_the_order_of_hashes():
    command = [
        *(sys.executable, "-c", "from makespan.cli import main; main()", "oobleck", "simulate", "--json"),
        *(
            "--trace",
            "p3_scaled",
            "--seed",
            "3",
            "--system",
            "bamboo",
            "--model",
            "GPT-2",
            "--mode",
            "compat",
        ),
    ]
    told = [
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and json.loads(told[0])["n_steps"] > 0


@pytest.mark.parametrize("name", SPOT_TRACES)
def test_generated_spot_traces_have_the_statistics_of_their_preset(name):
    preset = read_preset("makespan.oobleck", "spot")[name]
    by_seed = generated_traces({name: 20})[name]
    assert len({there.events for there in by_seed.values()}) == 20
    for there in by_seed.values():
        counts, groups = there.counts(), {}
        for event in there.events:
            key = event.time_ms, event.is_added
            groups[key] = groups.get(key, 0) + 1
        for is_added, histogram in ((True, preset["adds"]), (False, preset["removals"])):
            sizes = sorted(size for (_, kind), size in groups.items() if kind == is_added)
            expected = [size for size, n in histogram for _ in range(n)] + preset["start"] * is_added
            assert sizes == sorted(expected)
        times = sorted({time_ms for time_ms, _ in groups})
        dwell = sorted((later - time) // 60_000 for time, later in itertools.pairwise(times))
        assert dwell == sorted(minutes for minutes, n in preset["dwell_min"] for _ in range(n))
        assert max(counts) <= preset["max_nodes"]
        assert min(counts[sum(preset["start"]) :]) >= preset["min_nodes"]
        assert len({event.node for event in there.events if event.is_added}) == sum(
            e.is_added for e in there.events
        )
    assert generate_spot(name, 4) == generate_spot(name, 4)


def test_generated_spot_traces_have_as_many_events_as_the_authors(published_dir):
    folder = published_dir / "oobleck/traces"
    files = {
        "gcp_scaled": folder / "scaled/scale_gcp-trace.csv",
        "p3_scaled": folder / "scaled/scale_p3-trace.csv",
        "p3": folder / "p3-trace.csv",
        "g4dn": folder / "g4dn-trace.csv",
    }
    for name, path in files.items():
        own, theirs = generate_spot(name, 1), read_trace(path, name)
        for kind in (True, False):
            assert sum(e.is_added is kind for e in own.events) == sum(
                e.is_added is kind for e in theirs.events
            )
        assert own.end_ms == theirs.end_ms and own.counts()[-1] == theirs.counts()[-1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_analytic_model_agrees_where_losses_are_rare(system):
    costs = SIM.costs(system, "GPT-2")
    flat = dict.fromkeys(costs.throughput, costs.throughput[30])
    costs = replace(costs, throughput=flat, plain_throughput=flat, restart_by_nodes_ms=None)
    there = generate_steady(30, 3600.0, 200, 1)
    found = simulate(system, there, costs, repairs("fixed")).throughput_samples_per_s / flat[30]
    assert found == pytest.approx(expected_share(system, costs, 30, 3600.0), rel=0.05)


def test_the_interval_of_young_and_daly():
    costs = SIM.costs("varuna", "BERT-Large")
    step_s = 8192 / costs.throughput[30]
    assert young_daly_steps(costs, 30, 3600.0) == round((2 * 15.8 * 3600.0) ** 0.5 / step_s) == 14
    assert young_daly_steps(costs, 30, 1.0) == 1
    with pytest.raises(InputError, match="99 nodes"):
        young_daly_steps(costs, 99, 3600.0)
    for wrong in ((0, 60.0, 3), (30, 0.0, 3), (30, 60.0, 0)):
        with pytest.raises(InputError, match="expected"):
            generate_steady(*wrong, 1)


def test_joined_nodes_are_taken_in_where_that_pays_and_not_where_it_does_not():
    costs = SIM.costs("oobleck", "BERT-Large")
    there = trace((0, 20), (HOUR_MS, 8), (4 * HOUR_MS, 1))
    left, taken = (simulate("oobleck", there, costs, repairs("compat", switches(one))) for one in ("", "D2"))
    assert taken.throughput_samples_per_s > 1.15 * left.throughput_samples_per_s
    dear = replace(costs, global_ms=2 * HOUR_MS, horizon_ms=HOUR_MS)
    left, taken = (simulate("oobleck", there, dear, repairs("compat", switches(one))) for one in ("", "D2"))
    assert taken.throughput_samples_per_s == left.throughput_samples_per_s


def test_the_loss_of_a_node_that_is_not_used_costs_nothing_where_that_is_repaired():
    there = trace((0, 24), (HOUR_MS, 1), (HOUR_MS + 20_000, "n25"), (2 * HOUR_MS, 1))
    for system in ("oobleck", "varuna"):
        costs = SIM.costs(system, "BERT-Large")
        restarted, ignored = (
            simulate(system, there, costs, repairs("compat", switches(one))) for one in ("", "D3")
        )
        assert restarted.times_s["lost"] > ignored.times_s["lost"] == 0.0


def test_a_second_loss_within_a_restart_stops_the_released_job_only():
    there = trace((0, 30), (HOUR_MS, "n1"), (HOUR_MS + 1000, "n2"), (3 * HOUR_MS, 1))
    costs = SIM.costs("oobleck", "BERT-Large")
    stopped, going = (
        simulate("oobleck", there, costs, repairs("compat", switches(one))) for one in ("", "D1")
    )
    assert stopped.steps()[-1, 1] < 3700 and going.steps()[-1, 1] > 10_000


def test_a_failed_checkpoint_counts_in_order_of_time_where_that_is_repaired():
    costs = SIM.costs("varuna", "BERT-Large")
    step_s, start_s = int(1000 * 8192 / costs.throughput[30]) / 1000, 45 + 76 - 15.8
    written_s = start_s + 10 * step_s
    for offset_s, is_lost in ((5.0, True), (15.0, True), (16.5, False)):
        there = trace((0, 30), (round((written_s + offset_s) * 1000), "n1"), (HOUR_MS, 1))
        found = simulate("varuna", there, costs, repairs("fixed"))
        assert (found.times_s["lost"] > 200) == is_lost, offset_s


@pytest.mark.parametrize("seed", range(3))
def test_generated_failures_are_as_different_as_their_seeds(seed):
    one, other = generate_failures("1h", seed), generate_failures("1h", seed + 1)
    assert one != other and one.end_ms == other.end_ms
