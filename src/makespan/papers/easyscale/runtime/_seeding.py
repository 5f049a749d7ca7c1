"""The rule by which every random state of a logical worker follows from what it is."""

import hashlib
import random

import numpy as np
import torch

__all__ = ["seed_everything"]


def seed_everything(*words: object) -> None:
    """Seed Python, NumPy and torch (all its devices) from words such as a seed and a virtual rank."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFF_FFFF)  # noqa: NPY002 - the state that code of others draws from
    torch.manual_seed(number)
