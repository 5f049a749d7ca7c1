"""Where numbers are said to come from: the column ``provenance`` decides, not the source that has them."""

from collections.abc import Iterable
from pathlib import Path

from makespan.tables._catalogue import THROUGHPUT
from makespan.tables._io import read_csv

__all__ = ["ON_DEMAND", "PROVENANCES", "read_provenances", "shown_source", "source_label"]

ON_DEMAND = "emulated on demand"
"""Provenance of rows that the emulator computes because a job requests a plan that the table lacks."""

PROVENANCES = ("emulated", "published", "measured", "interpolated", ON_DEMAND)
"""What the column ``provenance`` of a throughput table may say of a row."""

_LABELS = {
    "emulated": "emulated testbed",
    "published": "published measurements",
    "measured": "own measurements",
}


def shown_source(source: str, provenances: Iterable[str]) -> str:
    """Return what a source is called in titles, notes and records.

    Parameters
    ----------
    source
        Source as which iteration times were given: ``emulated``, ``published`` or ``measured``.
    provenances
        The column ``provenance`` of every throughput table that was used.

    Returns
    -------
    str
        The name of the source where all rows are its own; else what they are, and as what they were given.
    """
    kinds = {"emulated" if kind == ON_DEMAND else kind for kind in provenances}
    found = [name for name in PROVENANCES if name in kinds] + sorted(kinds - set(PROVENANCES))
    if found in ([], [source]):
        return source
    what = found[0] if len(found) == 1 else f"mixed {' and '.join(found)}"
    return f"{what}, given as {source}"


def read_provenances(paths: Iterable[str | Path]) -> list[str]:
    """Return what throughput tables say of each of their rows; raises as `read_csv`."""
    return [str(name) for path in paths for name in read_csv(path, THROUGHPUT)["provenance"]]


def source_label(shown: str) -> str:
    """Return what figures say of a source, given its name or what `shown_source` returns."""
    return _LABELS.get(shown, shown)
