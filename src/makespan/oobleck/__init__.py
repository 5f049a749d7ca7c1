"""Resilient pipeline training from precomputed pipeline templates (Oobleck, SOSP 2023).

Importing the package does not import torch.

- `train_resilient` trains a `ChainJob` on processes that may be lost; `LiveOptions` sets checkpoints and
  limits, and a run returns a `LiveResult`
- `join_run` adds a node to a run, `drain_nodes` releases some, `export_model` writes the trained model as a
  plain ``state_dict``
- `Faults` kills processes at chosen moments, one per `Fault`
- `makespan.oobleck.planning` makes templates and plans, `makespan.oobleck.reconfiguration` adapts them to
  nodes that leave and join, `makespan.oobleck.runtime` is the part that runs in each training process, and
  `makespan.oobleck.simulators` has the simulators of Oobleck, Varuna and Bamboo
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.oobleck._faults import Fault, Faults
    from makespan.oobleck._joining import drain_nodes, join_run
    from makespan.oobleck._live import LiveOptions, LiveResult, train_resilient
    from makespan.oobleck.runtime import Chain, ChainJob, export_model

__all__ = [
    "Chain",
    "ChainJob",
    "Fault",
    "Faults",
    "LiveOptions",
    "LiveResult",
    "drain_nodes",
    "export_model",
    "join_run",
    "train_resilient",
]

__getattr__ = shown_lazily(__name__, __file__)
