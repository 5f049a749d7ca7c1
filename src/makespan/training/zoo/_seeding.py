"""Generators that follow from what they are for; nothing that was drawn before changes what they give."""

import hashlib

import numpy as np

__all__ = ["generator_for"]


def generator_for(*words: object) -> np.random.Generator:
    """Return the generator that belongs to these words, such as a seed and the name of a weight."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
