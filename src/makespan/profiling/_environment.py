"""An environment file for the machine at hand: measured bandwidths and launch times, wide priors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from makespan.errors import InputError
from makespan.presets import read_preset

__all__ = ["MachineRates", "environment_text"]

_ACTIVATION_SHARE = 0.5  # the fitted forms count activations at 16 bit, training is in 32 bit


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What was measured of a machine.

    Parameters
    ----------
    n_devices
        Processes that run side by side without sharing a device.
    device_memory_bytes, host_memory_bytes
        Memory of one device and of the machine [B].
    cpu_threads
        CPU threads a device.
    ring_bytes_per_s
        One ring pass of a gradient-sized all-reduce: bytes that a process sends over time [B/s].
    tensor_bytes_per_s
        Activations that tensor parallelism exchanges in a step, counted at 16 bit as the fitted forms
        do, over the time that it adds to the step [B/s].
    transfer_bytes_per_s
        One activation-sized transfer between two processes [B/s].
    gather_efficiency
        Time of a ring pass of the gradients over the time that a partitioned optimiser adds to a
        step of data parallelism [1].
    copy_bytes_per_s
        Copy between device and host memory [B/s].
    forward_launch_s, backward_launch_s
        Time of a pass that does not grow with the samples [s].

    Raises
    ------
    InputError
        A rate is not positive, or a time is negative.
    """

    n_devices: int
    device_memory_bytes: float
    host_memory_bytes: float
    cpu_threads: int
    ring_bytes_per_s: float
    tensor_bytes_per_s: float
    transfer_bytes_per_s: float
    gather_efficiency: float
    copy_bytes_per_s: float
    forward_launch_s: float
    backward_launch_s: float

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in self.__dataclass_fields__:
            value, may_be_zero = getattr(self, name), name.endswith("launch_s")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise InputError(f"measured {name} is {value!r}; accepted: a positive number")


def environment_text(rates: MachineRates, source: str) -> str:
    """Write the environment of a measured machine.

    Parameters
    ----------
    rates
        What was measured.
    source
        On what, when and how; stands with each constant.

    Returns
    -------
    str
        A file for `makespan.perf.load_environment`.
    """
    preset = read_preset("makespan.profiling", "environment")
    constants = {
        name: {"value": value, "unit": unit, "source": f"{how}; {source}"}
        for name, (value, unit, how) in _measured(rates).items()
    }
    lines = ["# Written by the profiler of makespan; measure again rather than edit.", ""]
    lines += _table("cluster", {"n_nodes": 1})
    lines += _table("cluster.gpu", _device(rates, source))
    lines += _table("cluster.node", _node(rates, source) | preset["node"])
    lines += _table("cluster.network", {"latency_s": preset["node"]["intra_latency_s"]})
    for name, entry in sorted({**preset["constants"], **constants}.items()):
        lines += _table(f"constants.{name}", entry)
    for form, priors in preset["priors"].items():
        for name, entry in priors.items():
            lines += _table(f"priors.{form}.{name}", entry)
    return "\n".join(lines)


def _measured(rates: MachineRates) -> dict[str, tuple[float, str, str]]:
    ring = (rates.ring_bytes_per_s, "B/s", "ring pass of a gradient-sized all-reduce")
    transfer = (_ACTIVATION_SHARE * rates.transfer_bytes_per_s, "B/s", "half the rate of a transfer")
    tensor = (rates.tensor_bytes_per_s, "B/s", "activations exchanged over time added by tensor parallelism")
    forward = (rates.forward_launch_s, "s", "time of a forward pass at no samples")
    return {
        "flat_bandwidth_bytes_per_s": ring,
        "intra_bandwidth_bytes_per_s": ring,
        "nic_bandwidth_bytes_per_s": ring,
        "pcie_bandwidth_bytes_per_s": (rates.copy_bytes_per_s, "B/s", "copy between device and host"),
        "tp_bandwidth_bytes_per_s": tensor,
        "tp_inter_bandwidth_bytes_per_s": tensor,
        "p2p_bandwidth_bytes_per_s": transfer,
        "gather_efficiency": (
            rates.gather_efficiency,
            "1",
            "ring pass of the gradients over time added by a partitioned optimiser",
        ),
        "forward_launch_s": forward,
        "async_launch_s": forward,
        "backward_launch_s": (rates.backward_launch_s, "s", "time of a backward pass at no samples"),
        "reference_cpu_threads": (float(rates.cpu_threads), "threads", "threads a process while profiling"),
    }


def _device(rates: MachineRates, source: str) -> dict[str, Any]:
    return {
        "peak_flop_per_s": {"fp32": 1e12},  # no fitted model reads it
        "memory_bytes": float(rates.device_memory_bytes),
        "memory_bandwidth_bytes_per_s": float(rates.copy_bytes_per_s),
        "reserved_bytes": 0.0,
        "launch_gap_s": 1e-6,
        "memory_efficiency": 1.0,
        "source": source,
    }


def _node(rates: MachineRates, source: str) -> dict[str, Any]:
    return {
        "n_gpus": rates.n_devices,
        "intra_bandwidth_bytes_per_s": float(rates.ring_bytes_per_s),
        "intra_kind": "switch",
        "pcie_bandwidth_bytes_per_s": float(rates.copy_bytes_per_s),
        "n_nics": 1,
        "nic_bandwidth_bytes_per_s": float(rates.ring_bytes_per_s),
        "gpus_per_nic": rates.n_devices,
        "cpu_threads": rates.cpu_threads * rates.n_devices,
        "host_memory_bytes": float(rates.host_memory_bytes),
        "host_bandwidth_bytes_per_s": float(rates.copy_bytes_per_s),
        "source": source,
    }


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items()), ""]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value) if isinstance(value, str) else repr(value)
