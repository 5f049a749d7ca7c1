"""Which terms the phase columns of a trace contain, by the style of the software stack."""

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._features import Features

__all__ = ["phases"]

_Array = NDArray[np.float64]

_OPTIMIZER = ("device_update", "host_update", "host_to_device", "offload_overhead", "parameter_gather")


def _sum(terms: dict[str, _Array], *names: str) -> _Array:
    return np.asarray(sum(terms[name] for name in names))


def _zero(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    in_forward = terms["tensor_exchange"] / x["tensor_passes"]
    backward = _sum(terms, "backward", "recompute", "stage_transfer", "gradient_exchange")
    overlap = backward + terms["gradient_to_host"] + terms["tensor_exchange"] - in_forward
    return terms["forward"] + in_forward, overlap, _sum(terms, *_OPTIMIZER)


def _model_parallel(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    pipeline = _sum(terms, "forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    return 0.0 * pipeline, pipeline, _sum(terms, *_OPTIMIZER)


def _asynchronous(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    launch = np.minimum(x["launch_s"], terms["forward"])
    compute = _sum(
        terms, "forward", "backward", "recompute", "tensor_exchange", "stage_transfer", "gradient_to_host"
    )
    return launch, compute - launch, terms["gradient_exchange"] + _sum(terms, *_OPTIMIZER)


_STYLES = {"zero": _zero, "3d": _model_parallel, "ddp": _asynchronous}


def phases(style: str, terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    """Return the columns forward, overlap_sync and optimize [s], each (n_points,).

    They need not add up to the iteration time: style ``3d`` reports the pipeline and the
    optimiser but not the gradient exchange, and no style reports the fixed time.

    Parameters
    ----------
    style
        ``zero``: forward compute; backward with recomputation, exchange and host transfer;
        optimiser. ``3d``: nothing; the pipeline; the optimiser. ``ddp``: forward is the time to
        launch the kernels, the compute follows, and the exposed exchange is in the optimiser.
    terms
        See `makespan.emulator.predict_terms`.
    x
        Features.
    """
    return _STYLES[style](terms, x)
