"""The meeting point of a generation: a store that the coordinator owns, and that ends with the generation."""

import importlib
import os
import socket
from datetime import timedelta
from typing import Any

__all__ = ["StoreMeeting", "reached"]

_SERVED = timedelta(seconds=300)
_CONNECT_S = 5.0


class StoreMeeting:
    """A store of torch at a port that is free; closing it ends the waits of those who meet there."""

    def __init__(self, generation: int) -> None:
        is_alone = "SLURM_JOB_ID" not in os.environ
        host = "127.0.0.1" if is_alone else socket.gethostname()
        # The stubs of torch hide its public stores.
        dist: Any = importlib.import_module("torch.distributed")
        self._store: Any = dist.TCPStore(host, 0, None, True, _SERVED, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"
        self.generation = generation

    def close(self) -> None:
        """Close it."""
        self._store = None


def reached(address: str, generation: int, timeout_s: float) -> Any:
    """Return the store at an address, for a generation; a `LostPeerError` says that it is closed."""
    from makespan.papers.oobleck.runtime._links import LostPeerError  # loads torch

    host, _, port = address.rpartition(":")
    dist: Any = importlib.import_module("torch.distributed")
    try:
        # A store that was there and is not any more is closed; torch would try again until its time is over.
        socket.create_connection((host, int(port)), _CONNECT_S).close()
        connecting = timedelta(seconds=_CONNECT_S)
        store = dist.TCPStore(host, int(port), None, False, connecting, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"generation-{generation}", store)
    except (OSError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    raise LostPeerError(f"the meeting point at {address} is closed: {problem}")
