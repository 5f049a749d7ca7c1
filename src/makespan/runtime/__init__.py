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

from makespan.runtime.checkpoints import (
    Checkpoint as Checkpoint,
    discard_partial as discard_partial,
    finish_checkpoint as finish_checkpoint,
    latest_checkpoint as latest_checkpoint,
    sound_checkpoint as sound_checkpoint,
    start_checkpoint as start_checkpoint,
)
from makespan.runtime.forkserver import Process as Process
from makespan.runtime.launch import (
    Launch as Launch,
    Launcher as Launcher,
    LocalLauncher as LocalLauncher,
    ProcessOptions as ProcessOptions,
    RunDirectory as RunDirectory,
    SlurmLauncher as SlurmLauncher,
    check_gpus as check_gpus,
    describe_machine as describe_machine,
    local_gpus as local_gpus,
    local_launcher as local_launcher,
    memory_bytes as memory_bytes,
    slurm_device as slurm_device,
    usable_cpus as usable_cpus,
)
from makespan.runtime.locks import (
    acquire as acquire,
    is_locked as is_locked,
)
from makespan.runtime.rendezvous import (
    Identity as Identity,
    choose_device as choose_device,
    end_worker as end_worker,
    join as join,
    run_worker as run_worker,
)
