"""A worker that trains nothing: ``python toy_worker.py <run directory>``.

The process that the request names kills itself; the other waits for word of it and goes on alone.
"""

import os
import signal
import sys
import time

from makespan.files import write_json
from makespan.runtime import end_worker, join, run_worker


def work(directory, who):
    request, seen = directory.request(), {"pid": os.getpid(), "rank": who.rank, "threads": who.threads}
    seen |= {"greeting": os.environ.get("GREETING"), "cpus": sorted(os.sched_getaffinity(0))}
    if request["meet"]:
        import torch

        join(directory, who)
        total = torch.tensor(who.rank + 1)
        torch.distributed.all_reduce(total)
        seen |= {"sum": int(total), "torch_threads": torch.get_num_threads()}
    write_json(seen, directory.path / f"seen-{who.rank}.json")
    until(lambda: all((directory.path / f"seen-{rank}.json").exists() for rank in range(who.size)))
    if who.rank == request["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    until(directory.lost)
    if request["meet"]:
        torch.distributed.destroy_process_group()
        pids = join(directory, who, members=[who.rank], meeting=1)
        torch.distributed.all_reduce(total)
        assert pids == [os.getpid()]
        assert int(total) == seen["sum"]
    directory.write_result({"lost": directory.lost(), "by": who.rank})


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
