"""Whatever the plan: cuts, pipelines and batches change no bit of what one process computes in order."""

from chain_nodes import Nodes, plan_of, small_job
from hypothesis import given, settings, strategies as st

from makespan.oobleck.oracle import ReferenceTrainer

N_LAYERS, MOST_NODES = 6, 5


@st.composite
def plans(draw):
    """Draw pipelines on a few nodes, each cut anywhere, with one microbatch or more and stages of a node."""
    sizes = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda one: sum(one) <= MOST_NODES)
    )
    nodes, pipelines = iter(draw(st.permutations(range(sum(sizes))))), []
    for size in sizes:
        n_stages = size * (draw(st.integers(1, 2)) if size > 1 else 1)
        cuts = draw(st.sets(st.integers(1, N_LAYERS - 1), min_size=n_stages - 1, max_size=n_stages - 1))
        ends = (*sorted(cuts), N_LAYERS)
        pipelines.append((tuple(next(nodes) for _ in range(size)), ends, draw(st.integers(1, 4))))
    return plan_of(*pipelines)


@given(plans(), st.booleans())
@settings(max_examples=12, derandomize=True)
def test_every_plan_gives_the_bits_of_the_oracle(plan, bucketed):
    count = sum(one.n_microbatches for one in plan.pipelines)
    job = small_job(n_microbatches=count, bucketed=bucketed, clip_norm=1.0)
    nodes, oracle = Nodes(job), ReferenceTrainer(job)
    nodes.connect(plan)
    losses = [one.loss for one in nodes.iterate(0, 2)[plan.nodes[0]]]
    assert losses == [oracle.iterate(iteration, plan) for iteration in range(2)]
    assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(N_LAYERS)}
