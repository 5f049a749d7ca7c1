"""Parts of elastic live jobs: the model, optimizer, samples and loss of `makespan.training.TrainingJob`.

The processes of an elastic run import them by name. Samples and steps are those of `makespan.training.train`
with the same seed, so the losses of both differ by rounding only.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from makespan.training.engine import ADAMW_BETAS, ADAMW_EPS
from makespan.training.zoo import Batch, SmallModel, global_batch, link_loss
from makespan.training.zoo.small import SmallTransformer, build_model


def model(seed: int, **sizes: Any) -> SmallTransformer:
    """Build the model; ``sizes`` are the fields of `SmallModel`."""
    return build_model(SmallModel(**sizes), seed)


def adamw(trained: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW, under which only matrices decay."""
    parameters = list(trained.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAMW_BETAS, eps=ADAMW_EPS)


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Let the learning rate grow linearly over the first steps."""
    share: Callable[[int], float] = lambda step: min(1.0, (step + 1) / max(1, steps))  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class Samples:
    """Samples of so many steps, each of which has a global batch of so many, in the order of the steps.

    Dealt out in turn without shuffling, the logical workers together train each global batch in one step.
    """

    def __init__(self, batch_size: int, steps: int, seed: int, **sizes: Any) -> None:
        self._spec, self._batch_size, self._steps, self._seed = SmallModel(**sizes), batch_size, steps, seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._batch_size * self._steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample and its targets."""
        step, number = divmod(index, self._batch_size)
        batch = _batch(self._spec, self._batch_size, self._seed, step)
        return torch.from_numpy(batch.inputs[number]), torch.from_numpy(np.asarray(batch.targets[number]))


@lru_cache(maxsize=2)
def _batch(spec: SmallModel, batch_size: int, seed: int, step: int) -> Batch:
    return global_batch(spec, batch_size, seed, step)


loss = link_loss
"""Mean cross entropy of logits over the targets that count."""
