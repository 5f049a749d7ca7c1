"""Measure the machine itself: bandwidths between processes, and what a pass costs without samples."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from makespan.plans import ExecutionPlan
from makespan.training._design import ProfilePoint, model_of
from makespan.training._environment import MachineRates
from makespan.training._files import REQUEST, RESULT, read_json, write_json
from makespan.training._job import RunResult, TrainingJob
from makespan.training._launch import LocalLauncher, SlurmLauncher
from makespan.training._machine import has_gpu, memory_bytes, usable_cpus, visible_gpus
from makespan.training._run import train_all
from makespan.units import GIB
from makespan.workloads import Workload

__all__ = ["allocation_launcher", "measure_rates", "profiling_launcher"]

_BANDWIDTH_WORKER = (sys.executable, "-m", "makespan.training._bandwidth")
_FLOAT_BYTES = 4
_MIB = GIB / 1024
_UNUSED_BYTES_PER_S = 1e12  # between processes where there is one alone
_STEPS, _WARM_UP = 8, 3
_TENSOR_BYTES = 2 * 4 * 2 / 2  # 16 bit, four all-reduces a layer, two passes each, half sent by each of two
_LEAST_ADDED = 0.01  # of the time under tensor parallelism, so that the rate stays finite


def profiling_launcher(device: Literal["auto", "cpu", "cuda"], cpu_threads: int) -> LocalLauncher:
    """Return where models are profiled.

    Parameters
    ----------
    device
        ``auto`` for GPUs if there are any.
    cpu_threads
        CPU threads a process.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" or (device == "auto" and has_gpu()) else "cpu"
    return LocalLauncher(device=kind, threads_per_process=cpu_threads)


def allocation_launcher(
    point: ProfilePoint, device: Literal["auto", "cpu", "cuda"], gres: str
) -> SlurmLauncher:
    """Return a launcher for the nodes of the allocation in which this process runs.

    Parameters
    ----------
    point
        Its placement says how many processes each node gets.
    device
        ``auto`` for GPUs if this node has any.
    gres
        GPUs of each node, as the allocation was asked for; steps do not inherit them. Empty for none.
    """
    kind, place = profiling_launcher(device, point.cpu_threads).device, point.placement
    options = [f"--nodes={place.n_nodes}", f"--cpus-per-task={point.cpu_threads}", "--overlap"]
    if len(set(place.gpus_per_node)) == 1:
        options.append(f"--ntasks-per-node={place.gpus_per_node[-1]}")
    if gres:
        options.append(f"--gres={gres}")
    return SlurmLauncher(kind, tuple(options), point.cpu_threads)


def measure_rates(
    workloads: Sequence[Workload], n_processes: int, cpu_threads: int, launcher: LocalLauncher
) -> MachineRates:
    """Measure the constants that all models on a machine share.

    Parameters
    ----------
    workloads
        Their sizes are those of the messages, and their models are those whose passes are timed.
    n_processes
        Processes of the exchange, on this machine.
    cpu_threads
        CPU threads a process.
    launcher
        Where the processes run.

    Returns
    -------
    MachineRates
        Rates [B/s] and times [s]. With one process alone the rates between processes are only large.
    """
    n_devices = max(n_processes, launcher.n_devices or usable_cpus() // cpu_threads)
    times = _exchange_times(workloads, min(n_processes, n_devices), cpu_threads, launcher)
    forward_s, backward_s = _launch_times(workloads, launcher)
    return MachineRates(
        n_devices=n_devices,
        device_memory_bytes=_device_memory(launcher.device, n_devices),
        host_memory_bytes=memory_bytes(),
        cpu_threads=cpu_threads,
        copy_bytes_per_s=times["bytes"] / times["copy_s"],
        forward_launch_s=forward_s,
        backward_launch_s=backward_s,
        tensor_bytes_per_s=_tensor_rate(workloads, launcher) if n_processes > 1 else _UNUSED_BYTES_PER_S,
        **_rates(times, n_processes),
    )


def _rates(times: dict[str, float], n_processes: int) -> dict[str, float]:
    """Turn times of collectives into rates of ring passes: each sends (n-1)/n of the bytes."""
    if n_processes == 1:
        names = ("ring_bytes_per_s", "transfer_bytes_per_s")
        return dict.fromkeys(names, _UNUSED_BYTES_PER_S) | {"gather_efficiency": 1.0}
    share = (n_processes - 1) / n_processes
    pass_s = times["all_reduce_s"] / 2
    return {
        "ring_bytes_per_s": share * times["bytes"] / pass_s,
        "transfer_bytes_per_s": times["activation_bytes"] / times["transfer_s"],
        "gather_efficiency": pass_s / times["all_gather_s"],
    }


def _exchange_times(
    workloads: Sequence[Workload], n_processes: int, cpu_threads: int, launcher: LocalLauncher
) -> dict[str, float]:
    request: dict[str, Any] = {
        "device": launcher.device,
        "threads": cpu_threads,
        "stall_timeout_s": launcher.stall_timeout_s,
        "gradient_bytes": round(mean(_FLOAT_BYTES * spec.model.parameters for spec in workloads)),
        "activation_bytes": round(mean(_activation_bytes(spec) for spec in workloads)),
    }
    with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
        run_dir = Path(directory)
        write_json(request, run_dir / REQUEST)
        replace(launcher, command=_BANDWIDTH_WORKER).run(n_processes, run_dir)
        found: dict[str, float] = read_json(run_dir / RESULT)
    return found


def _activation_bytes(spec: Workload) -> int:
    samples = spec.global_batch_size // spec.max_microbatches
    return _FLOAT_BYTES * samples * spec.model.seq * spec.model.hidden


def _launch_times(workloads: Sequence[Workload], launcher: LocalLauncher) -> tuple[float, float]:
    """Time of a forward and of a backward pass at no samples, by a line through two batch sizes [s]."""
    jobs = [
        TrainingJob(model_of(spec), ExecutionPlan(global_batch_size=batch, micro_batch_size=batch), _STEPS)
        for spec in workloads
        for batch in (1, spec.global_batch_size)
    ]
    results = train_all(jobs, launcher=launcher)
    found: dict[str, list[float]] = {"forward_s": [], "backward_sync_s": []}
    for number, spec in enumerate(workloads):
        for name, values in found.items():
            one, many = (
                median(getattr(step, name) for step in result.times[_WARM_UP:])
                for result in results[2 * number : 2 * number + 2]
            )
            growth = (many - one) / max(spec.global_batch_size - 1, 1)
            values.append(max(one - growth, 0.0))
    return mean(found["forward_s"]), mean(found["backward_sync_s"])


def _tensor_rate(workloads: Sequence[Workload], launcher: LocalLauncher) -> float:
    """Bytes of activations that two tensor-parallel processes exchange over the time that this adds [B/s].

    The time holds what splitting the operators costs as well as the messages; on small models it is
    the larger part.
    """
    moved = added_s = 0.0
    alone = train_all([_tensor_job(spec, 1) for spec in workloads], launcher=launcher)
    split = train_all([_tensor_job(spec, 2) for spec in workloads], launcher=launcher)
    for spec, one, two in zip(workloads, alone, split, strict=True):
        moved += (
            _TENSOR_BYTES
            * spec.global_batch_size
            * sum(block.n_layers * block.seq * block.hidden for block in spec.model.blocks)
        )
        added_s += max(_passes_s(two) - _passes_s(one) / 2, _LEAST_ADDED * _passes_s(two))
    return moved / added_s


def _tensor_job(spec: Workload, tp: int) -> TrainingJob:
    batch, steps = spec.global_batch_size, spec.max_microbatches
    plan = ExecutionPlan(
        tp=tp, global_batch_size=batch, micro_batch_size=batch // steps, grad_accum_steps=steps
    )
    return TrainingJob(model_of(spec), plan, _STEPS)


def _passes_s(result: RunResult) -> float:
    """Median time of the forward and backward passes of a step [s]."""
    return median(step.forward_s + step.backward_sync_s for step in result.times[_WARM_UP:])


def _device_memory(kind: str, n_devices: int) -> float:
    if kind == "cpu":
        return memory_bytes() / n_devices
    return min(float(gpu["memory.total"].split()[0]) * _MIB for gpu in visible_gpus())
