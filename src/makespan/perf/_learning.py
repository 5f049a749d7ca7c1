"""From throughput tables to models: which rows are sampled, what a fit predicts, learning from what ran."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import FitError, InputError
from makespan.perf._environment import Environment
from makespan.perf._fit import Fit, fit
from makespan.perf._points import measured_from_table, plans_from_table, points_from_table
from makespan.plans import ExecutionPlan, Placement, PlanFamily
from makespan.workloads import Workload, is_in_zoo, workload_of
from makespan.workloads import workload as load_workload

__all__ = ["Learner", "SAMPLED", "TableFit", "fit_table", "regret", "sampling_design"]

_LOG = logging.getLogger(__name__)
_SIZES = tuple(10 ** (half / 2) for half in range(16, 23))  # of models that the zoo lacks [parameters]
Bools = npt.NDArray[np.bool_]
Pair = tuple[ExecutionPlan, Placement]
_OFFLOAD = (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)
_WANTED: tuple[tuple[tuple[PlanFamily, ...], tuple[str, ...]], ...] = (
    ((PlanFamily.DP,), ("2", "8", "2222")),
    ((PlanFamily.ZERO_DP,), ("44",)),
    (_OFFLOAD, ("2", "8", "2222")),
)
_MIXED_DEGREE = 4  # both degrees of the third model-parallel row, if it exists
Floats = npt.NDArray[np.float64]
_TIE = 1e-9  # relative difference below which two predictions count as equal
SAMPLED = "sampled"
"""Why rows of the sampling design are known."""


def sampling_design(frame: pd.DataFrame, workload: str | Workload) -> Bools:
    """Choose the rows to fit: at most seven data-parallel ones and three model-parallel ones.

    The rule looks at plans and placements, never at times. Of plain data parallelism it takes two
    and eight GPUs of one node and eight GPUs on four nodes, of the partitioned optimiser
    eight GPUs on two nodes, of offload the same three as of data parallelism. A family of which
    fewer than two of its rows exist (fewer than one, if one is wanted) is spread over what
    there is: fewest, most and middle number of GPUs and CPU threads. Of model-parallel plans it
    takes the shallowest with the widest tensor parallelism on most GPUs, the deepest with the
    narrowest on fewest GPUs, and the one nearest to tensor and pipeline degree four.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`, rows of one workload. Infeasible and flagged rows are
        not sampled.
    workload
        The workload, or its key in the zoo.

    Returns
    -------
    numpy.ndarray
        Mask, (n_rows,).
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    usable = np.flatnonzero((frame["feasible"] & frame["clean"]).to_numpy(dtype=bool))
    pairs = dict(zip(usable.tolist(), plans_from_table(frame.iloc[usable], spec), strict=True))
    chosen: list[int] = []
    for families, placements in _WANTED:
        members = {row: pair for row, pair in pairs.items() if pair[0].plan_family in families}
        chosen += _data_parallel_rows(members, placements)
    chosen += _model_parallel_rows({row: pair for row, pair in pairs.items() if pair[0].is_model_parallel})
    mask = np.zeros(len(frame), dtype=bool)
    mask[chosen] = True
    return mask


def _data_parallel_rows(members: dict[int, Pair], placements: tuple[str, ...]) -> list[int]:
    wanted = [Placement.parse(text) for text in placements]
    exact = [row for place in wanted for row, pair in members.items() if pair[1] == place]

    def size(plan: ExecutionPlan, placement: Placement) -> tuple[int, int, int]:
        return placement.n_gpus, placement.n_nodes, plan.cpu_threads

    if len(exact) >= min(2, len(placements)) or not members:
        return exact[: len(placements)]
    ordered = sorted(members, key=lambda row: (*size(*members[row]), row))
    return list(dict.fromkeys((ordered[-1], ordered[0], ordered[(len(ordered) - 1) // 2])))[: len(placements)]


def _model_parallel_rows(members: dict[int, Pair]) -> list[int]:
    if not members:
        return []

    def shallow(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return plan.pp, -plan.tp, -plan.n_gpus, -place.n_nodes, row

    def deep(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return -plan.pp, plan.tp, plan.n_gpus, place.n_nodes, row

    def mixed(row: int) -> tuple[float, ...]:
        plan, place = members[row]
        distance = abs(np.log2(plan.pp / _MIXED_DEGREE)) + abs(np.log2(plan.tp / _MIXED_DEGREE))
        return float(distance), plan.n_gpus, place.n_nodes, row

    chosen: list[int] = [min(members, key=shallow)]
    for order in (deep, mixed):
        left = [row for row in members if row not in chosen]
        chosen += [min(left, key=order)] if left else []
    return chosen


@dataclass(frozen=True, slots=True)
class TableFit:
    """A fit to the sampled rows of a throughput table and its predictions of all of them.

    Parameters
    ----------
    frame
        The feasible rows of the table, with a new index.
    fitted, predicted_s
        Which of them were sampled, and predicted iteration times [s], (n,).
    """

    fit: Fit
    frame: pd.DataFrame
    fitted: Bools
    predicted_s: Floats

    @property
    def error_pct(self) -> Floats:
        """Relative error of each prediction [%], not negative, (n,)."""
        measured = self.frame["iter_time_s"].to_numpy(dtype=np.float64)
        return np.asarray(100.0 * np.abs(self.predicted_s - measured) / measured)

    def errors(self) -> pd.DataFrame:
        """Return errors [%] on rows that were not sampled, one row a plan family and one for ``all``.

        Columns: ``model, plan_family, form, n_fit, n_validate, avg_error_pct, p95_error_pct, max_error_pct``
        over clean rows, and ``avg_error_all_rows_pct`` with flagged ones.
        """
        pairs = plans_from_table(self.frame, self.fit.points.workload)
        families = np.array([plan.plan_family.title for plan, _ in pairs])
        present = [family.title for family in PlanFamily if (families == family.title).any()]
        masks = {title: families == title for title in present} | {"all": families != ""}
        return pd.DataFrame([self._error_row(name, mask) for name, mask in masks.items()])

    def _error_row(self, family: str, mask: Bools) -> dict[str, object]:
        every = pd.Series(self.error_pct[mask & ~self.fitted], dtype=float)
        clean = every[self.frame["clean"].to_numpy(dtype=bool)[mask & ~self.fitted]]
        return {
            "model": self.fit.workload,
            "plan_family": family,
            "form": self.fit.form.name,
            "n_fit": int((mask & self.fitted).sum()),
            "n_validate": len(clean),
            "avg_error_pct": clean.mean(),
            "p95_error_pct": clean.quantile(0.95),
            "max_error_pct": clean.max(),
            "avg_error_all_rows_pct": every.mean(),
        }


def fit_table(
    frame: pd.DataFrame,
    workload: str,
    form: str,
    environment: Environment,
    *,
    sampled: Bools | None = None,
    parameters: float | None = None,
) -> TableFit:
    """Sample, fit and predict the rows of one workload in a throughput table.

    The zoo may lack the workload: then a decoder of usual proportions stands for the model, and where nobody
    states its size, the size is the one of a grid with which the model fits best, which is logged.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`; other workloads and infeasible rows are left out.
    workload, form
        Key of the workload, and a key of `FORMS`.
    sampled
        Rows to fit, (n_rows,); those of `sampling_design` if not given.
    parameters
        Number of parameters of a model that the zoo lacks.

    Raises
    ------
    FitError
        No clean feasible row can be sampled.
    """
    is_known = is_in_zoo(workload)
    key = load_workload(workload).key if is_known else workload
    if is_known and parameters is not None:
        there = load_workload(workload).model.parameters
        if parameters != there:
            found = f"{key!r} has {there} parameters, got {parameters:g}"
            raise InputError(f"{found}; state no number, or name the model differently")
    usable = ((frame["workload"] == key) & frame["feasible"].astype(bool)).to_numpy()
    kept = frame[usable].reset_index(drop=True)
    if not len(kept):
        raise FitError(f"no observation of {key!r}; at least one row is needed for a fit")
    batch = int(kept["global_batch_size"].iloc[0])
    sizes = [1.0] if is_known else _SIZES if parameters is None else [parameters]
    specs = [workload_of(key, batch, size) for size in sizes]
    measured = measured_from_table(kept)
    fitted = sampling_design(kept, specs[0]) if sampled is None else sampled[usable]
    candidates = []
    for variant in (variant for spec in specs for variant in _micro_batch_variants(spec)):
        points = points_from_table(kept, variant, environment)
        result = fit(form, points.take(fitted), measured.take(fitted), environment)
        candidates.append(TableFit(result, kept, fitted, result.predict(points)))
    best = min(candidates, key=lambda candidate: candidate.fit.cost)
    if len(sizes) > 1:
        size = best.fit.points.workload.model.parameters
        _LOG.warning("%s is not in the zoo; its times fit %.3g parameters best, state others", key, size)
    return best


def _micro_batch_variants(spec: Workload) -> list[Workload]:
    """Return the workload with each cap on micro-batches that its trace may have used but does not record."""
    one_a_sample = replace(spec, max_microbatches=spec.global_batch_size)
    return [spec] if spec.max_microbatches in (1, spec.global_batch_size) else [spec, one_a_sample]


def regret(frame: pd.DataFrame, predicted_s: Floats) -> pd.DataFrame:
    """Evaluate the choice of the plan: what is lost when the plan predicted as fastest is run.

    Of plans predicted as equally fast the one that partitions most is chosen, because it needs
    no more memory.

    Parameters
    ----------
    frame
        Columns ``workload, exec_plan, placement, clean, feasible, iter_time_s`` [s], and
        ``cpu_threads`` where the table has them; one workload.
    predicted_s
        Predicted iteration time of each row [s], (n_rows,).

    Returns
    -------
    pandas.DataFrame
        ``workload, placement, best_plan, chosen_plan, regret_pct``, one row a placement (and number
        of CPU threads) on which at least two clean plans were measured; regret is the share [%]
        of the best throughput that is lost.
    """
    usable = (frame["clean"] & frame["feasible"]).to_numpy(dtype=bool)
    kept = frame[usable].assign(predicted_s=np.asarray(predicted_s)[usable])
    keys = ["workload", "placement"] + (["cpu_threads"] if "cpu_threads" in kept else [])
    records = [
        {"workload": key[0], "placement": key[1]} | _chosen_plan(group)
        for key, group in kept.groupby(keys, sort=True)
        if len(group) > 1
    ]
    names = ["workload", "placement", "best_plan", "chosen_plan", "regret_pct"]
    return pd.DataFrame(records, columns=names)


def _chosen_plan(group: pd.DataFrame) -> dict[str, object]:
    measured = group["iter_time_s"].to_numpy(dtype=np.float64)
    predicted = group["predicted_s"].to_numpy(dtype=np.float64)
    plans = [str(text) for text in group["exec_plan"]]
    tied = np.flatnonzero(predicted <= predicted.min() * (1.0 + _TIE))
    chosen = min(tied.tolist(), key=lambda row: (not plans[row].startswith("zero"), plans[row]))
    best = int(np.argmin(measured))
    lost = 100.0 * (1.0 - measured[best] / measured[chosen])
    return {"best_plan": plans[best], "chosen_plan": plans[chosen], "regret_pct": float(lost)}


@dataclass(slots=True)
class Learner:
    """A model that is fitted again whenever further rows of its table have run.

    Parameters
    ----------
    rows
        Schema `makespan.tables.THROUGHPUT`, one workload, with a new index; may have infeasible rows,
        which are runs that fail. Flagged rows are known once they ran, but not fitted.
    first, reasons
        Fit to the sampled rows, and why each row is known, (n_rows,); empty where it has not run.
    runs_by_preset
        Whether runs after the sampled ones split their batch as the preset of the workload says, or as
        the fit to the sampled rows found.
    """

    rows: pd.DataFrame
    first: Fit
    reasons: list[str]
    runs_by_preset: bool = False

    @classmethod
    def from_table(
        cls, table: pd.DataFrame, form: str, environment: Environment, *, runs_by_preset: bool = False
    ) -> "Learner":
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
        return cls(rows, sampled.fit, reasons, runs_by_preset)

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
        spec = self.first.workload if self.runs_by_preset else self.first.points.workload
        points = points_from_table(further, spec, self.first.environment)
        return self.first.refit(points, measured_from_table(further))

    def learn_until_known(self, choose: Callable[[Fit], list[int]], reason: str) -> tuple[list[int], int]:
        """Run the rows that are expected to be best, fit again, and repeat until those are known.

        ``choose`` maps the present fit to the rows that should run; ``reason`` says why they are known then.

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
