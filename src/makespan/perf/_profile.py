"""The one profiled forward time of a model, found among its observations by rule."""

import numpy as np
import numpy.typing as npt

from makespan.errors import FitError
from makespan.perf._forms import Profile
from makespan.perf._points import Measured, Points

__all__ = ["forward_profile"]

Index = npt.NDArray[np.intp]
_PREFERRED_GPUS = 2.0  # one GPU often needs several passes, many GPUs leave few samples each


def forward_profile(points: Points, measured: Measured, backward_ratio: float) -> Profile:
    """Find the forward time that all predictions of a model are scaled from.

    In order of preference: the forward phase of a data-parallel row on one node; where the stack
    reports launch times instead (it runs asynchronously), the growth of the iteration time with
    the samples of a replica; the least that the pipeline phase or iteration time of any row
    leaves for a sample. All but the first contain the backward pass and are divided by
    ``1 + backward_ratio``. The choice does not depend on the order of the rows.

    Parameters
    ----------
    points, measured
        Observations of one workload.
    backward_ratio
        Backward over forward time that the division assumes.

    Returns
    -------
    Profile
        Forward time, samples and passes.

    Raises
    ------
    FitError
        There is no observation.
    """
    if len(points) == 0:
        raise FitError(f"no observation of {points.workload.key!r}; at least one row is needed for a fit")
    replicated = _ordered(points, measured, ~points.is_model_parallel & (points.n_nodes == 1))
    if points.workload.data_parallel_stack.phase_style == "ddp":
        found = _from_growth(points, measured, replicated, backward_ratio)
    else:
        found = _from_phase(points, measured, replicated)
    return found or _from_whole(points, measured, backward_ratio)


def _ordered(points: Points, measured: Measured, mask: npt.NDArray[np.bool_]) -> Index:
    """Rows of a mask, plain data parallel first, then nearest to the preferred number of GPUs."""
    rows = np.flatnonzero(mask)
    keys = (
        measured.iter_time_s[rows],
        points.n_gpus[rows],
        np.abs(np.log2(points.n_gpus[rows] / _PREFERRED_GPUS)),
        points.checkpoint_fraction[rows],
        points.is_offload[rows],
        ~points.is_data_parallel[rows],
    )
    return rows[np.lexsort(keys)]


def _from_phase(points: Points, measured: Measured, rows: Index) -> Profile | None:
    for row in rows:
        if measured.forward_s[row] > 0:
            samples, passes = points.replica_batch_size[row], points.n_micro[row]
            return Profile(float(measured.forward_s[row]), float(samples), float(passes), "forward phase")
    return None


def _from_growth(points: Points, measured: Measured, rows: Index, backward_ratio: float) -> Profile | None:
    rows = rows[points.is_data_parallel[rows] & (points.checkpoint_fraction[rows] == 0)]
    if len(rows) < 2:
        return None
    batch, time = points.replica_batch_size[rows], measured.iter_time_s[rows]
    most, least = int(np.argmax(batch)), int(np.argmin(batch))
    samples, growth = batch[most] - batch[least], time[most] - time[least]
    if samples <= 0 or growth <= 0:
        return None
    return Profile(float(growth / (1.0 + backward_ratio)), float(samples), 0.0, "growth with the batch")


def _from_whole(points: Points, measured: Measured, backward_ratio: float) -> Profile:
    """Take the least forward time of a sample that any row implies: each bounds it from above."""
    bubble = (points.n_micro + points.pp - 1.0) / (points.n_micro * points.pp)
    reported = points.is_model_parallel & (measured.overlap_sync_s > 0)
    time = np.where(reported, measured.overlap_sync_s, measured.iter_time_s)
    time = time * points.tp / np.where(points.is_model_parallel, bubble, 1.0)
    passes = 1.0 + backward_ratio + points.checkpoint_fraction
    per_sample = time / passes / (points.replica_batch_size * points.tokens_share)
    return Profile(float(per_sample.min()), 1.0, 0.0, "least share of an iteration")
