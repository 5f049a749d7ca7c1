"""Pipelines in processes of their own, cut at different layers, against training in one process."""

import pytest
import torch
from chain_nodes import plan_of, small_job

from makespan.papers.oobleck.runtime import ChainJob, Oracle, PlainTraining, run_fixed

LIMITS = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def one_thread():
    """Let references compute as processes of a run do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def states_of(seen):
    """Return the state of each layer, once a node that holds it."""
    found = {}
    for one in seen.values():
        for layer, state in torch.load(one.states, weights_only=True).items():
            found.setdefault(layer, []).append(state)
    return found


def largest_difference(seen, reference):
    """Return the largest distance of a weight from that of the reference."""
    return max(
        (state[f"parameter/{name}"] - weight).abs().max().item()
        for layer, states in states_of(seen).items()
        for state in states
        for name, weight in reference.parameters(layer).items()
    )


def agrees(job, plan, n_iterations, run_dir):
    """Train; compare with the oracle bit by bit and with plain training in numbers."""
    seen = run_fixed(job, plan, n_iterations, run_dir, with_checksums=True, with_states=True)
    reference, oracle = PlainTraining(job), Oracle(job)
    expected = [reference.iterate(iteration) for iteration in range(n_iterations)]
    for iteration in range(n_iterations):
        loss = oracle.iterate(iteration, plan)
        assert {one.losses[iteration] for one in seen.values()} == {loss}
        assert abs(loss - expected[iteration]) <= LIMITS[job.dtype]
        sums = [oracle.checksum(layer) for layer in range(oracle.n_layers)]
        for one in seen.values():
            assert all(found == sums[layer] for layer, found in one.checksums[iteration].items())
    assert largest_difference(seen, reference) <= LIMITS[job.dtype]
    return seen, expected


def test_two_pipelines_of_one_template_stay_equal_bit_by_bit(tmp_path):
    job = small_job(n_microbatches=8, bucketed=False, reduction="allreduce")
    seen = run_fixed(job, plan_of(((0, 1), (3, 6), 4), ((2, 3), (3, 6), 4)), 20, tmp_path / "run",
                     with_checksums=True)  # fmt: skip
    for first, second in ((0, 2), (1, 3)):
        assert seen[first].checksums == seen[second].checksums
        assert len(seen[first].checksums) == 20
        assert set(seen[first].n_sums) == {len(seen[first].checksums[0])} == {3}
    losses = seen[0].losses
    assert losses == seen[3].losses
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pipelines_cut_at_different_layers_train_as_one_process_does(dtype, tmp_path):
    job = small_job(dtype=dtype, learning_rate=1e-3)
    plan = plan_of(((0,), (6,), 2), ((1, 2, 3), (2, 4, 6), 4))
    _, losses = agrees(job, plan, 50, tmp_path / "run")
    assert losses[-1] < losses[0]


def test_a_users_own_chain_does_not_depend_on_where_it_is_cut(root, tmp_path):
    chain = f"{root / 'tests' / 'support' / 'own_chain.py'}:chain"
    job = ChainJob(chain, n_microbatches=7, microbatch_size=3, clip_norm=0.4)
    plan = plan_of(((0, 1, 2), (2, 4, 6), 3), ((3,), (6,), 1), ((4, 5), (3, 6), 3))
    seen, losses = agrees(job, plan, 12, tmp_path / "run")
    states = states_of(seen)
    assert {len(states[layer]) for layer in range(6)} == {3}
    tied = [state["parameter/weight"] for layer in (0, 5) for state in states[layer]]
    assert all(torch.equal(one, tied[0]) for one in tied)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pipelines_of_ten_layers_train_as_one_process_does(dtype, tmp_path):
    job = ChainJob(dtype=dtype)
    plan = plan_of(((0,), (10,), 10), ((1, 2, 3), (3, 7, 10), 14))
    agrees(job, plan, 50, tmp_path / "run")
