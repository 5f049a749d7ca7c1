"""What a measurement was made on: processor, memory, devices, libraries, and who else was busy."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from makespan.errors import InputError

__all__ = ["describe_machine", "gpu_names", "memory_bytes", "usable_cpus"]

_LIBRARIES = ("makespan", "numpy", "torch")
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION")
_QUERY_LIMIT_S = 30


def describe_machine() -> dict[str, Any]:
    """Describe this machine in plain values, for the record beside a measurement.

    ``cpus`` are those usable by this process, ``gpus`` those that the tool of the driver lists, whoever uses
    them, ``visible_devices`` those granted to this process (None without a grant), ``load`` is the mean
    number of processes that wanted to run over the last minute.
    """
    return {
        "processor": _processor(),
        "cpus": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus_of_driver(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm": {name: os.environ[name] for name in _SLURM if name in os.environ},
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def usable_cpus() -> int:
    """CPUs that this process may run on, counted."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine [B]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_names(places: Sequence[int]) -> str:
    """Name GPUs, given by their places among those granted to this process, as CUDA wants to be told."""
    granted = _granted_gpus()
    if granted is None:
        return ",".join(map(str, places))
    if beyond := [place for place in places if place >= len(granted)]:
        raise InputError(f"GPU {beyond[0]}, but {len(granted)} granted; accepted: places from 0 on")
    return ",".join(granted[place] for place in places)


def _granted_gpus() -> list[str] | None:
    """Names in ``CUDA_VISIBLE_DEVICES``, None where it is not set; like CUDA, none after a number below 0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [one.strip() for one in named.split(",")]
    return list(takewhile(lambda one: bool(one) and not one.startswith("-"), names))


def _gpus_of_driver() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU, with the keys of nvidia-smi; empty where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = ("name", "memory.total", "driver_version")
    try:
        query = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        listed = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True, timeout=_QUERY_LIMIT_S)
    except subprocess.SubprocessError:
        return []
    rows = [line.split(", ") for line in listed.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
