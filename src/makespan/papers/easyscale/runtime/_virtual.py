"""What code of the user sees of the job: its logical worker, and nothing of the processes."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["hide_processes", "seen_as"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_seen: list[tuple[int, int]] = []


@contextmanager
def seen_as(rank: int, n_logical_workers: int) -> Iterator[None]:
    """Answer as the process of this virtual rank would, of as many as there are logical workers."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    _seen.append((rank, n_logical_workers))
    os.environ |= dict(zip(_VARIABLES, map(str, (rank, n_logical_workers) * 2), strict=True))
    try:
        yield
    finally:
        _seen.pop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def hide_processes() -> None:
    """Let ``torch.distributed`` tell the code that is loaded from now on its virtual rank and number.

    Torch asks itself by other names, so that its own answers stay those of the process group.
    """
    # The stubs of torch hide what is replaced here.
    dist: Any = importlib.import_module("torch.distributed")
    own_rank, own_size = dist.get_rank, dist.get_world_size

    def get_rank(group: Any = None) -> Any:
        return _seen[-1][0] if _seen and group is None else own_rank(group)

    def get_world_size(group: Any = None) -> Any:
        return _seen[-1][1] if _seen and group is None else own_size(group)

    dist.get_rank, dist.get_world_size = get_rank, get_world_size
