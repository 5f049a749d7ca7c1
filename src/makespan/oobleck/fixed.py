"""Run a job under plans that do not change, and profile its layers; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from makespan.cleanup import temporary_directory
from makespan.errors import InputError
from makespan.files import read_json
from makespan.oobleck.job import ChainJob
from makespan.oobleck.plan import HybridPlan, plan_values
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory

# ------------------------------------------------------------------------------------------------
# Run jobs under plans that do not change, on processes of this machine or of an allocation; no torch.

_FIXED_WORKER = "makespan.oobleck.fixed_worker"


@dataclass(frozen=True, slots=True)
class FixedRun:
    """A job, the plan under which it is trained from its start, and for how many iterations.

    ``with_checksums`` and ``with_states`` say what nodes keep beside losses and times.
    """

    job: ChainJob
    plan: HybridPlan
    n_iterations: int
    with_checksums: bool = False
    with_states: bool = False


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What a node saw of a run, by iteration.

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
    """Train one job after the other with a process a node; nothing is survived here.

    Parameters
    ----------
    runs
        What is trained; processes stay from one to the next.
    run_dir
        Directory of the runs, which all processes see; it must not have been used.
    launcher
        What starts the processes; None for this machine with one thread each.

    Returns
    -------
    list
        What each node saw, run by run.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed; the message has what it reported.
    """
    request = [
        {
            "job": one.job.values(), "plan": plan_values(one.plan), "n_nodes": len(one.plan.nodes),
            "n_iterations": one.n_iterations, "with_checksums": one.with_checksums,
            "with_states": one.with_states,
        }
        for one in runs
    ]  # fmt: skip
    n_processes = max(len(one.plan.nodes) for one in runs)
    (launcher or LocalLauncher()).run(Launch(_FIXED_WORKER, request, n_processes, run_dir))
    return [
        {node: _seen(run_dir, f"{number}-{node}", one) for node in one.plan.nodes}
        for number, one in enumerate(runs)
    ]


def _seen(run_dir: Path, name: str, run: FixedRun) -> NodeSeen:
    values = read_json(run_dir / f"seen-{name}.json")
    checksums = tuple({int(layer): one for layer, one in row.items()} for row in values["checksums"])
    return NodeSeen(
        tuple(values["losses"]), tuple(values["iter_times_s"]), tuple(values["n_sums"]), checksums,
        run_dir / f"states-{name}.pt" if run.with_states else None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Measure what planning needs to know of the layers of a model; no torch in this process.

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
) -> ModelProfile:
    """Time the layers of a model with one microbatch, on the hardware at hand.

    Forward and backward pass are medians, both measured; so are the sums of gradients among replicas. Bytes
    of activations are those of the tensors that the backward pass needs.

    Parameters
    ----------
    job
        The model, and the size of a microbatch.
    n_replicas
        Sums of gradients are timed among up to so many processes.
    repeats, warm_ups
        Timed and untimed runs; at least 5 timed ones.
    launcher
        What starts the processes; None for this machine with one thread each.
    run_dir
        Directory of the run, which all processes see and which has not been used; None for a temporary one of
        this machine.

    Returns
    -------
    makespan.oobleck.profile.ModelProfile
        Times in seconds; a layer without a pass of its own has the least time that a profile may have.

    Raises
    ------
    makespan.errors.InputError, makespan.errors.WorkerError
        Fewer runs than accepted; a process failed.
    """
    limits = {"repeats": (repeats, 5), "warm_ups": (warm_ups, 0), "n_replicas": (n_replicas, 1)}
    for name, (found, least) in limits.items():
        if found < least:
            raise InputError(f"{name} is {found}; accepted: a whole number >= {least}")
    request = {"job": job.values(), "repeats": repeats, "warm_ups": warm_ups}
    with temporary_directory("profile") as path:
        directory = run_dir or path
        (launcher or LocalLauncher()).run(Launch(_PROFILING_WORKER, request, n_replicas, directory))
        rows = RunDirectory(directory).result()
    layers = (
        LayerProfile(
            max(row["forward_s"], _SHORTEST_S), max(row["backward_s"], _SHORTEST_S), {1: 0.0},
            {int(count): time_s for count, time_s in row["sums_s"].items()},
            row["parameter_bytes"], row["activation_bytes"],
        )
        for row in rows
    )  # fmt: skip
    return ModelProfile(job.model.rpartition(":")[2], tuple(layers), job.microbatch_size)
