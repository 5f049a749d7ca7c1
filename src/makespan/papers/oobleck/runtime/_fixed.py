"""Run a job under a plan that does not change, on processes of this machine or of an allocation; no torch."""

from dataclasses import dataclass
from pathlib import Path

from makespan.files import read_json
from makespan.papers.oobleck.planning import HybridPlan
from makespan.papers.oobleck.runtime._job import ChainJob
from makespan.papers.oobleck.runtime._plans import plan_values
from makespan.runtime import Launch, Launcher, LocalLauncher

__all__ = ["NodeSeen", "run_fixed"]

_WORKER = "makespan.papers.oobleck.runtime._fixed_worker"


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
    job: ChainJob,
    plan: HybridPlan,
    n_iterations: int,
    run_dir: Path,
    *,
    launcher: Launcher | None = None,
    with_checksums: bool = False,
    with_states: bool = False,
) -> dict[int, NodeSeen]:
    """Train for some iterations with one process a node; nothing is survived here.

    Parameters
    ----------
    job, plan, n_iterations
        What is trained, on what pipelines, and how long from the start.
    run_dir
        Directory of the run, which all processes see; it must not have been used.
    launcher
        What starts the processes; None for this machine with one thread each.
    with_checksums, with_states
        What nodes shall keep.

    Returns
    -------
    dict
        What each node saw.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed; the message has what it reported.
    """
    request = {
        "job": job.values(), "plan": plan_values(plan), "n_iterations": n_iterations,
        "with_checksums": with_checksums, "with_states": with_states,
    }  # fmt: skip
    (launcher or LocalLauncher()).run(Launch(_WORKER, request, len(plan.nodes), run_dir))
    return {node: _seen(run_dir, node, with_states) for node in plan.nodes}


def _seen(run_dir: Path, node: int, with_states: bool) -> NodeSeen:
    values = read_json(run_dir / f"seen-{node}.json")
    checksums = tuple({int(layer): one for layer, one in row.items()} for row in values["checksums"])
    return NodeSeen(
        tuple(values["losses"]), tuple(values["iter_times_s"]), tuple(values["n_sums"]), checksums,
        run_dir / f"states-{node}.pt" if with_states else None,
    )  # fmt: skip
