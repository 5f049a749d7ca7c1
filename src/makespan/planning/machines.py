"""Devices with what they sustain, and clusters of them: from the catalogue, from files, from short texts."""

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from makespan.errors import InputError, unknown_name
from makespan.files import preset_entry, read_preset, read_toml
from makespan.units import GIB

_PACKAGE = "makespan.planning"
MOST_GPUS = 131_072
"""Devices that a cluster may have; larger numbers are mistakes."""
GENERATIONS = ("first", "second", "third")
"""Generations of fused attention kernels: FlashAttention, FlashAttention-2, FlashAttention-3 with cuDNN."""


_MOST = {
    "memory_gib": 10_000,
    "memory_gb_per_s": 100_000,
    "link_gb_per_s": 10_000,
    "network_gb_per_s": 10_000,
}
_MOST_TFLOP_PER_S = 100_000
_MOST_LATENCY_S = 0.1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Parameters
    ----------
    name, source, evidence
        Key in the catalogue, where the numbers come from, and what stands behind the sustained shares.
    peak_tflop_per_s
        Dense peaks [TFLOP/s] by precision.
    memory_gib, memory_gb_per_s
        Memory that programs can use [GiB], and its bandwidth [GB/s].
    link_gb_per_s, network_gb_per_s
        Bandwidth to the devices of the node, and of the network card per device [GB/s per direction].
    products
        By precision: share of the peak of large matrix products [1], and the inner size that halves the rest.
    attention
        By generation of the kernel: share of the 16-bit peak [1], and the length that halves it [tokens].
    gpus_per_node
        Devices that the fast link joins, as they are usually sold.
    """

    name: str
    peak_tflop_per_s: dict[str, float]
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    network_gb_per_s: float
    products: dict[str, tuple[float, float]]
    attention: dict[str, tuple[float, float]]
    evidence: str
    source: str
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 < value <= most:
                raise InputError(
                    f"device {self.name!r}: {name} is {value!r}; expected a positive number up to "
                    f"{most:,}, in the unit of its name"
                )
        for precision, peak in self.peak_tflop_per_s.items():
            if not (_is_number(peak) and 0 < peak <= _MOST_TFLOP_PER_S):
                raise InputError(
                    f"device {self.name!r}: peak_tflop_per_s of {precision} is {peak!r}; expected a positive "
                    f"number up to {_MOST_TFLOP_PER_S:,}"
                )
        for name, what in (("products", "an inner size"), ("attention", "a length")):
            for key, pair in getattr(self, name).items():
                if not (
                    len(pair) == 2 and all(map(_is_number, pair)) and 0 < pair[0] <= 1 and 0 <= pair[1] < 1e9
                ):
                    raise InputError(
                        f"device {self.name!r}: {name} of {key} are {', '.join(map(str, pair))}; expected a "
                        f"share of the peak, above 0 and up to 1, and {what}"
                    )
        if missing := set(GENERATIONS) - set(self.attention):
            raise InputError(f"device {self.name!r}: attention lacks {', '.join(sorted(missing))}")

    def peak_flop_per_s(self, precision: str) -> float:
        """Return the dense peak of a precision [FLOP/s]; raises `UnknownNameError` where there is none."""
        if precision not in self.peak_tflop_per_s or precision not in self.products:
            raise unknown_name(f"precision of device {self.name!r}", precision, self.peak_tflop_per_s)
        return self.peak_tflop_per_s[precision] * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory that programs can use [B]."""
        return self.memory_gib * GIB


def device_names() -> tuple[str, ...]:
    """Return the keys of all devices."""
    return tuple(read_preset(_PACKAGE, "devices"))


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue; raises `UnknownNameError` for another name."""
    return _device(name, preset_entry(_PACKAGE, "devices", "device", name))


def _device(name: str, entry: dict[str, Any]) -> Device:
    for key in ("products", "attention", "peak_tflop_per_s"):
        if not isinstance(entry[key], dict):
            raise InputError(f"{key} is {entry[key]!r}; expected a table with one entry per key, in braces")
    for key in ("evidence", "source"):
        if not isinstance(entry[key], str):
            raise InputError(f"{key} is {entry[key]!r}; expected text")
    pairs = {
        key: {
            kind: tuple(pair) if isinstance(pair, list | tuple) else (pair,)
            for kind, pair in entry[key].items()
        }
        for key in ("products", "attention")
    }
    return Device(name=name, **{**entry, **pairs})


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster of equal nodes.

    Parameters
    ----------
    name
        Name in tables.
    device, n_gpus, gpus_per_node
        What it consists of; the devices of a node reach each other by the fast link.
    link_latency_s, network_latency_s
        Time of a message of no length, in a node and between nodes [s].
    usd_per_gpu_hour
        Price, for costs; 0 for none.
    """

    name: str
    device: Device
    n_gpus: int
    gpus_per_node: int = 8
    link_latency_s: float = 4e-6
    network_latency_s: float = 10e-6
    usd_per_gpu_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_gpus", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"cluster {self.name!r}: {name} is {value!r}; expected a whole number >= 1")
            if value > MOST_GPUS:
                raise InputError(
                    f"cluster {self.name!r}: {name} is {value:,}; expected at most {MOST_GPUS:,}"
                )
        for name, most in (
            ("link_latency_s", _MOST_LATENCY_S),
            ("network_latency_s", _MOST_LATENCY_S),
            ("usd_per_gpu_hour", 1e6),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise InputError(
                    f"cluster {self.name!r}: {name} is {getattr(self, name)!r}; expected a number from 0 to "
                    f"{most:g}, in the unit of its name"
                )

    def with_gpus(self, n_gpus: int, gpus_per_node: int | None = None) -> "Machines":
        """Return the cluster with another number of devices, and perhaps with fewer in each node."""
        per_node = self.gpus_per_node if gpus_per_node is None else gpus_per_node
        return replace(self, n_gpus=n_gpus, gpus_per_node=per_node, name=f"{n_gpus}x{self.device.name}")


_SHORT = re.compile(r"(\d+)\s*x\s*([A-Za-z][\w.-]*)")
_OF_CLUSTER = {field.name for field in fields(Machines)} - {"name", "device"}
_OF_DEVICE = {field.name for field in fields(Device)} - {"name"} - _OF_CLUSTER


def read_machines(source: str | Path) -> Machines:
    """Return a cluster from a short text such as ``64xh100-80``, or from a TOML file.

    A file has ``device``, the key of one of the catalogue, ``n_gpus``, and what differs from the defaults:
    any field of `Machines`, and any of `Device`, such as ``network_gb_per_s``. For example::

        device = "h100-80"
        n_gpus = 512
        network_gb_per_s = 25      # per device and direction
        usd_per_gpu_hour = 2.2

    Raises
    ------
    InputError
        A field is missing, unknown or out of range.
    """
    if short := _SHORT.fullmatch(str(source).strip()):
        kind, n_gpus = device(short[2]), int(short[1])
        return Machines(str(source), kind, n_gpus, gpus_per_node=min(kind.gpus_per_node, max(n_gpus, 1)))
    path = Path(source)
    return _machines(_read_file(path, source), path.stem, str(path))


def read_pools(source: str | Path) -> tuple[Machines, ...]:
    """Return the parts of a cluster with one type of device each, from a short text or a TOML file.

    Each is named after its device. A text such as ``32xh100-80+32xa100-80`` joins parts by ``+``. A file of
    several parts has a table ``[[machines]]`` for each, with the fields of `read_machines` and, where two
    parts have the same device on different links, a ``name`` for the type.

    Raises
    ------
    InputError
        As of `read_machines`, or two parts have the same name.
    """
    text = str(source).strip()
    parts = text.split("+")
    if all(_SHORT.fullmatch(part.strip()) for part in parts):
        pools = tuple(replace(one, name=one.device.name) for one in map(read_machines, parts))
    else:
        path = Path(source)
        entry = _read_file(path, source)
        listed = entry.get("machines", [entry])
        if not (isinstance(listed, list) and listed and all(isinstance(one, dict) for one in listed)):
            raise InputError(f"{path}: expected the fields of a cluster, or tables [[machines]] with them")
        if "machines" in entry and len(entry) > 1:
            other = next(key for key in entry if key != "machines")
            raise InputError(
                f"{path}: {other} stands beside [[machines]]; expected it in each of these tables"
            )
        pools = tuple(
            _machines(
                {key: value for key, value in one.items() if key != "name"},
                str(one.get("name", one.get("device"))),
                f"{path}: machines {number}" if len(listed) > 1 else str(path),
            )
            for number, one in enumerate(listed, start=1)
        )
    names = [one.name for one in pools]
    if again := next((name for name in names if names.count(name) > 1), ""):
        raise InputError(f"{source}: two parts are called {again!r}; expected a name for each (name = ...)")
    return pools


def _read_file(path: Path, source: str | Path) -> dict[str, Any]:
    if not path.exists() or path.is_dir():
        raise InputError(
            f"{source}: no such file; expected a TOML file of a cluster, or a text such as 64xh100-80, with "
            f"one of the devices {', '.join(device_names())}"
        )
    return read_toml(path, "a cluster")


def _machines(entry: dict[str, Any], name: str, where: str) -> Machines:
    """Return the machines of a table with the fields of a file; ``where`` names it in messages."""
    if unknown := set(entry) - _OF_DEVICE - _OF_CLUSTER - {"device"}:
        raise InputError(f"{where}: {unknown_name('field', sorted(unknown)[0], _OF_DEVICE | _OF_CLUSTER)}")
    if missing := {"device", "n_gpus"} - set(entry):
        raise InputError(f"{where}: {sorted(missing)[0]} is missing; expected device and n_gpus")
    for key, value in entry.items():
        if key not in ("device", "source", "evidence", "products", "attention", "peak_tflop_per_s") and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise InputError(f"{where}: {key} is {value!r}; expected a number")
    base = preset_entry(_PACKAGE, "devices", "device", str(entry["device"]))
    own = {key: value for key, value in entry.items() if key in _OF_DEVICE}
    try:
        kind = _device(str(entry["device"]), {**base, **own})
        settings = {key: value for key, value in entry.items() if key in _OF_CLUSTER}
        settings.setdefault("gpus_per_node", kind.gpus_per_node)
        return Machines(name, kind, **settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: {error}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
