"""Block ``morphling``: the experiments of the paper and their options."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import model_validator

from makespan.errors import MakespanError
from makespan.papers.morphling._settings_simulation import EXPERIMENT_TABLES, Simulation
from makespan.plans import ExecutionPlan, Placement
from makespan.settings import Block, Count, PaperSettings, option, readable, taken_from
from makespan.training import MODEL_FAMILIES, SmallModel, check_supported
from makespan.workloads import workload_keys

__all__ = ["Morphling"]

WorkloadKey = Annotated[str, taken_from(workload_keys)]
PlacementText = Annotated[
    str, readable(lambda text: Placement.parse(text).text, "GPUs on each node, for example 4444")
]

_of_curves = partial(option, source="Morphling, motivation", changes="sensitivity")
_of_fig7 = partial(option, source="Morphling, Fig. 7", changes="fig7")
_of_fig8 = partial(option, source="Morphling, Fig. 8", changes="fig8")
_of_fig9 = partial(option, changes="fig9")
_chosen = partial(_of_fig9, source="choice")
_our = partial(_of_fig9, source="choice: a model that two CPU cores train in seconds")

_CONTENTS = {
    "workloads/<list>": "job lists: naive, base, bp (best plans), mt (multi-tenant)",
    "predictions": "iteration times that policies decide by",
    "fits/<workload>": "fitted parameters of both forms with standard errors",
    "table2": "prediction error by model, plan family and form",
    "table2_rows": "prediction and error of every row",
    "table2_summary": "error and choice of plan over all models",
    "sensitivity": "best plan and throughput against GPUs",
    "sensitivity_families": "the same for every plan family and number of CPU threads",
    "fig7": "adaptation of one job to changing limits",
    "fig8": "division of one node between two jobs",
    "fig9": "losses of real training runs whose plan changes, step by step",
    "fig9_summary": "differences of these losses, and what restarts cost",
    "getting_started": "all policies on ten jobs",
    "table4": "all policies on three job lists, two restart delays",
    "jct": "completion time of every job behind it",
    "allocation": "GPUs held over time by plan family",
    "schedule": "who held which GPU when",
    "lists": "policies on many other job lists: shifted, subsampled, generated",
    "lists_summary": "means over these lists with confidence intervals",
    "lists_pairs": "every policy beside each that knows no more, list by list",
    "rivals": "what other values of their parameters do to rivals, on lists of their own",
    "readings": "what other readings of the paper's rules do to its scheduler",
    "threads": "policies with requested and with chosen numbers of CPU threads where jobs offload",
    "knowledge": "what policies know beforehand, and what knowing more is worth",
    "load": "completion time and makespan against the arrival rate",
    "load_summary": "means over job lists with confidence intervals",
    "large_models": "completion time and makespan against the share of large models",
    "large_models_summary": "means over job lists with confidence intervals",
    "rounds": "completion time and makespan against the length of a round",
    "rounds_summary": "means over job lists with confidence intervals",
    "scale": "wall time of simulations and decisions against jobs and GPUs",
    "claims": "the statements of the paper, judged by this source alone",
}


class Sensitivity(Block):
    """Throughput of the best plan against the number of GPUs."""

    workloads: tuple[WorkloadKey, ...] = _of_curves("workloads whose curves are drawn")
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

    name: str = _of_fig7("label of the stage", min_length=1)
    placement: PlacementText = _of_fig7("GPUs on each node", unit="GPU")
    cpu_threads: int = _of_fig7(
        "CPU threads a GPU", unit="threads", source="trace of the batch-16 runs of the artifact", ge=1
    )


class Fig7(Block):
    """Adaptation of one job to a shrinking resource limit."""

    workload: WorkloadKey = _of_fig7(
        "workload of the job", source="Morphling, Fig. 7: LLaMA-2-7B, global batch 16"
    )
    stage_duration_s: float = _of_fig7(
        "how long each limit lasts", unit="s", source="Morphling, Fig. 7: 30 minutes", gt=0
    )
    stages: tuple[Fig7Stage, ...] = _of_fig7("the limits in order", min_length=1)
    profiled_stages: tuple[Fig7Stage, ...] = option(
        "the limits of the workload that is profiled where no tables of measurements are given",
        source="after Morphling, Fig. 7",
        changes="measured fig7",
        min_length=1,
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "Fig7":
        for stages in (self.stages, self.profiled_stages):
            if len({stage.name for stage in stages}) != len(stages):
                raise ValueError("stages with different names")
        return self


class Fig8(Block):
    """Division of one node between jobs."""

    workloads: tuple[WorkloadKey, ...] = _of_fig8("workloads that are submitted together", min_length=2)
    gpus: int = _of_fig8("GPUs to divide, all in one node", unit="GPU", ge=2)


class Fig9Model(Block):
    """Sizes of the model that is trained."""

    family: Literal["llama", "gpt", "bert", "t5", "vit"] = _of_fig9(
        f"kind of model: {', '.join(MODEL_FAMILIES)}", source="Morphling, Fig. 9: LLaMA-2"
    )
    n_layers: int = _our("transformer layers", ge=1)
    hidden: int = _our("width", ge=2)
    heads: int = _our("attention heads", ge=1)
    kv_heads: int = _our("key-value heads", ge=1)
    ffn: int = _our("width of the MLP", ge=1)
    seq: int = _our("tokens a sample", unit="tokens", ge=2)
    vocab: int = _our("tokens of the vocabulary", ge=2)


class Fig9Plan(Block):
    """One execution plan and the name of its run."""

    name: str = _of_fig9("name of the run", min_length=1)
    dp: Count = _of_fig9("data-parallel degree")
    tp: Count = _of_fig9("tensor-parallel degree")
    pp: Count = _of_fig9("pipeline-parallel degree")
    grad_accum_steps: Count = _of_fig9("passes an optimiser step and replica")
    zero_stage: int = _of_fig9("0 none, 1 optimiser, 2 gradients, 3 parameters", ge=0, le=3)
    offload: bool = _of_fig9("whether optimiser state and step are on the host")
    checkpoint_fraction: float = _of_fig9("share of the layers with activation checkpointing", ge=0, le=1)

    def plan(self, global_batch_size: int) -> ExecutionPlan:
        """Return the execution plan for a global batch."""
        return ExecutionPlan(
            **self.model_dump(exclude={"name"}),
            global_batch_size=global_batch_size,
            micro_batch_size=global_batch_size // (self.dp * self.grad_accum_steps),
        )


class Fig9Switch(Block):
    """One change of plan of the switching run."""

    step: int = _of_fig9("optimiser steps done at the change", unit="steps", ge=1)
    name: str = _of_fig9("run whose plan is used from then on", min_length=1)


class Fig9(Block):
    """Accuracy under reconfiguration, measured by training."""

    device: Literal["auto", "cpu", "cuda"] = _of_fig9(
        "where to train; auto uses GPUs if there is one for every process of the largest plan, and "
        "cuda leaves out plans for which there are too few",
        source="choice: reproducible everywhere",
    )
    model: Fig9Model = option("the model")
    global_batch_size: int = _our("samples an optimiser step", unit="samples", ge=1)
    steps: int = _of_fig9(
        "optimiser steps of each run",
        unit="steps",
        source="choice; Morphling, Fig. 9: 3000 mini-batches",
        ge=2,
    )
    learning_rate: float = _our("learning rate of AdamW", gt=0)
    seed: int = _chosen("seed of the initial weights", ge=0)
    other_seed: int = _chosen(
        "seed of the initial weights of the run to compare with; samples and order are the same", ge=0
    )
    data_seed: int = _chosen("seed of the samples and their order", ge=0)
    plans: tuple[Fig9Plan, ...] = _chosen("plans to train under; the first is the reference", min_length=2)
    switches: tuple[Fig9Switch, ...] = _chosen(
        "changes of plan of the switching run, which starts under the reference plan", min_length=1
    )

    @property
    def n_processes(self) -> int:
        """Processes of the largest plan."""
        return max(one.plan(self.global_batch_size).n_gpus for one in self.plans)

    def experiment(self) -> dict[str, Any]:
        """Return what the experiment is given, as plain values."""
        plans = {one.name: one.plan(self.global_batch_size) for one in self.plans}
        degrees = ["dp", "tp", "pp", "grad_accum_steps", "zero_stage", "offload", "checkpoint_fraction"]
        keys = [*degrees, "global_batch_size", "micro_batch_size"]
        return {
            "model": self.model.model_dump(),
            "plans": {name: {key: getattr(plan, key) for key in keys} for name, plan in plans.items()},
            "switches": [[switch.step, switch.name] for switch in self.switches],
            "options": self.model_dump(include={"steps", "learning_rate", "seed", "data_seed"}),
            "other_seed": self.other_seed,
            "device": self.device,
        }

    @model_validator(mode="after")
    def _plans_can_train(self) -> "Fig9":
        if len({plan.name for plan in self.plans}) != len(self.plans):
            raise ValueError("plans with different names")
        try:
            model = SmallModel(**self.model.model_dump())
            for plan in self.plans:
                check_supported(plan.plan(self.global_batch_size), model)
        except MakespanError as error:
            raise ValueError(f"plans that can train the model ({error})") from None
        return self

    @model_validator(mode="after")
    def _switches_fit(self) -> "Fig9":
        steps = [switch.step for switch in self.switches]
        if sorted(set(steps)) != steps or steps[-1] >= self.steps:
            raise ValueError(f"switches after growing steps below {self.steps}")
        unknown = {switch.name for switch in self.switches} - {plan.name for plan in self.plans}
        if unknown:
            raise ValueError(f"switches to plans that are listed (not there: {', '.join(sorted(unknown))})")
        if self.seed == self.other_seed:
            raise ValueError("an other_seed that differs from seed")
        return self


class Morphling(PaperSettings):
    """Experiments of the Morphling paper."""

    unjudged = frozenset(
        {"table2_rows", "table2_summary", "jct", "allocation", "schedule", "fig9_summary"}
        | {"lists_summary", "load_summary", "large_models_summary", "rounds", "rounds_summary", "scale"}
    )
    judged_on_profile = frozenset({"fig9"})
    untimed = frozenset({"fig9", "fig9_summary"})
    judged_cells = ("table4",)
    judges_live = True
    contents = _CONTENTS

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
        for name, block in (("sensitivity", self.sensitivity), ("simulation", self.simulation)):
            missing = sorted(set(block.workloads) - set(self.workloads))
            if missing:
                raise ValueError(f"{name}.workloads among workloads (not there: {', '.join(missing)})")
        return self

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built; see `makespan.settings.PaperSettings.tables`."""
        fitted, trained = ["table2", "table2_rows", "table2_summary"], ["fig9", "fig9_summary"]
        measured = trained if source == "measured" else []
        if is_profiled:
            return [*fitted, "fig7", *measured]
        needs = {"fig7": {self.fig7.workload}, "fig8": set(self.fig8.workloads)}
        possible = [name for name, needed in needs.items() if needed <= set(self.workloads)]
        simulated = [table for tables in EXPERIMENT_TABLES.values() for table in tables]
        threads = ["threads"] if source == "emulated" else []
        return [*fitted, "sensitivity", "sensitivity_families", *possible, *simulated, *threads, *measured]

    def throughput_workloads(self) -> tuple[str, ...]:
        """Return the workloads whose iteration times are read."""
        return self.workloads

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' job lists."""
        lists = ("naive", "workload-base", "workload-bp", "workload-mt")
        return tuple(f"morphling-workloads-{name}" for name in lists)
