"""Kernel sets: what plays a type of device where there is only a CPU, each with roundings of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from makespan.easyscale.runtime._levels import DeterminismLevel
from makespan.errors import unknown_name
from makespan.runtime import ProcessOptions

__all__ = ["CANONICAL", "KERNEL_SETS", "KernelSet", "SumOrder", "kernels_of", "process_options"]

SumOrder = Literal["seq", "tree"]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Which kernels a process uses.

    Parameters
    ----------
    name, stands_for
        Its name, and the type of device whose part it plays.
    environment
        Variables that the process must have before torch is loaded.
    onednn
        Whether convolutions and matrix products may run in oneDNN.
    sums
        Order of explicit sums that replace those of the gradient of a bias and of the loss, blocks of 64 one
        after another (``seq``) or halves (``tree``); None to replace none.
    """

    name: str
    stands_for: str
    environment: Mapping[str, str] = field(default_factory=dict)
    onednn: bool = True
    sums: SumOrder | None = None


_PLAIN = {"ATEN_CPU_CAPABILITY": "default"}

CANONICAL = KernelSet("canonical", "every type", _PLAIN, onednn=False)
"""The kernels that every type can run, of level D2."""

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


def kernels_of(device: str, level: DeterminismLevel) -> KernelSet:
    """Kernels that a device runs at a level: its own, or under D2 those of all."""
    if device not in KERNEL_SETS:
        raise unknown_name("device", device, KERNEL_SETS)
    return CANONICAL if level.pins_kernels else KERNEL_SETS[device]


def process_options(device: str, level: DeterminismLevel) -> ProcessOptions:
    """Return what a launcher gives a process that plays a device: variables that torch reads once, a thread.

    Parameters
    ----------
    device
        Name of its own kernel set; an `makespan.errors.UnknownNameError` lists those that there are.
    level
        Determinism level of the job.
    """
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if level.pins_algorithms else {}
    return ProcessOptions({**kernels_of(device, level).environment, **fixed}, threads=1)
