"""Process that reports its GPUs: ``python -m makespan.runtime.gpu_probe <run directory>``."""

import sys
from contextlib import suppress
from dataclasses import asdict

from makespan.errors import InputError
from makespan.runtime.launch import RunDirectory, gpu_of, gpus_of_torch
from makespan.runtime.rendezvous import Identity, end_worker, run_worker

with suppress(ImportError):  # `gpus_of_torch` reports it
    import torch  # noqa: F401 - the process that forks this one loads it, and then has it for those that train


def report_gpus(directory: RunDirectory, who: Identity) -> None:
    """Write the GPUs that this process sees, and whether one of them is for it alone."""
    gpus = gpus_of_torch()
    try:
        gpu_of(who.local_rank, gpus)
    except InputError:
        has_own = False
    else:
        has_own = True
    directory.write_result({"gpus": asdict(gpus), "has_own": has_own}, who.rank)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], report_gpus))
