"""Figures: generic kinds that papers choose from, one style sheet, one way to save.

A figure sees its table and nothing else, so it can be drawn again from the saved CSV::

    figure = plot_sensitivity(table, source="emulated")
    save_figure(figure, table, "results/emulated/morphling/figures/sensitivity")

Marks mean the same in all figures: a hollow diamond is a published value, a cross what cannot run, and so on.
`published`, `spread`, `cannot_run`, `limit`, `reference`, `compared` and `beyond` draw them, and each has an
entry for the legend.

``source`` is always the name of the throughput source, ``looks`` the looks of the policies in the order of
the legend, where others follow in grey, and ``titles`` the titles of names that differ from them.
"""

from makespan.plots._bars import plot_grouped_bars, plot_ratio_bars
from makespan.plots._lines import plot_bands, plot_cdf, plot_costs, plot_intervals, plot_variants
from makespan.plots._marks import (
    beyond,
    beyond_handle,
    cannot_run,
    cannot_run_handle,
    compared,
    compared_handle,
    limit,
    limit_handle,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
)
from makespan.plots._models import (
    ENVELOPE,
    plot_cpu_sensitivity,
    plot_error_bars,
    plot_prediction,
    plot_sensitivity,
)
from makespan.plots._schedules import job_spans, plot_allocation, plot_gantt
from makespan.plots._style import (
    FAMILIES,
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    POLICIES,
    TWO_COLUMNS_IN,
    Look,
    finished,
    look_of,
    name_coincident,
    new_figure,
    ordered,
    plain_numbers,
    require_columns,
    save_figure,
    styled,
)

__all__ = [
    "ENVELOPE",
    "FAMILIES",
    "MODEL_TITLES",
    "ONE_COLUMN_IN",
    "PALETTE",
    "POLICIES",
    "TWO_COLUMNS_IN",
    "Look",
    "finished",
    "job_spans",
    "look_of",
    "name_coincident",
    "new_figure",
    "ordered",
    "plain_numbers",
    "plot_allocation",
    "plot_bands",
    "plot_cdf",
    "plot_costs",
    "plot_cpu_sensitivity",
    "plot_error_bars",
    "plot_gantt",
    "plot_grouped_bars",
    "plot_intervals",
    "plot_prediction",
    "plot_ratio_bars",
    "plot_sensitivity",
    "plot_variants",
    "require_columns",
    "save_figure",
    "beyond",
    "beyond_handle",
    "cannot_run",
    "cannot_run_handle",
    "compared",
    "compared_handle",
    "limit",
    "limit_handle",
    "published",
    "published_handle",
    "reference",
    "reference_handle",
    "spread",
    "spread_handle",
    "styled",
]
