"""Block ``slapo``: options of the paper, checked when a configuration is read."""

from typing import Any

from makespan.papers.slapo._settings_measured import Fig9Steps, Tuner
from makespan.papers.slapo._settings_tuning import Fig10
from makespan.papers.slapo._settings_verification import Verification
from makespan.settings import PaperSettings, option

__all__ = ["Slapo"]

_TUNED = ("fig10", "fig10_searches")
_MEASURED = ("verify", "table4", "fig9", "tuner")


class Slapo(PaperSettings):
    """Experiments of the Slapo paper."""

    untimed = frozenset({*_TUNED, *_MEASURED})
    judged_on_profile = frozenset(_MEASURED)
    self_contained = frozenset({"published", "measured"})
    contents = {
        "fig10": "points of the tuning grid in the order in which each search tries them",
        "fig10_searches": "what each search finds of that grid, with how many evaluations",
        "verify": "every schedule of the library beside its model as it is, outputs and gradients",
        "table4": "lines of the schedules, counted in their source, beside the paper's",
        "fig9": "memory, errors and throughput after each step of a schedule of BERT",
        "tuner": "points in the order in which searches try them whose objective is a run",
        "claims": "the statements of the paper, judged by this source alone",
    }

    fig10: Fig10 = option("searches of the tuning grid")
    fig9_steps: Fig9Steps = option("steps of a schedule of a small BERT")
    tuner: Tuner = option("search whose objective is a run of a small OPT")
    verify: Verification = option("verification of all schedules")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built; none rests on iteration times of a source."""
        return {"published": list(_TUNED), "measured": list(_MEASURED)}.get(source, [])

    def options_of(self, experiment: str) -> dict[str, Any]:
        """Return the options of an experiment, by the name of its function without ``_experiment``."""
        if experiment == "table4":
            return {}
        own: dict[str, Any] = getattr(self, experiment).model_dump(mode="json")
        return own
