"""Worker process of a bandwidth measurement: ``python -m makespan.profiling.bandwidth <run directory>``."""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from makespan.profiling.rates import ExchangeSizes
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, join, run_worker

_WARM_UP, _REPEATS = 3, 9
_FLOAT_BYTES = 4
_LEAST_DEVICE_BYTES = 1 << 28  # more than the caches of a GPU hold


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the median time of an action on all processes at once [s]."""
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier()
        begun = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return median(times[_WARM_UP:])


def measure(directory: RunDirectory, who: Identity) -> None:
    """Time copies to the host and on the device, and between processes the collectives of training [s]."""
    sizes, device = ExchangeSizes(**directory.request()), choose_device(who)
    join(directory, who)
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(sizes.gradient_bytes // _FLOAT_BYTES // size * size, device=device)
    activation = torch.zeros(sizes.activation_bytes // _FLOAT_BYTES, device=device)
    on_host = torch.zeros(len(whole))

    def transfer() -> None:
        if rank == 0:
            dist.send(activation, 1)
        elif rank == 1:
            dist.recv(activation, 0)

    times = {"copy_s": _timed(lambda: on_host.copy_(whole), device), "bytes": float(whole.nbytes)}
    least = _LEAST_DEVICE_BYTES if device.type == "cuda" else 0
    source = torch.zeros(max(whole.nbytes, least) // _FLOAT_BYTES, device=device)
    target = torch.empty_like(source)
    times |= {
        "device_copy_s": _timed(lambda: target.copy_(source), device),
        "device_bytes": 2.0 * source.nbytes,  # read and written
    }
    if size > 1:
        times |= {
            "all_reduce_s": _timed(lambda: dist.all_reduce(whole), device),
            "transfer_s": _timed(transfer, device),
            "activation_bytes": float(activation.nbytes),
        }
    if who.rank == 0:
        directory.write_result(times)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], measure))
