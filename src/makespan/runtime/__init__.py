"""Distributed runs: launch, rendezvous and watching of processes, run directory, checkpoints, machine facts.

The package does not know what the processes compute, and imports torch only when a worker calls `join` or
`choose_device`.

- `LocalLauncher` and `SlurmLauncher` run a `Launch`, any worker with a request, and watch it: when a process
  is lost, either all others are killed or they are told
- a worker calls `run_worker` with its main function and `join` to meet the others; its `RunDirectory` has the
  request, stop requests and lost processes
- `start_checkpoint` and `finish_checkpoint` write a checkpoint that is complete or absent;
  `latest_checkpoint` finds the newest, `sound_checkpoint` the newest that is undamaged
- `makespan.runtime.coordinator` and `makespan.runtime.node` are the two sides of a run that survives the loss
  of processes: `makespan.runtime.protocol` decides when all regroup, an `Engine` trains whatever it trains
- `acquire` locks a file for a process until it ends, and `is_locked` returns whether a process holds the
  lock; `held_directory` holds a directory by such a file
- `local_gpus` and `slurm_device` ask torch, in a process that would use them, for the available GPUs
- `describe_machine` describes the machine of a measurement; `resident_bytes` is the memory of a process,
  `keep_freed` lets its heap keep what is freed, and a `KeptHeap` does so within a bound
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
    GpuSlots as GpuSlots,
    KeptHeap as KeptHeap,
    Launch as Launch,
    Launcher as Launcher,
    LocalLauncher as LocalLauncher,
    ProcessOptions as ProcessOptions,
    ProgressListener as ProgressListener,
    RunDirectory as RunDirectory,
    SlurmLauncher as SlurmLauncher,
    check_gpus as check_gpus,
    describe_machine as describe_machine,
    keep_freed as keep_freed,
    local_gpus as local_gpus,
    local_launcher as local_launcher,
    memory_bytes as memory_bytes,
    resident_bytes as resident_bytes,
    slurm_device as slurm_device,
    usable_cpus as usable_cpus,
)
from makespan.runtime.locks import (
    acquire as acquire,
    held_directory as held_directory,
    is_locked as is_locked,
)
from makespan.runtime.rendezvous import (
    Identity as Identity,
    check_device as check_device,
    choose_device as choose_device,
    end_worker as end_worker,
    gpu_name as gpu_name,
    hold_gpu as hold_gpu,
    join as join,
    linked as linked,
    run_worker as run_worker,
)
