"""From traces that do not name a model to jobs that do: an explicit, seeded choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.throughput._reference import ReferenceTimes
from makespan.traces._jobs import JobTrace
from makespan.traces._report import Finding, finish_report
from makespan.traces._requests import RequestTrace
from makespan.traces._statistics import Request, statistics
from makespan.workloads import JobSpec

__all__ = ["WorkloadMapping", "map_requests"]


@dataclass(frozen=True, slots=True)
class WorkloadMapping:
    """How requests of a foreign trace become jobs.

    Parameters
    ----------
    offers
        What a request can become. A request is mapped to offers with as many GPUs, in proportion
        to their weights; where there is none, to those with the next smaller count, or, below the
        smallest one, with that.
    seed
        Seed of the choice.
    cpus_per_gpu
        CPU threads for each GPU where the trace does not say.
    guaranteed
        Tenants whose jobs are guaranteed.
    max_gpus
        Requests beyond are left out and reported; None keeps all.

    Raises
    ------
    InputError
        There is no offer, or a weight is not positive.
    """

    offers: tuple[Request, ...]
    seed: int
    cpus_per_gpu: int = 8
    guaranteed: frozenset[str] = frozenset()
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        if not self.offers or not all(offer.weight > 0 for offer in self.offers):
            raise InputError("mapping of a trace: accepted: at least one offer, each of a weight above 0")

    @classmethod
    def like_base(cls, seed: int, max_gpus: int | None = None) -> "WorkloadMapping":
        """Return a mapping to the mix of models, GPUs and plans of the Base workload."""
        stats = statistics()
        return cls(stats.requests, seed, stats.cpus_per_gpu, max_gpus=max_gpus)


def map_requests(trace: RequestTrace, mapping: WorkloadMapping, times: ReferenceTimes) -> JobTrace:
    """Give every request a workload and a plan; its steps fill the recorded duration.

    Parameters
    ----------
    trace
        What was asked for.
    mapping
        The choice.
    times
        Iteration times of the throughput source.

    Returns
    -------
    JobTrace
        In order of submission; the report holds the findings of the reader and those of the mapping.

    Raises
    ------
    TraceError
        No request is left, or the source has no throughput for an offer.
    """
    table, findings = trace.table, list(trace.report.findings)
    if mapping.max_gpus is not None:
        too_large = table["n_gpus"] > mapping.max_gpus
        if bool(too_large.any()):
            rows = tuple(int(row) + 1 for row in np.flatnonzero(too_large.to_numpy()))
            reason = f"asks for more than {mapping.max_gpus} GPUs (rows of the cleaned table)"
            findings.append(Finding("dropped", reason, rows))
            table = table[~too_large].reset_index(drop=True)
    chosen, changed = _choose(table["n_gpus"].tolist(), mapping)
    if changed:
        reason = "no offer with as many GPUs; the next smaller count is taken (rows of the cleaned table)"
        findings.append(Finding("repaired", reason, tuple(changed)))
    before = trace.report
    logged = len(before.findings)
    report = finish_report(before.where, before.n_read, len(table), findings, logged=logged)
    return JobTrace(_jobs(table, chosen, mapping, times), report)


def _choose(counts: Sequence[int], mapping: WorkloadMapping) -> tuple[list[Request], list[int]]:
    by_gpus: dict[int, list[Request]] = {}
    for offer in mapping.offers:
        by_gpus.setdefault(offer.n_gpus, []).append(offer)
    offered = sorted(by_gpus)
    shares = {
        count: np.cumsum([offer.weight for offer in offers]) / sum(offer.weight for offer in offers)
        for count, offers in by_gpus.items()
    }
    draws = np.random.default_rng(mapping.seed).random(len(counts))
    chosen, changed = [], []
    for row, (count, draw) in enumerate(zip(counts, draws, strict=True), 1):
        taken = max((n for n in offered if n <= count), default=offered[0])
        if taken != count:
            changed.append(row)
        at = min(int(np.searchsorted(shares[taken], draw, side="right")), len(by_gpus[taken]) - 1)
        chosen.append(by_gpus[taken][at])
    return chosen, changed


def _jobs(
    table: pd.DataFrame, chosen: list[Request], mapping: WorkloadMapping, times: ReferenceTimes
) -> tuple[JobSpec, ...]:
    if not chosen:
        raise TraceError("mapping of a trace: no request; accepted: at least one")
    columns = [
        table[name].tolist()
        for name in ("job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant")
    ]
    return tuple(
        JobSpec(
            job_id=job_id,
            submit_time_s=submit,
            workload=offer.workload,
            n_gpus=offer.n_gpus,
            n_cpus=cpus if cpus and offer.n_gpus == gpus else mapping.cpus_per_gpu * offer.n_gpus,
            plan=offer.plan,
            steps=times.steps(offer.workload, offer.n_gpus, offer.plan, duration),
            is_guaranteed=tenant in mapping.guaranteed,
            tenant=tenant,
            duration_s=duration,
        )
        for offer, job_id, submit, gpus, cpus, duration, tenant in zip(chosen, *columns, strict=True)
    )
