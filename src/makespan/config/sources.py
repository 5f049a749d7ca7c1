"""Files of the register that a configuration asks for.

Apart from the package's other names because it needs tables, which take a while to import.
"""

from collections.abc import Iterable
from pathlib import Path

from makespan.config.settings import Settings, published_directory
from makespan.errors import MissingDataError, UnknownNameError
from makespan.hardware import cluster
from makespan.tables import read_provenances, shown_source
from makespan.throughput import Dataset, check_published_gpus, find_dataset, locate, read_register
from makespan.workloads import resolve_workload_key


def published_datasets(settings: Settings, root: str | Path = ".") -> dict[str, Dataset]:
    """Return the registered trace of each configured workload, by its key and in their order.

    Paths of the register count from ``root``. Raises `MissingDataError` for a workload without entry.
    """
    known: dict[str, Dataset] = {}
    for entry in _register(settings, root):
        parts = Path(entry.path).parts
        if len(parts) == 4 and parts[1] == "throughput":
            try:
                known[resolve_workload_key(parts[2])] = entry
            except UnknownNameError:
                continue
    wanted = settings.throughput_workloads()
    missing = [key for key in wanted if key not in known]
    if missing:
        raise MissingDataError(
            f"{settings.throughput.published.register_file}: no published trace of {', '.join(missing)}; "
            f"it has: {', '.join(sorted(known))}"
        )
    return {key: known[key] for key in wanted}


def paper_datasets(settings: Settings, paper: str, root: str | Path = ".") -> list[Dataset]:
    """Return the register entries of what else a paper reads; see `published_datasets`."""
    register = _register(settings, root)
    return [find_dataset(register, name) for name in settings.papers()[paper].published_datasets()]


def published_files(settings: Settings, root: str | Path = ".") -> list[str]:
    """Return the files that the published source reads, one per workload; fetched ones may not exist yet.

    Raises `InputError` if the configured cluster has other devices than the one that the authors timed.
    """
    check_published_gpus(cluster(settings.cluster))
    return _paths(settings, published_datasets(settings, root).values())


def paper_files(settings: Settings, paper: str, root: str | Path = ".") -> list[str]:
    """Return the files of `paper_datasets`; see `published_files`."""
    return _paths(settings, paper_datasets(settings, paper, root))


def missing_datasets(settings: Settings) -> dict[str, Dataset]:
    """Return what is still to be fetched, by its path in the directory of fetched files."""
    directory = Path(settings.throughput.published.fetched_directory)
    wanted = [*published_datasets(settings).values()]
    wanted += [entry for paper in settings.papers() for entry in paper_datasets(settings, paper)]
    return {entry.path: entry for entry in wanted if not (directory / entry.path).is_file()}


def shown_measured(settings: Settings) -> str:
    """Return what the user's own tables are said to be, see `makespan.tables.shown_source`."""
    directory = Path(settings.throughput.measured.directory or "")
    files = [directory / f"{key}.csv" for key in settings.throughput_workloads()]
    return shown_source("measured", read_provenances(path for path in files if path.is_file()))


def _register(settings: Settings, root: str | Path) -> tuple[Dataset, ...]:
    return read_register(Path(root) / settings.throughput.published.register_file)


def _paths(settings: Settings, datasets: Iterable[Dataset]) -> list[str]:
    directory = published_directory(settings)
    if directory == Path(settings.throughput.published.fetched_directory):
        return [str(directory / entry.path) for entry in datasets]
    return [str(locate(entry, directory)) for entry in datasets]
