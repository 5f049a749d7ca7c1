"""Process that tries out one kernel set: ``python -m makespan.easyscale.profile_worker <run directory>``."""

import sys

import numpy as np
import torch
import torch._dynamo  # optimizers load it; workers that are forked after this one inherit it
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from makespan.easyscale.kernels import KERNEL_SETS, DeterminismLevel, KernelTrialRequest
from makespan.easyscale.parts import use_kernels
from makespan.easyscale.randomness import parameter_sha, seed_everything
from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker

_BATCH, _SIDE, _CHANNELS, _FEATURES = 16, 16, 32, 128


def try_kernels(seed: int) -> dict[str, str]:
    """Return hashes of one training step of a fixed model: parameters before it, loss, and gradients."""
    rng = np.random.default_rng(seed)
    # Convolution, BatchNorm, dropout and linear layers, large enough that roundings show in one step.
    after = _CHANNELS * (_SIDE // 2) ** 2
    model = nn.Sequential(
        nn.Conv2d(3, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU(),
        nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, stride=2), nn.BatchNorm2d(_CHANNELS), nn.ReLU(),
        nn.Flatten(), nn.Linear(after, _FEATURES), nn.ReLU(), nn.Dropout(0.2), nn.Linear(_FEATURES, 10),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            # Uniform and from NumPy: the draws of torch depend on its kernels.
            parameter.copy_(torch.from_numpy(rng.uniform(-0.1, 0.1, parameter.shape).astype(np.float32)))
    inputs = torch.from_numpy(rng.random((_BATCH, 3, _SIDE, _SIDE), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, 10, _BATCH))
    before = parameter_sha(model)
    seed_everything(seed)
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():  # so that parameter_sha hashes the gradients
            parameter.copy_(parameter if parameter.grad is None else parameter.grad)
    return {"parameters": before, "loss": float(loss.item()).hex(), "gradients": parameter_sha(model)}


def _work(directory: RunDirectory, who: Identity) -> None:
    request = KernelTrialRequest(**directory.request())
    join(directory, who)
    with use_kernels(KERNEL_SETS[request.kernels], DeterminismLevel.named("D0")):
        result = try_kernels(request.seed) | {"capability": torch.backends.cpu.get_cpu_capability()}
    directory.write_result(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
