"""Laws of plans and placements."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from makespan.plans import (
    ExecutionPlan,
    Placement,
    PlanFamily,
    enumerate_placements,
    enumerate_plans,
    read_plan,
    write_plan,
)

degree = st.integers(1, 24)
counts = st.lists(st.integers(1, 20), min_size=1, max_size=10)


@given(counts, st.randoms(use_true_random=False))
def test_a_placement_does_not_know_the_order_of_its_nodes(nodes: list[int], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert Placement(tuple(nodes)) == Placement(tuple(shuffled))
    assert Placement.parse(Placement(tuple(nodes)).text) == Placement(tuple(nodes))


@given(degree, degree, degree, st.integers(1, 8))
def test_degrees_survive_the_notation(pp: int, tp: int, dp: int, per_replica: int) -> None:
    plan = ExecutionPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch_size=dp * per_replica,
        micro_batch_size=per_replica,
        family=PlanFamily.TP_PP if dp == 1 else PlanFamily.DP_TP_PP,
    )
    again = read_plan(write_plan(plan), n_gpus=pp * tp * dp, global_batch_size=plan.global_batch_size)
    assert again == plan


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_placements_are_distinct_and_complete(n_gpus: int, per_node: int, n_nodes: int) -> None:
    found = enumerate_placements(n_gpus, per_node, n_nodes)
    assert len(set(found)) == len(found)
    assert all(p.n_gpus == n_gpus and p.fits(per_node, n_nodes) for p in found)
    assert bool(found) == (n_gpus <= per_node * n_nodes)


@given(st.integers(1, 64), st.sampled_from([1, 4, 16, 64]))
def test_enumerated_plans_keep_batch_and_device_count(n_gpus: int, batch: int) -> None:
    plans = enumerate_plans(
        n_gpus,
        global_batch_size=batch,
        families=list(PlanFamily),
        n_layers=12,
        heads=12,
        max_tp=8,
    )
    for plan in plans:
        assert prod((plan.dp, plan.tp, plan.pp)) == n_gpus
        assert plan.micro_batch_size * plan.grad_accum_steps * plan.dp == batch
        assert 12 % plan.tp == 0
