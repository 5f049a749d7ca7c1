"""Where the logical workers of a job run: who hosts whom, and on which devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from makespan.easyscale.runtime import KERNEL_SETS, ElasticJob, RankMapping, process_options
from makespan.errors import InputError, unknown_name
from makespan.runtime import ProcessOptions

__all__ = ["Placing"]

_DEVICE = "A"


@dataclass(frozen=True, slots=True)
class Placing:
    """A mapping and the device of each of its processes."""

    mapping: RankMapping
    devices: tuple[str, ...]

    @classmethod
    def of(cls, job: ElasticJob, mapping: str | None, devices: str | Sequence[str] | None) -> "Placing":
        """Check a mapping and devices for a job.

        Without a mapping the logical workers are spread evenly over the devices, and without devices each
        process has one of the first kind; without either there is a process for each logical worker. An
        `InputError` names the field, what was found and what is expected.
        """
        n_workers = job.n_logical_workers
        names = None if devices is None else _listed(devices)
        if mapping is None and names is not None and not 1 <= len(names) <= n_workers:
            found = f"devices has {len(names)} names"
            raise InputError(
                f"{found}; accepted: 1 to {n_workers}, because each has to host a logical worker"
            )
        if mapping is None:
            parsed = RankMapping.even(n_workers, n_workers if names is None else len(names))
        else:
            parsed = RankMapping.parse(mapping)
        if parsed.n_logical_workers != n_workers:
            found = f"mapping {parsed} has {parsed.n_logical_workers} logical workers"
            raise InputError(f"{found}; accepted: {n_workers}, those of the job")
        names = (_DEVICE,) * parsed.n_processes if names is None else names
        if len(names) != parsed.n_processes:
            found = f"devices has {len(names)} names"
            accepted = f"{parsed.n_processes}, one for each process of mapping {parsed}"
            raise InputError(f"{found}; accepted: {accepted}")
        for name in names:
            if name not in KERNEL_SETS:
                raise unknown_name("device", name, KERNEL_SETS)
        return cls(parsed, names)

    def check_types(self, job: ElasticJob, mixes_devices: bool) -> None:
        """Refuse devices of several types at a time where they change bits, unless that is wanted."""
        if len(set(self.devices)) > 1 and not (mixes_devices or job.level.pins_kernels):
            found = f"devices is {','.join(self.devices)}, several types under {job.determinism}"
            raise InputError(f"{found}; accepted: one type, a level with D2, or mixes_devices=True")

    @classmethod
    def from_values(cls, job: ElasticJob, values: dict[str, Any]) -> "Placing":
        """Return what these `values` say."""
        return cls.of(job, values["mapping"], values["devices"])

    def values(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"mapping": str(self.mapping), "devices": list(self.devices)}

    def options(self, job: ElasticJob) -> list[ProcessOptions]:
        """Return what each process is started with."""
        return [process_options(name, job.level) for name in self.devices]


def _listed(devices: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(devices, str):
        return tuple(part.strip() for part in devices.split(",")) if devices.strip() else ()
    return tuple(devices)
