"""Which files of the register a configuration asks for.

Apart from the package's other names because it needs tables, which take a while to import.
"""

from collections.abc import Iterable
from pathlib import Path

from makespan.config._settings import Settings, published_directory
from makespan.errors import MissingDataError, UnknownNameError
from makespan.throughput import Dataset, find_dataset, locate, read_register
from makespan.workloads import resolve_workload_key

__all__ = ["job_list_datasets", "published_datasets", "published_files", "published_job_lists"]

_PREFIX = ("morphling", "throughput")
_JOB_LISTS = ("naive", "workload-base", "workload-bp", "workload-mt")


def published_datasets(settings: Settings, root: str | Path = ".") -> dict[str, Dataset]:
    """Return the registered trace of each configured workload.

    Parameters
    ----------
    settings
        Names the register and the workloads.
    root
        Directory from which the path of the register counts.

    Returns
    -------
    dict
        Workload key to register entry, in the order of the configuration.

    Raises
    ------
    MissingDataError
        A workload has no registered trace.
    """
    register = read_register(Path(root) / settings.throughput.published.register_file)
    known: dict[str, Dataset] = {}
    for entry in register:
        parts = Path(entry.path).parts
        if parts[:2] == _PREFIX and len(parts) == 4:
            try:
                known[resolve_workload_key(parts[2])] = entry
            except UnknownNameError:
                continue
    missing = [key for key in settings.throughput_workloads() if key not in known]
    if missing:
        raise MissingDataError(
            f"{settings.throughput.published.register_file}: no published trace of {', '.join(missing)}; "
            f"it has: {', '.join(sorted(known))}"
        )
    return {key: known[key] for key in settings.throughput_workloads()}


def published_files(settings: Settings, root: str | Path = ".") -> list[str]:
    """Return the files that the published source reads, one a workload.

    Parameters
    ----------
    settings, root
        As for `published_datasets`.

    Returns
    -------
    list of str
        Paths in either layout; those of fetched files may not exist yet.

    Raises
    ------
    MissingDataError
        No directory is configured, or it lacks a file; says what to do.
    """
    return _paths(settings, published_datasets(settings, root).values())


def job_list_datasets(settings: Settings, root: str | Path = ".") -> list[Dataset]:
    """Return the register entries of the authors' job lists; parameters as for `published_datasets`."""
    register = read_register(Path(root) / settings.throughput.published.register_file)
    return [find_dataset(register, f"morphling-workloads-{name}") for name in _JOB_LISTS]


def published_job_lists(settings: Settings, root: str | Path = ".") -> list[str]:
    """Return the files of the authors' job lists; parameters and errors as for `published_files`."""
    return _paths(settings, job_list_datasets(settings, root))


def _paths(settings: Settings, datasets: Iterable[Dataset]) -> list[str]:
    directory = published_directory(settings)
    if directory == Path(settings.throughput.published.fetched_directory):
        return [str(directory / entry.path) for entry in datasets]
    return [str(locate(entry, directory)) for entry in datasets]
