"""Workers of the tests that are forked, by servers of their own, as those of the package are."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from makespan.runtime import forkserver as _forkserver, launch as _launch

SUPPORT = Path(__file__).parent


@contextmanager
def forking_servers():
    """Let any worker that is named by its module be forked; returns a function that lists the servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(_launch, "can_fork", lambda worker: isinstance(worker, str))
        patch.setattr(_forkserver, "_servers", {})
        yield lambda: [server for _, server in _forkserver._servers.values()]
        for connection, _ in list(_forkserver._servers.values()):
            _forkserver._discard(connection)
