"""Whether the kernel sets of this machine differ, tried in processes that start with each of them."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from makespan.easyscale.runtime._kernels import KERNEL_SETS, process_options
from makespan.easyscale.runtime._levels import DeterminismLevel
from makespan.errors import unknown_name
from makespan.leftovers import temporary_directory
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory

__all__ = ["KernelTrial", "try_kernel_sets"]

_WORKER = "makespan.easyscale.runtime._profile_worker"
_NATIVE_PAIR, _SYNTHETIC_PAIR = ("A", "B"), ("seq", "tree")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """What one training step of a fixed model gave under each kernel set.

    Parameters
    ----------
    found
        By kernel set: ``parameters``, hash before the step; ``loss``, hexadecimal; ``gradients``, their hash;
        ``capability``, the instructions that torch chose.
    """

    found: Mapping[str, Mapping[str, str]]

    @property
    def coinciding(self) -> list[tuple[str, str]]:
        """Pairs of kernel sets with the same gradients, bit for bit; one cannot tell them apart here."""
        hashes = {name: one["gradients"] for name, one in self.found.items()}
        return [(a, b) for a, b in combinations(hashes, 2) if hashes[a] == hashes[b]]

    def different_pair(self) -> tuple[str, str]:
        """Two kernel sets that differ on this machine: A and B, else those that do so by construction."""
        if _NATIVE_PAIR not in self.coinciding:
            return _NATIVE_PAIR
        _log.warning("kernel sets %s and %s coincide here; %s and %s take their part",
                     *_NATIVE_PAIR, *_SYNTHETIC_PAIR)  # fmt: skip
        return _SYNTHETIC_PAIR


def try_kernel_sets(
    names: Sequence[str] = tuple(KERNEL_SETS),
    *,
    seed: int = 0,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
) -> KernelTrial:
    """Do one training step of a fixed model under each kernel set.

    Parameters
    ----------
    names
        Kernel sets, each in a launch of its own, beside each other. What is launched with one of them
        afterwards finds torch loaded.
    seed
        Seed of the model, of its batch and of dropout.
    launcher, run_dir
        Where the processes run, None for this machine; their directory, None for a temporary one.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed, or torch did not use the kernels that it should.
    """
    for name in names:
        if name not in KERNEL_SETS:
            raise unknown_name("kernel set", name, KERNEL_SETS)
    if run_dir is None:
        with temporary_directory("kernels") as path:
            return try_kernel_sets(names, seed=seed, launcher=launcher, run_dir=path)
    level, chosen = DeterminismLevel.named("D0"), launcher if launcher is not None else LocalLauncher()

    def tried(name: str) -> dict[str, str]:
        request, options = {"kernels": name, "seed": seed}, [process_options(name, level)]
        launch = Launch(_WORKER, request, 1, Path(run_dir) / name, options=options)
        chosen.run(launch)
        found: dict[str, str] = RunDirectory(launch.run_dir).result()
        return found

    with ThreadPoolExecutor(len(names)) as pool:
        return KernelTrial(dict(zip(names, pool.map(tried, names), strict=True)))
