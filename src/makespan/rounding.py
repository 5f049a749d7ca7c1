"""Rounding to significant digits, so that decisions do not depend on the processor.

The last digits of a sum, a power or a logarithm differ between processors. Two configurations that are
equally fast would then be ordered by chance, and one such tie changes the rest of a schedule. Times are
therefore rounded where they enter a table that decisions are made from.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["significant"]

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
    found = np.asarray(values, dtype=np.float64)
    usable = np.isfinite(found) & (found != 0)
    size = np.abs(np.where(usable, found, 1.0))
    exponents = digits - 1 - np.floor(np.log10(size)).astype(int)
    # Powers below 1 are not exact, so a large number is divided first and a small one multiplied.
    scale = _POWERS[np.minimum(np.abs(exponents), _EXACT)]
    is_large = exponents < 0
    counts = np.rint(np.where(is_large, found / scale, found * scale))
    rounded = np.where(usable, np.where(is_large, counts * scale, counts / scale), found)
    for place in map(tuple, np.argwhere(usable & (np.abs(exponents) > _EXACT))):
        rounded[place] = float(f"{found[place]:.{digits - 1}e}")
    return rounded
