"""Experiments of Morphling (MLSys 2025): plans and resources of training jobs, chosen by a performance model.

`PAPER` has the options and the experiments: the performance model with Table 2 and sensitivity curves
(`performance`), how its runs are chosen (`sampling`), one job under changing limits (`adaptation`) and two
on one node (`sharing`), real training runs whose plan changes (`accuracy`), and the cluster: its job lists
(`job_lists`), Table 4 and the same on many lists (`cluster`), what that rests on (`studies`), the same with
models of today (`today`) and with nodes that fail (`failures`), and the planner off the testbed
(`public_rows`). `page` makes the tables of the paper's page from results.
"""

from functools import partial
from typing import Literal

from pydantic import model_validator

from makespan.papers.experiment import Paper
from makespan.papers.morphling.accuracy import Fig9
from makespan.papers.morphling.adaptation import Fig7
from makespan.papers.morphling.cluster import GettingStarted, Lists, PolicyName, Table4, Time, TraceName
from makespan.papers.morphling.failures import Failures
from makespan.papers.morphling.job_lists import ImportedLists, JobLists, Predictions
from makespan.papers.morphling.performance import FitModels, Sensitivity, WorkloadKey
from makespan.papers.morphling.public_rows import PublicRows
from makespan.papers.morphling.results_page import page as page
from makespan.papers.morphling.sampling import Sampling
from makespan.papers.morphling.sharing import Fig8
from makespan.papers.morphling.studies import (
    Knowledge,
    LargeModels,
    Load,
    Readings,
    Rivals,
    Rounds,
    Scale,
    Threads,
)
from makespan.papers.morphling.today import Today
from makespan.settings import Block, option
from makespan.tables import EVENTS, FIT, JOBS, PREDICTIONS, SENSITIVITY, SENSITIVITY_FAMILIES

_simulation_option = partial(option, source="a choice")
_compared = partial(option, source="Morphling, Table 4", min_length=1)
_of_all = partial(option, changes="all tables of simulations")


class Simulation(Block):
    """Cluster experiments."""

    workloads: tuple[str, ...] = _of_all(
        "workloads that jobs train; among morphling.workloads, others are left out of the job lists",
        ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30"),
        source="Morphling, section 7.3",
        min_length=1,
    )
    predictions: Literal["sampled", "requests", "exact"] = _of_all(
        "what policies know: sampled, predictions of the fitted model and the true times of what was sampled "
        "or what a job has run itself; requests, also of what users request; exact, all true times",
        "sampled",
        source="Morphling, section 5: policies decide by the fitted model",
    )
    restart_delays_s: tuple[Time, ...] = _of_all(
        "time without progress after every start and change; studies and figures use the first",
        (260.0, 78.0),
        unit="s",
        source="released simulator: 260 s; paper, measured: 78 s",
        min_length=1,
    )
    interval_s: float = _of_all(
        "length of a scheduling round; 0 asks after each event",
        60.0,
        unit="s",
        source="released simulator: 60 s",
        ge=0,
    )
    traces: tuple[TraceName, ...] = _compared(
        "job lists: user-chosen plans, best plans, guarantees for a part; figures over time show the first",
        ("base", "bp", "mt"),
        changes="table4",
    )
    policies: tuple[PolicyName, ...] = _compared(
        "policies that are compared",
        (
            "morphling",
            "morphling-lookahead",
            "morphling-work",
            "morphling-lookahead-s",
            "morphling-work-s",
            "morphling-lookahead-e",
            "morphling-lookahead-r",
            "morphling-lookahead-n",
            "morphling-work-e",
            "morphling-work-r",
            "morphling-work-n",
            "morphling-e",
            "morphling-r",
            "morphling-n",
            "sia",
            "synergy",
            "antman",
            "gavel",
            "tiresias",
            "fifo",
            "sjf",
            "srtf",
        ),
        changes="table4, getting_started",
    )
    shown: tuple[PolicyName, ...] = _simulation_option(
        "policies whose GPUs are drawn over time; of the first one also who held which",
        ("morphling-work", "morphling-lookahead", "morphling", "sia"),
        changes="allocation, gantt",
        min_length=1,
    )
    job_lists: JobLists = option("generated job lists", JobLists())
    lists: Lists = option("comparison on many job lists", Lists())
    rivals: Rivals = option("parameters of rivals", Rivals())
    readings: Readings = option("readings of the paper's rules", Readings())
    threads: Threads = option("study of CPU threads", Threads())
    knowledge: Knowledge = option("study of what policies know", Knowledge())
    load: Load = option("load study", Load())
    large_models: LargeModels = option("study of large models", LargeModels())
    rounds: Rounds = option("study of round lengths", Rounds())
    scale: Scale = option("scale study", Scale())
    today: Today = option("study of models of today", Today())
    failures: Failures = option("study of nodes that fail", Failures())

    @model_validator(mode="after")
    def _shown_are_compared(self) -> "Simulation":
        missing = sorted(set(self.shown) - set(self.policies))
        if missing:
            raise ValueError(f"shown among policies (not there: {', '.join(missing)})")
        return self


class Morphling(Paper):
    """Experiments of the Morphling paper."""

    title = "Morphling"
    EXPERIMENTS = (
        *(JobLists, ImportedLists, Predictions, FitModels, Sampling, Sensitivity, Fig7, Fig8, Fig9),
        *(GettingStarted, Table4, Lists, Rivals, Readings, Threads, Knowledge),
        *(Load, LargeModels, Rounds, Scale, Today, Failures, PublicRows),
    )
    judged_cells = ("table4",)
    judges_live = True
    shared_schemas = {
        "workloads": JOBS,
        "predictions": PREDICTIONS,
        "fits": FIT,
        "sensitivity": SENSITIVITY,
        "sensitivity_families": SENSITIVITY_FAMILIES,
        "schedule": EVENTS,
    }

    workloads: tuple[WorkloadKey, ...] = option(
        "workloads whose iteration times are read, fitted and compared; an experiment on single jobs is "
        "left out if its workloads are not among them",
        ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30", "llama7_b16", "t5_3B"),
        source="Morphling, Table 2 and Fig. 7",
        changes="table2, fits",
        min_length=1,
    )
    sampling: Sampling = option("how runs to fit are chosen", Sampling())
    sensitivity: Sensitivity = option("sensitivity curves", Sensitivity())
    fig7: Fig7 = option("adaptation to changing limits", Fig7())
    fig8: Fig8 = option("throughput across jobs", Fig8())
    simulation: Simulation = option("cluster experiments", Simulation())
    fig9: Fig9 = option("accuracy under reconfiguration", Fig9())

    @model_validator(mode="after")
    def _curves_and_jobs_have_input(self) -> "Morphling":
        chosen = {
            "sampling": self.sampling.workloads,
            "sensitivity": self.sensitivity.workloads,
            "simulation": self.simulation.workloads,
        }
        for name, workloads in chosen.items():
            missing = sorted(set(workloads) - set(self.workloads))
            if missing:
                raise ValueError(f"{name}.workloads among workloads (not there: {', '.join(missing)})")
        return self

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' job lists."""
        lists = ("naive", "workload-base", "workload-bp", "workload-mt")
        return tuple(f"morphling-workloads-{name}" for name in lists)


PAPER = Morphling
