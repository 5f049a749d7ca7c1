"""Pipelines in processes of their own, cut at different layers, against training in one process."""

import pytest
import torch
from chain_nodes import plan_of, small_job

from makespan.oobleck.fixed import FixedRun, run_fixed
from makespan.oobleck.job import ChainJob
from makespan.oobleck.oracle import ReferenceTrainer
from makespan.oobleck.reference import SingleProcessReference

pytestmark = pytest.mark.xdist_group("training")

LIMITS = {"float32": 1e-5, "float64": 1e-12}
SAME = plan_of(((0, 1), (3, 6), 4), ((2, 3), (3, 6), 4))
OTHER = plan_of(((0,), (6,), 2), ((1, 2, 3), (2, 4, 6), 4))
THREE = plan_of(((0, 1, 2), (2, 4, 6), 3), ((3,), (6,), 1), ((4, 5), (3, 6), 3))
INTERLEAVED = plan_of(((0, 1, 2), (1, 2, 3, 4, 5, 6), 3), ((3,), (6,), 1), ((4, 5), (1, 3, 4, 6), 3))
TEN_LAYERS = plan_of(((0,), (10,), 10), ((1, 2, 3), (3, 7, 10), 14))


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """Train all jobs of this module in the same processes; run and what its nodes saw, by name."""
    chain = f"{root / 'tests' / 'support' / 'own_chain.py'}:chain"
    own = ChainJob(chain, n_microbatches=7, microbatch_size=3, clip_norm=0.4)
    found = {
        "same": FixedRun(small_job(n_microbatches=8, bucketed=False, reduction="allreduce"), SAME, 20, True),
        "float32": FixedRun(small_job(), OTHER, 50, True, True),
        "float64": FixedRun(small_job(dtype="float64"), OTHER, 50, True, True),
        "own": FixedRun(own, THREE, 12, True, True),
        "interleaved": FixedRun(own, INTERLEAVED, 12, True, True),
    }
    seen = run_fixed(list(found.values()), tmp_path_factory.mktemp("fixed") / "run")
    return dict(zip(found, zip(found.values(), seen, strict=True), strict=True))


@pytest.fixture(autouse=True)
def one_thread():
    """Let references compute as processes of a run do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def states_of(seen):
    """Return the states of each layer, one of every node that holds it."""
    found = {}
    for one in seen.values():
        for layer, state in torch.load(one.states, weights_only=True).items():
            found.setdefault(layer, []).append(state)
    return found


def agrees(run, seen):
    """Compare with the oracle bit by bit, and with plain training in numbers; the losses of the latter."""
    reference, oracle = SingleProcessReference(run.job), ReferenceTrainer(run.job)
    expected = [reference.iterate(iteration) for iteration in range(run.n_iterations)]
    for iteration in range(run.n_iterations):
        loss = oracle.iterate(iteration, run.plan)
        assert {one.losses[iteration] for one in seen.values()} == {loss}
        assert abs(loss - expected[iteration]) <= LIMITS[run.job.dtype]
        sums = [oracle.checksum(layer) for layer in range(oracle.n_layers)]
        for one in seen.values():
            assert all(found == sums[layer] for layer, found in one.checksums[iteration].items())
    assert LIMITS[run.job.dtype] >= max(
        (state[f"parameter/{name}"] - weight).abs().max().item()
        for layer, states in states_of(seen).items()
        for state in states
        for name, weight in reference.parameters(layer).items()
    )
    return expected


def test_two_pipelines_of_one_template_stay_equal_bit_by_bit(runs):
    run, seen = runs["same"]
    for first, second in ((0, 2), (1, 3)):
        assert seen[first].checksums == seen[second].checksums
        assert len(seen[first].checksums) == run.n_iterations
        assert set(seen[first].n_sums) == {len(seen[first].checksums[0])} == {3}
    losses = seen[0].losses
    assert losses == seen[3].losses
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pipelines_cut_at_different_layers_train_as_one_process_does(runs, dtype):
    run, seen = runs[dtype]
    assert (run.job.dtype, run.job.learning_rate, run.n_iterations) == (dtype, 1e-3, 50)
    losses = agrees(run, seen)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["own", "interleaved"])
def test_a_users_own_chain_does_not_depend_on_where_it_is_cut(runs, name):
    run, seen = runs[name]
    losses = agrees(run, seen)
    states = states_of(seen)
    assert {len(states[layer]) for layer in range(6)} == {3}
    tied = [state["parameter/weight"] for layer in (0, 5) for state in states[layer]]
    assert all(torch.equal(one, tied[0]) for one in tied)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pipelines_of_ten_layers_train_as_one_process_does(dtype, tmp_path):
    run = FixedRun(ChainJob(dtype=dtype), TEN_LAYERS, 50, True, True)
    (seen,) = run_fixed([run], tmp_path / "run")
    agrees(run, seen)
