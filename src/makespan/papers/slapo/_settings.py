"""Block ``slapo``: options of the paper, checked when a configuration is read."""

from typing import Any

from makespan.papers.slapo._settings_measured import Fig9Steps, Tuner
from makespan.papers.slapo._settings_tuning import Fig10, SyntheticGrids
from makespan.papers.slapo._settings_verification import Verification
from makespan.settings import PaperSettings, option

__all__ = ["Slapo"]

_TUNED = ("fig10", "fig10_searches", "fig10_fit")
_MODELLED = ("fig7", "fig8", "fig9")
_MEASURED = ("verify", "table4", "fig9", "tuner")
_BUILT = {
    "emulated": (*_MODELLED, *_TUNED),
    "published": (*_MODELLED, *_TUNED, "fig10_grids", "inequalities"),
    "measured": _MEASURED,
}


class Slapo(PaperSettings):
    """Experiments of the Slapo paper."""

    untimed = frozenset(table for tables in _BUILT.values() for table in tables)
    judged_on_profile = frozenset(_MEASURED)
    self_contained = frozenset({"published"})
    judged_cells = ("limits",)
    contents = {
        "fig7": "throughput inside one node by model, GPUs and implementation, by model and emulator",
        "fig8": "throughput on two to eight nodes, by model and emulator, with an earlier figure's values",
        "fig9": "throughput and largest batch as BERT is optimised step by step",
        "fig10": "points of the tuning grid in the order in which each search tries them",
        "fig10_searches": "what each search finds of that grid, with how many evaluations",
        "fig10_fit": "predictions of that grid, fitted, with a batch size left out, and untuned",
        "fig10_grids": "searches of grids with random constants and noise",
        "inequalities": "conclusions of Figs 7 to 9 with every constant of the model halved and doubled",
        "verify": "every schedule of the library beside its model as it is, outputs and gradients",
        "table4": "lines of the schedules, counted in their source, beside the paper's",
        "tuner": "points in the order in which searches try them whose objective is a run",
        "claims": "the statements of the paper, judged by this source alone",
    }

    fig10: Fig10 = option("searches of the tuning grid")
    fig9_steps: Fig9Steps = option("steps of a schedule of a small BERT")
    fig10_grids: SyntheticGrids = option("searches of synthetic grids")
    tuner: Tuner = option("search whose objective is a run of a small OPT")
    verify: Verification = option("verification of all schedules")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built; none rests on iteration times of a source."""
        return list(_BUILT.get(source, ()))

    def options_of(self, experiment: str, source: str) -> dict[str, Any]:
        """Return the options of an experiment, by the name of its function without ``_experiment``."""
        if source == "measured":
            block = getattr(self, experiment, None)
            return {} if block is None else block.model_dump(mode="json")
        if experiment == "inequalities":
            return {}
        if experiment == "tuning":
            own = {"searches": self.fig10.model_dump(), "grids": self.fig10_grids.model_dump()}
            return {"source": source, **own}
        return {"source": source}
