"""When two tensors count as equal, and by how much they differ."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GRADIENT", "OUTPUT", "Comparison", "Tolerance", "compare", "size_of", "tolerance_for"]

OUTPUT, GRADIENT = "output", "gradient"
_TOLERANCES = {
    torch.float64: {OUTPUT: 1e-10, GRADIENT: 1e-9},
    torch.float32: {OUTPUT: 1e-5, GRADIENT: 1e-4},
    torch.float16: {OUTPUT: 4e-3, GRADIENT: 2e-2},
    torch.bfloat16: {OUTPUT: 3e-2, GRADIENT: 1e-1},
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a value may be off: ``rtol`` of itself, and ``atol`` of the largest value of its tensor."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        """Return it as reports name it."""
        return f"{self.rtol:g} of the value and {self.atol:g} of the largest"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tensor of the scheduled model beside that of the original one.

    Parameters
    ----------
    kind, name
        What it is, such as ``parameter gradient``, and whose.
    max_abs_error, max_rel_error
        Largest difference, and the same over the largest value of the original tensor; NaN where they cannot
        be compared.
    fault
        What is wrong, empty where they agree.
    """

    kind: str
    name: str
    max_abs_error: float
    max_rel_error: float
    fault: str = ""

    def __str__(self) -> str:
        """Return it as a line of a report."""
        return f"{self.kind} {self.name}: {self.fault or 'agrees'}"


def tolerance_for(dtype: torch.dtype, what: str, rtol: float | None, atol: float | None) -> Tolerance:
    """Return what is accepted of an output or gradient of a type, where nobody said it otherwise."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    known = _TOLERANCES.get(dtype.to_real(), _TOLERANCES[torch.bfloat16])[what]
    return Tolerance(known if rtol is None else rtol, known if atol is None else atol)


def size_of(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    values = tensor.detach()
    if values.numel() == 0:
        return 0.0
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.float64)
    largest = float(torch.linalg.vector_norm(values, math.inf))  # one pass, without a second tensor
    if math.isfinite(largest):
        return largest
    magnitudes = values.abs()
    return float(torch.where(magnitudes.isfinite(), magnitudes, torch.zeros_like(magnitudes)).max())


def compare(
    kind: str, name: str, actual: Tensor, expected: Tensor, accepted: Tolerance, size: float | None = None
) -> Comparison:
    """Compare a tensor with what is expected.

    ``size`` takes the place of the largest expected value: of a whole of which this is a part, or of other
    tensors of the kind where all values of this one may be rounding.
    """
    if actual.shape != expected.shape:
        fault = f"has shape {tuple(actual.shape)}; expected: {tuple(expected.shape)}"
        return Comparison(kind, name, math.nan, math.nan, fault)
    if actual.dtype != expected.dtype:
        return Comparison(
            kind, name, math.nan, math.nan, f"has type {actual.dtype}; expected: {expected.dtype}"
        )
    scale = size_of(expected) if size is None else size
    actual, expected = actual.detach(), expected.detach()
    is_number = expected.is_floating_point() or expected.is_complex()
    wide = torch.promote_types(expected.dtype, torch.float32)
    difference = actual.to(wide) - expected.to(wide)
    largest = size_of(difference)
    relative = largest / scale if scale else math.inf if largest else 0.0
    rtol, atol = (accepted.rtol, accepted.atol * scale) if is_number else (0.0, 0.0)
    is_finite = bool(torch.isfinite(difference.sum()))
    if is_finite and largest <= atol:
        return Comparison(kind, name, largest, relative)
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError:
        n_off = int((~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)).sum())
        fault = (
            f"{n_off} of {expected.numel()} values differ, by up to {largest:.3g} where the largest is "
            f"{scale:.3g}; accepted: {accepted}"
        )
        return Comparison(kind, name, largest, relative, fault)
    return Comparison(kind, name, largest, relative)
