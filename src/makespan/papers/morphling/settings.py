"""Block ``morphling.simulation``: the cluster experiments."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.errors import MakespanError
from makespan.plans import ExecutionPlan, Placement
from makespan.policies import policy_names
from makespan.settings import Block, Count, PaperSettings, option, readable, taken_from
from makespan.training import MODEL_FAMILIES, SmallModel, check_supported
from makespan.workloads import workload_keys

# ------------------------------------------------------------------------------------------------
# Block ``morphling.simulation``: the cluster experiments.

EXPERIMENT_TABLES = {
    "getting_started": ("getting_started",),
    "table4": ("table4", "jct", "allocation", "schedule"),
    "lists": ("lists", "lists_summary", "lists_pairs"),
    "rivals": ("rivals",),
    "readings": ("readings",),
    "knowledge": ("knowledge",),
    "load": ("load", "load_summary"),
    "large_models": ("large_models", "large_models_summary"),
    "rounds": ("rounds", "rounds_summary"),
    "scale": ("scale",),
}
"""The tables that each cluster experiment writes."""
PolicyName = Annotated[str, taken_from(policy_names)]
RivalName = Literal[
    "sia", "synergy", "antman", "gavel", "gavel-ftf", "gavel-makespan", "tiresias", "sjf", "srtf"
]
TraceName = Literal["base", "bp", "mt"]
Time = Annotated[float, Field(ge=0)]
PositiveTime = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0)]
_simulation_option = partial(option, source="a choice")
_seeds = partial(_simulation_option, changes="lists", min_length=1)
_of_lists = partial(_simulation_option, changes="lists")
_of_threads = partial(_simulation_option, changes="threads")
_of_rivals = partial(_simulation_option, changes="rivals")
_of_readings = partial(_simulation_option, changes="readings")
_study_seeds = partial(_simulation_option, "seeds of the job lists", min_length=1)
_policies = partial(_simulation_option, "policies", min_length=1)
_figures = partial(option, source="Morphling, simulation figures", min_length=1)
_compared = partial(option, source="Morphling, Table 4", min_length=1)
_of_naive = partial(option, changes="getting_started")
_of_all = partial(option, changes="all tables of simulations")


class JobLists(Block):
    """Generated job lists; the published source has the authors' own."""

    jobs: int = option("jobs of each list", source="Morphling, section 7.3: 406", changes="table4", ge=2)
    seed: int = _simulation_option("seed of models, durations and arrivals", changes="table4", ge=0)
    naive_jobs: int = _of_naive("jobs of the short list", source="artifact, naive list: 10", ge=2)
    naive_span_s: float = _of_naive(
        "time from the first to the last submission of the short list",
        unit="s",
        source="artifact, naive list: 5586 s",
        gt=0,
    )


class Seeds(Block):
    """Seeds of job lists, none of which was looked at while a policy or a parameter was chosen."""

    shifted: tuple[Seed, ...] = _seeds("lists of the authors with shifted arrivals")
    subsampled: tuple[Seed, ...] = _seeds("subsamples of the lists of the authors")
    generated: tuple[Seed, ...] = _seeds("generated lists, of sources without lists of the authors")


class Lists(Block):
    """Many job lists: whether a result rests on one file."""

    seeds: Seeds = option("seeds of the lists")
    std_s: float = option(
        "standard deviation of shifted arrivals",
        unit="s",
        source="a choice: more than a restart, less than the span",
        changes="lists, knowledge, load, large_models, rounds",
        gt=0,
    )
    share: float = _of_lists("share of the jobs that a subsample keeps", gt=0, le=1)
    traces: tuple[TraceName, ...] = _of_lists("traces that lists are drawn from", min_length=1)
    gpus: tuple[Count, ...] = _of_lists(
        "sizes of the cluster, in whole nodes; jobs that it cannot run as requested are left out",
        unit="GPU",
        min_length=1,
    )
    restart_delays_s: tuple[Time, ...] = _of_lists(
        "time without progress after every start and change", unit="s", min_length=1
    )
    policies: tuple[PolicyName, ...] = _of_lists("policies that are compared with one another", min_length=1)
    ablations: tuple[PolicyName, ...] = _of_lists(
        "policies that run besides on the first trace, with the first size and delay"
    )


class Rivals(Block):
    """Parameters of rivals, which are chosen on lists that nothing else uses."""

    seeds: tuple[Seed, ...] = _of_rivals("seeds of the lists", min_length=1)
    traces: tuple[TraceName, ...] = _of_rivals("traces that lists are drawn from", min_length=1)
    restart_delays_s: tuple[Time, ...] = _of_rivals(
        "time without progress after every start and change", unit="s", min_length=1
    )
    policies: tuple[RivalName, ...] = _of_rivals("rivals", min_length=1)


class Readings(Block):
    """Alternative readings of the rules that the paper states, exchanged one at a time."""

    seeds: tuple[Seed, ...] = _of_readings("seeds of the lists", min_length=1)
    traces: tuple[TraceName, ...] = _of_readings("traces that lists are drawn from", min_length=1)
    restart_delays_s: tuple[Time, ...] = _of_readings(
        "time without progress after every start and change", unit="s", min_length=1
    )


class Threads(Block):
    """Mixes of jobs whose speed depends on CPU threads and others."""

    workloads: tuple[str, ...] = _of_threads("workloads that jobs train", min_length=1)
    cpu_threads: tuple[Count, ...] = _of_threads(
        "CPU threads a GPU among which policies may choose; jobs request 8", min_length=2
    )
    shares: tuple[Share, ...] = _of_threads("shares of jobs that offload", min_length=1)
    seeds: tuple[Seed, ...] = _of_threads("seeds of the job lists", min_length=1)
    jobs: Count = _of_threads("jobs of each list")
    policies: tuple[PolicyName, ...] = _of_threads("policies that are compared", min_length=1)


class Knowledge(Block):
    """What policies know beforehand."""

    traces: tuple[TraceName, ...] = _simulation_option(
        "traces that lists are drawn from", changes="knowledge", min_length=1
    )
    seeds: tuple[Seed, ...] = _study_seeds(changes="knowledge")
    policies: tuple[PolicyName, ...] = _policies(changes="knowledge")


class Load(Block):
    """Arrival rates."""

    factors: tuple[PositiveTime, ...] = _figures("arrival rates over that of the list", changes="load")
    seeds: tuple[Seed, ...] = _study_seeds(changes="load")
    policies: tuple[PolicyName, ...] = _compared("policies", changes="load")


class LargeModels(Block):
    """Shares of large models."""

    shares: tuple[Share, ...] = _figures("shares of jobs that train large models", changes="large_models")
    seeds: tuple[Seed, ...] = _study_seeds(changes="large_models")
    policies: tuple[PolicyName, ...] = _compared("policies", changes="large_models")


class Rounds(Block):
    """Lengths of a scheduling round."""

    intervals_s: tuple[Time, ...] = _simulation_option(
        "lengths of a round; 0 asks after each event", unit="s", changes="rounds", min_length=1
    )
    seeds: tuple[Seed, ...] = _study_seeds(changes="rounds")
    policies: tuple[PolicyName, ...] = _policies(changes="rounds")


class ScaleSize(Block):
    """One size of the scale study."""

    jobs: int = _simulation_option("copies of each job", changes="scale", ge=1)
    gpus: int = _simulation_option("copies of the cluster", changes="scale", ge=1)


class Scale(Block):
    """Larger clusters with more jobs."""

    sizes: tuple[ScaleSize, ...] = _figures(
        "sizes", source="Morphling, scalability: 10x jobs, 8x GPUs", changes="scale"
    )
    policies: tuple[PolicyName, ...] = _policies(changes="scale")


class Simulation(Block):
    """Cluster experiments."""

    workloads: tuple[str, ...] = _of_all(
        "workloads that jobs train; among morphling.workloads, others are left out of the job lists",
        source="Morphling, section 7.3",
        min_length=1,
    )
    predictions: Literal["sampled", "requests", "exact"] = _of_all(
        "what policies know: sampled, predictions of the fitted model and the true times of what was sampled "
        "or what a job has run itself; requests, also of what users request; exact, all true times",
        source="Morphling, section 5: policies decide by the fitted model",
    )
    restart_delays_s: tuple[Time, ...] = _of_all(
        "time without progress after every start and change; studies and figures use the first",
        unit="s",
        source="released simulator: 260 s; paper, measured: 78 s",
        min_length=1,
    )
    interval_s: float = _of_all(
        "length of a scheduling round; 0 asks after each event",
        unit="s",
        source="released simulator: 60 s",
        ge=0,
    )
    traces: tuple[TraceName, ...] = _compared(
        "job lists: user-chosen plans, best plans, guarantees for a part; figures over time show the first",
        changes="table4",
    )
    policies: tuple[PolicyName, ...] = _compared(
        "policies that are compared", changes="table4, getting_started"
    )
    shown: tuple[PolicyName, ...] = _simulation_option(
        "policies whose GPUs are drawn over time; of the first one also who held which",
        changes="allocation, gantt",
        min_length=1,
    )
    job_lists: JobLists = option("generated job lists")
    lists: Lists = option("comparison on many job lists")
    rivals: Rivals = option("parameters of rivals")
    readings: Readings = option("readings of the paper's rules")
    threads: Threads = option("study of CPU threads")
    knowledge: Knowledge = option("study of what policies know")
    load: Load = option("load study")
    large_models: LargeModels = option("study of large models")
    rounds: Rounds = option("study of round lengths")
    scale: Scale = option("scale study")

    @model_validator(mode="after")
    def _shown_are_compared(self) -> "Simulation":
        missing = sorted(set(self.shown) - set(self.policies))
        if missing:
            raise ValueError(f"shown among policies (not there: {', '.join(missing)})")
        return self

    def experiments(self) -> dict[str, dict[str, Any]]:
        """Return the options of each cluster experiment as its function takes them."""
        names = {"policies": list(self.policies), "delays_s": list(self.restart_delays_s)}
        compared: dict[str, Any] = names | {"interval_s": self.interval_s}
        traces, delay = {"traces": list(self.traces)}, {"delay_s": self.restart_delays_s[0]}
        study = delay | {"interval_s": self.interval_s}
        sizes = [(size.jobs, size.gpus) for size in self.scale.sizes]
        return {
            "getting_started": compared,
            "table4": compared | traces | {"shown": list(self.shown)},
            "lists": {"interval_s": self.interval_s} | self._compared_on_lists(),
            "rivals": {"interval_s": self.interval_s} | self._varied(),
            "readings": {
                "interval_s": self.interval_s,
                "traces": list(self.readings.traces),
                "delays_s": list(self.readings.restart_delays_s),
            },
            "knowledge": study | self.knowledge.model_dump(exclude={"seeds"}),
            "load": study | self.load.model_dump(exclude={"seeds"}),
            "large_models": study | self.large_models.model_dump(exclude={"seeds"}),
            "rounds": delay | self.rounds.model_dump(exclude={"seeds"}),
            "scale": study | {"policies": list(self.scale.policies), "sizes": sizes},
        }

    def of_threads(self, form: str) -> dict[str, Any]:
        """Return the options of the study of CPU threads as its function takes them."""
        chosen = self.threads.model_dump(exclude={"cpu_threads", "jobs"})
        study = {"delay_s": self.restart_delays_s[0], "interval_s": self.interval_s}
        given = {"form": form, "mode": self.predictions, "n_jobs": self.threads.jobs}
        return {name: list(one) for name, one in chosen.items()} | study | given

    def _compared_on_lists(self) -> dict[str, Any]:
        chosen = self.lists.model_dump(exclude={"seeds", "std_s", "share"})
        return {{"restart_delays_s": "delays_s"}.get(name, name): list(one) for name, one in chosen.items()}

    def _varied(self) -> dict[str, Any]:
        return {
            "policies": list(self.rivals.policies),
            "traces": list(self.rivals.traces),
            "delays_s": list(self.rivals.restart_delays_s),
        }

    def drawn(self, experiment: str) -> dict[str, Any]:
        """Return how the job lists of an experiment on several are drawn, from those of a source."""
        ways = {"std_s": self.lists.std_s, "share": self.lists.share}
        if experiment == "lists":
            seeds: dict[str, tuple[int, ...]] = self.lists.seeds.model_dump()
            return ways | {"seeds": {how: list(given) for how, given in seeds.items()}}
        if experiment not in ("rivals", "readings", "knowledge", "load", "large_models", "rounds"):
            return {}
        study: Rivals | Readings | Knowledge | Load | LargeModels | Rounds = getattr(self, experiment)
        return ways | {"seeds": {how: list(study.seeds) for how in ("shifted", "generated")}}


# ------------------------------------------------------------------------------------------------
# Block ``morphling``: the experiments of the paper and their options.

WorkloadKey = Annotated[str, taken_from(workload_keys)]
PlacementText = Annotated[
    str, readable(lambda text: Placement.parse(text).text, "GPUs on each node, for example 4444")
]
_of_curves = partial(option, source="Morphling, motivation", changes="sensitivity")
_of_fig7 = partial(option, source="Morphling, Fig. 7", changes="fig7")
_of_fig8 = partial(option, source="Morphling, Fig. 8", changes="fig8")
_of_fig9 = partial(option, changes="fig9")
_paper_option = partial(_of_fig9, source="choice")
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
    seed: int = _paper_option("seed of the initial weights", ge=0)
    other_seed: int = _paper_option(
        "seed of the initial weights of the run to compare with; samples and order are the same", ge=0
    )
    data_seed: int = _paper_option("seed of the samples and their order", ge=0)
    plans: tuple[Fig9Plan, ...] = _paper_option(
        "plans to train under; the first is the reference", min_length=2
    )
    switches: tuple[Fig9Switch, ...] = _paper_option(
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
