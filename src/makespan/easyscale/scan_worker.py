"""Process that scans a model: ``python -m makespan.easyscale.scan_worker <run directory>``."""

import sys

import torch
import torch._dynamo  # an optimizer loads it, once in the process that forks this one
import torch.distributed as dist

from makespan.easyscale.context import hide_processes, seen_as
from makespan.easyscale.job import job_from
from makespan.easyscale.parts import build_parts, scan_module
from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker


def _work(directory: RunDirectory, who: Identity) -> None:
    job = job_from(directory.request())
    join(directory, who)
    hide_processes(job.n_logical_workers)
    with seen_as(0, job.n_logical_workers):
        parts = build_parts(job, torch.device("cpu"))
    directory.write_result(scan_module(parts.trained.model))
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
