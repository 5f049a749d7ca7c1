"""Block ``morphling``: the experiments of the Morphling paper."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from makespan.config._fields import Block, option
from makespan.config._fig9 import Fig9
from makespan.config._simulation import Simulation
from makespan.errors import MakespanError
from makespan.plans import Placement
from makespan.workloads import workload_keys

__all__ = ["Fig7", "Fig7Stage", "Fig8", "Morphling", "Sensitivity"]


def _known_workload(key: str) -> str:
    if key not in workload_keys():
        raise ValueError(f"one of {', '.join(workload_keys())}")
    return key


def _placement(text: str) -> str:
    try:
        return Placement.parse(text).text
    except MakespanError as error:
        raise ValueError(f"GPUs on each node, for example 4444 ({error})") from None


WorkloadKey = Annotated[str, AfterValidator(_known_workload)]
PlacementText = Annotated[str, AfterValidator(_placement)]
Count = Annotated[int, Field(ge=1)]


class Sensitivity(Block):
    """Throughput of the best plan against the number of GPUs."""

    workloads: tuple[WorkloadKey, ...] = option(
        "workloads whose curves are drawn", source="Morphling, motivation", changes="sensitivity"
    )
    max_gpus: int = option(
        "the curve is computed at 1, 2, ..., max_gpus GPUs",
        unit="GPU",
        source="Morphling, motivation: the 64 GPUs of the cluster",
        changes="sensitivity",
        ge=1,
    )
    cpu_threads: tuple[Count, ...] = option(
        "CPU threads a GPU at which offload plans are computed, besides the node's even share",
        unit="threads",
        source="Morphling, motivation",
        changes="sensitivity_families",
    )


class Fig7Stage(Block):
    """One resource limit of the adaptation experiment."""

    name: str = option("label of the stage", source="Morphling, Fig. 7", changes="fig7", min_length=1)
    placement: PlacementText = option(
        "GPUs on each node", unit="GPU", source="Morphling, Fig. 7", changes="fig7"
    )
    cpu_threads: int = option(
        "CPU threads a GPU",
        unit="threads",
        source="trace of the batch-16 runs of the artifact",
        changes="fig7",
        ge=1,
    )


class Fig7(Block):
    """Adaptation of one job to a shrinking resource limit."""

    workload: WorkloadKey = option(
        "workload of the job", source="Morphling, Fig. 7: LLaMA-2-7B, global batch 16", changes="fig7"
    )
    stage_duration_s: float = option(
        "how long each limit lasts", unit="s", source="Morphling, Fig. 7: 30 minutes", changes="fig7", gt=0
    )
    stages: tuple[Fig7Stage, ...] = option(
        "the limits in order", source="Morphling, Fig. 7", changes="fig7", min_length=1
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "Fig7":
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError("stages with different names")
        return self


class Fig8(Block):
    """Division of one node between jobs."""

    workloads: tuple[WorkloadKey, ...] = option(
        "workloads that are submitted together", source="Morphling, Fig. 8", changes="fig8", min_length=2
    )
    gpus: int = option(
        "GPUs to divide, all in one node", unit="GPU", source="Morphling, Fig. 8", changes="fig8", ge=2
    )


class Morphling(Block):
    """Experiments of the Morphling paper."""

    workloads: tuple[WorkloadKey, ...] = option(
        "workloads whose iteration times are read, fitted and compared; fig7 and fig8 are left out if "
        "theirs are not among them",
        source="Morphling, Table 2 and Fig. 7",
        changes="table2, fits",
        min_length=1,
    )
    sensitivity: Sensitivity = option("sensitivity curves")
    fig7: Fig7 = option("adaptation to changing limits")
    fig8: Fig8 = option("throughput across jobs")
    simulation: Simulation = option("cluster experiments")
    fig9: Fig9 = option("accuracy under reconfiguration")

    @model_validator(mode="after")
    def _curves_and_jobs_have_input(self) -> "Morphling":
        for name, used in (
            ("sensitivity", self.sensitivity.workloads),
            ("simulation", self.simulation.workloads),
        ):
            missing = sorted(set(used) - set(self.workloads))
            if missing:
                raise ValueError(f"{name}.workloads among workloads (not there: {', '.join(missing)})")
        return self
