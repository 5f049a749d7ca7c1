"""Off the testbed: predictions of the planner for runs that others have published, beside two baselines.

The performance model of the paper is fitted to runs of one testbed. The planner predicts steps on any
cluster; this shows how far off it is, for readers who judge the reproduction by what carries over.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from makespan.errors import MissingDataError
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.planning import find_tables, predictions, read_rows, recorded_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn

_LOG = logging.getLogger(__name__)
_ROWS = {
    "group": "group",
    "source": "source",
    "model": "model",
    "n_gpus": "n_gpus",
    "measured_step_s": "measured_s",
    "predicted_step_s": "predicted_s",
    "low_step_s": "low_s",
    "high_step_s": "high_s",
}
_DRAWN = 3  # rows of a group that refine its predictions, in the figure
_SKIPPED = "no published rows:\nthe folder public-rows\nis not there"


class PublicRows(Experiment):
    """Predict each published row from the rows of all other sources; errors are those recorded."""

    name = "public_rows"
    tables = {
        "public_rows": "steps that others have published, and predictions; empty without the folder of rows",
        "public_errors": "errors of predictions by group of published rows, beside those of two baselines",
    }
    figures = (
        Figure(
            "public_rows",
            "Off the testbed",
            "Steps that others have published for models and clusters of their own "
            "({rows: rows public_rows}), and errors of predictions by group, after three rows of the group "
            "were given. Each row is predicted from the rows of all other sources; gray lines are intervals "
            "of 90 %. The baselines, a constant utilisation and a common scale, get the same three rows.",
            tables=("public_rows", "public_errors"),
            sources=("published",),
            draw="makespan.papers.morphling.public_rows:draw",
        ),
    )
    sources = ("published",)
    unjudged = frozenset({"public_rows", "public_errors"})
    reads_files = True
    minutes = 5

    def policies_run(self) -> tuple[str, ...]:
        """Return that no policy runs."""
        return ()

    def compute(self, given: Given) -> Mapping[str, pd.DataFrame]:
        """Return rows and errors; without the folder of rows, which is logged, there are errors alone."""
        if given.published is None:
            raise MissingDataError("no directory with published rows")
        try:
            found = predictions(read_rows(find_tables(given.published[0]))[0])
        except MissingDataError as missing:
            _LOG.warning("published rows are left out: %s", missing)
            found = pd.DataFrame(columns=list(_ROWS))
        errors = recorded_errors()[["group", "rows", "drawn", "error", "scale_error", "utilisation_error"]]
        return {"public_rows": found[list(_ROWS)].rename(columns=_ROWS), "public_errors": errors}


def draw(tables: Mapping[str, pd.DataFrame], source: str) -> "tuple[Drawn, pd.DataFrame]":
    """Draw measured and predicted steps, and errors by group beside those of the baselines."""
    from matplotlib.ticker import NullFormatter

    from makespan.plots import figure_style, new_figure, plain_numbers

    rows, errors = tables["public_rows"], tables["public_errors"]
    groups = errors[errors["drawn"] == _DRAWN].sort_values("error", ascending=False)

    @figure_style
    def drawn() -> "Drawn":
        figure = new_figure(7.0, 4.8)
        scatter, bars = figure.subplots(1, 2)
        if rows.empty:
            scatter.text(0.5, 0.5, _SKIPPED, ha="center", va="center", transform=scatter.transAxes)
            scatter.set(xticks=[], yticks=[])
        else:
            ends = [0.7 * rows["measured_s"].min(), 1.4 * rows["measured_s"].max()]
            scatter.plot(ends, ends, color="0.5", lw=0.7, label="without error")
            scatter.vlines(rows["measured_s"], rows["low_s"], rows["high_s"], color="0.8", lw=0.5, zorder=0)
            for number, (name, own) in enumerate(rows.groupby("source")):
                mark = "osv^D*"[number // 8 % 6]
                scatter.plot(
                    own["measured_s"],
                    own["predicted_s"],
                    f"C{number % 8}{mark}",
                    ms=2.5,
                    ls="none",
                    label=name,
                )
            scatter.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
            for axis in (scatter.xaxis, scatter.yaxis):
                axis.set_major_formatter(plain_numbers())
                axis.set_minor_formatter(NullFormatter())
            scatter.legend(
                fontsize=7, loc="upper left", labelspacing=0.15, handletextpad=0.2, borderaxespad=0.1
            )
        scatter.set(xlabel="published step [s]", ylabel="predicted step [s]")
        places = range(len(groups))
        bars.barh(places, 100 * groups["error"], height=0.6, color="C0", label="prediction")
        for column, mark, label in (
            ("scale_error", "kx", "one scale"),
            ("utilisation_error", "k+", "one utilisation"),
        ):
            bars.plot(100 * groups[column], places, mark, ms=4, ls="none", label=label)
        bars.set_yticks(places, labels=groups["group"].tolist(), fontsize=7)
        bars.set(xlabel=f"mean error after {_DRAWN} rows [%]", xlim=(0, None))
        bars.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1.0, 0.88))  # beside the short bars
        return figure

    return drawn(), rows if len(rows) else groups
