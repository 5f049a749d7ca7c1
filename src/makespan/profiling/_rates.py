"""Measure the machine itself: bandwidths between processes, and what a pass costs without samples."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Literal

from makespan.plans import ExecutionPlan
from makespan.profiling._design import ProfilePoint, model_of
from makespan.profiling._environment import MachineRates
from makespan.runtime import (
    Launch,
    LocalLauncher,
    ProcessOptions,
    RunDirectory,
    SlurmLauncher,
    memory_bytes,
    usable_cpus,
    visible_gpus,
)
from makespan.training import RunResult, TrainingJob, train_all
from makespan.units import GIB
from makespan.workloads import Workload

__all__ = ["allocation_launcher", "measure_rates", "profiling_launcher"]

_BANDWIDTH_WORKER = "makespan.profiling._bandwidth"
_FLOAT_BYTES = 4
_MIB = GIB / 1024
_UNUSED_BYTES_PER_S = 1e12  # between processes where there is one alone
_STEPS, _WARM_UP = 14, 4
_TENSOR_BYTES = 2 * 4 * 2 / 2  # 16 bit, four all-reduces a layer, two passes each, half sent by each of two
_LEAST_ADDED = 0.01  # of the time under division, so that the rate stays finite
_PARTITIONED = {"dp": 2, "zero_stage": 2}


def profiling_launcher(device: Literal["auto", "cpu", "cuda"], cpu_threads: int) -> LocalLauncher:
    """Return where models are profiled.

    Parameters
    ----------
    device
        ``auto`` for GPUs if there are any.
    cpu_threads
        CPU threads a process.
    """
    if device == "auto":
        device = "cuda" if visible_gpus() else "cpu"
    return LocalLauncher(device, threads_per_process=cpu_threads)


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
    between = _rates(times, n_processes)
    forward_s, backward_s = _launch_times(workloads, launcher)
    return MachineRates(
        n_devices=n_devices,
        device_memory_bytes=_device_memory(launcher.device, n_devices),
        host_memory_bytes=memory_bytes(),
        cpu_threads=cpu_threads,
        copy_bytes_per_s=times["bytes"] / times["copy_s"],
        forward_launch_s=forward_s,
        backward_launch_s=backward_s,
        ring_bytes_per_s=between["ring_bytes_per_s"],
        transfer_bytes_per_s=between["transfer_bytes_per_s"],
        **_added_by_division(workloads, launcher, between["ring_bytes_per_s"], n_processes),
    )


def _rates(times: dict[str, float], n_processes: int) -> dict[str, float]:
    """Turn times of collectives into rates of ring passes: each sends (n-1)/n of the bytes."""
    if n_processes == 1:
        return dict.fromkeys(("ring_bytes_per_s", "transfer_bytes_per_s"), _UNUSED_BYTES_PER_S)
    share = (n_processes - 1) / n_processes
    return {
        "ring_bytes_per_s": share * times["bytes"] / (times["all_reduce_s"] / 2),
        "transfer_bytes_per_s": times["activation_bytes"] / times["transfer_s"],
    }


def _exchange_times(
    workloads: Sequence[Workload], n_processes: int, cpu_threads: int, launcher: LocalLauncher
) -> dict[str, float]:
    request = {
        "gradient_bytes": round(mean(_FLOAT_BYTES * spec.model.parameters for spec in workloads)),
        "activation_bytes": round(mean(_activation_bytes(spec) for spec in workloads)),
    }
    with tempfile.TemporaryDirectory(prefix="makespan-") as name:
        options = [ProcessOptions(threads=cpu_threads)] * n_processes
        launcher.run(Launch(_BANDWIDTH_WORKER, request, n_processes, Path(name), options=options))
        found: dict[str, float] = RunDirectory(Path(name)).result()
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


def _added_by_division(
    workloads: Sequence[Workload], launcher: LocalLauncher, ring_bytes_per_s: float, n_processes: int
) -> dict[str, float]:
    """Rates from what dividing a model over two processes adds to a step.

    The times hold what dividing costs as well as the messages, many small ones in place of one large;
    on small models that is the larger part. Tensor parallelism gives the bytes of activations that it
    exchanges over the time that it adds [B/s], the partitioned optimiser the time of one ring pass of
    the gradients over the time that it adds [1].
    """
    if n_processes == 1:
        return {"tensor_bytes_per_s": _UNUSED_BYTES_PER_S, "gather_efficiency": 1.0}
    alone = train_all([_job(spec) for spec in workloads], launcher=launcher)
    two = train_all(
        [_job(spec, **how) for spec in workloads for how in ({"tp": 2}, {"dp": 2}, _PARTITIONED)],
        launcher=launcher,
    )
    moved = ring_s = tensor_s = gather_s = 0.0
    for spec, one, tensor, whole, divided in zip(
        workloads, alone, two[::3], two[1::3], two[2::3], strict=True
    ):
        moved += (
            _TENSOR_BYTES
            * spec.global_batch_size
            * sum(block.n_layers * block.seq * block.hidden for block in spec.model.blocks)
        )
        ring_s += _FLOAT_BYTES * spec.model.parameters / 2 / ring_bytes_per_s
        tensor_s += _difference_s(_passes_s(tensor), _passes_s(one) / 2)
        gather_s += _difference_s(_step_s(divided), _step_s(whole))
    return {"tensor_bytes_per_s": moved / tensor_s, "gather_efficiency": ring_s / gather_s}


def _job(spec: Workload, dp: int = 1, tp: int = 1, zero_stage: int = 0) -> TrainingJob:
    batch, steps = spec.global_batch_size, spec.max_microbatches if dp == 1 else 1
    plan = ExecutionPlan(
        dp=dp,
        tp=tp,
        zero_stage=zero_stage,
        global_batch_size=batch,
        micro_batch_size=batch // steps // dp,
        grad_accum_steps=steps,
    )
    return TrainingJob(model_of(spec), plan, _STEPS)


def _difference_s(longer_s: float, shorter_s: float) -> float:
    return max(longer_s - shorter_s, _LEAST_ADDED * longer_s)


def _passes_s(result: RunResult) -> float:
    """Median time of the forward and backward passes of a step [s]."""
    return median(step.forward_s + step.backward_sync_s for step in result.times[_WARM_UP:])


def _step_s(result: RunResult) -> float:
    """Median time of a step [s]."""
    return median(step.step_s for step in result.times[_WARM_UP:])


def _device_memory(kind: str, n_devices: int) -> float:
    if kind == "cpu":
        return memory_bytes() / n_devices
    return min(float(gpu["memory.total"].split()[0]) * _MIB for gpu in visible_gpus())
