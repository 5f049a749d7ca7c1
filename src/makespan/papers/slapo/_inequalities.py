"""Conclusions of Figs 7 to 9 as inequalities, and on which constant of the hardware model they depend."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.errors import FitError
from makespan.papers.slapo._hardware import UNFITTED, Constants, constants
from makespan.papers.slapo._hardware_fit import fit_grid
from makespan.papers.slapo._modelled import fig7_rows, fig8_rows, fig9_rows
from makespan.papers.slapo._oracles import modelled
from makespan.papers.slapo._tables_modelled import INEQUALITIES

__all__ = ["CONCLUSIONS", "Found", "inequalities_experiment"]

Found = tuple[str, bool] | None
"""The numbers that decide, and whether the conclusion holds; None where no row decides it."""

_RATE, _BATCH, _LARGEST = "throughput_samples_per_s", "global_batch_size", "largest_global_batch_size"
_PAIRS = {"slapo-tp": "megatron", "slapo-zero3": "deepspeed"}
_FACTORS = (0.5, 2.0)


def _bars(fig7: pd.DataFrame, kind: str = "published", column: str = _RATE) -> pd.DataFrame:
    """Return a column by model and GPUs (rows) and implementation (columns)."""
    rows = fig7[fig7["kind"] == kind]
    return rows.pivot_table(column, ["model", "n_gpus"], "implementation", sort=False)


def _best_of(bars: pd.DataFrame) -> tuple["pd.Series[float]", "pd.Series[float]"]:
    return bars[["slapo-tp", "slapo-zero3"]].max(axis=1), bars[["megatron", "deepspeed"]].max(axis=1)


def _all(flags: "pd.Series[bool]", what: str) -> Found:
    wrong = [" ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in flags.index[~flags]]
    listed = f", not {', '.join(wrong)}" if wrong else ""
    return f"{int(flags.sum())} of {len(flags)} {what}{listed}", bool(flags.all())


def slapo_is_best(fig7: pd.DataFrame) -> Found:
    """One of Slapo's bars is the highest."""
    ours, others = _best_of(_bars(fig7))
    return _all(ours >= others, "bars")


def zero_is_faster(fig7: pd.DataFrame) -> Found:
    """Slapo's ZeRO-3 is at least as fast as DeepSpeed."""
    bars = _bars(fig7)
    return _all(bars["slapo-zero3"] >= bars["deepspeed"], "bars")


def tensor_is_faster(fig7: pd.DataFrame) -> Found:
    """Slapo's tensor parallelism is as fast as Megatron-LM: for BERT, and within 5 % for GPT and T5."""
    bars = _bars(fig7).dropna()
    least = pd.Series([1.0 if "BERT" in str(key) else 0.95 for key in bars.index], bars.index)
    ratios = bars["slapo-tp"] / bars["megatron"]
    return _all(ratios >= least, "bars")


def largest_ratio(fig7: pd.DataFrame) -> Found:
    """Find the largest speedup over a baseline between 1.5 and 4."""
    bars = _bars(fig7)
    ours, _ = _best_of(bars)
    ratio = float(max((ours / bars[name]).max() for name in ("megatron", "deepspeed")))
    return f"{ratio:.2f}x", 1.5 <= ratio <= 4


def larger_batches(fig7: pd.DataFrame) -> Found:
    """Slapo fits at least the batch of its baseline with the same layers recomputed."""
    flags = []
    for kind in ("plain", "full"):
        bars = _bars(fig7, kind, _LARGEST)
        for ours, other in _PAIRS.items():
            if other not in bars:
                return None
            both = bars[[ours, other]].dropna()
            found = both[ours] >= both[other]
            flags.append(found.set_axis([f"{' '.join(map(str, key))} {kind}" for key in both.index]))
    return _all(pd.concat(flags), "settings")


def zero_scales(fig7: pd.DataFrame) -> Found:
    """Throughput under ZeRO-3 grows with the number of GPUs."""
    rows = fig7[(fig7["kind"] == "published") & fig7["implementation"].isin(["deepspeed", "slapo-zero3"])]
    lines = rows.sort_values("n_gpus").groupby(["model", "implementation"])[_RATE]
    steps = lines.diff().dropna().to_numpy(float)
    return f"{int((steps > 0).sum())} of {len(steps)} steps", bool((steps > 0).all())


def printed_settings_fit(fig7: pd.DataFrame) -> Found:
    """At most 15 % of the printed settings exceed memory, none by more than a quarter."""
    ratios = fig7.loc[fig7["kind"] == "published", "gpu_memory_ratio"]
    n_over = int((ratios > 1).sum())
    text = f"{n_over} of {len(ratios)} exceed it, the largest by {100 * (ratios.max() - 1):.0f} %"
    return text, bool(n_over <= 0.15 * len(ratios) and ratios.max() <= 1.25)


def printed_settings_are_tight(fig7: pd.DataFrame) -> Found:
    """Of the printed settings that keep activations, 1.6 times the batch does not fit half of the time."""
    rows = fig7[(fig7["kind"] == "published") & (fig7["ckpt_ratio"] < 1)]
    if rows[_LARGEST].isna().all():
        return None
    is_full = 1.6 * rows[_BATCH] > rows[_LARGEST]
    return f"{int(is_full.sum())} of {len(rows)}", bool(is_full.mean() >= 0.5)


def _clusters(fig8: pd.DataFrame, oracle: str, model: str) -> pd.DataFrame:
    """Return throughput by GPUs (rows) and system (columns), Slapo's better schedule as ``slapo``."""
    rows = fig8[(fig8["oracle"] == oracle) & (fig8["model"] == model)]
    system = rows["implementation"].str.replace(r"slapo-.*", "slapo", regex=True)
    return rows.assign(system=system).pivot_table(_RATE, "n_gpus", "system", aggfunc="max")


def slapo_is_best_on_clusters(bars: pd.DataFrame) -> Found:
    """Slapo is the fastest on every number of GPUs, by at most 1.6 times."""
    ratios = bars["slapo"] / bars[["megatron", "deepspeed"]].max(axis=1)
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return text, bool(ratios.between(1.0, 1.6).all())


def zero_scales_worse(bars: pd.DataFrame) -> Found:
    """From 32 to 64 GPUs DeepSpeed gains less than Megatron-LM."""
    gains = bars.loc[64] / bars.loc[32]
    text = f"{gains['deepspeed']:.2f}x and {gains['megatron']:.2f}x"
    return text, bool(gains["deepspeed"] < gains["megatron"])


def slapo_scales(bars: pd.DataFrame) -> Found:
    """From 16 to 64 GPUs Slapo is more than twice as fast."""
    rates = bars["slapo"].to_dict()
    gain = float(rates[64] / rates[16])
    return f"{gain:.2f}x", gain > 2


def _steps(fig9: pd.DataFrame, column: str) -> list[float]:
    order = ["vanilla", "kernels", "layers-tp", "embedding-tp"]
    found: list[float] = fig9.set_index("step").loc[order, column].astype(float).tolist()
    return found


def steps_are_faster(fig9: pd.DataFrame) -> Found:
    """Every step is faster than the one before."""
    rates = _steps(fig9, _RATE)
    text = ", ".join(f"{rate:.1f}" for rate in rates) + " samples/s"
    return text, all(one < other for one, other in itertools.pairwise(rates))


def kernels_help(fig9: pd.DataFrame) -> Found:
    """Kernels alone gain something, and at most three times."""
    ratio = _steps(fig9, "speedup")[1]
    return f"{ratio:.2f}x", 1 < ratio <= 3


def steps_free_memory(fig9: pd.DataFrame) -> Found:
    """Every step fits a larger batch than the one before."""
    sizes = _steps(fig9, _LARGEST)
    if any(map(math.isnan, sizes)):
        return None
    text = ", ".join(f"{size:.0f}" for size in sizes)
    return text, all(one < other for one, other in itertools.pairwise(sizes))


def sharded_embedding_frees_memory(fig9: pd.DataFrame) -> Found:
    """Fit a batch that is larger by a fifth or more where the embedding is sharded."""
    *_, before, after = _steps(fig9, _LARGEST)
    if math.isnan(before):
        return None
    return f"{before:.0f} and {after:.0f}", after >= 1.2 * before


def all_steps_gain(fig9: pd.DataFrame) -> Found:
    """All steps together gain between 4 and 24 times, of eight times as many GPUs."""
    ratio = _steps(fig9, "speedup")[-1]
    return f"{ratio:.1f}x", 4 <= ratio <= 24


_OF_FIG7 = (
    *(slapo_is_best, zero_is_faster, tensor_is_faster, largest_ratio, larger_batches, zero_scales),
    *(printed_settings_fit, printed_settings_are_tight),
)
_OF_FIG8 = (slapo_is_best_on_clusters, zero_scales_worse, slapo_scales)
_OF_FIG9 = (steps_are_faster, kernels_help, steps_free_memory, sharded_embedding_frees_memory, all_steps_gain)


def _on_cluster(judge: Callable[[pd.DataFrame], Found], oracle: str, model: str) -> Callable[..., Found]:
    def on(fig8: pd.DataFrame) -> Found:
        bars = _clusters(fig8, oracle, model)
        return None if bars.empty else judge(bars)

    return on


CONCLUSIONS: Mapping[str, tuple[str, Callable[[pd.DataFrame], Found]]] = {
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
"""Every conclusion by name: the table that decides it, and how."""


def _variations() -> Iterable[tuple[str, float, Constants]]:
    own = constants()
    yield "", 1.0, own
    for name in UNFITTED:
        for factor in _FACTORS:
            yield name, factor, replace(own, **{name: factor * getattr(own, name)})


def inequalities_experiment(printed: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Judge the conclusions with every unfitted constant halved and doubled, and the rest fitted again.

    Parameters
    ----------
    printed
        The printed cells ``fig7`` to ``fig10``.

    Returns
    -------
    dict of pandas.DataFrame
        ``inequalities``, a row a conclusion, constant and factor; nothing holds where there is no fit.
    """
    rows: list[dict[str, Any]] = []
    for name, factor, varied in _variations():
        for conclusion, found in _judged(printed, varied).items():
            text, holds = found
            rows.append(
                {
                    "inequality": conclusion,
                    "constant": name,
                    "factor": factor,
                    "holds": holds,
                    "found": text,
                }
            )
    return {"inequalities": INEQUALITIES.validate(pd.DataFrame(rows), where="inequalities")}


def _judged(printed: Mapping[str, pd.DataFrame], varied: Constants) -> dict[str, tuple[str, bool]]:
    names = {
        name: one for name, one in CONCLUSIONS.items() if not {"published", "emulator"} & {*name.split()}
    }
    try:
        ask = modelled(fit_grid(printed["fig10"], varied))
    except FitError as error:
        return {name: (str(error), False) for name in names}
    tables = {
        "fig7": pd.DataFrame(fig7_rows(printed["fig7"], "published", ask)),
        "fig8": pd.DataFrame(fig8_rows(printed["fig8"], "published", ask)),
        "fig9": pd.DataFrame(fig9_rows(printed["fig9"], "published", ask)),
    }
    found = {name: judge(tables[table]) for name, (table, judge) in names.items()}
    return {name: one for name, one in found.items() if one is not None}
