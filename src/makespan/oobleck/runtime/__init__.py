"""Pipelines of different shapes that train one model together, and go on when processes are lost.

Importing the package loads nothing; what it shows imports torch, except `ChainJob`, plans, `run_fixed`, and
the coordinator before it runs.

- `ChainJob` says what is trained; `Chain` is what a user's own function returns, layer by layer
- `StageExecutor` is one process: passes of its stage, sums over pipelines, steps, and the layers it holds;
  `LostPeerError` is what it raises when another one is gone
- `Coordinator` carries out what the protocol `Coordination` decides with a `Decider`: who takes part, which
  iteration is committed, and what follows a loss; every `Event` of it can be watched
- `run_fixed` trains under plans that do not change, with a process a node; `profile_chain` times the layers
- `PlainTraining` is the same training in one process as anybody would write it; an `Oracle` repeats in one
  process, bit by bit, what pipelines did whose sums were ordered, under any sequence of plans; `replay` does
  so for a whole run
- `export_model` writes the model of a run as a plain ``state_dict``
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.oobleck.runtime._chain import Chain, load_chain
    from makespan.oobleck.runtime._connection import Connection, connected
    from makespan.oobleck.runtime._coordinator import Coordinator, Event, Limits
    from makespan.oobleck.runtime._deciding import Decider
    from makespan.oobleck.runtime._engine import layer_file
    from makespan.oobleck.runtime._executor import IterationFacts, StageExecutor
    from makespan.oobleck.runtime._export import export_model
    from makespan.oobleck.runtime._fixed import FixedRun, NodeSeen, run_fixed
    from makespan.oobleck.runtime._job import ChainJob, job_from
    from makespan.oobleck.runtime._links import LostPeerError
    from makespan.oobleck.runtime._messages import Drain, Hello, Kill
    from makespan.oobleck.runtime._node import ADDRESS_FILE, JOINING, host_name
    from makespan.oobleck.runtime._oracle import Oracle
    from makespan.oobleck.runtime._plans import check_plan, plan_from, plan_values
    from makespan.oobleck.runtime._profiling import profile_chain
    from makespan.oobleck.runtime._protocol import Coordination
    from makespan.oobleck.runtime._reference import PlainTraining
    from makespan.oobleck.runtime._replay import replay

__all__ = [
    "ADDRESS_FILE",
    "JOINING",
    "Chain",
    "ChainJob",
    "Connection",
    "Coordination",
    "Coordinator",
    "Decider",
    "Drain",
    "Event",
    "Hello",
    "FixedRun",
    "IterationFacts",
    "Kill",
    "Limits",
    "LostPeerError",
    "NodeSeen",
    "Oracle",
    "PlainTraining",
    "StageExecutor",
    "check_plan",
    "connected",
    "export_model",
    "host_name",
    "job_from",
    "layer_file",
    "load_chain",
    "plan_from",
    "plan_values",
    "profile_chain",
    "replay",
    "run_fixed",
]

__getattr__ = shown_lazily(__name__, __file__)
