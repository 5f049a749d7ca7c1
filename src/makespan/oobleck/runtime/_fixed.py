"""Run jobs under plans that do not change, on processes of this machine or of an allocation; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from makespan.files import read_json
from makespan.oobleck.planning import HybridPlan
from makespan.oobleck.runtime._job import ChainJob
from makespan.oobleck.runtime._plans import plan_values
from makespan.runtime import Launch, Launcher, LocalLauncher

__all__ = ["FixedRun", "NodeSeen", "run_fixed"]

_WORKER = "makespan.oobleck.runtime._fixed_worker"


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
    (launcher or LocalLauncher()).run(Launch(_WORKER, request, n_processes, run_dir))
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
