"""Scaling of training runs: steps on growing clusters, beside the limit that kernels set."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pandas as pd

from makespan.arguments import typed
from makespan.errors import InfeasiblePlanError
from makespan.hardware import cluster_of
from makespan.planning.layout import Layout
from makespan.planning.pricing import Pricer, plan
from makespan.planning.stacks import Software, Training
from makespan.planning.steptime import ALL_NAMES, Grid

_KERNELS = ("products", "experts", "attention", "head", "scan")


@typed
def kernel_limit_s(pricer: Pricer) -> float:
    """Return the time [s] of a step of matrix products, attention and scans alone, divided evenly.

    No layout is faster: nothing is communicated, computed again or waited for, and kernels run as fast as on
    one device that holds the whole model.
    """
    alone = replace(pricer, cluster=pricer.cluster.with_gpus(1))
    parts_s = alone.parts_s(Grid.of([Layout(dp=1)]))[0]
    # Columns of further terms come last.
    of_kernels = [at for at, name in enumerate(ALL_NAMES[: len(parts_s)]) if name in _KERNELS]
    return float(parts_s[of_kernels].sum()) / pricer.cluster.n_gpus


@typed
def scaling(
    training_of: Callable[[int], Training], kind: str, stack: Software, counts: Iterable[int]
) -> pd.DataFrame:
    """Plan a run on each of several numbers of devices.

    Parameters
    ----------
    training_of
        Run on a number of devices: the same for strong scaling, a larger batch on more devices for weak.
    kind, stack
        Key of the device, and the software.
    counts
        Numbers of devices.

    Returns
    -------
    pandas.DataFrame
        One row per number on which the run fits: the layout that `plan` puts first, its step with the
        interval of 90 % [s], throughput [tokens/s per GPU], utilisation [1], and `kernel_limit_s` over the
        step [1].
    """
    rows = []
    for n_gpus in counts:
        training = training_of(n_gpus)
        pricer = Pricer(training, cluster_of(kind, n_gpus), stack)
        try:
            best = plan(pricer, 1).best[0]
        except InfeasiblePlanError:
            continue
        rows.append(
            {
                "n_gpus": n_gpus,
                "batch": training.global_batch,
                "layout": f"dp{best.layout.dp} {best.layout.text}",
                "step_s": best.step_s,
                "low_s": best.low_s,
                "high_s": best.high_s,
                "tokens_per_s_per_gpu": best.tokens_per_s_per_gpu,
                "mfu": best.mfu,
                "of_limit": kernel_limit_s(pricer) / best.step_s,
            }
        )
    return pd.DataFrame(rows)
