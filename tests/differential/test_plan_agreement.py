"""Executor, cost models and notation agree on stages, micro-batches and degrees of every named plan."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from makespan.config import check_settings
from makespan.emulator import trace_points
from makespan.emulator.model import stage_features
from makespan.hardware import cluster
from makespan.perf import load_environment, points_from_plans
from makespan.plans import (
    ExecutionPlan,
    Placement,
    chunk_layers,
    memory_estimate,
    read_plan,
    resolve_micro_batch,
    stages,
    write_exec_plan,
    write_plan,
)
from makespan.training import SmallModel, TrainingJob
from makespan.workloads import Workload, workload, workload_keys

WHERE = cluster("a800-64")
ENVIRONMENT = load_environment("a800-64")
NOTATION_ONLY = ["212+interleaved2+a2", "212+interleaved2+layers1-1-1-1+a2", "141+layers4+sp", "411+gpipe+a8"]


def small(plan: ExecutionPlan) -> Workload:
    """Return a workload with the model size and batch of Fig. 9."""
    spec = workload("llama7")
    model = replace(spec.model, blocks=(replace(spec.model.blocks[0], n_layers=4),), parameters=0)
    return replace(spec, model=model, global_batch_size=plan.global_batch_size)


def trained_plans() -> list[ExecutionPlan]:
    """Return the plans that Fig. 9 trains, and some that only the notation names."""
    fig9 = check_settings({}).morphling.fig9
    batch = fig9.global_batch_size
    found = [one.plan(batch) for one in fig9.plans]
    return found + [read_plan(text, n_gpus=4, global_batch_size=batch) for text in NOTATION_ONLY]


def check(plan: ExecutionPlan, spec: Workload, placement: Placement) -> None:
    """Compare what each part makes of a plan."""
    beside = {"n_gpus": placement.n_gpus, "global_batch_size": spec.global_batch_size}
    assert read_plan(write_plan(plan), **beside) == plan
    in_table = read_plan(write_exec_plan(plan), **beside, cpu_threads=plan.cpu_threads)
    assert in_table == plan.with_micro_batch(plan.replica_batch_size)
    chunks = chunk_layers(spec.model.n_layers, plan)
    held = [sum(map(len, chunks[stage :: plan.pp])) for stage in range(plan.pp)]
    assert [stage.n_layers for stage in stages(spec.model, plan)] == held
    work = stage_features(spec, plan, placement, WHERE)
    assert [round(stage["layer_passes"]) for stage in work] == held
    points = points_from_plans([(plan, placement)], spec, ENVIRONMENT)
    modelled = (points.dp, points.tp, points.pp, points.n_micro, points.replica_batch_size)
    of_plan = (plan.dp, plan.tp, plan.pp, plan.n_microbatches, plan.n_microbatches * plan.micro_batch_size)
    assert np.concatenate(modelled).tolist() == list(of_plan)
    assert memory_estimate(plan, spec, WHERE.nodes[0], placement).bytes_by_component


def test_plans_of_every_trace_agree() -> None:
    for key in workload_keys():
        spec = workload(key)
        for point in {point.plan: point for point in trace_points(spec, WHERE)}.values():
            check(resolve_micro_batch(point.plan, spec, WHERE.nodes[0]), spec, point.placement)


def test_the_executor_holds_the_layers_and_passes_that_the_models_count() -> None:
    torch = pytest.importorskip("torch")
    from makespan.training.engine import Clock, Engine

    for plan in trained_plans():
        spec, placement = small(plan), Placement.packed(plan.n_gpus, 8)
        check(plan, spec, placement)
        whole = replace(plan, tp=1, family=None)
        held = []
        for rank in range(plan.pp):
            engine = Engine.__new__(Engine)
            engine.job = TrainingJob(SmallModel("llama", kv_heads=2), whole, 1)
            engine.coordinate = SimpleNamespace(
                rank=lambda _, rank=rank: rank, mesh=None, device=torch.device("cpu")
            )
            held.append([int(name) for chunk in engine._build_chunks() for name in chunk.layers])
        assert [len(layers) for layers in held] == [s.n_layers for s in stages(spec.model, plan)]
        assert sorted(layer for layers in held for layer in layers) == list(range(4))
        if plan.pp == 1:
            sizes: list[int] = []
            model = torch.nn.Linear(1, 1)
            model.register_forward_hook(lambda _, inputs, __, sizes=sizes: sizes.append(len(inputs[0])))
            engine._chunks, engine._uses_ddp = [model], False
            engine._loss = lambda logits, targets: (logits - targets).sum()
            samples = torch.zeros(plan.replica_batch_size, 1)
            engine._build_passes().run(samples, samples, Clock(torch.device("cpu")))
            assert sizes == [plan.micro_batch_size] * plan.n_microbatches
