"""Runs with divided optimizer state whose processes are killed, against one process that repeats them.

Every run has the bits, and every checkpoint the form, of one whose state is whole. Who holds what, and bits
without processes: ``tests/unit/test_oobleck_shards.py``.
"""

import signal
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner
from live_job import JOB, SIZES, Fault, JoinsAndLeaves, assert_equal_bits, assert_states, replayed, run

from makespan.cli import main
from makespan.errors import InputError
from makespan.oobleck.reconfiguration import InsufficientNodes
from makespan.oobleck.shards import read_piece

pytestmark = pytest.mark.xdist_group("training")

slow = pytest.mark.slow
FOUR = {"n_nodes": 4, "first_sizes": (1, 1, 1, 1), "zero_stage": 1}


class Moved:
    """Listener that keeps the kinds of pieces that are copied, plan by plan."""

    def __init__(self):
        self.kinds = []

    def __call__(self, event):
        if event.kind == "plan":
            copied = event.values["work"]["pieces"]
            self.kinds.append({read_piece(text)[0].kind for text, _, _ in copied})
            assert not event.values["work"]["copies"]


def test_losses_after_a_commit_leave_survivors_that_lack_weights(tmp_path):
    """One of four before it sends its new weights, then one of three while it does."""
    moved = Moved()
    faults = [Fault("committed", 1, 0), Fault("weights", 4, 1)]
    result, killed = run(tmp_path, 7, faults, watch=moved, waits_for=3, checkpoint_every=2, **FOUR)
    assert [one.phase for one in killed] == ["committed", "weights"]
    assert moved.kinds[:2] == [set(), {"weight", "state"}]
    assert "state" in moved.kinds[2] <= {"weight", "state"}  # its new weights may have arrived
    assert (result.recoveries["copies_bytes"].iloc[1:] > 0).all()
    names = {path.name for path in result.checkpoint.iterdir()}
    assert names == {"manifest.json", *(f"layer-{layer:04d}.pt" for layer in range(6))}
    assert_equal_bits(result, 7)


def test_two_losses_at_once_of_four_leave_a_whole_checkpoint(tmp_path):
    """It is put together by nodes that have no connections, and goes on with state that is not divided."""
    options = FOUR | {"f": 2}
    faults = [Fault("committed", 2, 0), Fault("committed", 2, 1, follows=True)]
    with pytest.raises(InsufficientNodes, match="2 node"):
        run(tmp_path, 5, faults, **options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    result, _ = run(tmp_path, 5, **options | {"zero_stage": 0})
    first = [result.plans[0]] if len(result.plans) > 1 else list(result.plans)
    losses, oracle = replayed([(0, first[0][1])], 5)
    assert result.iterations["loss"].tolist() == losses[3:]
    assert_states(result.checkpoint, oracle)


def test_pipelines_of_several_sizes_with_ties_lose_a_stage(root, tmp_path):
    job = replace(
        JOB, model=f"{root / 'tests' / 'support' / 'own_chain.py'}:chain", model_options={}, n_microbatches=9
    )
    options = {"n_nodes": 5, "first_sizes": (1, 1, 1, 2), "zero_stage": 1}
    result, (killed,) = run(tmp_path, 5, [Fault("reduction", 2, 3)], job=job, **options)
    assert killed.phase == "reduction"
    assert_equal_bits(result, 5, job)


def test_rerouting_moves_states_and_no_layer(tmp_path):
    moved = Moved()
    options = {"n_nodes": 6, "first_sizes": (2, 2, 2), "recovery": "reroute", "zero_stage": 1}
    result, (killed,) = run(tmp_path, 5, [Fault("committed", 1, 1)], watch=moved, **options)
    assert killed.phase == "committed"
    last = result.recoveries.iloc[-1]
    assert last["action"] == "reroute" and last["nodes"] == "0/-+2/3+4/5" and last["copies_bytes"] > 0
    assert moved.kinds[-1] == {"weight", "state"}
    losses, _ = replayed([(0, result.plans[0][1])], 5)
    assert result.iterations["loss"].tolist() == losses


def test_a_node_joins_and_one_leaves_and_the_command_goes_on(tmp_path):
    """The one that leaves sends states that few others have; the next call divides what a checkpoint has."""
    watch = JoinsAndLeaves(tmp_path)
    result, _ = run(tmp_path, 20_000, watch=watch, n_nodes=3, first_sizes=(1, 1, 1), zero_stage=1)
    assert [sorted(plan.nodes) for _, plan in result.plans] == [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3]]
    assert (result.iterations["attempts"] == 1).all()
    assert_equal_bits(result, result.step)
    oracle = replayed(result.plans, result.step)[1]
    command = ["oobleck", "run", "gpt", "--nodes", "3", "--first", "1,1,1", "--microbatches", "12"]
    sizes = [part for name, size in SIZES.items() for part in ("--set", f"model.{name}={size}")]
    n_done = result.step + 2
    options = ["--iterations", str(n_done), "--run-dir", str(tmp_path), "--zero-stage", "1", "--quiet"]
    done = CliRunner().invoke(main, [*command, *sizes, *options])
    assert done.exit_code == 0, done.output
    replayed(result.plans[:1], n_done, start=result.step, oracle=oracle)
    assert_states(tmp_path / "checkpoints" / f"step-{n_done:08d}", oracle)
    assert watch.how_it_ended() == ["finished"]


@slow
def test_a_process_that_stops_after_a_commit_is_killed_and_the_others_go_on(tmp_path):
    faults = [Fault("weights", 3, 2, number=signal.SIGSTOP)]
    result, (stopped,) = run(tmp_path, 6, faults, hang_s=15.0, **FOUR)
    assert stopped.node == 2 and set(result.plans[-1][1].nodes) == {0, 1, 3}
    assert_equal_bits(result, 6)


@slow
@pytest.mark.parametrize("phase", ["regroup", "group build", "copy"])
def test_a_loss_in_the_recovery_from_one_after_a_commit(tmp_path, phase):
    faults = [Fault("committed", 2, 0), Fault(phase, 0, 1)]
    result, killed = run(tmp_path, 6, faults, n_nodes=5, f=2, first_sizes=(1,) * 5, zero_stage=1)
    assert [one.phase for one in killed] == ["committed", phase]
    assert_equal_bits(result, 6)


def test_an_optimizer_that_mixes_weights_ends_the_run_before_its_first_iteration(tmp_path):
    text = """
import torch
from torch import nn
from makespan.oobleck.chain import Chain

class Mixes(torch.optim.SGD):
    def step(self, closure=None):
        weights = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        norm = sum(each.grad.norm() for each in weights)
        for each in weights:
            each.grad /= norm + 1
        super().step()

def chain():
    layers = [lambda: nn.Linear(4, 4) for _ in range(6)]
    samples = [(torch.ones(4), torch.ones(4)) for _ in range(24)]
    return Chain(layers, nn.functional.mse_loss, samples, optimizer=lambda each: Mixes(each, lr=0.1))
"""
    (tmp_path / "chain.py").write_text(text)
    job = replace(JOB, model=f"{tmp_path / 'chain.py'}:chain", model_options={})
    with pytest.raises(InputError, match="optimizer Mixes of the chain: steps a weight otherwise"):
        run(tmp_path / "run", 3, job=job, n_nodes=2, zero_stage=1)
    assert not (tmp_path / "run" / "iterations.csv").read_text().splitlines()[1:]
