"""Run a job under fixed plans, and profile its layers; imports no torch.

Training and timing happen in processes of this machine or of an allocation, which import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from makespan.arguments import check_range
from makespan.cleanup import temporary_directory
from makespan.files import read_json
from makespan.oobleck.job import ChainJob
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.requests import FIXED_RUNS, PROFILING, FixedRun as FixedRun, ProfilingRequest
from makespan.runtime import Launch, Launcher, LocalLauncher, ProgressListener, RunDirectory

_FIXED_WORKER = "makespan.oobleck.fixed_worker"


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """Observations of a node, by iteration.

    Parameters
    ----------
    losses
        Mean loss of the global batch before the step.
    iter_times_s
        Wall time of passes, sums and step [s].
    n_sums
        Sums of gradients in which the node took part.
    checksums
        SHA-256 of the state of each layer that the node holds, after the step; empty if not asked for.
    states
        File with the states of its layers at the end (`torch.load`); None if not asked for.
    """

    losses: tuple[float, ...]
    iter_times_s: tuple[float, ...]
    n_sums: tuple[int, ...]
    checksums: tuple[dict[int, str], ...]
    states: Path | None


def run_fixed(
    runs: Sequence[FixedRun], run_dir: Path, launcher: Launcher | None = None
) -> list[dict[int, NodeSeen]]:
    """Train one job after the other with one process per node; the loss of a process ends the call.

    Parameters
    ----------
    runs
        Jobs and plans; processes are reused from one run to the next.
    run_dir
        Directory of the runs, which all processes see; it must not have been used.
    launcher
        Starts the processes; None for this machine with one thread each.

    Returns
    -------
    list
        Observations by node, run by run.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed; the message contains its report.
    """
    request = FIXED_RUNS.dump_python(list(runs), mode="json")
    n_processes = max(len(run.plan.nodes) for run in runs)
    (launcher or LocalLauncher()).run(Launch(_FIXED_WORKER, request, n_processes, run_dir))
    seen: list[dict[int, NodeSeen]] = []
    for number, run in enumerate(runs):
        seen.append({})
        for node in run.plan.nodes:
            values = read_json(run_dir / f"seen-{number}-{node}.json")
            seen[-1][node] = NodeSeen(
                tuple(values["losses"]),
                tuple(values["iter_times_s"]),
                tuple(values["n_sums"]),
                tuple({int(layer): sha for layer, sha in row.items()} for row in values["checksums"]),
                run_dir / f"states-{number}-{node}.pt" if run.with_states else None,
            )
    return seen


# --- Profiling --------------------------------------------------------------------------------------

_PROFILING_WORKER = "makespan.oobleck.profiling_worker"
_SHORTEST_S = 1e-9


def profile_chain(
    job: ChainJob,
    *,
    n_replicas: int = 2,
    repeats: int = 5,
    warm_ups: int = 2,
    launcher: Launcher | None = None,
    run_dir: Path | None = None,
    progress: ProgressListener | None = None,
) -> ModelProfile:
    """Time the layers of a model with one microbatch, on the available hardware.

    Forward passes, backward passes and sums of gradients among replicas are measured; each is a median. Bytes
    of activations count the tensors that the backward pass needs.

    Parameters
    ----------
    job
        The model, and the size of a microbatch.
    n_replicas
        Largest number of processes among which sums of gradients are timed.
    repeats, warm_ups
        Timed and untimed runs; at least 5 timed ones.
    launcher
        Starts the processes; None for this machine with one thread each.
    run_dir
        Directory of the run, which all processes see and which has not been used; None for a temporary one of
        this machine.
    progress
        Is told how many measurements are done, of how many, and what is measured now.

    Returns
    -------
    makespan.oobleck.profile.ModelProfile
        Times in seconds; a pass that takes no time gets the least time that a profile may have.

    Raises
    ------
    makespan.errors.InputError, makespan.errors.WorkerError
        Fewer runs than accepted; a process failed.
    """
    limits = {"repeats": (repeats, 5), "warm_ups": (warm_ups, 0), "n_replicas": (n_replicas, 1)}
    for name, (number, least) in limits.items():
        check_range(name, number, least)
    request = PROFILING.dump_python(ProfilingRequest(job, repeats, warm_ups), mode="json")
    with temporary_directory("profile") as path:
        directory = RunDirectory(run_dir or path)
        launch = Launch(_PROFILING_WORKER, request, n_replicas, directory.path)
        if progress is not None:
            launch = replace(launch, on_beat=partial(directory.tell, progress))
        (launcher or LocalLauncher()).run(launch)
        rows = directory.result()
    layers = (
        LayerProfile(
            max(row["forward_s"], _SHORTEST_S), max(row["backward_s"], _SHORTEST_S), {1: 0.0},
            {int(count): time_s for count, time_s in row["sums_s"].items()},
            row["parameter_bytes"], row["activation_bytes"],
        )
        for row in rows
    )  # fmt: skip
    return ModelProfile(job.model.rpartition(":")[2], tuple(layers), job.microbatch_size)
