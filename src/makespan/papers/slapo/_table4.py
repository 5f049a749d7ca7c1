"""Table 4: lines of our schedules beside those of the authors."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

import makespan
from makespan.papers.slapo._definitions import Sources, text_lines
from makespan.papers.slapo._lines import ScheduleSources, schedule_lines
from makespan.papers.slapo._tables_measured import TABLE4

__all__ = ["table4_experiment"]

_LANGUAGE, _ZOO = "makespan.slapo", "makespan.training.zoo"
_SCHEDULES = (f"{_LANGUAGE}._library", "SCHEDULES")
_MODELS = (f"{_ZOO}._family_models", "_MODELS")
_SIZES = f"{_ZOO}._families"


def table4_experiment(printed: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Count the lines of the schedule of every family in its source, which is not imported.

    Parameters
    ----------
    printed
        The printed cells ``table4``.

    Returns
    -------
    dict of pandas.DataFrame
        ``table4``: a row a family.
    """
    sources = Sources(Path(makespan.__file__).parents[1], [_LANGUAGE, _ZOO])
    schedules = sources.table(*_SCHEDULES)
    counted = ScheduleSources(sources, schedules, {one.module for one in schedules.values()})
    rows = []
    for family in schedules:
        found = schedule_lines(counted, family)
        row = {"oracle": "measured", "family": family, "model_lines": _model_lines(sources, family)}
        rows.append(row | {name: getattr(found, name) for name in ("helpers", "expanded", "listing")})
    cells = printed["table4"].drop(columns="source")
    table = pd.DataFrame(rows).merge(cells, how="left", on="family", validate="one_to_one")
    return {"table4": TABLE4.validate(table, where="table4")}


def _model_lines(sources: Sources, family: str) -> int:
    """Count lines of all that the model of a family is made of, without the module that lists sizes."""
    start = sources.table(*_MODELS)[family]
    parts = (one for one in sources.reached(start) if one.module != _SIZES)
    return sum(len(text_lines(one.node, sources.text(one.module))) for one in parts)
