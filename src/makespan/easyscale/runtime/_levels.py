"""Determinism levels: between which runs the bits are the same, and what is pinned for that."""

from dataclasses import dataclass

from makespan.errors import unknown_name

__all__ = ["LEVELS", "DeterminismLevel"]


@dataclass(frozen=True, slots=True)
class DeterminismLevel:
    """One level (EasyScale, determinism levels D0, D1 and D2).

    Parameters
    ----------
    name
        ``none``, or D0 (the same mapping) or D1 (any number of devices), with ``+D2`` on any kind of device.
    pins_algorithms
        Whether algorithms are deterministic and not chosen by timing (D0).
    pins_communication
        Whether gradients are added up by virtual rank and in the bucket layout of before also after a
        restart (D1); else by place in the mapping and from the provisional layout on.
    pins_kernels
        Whether all devices run the one set of kernels that all of them can run (D2).
    """

    name: str
    pins_algorithms: bool
    pins_communication: bool
    pins_kernels: bool

    @classmethod
    def named(cls, name: str) -> "DeterminismLevel":
        """Level of a name; an `makespan.errors.UnknownNameError` lists those that there are."""
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
