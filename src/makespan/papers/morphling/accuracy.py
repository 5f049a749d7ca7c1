"""Fig. 9: losses of real training runs under several plans, under changing plans, and with another seed."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import model_validator

from makespan.errors import MakespanError, TraceError
from makespan.papers.experiment import Experiment, Explore, Figure, Given
from makespan.plans import ExecutionPlan
from makespan.runtime import local_launcher
from makespan.settings import Block, Count, option
from makespan.training import (
    MODEL_FAMILIES,
    SmallModel,
    TrainingJob,
    check_supported,
    cost_table,
    train_compared,
)

SWITCHING = "switching"
"""The run that changes its plan through checkpoint and restart."""
OTHER_SEED = "other seed"
"""The run that differs from the reference by its seed alone."""
_of_fig9 = partial(option, changes="fig9")
_paper_option = partial(_of_fig9, source="choice")
_small_option = partial(_of_fig9, source="choice: a model that two CPU cores train in seconds")


class Fig9Model(Block):
    """Sizes of the model that is trained."""

    family: Literal["llama", "gpt", "bert", "t5", "vit"] = _of_fig9(
        f"kind of model: {', '.join(MODEL_FAMILIES)}", "llama", source="Morphling, Fig. 9: LLaMA-2"
    )
    n_layers: int = _small_option("transformer layers", 4, ge=1)
    hidden: int = _small_option("width", 64, ge=2)
    heads: int = _small_option("attention heads", 4, ge=1)
    kv_heads: int = _small_option("key-value heads", 2, ge=1)
    ffn: int = _small_option("width of the MLP", 128, ge=1)
    seq: int = _small_option("tokens per sample", 32, unit="tokens", ge=2)
    vocab: int = _small_option("tokens of the vocabulary", 64, ge=2)


class Fig9Plan(Block):
    """One execution plan and the name of its run."""

    name: str = _of_fig9("name of the run", min_length=1)
    dp: Count = _of_fig9("data-parallel degree")
    tp: Count = _of_fig9("tensor-parallel degree")
    pp: Count = _of_fig9("pipeline-parallel degree")
    grad_accum_steps: Count = _of_fig9("passes per optimiser step and replica")
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


class Fig9(Experiment):
    """Accuracy under reconfiguration, measured by training: every plan, changing ones, and another seed."""

    name = "fig9"
    tables = {
        "fig9": "losses of real training runs whose plan changes, step by step",
        "fig9_summary": "differences of these losses, and what restarts cost",
    }
    figures = (
        Figure(
            "fig9",
            "Fig. 9",
            "Losses of {runs: values fig9.run} that train a small LLaMA-style model for "
            "real, source {source}: under several execution plans, under one that changes "
            "through checkpoint and restart, and with another seed. Left: the curves; right: their "
            "distance to the first run. The joined hollow diamonds at the right "
            "edge are mean and largest distance of the published runs, the dashed "
            "line is a tenth of the mean distance of the other seed.",
            tables=("fig9", "fig9_summary"),
            values={"limit": 0.1},
            sources=("measured",),
            explore=Explore("lines", ("step",), ("loss",), ("run",), unit_x="step", unit_y="loss"),
        ),
    )
    cells = ("fig9",)
    sources = ("measured",)
    on_profile = True
    unjudged = frozenset({"fig9_summary"})
    trains = True
    minutes, mem_mb = 15, 3000

    device: Literal["auto", "cpu", "cuda"] = _of_fig9(
        "where to train; auto uses GPUs if each process of the largest plan can have one, and "
        "cuda leaves out plans that need more GPUs than there are",
        "auto",
        source="choice: reproducible everywhere",
    )
    model: Fig9Model = option("the model", Fig9Model())
    global_batch_size: int = _small_option("samples per optimiser step", 16, unit="samples", ge=1)
    steps: int = _of_fig9(
        "optimiser steps of each run",
        100,
        unit="steps",
        source="choice; Morphling, Fig. 9: 3000 mini-batches",
        ge=2,
    )
    learning_rate: float = _small_option("learning rate of AdamW", 0.003, gt=0)
    seed: int = _paper_option("seed of the initial weights", 0, ge=0)
    other_seed: int = _paper_option(
        "seed of the initial weights of the run to compare with; samples and order are the same", 1, ge=0
    )
    data_seed: int = _paper_option("seed of the samples and their order", 0, ge=0)
    plans: tuple[Fig9Plan, ...] = _paper_option(
        "plans to train under; the first is the reference",
        (
            Fig9Plan(
                name="one process",
                dp=1,
                tp=1,
                pp=1,
                grad_accum_steps=1,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="GA",
                dp=1,
                tp=1,
                pp=1,
                grad_accum_steps=4,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="GC",
                dp=1,
                tp=1,
                pp=1,
                grad_accum_steps=1,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=1.0,
            ),
            Fig9Plan(
                name="DP",
                dp=2,
                tp=1,
                pp=1,
                grad_accum_steps=2,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="ZeRO-3",
                dp=2,
                tp=1,
                pp=1,
                grad_accum_steps=1,
                zero_stage=3,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="ZeRO-Offload",
                dp=2,
                tp=1,
                pp=1,
                grad_accum_steps=1,
                zero_stage=2,
                offload=True,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="TP",
                dp=1,
                tp=2,
                pp=1,
                grad_accum_steps=1,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="PP",
                dp=1,
                tp=1,
                pp=2,
                grad_accum_steps=4,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="TP x PP",
                dp=1,
                tp=2,
                pp=2,
                grad_accum_steps=2,
                zero_stage=0,
                offload=False,
                checkpoint_fraction=0.0,
            ),
            Fig9Plan(
                name="DP x PP, ZeRO-1, GC",
                dp=2,
                tp=1,
                pp=2,
                grad_accum_steps=2,
                zero_stage=1,
                offload=False,
                checkpoint_fraction=1.0,
            ),
        ),
        min_length=2,
    )
    switches: tuple[Fig9Switch, ...] = _paper_option(
        "changes of plan of the switching run, which starts under the reference plan",
        (
            Fig9Switch(step=25, name="ZeRO-3"),
            Fig9Switch(step=50, name="TP x PP"),
            Fig9Switch(step=75, name="GC"),
        ),
        min_length=1,
    )

    @property
    def n_processes(self) -> int:
        """Processes of the largest plan."""
        return max(one.plan(self.global_batch_size).n_gpus for one in self.plans)

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

    def n_gpus(self) -> int:
        """Return the processes of the largest plan."""
        return self.n_processes

    def n_threads(self, all_cores: int) -> int:
        """Return four cores."""
        return 4

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return the losses of all runs, and their summary with the paper's curves."""
        plans = {one.name: one.plan(self.global_batch_size) for one in self.plans}
        job = TrainingJob(
            SmallModel(**self.model.model_dump()), next(iter(plans.values())), steps=self.steps,
            learning_rate=self.learning_rate, seed=self.seed, data_seed=self.data_seed,
        )  # fmt: skip
        switches = [(switch.step, switch.name) for switch in self.switches]
        launcher = local_launcher(self.device, self.n_processes)
        runs = train_compared(
            job, plans, switches, self.other_seed, (SWITCHING, OTHER_SEED), launcher=launcher
        )
        rows = losses_compared(
            {name: [loss for part in parts for loss in part.losses] for name, parts in runs.items()}
        )
        return {"fig9": rows, "fig9_summary": losses_summary(rows, cost_table(runs), given.cells["fig9"])}


def losses_compared(losses: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Compare the losses of runs, step by step, with those of the first one.

    Parameters
    ----------
    losses
        Losses of each run from the first step on, by the name of the run; the reference comes first.

    Raises
    ------
    TraceError
        The runs have different numbers of steps.
    """
    arrays = {name: np.asarray(values, dtype=float) for name, values in losses.items()}
    first, reference = next(iter(arrays.items()))
    records: list[pd.DataFrame] = []
    for name, values in arrays.items():
        if len(values) != len(reference):
            raise TraceError(
                f"fig9: run {name!r} has {len(values)} steps, run {first!r} has {len(reference)}"
            )
        distance = np.abs(values - reference)
        columns = {"run": name, "step": range(len(values)), "loss": values, "abs_difference": distance}
        records.append(pd.DataFrame(columns))
    return pd.concat(records, ignore_index=True)


def losses_summary(table: pd.DataFrame, costs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Sum up every run of `losses_compared`, with the paper's runs below.

    Costs have one row per run: ``run, restarts, restart_s, step_s``.
    """
    grouped = table.groupby("run", sort=False)["abs_difference"]
    own = grouped.agg(mean_abs_difference="mean", max_abs_difference="max").reset_index()
    own["kind"] = [_run_kind(name, number == 0) for number, name in enumerate(own["run"])]
    own = own.merge(costs, on="run", how="left", validate="one_to_one")
    paper = published.drop(columns="source", errors="ignore").assign(restarts=0)
    paper["kind"] = [f"published {_run_kind(name, False)}" for name in paper["run"]]
    paper["run"] = "Morphling " + paper["run"]
    return pd.concat([own, paper], ignore_index=True)


def _run_kind(run: str, is_reference: bool) -> str:
    if is_reference:
        return "reference"
    return run if run in (SWITCHING, OTHER_SEED) else "plan"
