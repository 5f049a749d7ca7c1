"""Elastic training with the same bits for any number and kind of devices (EasyScale, SC 2023).

Importing the package does not import torch.

- `ElasticTrainer` trains an `ElasticJob` on any number of processes; `run_together` lets several jobs share
  processes, `RunOptions` sets checkpoints and limits, and a run returns an `ElasticResult`
- `request_change` and `export_model` reach a run from outside
- `IntraJobPlanner` plans how the logical workers of a job share devices of several types; `PlannedCatalogue`
  offers these plans to the simulator
- `makespan.easyscale.runtime` is the part that runs in each training process
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.easyscale._catalogue import JobKind, PlannedCatalogue
    from makespan.easyscale._planner import IntraJobPlanner, Plan
    from makespan.easyscale._stages import ElasticResult, RunOptions
    from makespan.easyscale._trainer import ElasticTrainer, export_model, request_change, run_together
    from makespan.easyscale.runtime import ElasticJob

__all__ = [
    "ElasticJob",
    "ElasticResult",
    "ElasticTrainer",
    "IntraJobPlanner",
    "JobKind",
    "Plan",
    "PlannedCatalogue",
    "RunOptions",
    "export_model",
    "request_change",
    "run_together",
]

__getattr__ = shown_lazily(__name__, __file__)
