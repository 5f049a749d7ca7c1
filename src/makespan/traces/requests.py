"""Requests of foreign traces, which state devices and run time but no model, and their mapping to jobs."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.arguments import check_fields
from makespan.errors import InputError, TraceError
from makespan.tables import REQUESTS
from makespan.throughput import ReferenceTimes
from makespan.traces.cells import (
    CANCELLED,
    CONTRADICTED,
    CPU_PART,
    EARLY,
    GPU_PART,
    GPU_TYPE,
    INSTANT,
    LARGER,
    MODEL,
    NAME_AGAIN,
    NO_GPU,
    NO_OFFER,
    NO_SUBMISSION,
    NOT_TIMED,
    REVERSED,
    ROW,
    RUNNING,
    UNSTARTED,
    Finding,
    ReadReport,
    drop,
    finish_report,
    in_order,
    reject,
    repair,
)
from makespan.traces.jobs import JobTrace
from makespan.traces.synthetic import Request, drawn_requests, statistics
from makespan.workloads import JobSpec

_LARGEST_REQUEST = 1e6
_DURATION_TOLERANCE_S = 1.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Jobs of a trace without models: schema `REQUESTS`, in order of submission.

    Further columns are ``gpu`` (the type asked for), ``model`` and ``is_guaranteed``, where a trace has them.
    ``origin_s`` is the submission time of the first job in the clock of the trace [s].
    """

    table: pd.DataFrame
    report: ReadReport
    origin_s: float


def finish_requests(
    frame: pd.DataFrame,
    findings: list[Finding],
    where: str,
    n_read: int,
    *,
    keep_cancelled: bool = False,
    before: ReadReport | None = None,
) -> RequestTrace:
    """Apply the cleaning rules of all traces and build the canonical table.

    Parameters
    ----------
    frame
        Columns of `REQUESTS` and `ROW`, times in the clock of the trace, NaN if missing. ``start_s`` and
        ``end_s`` replace ``duration_s``, or are compared with it if the trace states it too. ``outcome``, a
        reason of `REPAIRS`, marks jobs that never started, still ran or were cancelled. ``n_devices`` is the
        least number of GPUs of a job that asks for parts of them. Further columns stay.
    findings, where, n_read
        Earlier repairs; the file; number of its rows.
    keep_cancelled
        Keep jobs that their user cancelled; they held GPUs too.
    before
        Report whose findings were logged before.
    """
    # The order of the rules matters: a row is dropped, and counted, for the first reason that applies.
    kept = frame.assign(n_gpus=_checked(frame, "n_gpus", where), n_cpus=_checked(frame, "n_cpus", where))
    stated = kept.get("duration_s")
    if "end_s" in kept:
        kept = kept.assign(duration_s=kept["end_s"] - kept["start_s"])
    if "outcome" in kept:
        for reason in (UNSTARTED, RUNNING, CANCELLED):
            if reason != CANCELLED or not keep_cancelled:
                kept = drop(kept, kept["outcome"] == reason, reason, findings)
    kept = drop(kept, kept["submit_time_s"].isna(), NO_SUBMISSION, findings)
    kept = drop(kept, ~(kept["n_gpus"] > 0), NO_GPU, findings)
    kept = drop(kept, kept["duration_s"].isna(), NOT_TIMED, findings)
    kept = drop(kept, kept["duration_s"] < 0, REVERSED, findings)
    kept = drop(kept, kept["duration_s"] == 0, INSTANT, findings)
    kept = drop(kept, kept["job_id"].duplicated(), NAME_AGAIN, findings)
    if "end_s" in kept and stated is not None:
        differs = (stated[kept.index] - kept["duration_s"]).abs() > _DURATION_TOLERANCE_S
        # As many GPUs as make the GPU time of the duration that is used equal to that of the stated one.
        same_time = kept["n_gpus"] * stated[kept.index] / kept["duration_s"]
        repair(kept, differs, CONTRADICTED, findings, before=same_time)
    if "start_s" in kept:
        early = kept["start_s"] < kept["submit_time_s"]
        repair(kept, early, EARLY, findings)
        kept = kept.assign(submit_time_s=kept["submit_time_s"].mask(early, kept["start_s"]))
    for column, reason in (("n_gpus", GPU_PART), ("n_cpus", CPU_PART)):
        # Sums of shares such as 0.1 + 0.2 are not exact, so numbers are rounded before they are rounded up.
        rounded = pd.Series(np.ceil(kept[column].round(9).to_numpy()), index=kept.index)
        if column == "n_gpus" and "n_devices" in kept:
            rounded = rounded.clip(lower=kept["n_devices"])
        is_part = (rounded - kept[column]) > _ROUNDING
        asked, kept = kept["n_gpus"], kept.assign(**{column: rounded})
        repair(kept, is_part, reason, findings, before=asked)
    if "gpu" in kept:
        repair(kept, kept["gpu"] != "", GPU_TYPE, findings)
    if "model" in kept:
        repair(kept, kept["model"] != "", MODEL, findings)
    ordered = in_order(kept, findings)
    logged = 0 if before is None else len(before.findings)
    report = finish_report(where, n_read, len(ordered), findings, kept=ordered, logged=logged)
    origin_s = float(ordered["submit_time_s"].iloc[0])
    gone = [name for name in (ROW, "start_s", "end_s", "outcome", "n_devices") if name in ordered]
    shifted = ordered.assign(submit_time_s=ordered["submit_time_s"] - origin_s).drop(columns=gone)
    return RequestTrace(REQUESTS.validate(shifted, where), report, origin_s)


def _checked(frame: pd.DataFrame, column: str, where: str) -> "pd.Series[float]":
    accepted = f"up to {_LARGEST_REQUEST:g} devices per job"
    reject(frame, frame[column] > _LARGEST_REQUEST, column, accepted, where)
    return frame[column].astype("float64")


@dataclass(frozen=True, slots=True)
class WorkloadMapping:
    """Mapping of requests of a foreign trace to jobs: an explicit, seeded choice.

    Parameters
    ----------
    offers
        Possible workloads and plans. A request is mapped to one of the offers with as many GPUs, drawn in
        proportion to their weights. If there are none, those with the next smaller number of GPUs are used,
        or the smallest ones for a request below all of them.
    seed
        The choice for a request depends only on the seed and the name of its job.
    cpus_per_gpu
        CPU threads per GPU where the trace does not state them.
    guaranteed
        Tenants whose jobs are guaranteed, in addition to the jobs that the trace marks.
    max_gpus
        Larger requests are dropped and reported; None keeps all.
    """

    offers: tuple[Request, ...]
    seed: int
    cpus_per_gpu: int = 8
    guaranteed: frozenset[str] = frozenset()
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "mapping of a trace", positive=("max_gpus",), not_negative=("cpus_per_gpu",))
        if not self.offers or not all(offer.weight > 0 for offer in self.offers):
            raise InputError("mapping of a trace: expected at least one offer, each of a weight above 0")

    @classmethod
    def like_base(cls, seed: int, max_gpus: int | None = None) -> "WorkloadMapping":
        """Return a mapping to the mix of models, GPUs and plans of the Base workload."""
        stats = statistics()
        return cls(stats.requests, seed, stats.cpus_per_gpu, max_gpus=max_gpus)


def map_requests(trace: RequestTrace, mapping: WorkloadMapping, times: ReferenceTimes) -> JobTrace:
    """Give every request a workload, a plan, and as many steps as fill the recorded duration.

    The report has the findings of the reader and of the mapping. Raises `TraceError` if no request is left,
    or the source has no throughput for an offer.
    """
    table, findings = trace.table, list(trace.report.findings)
    table = table.assign(**{ROW: np.arange(1, len(table) + 1)})
    if mapping.max_gpus is not None:
        reason = f"{LARGER.format(mapping.max_gpus)} (rows of the cleaned table)"
        table = drop(table, table["n_gpus"] > mapping.max_gpus, reason, findings)
    # Each request gets an offer with as many GPUs, or with the next fewer.
    offered = sorted({offer.n_gpus for offer in mapping.offers})
    sizes = [max((n for n in offered if n <= count), default=offered[0]) for count in table["n_gpus"]]
    offer_of_row: dict[int, Request] = {}
    for size in sorted(set(sizes)):
        rows = [row for row, n in enumerate(sizes) if n == size]
        offers = [offer for offer in mapping.offers if offer.n_gpus == size]
        job_ids = table["job_id"].iloc[rows].tolist()
        offer_of_row |= zip(rows, drawn_requests(offers, job_ids, mapping.seed, "workload"), strict=True)
    chosen = [offer_of_row[row] for row in range(len(sizes))]
    mapped = table.assign(n_gpus=[offer.n_gpus for offer in chosen])
    reason = f"{NO_OFFER} (rows of the cleaned table)"
    repair(mapped, mapped["n_gpus"] != table["n_gpus"], reason, findings, before=table["n_gpus"])
    before, logged = trace.report, len(trace.report.findings)
    report = finish_report(before.where, before.n_read, len(table), findings, logged=logged, kept=mapped)
    if not chosen:
        raise TraceError("mapping of a trace: no request; expected at least one")
    names = ("job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant")
    promised = table["is_guaranteed"].tolist() if "is_guaranteed" in table else [False] * len(table)
    jobs = tuple(
        JobSpec(
            job_id=job_id,
            submit_time_s=submit,
            workload=offer.workload,
            n_gpus=offer.n_gpus,
            n_cpus=cpus if cpus and offer.n_gpus == gpus else mapping.cpus_per_gpu * offer.n_gpus,
            plan=offer.plan,
            steps=times.steps(offer.workload, offer.n_gpus, offer.plan, duration),
            is_guaranteed=is_promised or tenant in mapping.guaranteed,
            tenant=tenant,
            duration_s=duration,
        )
        for offer, is_promised, job_id, submit, gpus, cpus, duration, tenant in zip(
            chosen, promised, *(table[name].tolist() for name in names), strict=True
        )
    )
    return JobTrace(jobs, report)
