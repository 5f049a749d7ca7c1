"""Processes that work together: launch, rendezvous, watch, run directory, checkpoint files, machine facts.

What the processes do is no concern of this package; nothing here imports torch before a worker
calls `join` or `choose_device`.

- `LocalLauncher` and `SlurmLauncher` run a `Launch`, any worker with a request, and watch it: when one
  process dies all end, or the others are told
- a worker calls `run_worker` with what it does, `join` to meet the others, and finds request, stop
  request and lost processes in its `RunDirectory`
- `start_checkpoint` and `finish_checkpoint` keep checkpoints complete or absent; `latest_checkpoint` is the
  newest, `sound_checkpoint` the newest that nothing has damaged
- `take` holds a file for a process until it ends, and `is_taken` says whether one does
- `local_gpus` and `slurm_device` ask torch, in a process that would use them, which GPUs there are
- `describe_machine` says on what a measurement was made
"""

from makespan.runtime._checkpoints import (
    Checkpoint,
    discard_partial,
    finish_checkpoint,
    latest_checkpoint,
    sound_checkpoint,
    start_checkpoint,
)
from makespan.runtime._directory import RunDirectory
from makespan.runtime._forkserver import Process
from makespan.runtime._launch import (
    Launch,
    Launcher,
    LocalLauncher,
    ProcessOptions,
    SlurmLauncher,
    check_gpus,
    local_gpus,
    local_launcher,
    slurm_device,
)
from makespan.runtime._locks import is_taken, take
from makespan.runtime._machine import describe_machine, memory_bytes, usable_cpus
from makespan.runtime._rendezvous import Identity, choose_device, end_worker, join, run_worker

__all__ = [
    "Checkpoint",
    "Identity",
    "Launch",
    "Launcher",
    "LocalLauncher",
    "Process",
    "ProcessOptions",
    "RunDirectory",
    "SlurmLauncher",
    "check_gpus",
    "choose_device",
    "describe_machine",
    "discard_partial",
    "end_worker",
    "finish_checkpoint",
    "is_taken",
    "join",
    "latest_checkpoint",
    "local_gpus",
    "local_launcher",
    "memory_bytes",
    "run_worker",
    "slurm_device",
    "sound_checkpoint",
    "start_checkpoint",
    "take",
    "usable_cpus",
]
