"""Measure what planning needs to know of the layers of a model; no torch in this process."""

from pathlib import Path

from makespan.errors import InputError
from makespan.leftovers import temporary_directory
from makespan.oobleck.planning import LayerProfile, ModelProfile
from makespan.oobleck.runtime._job import ChainJob
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory

__all__ = ["profile_chain"]

_WORKER = "makespan.oobleck.runtime._profiling_worker"
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
    makespan.oobleck.planning.ModelProfile
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
        (launcher or LocalLauncher()).run(Launch(_WORKER, request, n_replicas, directory))
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
