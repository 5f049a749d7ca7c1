"""Times of a micro-batch on each type of GPU, from the cells that the paper prints.

The logs behind the authors' simulator are not public. A micro-batch of b samples takes alpha + beta b on a
V100, on the line through the two batch sizes that are printed: the step under D1 of Fig. 12, and the
micro-batch with context switches of Fig. 11. Where both are of one size, a tenth of the time does not depend
on it.
Other types take longer by the ratio of their steps under D1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from makespan.errors import InputError, TraceError, unknown_name

__all__ = ["Profile", "published_profile"]

_REFERENCE = "v100"
_SIZE, _D1, _D2 = _CELLS = ("micro_batch_size", "published_d1_s", "published_d1d2_s")
_FIXED_SHARE = 0.1  # of a step that does not depend on the batch, where only one size is printed


@dataclass(frozen=True, slots=True)
class Profile:
    """What a micro-batch takes.

    Parameters
    ----------
    alpha_s, beta_s_per_sample
        By model, on the reference type [s], [s/sample].
    slowdown, d2_penalty
        By model and type: time over that on the reference type, and under D1+D2 over that under D1 [1].
    """

    alpha_s: Mapping[str, float]
    beta_s_per_sample: Mapping[str, float]
    slowdown: Mapping[str, Mapping[str, float]]
    d2_penalty: Mapping[str, Mapping[str, float]]

    def micro_batch_s(self, model: str, gpu: str, n_samples: int, *, under_d2: bool = False) -> float:
        """Return the time of a micro-batch [s].

        Parameters
        ----------
        model, gpu
            Names as in the authors' job list; raises `UnknownNameError` for others.
        n_samples
            Samples of the micro-batch, at least 1 or an `InputError`.
        under_d2
            Whether kernels are those that every type of GPU can run.
        """
        if model not in self.alpha_s:
            raise unknown_name("model of the profile", model, self.alpha_s)
        if gpu not in self.slowdown[model]:
            raise unknown_name("type of GPU of the profile", gpu, self.slowdown[model])
        if n_samples < 1:
            raise InputError(f"micro-batch of {n_samples} samples; accepted: 1 or more")
        penalty = self.d2_penalty[model][gpu] if under_d2 else 1.0
        line_s = self.alpha_s[model] + self.beta_s_per_sample[model] * n_samples
        return self.slowdown[model][gpu] * line_s * penalty


def published_profile(fig11: pd.DataFrame, fig12: pd.DataFrame) -> Profile:
    """Return the profile that the printed cells give.

    Parameters
    ----------
    fig11, fig12
        Cells as from `read_published`.

    Raises
    ------
    TraceError
        A model is in one table only, or has no step on the reference type.
    """
    micro = {
        str(row["model"]): (float(row["micro_batch_size"]), float(row["published_enable_s"]))
        for row in fig11.to_dict("records")
    }
    steps: dict[str, dict[str, Mapping[str, float]]] = {}
    for row in fig12.to_dict("records"):
        cells = {name: float(row[name]) for name in _CELLS}
        steps.setdefault(str(row["model"]), {})[str(row["gpu"])] = cells
    wanting = set(micro) ^ set(steps) | {model for model, rows in steps.items() if _REFERENCE not in rows}
    if wanting:
        raise TraceError(
            f"cells of Figs 11 and 12: {', '.join(sorted(wanting))}; accepted: models with a time in both, "
            f"on {_REFERENCE} in Fig. 12"
        )
    lines = {model: _line(rows[_REFERENCE], *micro[model]) for model, rows in steps.items()}
    base = {model: rows[_REFERENCE][_D1] for model, rows in steps.items()}
    return Profile(
        {model: alpha for model, (alpha, _) in lines.items()},
        {model: beta for model, (_, beta) in lines.items()},
        {model: {gpu: row[_D1] / base[model] for gpu, row in rows.items()} for model, rows in steps.items()},
        {model: {gpu: row[_D2] / row[_D1] for gpu, row in rows.items()} for model, rows in steps.items()},
    )


def _line(step: Mapping[str, float], larger: float, larger_s: float) -> tuple[float, float]:
    """Return the time of an empty micro-batch [s] and that of a sample [s], by two batch sizes."""
    size, time_s = step[_SIZE], step[_D1]
    if larger == size:
        return _FIXED_SHARE * time_s, (1.0 - _FIXED_SHARE) * time_s / size
    slope = (larger_s - time_s) / (larger - size)
    return time_s - slope * size, slope
