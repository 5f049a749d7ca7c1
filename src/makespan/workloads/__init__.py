"""Models, software stacks and workloads, and the zoo of presets.

A *model* is an architecture, a *stack* describes the training software, and a *workload* is a training task:
a model, its data shape, its global batch size and its stacks.
"""

from makespan.workloads.models import (
    BlockSpec as BlockSpec,
    BoundWorkload as BoundWorkload,
    Head as Head,
    JobSpec as JobSpec,
    Layer as Layer,
    ModelSpec as ModelSpec,
    Stack as Stack,
    Workload as Workload,
    head as head,
    is_in_zoo as is_in_zoo,
    layers as layers,
    model as model,
    model_keys as model_keys,
    parameter_count as parameter_count,
    resolve_workload_key as resolve_workload_key,
    small_workload_keys as small_workload_keys,
    stack as stack,
    workload as workload,
    workload_keys as workload_keys,
    workload_of as workload_of,
)
