"""A process that runs functions of a test together with others: ``python group_worker.py <run directory>``.

The request names a module of tests/support and its functions, each of which every process calls.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from makespan.runtime import Launch, LocalLauncher, end_worker, join, run_worker

PRELOAD = ("torch.distributed", "torch._dynamo")


def on_processes(n_processes, module, *cases, launcher=None):
    """Run functions of a module of tests/support in so many processes; raise what the first one raised.

    A case is a name, or a name and options; without a launcher, it runs on the CPU. Call it where
    `forking_servers` are at work.
    """
    named = [(case, {}) if isinstance(case, str) else case for case in cases]
    request = {"module": module, "cases": named}
    with tempfile.TemporaryDirectory() as directory:
        launcher = launcher or LocalLauncher(timeout_s=3600.0, stall_timeout_s=3600.0)
        launcher.run(Launch("group_worker", request, n_processes, Path(directory)))


def work(directory, who):
    request = directory.request()
    module = importlib.import_module(request["module"])
    join(directory, who)
    for name, options in request["cases"]:
        getattr(module, name)(**options)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
