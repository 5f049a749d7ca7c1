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

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.papers.oobleck.checks import LEDGER as LEDGER
    from makespan.papers.oobleck.planning import (
        instantiation_experiment as instantiation_experiment,
        layer_throughput_experiment as layer_throughput_experiment,
        template_experiment as template_experiment,
    )
    from makespan.papers.oobleck.reconfiguration import (
        reconfiguration_experiment as reconfiguration_experiment,
    )
    from makespan.papers.oobleck.settings import Oobleck as SETTINGS
    from makespan.papers.oobleck.simulation import (
        failure_experiments as failure_experiments,
        generated_traces as generated_traces,
        published_traces as published_traces,
        spot_experiments as spot_experiments,
    )
    from makespan.papers.oobleck.studies import studies_experiment as studies_experiment
    from makespan.papers.oobleck.tables import (
        SCHEMAS as SCHEMAS,
        read_published as read_published,
    )
    from makespan.papers.oobleck.training import (
        hybrid_experiment as hybrid_experiment,
        predictions_experiment as predictions_experiment,
    )


__getattr__ = lazy_exports(__name__, __file__)
