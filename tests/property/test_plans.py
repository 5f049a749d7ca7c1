"""Laws of plans and placements."""

from math import prod

from hypothesis import given, strategies as st

from makespan.plans import (
    ExecutionPlan,
    Placement,
    PlanFamily,
    chunk_layers,
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


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    """Draw any plan that `ExecutionPlan` accepts."""
    fields = {name: draw(degree) for name in ("dp", "tp", "pp")}
    fields |= {name: draw(st.integers(1, 5)) for name in ("micro_batch_size", "grad_accum_steps")}
    batch = fields["dp"] * fields["micro_batch_size"] * fields["grad_accum_steps"]
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    interleave = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    chunks = fields["pp"] * interleave
    zero_stage = draw(st.integers(0, 3))
    return ExecutionPlan(
        **fields,
        global_batch_size=batch,
        zero_stage=zero_stage,
        offload=draw(st.booleans()) and zero_stage > 0,
        checkpoint_fraction=draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 1)),
        checkpoint_method=draw(st.sampled_from(["full", "selective"])),
        schedule=schedule,
        interleave=interleave,
        cpu_threads=draw(st.integers(1, 96)),
        sequence_parallel=draw(st.booleans()),
        partition=draw(st.none() | st.tuples(*[st.integers(1, 9)] * chunks)),
        family=draw(st.none() | st.sampled_from(_families(**fields))),
    )


def _families(dp: int, tp: int, pp: int, **_: int) -> list[PlanFamily | None]:
    if dp > 1:
        return [None, PlanFamily.DP_TP_PP]
    return [None, PlanFamily.TP_PP] + ([PlanFamily.TP_GA] if pp == 1 else [])


@given(plans())
def test_reading_what_was_written_gives_an_equal_plan(plan: ExecutionPlan) -> None:
    beside = {"n_gpus": plan.n_gpus, "global_batch_size": plan.global_batch_size}
    assert read_plan(write_plan(plan), **beside) == plan
    text = write_plan(plan, cpu_threads=plan.cpu_threads)
    assert "cpu" not in text
    assert read_plan(text, **beside, cpu_threads=plan.cpu_threads) == plan
    assert write_plan(read_plan(write_plan(plan), **beside)) == write_plan(plan)


@given(plans(), st.integers(0, 40))
def test_chunks_hold_every_layer_once(plan: ExecutionPlan, more: int) -> None:
    n_layers = sum(plan.partition) if plan.partition else plan.n_chunks + more
    chunks = chunk_layers(n_layers, plan)
    assert [layer for chunk in chunks for layer in chunk] == list(range(n_layers))
    assert len(chunks) == plan.pp * plan.interleave and all(chunks)
    if plan.partition is None:
        assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


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
