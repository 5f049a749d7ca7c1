"""Numerical tools: confidence intervals, random numbers by name, and rounding to significant digits."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from numpy.typing import NDArray

# --- Confidence intervals of means ---

_LEVEL = 0.95


def half_widths(groups: "pd.api.typing.SeriesGroupBy[float, Any]") -> npt.NDArray[np.float64]:
    """Return half the width of the 95 % confidence interval of the mean of each group, (n_groups,).

    The interval follows Student's t distribution, and is NaN for a group of one value.
    """
    from scipy import special  # imported here: it is slow, and most figures have no bands

    n = groups.count().to_numpy(float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _LEVEL / 2.0)
    return np.asarray(quantile * groups.std(ddof=1).to_numpy(float) / np.sqrt(n), dtype=np.float64)


def intervals(rows: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Return geometric means and their 95 % confidence intervals, which suit positive and skewed times.

    The table has one row per group, in the order of appearance: the columns ``by``, the number of rows ``n``,
    and for each column ``<column>_mean``, ``_low`` and ``_high``. The interval is that of the mean of the
    logarithms, and NaN for a single row.
    """
    keys = [rows[name] for name in by]
    table = rows.groupby(list(by), sort=False).size().rename("n").reset_index()
    for column in columns:
        logs = np.log(rows[column]).groupby(keys, sort=False)
        mean = logs.mean().to_numpy(dtype=float)
        half = half_widths(logs)
        table[f"{column}_mean"] = np.exp(mean)
        table[f"{column}_low"], table[f"{column}_high"] = np.exp(mean - half), np.exp(mean + half)
    return table


# --- Random numbers by name: leaving one name out does not change the draws of the others ---

_BYTES = 8
_MANTISSA_BITS = 53  # of a float, so that each draw is exact and below 1
_SEPARATOR = "\x1f"


def named_seed(seed: int, *names: str) -> int:
    """Return a 64-bit seed that depends only on a seed and names, and is the same on every machine."""
    text = _SEPARATOR.join((str(seed), *names))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_BYTES).digest()
    return int.from_bytes(digest, "big")


def named_rng(seed: int, *names: str) -> np.random.Generator:
    """Return the generator of `named_seed`."""
    return np.random.Generator(np.random.PCG64(named_seed(seed, *names)))


def named_uniforms(seed: int, purpose: str, names: Iterable[str]) -> NDArray[np.float64]:
    """Draw a number from 0 to 1 for each name, (n_names,); equal names get equal numbers."""
    shift = 8 * _BYTES - _MANTISSA_BITS
    drawn = [(named_seed(seed, purpose, name) >> shift) / 2**_MANTISSA_BITS for name in names]
    return np.array(drawn, dtype=np.float64)


# --- Rounding to significant digits, so that decisions do not depend on the processor ---
#
# The last digits of a sum, a power or a logarithm differ between processors. Equally fast configurations
# would then be ordered by chance, and one such tie changes the rest of a schedule. Times are therefore
# rounded where they enter a table on which decisions are based.

_EXACT = 22  # the largest power of ten that is exact
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(_EXACT + 1)])


def significant(values: npt.ArrayLike, digits: int = 9) -> npt.NDArray[np.float64]:
    """Round values to significant decimal digits; zeros, NaN and infinities stay.

    Parameters
    ----------
    values
        Numbers of any shape.
    digits
        Digits that are kept, 1 to 15.

    Returns
    -------
    numpy.ndarray
        The rounded numbers, in the shape of ``values``.
    """
    numbers = np.asarray(values, dtype=np.float64)
    usable = np.isfinite(numbers) & (numbers != 0)
    size = np.abs(np.where(usable, numbers, 1.0))
    exponents = digits - 1 - np.floor(np.log10(size)).astype(int)
    # Powers below 1 are not exact, so a large number is divided first and a small one multiplied.
    scale = _POWERS[np.minimum(np.abs(exponents), _EXACT)]
    is_large = exponents < 0
    counts = np.rint(np.where(is_large, numbers / scale, numbers * scale))
    rounded = np.where(usable, np.where(is_large, counts * scale, counts / scale), numbers)
    for place in map(tuple, np.argwhere(usable & (np.abs(exponents) > _EXACT))):
        rounded[place] = float(f"{numbers[place]:.{digits - 1}e}")
    return rounded
