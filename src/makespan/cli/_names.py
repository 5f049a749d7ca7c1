"""Names that a shell completes: policies, workloads, clusters and papers."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

__all__ = [
    "CLUSTER_NAMES",
    "CLUSTER_OR_LIST_NAMES",
    "JOB_LIST_NAMES",
    "PAPER_NAMES",
    "POLICY_NAMES",
    "WORKLOAD_NAMES",
]

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completing(names: Callable[[], Iterable[str]], *, files: bool = False) -> Completer:
    """Offer names, of a list joined by commas for its last part, and files where both are accepted."""

    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        found = [CompletionItem(before + comma + name) for name in names() if name.startswith(last)]
        return [*found, CompletionItem(incomplete, type="file")] if files else found

    return offered


def _policies() -> Iterable[str]:
    from makespan.policies import policy_names

    return policy_names()


def _clusters() -> Iterable[str]:
    from makespan.hardware import cluster_names

    return cluster_names()


def _workloads() -> Iterable[str]:
    from makespan.workloads import workload_keys

    return workload_keys()


def _job_lists() -> Iterable[str]:
    from makespan.traces import VARIANTS

    return ("naive", *VARIANTS)


def _papers() -> Iterable[str]:
    from makespan.papers import PAPERS

    return PAPERS


POLICY_NAMES, CLUSTER_NAMES = _completing(_policies), _completing(_clusters)
WORKLOAD_NAMES, PAPER_NAMES = _completing(_workloads), _completing(_papers)
JOB_LIST_NAMES = _completing(_job_lists, files=True)
CLUSTER_OR_LIST_NAMES = _completing(_clusters, files=True)
