"""Determinism levels, the kernel sets that stand for device types on CPUs, and a trial of them."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

from makespan.cleanup import temporary_directory
from makespan.errors import unknown_name
from makespan.runtime import Launch, Launcher, LocalLauncher, ProcessOptions, RunDirectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeterminismLevel:
    """Guarantee of equal bits between runs (EasyScale, determinism levels D0, D1 and D2).

    Parameters
    ----------
    name
        ``none``, D0 (equal bits with the same mapping) or D1 (with any number of devices); with ``+D2`` on
        any type of device.
    pins_algorithms
        Whether algorithms are deterministic and not chosen by timing (D0).
    pins_communication
        Whether gradients are added up by virtual rank, and a restart keeps the bucket layout (D1). Otherwise
        they are added up by place in the mapping, and a restart begins with the provisional layout.
    pins_kernels
        Whether all devices run the kernels that every type can run (D2).
    """

    name: str
    pins_algorithms: bool
    pins_communication: bool
    pins_kernels: bool

    @classmethod
    def named(cls, name: str) -> "DeterminismLevel":
        """Return the level of a name; an unknown name raises a `makespan.errors.UnknownNameError`."""
        if name not in LEVELS:
            raise unknown_name("determinism level", name, LEVELS)
        return LEVELS[name]


LEVELS = {
    level.name: level
    for level in (
        DeterminismLevel("none", pins_algorithms=False, pins_communication=False, pins_kernels=False),
        DeterminismLevel("D0", pins_algorithms=True, pins_communication=False, pins_kernels=False),
        DeterminismLevel("D1", pins_algorithms=True, pins_communication=True, pins_kernels=False),
        DeterminismLevel("D0+D2", pins_algorithms=True, pins_communication=False, pins_kernels=True),
        DeterminismLevel("D1+D2", pins_algorithms=True, pins_communication=True, pins_kernels=True),
    )
}


# --- Kernel sets: CPU kernels with different roundings that stand for types of devices ---

SumOrder = Literal["seq", "tree"]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels that a process uses.

    Parameters
    ----------
    name, stands_for
        Its name, and the type of device that it stands for.
    environment
        Variables that the process must have before torch is loaded.
    onednn
        Whether convolutions and matrix products may run in oneDNN.
    sums
        Order of the explicit sums that replace those of bias gradients and losses: blocks of 64 one after
        another (``seq``) or halves (``tree``). None to replace none.
    """

    name: str
    stands_for: str
    environment: Mapping[str, str] = field(default_factory=dict)
    onednn: bool = True
    sums: SumOrder | None = None


_PLAIN = {"ATEN_CPU_CAPABILITY": "default"}
CANONICAL = KernelSet("canonical", "every type", _PLAIN, onednn=False)
"""The kernels that every type can run, for level D2."""
KERNEL_SETS = {
    kernels.name: kernels
    for kernels in (
        KernelSet("A", "V100"),
        KernelSet("B", "P100", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
        KernelSet("C", "T4", _PLAIN | {"ONEDNN_MAX_CPU_ISA": "SSE41"}, onednn=False),
        CANONICAL,
        KernelSet("seq", "a type by construction", sums="seq"),
        KernelSet("tree", "another type by construction", sums="tree"),
    )
}
"""Kernel sets by name; all of them use one thread."""


KERNEL_SET_VARIABLE = "MAKESPAN_KERNEL_SET"
"""Variable that tells a process which replaces a lost one the name of its kernel set."""


def kernels_of(device: str, level: DeterminismLevel) -> KernelSet:
    """Return the kernels that a device runs at a level: its own, or under D2 the common ones."""
    if device not in KERNEL_SETS:
        raise unknown_name("device", device, KERNEL_SETS)
    return CANONICAL if level.pins_kernels else KERNEL_SETS[device]


def process_options(device: str, level: DeterminismLevel) -> ProcessOptions:
    """Return options of a process that stands for a device: one thread, and variables that torch reads once.

    Parameters
    ----------
    device
        Name of its kernel set; an unknown name raises a `makespan.errors.UnknownNameError`.
    level
        Determinism level of the job.
    """
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if level.pins_algorithms else {}
    return ProcessOptions({**kernels_of(device, level).environment, **fixed}, threads=1)


# --- Trial: one training step under each kernel set, each in a separate process ---

_WORKER = "makespan.easyscale.profile_worker"
_NATIVE_PAIR, _SYNTHETIC_PAIR = ("A", "B"), ("seq", "tree")


@dataclass(frozen=True, slots=True)
class KernelTrialRequest:
    """Request to run one training step under the kernel set of a name, see `try_kernel_sets`."""

    kernels: str
    seed: int


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Results of one training step of a fixed model under each kernel set.

    Parameters
    ----------
    results
        By kernel set: ``parameters``, hash before the step; ``loss``, hexadecimal; ``gradients``, their hash;
        ``capability``, the instructions that torch chose.
    """

    results: Mapping[str, Mapping[str, str]]

    @property
    def coinciding(self) -> list[tuple[str, str]]:
        """Pairs of kernel sets with bitwise equal gradients, which are the same here."""
        hashes = {name: result["gradients"] for name, result in self.results.items()}
        return [(a, b) for a, b in combinations(hashes, 2) if hashes[a] == hashes[b]]

    def different_pair(self) -> tuple[str, str]:
        """Return two kernel sets that differ on this machine: A and B, or else ``seq`` and ``tree``."""
        if _NATIVE_PAIR not in self.coinciding:
            return _NATIVE_PAIR
        _log.warning("kernel sets %s and %s coincide on this machine; using %s and %s instead",
                     *_NATIVE_PAIR, *_SYNTHETIC_PAIR)  # fmt: skip
        return _SYNTHETIC_PAIR


def try_kernel_sets(
    names: Sequence[str] = tuple(KERNEL_SETS),
    *,
    seed: int = 0,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
) -> KernelTrial:
    """Run one training step of a fixed model under each kernel set.

    Parameters
    ----------
    names
        Kernel sets, each in its own launch, at the same time. Later launches with one of them find torch
        loaded.
    seed
        Seed of the model, of its batch and of dropout.
    launcher, run_dir
        Launcher of the processes, None for this machine; their directory, None for a temporary one.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed, or torch did not use the kernels of the set.
    """
    for name in names:
        if name not in KERNEL_SETS:
            raise unknown_name("kernel set", name, KERNEL_SETS)
    if run_dir is None:
        with temporary_directory("kernels") as path:
            return try_kernel_sets(names, seed=seed, launcher=launcher, run_dir=path)
    # Torch reads the variables of a kernel set once, so each set needs a process of its own.
    level, chosen = DeterminismLevel.named("D0"), launcher if launcher is not None else LocalLauncher()

    def hashes_under(name: str) -> dict[str, str]:
        request, options = asdict(KernelTrialRequest(name, seed)), [process_options(name, level)]
        launch = Launch(_WORKER, request, 1, Path(run_dir) / name, options=options)
        chosen.run(launch)
        hashes: dict[str, str] = RunDirectory(launch.run_dir).result()
        return hashes

    with ThreadPoolExecutor(len(names)) as pool:
        return KernelTrial(dict(zip(names, pool.map(hashes_under, names), strict=True)))
