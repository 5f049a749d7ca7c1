"""Small clusters, tables, traces and policies for tests of the simulator."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from makespan import sim
from makespan.hardware import ClusterSpec, cluster, gpu, homogeneous
from makespan.plans import Placement, enumerate_placements
from makespan.sim import Allocation, Catalogue, Configuration, Decision, Observer, Policy, Scenario, Schedule
from makespan.studies import TableCatalogue
from makespan.workloads import JobSpec, workload

FAST, SLOW = "a800-80", "v100-32"

# Seconds of a step on one GPU, plans by number of GPUs ("*" is any number), and the least GPUs.
_TOYS = {
    "roberta": (0.9, {"ga": 1.0, "zero-dp": 1.05, "gc": 1.3}, 1),
    "t5": (2.1, {"ga": 1.1, "zero-dp": 1.0, "zero-offload": 1.6}, 1),
    "gpt2": (5.3, {"ga": 1.0, "tp+ga": 0.9, "tp-pp": 1.15}, 2),
}


def toy_nodes(n_nodes: int, gpus_per_node: int, cpu_threads: int | None = None) -> ClusterSpec:
    """Return a cluster of equal nodes with twelve CPU threads a GPU unless told otherwise."""
    base = cluster("a800-64")
    node = replace(
        base.nodes[0],
        n_gpus=gpus_per_node,
        n_nics=gpus_per_node,
        gpus_per_nic=1,
        cpu_threads=cpu_threads or 12 * gpus_per_node,
    )
    return homogeneous(node, n_nodes, base.network, name=f"toy-{n_nodes}x{gpus_per_node}")


def mixed_nodes(n_each: int, gpus_per_node: int) -> ClusterSpec:
    """Return a cluster of so many nodes with fast devices, and behind them as many with slow ones."""
    fast = toy_nodes(n_each, gpus_per_node)
    slow = tuple(replace(node, gpu=gpu(SLOW)) for node in fast.nodes)
    return replace(fast, name=f"mixed-{2 * n_each}x{gpus_per_node}", nodes=(*fast.nodes, *slow))


def simulate(
    jobs: Iterable[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    policy: Policy,
    *,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Schedule:
    """Simulate jobs under a policy, with options of a `Scenario`."""
    options["failures"] = tuple(options.get("failures", ()))
    return sim.simulate(Scenario("toys", tuple(jobs), cluster, catalogue, **options), policy, observers)


def throughput_rows(key: str, rows: list[tuple[str, str, float]], cpu_threads: int = 4) -> pd.DataFrame:
    """Return a throughput table of (plan, placement, seconds); a time of 0 cannot run."""
    plans, placements, times = zip(*rows, strict=True)
    times = pd.Series(times, dtype=float)
    return pd.DataFrame(
        {
            "workload": key,
            "exec_plan": plans,
            "placement": placements,
            "cpu_threads": cpu_threads,
            "global_batch_size": workload(key).global_batch_size,
            "iter_time_s": times.where(times > 0),
            "forward_s": math.nan,
            "overlap_sync_s": math.nan,
            "optimize_s": math.nan,
            "feasible": times > 0,
            "clean": True,
            "flag": "",
            "provenance": "emulated",
        }
    )


@cache
def toy_tables(scale: float = 1.0) -> tuple[pd.DataFrame, ...]:
    """Return throughput tables of three workloads on up to 8 GPUs on up to 4 nodes."""
    tables = []
    for key, (base_s, plans, least) in _TOYS.items():
        rows = []
        for n_gpus in (1, 2, 4, 8):
            if n_gpus < least:
                continue
            for placement in enumerate_placements(n_gpus, 8, 4):
                for plan, factor in plans.items():
                    name = f"{n_gpus}11" if plan == "tp-pp" else plan
                    spread = 1 + 0.07 * (placement.n_nodes - 1) + 0.013 * (max(placement.gpus_per_node) % 3)
                    time_s = base_s * factor * spread / n_gpus**0.87
                    rows.append((name, placement.text, scale * round(time_s, 4)))
        tables.append(throughput_rows(key, rows))
    return tuple(tables)


@cache
def toy_catalogue(scale: float = 1.0) -> Catalogue:
    """Return the catalogue of the toy tables."""
    return TableCatalogue.from_tables(toy_tables(scale), busy=_busy())


@cache
def _busy() -> dict[str, list[tuple[float, float]]]:
    """Return shares of a step in which devices compute and data move, up to all of it, by workload."""
    return {
        str(table["workload"].iloc[0]): [
            ((1 + 7 * row % 10) / 10, (3 * row % 8) / 10) for row in range(len(table))
        ]
        for table in toy_tables()
    }


@cache
def typed_catalogue(scale: float = 1.0) -> TableCatalogue:
    """Return a catalogue for `mixed_nodes`; on slow devices every step takes twice as long."""
    parts = {FAST: toy_tables(scale), SLOW: toy_tables(2 * scale)}
    return TableCatalogue.joined(
        TableCatalogue.from_tables(tables, busy=_busy(), gpu_type=name) for name, tables in parts.items()
    )


@cache
def misjudged_catalogue() -> Catalogue:
    """Return the catalogue of the toy tables with predictions that are up to a quarter off."""
    tables = toy_tables()
    wrong = {
        str(table["workload"].iloc[0]): [
            time_s * (0.8 + 0.45 * (17 * row % 10) / 9) for row, time_s in enumerate(table["iter_time_s"])
        ]
        for table in tables
    }
    return TableCatalogue.from_tables(tables, wrong, busy=_busy())


def one_gpu_catalogue(iter_time_s: float = 1.0) -> Catalogue:
    """Return a catalogue with one configuration on one GPU."""
    return TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", iter_time_s)])])


def toy_job(job_id: str = "a", submit_time_s: float = 0.0, **changes: Any) -> JobSpec:
    """Return a job that asks for one GPU and ten steps unless told otherwise."""
    values = {"workload": "roberta", "n_gpus": 1, "n_cpus": 4, "plan": "ga", "steps": 10} | changes
    return JobSpec(job_id, submit_time_s, **values)


def find(catalogue: Catalogue, plan: str, placement: str, key: str = "roberta") -> Configuration:
    """Return a configuration that must exist."""
    found = catalogue.find(key, plan, Placement.parse(placement).text, 4)
    assert found is not None, (key, plan, placement)
    return found


_PLANS = {"roberta": ("ga", "zero-dp", "gc"), "t5": ("ga", "zero-dp"), "gpt2": ("ga", "tp+ga")}


@st.composite
def traces(draw: Any, n_gpus: int, max_jobs: int = 7, distinct_times: bool = False) -> list[JobSpec]:
    """Draw jobs that fit a cluster of so many GPUs."""
    n_jobs = draw(st.integers(1, max_jobs))
    times = st.integers(0, 400).map(lambda quarter: quarter / 4)
    submitted = draw(st.lists(times, min_size=n_jobs, max_size=n_jobs, unique=distinct_times))
    jobs = []
    for index, submit_time_s in enumerate(submitted):
        key = draw(st.sampled_from([key for key, toy in _TOYS.items() if toy[2] <= n_gpus]))
        sizes = [size for size in (1, 2, 4, 8) if _TOYS[key][2] <= size <= n_gpus]
        jobs.append(
            toy_job(
                f"job-{index}",
                submit_time_s,
                workload=key,
                n_gpus=draw(st.sampled_from(sizes)),
                plan=draw(st.sampled_from(_PLANS[key])),
                steps=draw(st.integers(1, 120)),
                is_guaranteed=draw(st.booleans()),
                tenant=draw(st.sampled_from(("x", "y"))),
            )
        )
    return jobs


@st.composite
def clusters(draw: Any) -> ClusterSpec:
    """Draw a cluster of up to four nodes of up to eight GPUs, of one type or two."""
    if draw(st.booleans()):
        return mixed_nodes(draw(st.integers(1, 2)), draw(st.sampled_from((2, 4, 8))))
    return toy_nodes(draw(st.integers(1, 4)), draw(st.sampled_from((2, 4, 8))))


def catalogue_of(spec: ClusterSpec, scale: float = 1.0) -> TableCatalogue:
    """Return the toy catalogue that knows the types of devices of a cluster."""
    return toy_catalogue(scale) if spec.is_homogeneous else typed_catalogue(scale)


def scaled_policy(policy: Any, factor: float) -> Any:
    """Return a policy whose own times are scaled: by house rule the fields that end in ``_s``."""

    def scaled(name: str, value: Any) -> Any:
        if is_dataclass(value):
            return scaled_policy(value, factor)
        if not name.endswith("_s") or value is None:
            return value
        return tuple(item * factor for item in value) if isinstance(value, tuple) else value * factor

    changes = {item.name: scaled(item.name, getattr(policy, item.name)) for item in fields(policy)}
    return replace(
        policy, **{name: value for name, value in changes.items() if value is not getattr(policy, name)}
    )


@dataclass(frozen=True, slots=True)
class Scripted:
    """A policy whose decisions are given by a function of the view."""

    script: Callable[[Any], Mapping[str, Allocation | None] | Decision]
    name: str = "scripted"
    title: str = "Scripted"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    asks_every_round: bool = False
    references: tuple[str, ...] = field(default=())

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> int:
        """Return the number of calls so far."""
        return 0

    def decide(self, view: Any, state: int) -> tuple[Decision, int]:
        """Return what the script says."""
        answer = self.script(view)
        if not isinstance(answer, Decision):
            answer = Decision(answer, view.time_s + view.interval_s if self.asks_every_round else None)
        return answer, state + 1
