"""The comparison of the outcomes table with what the validator's books say."""

import math
from collections.abc import Mapping

import pandas as pd

from makespan.sim._books import JobBook, Rules
from makespan.tables import OUTCOMES

__all__ = ["check_outcomes"]

_RELATIVE = 1e-6


def check_outcomes(outcomes: pd.DataFrame, books: Mapping[str, JobBook], rules: Rules) -> None:
    """Report every cell that differs from the replay, and every job that is missing or too many."""
    checked = OUTCOMES.validate(outcomes, where="outcomes")
    names = checked["job_id"].tolist()
    for job_id in sorted(set(books) - set(names)):
        rules.report_job("outcomes", job_id, "has no row; accepted: one row for each job")
    seen: set[str] = set()
    for row in checked.to_dict("records"):
        job_id = str(row["job_id"])
        if job_id not in books or job_id in seen:
            rules.report_job("outcomes", job_id, "is not in the trace or occurs twice")
            continue
        seen.add(job_id)
        for name, expected in _expected(books[job_id]).items():
            if not math.isclose(float(row[name]), expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE):
                rules.report_job("outcomes", job_id, f"{name} is {row[name]!r}; accepted: {expected!r}")


def _expected(book: JobBook) -> dict[str, float]:
    return {
        "submit_time_s": book.job.submit_time_s,
        "n_gpus": float(book.job.n_gpus),
        "steps": float(book.job.steps),
        "is_guaranteed": float(book.job.is_guaranteed),
        "first_start_s": book.first_start_s,
        "finish_time_s": book.finish_s,
        "n_restarts": float(book.starts - 1),
        "attained_service_gpu_s": book.held_gpu_s,
        "waiting_time_s": book.waiting_s,
        "running_time_s": book.running_s,
        "restart_time_s": book.restart_s,
    }
