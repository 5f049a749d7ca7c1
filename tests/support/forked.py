"""Workers of the tests that are forked, by servers of their own, as those of the package are."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from makespan.runtime import forkserver as _forkserver, launch as _launch

SUPPORT = Path(__file__).parent
_kept = {}  # servers of all tests of this process, which load torch once


@contextmanager
def forking_servers():
    """Let any worker that is named by its module be forked, by servers that other tests use as well."""
    with _forking(_kept):
        yield


@contextmanager
def own_servers():
    """Let workers be forked by servers that end with the block; returns a function that lists them."""
    with _forking({}) as servers:
        yield lambda: [server for _, server in servers.values()]
        for connection, _ in list(servers.values()):
            _forkserver._discard(connection)


@contextmanager
def _forking(servers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(_launch, "can_fork", lambda worker: isinstance(worker, str))
        patch.setattr(_forkserver, "_servers", servers)
        yield servers
