"""Figs 7 to 9 from an oracle: the printed settings, and what the tuner would have chosen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pandas as pd

from makespan.papers.slapo._costs import model_costs
from makespan.papers.slapo._hardware import IMPLEMENTATIONS, Run, constants
from makespan.papers.slapo._oracles import Answer, Oracle, emulated, modelled
from makespan.papers.slapo._tables_modelled import FIG7, FIG8, FIG9
from makespan.slapo.tuning import Frontier, Point, Space, Status, tune
from makespan.training.zoo import FamilySpec, family_spec

__all__ = ["ORACLES", "Settings", "fig7_rows", "fig8_rows", "fig9_rows", "modelled_experiment", "run_of"]

ORACLES: Mapping[str, str] = {"published": "model", "emulated": "emulator"}
"""Whose answers stand in the tables of a source."""
_BATCH, _RATIO, _RATE = "global_batch_size", "ckpt_ratio", "throughput_samples_per_s"
_SHARES = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25, 0.0)
_MOST_SAMPLES = 64  # of a device under ZeRO-3, and of an eighth of a tensor group
_FAMILY_RUNS = {"GPT-10B": ("gpt", "10b"), "LLaMA-7B": ("llama", "7b")}
_TRAINING = 3  # forward passes that a step costs
_STEPS = {
    "vanilla": ("eager", 1),
    "kernels": ("slapo-kernels", 1),
    "layers-tp": ("slapo-tp-layers", 8),
    "embedding-tp": ("slapo-tp", 8),
}


def run_of(implementation: str, n_gpus: int, batch: int, ratio: float) -> Run:
    """Return a run inside a node: all devices are one tensor group, or replicas under ZeRO-3."""
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


def _fig7_row(oracle: str, spec: FamilySpec, run: Run, answer: Answer, kind: str) -> dict[str, Any]:
    rate = answer.throughput_samples_per_s / run.n_gpus
    return _row(oracle, spec.title, run, answer) | {
        "kind": kind,
        "parameters_per_gpu": model_costs(spec).parameters / run.n_gpus,
        "flop_per_s": rate * _TRAINING * model_costs(spec).forward_flop,
    }


def fig7_rows(
    cells: pd.DataFrame, source: str, ask: Oracle, search: Oracle | None = None
) -> list[dict[str, Any]]:
    """Return the printed settings as an oracle sees them, and with none and all layers recomputed.

    ``search``: what the tuner asks for the best setting of each bar, if it looks for one.
    """
    rows, oracle = [], ORACLES[source]
    for cell in _records(cells):
        spec = family_spec(cell["family"], cell["size"])
        run = run_of(cell["implementation"], int(cell["n_gpus"]), int(cell[_BATCH]), float(cell[_RATIO]))
        runs = [("published", run)]
        if source == "published":
            runs += [
                (kind, replace(run, ckpt_ratio=ratio)) for kind, ratio in (("plain", 0.0), ("full", 1.0))
            ]
        if search is not None and (best := _tuned(spec, run, search)) is not None:
            runs.append(("tuned", best))
        for kind, one in runs:
            answer = ask(spec, one)
            if answer is not None:
                rows.append(_fig7_row(oracle, spec, one, answer, kind))
    return rows


def _records(cells: pd.DataFrame) -> Iterable[dict[str, Any]]:
    return cast(Iterable[dict[str, Any]], cells.to_dict("records"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Batch sizes and shares of recomputed layers of one implementation, and what an oracle says of them."""

    spec: FamilySpec
    run: Run
    ask: Oracle

    def declare(self, space: Space) -> None:
        """Declare batches up to a bound that no device holds, and shares."""
        is_partitioned = IMPLEMENTATIONS[self.run.implementation].is_partitioned
        step = self.run.dp if is_partitioned else max(1, self.run.n_gpus // 2)
        space.create_symbol(_BATCH, range(step, _MOST_SAMPLES * step + 1, step))
        space.create_symbol(_RATIO, _SHARES)

    def at(self, point: Point) -> Run:
        """Return the run of a point."""
        return replace(self.run, global_batch_size=int(point[_BATCH]), ckpt_ratio=float(point[_RATIO]))

    def look_up(self, point: Point) -> tuple[Status, float | None, Mapping[str, Any]]:
        """Return what the oracle says of a point."""
        answer = self.ask(self.spec, self.at(point))
        if answer is None or not answer.is_feasible:
            return "oom", None, {}
        return "ok", answer.throughput_samples_per_s, {}


def _tuned(spec: FamilySpec, run: Run, ask: Oracle) -> Run | None:
    """Return the best run of an implementation, found along the border of memory."""
    settings = Settings(spec, run, ask)
    found = tune(settings.declare, settings.look_up, Frontier(_BATCH, _RATIO))
    return None if found.best is None else settings.at(found.best)


# --- Fig. 8 -----------------------------------------------------------------------------------------


def _fig8_runs(n_gpus: int) -> list[Run]:
    """Return the runs of a cluster: tensor groups are nodes, there are two pipeline stages.

    Deviation: the batch on fewer GPUs than 64 is not published; it is four samples a GPU on any number.
    """
    batch, dp = 4 * n_gpus, n_gpus // 16
    three = {"tp": 8, "pp": 2, "n_microbatches": batch // (4 * dp)}
    return [
        Run("megatron", n_gpus, batch, 0.0, **three),
        Run("deepspeed", n_gpus, batch, 1.0),
        Run("slapo-tp", n_gpus, batch, 0.0, **three),
        Run("slapo-zero3", n_gpus, batch, 1.0),
    ]


def fig8_rows(cells: pd.DataFrame, source: str, ask: Oracle) -> list[dict[str, Any]]:
    """Return the runs of Fig. 8 as an oracle sees them."""
    rows = []
    for model, key in _FAMILY_RUNS.items():
        spec = family_spec(*key)
        for n_gpus in sorted(set(cells["n_gpus"])):
            for run in _fig8_runs(int(n_gpus)):
                answer = ask(spec, run)
                if answer is not None:
                    degrees = {"tp": run.tp, "pp": run.pp}
                    rows.append(_row(ORACLES[source], model, run, answer) | degrees)
    return rows


def _printed_bars(cells: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            "oracle": "published", "model": cell["model"], "implementation": cell["implementation"],
            "n_gpus": cell["n_gpus"], _BATCH: 4 * cell["n_gpus"], _RATIO: float("nan"), "is_feasible": True,
            _RATE: cell["published_samples_per_s"], "tp": 0, "pp": 0,
        }
        for cell in _records(cells)
    ]  # fmt: skip


# --- Fig. 9 -----------------------------------------------------------------------------------------


def fig9_rows(cells: pd.DataFrame, source: str, ask: Oracle) -> list[dict[str, Any]]:
    """Return the steps of the ablation as an oracle sees them."""
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


def modelled_experiment(printed: Mapping[str, pd.DataFrame], source: str) -> dict[str, pd.DataFrame]:
    """Compute the bars of Figs 7 and 8 and the steps of Fig. 9, beside printed bars.

    Parameters
    ----------
    printed
        The printed cells ``fig7`` (settings of all bars), ``fig8`` (bars of an earlier version of the figure)
        and ``fig9`` (GPUs and batch of each step).
    source
        ``published``: the hardware model, with printed bars; ``emulated``: the emulator, which knows no
        convolutions.

    Returns
    -------
    dict of pandas.DataFrame
        ``fig7``, a row a setting, ``fig8``, a row a bar, and ``fig9``, a row a step.
    """
    ask = emulated() if source == "emulated" else modelled(constants())
    search = modelled(constants(), bounds=False) if source == "published" else None
    fig8 = fig8_rows(printed["fig8"], source, ask)
    if source == "published":
        fig8 += _printed_bars(printed["fig8"])
    nine = pd.DataFrame(fig9_rows(printed["fig9"], source, ask)).reindex(columns=FIG9.names)
    return {
        "fig7": FIG7.validate(pd.DataFrame(fig7_rows(printed["fig7"], source, ask, search)), where="fig7"),
        "fig8": FIG8.validate(pd.DataFrame(fig8), where="fig8"),
        "fig9": FIG9.validate(nine, where="fig9"),
    }
