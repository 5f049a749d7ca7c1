"""Figures: generic kinds that papers choose from, one style sheet, one way to save.

A figure sees its table and nothing else, so it can be drawn again from the saved CSV::

    figure = plot_sensitivity(table, source="emulated")
    save_figure(figure, table, "results/emulated/morphling/figures/sensitivity")

Marks mean the same in all figures: a hollow diamond is a published value, a cross what cannot run, and so on.
`published`, `spread`, `cannot_run`, `limit`, `reference`, `compared` and `beyond` draw them, and each has an
entry for the legend.

``source`` is always the name of the throughput source, ``styles`` the styles of the policies in the order of
the legend, where others follow in grey, and ``titles`` the titles of names that differ from them.
"""

from makespan.plots.charts import (
    ENVELOPE as ENVELOPE,
    job_spans as job_spans,
    log_ticks as log_ticks,
    plot_allocation as plot_allocation,
    plot_bands as plot_bands,
    plot_cdf as plot_cdf,
    plot_costs as plot_costs,
    plot_cpu_sensitivity as plot_cpu_sensitivity,
    plot_error_bars as plot_error_bars,
    plot_frontier as plot_frontier,
    plot_gantt as plot_gantt,
    plot_grouped_bars as plot_grouped_bars,
    plot_intervals as plot_intervals,
    plot_prediction as plot_prediction,
    plot_ratio_bars as plot_ratio_bars,
    plot_sensitivity as plot_sensitivity,
    plot_variants as plot_variants,
)
from makespan.plots.parts import (
    Bars as Bars,
    bar_handles as bar_handles,
    draw_bars as draw_bars,
    draw_heat_map as draw_heat_map,
    draw_stack as draw_stack,
    line_handle as line_handle,
    name_groups as name_groups,
    point_handle as point_handle,
)
from makespan.plots.style import (
    FAMILIES as FAMILIES,
    MODEL_TITLES as MODEL_TITLES,
    ONE_COLUMN_IN as ONE_COLUMN_IN,
    PALETTE as PALETTE,
    POLICIES as POLICIES,
    TWO_COLUMNS_IN as TWO_COLUMNS_IN,
    Style as Style,
    add_legend as add_legend,
    beyond as beyond,
    beyond_handle as beyond_handle,
    cannot_run as cannot_run,
    cannot_run_handle as cannot_run_handle,
    compared as compared,
    compared_handle as compared_handle,
    figure_kind as figure_kind,
    figure_style as figure_style,
    in_order as in_order,
    limit as limit,
    limit_handle as limit_handle,
    name_coincident as name_coincident,
    new_figure as new_figure,
    plain_numbers as plain_numbers,
    published as published,
    published_handle as published_handle,
    reference as reference,
    reference_handle as reference_handle,
    require_columns as require_columns,
    save_figure as save_figure,
    spread as spread,
    spread_handle as spread_handle,
    style_of as style_of,
    write_figure as write_figure,
)
