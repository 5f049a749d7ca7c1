"""The simulators of Oobleck, Varuna and Bamboo on generated traces and on ones of a few lines."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.config import load_settings
from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.oobleck.simulator import (
    DEFECTS,
    MODES,
    SYSTEMS,
    Systems,
    expected_share,
    repairs,
    simulate,
    switches,
)
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
        ("0,add,a\n0,add,b\n3600000,remove,b\n", "at most 2 nodes are present at once"),
        (
            own.read_text().partition("600000")[0] + "1,remove,n1\n",
            "no step fits between the events of the trace",
        ),
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


# --- Options and tables that cannot be honoured -----------------------------------------------------

FOUR = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n3600000,remove,a\n7200000,add,e\n10800000,remove,e\n"
HEAD = "model,system,n_nodes,published_samples_per_s,published_restart_s,published_idle_gpus,source\n"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that simulates with options, where t.csv is a trace of four nodes."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "t.csv").write_text(FOUR)

    def asked(text, *, rows=None):
        options = text.replace("t.csv", str(tmp_path / "t.csv")).split()
        if rows is not None:
            (tmp_path / "table.csv").write_text(HEAD + "".join(f"{row},x\n" for row in rows))
            options += ["--throughput", str(tmp_path / "table.csv"), "--model", "mine"]
            options += ["--cost", "samples_per_step=400"]
        return CliRunner().invoke(main, ["oobleck", "simulate", *options])

    return asked


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        ("--model GPT-2 --cost restart_s=1", "restart_s of 1 s.*checkpoint_s of 11.5 s"),
        ("--model BERT-Large --cost checkpoint_s=300", "restart_s of 76 s.*checkpoint_s of 300 s"),
        (
            "--model BERT-Large --cost checkpoint_s=60",
            "published_restart_s on .* nodes.*checkpoint_s of 60 s",
        ),
    ],
)
def test_a_restart_that_is_shorter_than_its_checkpoint_is_refused(ask, costs, named):
    done = ask(f"--trace 10m --system varuna {costs}")
    assert done.exit_code == 2 and re.search(f"^Error: varuna: {named}", done.stderr), done.output


def test_a_restart_that_is_shorter_than_its_checkpoint_is_refused_everywhere(tmp_path):
    costs = replace(SIM.costs("varuna", "GPT-2"), restart_ms=1)
    with pytest.raises(InputError, match="restart_s"):
        simulate("varuna", generate_failures("10m", 1), costs, FIXED)
    with pytest.raises(InputError, match="restart_s"):
        expected_share("varuna", costs, 30, 3600.0)
    simulate("oobleck", generate_failures("10m", 1), costs, FIXED)  # which never restarts
    (tmp_path / "own.yaml").write_text(
        json.dumps({"oobleck": {"simulation": {"models": [OPTIONS["models"][0] | {"restart_s": 1.0}]}}})
    )
    done = CliRunner().invoke(
        main, ["oobleck", "simulate", "--trace", "10m", "--system", "varuna", "--model", "BERT-Large",
               "--config", str(tmp_path / "own.yaml")]
    )  # fmt: skip
    assert done.exit_code == 2 and "restart_s of checkpoint_s (15.8) or more" in done.stderr, done.output


def test_the_stages_of_a_pipeline_are_given_or_follow_from_the_table(ask):
    rows = ["mine,oobleck,4,4,,", "mine,oobleck,3,3,,", "mine,oobleck,2,2,,"]
    common = "--trace t.csv --system oobleck --cost regroup_s=20"
    own = ask(common, rows=rows)
    assert own.stdout.startswith("3.608 samples/s, 97 steps") and "2 stages, not 12" in own.stderr, own.output
    given = ask(f"{common} --stages 2", rows=rows)
    assert given.stdout == own.stdout and not given.stderr
    many = ask(f"{common} --stages 12", rows=rows)
    assert "at most 4 nodes are present at once, and a pipeline has 12 stages" in many.stderr, many.output
    still = ask(f"{common} --stages 4", rows=["mine,oobleck,4,0,,", *rows[1:]])
    assert "the throughput table has 0 for up to 4 nodes" in still.stderr, still.output


@pytest.mark.parametrize(
    ("system", "rows", "named"),
    [
        (
            "oobleck",
            ["mine,oobleck,4,4,,", "mine,oobleck,2,2,,"],
            "oobleck's throughput of 'mine' on 3 nodes",
        ),
        ("bamboo", ["mine,bamboo,4,4,,", "mine,bamboo,2,2,,"], "bamboo's throughput of 'mine' on 3 nodes"),
        (
            "bamboo",
            [*(f"mine,bamboo,{n},{n},," for n in (2, 3, 4)), "mine,varuna,4,5,,", "mine,varuna,2,3,,"],
            "varuna's throughput, that without redundant work, of 'mine' on 3 nodes",
        ),
        (
            "varuna",
            ["mine,varuna,4,4,,1", "mine,varuna,3,3,,", "mine,varuna,2,2,,1"],
            "varuna's number of idle GPUs of 'mine' on 3 nodes",
        ),
        (
            "varuna",
            ["mine,varuna,4,4,9,", "mine,varuna,3,3,,", "mine,varuna,2,2,9,"],
            "varuna's restart time of 'mine' on 3 nodes",
        ),
    ],
)  # fmt: skip
def test_a_gap_in_the_table_is_named_before_the_simulation(ask, system, rows, named):
    needed = {"oobleck": "regroup_s=2", "bamboo": "local_rebalance_s=2", "varuna": "checkpoint_s=1"}[system]
    more = " --cost restart_s=5" if system == "varuna" else ""
    done = ask(f"--trace t.csv --system {system} --cost {needed}{more}", rows=rows)
    assert done.exit_code == 2 and f"Error: {named} is missing in the table; it has: 2, 4" in done.stderr


def test_a_gap_that_the_trace_does_not_reach_is_no_matter(ask, tmp_path):
    (tmp_path / "t.csv").write_text("0,add,a\n0,add,b\n0,add,c\n0,add,d\n10000,remove,a\n3600000,remove,b\n")
    rows = ["mine,oobleck,4,4,,", "mine,oobleck,3,3,,", "mine,oobleck,1,1,,"]
    common = "--trace t.csv --system oobleck --cost regroup_s=2 --stages 1"
    assert "on 2 nodes is missing" in ask(common, rows=rows).stderr
    # The first node goes before it is ready, so that four nodes are there and three are ready.
    assert ask(common, rows=["mine,oobleck,5,5,,", "mine,oobleck,3,3,,", "mine,oobleck,2,1,,"]).exit_code == 0


def test_bamboo_needs_no_rows_of_varuna(ask):
    for more in ([], ["mine,varuna,4,0,,", "mine,varuna,3,4,,", "mine,varuna,2,3,,"]):
        rows = [*(f"mine,bamboo,{n},{n},," for n in (2, 3, 4)), *more]
        done = ask("--trace t.csv --system bamboo --cost local_rebalance_s=2", rows=rows)
        assert done.exit_code == 0 and "redundant work counts as useful" in done.stderr, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--system oobleck --k 3", "--k is an option for Varuna; it does not go with Oobleck"),
        ("--system bamboo --no-ckpt", "--no-ckpt is an option for Varuna; it does not go with Bamboo"),
        ("--system oobleck --fallback off", "--fallback is an option for Varuna"),
        ("--system varuna --k 3 --no-ckpt --fallback off", "--k goes with checkpoints"),
        ("--system oobleck --seed 2 --trace t.csv", "--seed is an option for generated traces"),
    ],
)
def test_options_without_effect_are_refused(ask, options, message):
    done = ask(f"--trace 10m --model BERT-Large {options}")
    assert done.exit_code == 2 and f"Error: {message}" in done.stderr, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--system oobleck --cost checkpoint_s=1", "--cost checkpoint_s: without effect on Oobleck"),
        ("--system varuna --cost regroup_s=1", "--cost regroup_s: without effect on Varuna"),
        ("--system varuna --cost restart_s=90", "--cost restart_s: of the first start alone"),
        ("--system oobleck --defects D9", "--defects D9: without effect"),
    ],
)
def test_costs_without_effect_are_reported(ask, options, message):
    done = ask(f"--trace 10m --model BERT-Large {options}")
    assert done.exit_code == 0 and message in done.stderr, done.output


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_first_step_after_a_restart_begins_when_the_job_is_ready_again(system):
    there = trace((0, 30), (3_600_000, "n0 n1"), (7_200_000, 1))
    costs = replace(SIM.costs(system, "GPT-2"), overload_limit=0.0)
    steps = simulate(system, there, costs, FIXED).steps()
    lengths = steps[:, 1] - steps[:, 0]
    assert lengths.max() < 1.6 * lengths.min()  # and no pause is part of a step
    assert not ((steps[:, 0] < 3600.0) & (steps[:, 1] > 3600.0)).any() or system == "bamboo"
