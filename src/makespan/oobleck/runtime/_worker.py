"""One node of a resilient run: ``python -m <this module> <directory of its processes>``."""

import os
import signal
import sys

import torch

from makespan.files import read_json
from makespan.oobleck.runtime._engine import TrainingEngine
from makespan.oobleck.runtime._node import ADDRESS_FILE, JOINING, take_part
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, run_worker

__all__ = ["work"]

OF_SEVERAL = ("torch._dynamo",)
"""What optimizers load, and takes long: a fork server has it before the first worker is forked."""


_LONGEST_WAIT_S = 7 * 24 * 3600.0
"""For another process in a pass or a sum; a last resort, because steps may be long and losses are noticed."""


def work(directory: RunDirectory, who: Identity) -> None:
    """Take part until the run is over."""
    torch.set_num_threads(who.threads)
    # Not use_deterministic_algorithms, which loads a compiler that nothing here uses.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    address = read_json(directory.path / ADDRESS_FILE)
    if address is not None and address["host"] != "127.0.0.1":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.pop(name, None)  # of a launcher that knows this machine only
    engine = TrainingEngine(str(choose_device(who)), _LONGEST_WAIT_S)
    why = take_part(directory.path, engine, who.rank if who.rank < JOINING else None)
    directory.write_result(why, who.rank)


if __name__ == "__main__":
    # Ctrl-C of a terminal reaches all its processes; the coordinator decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_worker(run_worker(sys.argv[1], work))
