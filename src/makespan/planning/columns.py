"""Arithmetic of columns: arrays with one entry per layout, or plain numbers where there is one layout.

Python computes with one number many times faster than numpy does with an array of one entry, and both follow
IEEE 754, so that formulas written with operators and the functions below give the same bits either way.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Column = NDArray[np.floating[Any]] | float
"""Numbers by layout, (n_layouts,), or the number of a single layout."""
Mask = NDArray[np.bool_] | bool
"""Truth values by layout, (n_layouts,), or that of a single layout."""


def where(is_first: Mask, first: Column, second: Column) -> Column:
    """Return the first number where a condition holds, and the second elsewhere."""
    if isinstance(is_first, np.ndarray):
        return np.where(is_first, first, second)
    return first if is_first else second


def at_least(values: Column, least: Column) -> Column:
    """Return numbers raised to a lower bound."""
    if isinstance(values, np.ndarray) or isinstance(least, np.ndarray):
        return np.maximum(values, least)
    return max(values, least)


def at_most(values: Column, most: Column) -> Column:
    """Return numbers lowered to an upper bound."""
    if isinstance(values, np.ndarray) or isinstance(most, np.ndarray):
        return np.minimum(values, most)
    return min(values, most)


def floor(values: Column) -> Column:
    """Return numbers rounded down."""
    return np.floor(values) if isinstance(values, np.ndarray) else float(math.floor(values))


def ceil(values: Column) -> Column:
    """Return numbers rounded up."""
    return np.ceil(values) if isinstance(values, np.ndarray) else float(math.ceil(values))


def common_divisor(number: int, values: Column) -> Column:
    """Return the greatest common divisors of a number and whole numbers."""
    if isinstance(values, np.ndarray):
        return _divisors_of(number)[values.astype(np.int32) % number]
    return float(math.gcd(number, int(values)))


@cache
def _divisors_of(number: int) -> Array:
    """Return the greatest common divisors by remainder; to look them up is faster than to compute them."""
    return np.gcd(number, np.arange(number)).astype(float)


def doublings(values: Column) -> Column:
    """Return how often 1 has to be doubled to reach numbers of 1 or more."""
    if isinstance(values, np.ndarray):
        fractions, exponents = np.frexp(values)
        return np.asarray(exponents - (fractions == 0.5), dtype=float)
    fraction, exponent = math.frexp(values)
    return float(exponent - (fraction == 0.5))


def power(values: Column, exponent: int) -> Column:
    """Return powers."""
    if isinstance(values, np.ndarray):
        return np.asarray(values**exponent)
    # The only operation here that Python rounds otherwise than numpy, such as in squares.
    return float((np.array([values]) ** exponent)[0])


def table_of(columns: Mapping[str, Column], names: tuple[str, ...], n_rows: int) -> Array:
    """Return columns side by side in the order of names, (n_rows, n_names)."""
    table = np.empty((n_rows, len(names)))
    if n_rows == 1:
        table[0] = [columns[name] for name in names]
    else:
        for at, name in enumerate(names):
            table[:, at] = columns[name]
    return table
