"""Execution plans, placements, their notations, enumeration and memory.

An *execution plan* says how a job uses its devices; a *placement* says how many devices it holds on each
node. Both are immutable values, checked on construction.
"""

from makespan.plans.memory import (
    DEFAULT_MEMORY_RULES as DEFAULT_MEMORY_RULES,
    MemoryRules as MemoryRules,
    Verdict as Verdict,
    memory_estimate as memory_estimate,
    resolve_micro_batch as resolve_micro_batch,
)
from makespan.plans.notation import (
    PLAN_TEXTS as PLAN_TEXTS,
    enumerate_plans as enumerate_plans,
    read_plan as read_plan,
    stated_cpu_threads as stated_cpu_threads,
    write_exec_plan as write_exec_plan,
    write_plan as write_plan,
)
from makespan.plans.plan import (
    DEFAULT_CPU_THREADS as DEFAULT_CPU_THREADS,
    ExecutionPlan as ExecutionPlan,
    Placement as Placement,
    PlanFamily as PlanFamily,
    RankGroups as RankGroups,
    Stage as Stage,
    boundary_flows as boundary_flows,
    card_loads as card_loads,
    cards_by_node as cards_by_node,
    chunk_layers as chunk_layers,
    enumerate_placements as enumerate_placements,
    interleaved_order as interleaved_order,
    one_f_one_b_order as one_f_one_b_order,
    stages as stages,
    zero_bubble_order as zero_bubble_order,
)
