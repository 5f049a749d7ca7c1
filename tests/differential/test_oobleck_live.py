"""Training with real processes of which some are killed, join or leave, against one process that repeats it.

Where the edge cases of a resilient run are tested:

- f = 0, n0 = 1, as many nodes as are needed and no more, one layer only: `test_edges_of_the_guarantee`
- loss of the first or last stage, of a whole pipeline: `test_a_lost_stage_or_pipeline_is_done_without`
- loss of all copies of a layer: `test_a_layer_that_nobody_has_any_more_ends_the_run`
- loss of the coordinator: `test_when_the_coordinator_is_killed_the_next_start_goes_on`
- loss during the start: `tests/unit/test_oobleck_coordinator.py`, a_node_that_dies_at_the_start
- loss during regroup, group build and copy: `test_losses_during_a_recovery`
- loss after the last iteration: `test_a_loss_after_the_last_iteration_costs_nothing`
- a slow node, a hung node: there, a_long_iteration and a_stopped_process; `test_a_stopped_process`
- stale processes of an older generation: there, strangers; tests/property/test_oobleck_protocol.py
- checkpoints, damaged or not: `test_too_few_nodes_stop_with_a_checkpoint_and_a_restart_goes_on`
- ports: all are chosen by the system, or the runs of these tests would meet
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from live_job import JOB, Fault, assert_equal_bits, replayed, run, states

from makespan.errors import CheckpointError, InputError, WorkerError
from makespan.oobleck import export_model, trainer as _live
from makespan.oobleck.chain import load_chain
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost
from makespan.oobleck.trainer import drain_nodes, join_run

pytestmark = pytest.mark.xdist_group("training")

slow = pytest.mark.slow
THREE = (1e-4, 2e-4, 1.0, 1.0, 1.0)  # more than three pipelines do not pay, so that some have several stages


def nodes_of(plan):
    return [one.nodes for one in plan.pipelines]


@pytest.mark.parametrize(
    "phase", ["forward", *(pytest.param(one, marks=slow) for one in ("backward", "reduction", "prepared"))]
)
def test_one_worker_is_killed_and_the_others_go_on(tmp_path, phase):
    result, (killed,) = run(tmp_path, 20, [Fault(phase, 7, 3, 0.002)], n_nodes=4, first_sizes=(2, 2))
    assert killed.phase == phase and killed.node == 3
    (before, first), (since, second) = result.plans
    assert nodes_of(first) == [(0, 1), (2, 3)] and sorted(map(len, nodes_of(second))) == [1, 2]
    assert nodes_of(second) == [(2,), (0, 1)] and (before, since) in ((0, 7), (0, 8))
    boundaries = {len(stage.layers) for one in second.pipelines for stage in one.template.stages}
    assert len(boundaries) > 1  # stages begin and end at different layers
    assert result.iterations["iteration"].tolist() == list(range(20))
    assert (result.iterations["attempts"] - 1).sum() <= 1
    last = result.recoveries.iloc[-1]
    assert last["copies_bytes"] > 0 and last["action"] == "re-instantiate"
    # The only checkpoint is that of the end, so that nobody can have read one.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"]
    assert_equal_bits(result, 20)


@pytest.mark.parametrize("victims", [(1,), pytest.param((0,), marks=slow), pytest.param((1, 2), marks=slow)])
def test_a_lost_stage_or_pipeline_is_done_without(tmp_path, victims):
    """First stage, last stage; a whole pipeline at once, which is more than f."""
    faults = [Fault("forward", 3, victims[0])]
    faults += [Fault("forward", 3, victims[0], follows=True) for _ in victims[1:]]
    result, killed = run(tmp_path, 8, faults, n_nodes=5, first_sizes=(1, 2, 2))
    assert {one.node for one in killed} == set(victims)
    assert not set(victims) & set(result.plans[-1][1].nodes)
    assert_equal_bits(result, 8)


def test_backward_passes_in_two_parts_have_the_same_bits_through_a_loss(tmp_path):
    """The run goes on from its checkpoint with whole passes, too."""
    options = {"n_nodes": 5, "first_sizes": (2, 3)}
    result, (killed,) = run(tmp_path, 6, [Fault("backward", 3, 3)], pass_order="zero-bubble", **options)
    assert killed.phase == "backward" and len(result.plans) == 2
    assert_equal_bits(result, 6)
    (after, _) = run(tmp_path, 8, **options)
    losses, _ = replayed(after.plans, 8, start=6, oracle=replayed(result.plans, 6)[1])
    assert after.iterations["loss"].tolist() == losses


def test_too_few_nodes_stop_with_a_checkpoint_and_a_restart_goes_on(tmp_path):
    faults = [Fault("forward", 3, 4), Fault("backward", 6, 0)]
    options = {"n_nodes": 5, "n0": 2, "first_sizes": (2, 3)}
    with pytest.raises(InsufficientNodes, match="3 node"):
        run(tmp_path, 12, faults, waits_for=4, **options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]
    early = (tmp_path / "recoveries.csv").read_text()
    assert "forward" in early
    again, _ = run(tmp_path, 12, **options)
    assert again.iterations["iteration"].tolist() == list(range(6, 12))
    with pytest.raises(CheckpointError, match="another job"):
        run(tmp_path, 12, job=replace(JOB, seed=5), **options)
    with pytest.raises(InputError, match="expected resume"):
        run(tmp_path, 12, resume=False, **options)


def test_losses_at_once_and_losses_during_a_recovery(tmp_path):
    """Two at once with f = 2; then one during each part of a recovery from another."""
    faults = [Fault("forward", 3, 1), Fault("forward", 3, 2, follows=True), Fault("backward", 6, 1)]
    for phase, iteration in (
        ("copy", 0),
        ("forward", 9),
        ("regroup", 0),
        ("backward", 12),
        ("group build", 0),
    ):
        faults.append(Fault(phase, iteration, 2))
    result, killed = run(tmp_path, 16, faults, n_nodes=5, f=2, exchange_s=THREE, n_replacements=20)
    assert [one.phase for one in killed] == [one.fault.phase for one in killed] and len(killed) == 8
    assert (result.iterations["attempts"] - 1).sum() <= 5  # those in a recovery cost no iteration
    assert_equal_bits(result, 16)


def test_a_layer_that_nobody_has_any_more_ends_the_run(tmp_path):
    faults = [Fault("forward", 5, 1), Fault("forward", 5, 2, follows=True)]
    options = {"n_nodes": 4, "first_sizes": (2, 2), "checkpoint_every": 2}
    with pytest.raises(StateLost, match=r"layer\(s\) (3, )?4, 5.*; node [0-9] was ended by signal SIGKILL"):
        run(tmp_path, 9, faults, **options)
    again, _ = run(tmp_path, 9, **options)
    assert again.iterations["iteration"].tolist() == list(range(4, 9))


@slow
def test_a_checkpoint_in_between_changes_no_bit(tmp_path):
    """The same iterations, stopped after five and gone on with from the files."""
    options = {"n_nodes": 3, "first_sizes": (1, 2)}
    whole, _ = run(tmp_path / "whole", 8, **options)
    first, _ = run(tmp_path / "parts", 5, **options)
    second, _ = run(tmp_path / "parts", 8, **options)
    assert (
        first.iterations["loss"].tolist() + second.iterations["loss"].tolist()
        == whole.iterations["loss"].tolist()
    )
    for one, other in zip(states(whole.checkpoint), states(second.checkpoint), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stopped_process_is_killed_and_the_others_go_on(tmp_path):
    """It keeps its connections open, so that its neighbours wait for it until it is killed."""
    faults = [Fault("reduction", 3, 3, number=signal.SIGSTOP)]
    result, (stopped,) = run(tmp_path, 8, faults, n_nodes=4, first_sizes=(2, 2), hang_s=15.0)
    assert set(result.plans[-1][1].nodes) == {0, 1, 2} and stopped.node == 3
    assert_equal_bits(result, 8)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_notice_saves_what_was_done_and_the_next_call_appends_to_the_tables(tmp_path, number):
    """The signal has its usual effect once a checkpoint and the tables are there."""
    told, came = [], []

    def watch(event):
        if event.kind == "commit" and event.values["iteration"] == 3:
            os.kill(os.getpid(), number)
        if event.kind in ("notice", "stopped"):
            told.append(event.values)

    before = signal.signal(number, lambda *_: came.append(sorted(os.listdir(tmp_path))))
    try:
        first, _ = run(tmp_path, 20_000, watch=watch, n_nodes=2, first_sizes=(2,), f=0)
    finally:
        signal.signal(number, before)
    assert {"checkpoints", "iterations.csv", "recoveries.csv"} <= set(came[0]) and len(came) == 1
    step = first.step
    assert 4 <= step < 20_000 and first.checkpoint.name == f"step-{step:08d}"
    assert told[0] == {"signal": number.name}
    assert told[1]["step"] == step and str(first.checkpoint) in told[1]["saved"]
    early = (tmp_path / "iterations.csv").read_text()
    second, _ = run(tmp_path, step + 2, n_nodes=2, first_sizes=(2,), f=0)
    assert second.iterations["iteration"].tolist() == [step, step + 1]
    table = pd.read_csv(tmp_path / "iterations.csv")
    assert (tmp_path / "iterations.csv").read_text().startswith(early)
    assert table["iteration"].tolist() == list(range(step + 2))
    assert table["call"].tolist() == [1] * step + [2] * 2
    assert pd.read_csv(tmp_path / "recoveries.csv")["call"].tolist() == [1, 2]
    assert replayed([*first.plans, *second.plans], step + 2)[0] == table["loss"].tolist()


def test_a_node_joins_and_one_leaves(tmp_path):
    """By the verbs, in processes of their own; the one that leaves sends what only it has."""
    ended, asked = [], []

    def drain_from_outside():
        for nodes in (["77"], ["0", "77"]):
            command = [sys.executable, "-c", "from makespan.cli import main; main()", "oobleck", "drain"]
            asked.append(subprocess.run([*command, tmp_path, *nodes], capture_output=True, text=True))

    def watch(event):
        if event.kind == "commit" and event.values["iteration"] == 3:
            threading.Thread(target=lambda: ended.append(join_run(tmp_path)), daemon=True).start()
        if event.kind == "resume" and event.values["generation"] == 2:
            os.kill(pids[1], signal.SIGTERM)
        if event.kind == "resume" and event.values["generation"] == 3:
            outside.start()
        if event.kind == "resume" and event.values["generation"] == 4:
            drain_nodes(tmp_path)
        if event.kind == "hello":
            pids[event.node] = event.values["pid"]

    pids, outside = {}, threading.Thread(target=drain_from_outside, daemon=True)
    # The end is not reached: as many as two nodes could do while a third one starts, however slowly.
    result, _ = run(tmp_path, 20_000, watch=watch, n_nodes=2, first_sizes=(2,), f=0)
    assert [sorted(plan.nodes) for _, plan in result.plans] == [[0, 1], [0, 1, 2], [0, 2], [2]]
    outside.join()
    refused, known = asked
    assert refused.returncode == 2 and "has no 77 to drain; expected some of 0, 2" in refused.stderr
    assert known.returncode == 0 and "nodes 77 are not in the run; the others leave" in known.stderr
    assert (result.iterations["attempts"] == 1).all() and len(result.iterations) < 20_000
    assert result.recoveries["cause"].tolist() == ["start", "join", "drain", "drain"]
    assert_equal_bits(result, len(result.iterations))
    deadline = time.monotonic() + 3600
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == ["finished"]


def test_a_trained_model_is_exported_as_a_plain_state_dict(tmp_path):
    """It fits the layers of the chain in a row, and is what the oracle has."""
    from click.testing import CliRunner

    from makespan.cli import main

    result, _ = run(tmp_path / "run", 2, n_nodes=2, first_sizes=(2,), f=0)
    target = tmp_path / "model.pt"
    done = CliRunner().invoke(
        main, ["oobleck", "export", "--run-dir", str(tmp_path / "run"), "--output", str(target)]
    )
    assert done.exit_code == 0 and done.output.strip() == str(target)
    chain = load_chain(JOB)
    model = torch.nn.Sequential(*(build() for build in chain.layers))
    model.load_state_dict(torch.load(target, weights_only=True))
    _, oracle = replayed(result.plans, 2)
    for layer, module in enumerate(model):
        for name, one in module.named_parameters():
            assert torch.equal(one, oracle.state(layer)[f"parameter/{name}"])
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        export_model(tmp_path / "other", target)
    with pytest.raises(InputError, match=r"iterations\.csv, which is a file of the run"):
        export_model(tmp_path / "run", tmp_path / "run" / "iterations.csv")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_file_and_the_free_space(tmp_path):
    """A directory stands where a file would be written; the checkpoint before it stays."""

    def watch(event):
        if event.kind == "commit" and event.values["iteration"] == 2:
            blocked.append(tmp_path / "checkpoints" / ".partial" / "layer-0002.pt")

    blocked = []
    begin = _live.start_checkpoint

    def start(directory):
        path = begin(directory)
        for one in blocked:
            one.mkdir()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_live, "start_checkpoint", start)
        with pytest.raises(WorkerError, match=r"layer-0002.pt: cannot be written, \d+ bytes are free there"):
            run(tmp_path, 6, watch=watch, n_nodes=2, first_sizes=(2,), f=0, checkpoint_every=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


@slow
def test_killed_and_replaced_ten_times(tmp_path):
    faults = [Fault("forward" if one % 2 else "reduction", 2 * one, one) for one in range(1, 11)]
    result, killed = run(tmp_path, 30, faults, n_nodes=3, exchange_s=(1e-4, 1.0), n_replacements=10)
    assert len(killed) == 10 and len(result.pids) == 13
    assert (result.iterations["attempts"] - 1).sum() <= 10
    assert_equal_bits(result, 30)


@slow
@pytest.mark.parametrize("phase", ["group build", "copy"])
def test_a_node_that_dies_while_it_joins_is_done_without(tmp_path, phase):
    def watch(event):
        if event.kind == "hello":
            pids[event.node] = event.values["pid"]
        if event.kind == "announce" and event.node == 3 and event.values["phase"] == phase:
            os.kill(pids[3], signal.SIGKILL)

    pids = {}
    faults = [Fault("forward", 4, 2)]
    result, _ = run(tmp_path, 12, faults, watch=watch, n_nodes=3, exchange_s=(1e-4, 1.0), n_replacements=2)
    assert set(result.plans[-1][1].nodes) == {0, 1, 4}
    assert_equal_bits(result, 12)


@slow
def test_a_loss_after_the_last_iteration_costs_nothing(tmp_path):
    def watch(event):
        if event.kind == "hello":
            pids[event.node] = event.values["pid"]
        if event.kind == "commit" and event.values["iteration"] == 5:
            os.kill(pids[1], signal.SIGKILL)

    pids = {}
    result, _ = run(tmp_path, 6, watch=watch, n_nodes=3, f=1, first_sizes=(1, 2))
    assert result.step == 6
    losses, oracle = replayed(result.plans, 6)
    assert result.iterations["loss"].tolist() == losses
    for layer, own in enumerate(states(result.checkpoint)):
        assert all(torch.equal(one, oracle.state(layer)[name]) for name, one in own.items())


@slow
@pytest.mark.parametrize(
    ("options", "n_nodes"),
    [
        ({"f": 0, "first_sizes": (3,)}, 3),
        ({"f": 2, "n0": 1}, 3),
        ({"f": 1, "template_set": "minimal"}, 4),
        ({"f": 0}, 1),
    ],
)
def test_edges_of_the_guarantee(tmp_path, options, n_nodes):
    result, _ = run(tmp_path, 3, n_nodes=n_nodes, **options)
    assert_equal_bits(result, 3)


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(InputError, match="n_nodes is 3; expected 4 or more, f \\+ 1 pipelines of 2"):
        run(tmp_path, 3, n_nodes=3, n0=2)
    with pytest.raises(InputError, match="hang_s is 0"):
        run(tmp_path, 3, n_nodes=3, hang_s=0)
    with pytest.raises(InputError, match="no run is in progress"):
        join_run(tmp_path)
    for sizes, message in (
        ((2, 3), "first_sizes are 2,3; expected 14 nodes in total"),
        ((7, 7), "first_sizes are 7,7; expected 1, 2, 3, 4, 5, 6 nodes of a pipeline"),
        ((1,) * 14, "expected at most 12 pipelines, one for each microbatch"),
    ):
        for recovery in ("reconfigure", "reroute"):
            with pytest.raises(InputError, match=message):
                run(tmp_path, 3, n_nodes=14, first_sizes=sizes, f=0, recovery=recovery)
    assert not (tmp_path / "processes").exists()


@slow
def test_a_mistake_in_the_model_ends_the_run_with_its_error(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\nfrom makespan.oobleck import Chain\n"
        "class Odd(nn.Module):\n    def forward(self, x):\n        raise ValueError('odd layer')\n"
        "class Data:\n    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, index):\n        return torch.ones(2), torch.ones(2)\n"
        "def build():\n    layers = [lambda: nn.Linear(2, 2)] * 5 + [Odd]\n"
        "    return Chain(layers, nn.functional.mse_loss, Data())\n"
    )
    job = replace(JOB, model=f"{tmp_path / 'own.py'}:build", model_options={}, n_microbatches=4)
    with pytest.raises(WorkerError, match="ValueError: odd layer"):
        run(tmp_path / "run", 3, job=job, n_nodes=2)


DRIVER = """
import sys
sys.path.insert(0, {support!r})
from live_job import run
run({path!r}, 400, n_nodes=3, first_sizes=(1, 2), checkpoint_every=3)
"""


@slow
def test_when_the_coordinator_is_killed_the_next_start_goes_on(tmp_path):
    support = os.path.dirname(sys.modules["live_job"].__file__)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.format(support=support, path=str(tmp_path))])
    deadline = time.monotonic() + 3600
    while len(list((tmp_path / "checkpoints").glob("step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    saved = max(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*"))
    result, _ = run(tmp_path, saved + 4, n_nodes=3, first_sizes=(1, 2))
    assert result.iterations["iteration"].tolist() == list(range(saved, saved + 4))
    losses, oracle = replayed([(0, result.plans[0][1])], saved + 4)
    assert result.iterations["loss"].tolist() == losses[saved:]
    for layer, own in enumerate(states(result.checkpoint)):
        assert all(torch.equal(one, oracle.state(layer)[name]) for name, one in own.items())
