"""Further studies, one table of all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd

from makespan.papers.oobleck._bursts import burst_study
from makespan.papers.oobleck._interval_studies import analytic_study, interval_study
from makespan.papers.oobleck._planning_studies import guarantee_map, template_sets
from makespan.papers.oobleck._tables_planning import STUDIES

__all__ = ["studies_experiment"]

_STUDIES: tuple[Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]], ...] = (
    guarantee_map,
    template_sets,
    burst_study,
)


def studies_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Make every study.

    Parameters
    ----------
    cells
        Printed cells: ``throughput``.
    options
        Of all studies, see the configuration.

    Returns
    -------
    dict
        ``studies``, one row a quantity.
    """
    rows = [row for study in _STUDIES for row in study(options)]
    rows += [row for study in (interval_study, analytic_study) for row in study(cells, options["intervals"])]
    return {"studies": STUDIES.validate(pd.DataFrame(rows), where="studies")}
