"""Random numbers that belong to names, so that leaving one name out changes the draws of no other."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["named_rng", "named_seed", "named_uniforms"]

_BYTES = 8
_MANTISSA_BITS = 53  # of a float, so that each draw is exact and below 1
_SEPARATOR = "\x1f"


def named_seed(seed: int, *names: str) -> int:
    """Return a 64-bit seed that depends on a seed and on names alone, and is the same on every machine."""
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
