"""What a foreign trace asked for, devices and time but no model, and how it becomes jobs that name one."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.tables import REQUESTS
from makespan.throughput import ReferenceTimes
from makespan.traces._cells import ROW, Finding, ReadReport, drop, finish_report, in_order, refuse
from makespan.traces._jobs import JobTrace
from makespan.traces._synthetic import Request, drawn_requests, statistics
from makespan.workloads import JobSpec

__all__ = ["RequestTrace", "WorkloadMapping", "finish_requests", "map_requests", "whole"]

_LARGEST_REQUEST = 1e6


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Jobs of a trace that does not say what they train: schema `REQUESTS`, in order of submission.

    ``origin_s`` is the submission time of the first job in the clock of the trace [s].
    """

    table: pd.DataFrame
    report: ReadReport
    origin_s: float


def finish_requests(frame: pd.DataFrame, findings: list[Finding], where: str, n_read: int) -> RequestTrace:
    """Apply the rules that all traces share and build the canonical table.

    ``frame`` has the columns of `REQUESTS` and `ROW`, times in the clock of the trace, NaN where missing.
    """
    frame = frame.assign(n_gpus=whole(frame, "n_gpus", where), n_cpus=whole(frame, "n_cpus", where))
    kept = drop(frame, frame["submit_time_s"].isna(), "submission time missing", findings)
    kept = drop(kept, ~(kept["n_gpus"] > 0), "no GPU requested", findings)
    kept = drop(kept, kept["duration_s"].isna(), "end or start missing", findings)
    kept = drop(kept, kept["duration_s"] < 0, "ends before it starts", findings)
    kept = drop(kept, kept["duration_s"] == 0, "held its GPUs for no time", findings)
    again = kept["job_id"].duplicated()
    kept = drop(kept, again, "job name occurs again; the first row is kept", findings)
    ordered = in_order(kept, findings)
    report = finish_report(where, n_read, len(ordered), findings)
    origin_s = float(ordered["submit_time_s"].iloc[0])
    shifted = ordered.assign(submit_time_s=ordered["submit_time_s"] - origin_s).drop(columns=ROW)
    return RequestTrace(REQUESTS.validate(shifted, where), report, origin_s)


def whole(frame: pd.DataFrame, column: str, where: str) -> "pd.Series[float]":
    """Round requests in fractions of a device up; NaN stays NaN."""
    values = frame[column]
    accepted = f"up to {_LARGEST_REQUEST:g} devices a job"
    refuse(frame, values > _LARGEST_REQUEST, column, accepted, where)
    return pd.Series(np.ceil(values.round(9).to_numpy()), index=values.index)


@dataclass(frozen=True, slots=True)
class WorkloadMapping:
    """How requests of a foreign trace become jobs: an explicit, seeded choice.

    Parameters
    ----------
    offers
        What a request can become. A request is mapped to offers with as many GPUs, in proportion
        to their weights; where there is none, to those with the next smaller count, or, below the
        smallest one, with that.
    seed
        What a request becomes follows from it and the name of the job alone.
    cpus_per_gpu
        CPU threads for each GPU where the trace does not say.
    guaranteed
        Tenants whose jobs are guaranteed.
    max_gpus
        Requests beyond are left out and reported; None keeps all.
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

    The report holds the findings of the reader and those of the mapping. Raises `TraceError` if no request is
    left, or the source has no throughput for an offer.
    """
    table, findings = trace.table, list(trace.report.findings)
    if mapping.max_gpus is not None:
        numbered = table.assign(**{ROW: np.arange(1, len(table) + 1)})
        reason = f"asks for more than {mapping.max_gpus} GPUs (rows of the cleaned table)"
        table = drop(numbered, numbered["n_gpus"] > mapping.max_gpus, reason, findings)
    chosen, changed = _choose(table, mapping)
    if changed:
        reason = "no offer with as many GPUs; the next smaller count is taken (rows of the cleaned table)"
        findings.append(Finding("repaired", reason, tuple(changed)))
    before = trace.report
    report = finish_report(before.where, before.n_read, len(table), findings, logged=len(before.findings))
    return JobTrace(_jobs(table, chosen, mapping, times), report)


def _choose(table: pd.DataFrame, mapping: WorkloadMapping) -> tuple[list[Request], list[int]]:
    """Choose an offer for each request, and say which have no offer with as many GPUs."""
    offered = sorted({offer.n_gpus for offer in mapping.offers})
    counts = table["n_gpus"].tolist()
    taken = [max((n for n in offered if n <= count), default=offered[0]) for count in counts]
    chosen: dict[int, Request] = {}
    for size in sorted(set(taken)):
        rows = [row for row, n in enumerate(taken) if n == size]
        offers = [offer for offer in mapping.offers if offer.n_gpus == size]
        names = table["job_id"].iloc[rows].tolist()
        chosen |= zip(rows, drawn_requests(offers, names, mapping.seed, "workload"), strict=True)
    changed = [row for row, (n, count) in enumerate(zip(taken, counts, strict=True), 1) if n != count]
    return [chosen[row] for row in range(len(counts))], changed


def _jobs(
    table: pd.DataFrame, chosen: list[Request], mapping: WorkloadMapping, times: ReferenceTimes
) -> tuple[JobSpec, ...]:
    if not chosen:
        raise TraceError("mapping of a trace: no request; accepted: at least one")
    names = ("job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant")
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
        for offer, job_id, submit, gpus, cpus, duration, tenant in zip(
            chosen, *(table[name].tolist() for name in names), strict=True
        )
    )
