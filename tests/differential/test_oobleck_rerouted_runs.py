"""Runs that re-route microbatches when processes are killed, against one process without losses.

Every run has the bits of its pipelines without a loss. Decisions alone, and bits without processes:
``tests/unit/test_oobleck_rerouted.py``.
"""

import os
import signal
import threading
import time
from dataclasses import replace

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner
from live_job import JOB, Fault, assert_equal_bits, assert_states, replayed, run

from makespan.cli import main
from makespan.errors import InputError
from makespan.oobleck.plan import HybridPlan
from makespan.oobleck.reconfiguration import StateLost
from makespan.oobleck.trainer import drain_nodes, join_run

pytestmark = pytest.mark.xdist_group("training")

slow = pytest.mark.slow
TWO = {"n_nodes": 4, "first_sizes": (2, 2), "f": 0, "recovery": "reroute"}
THREE = {"n_nodes": 6, "first_sizes": (2, 2, 2), "f": 1, "recovery": "reroute"}


def rows(result, *columns):
    """Return cells of the recoveries after the start."""
    return [tuple(row) for row in result.recoveries[list(columns)].iloc[1:].itertuples(index=False)]


def assert_undisturbed_bits(result, iterations, job=JOB):
    """Losses and the last checkpoint are those of the first plan, as if no node had been lost."""
    whole = HybridPlan(result.plans[0][1].pipelines)
    assert all(plan.pipelines == whole.pipelines for _, plan in result.plans)
    losses, oracle = replayed([(0, whole)], len(iterations), job)
    assert iterations["loss"].tolist() == losses
    assert_states(result.checkpoint, oracle)


@pytest.mark.parametrize(
    "phase", ["forward", *(pytest.param(one, marks=slow) for one in ("backward", "reduction", "prepared"))]
)
def test_microbatches_of_a_killed_node_run_on_its_peer(tmp_path, phase):
    result, (killed,) = run(tmp_path, 5, [Fault(phase, 2, 3)], **TWO)
    assert killed.phase == phase and killed.node == 3
    assert rows(result, "lost", "action", "fallback", "rerouted", "nodes", "copies_bytes") == [
        (f"3:{phase}", "reroute", "", "1:6", "0/1+2/-", 0.0)
    ]
    assert (result.iterations["attempts"] - 1).sum() <= 1
    assert_undisturbed_bits(result, result.iterations)
    table = pd.read_csv(tmp_path / "recoveries.csv", keep_default_na=False)
    assert table["rerouted"].tolist() == ["", "1:6"] and table["n_microbatches"].tolist() == ["6+6"] * 2


def test_losses_of_several_stages_until_too_few_are_left_of_one(tmp_path):
    """Of three pipelines: stage 1, stage 0 of the same one, then stage 0 of another, for f = 1."""
    faults = [Fault("backward", 1, 1), Fault("reduction", 3, 0), Fault("forward", 5, 0)]
    result, killed = run(tmp_path, 8, faults, waits_for=4, **THREE)
    assert [one.node for one in killed] == [1, 0, 2]
    first, second, third = rows(result, "action", "fallback", "rerouted", "nodes")
    assert first == ("reroute", "", "3:2 5:2", "0/-+2/3+4/5")
    assert second == ("reroute", "", "2:2 3:2 4:2 5:2", "-/-+2/3+4/5")
    assert third[1:3] == ("1 node(s) are left of stage 0; f = 1 needs 2", "")
    assert "reroute" not in third[0] and sorted(result.plans[-1][1].nodes) == [3, 4, 5]
    assert result.recoveries["copies_bytes"].iloc[-1] > 0
    assert_equal_bits(result, 8)


@pytest.mark.parametrize(
    "phase", ["regroup", *(pytest.param(one, marks=slow) for one in ("group build", "copy"))]
)
def test_a_loss_in_a_recovery_by_rerouting(tmp_path, phase):
    """In another pipeline and another stage."""
    options = THREE | {"f": 0}
    result, killed = run(tmp_path, 5, [Fault("forward", 2, 1), Fault(phase, 0, 1)], **options)
    assert [one.phase for one in killed] == ["forward", phase] and [one.node for one in killed] == [1, 2]
    assert rows(result, "action", "rerouted", "nodes")[-1] == ("reroute", "0:2 3:2 4:2 5:2", "0/-+-/3+4/5")
    assert_undisturbed_bits(result, result.iterations)


@pytest.mark.parametrize("pass_order", ["1f1b", pytest.param("zero-bubble", marks=slow)])
def test_a_second_loss_in_another_pipeline_and_a_third_that_ends_the_run(tmp_path, pass_order):
    """Two pipelines cross over; when a stage has nobody left, the next call goes on from the checkpoint."""
    job = replace(
        JOB, optimizer="sgd", optimizer_options={"momentum": 0.9}, learning_rate=0.05, clip_norm=0.5
    )
    options = TWO | {"pass_order": pass_order, "checkpoint_every": 2}
    faults = [Fault("forward", 1, 1), Fault("backward", 3, 1), Fault("forward", 6, 1)]
    with pytest.raises(StateLost, match=r"layer\(s\) 3, 4, 5"):
        run(tmp_path, 8, faults, waits_for=2, job=job, **options)
    table = pd.read_csv(tmp_path / "recoveries.csv", keep_default_na=False)
    assert table["nodes"].tolist() == ["0/1+2/3", "0/-+2/3", "0/-+-/3"]
    assert table["rerouted"].tolist() == ["", "3:6", "0:6 3:6"]
    result, _ = run(tmp_path, 8, job=job, **options)
    assert result.iterations["iteration"].tolist() == [6, 7]
    iterations = pd.read_csv(tmp_path / "iterations.csv").drop_duplicates("iteration", keep="last")
    assert_undisturbed_bits(result, iterations, job)


def test_ties_and_random_draws_of_layers_keep_their_bits(root, tmp_path):
    job = replace(
        JOB, model=f"{root / 'tests' / 'support' / 'own_chain.py'}:chain", model_options={}, n_microbatches=9
    )
    result, _ = run(
        tmp_path, 4, [Fault("backward", 1, 0), Fault("forward", 2, 4)], job=job, waits_for=5, **THREE
    )
    assert rows(result, "action", "nodes") == [("reroute", "-/1+2/3+4/5"), ("reroute", "-/1+2/3+4/-")]
    assert_undisturbed_bits(result, result.iterations, job)


def test_a_node_leaves_and_one_joins_after_a_loss(tmp_path):
    """By the verbs: without a node that leaves nothing moves; one that joins gets a place among all."""
    pids, resumed, ended = {}, [], []
    following = [
        lambda: None,
        lambda: drain_nodes(tmp_path, (2,)),
        lambda: threading.Thread(target=lambda: ended.append(join_run(tmp_path)), daemon=True).start(),
        lambda: os.kill(pids[0], signal.SIGKILL),
        lambda: drain_nodes(tmp_path),
    ]

    def watch(event):
        if event.kind == "hello":
            pids[event.node] = event.values["pid"]
        if event.kind == "commit" and event.values["iteration"] == 3:
            os.kill(pids[3], signal.SIGKILL)
        if event.kind == "resume":
            resumed.append(event)
            following[len(resumed) - 1]()

    result, _ = run(tmp_path, 20_000, watch=watch, **THREE | {"f": 0})
    deadline = time.monotonic() + 3600
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended == ["finished"]
    found = rows(result, "action", "fallback", "nodes")
    assert found[0] == ("reroute", "", "0/1+2/-+4/5")
    assert found[1] == ("reroute drain", "", "0/1+-/-+4/5")
    assert found[2][:2] == ("join", "node(s) 6 join")
    assert sorted(result.plans[3][1].nodes) == [0, 1, 4, 5, 6]
    assert len(found) == 4 and 0 not in result.plans[4][1].nodes
    assert result.recoveries["copies_bytes"].iloc[2] == 0.0 < result.recoveries["copies_bytes"].iloc[3]
    assert_equal_bits(result, len(result.iterations))


def test_what_cannot_be_rerouted_is_refused_before_anything_starts(tmp_path):
    needed = r"expected f \+ 2 = 3 or more equal pipelines"
    for changes, message in (
        ({"first_sizes": (1, 2, 3)}, f"recovery is 'reroute' and first_sizes are 1,2,3; {needed}"),
        ({"first_sizes": (3, 3)}, f"first_sizes are 3,3; {needed}"),
        (
            {"first_sizes": (), "n_nodes": 2},
            f"recovery is 'reroute' with 2 nodes and 12 microbatches; {needed}",
        ),
        ({"policy": "relaunch"}, "recovery is 'reroute' and policy 'relaunch'; expected stop or degrade"),
        ({"recovery": "route"}, "recovery.*route.*reroute"),
    ):
        with pytest.raises(InputError, match=message):
            run(tmp_path, 3, **THREE | changes)
    assert not (tmp_path / "processes").exists()
    job = ["--microbatches", "6", "--set", "model.n_layers=2", "--set", "model.hidden=16"]
    command = ["oobleck", "run", "gpt", "--iterations", "2", "--nodes", "4", "--first", "2,2"]
    done = CliRunner().invoke(
        main, [*command, *job, "--recovery", "reroute", "--run-dir", str(tmp_path / "run")]
    )
    assert done.exit_code == 2 and "first_sizes are 2,2; expected f + 2 = 3" in done.output
