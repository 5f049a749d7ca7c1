"""Reading job lists that a stage wrote."""

from collections.abc import Mapping

from makespan.tables import JOBS, read_csv
from makespan.traces import jobs_from_table
from makespan.workloads import JobSpec

__all__ = ["read_job_lists"]


def read_job_lists(lists: Mapping[str, str]) -> dict[str, tuple[JobSpec, ...]]:
    """Read job lists by name; tables of schema `makespan.tables.JOBS`."""
    return {name: jobs_from_table(read_csv(path, JOBS), where=path).jobs for name, path in lists.items()}
