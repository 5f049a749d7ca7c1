"""Figures: one function from a table to a figure for each kind, one style sheet, one way to save.

A figure sees its table and nothing else, so it can be drawn again from the saved CSV::

    figure = plot_adaptation(table, source="emulated", stage_minutes=30, global_batch_size=16)
    save_figure(figure, table, "results/emulated/morphling/figures/fig7")
"""

from makespan.plots._accuracy import plot_accuracy
from makespan.plots._adaptation import plot_adaptation
from makespan.plots._cluster import plot_allocation, plot_gantt
from makespan.plots._errors import plot_error_bars, plot_prediction
from makespan.plots._policies import plot_ablation, plot_jct_cdf, plot_table4
from makespan.plots._policy_style import PolicyStyle, policy_order, policy_style
from makespan.plots._sensitivity import ENVELOPE, plot_cpu_sensitivity, plot_sensitivity
from makespan.plots._sharing import plot_sharing
from makespan.plots._spans import job_spans
from makespan.plots._studies import plot_large_models, plot_load, plot_rounds, plot_scale
from makespan.plots._style import (
    FAMILY_COLOURS,
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    save_figure,
    style,
)

__all__ = [
    "ENVELOPE",
    "FAMILY_COLOURS",
    "MODEL_TITLES",
    "ONE_COLUMN_IN",
    "PALETTE",
    "TWO_COLUMNS_IN",
    "PolicyStyle",
    "job_spans",
    "plot_ablation",
    "plot_accuracy",
    "plot_adaptation",
    "plot_allocation",
    "plot_cpu_sensitivity",
    "plot_error_bars",
    "plot_gantt",
    "plot_jct_cdf",
    "plot_large_models",
    "plot_load",
    "plot_prediction",
    "plot_rounds",
    "plot_scale",
    "plot_sensitivity",
    "plot_sharing",
    "plot_table4",
    "policy_order",
    "policy_style",
    "save_figure",
    "style",
]
