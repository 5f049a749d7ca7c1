"""Constants of the machine: measure them, and write them as the environment of the performance model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from makespan.cleanup import temporary_directory
from makespan.errors import InputError
from makespan.files import read_preset
from makespan.plans import ExecutionPlan
from makespan.profiling.profile import Measurements, ProfilePoint, model_of, train_missing
from makespan.runtime import (
    Launch,
    LocalLauncher,
    ProcessOptions,
    RunDirectory,
    SlurmLauncher,
    check_gpus,
    describe_machine,
    local_gpus,
    local_launcher,
    memory_bytes,
    slurm_device,
    usable_cpus,
)
from makespan.training import RunResult, TrainingJob
from makespan.workloads import Workload

_BANDWIDTH_WORKER = "makespan.profiling.bandwidth"
_FLOAT_BYTES = 4
_UNUSED_BYTES_PER_S = 1e12  # between processes, if there is only one
_STEPS, _WARM_UP = 10, 3
_EXCHANGE_RUNS, _PLANS = 1, 3  # of the exchange, and of each workload alone and divided
_TENSOR_BYTES = 2 * 4 * 2 / 2  # 16 bit, four all-reduces a layer, two passes each, half sent by each of two
_PASSES = ("forward_s", "backward_sync_s")
_LEAST_ADDED = 0.01  # of the time under division, so that the rate stays finite
_ACTIVATION_SHARE = 0.5  # the fitted forms count activations at 16 bit, training is in 32 bit


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Request to `makespan.profiling.bandwidth`: sizes of the messages to time [B]."""

    gradient_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured constants of a machine; an `InputError` names a rate or time that is out of range."""

    n_devices: int  # processes that run side by side without sharing one
    device_memory_bytes: float
    host_memory_bytes: float
    cpu_threads: int  # of each process
    ring_bytes_per_s: (
        float  # of one ring pass of a gradient-sized all-reduce: sent bytes of a process over time
    )
    tensor_bytes_per_s: float  # activations that tensor parallelism exchanges over the time that it adds
    transfer_bytes_per_s: float  # of one activation-sized transfer between two processes
    gather_efficiency: float  # time of a ring pass over the time that a partitioned optimiser adds to a step
    copy_bytes_per_s: float  # between device and host memory
    forward_launch_s: float  # time of a pass that does not depend on the number of samples
    backward_launch_s: float
    memory_bytes_per_s: float  # read and written by a copy on the device

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in self.__dataclass_fields__:
            value, may_be_zero = getattr(self, name), name.endswith("launch_s")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise InputError(f"measured {name} is {value!r}; expected a positive number")


def profiling_launcher(device: Literal["auto", "cpu", "cuda"], cpu_threads: int) -> LocalLauncher:
    """Return the launcher of profiling runs; ``auto`` uses GPUs if the machine has any.

    Raises an `InputError` for ``cuda`` without a GPU.
    """
    launcher = replace(local_launcher(device, 1), threads_per_process=cpu_threads)
    check_gpus(launcher, 1)
    return launcher


def allocation_launcher(
    point: ProfilePoint, device: Literal["auto", "cpu", "cuda"], gres: str, run_dir: Path
) -> SlurmLauncher:
    """Return a launcher for the nodes of the allocation in which this process runs.

    Parameters
    ----------
    point, device
        Processes of each node; ``auto`` for GPUs if each process has one that its torch can use.
    gres
        GPUs of each node, as requested for the allocation; job steps do not inherit them. Empty for none.
    run_dir
        Directory that all nodes can access, in which processes report their GPUs.
    """
    place = point.placement
    options = [f"--nodes={place.n_nodes}", f"--cpus-per-task={point.cpu_threads}", "--overlap"]
    if len(set(place.gpus_per_node)) == 1:
        options.append(f"--ntasks-per-node={place.gpus_per_node[-1]}")
    if gres:
        options.append(f"--gres={gres}")
    launcher = SlurmLauncher("cpu", tuple(options), point.cpu_threads)
    kind = slurm_device(launcher, place.n_gpus, run_dir) if device == "auto" else device
    return replace(launcher, device=kind)


def measure_rates(
    workloads: Sequence[Workload],
    n_processes: int,
    cpu_threads: int,
    launcher: LocalLauncher,
    kept: Measurements | None = None,
) -> MachineRates:
    """Measure the constants that all models on a machine share.

    With a single process, rates between processes are set to a large number.

    Parameters
    ----------
    workloads
        Workloads that determine the sizes of the messages and whose models are timed.
    n_processes, cpu_threads, launcher
        Processes of the exchange, on this machine, fewer if it has fewer GPUs; CPU threads of each; launcher
        that starts them.
    kept
        As for `measure_points`; counts `rate_runs` runs.
    """
    kept = kept or Measurements()
    n_processes = _n_meeting(n_processes, launcher)
    n_devices = launcher.n_devices or max(n_processes, usable_cpus() // cpu_threads)
    times = kept.measure(
        "exchange", lambda: _exchange_times(workloads, n_processes, cpu_threads, launcher), _EXCHANGE_RUNS
    )
    between, alone = _rates(times, n_processes), _alone(workloads, launcher, kept)
    # Time of a pass at zero samples: extrapolate the line through a batch of one and the whole batch.
    launch_s: dict[str, list[float]] = {name: [] for name in _PASSES}
    for spec, results in zip(workloads, alone, strict=True):
        for name, values in launch_s.items():
            single_s, whole_s = (result[name] for result in results[:2])
            growth_s = (whole_s - single_s) / max(spec.global_batch_size - 1, 1)
            values.append(max(single_s - growth_s, 0.0))
    return MachineRates(
        n_devices=n_devices,
        device_memory_bytes=_device_memory(launcher.device, n_devices),
        host_memory_bytes=memory_bytes(),
        cpu_threads=cpu_threads,
        copy_bytes_per_s=times["bytes"] / times["copy_s"],
        forward_launch_s=mean(launch_s["forward_s"]),
        backward_launch_s=mean(launch_s["backward_sync_s"]),
        memory_bytes_per_s=times["device_bytes"] / times["device_copy_s"],
        **between,
        **_added_by_division(workloads, alone, launcher, between["ring_bytes_per_s"], n_processes, kept),
    )


def rate_runs(n_workloads: int, n_processes: int, launcher: LocalLauncher) -> int:
    """Count the runs of `measure_rates`."""
    return _EXCHANGE_RUNS + _PLANS * n_workloads * min(_n_meeting(n_processes, launcher), 2)


def _n_meeting(n_processes: int, launcher: LocalLauncher) -> int:
    return min(n_processes, launcher.n_devices or n_processes)


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
    """Time the collectives, with messages of the mean sizes that the workloads send."""
    gradients = [spec.data_parallel_stack.gradient_bytes * spec.model.parameters for spec in workloads]
    activations = [
        _FLOAT_BYTES * (spec.global_batch_size // spec.max_microbatches) * spec.model.seq * spec.model.hidden
        for spec in workloads
    ]
    sizes = ExchangeSizes(round(mean(gradients)), round(mean(activations)))
    with temporary_directory("rates") as directory:
        options = [ProcessOptions(threads=cpu_threads)] * n_processes
        launcher.run(Launch(_BANDWIDTH_WORKER, asdict(sizes), n_processes, directory, options=options))
        times: dict[str, float] = RunDirectory(directory).result()
    return times


Times = Mapping[str, float]
"""Median times of the warm steps of a run [s]."""


def _alone(
    workloads: Sequence[Workload], launcher: LocalLauncher, kept: Measurements
) -> list[tuple[Times, ...]]:
    """Train each workload in one process: a batch of one, the whole batch, and the same in micro-batches."""
    plans = [(_whole(1), _whole(spec.global_batch_size), _plan(spec)) for spec in workloads]
    return _median_times("alone", workloads, plans, launcher, kept)


def _median_times(
    how: str,
    workloads: Sequence[Workload],
    plans: Sequence[Sequence[ExecutionPlan]],
    launcher: LocalLauncher,
    kept: Measurements,
) -> list[tuple[Times, ...]]:
    """Train each workload under its plans, and return the median times of each."""
    jobs = {
        f"rates {how}: {spec.key}, part {part + 1}": TrainingJob(model_of(spec), plan, _STEPS)
        for spec, members in zip(workloads, plans, strict=True)
        for part, plan in enumerate(members)
    }
    medians = iter(train_missing(jobs, _medians, launcher, kept))
    return [tuple(next(medians) for _ in members) for members in plans]


def _medians(result: RunResult) -> dict[str, float]:
    warm = result.times[_WARM_UP:]
    times = {name: median(getattr(step, name) for step in warm) for name in ("step_s", *_PASSES)}
    return times | {"passes_s": median(sum(getattr(step, name) for name in _PASSES) for step in warm)}


def _added_by_division(
    workloads: Sequence[Workload],
    alone: Sequence[Sequence[Times]],
    launcher: LocalLauncher,
    ring_bytes_per_s: float,
    n_processes: int,
    kept: Measurements,
) -> dict[str, float]:
    """Return rates from the time that dividing a model over two processes adds to a step.

    Tensor parallelism adds the exchange of activations; a partitioned optimiser (ZeRO) adds the gathering of
    parameters.
    """
    if n_processes == 1:
        return {"tensor_bytes_per_s": _UNUSED_BYTES_PER_S, "gather_efficiency": 1.0}
    plans = [(_plan(spec, tp=2), _plan(spec, dp=2), _plan(spec, dp=2, zero_stage=2)) for spec in workloads]
    two = _median_times("divided", workloads, plans, launcher, kept)
    moved = ring_s = tensor_s = gather_s = 0.0
    for spec, (*_, single), (tensor, whole, divided) in zip(workloads, alone, two, strict=True):
        activations = sum(block.n_layers * block.seq * block.hidden for block in spec.model.blocks)
        moved += _TENSOR_BYTES * spec.global_batch_size * activations
        ring_s += _FLOAT_BYTES * spec.model.parameters / 2 / ring_bytes_per_s
        tensor_s += _difference_s(tensor["passes_s"], single["passes_s"] / 2)  # each computes half
        gather_s += _difference_s(divided["step_s"], whole["step_s"])
    return {"tensor_bytes_per_s": moved / tensor_s, "gather_efficiency": ring_s / gather_s}


def _whole(batch: int) -> ExecutionPlan:
    return ExecutionPlan(global_batch_size=batch, micro_batch_size=batch)


def _plan(spec: Workload, dp: int = 1, tp: int = 1, zero_stage: int = 0) -> ExecutionPlan:
    batch, steps = spec.global_batch_size, spec.max_microbatches if dp == 1 else 1
    return ExecutionPlan(
        dp=dp, tp=tp, zero_stage=zero_stage, grad_accum_steps=steps, global_batch_size=batch,
        micro_batch_size=batch // steps // dp,
    )  # fmt: skip


def _difference_s(longer_s: float, shorter_s: float) -> float:
    return max(longer_s - shorter_s, _LEAST_ADDED * longer_s)


def _device_memory(kind: str, n_devices: int) -> float:
    if kind == "cpu":
        return memory_bytes() / n_devices
    return min(local_gpus().memory_bytes)


def measured_on(launcher: LocalLauncher) -> str:
    """Say what was measured, for the sources of constants: the GPUs if there are any, and the processor."""
    processor = describe_machine()["processor"]
    if launcher.device == "cpu":
        return f"measured on {processor}"
    return f"measured on {', '.join(sorted(set(local_gpus(launcher.interpreter).names)))} beside {processor}"


def environment_text(rates: MachineRates, source: str) -> str:
    """Return the environment of a measured machine, as text for `makespan.perf.load_environment`.

    Each constant has the ``source`` (machine, time and method).
    """
    preset = read_preset("makespan.profiling", "environment")
    constants = {
        name: {"value": value, "unit": unit, "source": f"{how}; {source}"}
        for name, (value, unit, how) in _measured(rates).items()
    }
    lines = ["# Written by the profiler of makespan; measure again rather than edit.", ""]
    lines += _table("cluster", {"n_nodes": 1})
    gpu = {
        "peak_flop_per_s": {"fp32": 1e12},  # no fitted model reads it
        "memory_bytes": float(rates.device_memory_bytes),
        "memory_bandwidth_bytes_per_s": float(rates.memory_bytes_per_s),
        "reserved_bytes": 0.0,
        "launch_gap_s": 1e-6,
        "memory_efficiency": 1.0,
        "source": source,
    }
    node = {
        "n_gpus": rates.n_devices,
        "intra_bandwidth_bytes_per_s": float(rates.ring_bytes_per_s),
        "intra_kind": "switch",
        "pcie_bandwidth_bytes_per_s": float(rates.copy_bytes_per_s),
        "n_nics": 1,
        "nic_bandwidth_bytes_per_s": float(rates.ring_bytes_per_s),
        "gpus_per_nic": rates.n_devices,
        "cpu_threads": rates.cpu_threads * rates.n_devices,
        "host_memory_bytes": float(rates.host_memory_bytes),
        "host_bandwidth_bytes_per_s": float(rates.copy_bytes_per_s),
        "source": source,
    }
    lines += _table("cluster.gpu", gpu)
    lines += _table("cluster.node", node | preset["node"])
    lines += _table("cluster.network", {"latency_s": preset["node"]["intra_latency_s"]})
    for name, entry in sorted({**preset["constants"], **constants}.items()):
        lines += _table(f"constants.{name}", entry)
    for form, priors in preset["priors"].items():
        for name, entry in priors.items():
            lines += _table(f"priors.{form}.{name}", entry)
    return "\n".join(lines)


def _measured(rates: MachineRates) -> dict[str, tuple[float, str, str]]:
    """Return value, unit and method of each constant; several constants share one measurement."""
    ring = (rates.ring_bytes_per_s, "B/s", "ring pass of a gradient-sized all-reduce")
    transfer = (_ACTIVATION_SHARE * rates.transfer_bytes_per_s, "B/s", "half the rate of a transfer")
    tensor = (rates.tensor_bytes_per_s, "B/s", "activations exchanged over time added by tensor parallelism")
    forward = (rates.forward_launch_s, "s", "time of a forward pass at no samples")
    gather = "ring pass of the gradients over time added by a partitioned optimiser"
    return {
        "flat_bandwidth_bytes_per_s": ring,
        "intra_bandwidth_bytes_per_s": ring,
        "nic_bandwidth_bytes_per_s": ring,
        "pcie_bandwidth_bytes_per_s": (rates.copy_bytes_per_s, "B/s", "copy between device and host"),
        "tp_bandwidth_bytes_per_s": tensor,
        "tp_inter_bandwidth_bytes_per_s": tensor,
        "p2p_bandwidth_bytes_per_s": transfer,
        "gather_efficiency": (rates.gather_efficiency, "1", gather),
        "forward_launch_s": forward,
        "async_launch_s": forward,
        "backward_launch_s": (rates.backward_launch_s, "s", "time of a backward pass at no samples"),
        "reference_cpu_threads": (float(rates.cpu_threads), "threads", "threads per process while profiling"),
    }


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items()), ""]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value) if isinstance(value, str) else repr(value)
