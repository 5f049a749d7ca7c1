"""GPUs as torch counts them: the one place that says what there is, asked in a process that would use them.

Variables such as ``CUDA_VISIBLE_DEVICES`` and the tools of a driver say what was granted or built in. Whether
torch can use it, which may be built for the CPU alone, only torch knows.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from makespan.errors import InputError

__all__ = ["Gpus", "gpu_of", "gpus_of_torch"]


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a process.

    Parameters
    ----------
    memory_bytes
        Memory of each [B].
    source
        Torch as it was found, with its version, and what it was granted.
    """

    memory_bytes: Sequence[float]
    source: str

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.memory_bytes)


def gpus_of_torch() -> Gpus:
    """GPUs that torch can use in this process, which loads it."""
    try:
        import torch
    except ImportError as error:
        return Gpus((), f"torch cannot be imported ({error})")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory: list[Any] = [torch.cuda.get_device_properties(index).total_memory for index in range(n_gpus)]
    return Gpus([float(one) for one in memory], _source(torch))


def gpu_of(local_rank: int, gpus: Gpus) -> int:
    """Index of the GPU that a process uses, from its number among those of its node.

    The only GPU is that of each process: Slurm may have granted each its own.

    Raises
    ------
    InputError
        There is none for it.
    """
    index = local_rank if gpus.count > 1 else 0
    if index >= gpus.count:
        found = f"device cuda: process {local_rank} of its node, but {gpus.count} GPU(s) at hand"
        raise InputError(f"{found} ({gpus.source}); accepted: one GPU for each process, or cpu")
    return index


def _source(torch: Any) -> str:
    """Version of torch, and why it may see fewer GPUs than there are."""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built without CUDA"
    granted = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if granted is None else f" with CUDA_VISIBLE_DEVICES={granted}"
    return f"as torch {torch.__version__} counts them{limit}"
