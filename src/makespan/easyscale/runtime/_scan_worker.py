"""The scan of the model of a job: ``python -m <this module> <run directory>``."""

import sys

import torch
import torch._dynamo  # an optimizer loads it, once in the process that forks this one
import torch.distributed as dist

from makespan.easyscale.runtime._job import job_from
from makespan.easyscale.runtime._parts import build_parts
from makespan.easyscale.runtime._process import scan_module
from makespan.easyscale.runtime._virtual import hide_processes, seen_as
from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker

__all__: list[str] = []


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
