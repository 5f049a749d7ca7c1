"""A training worker that misbehaves: ``python odd_worker.py <what> -m <worker> <run directory>``.

It kills itself: ``kill:<rank>:<step>`` in the middle of a run, ``kill-in-save`` in that of a checkpoint. Or
it waits before a step until a file exists: ``wait:<step>:<file>``.
"""

import os
import signal
import sys
import time
from pathlib import Path

from makespan.runtime import end_worker, run_worker
from makespan.training import worker as _worker
from makespan.training.engine import Engine

_proper_step, _proper_finish = Engine.step, _worker.finish_checkpoint


def _step(self, step, stop):
    if sys.argv[1] == f"kill:{os.environ['MAKESPAN_RANK']}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1].startswith(f"wait:{step}:"):
        while not Path(sys.argv[1].split(":", 2)[2]).exists():
            time.sleep(0.02)
    return _proper_step(self, step, stop)


def _finish(directory, step, *what):
    """Die in the middle of saving: the state is written, the checkpoint is not complete."""
    if sys.argv[1] == "kill-in-save" and step > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return _proper_finish(directory, step, *what)


if __name__ == "__main__":
    Engine.step = _step
    _worker.finish_checkpoint = _finish
    end_worker(run_worker(sys.argv[-1], _worker.run_jobs))
