"""Execution plans, placements, their notations, enumeration and memory.

An *execution plan* says how a job uses its devices, a *placement* says how many devices it
holds on each node. Both are immutable values that check themselves on construction.
"""

from makespan.plans._enumerate import enumerate_placements, enumerate_plans
from makespan.plans._memory import (
    DEFAULT_MEMORY_RULES,
    MemoryRules,
    Verdict,
    memory_estimate,
    resolve_micro_batch,
)
from makespan.plans._notation import read_plan, write_plan
from makespan.plans._placement import Placement
from makespan.plans._plan import DEFAULT_CPU_THREADS, ExecutionPlan, PlanFamily
from makespan.plans._stages import Stage, stages

__all__ = [
    "DEFAULT_CPU_THREADS",
    "DEFAULT_MEMORY_RULES",
    "ExecutionPlan",
    "MemoryRules",
    "Placement",
    "PlanFamily",
    "Stage",
    "Verdict",
    "enumerate_placements",
    "enumerate_plans",
    "memory_estimate",
    "read_plan",
    "resolve_micro_batch",
    "stages",
    "write_plan",
]
