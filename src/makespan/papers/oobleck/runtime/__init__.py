"""Pipelines of different shapes that train one model together: what a process of a resilient job does.

Importing the package loads nothing; what it shows imports torch, except `ChainJob`, plans and `run_fixed`.

- `ChainJob` says what is trained; `Chain` is what a user's own function returns, layer by layer
- `StageExecutor` is one process: passes of its stage, sums over pipelines, steps, and the layers it holds;
  `LostPeerError` is what it raises when another one is gone
- `run_fixed` trains under plans that do not change, with a process a node; `profile_chain` times the layers
- `PlainTraining` is the same training in one process as anybody would write it; an `Oracle` repeats in one
  process, bit by bit, what pipelines did whose sums were ordered, under any sequence of plans
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.oobleck.runtime._chain import Chain
    from makespan.papers.oobleck.runtime._executor import IterationFacts, StageExecutor
    from makespan.papers.oobleck.runtime._fixed import FixedRun, NodeSeen, run_fixed
    from makespan.papers.oobleck.runtime._job import ChainJob, job_from
    from makespan.papers.oobleck.runtime._links import LostPeerError
    from makespan.papers.oobleck.runtime._oracle import Oracle
    from makespan.papers.oobleck.runtime._plans import check_plan, plan_from, plan_values
    from makespan.papers.oobleck.runtime._profiling import profile_chain
    from makespan.papers.oobleck.runtime._reference import PlainTraining

__all__ = [
    "Chain",
    "ChainJob",
    "FixedRun",
    "IterationFacts",
    "LostPeerError",
    "NodeSeen",
    "Oracle",
    "PlainTraining",
    "StageExecutor",
    "check_plan",
    "job_from",
    "plan_from",
    "plan_values",
    "profile_chain",
    "run_fixed",
]

__getattr__ = shown_lazily(__name__, __file__)
