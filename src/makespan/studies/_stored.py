"""Scenarios from the tables that earlier stages wrote, and with other knowledge."""

from collections.abc import Mapping
from dataclasses import replace

from makespan.hardware import cluster
from makespan.studies._predictions import PredictionMode, exactly, predicted_catalogue
from makespan.studies._runs import Scenario
from makespan.tables import PREDICTIONS, THROUGHPUT, read_csv
from makespan.throughput import ReferenceTimes
from makespan.traces import read_jobs

__all__ = ["knowing", "read_scenarios", "read_times"]


def read_scenarios(
    tables: Mapping[str, str], predictions: str, lists: Mapping[str, str], cluster_name: str
) -> dict[str, Scenario]:
    """Read a scenario for each job list from paths by name, without restart delay and rounds.

    Policies know the sampled rows; `knowing` tells them more.
    """
    frames = {key: read_csv(path, THROUGHPUT) for key, path in tables.items()}
    hardware = cluster(cluster_name)
    catalogue = predicted_catalogue(frames, read_csv(predictions, PREDICTIONS), hardware.nodes[0])
    jobs = {name: read_jobs(path).jobs for name, path in lists.items()}
    return {
        name: Scenario(name, own, hardware, catalogue, predictions="sampled", made_for=hardware)
        for name, own in jobs.items()
    }


def knowing(scenario: Scenario, mode: PredictionMode) -> Scenario:
    """Return a scenario whose policies know sampled rows, with what they know in another mode instead."""
    if mode != "exact":
        return replace(scenario, predictions=mode)
    return replace(scenario, catalogue=exactly(scenario.catalogue), predictions=mode)


def read_times(tables: Mapping[str, str]) -> ReferenceTimes:
    """Read the iteration times of requests from throughput tables by workload."""
    return ReferenceTimes({key: read_csv(path, THROUGHPUT) for key, path in tables.items()})
