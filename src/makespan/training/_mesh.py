"""The device mesh of a plan: axes ``pp``, ``dp`` and ``tp``, neighbours in ``tp`` next to each other."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from makespan.plans import ExecutionPlan

__all__ = ["Place", "place"]

_AXES = ("pp", "dp", "tp")
_MESHES: dict[tuple[str, int, int, int], DeviceMesh] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in the mesh of its plan.

    Parameters
    ----------
    mesh
        Three axes, in the order ``pp, dp, tp``.
    device
        Device of this process.
    """

    mesh: DeviceMesh
    device: torch.device

    def rank(self, axis: str) -> int:
        """Coordinate of this process along an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return the processes that differ from this one along one axis only."""
        return self.mesh.get_group(axis)


def place(plan: ExecutionPlan, device: torch.device) -> Place:
    """Arrange all processes as a plan asks; all must call it, with the same plan.

    Meshes are kept, because each axis of one costs communication groups.
    """
    key = (device.type, plan.pp, plan.dp, plan.tp)
    if key not in _MESHES:
        if plan.n_gpus != dist.get_world_size():
            raise RuntimeError(f"the plan needs {plan.n_gpus} processes, found {dist.get_world_size()}")
        _MESHES[key] = init_device_mesh(device.type, key[1:], mesh_dim_names=_AXES)
    return Place(_MESHES[key], device)
