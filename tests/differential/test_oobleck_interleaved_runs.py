"""Runs with interleaved stages whose processes are killed, join or leave, against one process.

The order of passes, cuts, and bits without losses: ``tests/unit/test_oobleck_interleaved.py``.
"""

from dataclasses import replace

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner
from live_job import JOB, SIZES, Fault, JoinsAndLeaves, assert_equal_bits, assert_states, replayed, run

from makespan.cli import main
from makespan.errors import InputError
from makespan.oobleck.trainer import PHASES

pytestmark = pytest.mark.xdist_group("training")

slow = pytest.mark.slow
TWICE = {"n_nodes": 5, "first_sizes": (2, 3), "interleave": 2}


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(one, marks=() if one == "backward" else slow)
        for one, kind in PHASES.items()
        if kind != "recovery"
    ],
)
def test_a_pipeline_that_loses_a_node_is_cut_anew(tmp_path, phase):
    result, (killed,) = run(tmp_path, 5, [Fault(phase, 2, 4)], **TWICE)
    assert killed.phase == phase and killed.node == 4
    table = pd.read_csv(tmp_path / "recoveries.csv", keep_default_na=False)
    assert table["layers"].tolist() == ["2/1/1/2+1/1/1/1/1/1", "2/1/1/2+2/1/1/2"]
    assert table["nodes"].tolist() == ["0/1+2/3/4", "0/1+2/3"]
    # Of layers 0, 1 and 4 and 2, 3 and 5 the two nodes had 0 and 3, and 1 and 4.
    assert result.recoveries["copies_bytes"].iloc[-1] > 0
    assert (result.iterations["attempts"] - 1).sum() <= 1
    assert_equal_bits(result, 5)


def test_two_losses_at_once_with_divided_state_and_backward_passes_in_two_parts(tmp_path):
    """Two of three pipelines lose a node after a commit, when new weights are not everywhere yet."""
    options = {"n_nodes": 6, "first_sizes": (2, 2, 2), "f": 2, "interleave": 2, "zero_stage": 1}
    faults = [Fault("committed", 1, 1), Fault("committed", 1, 2, follows=True)]
    result, killed = run(tmp_path, 4, faults, pass_order="zero-bubble", **options)
    assert [one.phase for one in killed] == ["committed", "committed"]
    assert_equal_bits(result, 4)


@slow
@pytest.mark.parametrize("phase", [one for one, kind in PHASES.items() if kind == "recovery"])
def test_a_loss_in_the_recovery_from_another(tmp_path, phase):
    options = {"n_nodes": 7, "first_sizes": (2, 2, 3), "f": 2, "interleave": 2}
    result, killed = run(tmp_path, 6, [Fault("forward", 2, 4), Fault(phase, 0, 1)], **options)
    assert [one.phase for one in killed] == ["forward", phase]
    assert_equal_bits(result, 6)


def test_ties_and_random_draws_of_layers_keep_their_bits(root, tmp_path):
    job = replace(
        JOB, model=f"{root / 'tests' / 'support' / 'own_chain.py'}:chain", model_options={}, n_microbatches=7
    )
    result, _ = run(tmp_path, 5, [Fault("reduction", 2, 0)], job=job, n_replacements=1, **TWICE)
    assert len(result.pids) == 6 and len(result.plans) >= 2
    assert_equal_bits(result, 5, job)


def test_a_node_joins_and_one_leaves_and_the_command_goes_on(tmp_path):
    """The run grows beyond its templates; the command has another number of stages per node."""
    watch = JoinsAndLeaves(tmp_path)
    result, _ = run(tmp_path, 20_000, watch=watch, n_nodes=2, f=0, n0=2, first_sizes=(2,), interleave=2)
    assert [sorted(plan.nodes) for _, plan in result.plans] == [[0, 1], [0, 1, 2], [0, 2]]
    assert (result.iterations["attempts"] == 1).all()
    assert_equal_bits(result, result.step)
    oracle = replayed(result.plans, result.step)[1]
    command = ["oobleck", "run", "gpt", "--nodes", "2", "--f", "0", "--first", "2", "--microbatches", "12"]
    sizes = [part for name, size in SIZES.items() for part in ("--set", f"model.{name}={size}")]
    n_done = result.step + 2
    options = ["--iterations", str(n_done), "--run-dir", str(tmp_path), "--interleave", "3", "--quiet"]
    done = CliRunner().invoke(main, [*command, *sizes, *options])
    assert done.exit_code == 0, done.output
    layers = pd.read_csv(tmp_path / "recoveries.csv", keep_default_na=False)["layers"].tolist()
    assert layers == ["2/1/1/2", "1/1/1/1/1/1", "2/1/1/2", "1/1/1/1/1/1"]
    replayed(result.plans[:1], n_done, start=result.step, oracle=oracle)
    assert_states(tmp_path / "checkpoints" / f"step-{n_done:08d}", oracle)
    assert watch.how_it_ended() == ["finished"]


def test_what_cannot_be_interleaved_is_refused_before_anything_starts(tmp_path):
    for changes, message in (
        (
            {"interleave": 4},
            "interleave is 4 with 6 layers on pipelines of 1 to 4 nodes; expected a size of 2",
        ),
        ({"interleave": 0}, "interleave is 0; expected a whole number >= 1"),
        ({"recovery": "reroute"}, "recovery is 'reroute' and interleave 2; expected 1 stage per node"),
    ):
        with pytest.raises(InputError, match=message):
            run(tmp_path, 3, **TWICE | changes)
    assert not (tmp_path / "processes").exists()
