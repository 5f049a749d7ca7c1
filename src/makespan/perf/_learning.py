"""Learning from what ran: rows of a throughput table that are known, and a model fitted to them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.perf._environment import Environment
from makespan.perf._fit import Fit
from makespan.perf._points import measured_from_table, points_from_table
from makespan.perf._table_fit import fit_table

__all__ = ["SAMPLED", "Learner"]

Floats = npt.NDArray[np.float64]

SAMPLED = "sampled"
"""Why rows of the sampling design are known."""


@dataclass(slots=True)
class Learner:
    """A model that is fitted again whenever further rows of its table have run.

    Parameters
    ----------
    rows
        Schema `makespan.tables.THROUGHPUT`, one workload, with a new index; may have infeasible rows,
        which are runs that fail. Flagged rows are known once they ran, but not fitted.
    first
        Fit to the sampled rows.
    reasons
        Why each row is known, (n_rows,); empty where it has not run.
    """

    rows: pd.DataFrame
    first: Fit
    reasons: list[str]

    @classmethod
    def from_table(cls, table: pd.DataFrame, form: str, environment: Environment) -> "Learner":
        """Start with the rows of the sampling design.

        Raises
        ------
        FitError
            No clean feasible row can be sampled.
        """
        rows = table.reset_index(drop=True)
        sampled = fit_table(rows, str(rows["workload"].iloc[0]), form, environment)
        reasons = [""] * len(rows)
        for row in np.flatnonzero(rows["feasible"].to_numpy(dtype=bool))[sampled.fitted]:
            reasons[row] = SAMPLED
        return cls(rows, sampled.fit, reasons)

    @property
    def times_s(self) -> Floats:
        """Time that each row takes when it runs [s], 0 where it fails, (n_rows,)."""
        return np.asarray(np.nan_to_num(self.rows["iter_time_s"].to_numpy(dtype=np.float64)))

    def learn(self, which: Iterable[int], reason: str) -> None:
        """Note that rows have run, and why; a reason that is known already stays."""
        for row in which:
            self.reasons[row] = self.reasons[row] or reason

    def fit(self) -> Fit:
        """Return the model fitted to all rows that ran, in the order of the table."""
        ran = np.array([reason not in ("", SAMPLED) for reason in self.reasons])
        usable = (self.rows["feasible"] & self.rows["clean"]).to_numpy(dtype=bool)
        further = self.rows[ran & usable]
        if further.empty:
            return self.first
        points = points_from_table(further, self.first.points.workload, self.first.environment)
        return self.first.refit(points, measured_from_table(further))

    def learn_until_known(self, choose: Callable[[Fit], list[int]], reason: str) -> tuple[list[int], int]:
        """Run the rows that are expected to be best, fit again, and repeat until those are known.

        Parameters
        ----------
        choose
            From the present fit to the rows that should run.
        reason
            Why these are known from then on.

        Returns
        -------
        tuple
            The rows chosen in the end, and how many ran for it.
        """
        before = sum(map(bool, self.reasons))
        while True:
            chosen = choose(self.fit())
            unknown = [row for row in chosen if not self.reasons[row]]
            if not unknown:
                return chosen, sum(map(bool, self.reasons)) - before
            self.learn(unknown, reason)
