"""The pipeline stages of a scheduled model, run in the processes that verify it."""

from typing import TYPE_CHECKING, Any

from torch import nn

from makespan.slapo._partition import Partition, partition

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Staged", "in_stages", "scheduled_copy"]

_CUT = "cut_pipeline_stage"


class Staged(nn.Module):
    """Stages that one process runs one after the other: each gets what its pipeline would send it."""

    def __init__(self, parts: Partition) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parts.stages)
        self._parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages."""
        return self._parts.run(*args, **kwargs)

    def stage_of(self, path: str) -> int | None:
        """Return the stage in which a module of the whole model runs, None for one that several share."""
        found = [index for index, stage in enumerate(self.stages) if _has(stage, path)]
        return found[0] if len(found) == 1 else None


def _has(stage: nn.Module, path: str) -> bool:
    try:
        return bool(path) and stage.get_submodule(path) is not None
    except AttributeError:
        return False


def scheduled_copy(sch: "Schedule", copied: nn.Module) -> "Schedule":
    """Return a schedule of a copy of the model, with the cuts of the original one."""
    from makespan.slapo._schedule import create_schedule

    new = create_schedule(copied, group=sch.group)
    new.metadata.slots[_CUT] = list(sch.metadata.slots[_CUT])
    return new


def in_stages(sch: "Schedule", copied: nn.Module) -> nn.Module:
    """Return what runs a copy of the model: its stages, or itself where the schedule cuts none."""
    if sch.parent is not None or not sch.metadata.slots[_CUT]:
        return copied
    return Staged(partition(scheduled_copy(sch, copied)))
