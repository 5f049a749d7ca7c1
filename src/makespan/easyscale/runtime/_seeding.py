"""The rule by which random states follow from what they are for; the only thing that reference runs share."""

import hashlib
import random

import torch
from numpy.random import mtrand

__all__ = ["seed_everything", "seed_stream"]


def seed_everything(*words: object) -> None:
    """Seed Python, NumPy and torch (all its devices) from words such as a seed and a virtual rank."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    random.seed(number)
    mtrand.seed(number & 0xFFFF_FFFF)
    torch.manual_seed(number)


def seed_stream(seed: int, rank: int, epoch: int, stream: int) -> None:
    """Seed what one of the loaders of a logical worker draws in an epoch, wherever it runs."""
    seed_everything(seed, "loader", rank, epoch, stream)
