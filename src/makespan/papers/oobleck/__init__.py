"""Oobleck (SOSP 2023): pipelines from templates that go on training when nodes are lost.

Below ``results/<source>/oobleck/`` a run writes

- of `template_experiment` and `instantiation_experiment`: ``templates.csv``, ``instantiation.csv``
- of `layer_throughput_experiment` and `studies_experiment`: ``layer_throughput.csv``, ``studies.csv``
- of `reconfiguration_experiment`: ``reconfiguration.csv``
- of `predictions_experiment`, which trains: ``predictions.csv``
- of `fig9_experiment`: ``fig9.csv``, on traces of `generated_failures` or `published_traces`
- of `LEDGER`, by `makespan.claims.judge`: ``claims.csv``

`read_published` reads the paper's cells, ``config/published/oobleck_<artifact>.csv``. The simulators of
Oobleck, Varuna and Bamboo are in `makespan.papers.oobleck.simulators`, templates and plans in
`makespan.papers.oobleck.planning`, what becomes of them when nodes come and go in
`makespan.papers.oobleck.reconfiguration`, what a process of a training run does in
`makespan.papers.oobleck.runtime`.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.oobleck._averages import fig9_experiment, generated_failures, published_traces
    from makespan.papers.oobleck._checks import LEDGER
    from makespan.papers.oobleck._commands import COMMANDS
    from makespan.papers.oobleck._instantiation import instantiation_experiment
    from makespan.papers.oobleck._layer_throughput import layer_throughput_experiment
    from makespan.papers.oobleck._losses import reconfiguration_experiment
    from makespan.papers.oobleck._predictions import predictions_experiment
    from makespan.papers.oobleck._settings import Oobleck as SETTINGS
    from makespan.papers.oobleck._studies import studies_experiment
    from makespan.papers.oobleck._tables import SCHEMAS, read_published
    from makespan.papers.oobleck._templates import template_experiment

__all__ = [
    "COMMANDS",
    "LEDGER",
    "SCHEMAS",
    "SETTINGS",
    "fig9_experiment",
    "generated_failures",
    "instantiation_experiment",
    "layer_throughput_experiment",
    "predictions_experiment",
    "published_traces",
    "read_published",
    "reconfiguration_experiment",
    "studies_experiment",
    "template_experiment",
]

__getattr__ = shown_lazily(__name__, __file__)
