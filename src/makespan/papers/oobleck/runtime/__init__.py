"""Pipelines of different shapes that train one model together: what a process of a resilient job does.

Importing the package loads nothing; what it shows imports torch, except `ChainJob`.

- `ChainJob` says what is trained; `Chain` is what a user's own function returns, layer by layer
- `StageExecutor` is one process: passes of its stage, sums over pipelines, steps, and the layers it holds;
  `LostPeerError` is what it raises when another one is gone
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.oobleck.runtime._chain import Chain
    from makespan.papers.oobleck.runtime._executor import IterationFacts, StageExecutor
    from makespan.papers.oobleck.runtime._job import ChainJob, job_from
    from makespan.papers.oobleck.runtime._links import LostPeerError

__all__ = ["Chain", "ChainJob", "IterationFacts", "LostPeerError", "StageExecutor", "job_from"]

__getattr__ = shown_lazily(__name__, __file__)
