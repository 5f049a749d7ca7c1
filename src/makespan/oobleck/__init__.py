"""Resilient pipeline training from precomputed pipeline templates (Oobleck, SOSP 2023).

Importing the package does not import torch.

- `train_resilient` trains a `ChainJob` on processes that may be lost; `LiveOptions` sets checkpoints and
  limits, and a run returns a `LiveResult`
- `join_run` adds a node to a run, `drain_nodes` releases some, `export_model` writes the trained model as a
  plain ``state_dict``
- `Faults` kills processes at chosen moments, one per `Fault`
- `makespan.oobleck.templates` and `makespan.oobleck.instantiation` plan pipelines from a profile of
  `makespan.oobleck.profile`, `makespan.oobleck.reconfiguration` adapts a plan to nodes that leave and join
- `makespan.oobleck.simulator` simulates Oobleck, Varuna and Bamboo, and ReCycle and dropped replicas beside
  them, on traces of `makespan.oobleck.traces`
- `makespan.oobleck.rerouting` schedules pipelines that run the micro-batches of lost workers on their peers,
  as runs with ``recovery="reroute"`` do
- processes of a run start at `makespan.oobleck.worker`; it and what it imports need torch
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.oobleck.chain import Chain as Chain
    from makespan.oobleck.export import export_model as export_model
    from makespan.oobleck.job import ChainJob as ChainJob
    from makespan.oobleck.trainer import (
        Fault as Fault,
        Faults as Faults,
        LiveOptions as LiveOptions,
        LiveResult as LiveResult,
        drain_nodes as drain_nodes,
        join_run as join_run,
        train_resilient as train_resilient,
    )


__getattr__ = lazy_exports(__name__, __file__)
