"""The simulators of Oobleck, Varuna and Bamboo on generated traces and on ones of a few lines."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.config import load_settings
from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.oobleck.simulator import DEFECTS, MODES, SYSTEMS, Systems, repairs, simulate, switches
from makespan.oobleck.traces import FAILURE_TRACES, NodeEvent, NodeTrace, generate_failures, read_trace
from makespan.papers.oobleck import PAPER

ROOT = Path(__file__).parents[2]
OPTIONS = load_settings([], ROOT).oobleck.simulation.systems()
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/oobleck_{name}.csv")
    for name in ("throughput", "fig9", "fig12")
}
SIM = Systems(CELLS["throughput"], **OPTIONS)
FIXED = repairs("fixed")


def trace(*lines):
    """Return a trace of (time_ms, operations), where 3 adds so many nodes and "a b" removes these."""
    events, n_added = [], 0
    for time_ms, what in lines:
        if isinstance(what, int):
            names = [f"n{n_added + index}" for index in range(what)]
            n_added += what
            events += [NodeEvent(time_ms, True, name) for name in names]
        else:
            events += [NodeEvent(time_ms, False, name) for name in what.split()]
    return NodeTrace("own", tuple(events))


def printed(artifact, **wanted):
    table = CELLS[artifact]
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table


@pytest.mark.parametrize("name", ["1h", "10m"])
@pytest.mark.parametrize("model", list(SIM.models))
@pytest.mark.parametrize("system", ["oobleck", "varuna"])
def test_released_averages_come_out_at_generated_failures_too(name, model, system):
    (value,) = printed("fig9", trace=name, model=model, system=system)["published_samples_per_s"]
    found = simulate(system, generate_failures(name, 7), SIM.costs(system, model), repairs("compat"))
    assert found.throughput_samples_per_s == pytest.approx(value, rel=1e-3, abs=5e-4)


@pytest.mark.parametrize("system", ["oobleck", "varuna"])
def test_which_node_is_lost_does_not_matter_to_oobleck_and_varuna(system):
    costs = SIM.costs(system, "GPT-3 2.7B")
    for mode in MODES:
        one, other = (
            simulate(system, generate_failures("10m", seed), costs, repairs(mode)) for seed in (1, 2)
        )
        assert one.throughput_samples_per_s == other.throughput_samples_per_s and one.times_s == other.times_s


def test_it_matters_to_bamboo():
    costs = SIM.costs("bamboo", "GPT-2")
    found = {
        simulate("bamboo", generate_failures("10m", seed), costs, FIXED).throughput_samples_per_s
        for seed in range(5)
    }
    assert len(found) > 1


@pytest.mark.parametrize("system", ["oobleck", "varuna"])
def test_released_categories_come_out_to_the_millisecond(system):
    rows = printed("fig12", system=system)
    found = simulate(system, generate_failures("10m", 3), SIM.costs(system, "BERT-Large")).times_s
    for category, value in zip(rows["category"], rows["published_time_s"], strict=True):
        assert found[category] == pytest.approx(value, abs=5e-4), category


@pytest.mark.parametrize("name", ["1h", "5m"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("model", ["BERT-Large", "GPT-3 6.7B"])
def test_repaired_categories_sum_to_the_time_from_the_first_ready_node_to_the_end(name, system, model):
    there = generate_failures(name, 4)
    found = simulate(system, there, SIM.costs(system, model), FIXED)
    if not found.is_feasible:
        return
    wall_s = (there.end_ms - 45_000) / 1000
    assert sum(value for key, value in found.times_s.items() if key != "idle") == pytest.approx(
        wall_s, abs=1e-6
    )
    assert all(value >= 0 for value in found.times_s.values())
    assert found.times_s["useful"] > 0 or found.throughput_samples_per_s == 0


def test_a_model_that_does_not_fit_ends_at_once_in_both_modes():
    for mode in MODES:
        found = simulate(
            "bamboo", generate_failures("6h", 1), SIM.costs("bamboo", "GPT-3 6.7B"), repairs(mode)
        )
        assert not found.is_feasible and found.n_steps == found.n_failures == 0 and len(found.steps()) == 0


def test_modes_and_switches():
    assert repairs("compat") == frozenset() and repairs("fixed") == frozenset(DEFECTS)
    assert {str(one) for one in repairs("compat", switches("D1, d6 D11"))} == {"D1", "D6", "D11"}
    assert repairs("fixed", switches("D2")) == frozenset(DEFECTS) - switches("D2")
    for call in (lambda: switches("D13"), lambda: repairs("old"), lambda: generate_failures("2h", 1)):
        with pytest.raises(UnknownNameError):
            call()


def test_generated_failures_have_the_distance_and_the_numbers_of_the_released_ones():
    for name in FAILURE_TRACES:
        events = generate_failures(name, 5).events
        assert sum(event.is_added for event in events) == 30
        times = [event.time_ms for event in events if not event.is_added]
        assert len(times) == 15 and [time // times[0] for time in times] == list(range(1, 16))
        assert len({event.node for event in events}) == 30
        assert generate_failures(name, 5) == generate_failures(name, 5) != generate_failures(name, 6)


def test_simulate_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = CliRunner().invoke
    common = ["oobleck", "simulate", "--system", "oobleck", "--model", "BERT-Large"]
    done = run(main, [*common, "--trace", "10m", "--mode", "compat", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["throughput_samples_per_s"] == pytest.approx(282.108, rel=1e-3)
    assert told["n_failures"] == 14 and told["times_s"]["rebalance"] == 30.0
    own = tmp_path / "own.csv"
    own.write_text(
        "".join(f"0,add,n{index}\n" for index in range(20)) + "600000,remove,n3\n900000,remove,n4\n"
    )
    done = run(main, [*common, "--trace", str(own), "--cost", "regroup_s=20"])
    assert done.exit_code == 0 and "2 nodes lost" in done.output, done.output
    for events, why in (
        ("0,add,a\n0,add,b\n3600000,remove,b\n", "2 nodes at most are there at once"),
        (own.read_text().partition("600000")[0] + "1,remove,n1\n", "there is too little time"),
    ):
        own.write_text(events)
        done = run(main, [*common, "--trace", str(own)])
        assert done.exit_code == 0 and f"no step is completed: {why}" in done.stderr, done.output
    for arguments, message in (
        (["--trace", "7h"], "7h"),
        (["--trace", "10m", "--cost", "regroup_s=-1"], "regroup_s=-1"),
        (["--trace", "10m", "--cost", "colour=1"], "expected NAME=NUMBER"),
        (["--trace", "10m", "--defects", "D99"], "D99"),
        (["--trace", "10m", "--config", "mkdocs.yml"], "oobleck.simulation"),
    ):
        done = run(main, [*common, *arguments])
        assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output
    done = run(main, [*common[:-1], "mine", "--trace", "10m"])
    assert "mine" in done.output and "--cost samples_per_step=" in done.output


def test_a_trace_without_events_and_a_model_without_throughput_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no event"):
        NodeTrace("none", ())
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(TraceError):
        read_trace(tmp_path / "empty.csv", "empty")
    models = [OPTIONS["models"][0] | {"name": "mine"}]
    with pytest.raises(InputError, match="mine"):
        Systems(CELLS["throughput"], models, OPTIONS["assumptions"])
