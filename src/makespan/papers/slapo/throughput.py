"""Figs 7 to 9 from an oracle, their conclusions, and how these depend on the constants of the hardware model.

An oracle predicts throughput and memory of a run, see `makespan.papers.slapo.performance`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pandas as pd

from makespan.errors import FitError
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.slapo.performance import (
    IMPLEMENTATIONS,
    UNFITTED,
    Answer,
    Constants,
    Oracle,
    Run,
    constants,
    emulated,
    fit_grid,
    model_costs,
    modelled,
)
from makespan.slapo.tuning import Frontier, Point, Space, Status, tune
from makespan.tables import schemas_of
from makespan.training.zoo import FamilySpec, family_spec

_SCHEMAS = schemas_of("makespan.papers.slapo")

# ------------------------------------------------------------------------------------------------
# Figs 7 to 9 from an oracle: the printed settings, and those that the tuner chooses.

ORACLES: Mapping[str, str] = {"published": "model", "emulated": "emulator"}
"""Oracle of the tables of each source."""
_BATCH, _RATIO, _RATE = "global_batch_size", "ckpt_ratio", "throughput_samples_per_s"
_SHARES = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25, 0.0)
_MOST_SAMPLES = 64  # per device under ZeRO-3, and per eighth of a tensor group
_CLUSTER_MODELS = {"GPT-10B": ("gpt", "10b"), "LLaMA-7B": ("llama", "7b")}
_PASSES = 3  # cost of forward and backward pass, in forward passes
_STEPS = {
    "vanilla": ("eager", 1),
    "kernels": ("slapo-kernels", 1),
    "layers-tp": ("slapo-tp-layers", 8),
    "embedding-tp": ("slapo-tp", 8),
}


def run_of(implementation: str, n_gpus: int, batch: int, ratio: float) -> Run:
    """Return a run inside a node: its devices form one tensor group, or are replicas under ZeRO-3."""
    tp = 1 if IMPLEMENTATIONS[implementation].is_partitioned else n_gpus
    return Run(implementation, n_gpus, batch, ratio, tp=tp)


def _row(oracle: str, model: str, run: Run, answer: Answer) -> dict[str, Any]:
    largest = answer.largest_batch_size
    return {
        "oracle": oracle, "model": model, "implementation": run.implementation, "n_gpus": run.n_gpus,
        _BATCH: run.global_batch_size, _RATIO: run.ckpt_ratio, "is_feasible": answer.is_feasible,
        "gpu_memory_ratio": answer.memory_ratio,
        "largest_global_batch_size": float("nan") if largest is None else float(largest),
        _RATE: answer.throughput_samples_per_s,
    }  # fmt: skip


# --- Fig. 7 -----------------------------------------------------------------------------------------


def fig7_rows(
    cells: pd.DataFrame, source: str, ask: Oracle, search: Oracle | None = None
) -> list[dict[str, Any]]:
    """Predict the printed settings, and on the published source those with no and with all layers recomputed.

    If the oracle ``search`` is given, the tuner asks it for the best setting of each bar, which becomes a
    row too.
    """
    rows = []
    for cell in _records(cells):
        spec = family_spec(cell["family"], cell["size"])
        run = run_of(cell["implementation"], int(cell["n_gpus"]), int(cell[_BATCH]), float(cell[_RATIO]))
        runs = [("published", run)]
        if source == "published":
            runs += [
                (kind, replace(run, ckpt_ratio=ratio)) for kind, ratio in (("plain", 0.0), ("full", 1.0))
            ]
        if search is not None:
            settings = Settings(spec, run, search)
            result = tune(settings.declare, settings.look_up, Frontier(_BATCH, _RATIO))
            if result.best is not None:
                runs.append(("tuned", settings.at(result.best)))
        costs = model_costs(spec)
        for kind, each in runs:
            answer = ask(spec, each)
            if answer is not None:
                rate = answer.throughput_samples_per_s / each.n_gpus
                rows.append(
                    _row(ORACLES[source], spec.title, each, answer)
                    | {
                        "kind": kind,
                        "parameters_per_gpu": costs.parameters / each.n_gpus,
                        "flop_per_s": rate * _PASSES * costs.forward_flop,
                    }
                )
    return rows


def _records(cells: pd.DataFrame) -> Iterable[dict[str, Any]]:
    return cast(Iterable[dict[str, Any]], cells.to_dict("records"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Search space of one implementation, batch sizes and recomputed shares, with an oracle as objective."""

    spec: FamilySpec
    run: Run
    ask: Oracle

    def declare(self, space: Space) -> None:
        """Declare recomputed shares, and batch sizes up to one that no device can hold."""
        is_partitioned = IMPLEMENTATIONS[self.run.implementation].is_partitioned
        step = self.run.dp if is_partitioned else max(1, self.run.n_gpus // 2)
        space.create_symbol(_BATCH, range(step, _MOST_SAMPLES * step + 1, step))
        space.create_symbol(_RATIO, _SHARES)

    def at(self, point: Point) -> Run:
        """Return the run of a point."""
        return replace(self.run, global_batch_size=int(point[_BATCH]), ckpt_ratio=float(point[_RATIO]))

    def look_up(self, point: Point) -> tuple[Status, float | None, Mapping[str, Any]]:
        """Return the prediction of the oracle for a point."""
        answer = self.ask(self.spec, self.at(point))
        if answer is None or not answer.is_feasible:
            return "oom", None, {}
        return "ok", answer.throughput_samples_per_s, {}


# --- Fig. 8 -----------------------------------------------------------------------------------------


def fig8_rows(cells: pd.DataFrame, source: str, ask: Oracle) -> list[dict[str, Any]]:
    """Predict the runs of Fig. 8: each node is a tensor group, and there are two pipeline stages.

    Deviation: the batch on fewer GPUs than 64 is not published; it is four samples per GPU on any number.
    """
    rows = []
    for model, key in _CLUSTER_MODELS.items():
        spec = family_spec(*key)
        for n_gpus in sorted({int(number) for number in cells["n_gpus"]}):
            batch, dp = 4 * n_gpus, n_gpus // 16
            degrees_3d = {"tp": 8, "pp": 2, "n_microbatches": batch // (4 * dp)}
            runs = [
                Run("megatron", n_gpus, batch, 0.0, **degrees_3d),
                Run("deepspeed", n_gpus, batch, 1.0),
                Run("slapo-tp", n_gpus, batch, 0.0, **degrees_3d),
                Run("slapo-zero3", n_gpus, batch, 1.0),
            ]
            for run in runs:
                answer = ask(spec, run)
                if answer is not None:
                    degrees = {"tp": run.tp, "pp": run.pp}
                    rows.append(_row(ORACLES[source], model, run, answer) | degrees)
    return rows


# --- Fig. 9 -----------------------------------------------------------------------------------------


def fig9_rows(cells: pd.DataFrame, source: str, ask: Oracle) -> list[dict[str, Any]]:
    """Predict the steps of the ablation."""
    spec, rows = family_spec("bert", "1b"), list[dict[str, Any]]()
    shown = (*("oracle", "n_gpus", _BATCH, "gpu_memory_ratio", "largest_global_batch_size"), _RATE)
    for cell in _records(cells):
        implementation, tp = _STEPS[cell["step"]]
        run = Run(implementation, int(cell["n_gpus"]), int(cell[_BATCH]), 0.0, tp=tp)
        answer = ask(spec, run)
        if answer is not None:
            row = _row(ORACLES[source], spec.title, run, answer)
            rows.append({name: row[name] for name in shown} | {"step": cell["step"], "compiler": ""})
    return [row | {"speedup": row[_RATE] / rows[0][_RATE]} for row in rows]


class Modelled(Experiment):
    """Compute the bars of Figs 7 and 8 and the steps of Fig. 9.

    The oracle of the published source is the hardware model, that of the emulated source is the emulator,
    which has no convolutions. The published source also has the printed bars of Fig. 8.
    """

    name = "modelled"
    tables = {
        "fig7": "throughput inside one node by model, GPUs and implementation, by model and emulator",
        "fig8": "throughput on two to eight nodes, by model and emulator, with an earlier figure's values",
        "fig9": "throughput and largest batch as BERT is optimised step by step",
    }
    cells = ("fig7", "fig8", "fig9")
    figures = (
        Figure(
            "fig7",
            "Fig. 7",
            "Throughput of six models on 2, 4 and 8 V100 at the printed batch "
            "sizes and recomputed shares, source {source}, computed once. For "
            "published it comes from a small hardware model fitted to the printed "
            "grid of Fig. 10, for emulated from the emulator as it is, which "
            "knows no convolutions. A cross has no printed setting. Black dots "
            "are the best points of the tuner. The paper prints no values.",
            tables=("fig7",),
            draw="inside_a_node",
        ),
        Figure(
            "fig8",
            "Fig. 8",
            "Throughput on two to eight nodes, source {source}, computed once. "
            "For published it comes from a small hardware model fitted to the "
            "printed grid of Fig. 10, for emulated from the emulator as it is. "
            "Hollow diamonds are the bars of an earlier version of the figure; "
            "that of Slapo stands at both of its schedules, joined by a line.",
            tables=("fig8",),
            draw="on_clusters",
        ),
        Figure(
            "fig9",
            "Fig. 9",
            "Throughput of BERT-1B as it is optimised step by step, source "
            "{source}, computed once. For published it comes from a small "
            "hardware model fitted to the printed grid of Fig. 10, for emulated "
            "from the emulator as it is. The paper prints no values.",
            tables=("fig9",),
            draw="steps_of_an_ablation",
            sources=("emulated", "published"),
        ),
    )

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per setting, per bar and per step."""
        cells, source = given.cells, given.source
        ask = emulated() if source == "emulated" else modelled(constants())
        search = modelled(constants(), bounds=False) if source == "published" else None
        fig8 = fig8_rows(cells["fig8"], source, ask)
        if source == "published":
            fig8 += [
                {
                    "oracle": "published", "model": cell["model"], "implementation": cell["implementation"],
                    "n_gpus": cell["n_gpus"], _BATCH: 4 * cell["n_gpus"], _RATIO: float("nan"),
                    "is_feasible": True, _RATE: cell["published_samples_per_s"], "tp": 0, "pp": 0,
                }
                for cell in _records(cells["fig8"])
            ]  # fmt: skip
        steps = pd.DataFrame(fig9_rows(cells["fig9"], source, ask))
        return {
            "fig7": pd.DataFrame(fig7_rows(cells["fig7"], source, ask, search)),
            "fig8": pd.DataFrame(fig8),
            "fig9": steps.reindex(columns=_SCHEMAS["fig9"].names),
        }


# ------------------------------------------------------------------------------------------------
# Conclusions of Figs 7 to 9 as inequalities, and their dependence on constants of the hardware model.

Outcome = tuple[str, bool] | None
"""Text with the deciding numbers, and whether the conclusion holds; None if no row decides it."""
_LARGEST = "largest_global_batch_size"
_PAIRS = {"slapo-tp": "megatron", "slapo-zero3": "deepspeed"}
_FACTORS = (0.5, 2.0)


def _bars(fig7: pd.DataFrame, kind: str = "published", column: str = _RATE) -> pd.DataFrame:
    """Return a column by model and GPUs (rows) and implementation (columns)."""
    rows = fig7[fig7["kind"] == kind]
    return rows.pivot_table(column, ["model", "n_gpus"], "implementation", sort=False)


def _best_of(bars: pd.DataFrame) -> tuple["pd.Series[float]", "pd.Series[float]"]:
    return bars[["slapo-tp", "slapo-zero3"]].max(axis=1), bars[["megatron", "deepspeed"]].max(axis=1)


def _all(flags: "pd.Series[bool]", plural: str) -> Outcome:
    wrong = [" ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in flags.index[~flags]]
    listed = f", not {', '.join(wrong)}" if wrong else ""
    return f"{int(flags.sum())} of {len(flags)} {plural}{listed}", bool(flags.all())


def slapo_is_best(fig7: pd.DataFrame) -> Outcome:
    """Check that one of Slapo's bars is the highest."""
    ours, others = _best_of(_bars(fig7))
    return _all(ours >= others, "bars")


def zero_is_faster(fig7: pd.DataFrame) -> Outcome:
    """Check that Slapo under ZeRO-3 is at least as fast as DeepSpeed."""
    bars = _bars(fig7)
    return _all(bars["slapo-zero3"] >= bars["deepspeed"], "bars")


def tensor_is_faster(fig7: pd.DataFrame) -> Outcome:
    """Check that Slapo under tensor parallelism is as fast as Megatron-LM, within 5 % for GPT and T5."""
    bars = _bars(fig7).dropna()
    least = pd.Series([1.0 if "BERT" in str(key) else 0.95 for key in bars.index], bars.index)
    ratios = bars["slapo-tp"] / bars["megatron"]
    return _all(ratios >= least, "bars")


def largest_ratio(fig7: pd.DataFrame) -> Outcome:
    """Check that the largest speedup over a baseline is between 1.5 and 4."""
    bars = _bars(fig7)
    ours, _ = _best_of(bars)
    ratio = float(max((ours / bars[name]).max() for name in ("megatron", "deepspeed")))
    return f"{ratio:.2f}x", 1.5 <= ratio <= 4


def larger_batches(fig7: pd.DataFrame) -> Outcome:
    """Check that Slapo fits at least the batch of its baseline at the same recomputed share."""
    flags = []
    for kind in ("plain", "full"):
        bars = _bars(fig7, kind, _LARGEST)
        for ours, other in _PAIRS.items():
            if other not in bars:
                return None
            both = bars[[ours, other]].dropna()
            is_larger = both[ours] >= both[other]
            flags.append(is_larger.set_axis([f"{' '.join(map(str, key))} {kind}" for key in both.index]))
    return _all(pd.concat(flags), "settings")


def zero_scales(fig7: pd.DataFrame) -> Outcome:
    """Check that throughput under ZeRO-3 grows with the number of GPUs."""
    rows = fig7[(fig7["kind"] == "published") & fig7["implementation"].isin(["deepspeed", "slapo-zero3"])]
    lines = rows.sort_values("n_gpus").groupby(["model", "implementation"])[_RATE]
    steps = lines.diff().dropna().to_numpy(float)
    return f"{int((steps > 0).sum())} of {len(steps)} steps", bool((steps > 0).all())


def printed_settings_fit(fig7: pd.DataFrame) -> Outcome:
    """Check that at most 15 % of the printed settings exceed memory, and none by more than a quarter."""
    ratios = fig7.loc[fig7["kind"] == "published", "gpu_memory_ratio"]
    n_over = int((ratios > 1).sum())
    text = f"{n_over} of {len(ratios)} exceed it, the largest by {100 * (ratios.max() - 1):.0f} %"
    return text, bool(n_over <= 0.15 * len(ratios) and ratios.max() <= 1.25)


def printed_settings_are_tight(fig7: pd.DataFrame) -> Outcome:
    """Check that 1.6 times the batch exceeds memory for half of the settings that keep activations."""
    rows = fig7[(fig7["kind"] == "published") & (fig7["ckpt_ratio"] < 1)]
    if rows[_LARGEST].isna().all():
        return None
    is_full = 1.6 * rows[_BATCH] > rows[_LARGEST]
    return f"{int(is_full.sum())} of {len(rows)}", bool(is_full.mean() >= 0.5)


def slapo_is_best_on_clusters(bars: pd.DataFrame) -> Outcome:
    """Check that Slapo is the fastest on every number of GPUs, by at most 1.6 times."""
    ratios = bars["slapo"] / bars[["megatron", "deepspeed"]].max(axis=1)
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return text, bool(ratios.between(1.0, 1.6).all())


def zero_scales_worse(bars: pd.DataFrame) -> Outcome:
    """Check that DeepSpeed gains less than Megatron-LM from 32 to 64 GPUs."""
    gains = bars.loc[64] / bars.loc[32]
    text = f"{gains['deepspeed']:.2f}x and {gains['megatron']:.2f}x"
    return text, bool(gains["deepspeed"] < gains["megatron"])


def slapo_scales(bars: pd.DataFrame) -> Outcome:
    """Check that Slapo is more than twice as fast on 64 GPUs as on 16."""
    rates = bars["slapo"].to_dict()
    gain = float(rates[64] / rates[16])
    return f"{gain:.2f}x", gain > 2


def _steps(fig9: pd.DataFrame, column: str) -> list[float]:
    order = ["vanilla", "kernels", "layers-tp", "embedding-tp"]
    values: list[float] = fig9.set_index("step").loc[order, column].astype(float).tolist()
    return values


def steps_are_faster(fig9: pd.DataFrame) -> Outcome:
    """Check that every step is faster than the one before."""
    rates = _steps(fig9, _RATE)
    text = ", ".join(f"{rate:.1f}" for rate in rates) + " samples/s"
    return text, all(before < after for before, after in itertools.pairwise(rates))


def kernels_help(fig9: pd.DataFrame) -> Outcome:
    """Check that kernels alone are faster, by at most three times."""
    ratio = _steps(fig9, "speedup")[1]
    return f"{ratio:.2f}x", 1 < ratio <= 3


def steps_free_memory(fig9: pd.DataFrame) -> Outcome:
    """Check that every step fits a larger batch than the one before."""
    sizes = _steps(fig9, _LARGEST)
    if any(map(math.isnan, sizes)):
        return None
    text = ", ".join(f"{size:.0f}" for size in sizes)
    return text, all(before < after for before, after in itertools.pairwise(sizes))


def sharded_embedding_frees_memory(fig9: pd.DataFrame) -> Outcome:
    """Check that sharding the embedding fits a batch larger by a fifth or more."""
    *_, before, after = _steps(fig9, _LARGEST)
    if math.isnan(before):
        return None
    return f"{before:.0f} and {after:.0f}", after >= 1.2 * before


def all_steps_gain(fig9: pd.DataFrame) -> Outcome:
    """Check that all steps together, on eight times the GPUs, are 4 to 24 times as fast."""
    ratio = _steps(fig9, "speedup")[-1]
    return f"{ratio:.1f}x", 4 <= ratio <= 24


_OF_FIG7 = (
    *(slapo_is_best, zero_is_faster, tensor_is_faster, largest_ratio, larger_batches, zero_scales),
    *(printed_settings_fit, printed_settings_are_tight),
)
_OF_FIG8 = (slapo_is_best_on_clusters, zero_scales_worse, slapo_scales)
_OF_FIG9 = (steps_are_faster, kernels_help, steps_free_memory, sharded_embedding_frees_memory, all_steps_gain)


def _on_cluster(
    judge: Callable[[pd.DataFrame], Outcome], oracle: str, model: str
) -> Callable[[pd.DataFrame], Outcome]:
    """Apply a conclusion about clusters to the bars of one oracle and model.

    ``judge`` gets throughput by GPUs (rows) and system (columns), with Slapo's better schedule as ``slapo``.
    """

    def decide(fig8: pd.DataFrame) -> Outcome:
        rows = fig8[(fig8["oracle"] == oracle) & (fig8["model"] == model)]
        system = rows["implementation"].str.replace(r"slapo-.*", "slapo", regex=True)
        bars = rows.assign(system=system).pivot_table(_RATE, "n_gpus", "system", aggfunc="max")
        return None if bars.empty else judge(bars)

    return decide


CONCLUSIONS: Mapping[str, tuple[str, Callable[[pd.DataFrame], Outcome]]] = {
    **{judge.__name__: ("fig7", judge) for judge in _OF_FIG7},
    **{
        f"{judge.__name__} {oracle} {model}": ("fig8", _on_cluster(judge, oracle, model))
        for judge in _OF_FIG8
        for oracle, model in (
            *(("published", "GPT-10B"), ("model", "GPT-10B"), ("model", "LLaMA-7B")),
            *(("emulator", "GPT-10B"), ("emulator", "LLaMA-7B")),
        )
    },
    **{judge.__name__: ("fig9", judge) for judge in _OF_FIG9},
}
"""Every conclusion by name: the table that decides it, and the function that does."""


class Inequalities(Experiment):
    """Judge the conclusions with each unfitted constant halved and doubled, and the others fitted again."""

    name = "inequalities"
    tables = {
        "inequalities": "conclusions of Figs 7 to 9 with every constant of the model halved and doubled"
    }
    cells = ("fig7", "fig8", "fig9", "fig10")
    sources = ("published",)

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per conclusion, constant and factor; none holds if the model cannot be fitted."""
        frozen = constants()
        variations = [("", 1.0, frozen)] + [
            (name, factor, replace(frozen, **{name: factor * getattr(frozen, name)}))
            for name in UNFITTED
            for factor in _FACTORS
        ]
        rows = [
            {"inequality": conclusion, "constant": name, "factor": factor, "holds": holds, "found": text}
            for name, factor, varied in variations
            for conclusion, (text, holds) in _judged(given.cells, varied).items()
        ]
        return {"inequalities": pd.DataFrame(rows)}


def _judged(printed: Mapping[str, pd.DataFrame], varied: Constants) -> dict[str, tuple[str, bool]]:
    """Judge the conclusions about the hardware model with varied constants."""
    decided = {
        name: entry for name, entry in CONCLUSIONS.items() if not {"published", "emulator"} & {*name.split()}
    }
    try:
        ask = modelled(fit_grid(printed["fig10"], varied))
    except FitError as error:
        return {name: (str(error), False) for name in decided}
    tables = {
        "fig7": pd.DataFrame(fig7_rows(printed["fig7"], "published", ask)),
        "fig8": pd.DataFrame(fig8_rows(printed["fig8"], "published", ask)),
        "fig9": pd.DataFrame(fig9_rows(printed["fig9"], "published", ask)),
    }
    outcomes = {name: judge(tables[table]) for name, (table, judge) in decided.items()}
    return {name: outcome for name, outcome in outcomes.items() if outcome is not None}
