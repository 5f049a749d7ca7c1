"""Models, software stacks and workloads, and the zoo of presets.

A *model* is an architecture, a *stack* is what the training software does with it, and a
*workload* is what a job trains: a model, its data shape, its global batch and its stacks.
"""

from makespan.workloads._layers import Head, Layer, head, layers, parameter_count
from makespan.workloads._spec import BlockSpec, BoundWorkload, JobSpec, ModelSpec, Stack, Workload
from makespan.workloads._zoo import (
    is_in_zoo,
    model,
    model_keys,
    resolve_workload_key,
    small_workload_keys,
    stack,
    workload,
    workload_keys,
    workload_of,
)

__all__ = [
    "BlockSpec",
    "BoundWorkload",
    "Head",
    "JobSpec",
    "Layer",
    "ModelSpec",
    "Stack",
    "Workload",
    "head",
    "is_in_zoo",
    "layers",
    "model",
    "model_keys",
    "parameter_count",
    "resolve_workload_key",
    "small_workload_keys",
    "stack",
    "workload",
    "workload_keys",
    "workload_of",
]
