"""Cost of surviving losses from memory: per mini-batch, of a recovery, of a join, for any number of devices.

Elapsed time on a machine with two cores says little about a cluster. So the constants are CPU times of the
coordinator and of the processes, which `scripts/measure_recovery_cost.py` measured on 2 to 16 processes
(`recovery_costs.csv`), and a prediction adds latencies and transfers. In a cluster processes compute at the
same time, and the coordinator serves one after the other, so both times add up to that of a recovery. What
grows with the square of the number of processes is measured with up to 2,048 members that only answer.

`judged_costs` fits the same constants to the smaller numbers of processes, and compares them with
measurements on the larger ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from makespan.arguments import typed
from makespan.errors import InputError
from makespan.tables import read_csv, table_schema

PRESET = Path(__file__).parent / "presets" / "recovery_costs.csv"
MEASUREMENTS = table_schema(
    "recovery_costs",
    ("kind", "text", "", "loss, agree, step or join: what was measured"),
    ("repeat", "int", "1", "repetition, from 0"),
    ("n_processes", "int", "1", "processes that remain after a loss, train, or train after a join; members"),
    ("n_logical_workers", "int", "1", "logical workers of the job"),
    ("survives", "int", "1", "copies of the contexts of each process"),
    ("buffer_bytes", "int", "B", "bytes of buffers per logical worker; random states come on top"),
    ("parameter_bytes", "int", "B", "bytes of parameters; the optimizer has two moments besides"),
    (
        "coordinator_s",
        "float",
        "s",
        "CPU time of the coordinator, or of the process that sends to one that joins; empty for step",
        True,
    ),
    ("worker_s", "float", "s", "CPU time of a process; of a step, per mini-batch; empty for agree", True),
    ("pack_s", "float", "s", "part of it in which contexts are packed; empty but for step", True),
    ("copy_s", "float", "s", "part of it in which those of others are received; empty but for step", True),
)
MOST_FITTED = {"loss": 6, "agree": 256, "step": 4, "join": 1 << 23}
"""Largest size to which constants are fitted that are judged: processes; for a join, bytes of parameters."""
_STATE = 3
"""Bytes of state per byte of parameters: the parameter and two moments."""


@dataclass(frozen=True, slots=True)
class CostConstants:
    """CPU times, as coefficients of the terms in brackets.

    Parameters
    ----------
    coordinator
        Coordinator, from the detection of a loss until all resume [1, m for m remaining processes].
    agreeing
        The same with members that only answer [1, m, m^2]; its last part comes on top of ``coordinator``.
    connecting
        Process, from the plan until all resume [1, m, hosted logical workers].
    packing
        Packing the contexts of one logical worker, per mini-batch [1, bytes of buffers].
    copying
        Receiving those of others, per mini-batch [1, copies, copies times bytes of buffers].
    sending, receiving
        Pause of the process that sends parameters and optimizer, and of the one that joins [1, bytes of
        parameters].
    """

    coordinator: tuple[float, ...]
    agreeing: tuple[float, ...]
    connecting: tuple[float, ...]
    packing: tuple[float, ...]
    copying: tuple[float, ...]
    sending: tuple[float, ...]
    receiving: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecoveryCost:
    """Predicted times [s]; a pause ends when all processes compute again.

    Parameters
    ----------
    keep_s
        Keeping contexts on other processes, per mini-batch, if none of it overlaps with other work.
    detect_s, agree_s, connect_s, copy_s, lost_s
        Parts of the pause after a loss: until the coordinator knows; its messages; work of the processes that
        connect and load contexts; transfer of contexts; half of a mini-batch, which is repeated.
    state_s
        Parameters and optimizer for a process that joins.
    """

    keep_s: float
    detect_s: float
    agree_s: float
    connect_s: float
    copy_s: float
    lost_s: float
    state_s: float

    @property
    def pause_s(self) -> float:
        """Pause after a loss."""
        return self.detect_s + self.agree_s + self.connect_s + self.copy_s + self.lost_s

    @property
    def join_s(self) -> float:
        """Pause while a process joins."""
        return self.agree_s + self.connect_s + self.copy_s + self.state_s


@typed
def predict_recovery(
    n_devices: int,
    step_s: float,
    *,
    parameter_bytes: float,
    context_bytes: float = 50e3,
    survives: int = 1,
    bandwidth: float = 12.5e9,
    latency_s: float = 20e-6,
    detect_s: float | None = None,
    constants: CostConstants | None = None,
) -> RecoveryCost:
    """Predict what surviving losses costs with one logical worker per device.

    Parameters
    ----------
    n_devices, step_s
        Processes, each with one logical worker, and time of a mini-batch [s].
    parameter_bytes, context_bytes
        Bytes of parameters, and of the buffers of one logical worker.
    survives
        Copies of each context.
    bandwidth, latency_s
        Of the network between two processes [B/s, s].
    detect_s
        Time until a loss is detected [s]; None for one latency, after which a closed connection is known. A
        process that hangs is lost after ``hang_s``.
    constants
        Constants; None for those measured.

    Raises
    ------
    makespan.errors.InputError
        A number is out of range.
    """
    if n_devices < 2:
        raise InputError(f"n_devices is {n_devices}; expected at least 2, because others keep the contexts")
    if not 1 <= survives < n_devices:
        raise InputError(f"survives is {survives} with {n_devices} devices; expected 1 to {n_devices - 1}")
    detect_s = latency_s if detect_s is None else detect_s
    for name, value in {"step_s": step_s, "bandwidth": bandwidth}.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value!r}; expected a number > 0")
    others = {"parameter_bytes": parameter_bytes, "context_bytes": context_bytes, "latency_s": latency_s}
    for name, value in (others | {"detect_s": detect_s}).items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value!r}; expected a number >= 0")
    fitted, left = measured_constants() if constants is None else constants, n_devices - 1
    sent_s = latency_s + survives * context_bytes / bandwidth
    copied_s = _value(fitted.copying, survives, survives * context_bytes)
    # What sending takes without a byte is in the time to connect already.
    state_s = (
        fitted.sending[1] + fitted.receiving[1]
    ) * parameter_bytes + _STATE * parameter_bytes / bandwidth
    return RecoveryCost(
        keep_s=_value(fitted.packing, context_bytes) + copied_s + sent_s,
        detect_s=detect_s,
        # Each way once: freeze, its answer, the plan, addresses by way of the coordinator, the end, training.
        agree_s=_value(fitted.coordinator, left) + fitted.agreeing[2] * left**2 + 7 * latency_s,
        connect_s=_value(fitted.connecting, left, n_devices / left),
        copy_s=latency_s + context_bytes / bandwidth + sent_s,
        lost_s=step_s / 2,
        state_s=state_s,
    )


@cache
def measurements() -> pd.DataFrame:
    """Return the measurements, with the median over repetitions."""
    table = read_csv(PRESET, MEASUREMENTS)
    keys = ["kind", "n_processes", "n_logical_workers", "survives", "buffer_bytes", "parameter_bytes"]
    return table.groupby(keys, as_index=False)[["coordinator_s", "worker_s", "pack_s", "copy_s"]].median()


@cache
def measured_constants(*, on_few: bool = False) -> CostConstants:
    """Fit the constants to all measurements, or to those on few processes, which `judged_costs` compares.

    None of them is negative, and relative errors count.
    """
    loss, agree, step, join = (_part(kind, is_small=True if on_few else None) for kind in MOST_FITTED)
    m, n_copies, size = loss["n_processes"], step["survives"], join["parameter_bytes"]
    n_hosted = loss["n_logical_workers"] / m
    return CostConstants(
        _solved(loss["coordinator_s"], 1.0, m),
        _solved(agree["coordinator_s"], 1.0, agree["n_processes"], agree["n_processes"] ** 2),
        _solved(loss["worker_s"], 1.0, m, n_hosted),
        _solved(step["pack_s"], 1.0, step["buffer_bytes"]),
        _solved(step["copy_s"], 1.0, n_copies, n_copies * step["buffer_bytes"]),
        _solved(join["coordinator_s"], 1.0, size),
        _solved(join["worker_s"], 1.0, size),
    )


def _part(kind: str, *, is_small: bool | None) -> pd.DataFrame:
    """Return the measurements of a kind: those to which judged constants are fitted, the others, or all."""
    table = measurements()
    table = table[table["kind"] == kind]
    is_fitted = table["parameter_bytes" if kind == "join" else "n_processes"] <= MOST_FITTED[kind]
    return table if is_small is None else table[is_fitted == is_small]


def _solved(times: Any, *terms: Any) -> tuple[float, ...]:
    """Fit a factor of each term."""
    from scipy.optimize import nnls  # imported here: it takes longer than the rest of the package

    weights = 1.0 / np.asarray(times, dtype=float)
    columns = np.stack(
        [np.broadcast_to(np.asarray(term, dtype=float), weights.shape) for term in terms], axis=1
    )
    scale = columns.max(axis=0)
    found, _ = nnls(columns / scale * weights[:, None], np.ones(len(weights)))
    return tuple(float(value) for value in found / scale)


def _value(coefficients: Sequence[float], *terms: float) -> float:
    return coefficients[0] + sum(factor * term for factor, term in zip(coefficients[1:], terms, strict=True))


def judged_costs() -> pd.DataFrame:
    """Compare predictions with measurements that took no part in the fit.

    Returns
    -------
    pandas.DataFrame
        Columns ``quantity``, ``size`` (processes, or bytes of parameters), ``buffer_bytes``, ``measured_s``,
        ``predicted_s`` and ``baseline_s``, the measurement of the largest size in the fit.
    """
    fitted, judged = measured_constants(on_few=True), list[pd.DataFrame]()

    def add(quantity: str, kind: str, column: str, predicted: Callable[[Any], Any]) -> None:
        size = "parameter_bytes" if kind == "join" else "n_processes"
        known, new = (_part(kind, is_small=is_small) for is_small in (True, False))
        known = known.sort_values([size, "survives"])
        baseline = {row["buffer_bytes"]: row[column] for row in known.to_dict("records")}
        judged.append(
            pd.DataFrame(
                {
                    "quantity": quantity,
                    "size": new[size],
                    "buffer_bytes": new["buffer_bytes"],
                    "measured_s": new[column],
                    "predicted_s": predicted(new),
                    "baseline_s": new["buffer_bytes"].map(baseline),
                }
            )
        )

    def connecting(table: Any) -> Any:
        return _value(fitted.connecting, table.n_processes, table.n_logical_workers / table.n_processes)

    add("coordinator", "loss", "coordinator_s", lambda t: _value(fitted.coordinator, t.n_processes))
    add(
        "agreeing",
        "agree",
        "coordinator_s",
        lambda t: _value(fitted.agreeing, t.n_processes, t.n_processes**2),
    )
    add("connecting", "loss", "worker_s", connecting)
    add("sending", "join", "coordinator_s", lambda t: _value(fitted.sending, t.parameter_bytes))
    add("receiving", "join", "worker_s", lambda t: _value(fitted.receiving, t.parameter_bytes))
    add("packing", "step", "pack_s", lambda t: _value(fitted.packing, t.buffer_bytes))
    add(
        "copying", "step", "copy_s", lambda t: _value(fitted.copying, t.survives, t.survives * t.buffer_bytes)
    )
    return pd.concat(judged, ignore_index=True)
