"""A worker that trains nothing: ``python toy_worker.py <run directory>``; the request says what it does."""

import os
import signal
import sys
import time

from makespan.errors import InputError
from makespan.files import write_json
from makespan.runtime import end_worker, join, run_worker


def work(directory, who):
    request, seen = directory.request(), {"pid": os.getpid(), "rank": who.rank, "size": who.size}
    seen |= {"local_rank": who.local_rank, "threads": who.threads, "greeting": os.environ.get("GREETING")}
    seen |= {"tunables": os.environ.get("GLIBC_TUNABLES")}
    seen |= {"cpus": sorted(os.sched_getaffinity(0)), "directory": os.getcwd(), "timeout_s": who.timeout_s}
    write_json(seen, directory.path / f"seen-{who.rank}.json")
    until(lambda: all((directory.path / f"seen-{rank}.json").exists() for rank in range(who.size)))
    DO[request["do"]](directory, who)


def survive(directory, who):
    """Kill the first process; the other waits for word of it."""
    if who.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    until(directory.lost)
    directory.write_result(directory.lost())


def meet_anew(directory, who):
    """Meet, kill the first process, and let the other meet alone."""
    import torch

    pids, total = join(directory, who), torch.tensor(who.rank + 1)
    torch.distributed.all_reduce(total)
    if who.rank == 0:
        until(lambda: (directory.path / "sum.json").exists())
        os.kill(os.getpid(), signal.SIGKILL)
    write_json([pids, int(total), torch.get_num_threads()], directory.path / "sum.json")
    until(directory.lost)
    torch.distributed.destroy_process_group()
    alone = join(directory, who, members=[who.rank], meeting=1)
    torch.distributed.all_reduce(total)
    directory.write_result({"lost": directory.lost(), "alone": alone, "sum": int(total)})


def kill(directory, who):
    if who.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def fail(directory, who):
    """Fail in the second process first, and then in the other one that misses it."""
    if who.rank == 1:
        raise ValueError("the data are bad")
    until(lambda: directory.error(1))
    raise RuntimeError("the other one is gone")


def refuse(directory, who):
    """Fail in the second process with an error that is a message to users."""
    if who.rank == 1:
        raise InputError("samples is 0; expected 1 or more")
    time.sleep(600)


def leave(directory, who):
    os._exit(7 if who.rank == 0 else 0)


def hang(directory, who):
    if who.rank == 0:
        directory.write_meeting(0, [os.getpid()])
    time.sleep(600)


def start_slowly(directory, who):
    time.sleep(1)


def meet_late(directory, who):
    """Meet, the second process long after the first."""
    time.sleep(2 * who.rank)
    join(directory, who)


def kill_server(directory, who):
    """Kill the process that forked this one, and go on."""
    if who.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def speak(directory, who):
    print("said aloud")  # noqa: T201 - where it goes is what the test is about
    sys.stderr.write("and complained\n")


def end(directory, who):
    directory.write_progress({"step": 1})


def stop(directory, who):
    """Stop the second process, as a debugger or a machine that does not answer would."""
    if who.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(directory.lost)


def miss(directory, who):
    """Be ready to meet, and never do."""
    directory.write_ready(who.rank)
    time.sleep(600)


_ALL = (
    survive, meet_anew, kill, fail, refuse, leave, hang, start_slowly, meet_late, kill_server, speak, end,
    stop, miss,
)  # fmt: skip
DO = {one.__name__: one for one in _ALL}


def until(condition):
    deadline = time.monotonic() + 3600
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
