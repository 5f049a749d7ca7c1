"""Elastic training with the same bits for any number and kind of devices (EasyScale, SC 2023).

Importing the package does not import torch.

- `ElasticTrainer` trains an `ElasticJob` on any number of processes; `run_together` lets several jobs share
  processes, `RunOptions` sets checkpoints and limits, and a run returns an `ElasticResult`
- `LoopRun` is what the function of a job with a training loop of its own gets; its `TrainingLoop` gives one
  `LoopMiniBatch` after the other
- `request_change`, `join_run`, `drain_processes` and `export_model` reach a run from outside
- `predict_recovery` predicts what surviving losses costs on many devices, as a `RecoveryCost`
- `IntraJobPlanner` plans how the logical workers of a job share devices of several types; `PlannedCatalogue`
  offers these plans to the simulator
- processes of a run start at `makespan.easyscale.worker`; it and what it imports need torch
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.easyscale.job import ElasticJob as ElasticJob, RunOptions as RunOptions
    from makespan.easyscale.loop import LoopRun as LoopRun, TrainingLoop as TrainingLoop
    from makespan.easyscale.loop_turns import LoopMiniBatch as LoopMiniBatch
    from makespan.easyscale.planner import (
        IntraJobPlanner as IntraJobPlanner,
        JobKind as JobKind,
        Plan as Plan,
        PlannedCatalogue as PlannedCatalogue,
    )
    from makespan.easyscale.recovery_cost import (
        RecoveryCost as RecoveryCost,
        predict_recovery as predict_recovery,
    )
    from makespan.easyscale.trainer import (
        ElasticResult as ElasticResult,
        ElasticTrainer as ElasticTrainer,
        drain_processes as drain_processes,
        export_model as export_model,
        join_run as join_run,
        request_change as request_change,
        run_together as run_together,
    )


__getattr__ = lazy_exports(__name__, __file__)
