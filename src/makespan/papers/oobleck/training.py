"""Experiment ``hybrid``: nodes are killed within every phase of training, and join again."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.errors import CheckpointError, TrainingError
from makespan.oobleck.coordinator import Event
from makespan.oobleck.fixed import FixedRun, profile_chain, run_fixed
from makespan.oobleck.instantiation import distribute, enumerate_plans, event_time_s
from makespan.oobleck.job import ChainJob
from makespan.oobleck.oracle import replay
from makespan.oobleck.plan import HybridPlan, Pipeline
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.templates import make_templates
from makespan.oobleck.trainer import (
    PHASES,
    Fault,
    Faults,
    Killed,
    LiveOptions,
    LiveResult,
    Record,
    drain_nodes,
    train_relaunching,
    train_resilient,
)
from makespan.papers.oobleck.tables import HYBRID, HYBRID_KILLS, HYBRID_SUMMARY, PREDICTIONS
from makespan.runtime import usable_cpus

# ------------------------------------------------------------------------------------------------
# Experiment ``hybrid``: nodes are killed within every phase of training, and join again.

_MOST_ITERATIONS = 2000
_AFTER_LAST = 3
_SLOW_EXCHANGE_S = 10.0
_HEADS, _VOCABULARY = 4, 64


@dataclass(frozen=True, slots=True)
class _Trained:
    """One run with what it met."""

    name: str
    record: Record
    killed: list[Killed]
    checkpoint_reads: int


def hybrid_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Train jobs while processes are killed within announced phases, and compare them with one process.

    Every killed process is replaced by one that joins. The baseline writes checkpoints, and starts all
    processes anew after the same kills, without those that struck during a recovery.

    Parameters
    ----------
    cells
        The paper's cells by artifact; none is needed.
    options
        Fields of the block ``oobleck.hybrid``.

    Returns
    -------
    dict
        Tables ``hybrid``, ``hybrid_kills`` and ``hybrid_summary``, schemas `HYBRID`, `HYBRID_KILLS` and
        `HYBRID_SUMMARY`.

    Raises
    ------
    WorkerError, StateLost, InsufficientNodes
        A run failed.
    """
    protocol = options
    steps, kills, sums = [], list[dict[str, Any]](), list[dict[str, Any]]()
    with temporary_directory("hybrid") as folder:
        for number, faults in enumerate(drawn_faults(protocol)):
            job = _hybrid_job(protocol, number)
            ours, result = _train(protocol, job, faults, folder / f"job-{number}", f"job {number}, oobleck")
            losses, equal = _replayed(job, result)
            runs = [(ours, equal)]
            if number < protocol["baseline_jobs"]:
                again = _again(ours.killed)
                theirs = _relaunch(protocol, job, again, len(losses), folder / f"base-{number}", number)
                runs.append((theirs, True))
            for run, is_equal in runs:
                steps += _steps(run, losses)
                kills += _kills(run)
                sums.append(_summary(run, job, is_equal))
    tables = {HYBRID: steps, HYBRID_KILLS: kills, HYBRID_SUMMARY: sums}
    return {
        schema.name: schema.validate(pd.DataFrame(rows, columns=schema.names), schema.name)
        for schema, rows in tables.items()
    }


def drawn_faults(protocol: Mapping[str, Any]) -> Iterator[list[Fault]]:
    """Draw for each job which processes are killed, in which phase and when within it.

    Kinds are dealt to the jobs in turn; one in a recovery comes after one in a pass.
    """
    n_jobs = protocol["jobs"]
    phases = {kind: [phase for phase, one in PHASES.items() if one == kind] for kind in PHASES.values()}
    for number in range(n_jobs):
        rng = np.random.default_rng(number)
        counts = {kind: len(range(number, n, n_jobs)) for kind, n in protocol["kills"].items()}
        alone = [kind for kind in ("compute", "reduction", "commit") for _ in range(counts[kind])]
        order = [alone[index] for index in rng.permutation(len(alone))]
        found, left, iteration = [], counts["recovery"], 1
        turn = 0
        for kind in order:
            iteration += int(rng.integers(1, 3))
            found.append(_drawn(rng, str(rng.choice(phases[kind])), iteration, protocol))
            if kind == "compute" and left > 0:
                left -= 1
                phase = phases["recovery"][(number + turn) % len(phases["recovery"])]
                turn += 1
                found.append(_drawn(rng, phase, iteration, protocol))
        yield found


def _drawn(rng: np.random.Generator, phase: str, iteration: int, protocol: Mapping[str, Any]) -> Fault:
    delay_s = float(rng.uniform(0.0, protocol["most_delay_s"]))
    return Fault(phase, iteration, int(rng.integers(0, 1 << 16)), delay_s)


def _hybrid_job(protocol: Mapping[str, Any], seed: int) -> ChainJob:
    sizes = {
        "n_layers": protocol["layers"], "hidden": protocol["hidden"], "heads": _HEADS, "kv_heads": _HEADS,
        "ffn": 2 * protocol["hidden"], "seq": protocol["sequence"], "vocab": _VOCABULARY,
    }  # fmt: skip
    return ChainJob(
        model_options=sizes, n_microbatches=protocol["microbatches"],
        microbatch_size=protocol["microbatch_size"], seed=seed, data_seed=seed,
    )  # fmt: skip


def _profile(protocol: Mapping[str, Any]) -> ModelProfile:
    """Layers of equal times; exchanges among many pipelines are slow, so that some have several stages."""
    most = protocol["most_pipelines"]
    exchange = {n: 0.0 if n <= most else _SLOW_EXCHANGE_S for n in range(1, protocol["nodes"] + 2)}
    layer = LayerProfile(1e-3, 2e-3, {}, exchange, parameter_bytes=4.0 * protocol["hidden"] ** 2)
    return ModelProfile("hybrid", (layer,) * (protocol["layers"] + 2))


def _options(protocol: Mapping[str, Any], **more: Any) -> LiveOptions:
    return LiveOptions(protocol["nodes"], f=protocol["f"], checkpoint_interval_s=0.0, **more)


class _Watch:
    """Ends a run soon after the last fault, and counts starts from a checkpoint."""

    def __init__(self, run_dir: Path, faults: Faults) -> None:
        self.run_dir, self.faults = run_dir, faults
        self.left, self.reads = _AFTER_LAST, 0

    def __call__(self, event: Event) -> None:
        if event.kind == "plan":
            self.reads += event.values["work"]["origin"] is not None
        if event.kind == "commit" and self.faults.is_over:
            self.left -= 1
            if self.left == 0:
                drain_nodes(self.run_dir)


def _train(
    protocol: Mapping[str, Any], job: ChainJob, drawn: Sequence[Fault], path: Path, name: str
) -> tuple[_Trained, LiveResult]:
    faults, record = Faults(drawn), Record()
    watch = _Watch(path, faults)
    options = _options(protocol, n_replacements=len(drawn))
    result = train_resilient(
        job, _profile(protocol), _MOST_ITERATIONS, path, options, watch=watch, record=record, faults=faults
    )
    if not faults.is_over:
        raise TrainingError(f"{name}: {len(faults.pending)} of {len(drawn)} kills did not come to pass")
    return _Trained(name, record, faults.done, watch.reads), result


def _again(killed: Sequence[Killed]) -> list[Fault]:
    """Return the same kills at the same iterations, but those in recoveries, which a relaunch has not."""
    return [replace(one.fault, iteration=one.armed) for one in killed if not one.fault.is_next]


def _relaunch(
    protocol: Mapping[str, Any],
    job: ChainJob,
    drawn: Sequence[Fault],
    iterations: int,
    path: Path,
    number: int,
) -> _Trained:
    faults, record = Faults(drawn), Record()
    options = _options(protocol, checkpoint_every=protocol["checkpoint_every"])
    train_relaunching(job, _profile(protocol), iterations, path, options, record=record, faults=faults)
    return _Trained(f"job {number}, relaunch", record, faults.done, record.n_reads)


def _replayed(job: ChainJob, result: LiveResult) -> tuple[list[float], bool]:
    """Repeat a run in one process; losses, and whether they and all state have equal bits."""
    if result.checkpoint is None:
        raise CheckpointError("a run that ended well has no checkpoint")
    losses, equal = replay(job, result.plans, result.step, result.checkpoint)
    return losses, equal and result.iterations["loss"].tolist() == losses


def _steps(run: _Trained, losses: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of the table of iterations; of one that was done twice the last."""
    rows = {row["iteration"]: row for row in run.record.rows}
    found = []
    for step, row in sorted(rows.items()):
        struck = [one for one in run.killed if one.iteration == step]
        joined = sum(len(one.joined) for one in run.record.recoveries if one.iteration == step and step)
        pauses = [_pause(one) for one in struck]
        found.append(
            {
                "run": run.name, "step": step, "loss": row["loss"], "reference_loss": losses[step],
                "abs_difference": abs(row["loss"] - losses[step]), "n_pipelines": row["n_pipelines"],
                "n_processes": row["n_nodes"],
                "event": " ".join(["kill"] * len(struck) + ["join"] * joined) or None,
                "phase": ", ".join(one.phase for one in struck) or None,
                "recovery_wall_s": max(pauses) if pauses else None,
            }
        )  # fmt: skip
    return found


def _pause(one: Killed) -> float:
    return (one.first_s or 0.0) - (one.killed_s or 0.0)


def _kills(run: _Trained) -> list[dict[str, Any]]:
    return [
        {
            "run": run.name, "kill": number, "phase": one.phase, "kind": PHASES[one.fault.phase],
            "step": one.iteration,
            "released_wall_s": None if one.released_s is None else one.released_s - (one.killed_s or 0.0),
            "first_wall_s": _pause(one),
        }
        for number, one in enumerate(run.killed)
    ]  # fmt: skip


def _summary(run: _Trained, job: ChainJob, is_equal: bool) -> dict[str, Any]:
    rows, pauses = run.record.rows, [_pause(one) for one in run.killed]
    released = [(one.released_s or 0.0) - (one.killed_s or 0.0) for one in run.killed if one.released_s]
    n_done = len({row["iteration"] for row in rows})
    time_s = rows[-1]["end_wall_s"] - run.record.first_wall_s
    return {
        "run": run.name, "kills": len(run.killed), "iterations": n_done, "repeated": run.record.n_repeated,
        "median_pause_wall_s": statistics.median(pauses), "worst_pause_wall_s": max(pauses),
        "median_released_wall_s": statistics.median(released) if released else None,
        "worst_released_wall_s": max(released) if released else None,
        "goodput_samples_per_s": n_done * job.global_batch_size / time_s,
        "equal": is_equal, "pids_kept": run.record.keeps_processes, "checkpoint_reads": run.checkpoint_reads,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Measured iterations of small models beside what planning says of them.

Options = Mapping[str, Any]


def predictions_experiment(cells: Mapping[str, pd.DataFrame], options: Options) -> dict[str, pd.DataFrame]:
    """Profile small models, plan them, train under the plans, and set both times side by side.

    Nothing else should run meanwhile.

    Parameters
    ----------
    cells
        Printed cells; none are read.
    options
        ``n_layers`` and ``n_microbatches``, both lists: layers between embedding and head, microbatches of an
        iteration; ``microbatch_size``; ``most_nodes``, all plans on up to so many; ``profile_repeats``, timed
        passes of a layer; ``iterations`` and ``warm_ups``, timed and not.

    Returns
    -------
    dict
        ``predictions``, a row a model, number of microbatches and plan.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed.
    """
    rows = [row for n_layers in options["n_layers"] for row in _of_model(n_layers, options)]
    return {"predictions": PREDICTIONS.validate(pd.DataFrame(rows), "predictions")}


def _of_model(n_layers: int, options: Options) -> list[dict[str, Any]]:
    """Profile a model, and train it at once, while the machine is as it was."""
    jobs = [_predicted_job(n_layers, count, options) for count in options["n_microbatches"]]
    repeats, most_nodes = options["profile_repeats"], options["most_nodes"]
    profile = profile_chain(jobs[0], n_replicas=most_nodes, repeats=repeats)
    cases = [(job, plan) for job in jobs for plan in _plans(profile, job.n_microbatches, most_nodes)]
    rows = [_predicted(job, profile, plan) for job, plan in cases]
    runs = [FixedRun(job, plan, options["warm_ups"] + options["iterations"]) for job, plan in cases]
    with temporary_directory("predictions") as path:
        for row, seen in zip(rows, run_fixed(runs, path), strict=True):
            # The exchange of the loss ends an iteration everywhere at once.
            row["iter_wall_s"] = median(seen[0].iter_times_s[options["warm_ups"] :])
    return rows


def _predicted_job(n_layers: int, n_microbatches: int, options: Options) -> ChainJob:
    size = options["microbatch_size"]
    return ChainJob(model_options={"n_layers": n_layers}, n_microbatches=n_microbatches, microbatch_size=size)


def _plans(profile: ModelProfile, n_microbatches: int, most_nodes: int) -> list[HybridPlan]:
    """Return every plan on one node, two, and so on: its microbatches are those that planning chooses."""
    templates = make_templates(profile, range(1, most_nodes + 1))
    found = []
    for n_nodes in range(1, most_nodes + 1):
        for counts in enumerate_plans(sorted(templates), n_nodes, 0):
            used = [templates[size] for size, count in zip(sorted(templates), counts, strict=True)
                    for _ in range(count)]  # fmt: skip
            if (shares := distribute(used, n_microbatches)) is None:
                continue  # fewer microbatches than pipelines
            starts = [sum(one.n_nodes for one in used[:index]) for index in range(len(used))]
            found.append(HybridPlan(tuple(
                Pipeline(tuple(range(start, start + one.n_nodes)), one, share)
                for start, one, share in zip(starts, used, shares, strict=True)
            )))  # fmt: skip
    return found


def _predicted(job: ChainJob, profile: ModelProfile, plan: HybridPlan) -> dict[str, Any]:
    templates = [one.template for one in plan.pipelines]
    counts = [one.n_microbatches for one in plan.pipelines]
    n_cores = usable_cpus()
    work_s = job.n_microbatches * sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    predicted_s = event_time_s(templates, counts, profile)
    return {
        "n_layers": profile.n_layers, "n_microbatches": job.n_microbatches, "n_nodes": len(plan.nodes),
        "stages": "+".join("/".join(str(len(stage.layers)) for stage in one.stages) for one in templates),
        "microbatches": " ".join(map(str, counts)), "n_cores": n_cores,
        "predicted_iter_time_s": predicted_s,
        "predicted_cores_iter_time_s": max(predicted_s, work_s / n_cores),
    }  # fmt: skip
