"""Block ``morphling.simulation``: the cluster experiments."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.policies import policy_names
from makespan.settings import Block, Count, option, taken_from

__all__ = ["EXPERIMENT_TABLES", "Simulation"]

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

_chosen = partial(option, source="a choice")
_seeds = partial(_chosen, changes="lists", min_length=1)
_of_lists = partial(_chosen, changes="lists")
_of_threads = partial(_chosen, changes="threads")
_of_rivals = partial(_chosen, changes="rivals")
_of_readings = partial(_chosen, changes="readings")
_study_seeds = partial(_chosen, "seeds of the job lists", min_length=1)
_policies = partial(_chosen, "policies", min_length=1)
_figures = partial(option, source="Morphling, simulation figures", min_length=1)
_compared = partial(option, source="Morphling, Table 4", min_length=1)
_of_naive = partial(option, changes="getting_started")
_of_all = partial(option, changes="all tables of simulations")


class JobLists(Block):
    """Generated job lists; the published source has the authors' own."""

    jobs: int = option("jobs of each list", source="Morphling, section 7.3: 406", changes="table4", ge=2)
    seed: int = _chosen("seed of models, durations and arrivals", changes="table4", ge=0)
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

    traces: tuple[TraceName, ...] = _chosen(
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

    intervals_s: tuple[Time, ...] = _chosen(
        "lengths of a round; 0 asks after each event", unit="s", changes="rounds", min_length=1
    )
    seeds: tuple[Seed, ...] = _study_seeds(changes="rounds")
    policies: tuple[PolicyName, ...] = _policies(changes="rounds")


class ScaleSize(Block):
    """One size of the scale study."""

    jobs: int = _chosen("copies of each job", changes="scale", ge=1)
    gpus: int = _chosen("copies of the cluster", changes="scale", ge=1)


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
    shown: tuple[PolicyName, ...] = _chosen(
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
