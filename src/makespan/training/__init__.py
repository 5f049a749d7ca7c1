"""Train small models for real, under any execution plan, on CPU or GPU.

The calls of this package start worker processes and wait for them; only the workers import torch.

- `TrainingJob` describes a run: a `SmallModel` under a `makespan.plans.ExecutionPlan`
- `check_supported` raises an error with all reasons if a plan cannot train a model
- `train` runs a job with a launcher of `makespan.runtime` and returns a `RunResult`; with
  checkpoints it continues under another plan and another number of processes
- `clip_grad_norm` clips gradients by their norm over all processes; `refuse_plain_clipping` makes torch's own
  function raise an error if it would clip by the norm of one process's part
- `read_progress` and `request_stop` watch and stop a run from outside
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.training.engine import (
        PartialNormError as PartialNormError,
        clip_grad_norm as clip_grad_norm,
        refuse_plain_clipping as refuse_plain_clipping,
    )
    from makespan.training.run import (
        RunResult as RunResult,
        TrainingJob as TrainingJob,
        check_supported as check_supported,
        cost_table as cost_table,
        read_progress as read_progress,
        request_stop as request_stop,
        train as train,
        train_all as train_all,
        train_compared as train_compared,
        train_switching as train_switching,
        unsupported_reasons as unsupported_reasons,
    )
    from makespan.training.zoo import (
        MODEL_FAMILIES as MODEL_FAMILIES,
        SmallModel as SmallModel,
    )


__getattr__ = lazy_exports(__name__, __file__)
