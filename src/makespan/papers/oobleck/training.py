"""Experiment ``hybrid``: nodes are killed within every phase of training, and join again."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from makespan.cleanup import temporary_directory
from makespan.errors import CheckpointError, TrainingError
from makespan.oobleck.fixed import FixedRun, profile_chain, run_fixed
from makespan.oobleck.instantiation import distribute, enumerate_plans, event_time_s
from makespan.oobleck.job import ChainJob
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
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.runtime import usable_cpus
from makespan.runtime.coordinator import Event
from makespan.settings import Block, Count, option
from makespan.tables import schemas_of

# ------------------------------------------------------------------------------------------------
# Experiment ``hybrid``: nodes are killed within every phase of training, and join again.

_MOST_ITERATIONS = 2000
_AFTER_LAST = 3
_SLOW_EXCHANGE_S = 10.0
_HEADS, _VOCABULARY = 4, 64


@dataclass(frozen=True, slots=True)
class _Trained:
    """One run, the processes that were killed, and how often a checkpoint was read."""

    name: str
    record: Record
    killed: list[Killed]
    checkpoint_reads: int


_hybrid_option = partial(option, source="a choice", changes="hybrid, hybrid_kills, hybrid_summary")
_Number = Annotated[int, Field(ge=0)]


class Kills(Block):
    """Kills of each kind, over all jobs."""

    compute: Count = _hybrid_option("in a forward or backward pass", 10)
    reduction: _Number = _hybrid_option("while gradients are added up", 8)
    commit: _Number = _hybrid_option("between prepared and committed", 6)
    recovery: _Number = _hybrid_option("during regroup, group build and copy after another kill", 6)

    @model_validator(mode="after")
    def _recoveries_have_a_cause(self) -> "Kills":
        if self.recovery > self.compute:
            raise ValueError(f"at most as many kills in recoveries as in passes, {self.compute}")
        return self


class Hybrid(Experiment):
    """Train jobs while processes are killed within announced phases, and compare them with one process.

    Every killed process is replaced by one that joins. The baseline writes checkpoints, and restarts all
    processes after the same kills, except those that struck during a recovery.
    """

    name = "hybrid"
    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 60, 4000
    tables = {
        "hybrid": "losses of training through kills beside one process that repeats it",
        "hybrid_kills": "each kill, the phase it struck, and how long training paused",
        "hybrid_summary": "pauses, repeated iterations and goodput, beside checkpoint and relaunch",
    }
    figures = (
        Figure(
            "hybrid",
            "Training through kills",
            "Training through kills of processes, source {source}, small models "
            "on the cores at hand: {kills: rows hybrid_kills} in {runs: rows "
            "hybrid_summary}. Loss, with a mark for each kill by the kind of its "
            "phase; pause of training after a kill, with Oobleck and with "
            "checkpoint and relaunch; goodput and repeated iterations. Pauses of "
            "the same height in all phases do not depend on the phase.",
            tables=("hybrid", "hybrid_kills", "hybrid_summary"),
            sources=("measured",),
        ),
    )

    jobs: Count = _hybrid_option("jobs, each with a seed and a share of the kills", 3)
    nodes: Count = _hybrid_option("processes of a job; a new one joins for each that is killed", 5)
    f: _Number = _hybrid_option("losses at once that must be survived", 2)
    kills: Kills = _hybrid_option("how many processes are killed, and when", Kills())
    most_delay_s: float = _hybrid_option(
        "longest time from the beginning of a phase to the kill", 0.02, unit="s", gt=0
    )
    most_pipelines: Count = _hybrid_option(
        "pipelines above which an exchange of gradients is taken to be slow", 3
    )
    layers: Count = _hybrid_option("blocks of the model, besides embedding and head", 4)
    hidden: Count = _hybrid_option("its width; 4 heads", 32)
    sequence: Count = _hybrid_option("tokens of a sample", 16)
    microbatches: Count = _hybrid_option("microbatches of an iteration", 12)
    microbatch_size: Count = _hybrid_option("samples of each", 2, unit="samples")
    checkpoint_every: Count = _hybrid_option(
        "iterations between checkpoints of the baseline, which relaunches", 5
    )
    baseline_jobs: _Number = _hybrid_option("jobs that the baseline repeats under the same kills", 3)

    @model_validator(mode="after")
    def _nodes_suffice(self) -> "Hybrid":
        if self.nodes < self.f + 3:
            raise ValueError(f"nodes that are at least f + 3, {self.f + 3}, as two can be lost at once")
        return self

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, because pauses are timed."""
        return max(all_cores, self.nodes)

    def job(self, seed: int) -> ChainJob:
        """Return the job with a seed, which is that of its parameters and of its data."""
        sizes = {
            "n_layers": self.layers, "hidden": self.hidden, "heads": _HEADS, "kv_heads": _HEADS,
            "ffn": 2 * self.hidden, "seq": self.sequence, "vocab": _VOCABULARY,
        }  # fmt: skip
        return ChainJob(
            model_options=sizes, n_microbatches=self.microbatches, microbatch_size=self.microbatch_size,
            seed=seed, data_seed=seed,
        )  # fmt: skip

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per iteration, per kill and per job."""
        steps, kills, sums = [], list[dict[str, Any]](), list[dict[str, Any]]()
        with temporary_directory("hybrid") as folder:
            for number, faults in enumerate(drawn_faults(self)):
                job = self.job(number)
                ours, result = _train(self, job, faults, folder / f"job-{number}", f"job {number}, oobleck")
                losses, is_same = _replayed(job, result)
                runs = [(ours, is_same)]
                if number < self.baseline_jobs:
                    # The same kills at the same iterations; a relaunch has no recovery in which to kill.
                    same_kills = Faults(
                        [
                            replace(killed.fault, iteration=killed.armed)
                            for killed in ours.killed
                            if not killed.fault.is_next
                        ]
                    )
                    record, path = Record(), folder / f"base-{number}"
                    options = _options(self, checkpoint_every=self.checkpoint_every)
                    train_relaunching(
                        job, _profile(self), len(losses), path, options, record=record, faults=same_kills
                    )
                    name = f"job {number}, relaunch"
                    runs.append((_Trained(name, record, same_kills.done, record.n_reads), True))
                for run, is_equal in runs:
                    steps += _step_rows(run, losses)
                    kills += [
                        {
                            "run": run.name, "kill": kill, "phase": killed.phase,
                            "kind": PHASES[killed.fault.phase], "step": killed.iteration,
                            "released_wall_s": None if killed.released_s is None
                            else killed.released_s - (killed.killed_s or 0.0),
                            "first_wall_s": _pause_s(killed),
                        }
                        for kill, killed in enumerate(run.killed)
                    ]  # fmt: skip
                    sums.append(_summary(run, job, is_equal))
        schemas = schemas_of("makespan.papers.oobleck")
        tables = {"hybrid": steps, "hybrid_kills": kills, "hybrid_summary": sums}
        return {name: pd.DataFrame(rows, columns=schemas[name].names) for name, rows in tables.items()}


def drawn_faults(protocol: Hybrid) -> Iterator[list[Fault]]:
    """Draw for each job which processes are killed, in which phase and when within it.

    Kinds are dealt to the jobs in turn; one in a recovery comes after one in a pass.
    """
    n_jobs = protocol.jobs
    phases: dict[str, list[str]] = {}
    for phase, kind in PHASES.items():
        phases.setdefault(kind, []).append(phase)
    for number in range(n_jobs):
        rng = np.random.default_rng(number)
        counts = {kind: len(range(number, n, n_jobs)) for kind, n in protocol.kills.model_dump().items()}
        alone = [kind for kind in ("compute", "reduction", "commit") for _ in range(counts[kind])]
        order = [alone[index] for index in rng.permutation(len(alone))]
        faults, left, iteration = [], counts["recovery"], 1
        turn = 0
        for kind in order:
            iteration += int(rng.integers(1, 3))
            faults.append(_drawn_fault(rng, str(rng.choice(phases[kind])), iteration, protocol))
            if kind == "compute" and left > 0:
                left -= 1
                phase = phases["recovery"][(number + turn) % len(phases["recovery"])]
                turn += 1
                faults.append(_drawn_fault(rng, phase, iteration, protocol))
        yield faults


def _drawn_fault(rng: np.random.Generator, phase: str, iteration: int, protocol: Hybrid) -> Fault:
    delay_s = float(rng.uniform(0.0, protocol.most_delay_s))
    return Fault(phase, iteration, int(rng.integers(0, 1 << 16)), delay_s)


def _profile(protocol: Hybrid) -> ModelProfile:
    """Return layers of equal times; exchanges among many pipelines are slow, so some have several stages."""
    most = protocol.most_pipelines
    exchange = {n: 0.0 if n <= most else _SLOW_EXCHANGE_S for n in range(1, protocol.nodes + 2)}
    layer = LayerProfile(1e-3, 2e-3, {}, exchange, parameter_bytes=4.0 * protocol.hidden**2)
    return ModelProfile("hybrid", (layer,) * (protocol.layers + 2))


def _options(protocol: Hybrid, **more: Any) -> LiveOptions:
    return LiveOptions(protocol.nodes, f=protocol.f, checkpoint_interval_s=0.0, **more)


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
    protocol: Hybrid, job: ChainJob, drawn: Sequence[Fault], path: Path, name: str
) -> tuple[_Trained, LiveResult]:
    """Train a job through its kills with Oobleck, until a few iterations after the last one."""
    faults, record = Faults(drawn), Record()
    watch = _Watch(path, faults)
    options = _options(protocol, n_replacements=len(drawn))
    result = train_resilient(
        job, _profile(protocol), _MOST_ITERATIONS, path, options, watch=watch, record=record, faults=faults
    )
    if not faults.is_over:
        n_left = len(faults.pending)
        raise TrainingError(
            f"{name}: {n_left} of {len(drawn)} kills did not strike within {_MOST_ITERATIONS} iterations"
        )
    return _Trained(name, record, faults.done, watch.reads), result


def _replayed(job: ChainJob, result: LiveResult) -> tuple[list[float], bool]:
    """Repeat a run in one process; return its losses, and True if they and all state have the same bits."""
    if result.checkpoint is None:
        raise CheckpointError("the run ended without a checkpoint; expected one after its last iteration")
    from makespan.oobleck.oracle import replay  # imports torch

    losses, equal = replay(job, result.plans, result.step, result.checkpoint)
    return losses, equal and result.iterations["loss"].tolist() == losses


def _step_rows(run: _Trained, losses: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row per iteration of a run, the last one of an iteration that was repeated."""
    last = {row["iteration"]: row for row in run.record.rows}
    rows = []
    for step, row in sorted(last.items()):
        kills = [killed for killed in run.killed if killed.iteration == step]
        joined = sum(
            len(recovery.joined) for recovery in run.record.recoveries if recovery.iteration == step and step
        )
        rows.append(
            {
                "run": run.name, "step": step, "loss": row["loss"], "reference_loss": losses[step],
                "abs_difference": abs(row["loss"] - losses[step]), "n_pipelines": row["n_pipelines"],
                "n_processes": row["n_nodes"],
                "event": " ".join(["kill"] * len(kills) + ["join"] * joined) or None,
                "phase": ", ".join(killed.phase for killed in kills) or None,
                "recovery_wall_s": max(map(_pause_s, kills)) if kills else None,
            }
        )  # fmt: skip
    return rows


def _pause_s(killed: Killed) -> float:
    return (killed.first_s or 0.0) - (killed.killed_s or 0.0)


def _summary(run: _Trained, job: ChainJob, is_equal: bool) -> dict[str, Any]:
    """Return pauses, repeated iterations and goodput of a run."""
    rows, pauses = run.record.rows, [_pause_s(killed) for killed in run.killed]
    released = [killed.released_s - (killed.killed_s or 0.0) for killed in run.killed if killed.released_s]
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

_predicted_option = partial(option, source="a choice", changes="predictions")


class Predictions(Experiment):
    """Profile small models, plan them, train under every plan, and set both times side by side."""

    name = "predictions"
    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 30, 4000
    tables = {
        "predictions": "measured iterations of small models beside the times that planning predicts",
    }
    figures = (
        Figure(
            "predictions",
            "Predicted iterations",
            "Iterations of small models under every plan on up to {nodes: "
            "config oobleck.execution.predictions.most_nodes}, "
            "source {source}: median of {timed iterations: config "
            "oobleck.execution.predictions.iterations} of one run per mark, "
            "against the time that planning predicts from a profile of the layers "
            "and the number of cores. On the dotted line both agree.",
            tables=("predictions",),
            sources=("measured",),
        ),
    )

    n_layers: tuple[Count, ...] = _predicted_option("layers between embedding and head", (2, 6), min_length=1)
    n_microbatches: tuple[Count, ...] = _predicted_option(
        "microbatches of an iteration", (6, 18), min_length=1
    )
    microbatch_size: Count = _predicted_option("samples of a microbatch", 2, unit="samples")
    most_nodes: Count = _predicted_option("plans on one node and more, up to these", 3)
    profile_repeats: Annotated[int, Field(ge=5)] = _predicted_option("timed passes of a layer", 15)
    warm_ups: Count = _predicted_option("iterations that are not timed", 1)
    iterations: Count = _predicted_option("iterations that are timed", 4)

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, because iterations are timed."""
        return max(all_cores, self.most_nodes)

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per model, number of microbatches and plan."""
        rows = []
        for n_layers in self.n_layers:
            jobs = [
                ChainJob(
                    model_options={"n_layers": n_layers},
                    n_microbatches=n_microbatches,
                    microbatch_size=self.microbatch_size,
                )
                for n_microbatches in self.n_microbatches
            ]
            # A model is trained right after it is profiled, while the machine is as it was.
            profile = profile_chain(jobs[0], n_replicas=self.most_nodes, repeats=self.profile_repeats)
            planned = [
                (job, plan) for job in jobs for plan in _plans(profile, job.n_microbatches, self.most_nodes)
            ]
            runs = [FixedRun(job, plan, self.warm_ups + self.iterations) for job, plan in planned]
            with temporary_directory("predictions") as path:
                for (job, plan), nodes in zip(planned, run_fixed(runs, path), strict=True):
                    # The exchange of the loss ends an iteration at the same moment on every node.
                    iter_wall_s = median(nodes[0].iter_times_s[self.warm_ups :])
                    rows.append(_predicted(job, profile, plan) | {"iter_wall_s": iter_wall_s})
        return {"predictions": pd.DataFrame(rows)}


def _plans(profile: ModelProfile, n_microbatches: int, most_nodes: int) -> list[HybridPlan]:
    """Return every plan on one node, two, and so on, with the microbatches that planning chooses."""
    templates = make_templates(profile, range(1, most_nodes + 1))
    plans = []
    for n_nodes in range(1, most_nodes + 1):
        for counts in enumerate_plans(sorted(templates), n_nodes, 0):
            used = [templates[size] for size, count in zip(sorted(templates), counts, strict=True)
                    for _ in range(count)]  # fmt: skip
            if (shares := distribute(used, n_microbatches)) is None:
                continue  # fewer microbatches than pipelines
            starts = [sum(template.n_nodes for template in used[:index]) for index in range(len(used))]
            plans.append(HybridPlan(tuple(
                Pipeline(tuple(range(start, start + template.n_nodes)), template, share)
                for start, template, share in zip(starts, used, shares, strict=True)
            )))  # fmt: skip
    return plans


def _predicted(job: ChainJob, profile: ModelProfile, plan: HybridPlan) -> dict[str, Any]:
    """Return a plan with the iteration time that planning predicts, also for few cores."""
    templates = [pipeline.template for pipeline in plan.pipelines]
    counts = [pipeline.n_microbatches for pipeline in plan.pipelines]
    n_cores = usable_cpus()
    work_s = job.n_microbatches * sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    predicted_s = event_time_s(templates, counts, profile)
    return {
        "n_layers": profile.n_layers, "n_microbatches": job.n_microbatches, "n_nodes": len(plan.nodes),
        "stages": "+".join(
            "/".join(str(len(stage.layers)) for stage in template.stages) for template in templates
        ),
        "microbatches": " ".join(map(str, counts)), "n_cores": n_cores,
        "predicted_iter_time_s": predicted_s,
        "predicted_cores_iter_time_s": max(predicted_s, work_s / n_cores),
    }  # fmt: skip
