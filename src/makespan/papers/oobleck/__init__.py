"""Experiments of Oobleck (SOSP 2023): pipelines from templates that go on training when nodes are lost.

Below ``results/<source>/oobleck/`` a run writes

- of `template_experiment` and `instantiation_experiment`: ``templates.csv``, ``instantiation.csv``
- of `layer_throughput_experiment` and `studies_experiment`: ``layer_throughput.csv``, ``studies.csv``
- of `reconfiguration_experiment`: ``reconfiguration.csv``
- of `predictions_experiment`, which trains: ``predictions.csv``
- of `hybrid_experiment`, which trains: ``hybrid.csv``, ``hybrid_kills.csv`` and ``hybrid_summary.csv``
- of `failure_experiments`, on traces of `generated_traces` or `published_traces`: ``fig1.csv``, ``fig9.csv``,
  ``fig12.csv`` and ``fig13.csv``
- of `spot_experiments`, on the same: ``fig10.csv``, ``fig14.csv``, ``fig15.csv`` and ``ablation.csv``
- of `LEDGER`, by `makespan.claims.judge`: ``claims.csv``

`read_published` reads the paper's cells, ``config/published/oobleck_<artifact>.csv``. The system itself,
planner, runtime and simulators, is `makespan.oobleck`.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.oobleck._checks import LEDGER
    from makespan.papers.oobleck._failures import failure_experiments
    from makespan.papers.oobleck._hybrid import hybrid_experiment
    from makespan.papers.oobleck._instantiation import instantiation_experiment
    from makespan.papers.oobleck._layer_throughput import layer_throughput_experiment
    from makespan.papers.oobleck._losses import reconfiguration_experiment
    from makespan.papers.oobleck._predictions import predictions_experiment
    from makespan.papers.oobleck._runs import generated_traces, published_traces
    from makespan.papers.oobleck._settings import Oobleck as SETTINGS
    from makespan.papers.oobleck._spot import spot_experiments
    from makespan.papers.oobleck._studies import studies_experiment
    from makespan.papers.oobleck._tables import SCHEMAS, read_published
    from makespan.papers.oobleck._templates import template_experiment

__all__ = [
    "LEDGER",
    "SCHEMAS",
    "SETTINGS",
    "hybrid_experiment",
    "failure_experiments",
    "generated_traces",
    "instantiation_experiment",
    "layer_throughput_experiment",
    "predictions_experiment",
    "published_traces",
    "read_published",
    "reconfiguration_experiment",
    "spot_experiments",
    "studies_experiment",
    "template_experiment",
]

__getattr__ = shown_lazily(__name__, __file__)
