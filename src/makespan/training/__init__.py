"""Train small models for real, under any execution plan, on CPU or GPU.

The calls of this package start worker processes and wait for them; only the workers import torch.

- `TrainingJob` says what is trained: a `SmallModel` under an `makespan.plans.ExecutionPlan`
- `check_supported` says whether a plan can train a model, and why not
- `train` runs a job with a launcher of `makespan.runtime` and returns a `RunResult`; with
  checkpoints it continues under another plan and another number of processes
- `clip_grad_norm` limits gradients by the norm of all that processes hold; `refuse_plain_clipping` lets
  torch's own function say so where it would see a part
- `read_progress` and `request_stop` watch and stop a run from outside
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.training._clipping import PartialNormError, clip_grad_norm, refuse_plain_clipping
    from makespan.training._job import RunResult, TrainingJob, check_supported, unsupported_reasons
    from makespan.training._run import (
        cost_table,
        read_progress,
        request_stop,
        train,
        train_all,
        train_compared,
        train_switching,
    )
    from makespan.training.zoo import MODEL_FAMILIES, SmallModel

__all__ = [
    "MODEL_FAMILIES",
    "PartialNormError",
    "RunResult",
    "SmallModel",
    "TrainingJob",
    "check_supported",
    "clip_grad_norm",
    "cost_table",
    "read_progress",
    "refuse_plain_clipping",
    "request_stop",
    "train",
    "train_all",
    "train_compared",
    "train_switching",
    "unsupported_reasons",
]

__getattr__ = shown_lazily(__name__, __file__)
