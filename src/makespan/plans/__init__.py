"""Execution plans, placements, their notations, enumeration and memory.

An *execution plan* says how a job uses its devices, a *placement* says how many devices it
holds on each node. Both are immutable values that check themselves on construction.
"""

from makespan.plans._memory import (
    DEFAULT_MEMORY_RULES,
    MemoryRules,
    Verdict,
    memory_estimate,
    resolve_micro_batch,
)
from makespan.plans._notation import (
    PLAN_TEXTS,
    enumerate_plans,
    read_plan,
    stated_cpu_threads,
    write_exec_plan,
    write_plan,
)
from makespan.plans._placement import (
    Placement,
    RankGroups,
    boundary_flows,
    card_loads,
    cards_by_node,
    enumerate_placements,
)
from makespan.plans._plan import DEFAULT_CPU_THREADS, ExecutionPlan, PlanFamily
from makespan.plans._stages import Stage, chunk_layers, one_f_one_b_order, stages

__all__ = [
    "DEFAULT_CPU_THREADS",
    "DEFAULT_MEMORY_RULES",
    "ExecutionPlan",
    "MemoryRules",
    "PLAN_TEXTS",
    "Placement",
    "PlanFamily",
    "RankGroups",
    "Stage",
    "Verdict",
    "boundary_flows",
    "card_loads",
    "cards_by_node",
    "chunk_layers",
    "enumerate_placements",
    "enumerate_plans",
    "memory_estimate",
    "one_f_one_b_order",
    "read_plan",
    "resolve_micro_batch",
    "stages",
    "stated_cpu_threads",
    "write_exec_plan",
    "write_plan",
]
