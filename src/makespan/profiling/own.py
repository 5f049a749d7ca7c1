"""Time training steps of a model of one's own, and return them as rows of measured steps."""

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from makespan.errors import InputError
from makespan.profiling.profile import Procedure
from makespan.units import GIB, whole
from makespan.user_code import explained, load_file, user_file

if TYPE_CHECKING:
    import pandas as pd

    from makespan.planning import Layout

MakeStep = Callable[["Layout", int, int], Callable[[], object]]
"""Function of layout, tokens of a sample and samples of a step; it returns what runs one training step."""


def load_make_step(reference: str) -> tuple[MakeStep, str]:
    """Return the function that ``FILE.py:FUNCTION`` names, and its file.

    Raises `InputError` if there is no such file or function, or if the file cannot be run.
    """
    path, colon, name = reference.rpartition(":")
    if not (colon and path and name):
        raise InputError(f"{reference!r}; expected FILE.py:FUNCTION")
    module = load_file(user_file(path, "a file with a function that makes training steps"))
    make = getattr(module, name, None)
    if not callable(make):
        found = "no function" if make is None else f"{type(make).__name__}"
        raise InputError(f"{path}: {found} {name!r}; expected a function of layout, seq and batch")
    return make, str(Path(path).resolve())


def process_number(variable: str, unset: int) -> int:
    """Return the number that torchrun gives a process in a variable; an `InputError` says if it is none."""
    text = os.environ.get(variable, str(unset))
    if (number := whole(text)) is None:
        raise InputError(f"{variable} is {text!r} in the environment; expected a number, as torchrun sets it")
    return number


def measure_own(
    reference: str,
    layouts: Sequence[str],
    seq: int,
    batch: int,
    procedure: Procedure,
    keep: "Callable[[pd.DataFrame], object] | None" = None,
) -> "pd.DataFrame":
    """Time training steps of a model of one's own under some layouts.

    Several processes, such as those of torchrun, each call this; ``WORLD_SIZE`` is the number of devices.

    Parameters
    ----------
    reference
        ``FILE.py:FUNCTION``, see `MakeStep`. A step trains on the whole batch of this process.
    layouts
        Layouts to measure, such as ``tp2 mb1``.
    seq, batch
        Tokens of a sample, and samples of a step over all devices.
    procedure
        Untimed steps, timed steps, and how often these are repeated.
    keep
        Is given the rows so far after each layout, for example to write them.

    Returns
    -------
    pandas.DataFrame
        One row per layout with the columns that `makespan.planning.read_measured` reads: ``step_s`` is the
        median over repetitions of the mean step, and ``memory_gib`` what PyTorch had allocated at most on
        the GPU of this process, if the function trains with PyTorch on one.

    Raises
    ------
    InputError
        The function is not found or fails, or a layout does not divide devices or batch.
    """
    import pandas as pd  # workers read this package without it

    from makespan.planning import parse_layout

    n_gpus = process_number("WORLD_SIZE", unset=1)
    parsed = [parse_layout(text, n_gpus) for text in layouts]
    for layout in parsed:
        layout.microbatches(batch)
    make, file = load_make_step(reference)
    rows = []
    for layout in parsed:
        step = None
        gc.collect()  # the model before this one goes before the next one comes
        _forget_peak()
        with explained(file):
            step = make(layout, seq, batch)
        if not callable(step):
            raise InputError(
                f"{reference}: returned {type(step).__name__}; expected a function that runs one step"
            )
        with explained(file):
            means = []
            for _ in range(procedure.warmup_steps):
                step()
            for _ in range(procedure.repetitions):
                _wait_for_device()
                start_s = time.perf_counter()
                for _ in range(procedure.steps):
                    step()
                _wait_for_device()
                means.append((time.perf_counter() - start_s) / procedure.steps)
        row = {"n_gpus": n_gpus, "layout": layout.text, "step_s": median(means), "seq": seq, "batch": batch}
        if not math.isnan(peak_gib := _peak_gib()):
            row["memory_gib"] = round(peak_gib, 3)
        rows.append(row)
        if keep is not None:
            keep(pd.DataFrame(rows))
    return pd.DataFrame(rows)


def _cuda() -> Any:
    """Return ``torch.cuda`` if the user's code trains with torch where there is a GPU, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _wait_for_device() -> None:
    """Wait until the device has done what was asked of it."""
    if (cuda := _cuda()) is not None:
        cuda.synchronize()


def _forget_peak() -> None:
    """Forget how much memory was allocated at most."""
    if (cuda := _cuda()) is not None and cuda.is_initialized():
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()


def _peak_gib() -> float:
    """Return what was allocated at most since [GiB]; NaN without a GPU, or where nothing was."""
    cuda = _cuda()
    return (cuda.max_memory_allocated() / GIB or math.nan) if cuda is not None else math.nan
