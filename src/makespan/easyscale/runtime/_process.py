"""Kernels and algorithms of a process, set once before it computes anything."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from makespan.easyscale.runtime._kernels import KernelSet
from makespan.easyscale.runtime._levels import DeterminismLevel
from makespan.easyscale.runtime._sums import ExplicitSums
from makespan.errors import WorkerError

__all__ = ["scan_module", "use_kernels"]

_CAPABILITIES = {"default": ("DEFAULT", "NO AVX"), "avx2": ("AVX2", "DEFAULT", "NO AVX")}
"""What torch may have chosen where a variable allows at most so much; a processor may have less."""
_TUNED = (nn.modules.conv._ConvNd, nn.RNNBase)


def use_kernels(kernels: KernelSet, level: DeterminismLevel) -> AbstractContextManager[object]:
    """Set up this process for a kernel set and a level.

    Returns
    -------
    contextlib.AbstractContextManager
        What forward passes and losses have to run in; it may be entered again and again.

    Raises
    ------
    makespan.errors.WorkerError
        Torch was loaded without the variables of the kernel set, so it uses other kernels.
    """
    found = torch.backends.cpu.get_cpu_capability()
    for name, value in kernels.environment.items():
        allowed = _CAPABILITIES.get(value, (found,)) if name == "ATEN_CPU_CAPABILITY" else (found,)
        if os.environ.get(name) != value or found not in allowed:
            raise WorkerError(
                f"kernel set {kernels.name} needs {name}={value} before torch is loaded; "
                f"found {os.environ.get(name)!r} and kernels for {found}"
            )
    torch.backends.mkldnn.set_flags(_enabled=kernels.onednn)  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    # Not use_deterministic_algorithms, which loads a compiler that nothing here uses.
    torch.set_deterministic_debug_mode("error" if level.pins_algorithms else "default")
    # That also fills memory before it is written, for a few percent of a step (1 to 7 by stand-in, timed in
    # turn with and without); no bit of an operator depends on it that reads only what was written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not level.pins_algorithms
    return nullcontext() if kernels.sums is None else ExplicitSums(kernels.sums)


def scan_module(model: nn.Module) -> dict[str, bool | list[str]]:
    """Find what makes level D2 expensive: operators whose fast kernels a vendor tunes for each device.

    Returns
    -------
    dict
        ``operators``, the modules concerned as ``name: class``, and ``d2_cheap``, whether there is none. A
        job whose model is not cheap under D2 is better kept on one type of device.
    """
    operators = [
        f"{name}: {type(module).__name__}"
        for name, module in model.named_modules()
        if isinstance(module, _TUNED)
    ]
    return {"d2_cheap": not operators, "operators": operators}
