"""Stages of elastic runs in this process, which is then the only one of the stage."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from makespan.easyscale.job import Placing, RunOptions
from makespan.easyscale.requests import GENERATIONS
from makespan.easyscale.trainer import _ElasticRun
from makespan.easyscale.worker import train_generation
from makespan.runtime import Identity, RunDirectory


@contextmanager
def only_process():
    """Let this process be the only one of a stage; what a stage sets for good is set back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_rank", "get_world_size"):
            patch.setattr(dist, name, getattr(dist, name))
        patch.setenv("MAKESPAN_RANK", "0")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        try:
            yield Identity(0, 1, 0, "cpu", 1, 60.0, time.time(), os.getppid(), None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_deterministic_debug_mode("default")
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()


def requested(run, directory):
    """Return the request to the process of a stage."""
    request = run.request(is_first=True, gloo_order_dir=directory)
    return GENERATIONS.dump_python([request], mode="json")


def train_here(trainer, steps, mapping, **options):
    """Train a stage in this process; return the run."""
    run = _ElasticRun(
        trainer.job, trainer.folder, steps, Placing.of(trainer.job, mapping, None), RunOptions(**options)
    )
    run.begin()
    directory = RunDirectory(trainer.folder.path / "processes")
    directory.prepare(requested(run, trainer.folder.path))
    with only_process() as who:
        train_generation(directory, who)
    run.end_generation(directory.result())
    return run
