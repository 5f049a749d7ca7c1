"""Process that scans a model: ``python -m makespan.easyscale.scan_worker <run directory>``."""

import sys

import torch
import torch._dynamo  # optimizers load it; workers that are forked after this one inherit it
import torch.distributed as dist

from makespan.easyscale.context import patch_distributed, virtual_rank
from makespan.easyscale.job import job_from
from makespan.easyscale.parts import build_parts, scan_module
from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker


def _work(directory: RunDirectory, who: Identity) -> None:
    job = job_from(directory.request())
    join(directory, who)
    patch_distributed(job.n_logical_workers)
    with virtual_rank(0, job.n_logical_workers):
        parts = build_parts(job, torch.device("cpu"))
    directory.write_result(scan_module(parts.trained.model))
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
