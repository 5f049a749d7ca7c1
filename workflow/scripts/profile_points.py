"""Profile the plans of one placement on this machine: results/measured/profile/<workload>/<job>.json."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from makespan.logs import logged_to
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.profiling import Procedure, ProfilePoint, measure_points, profiling_launcher
from makespan.tables import write_text
from makespan.workloads import workload


def main(
    part: str,
    key: str,
    points: Sequence[tuple[str, str, int]],
    environment: str,
    procedure: Mapping[str, Any],
) -> None:
    """Train every point for a few steps and write the times."""
    wanted = [ProfilePoint(plan, Placement.parse(place), threads) for plan, place, threads in points]
    steps = {name: value for name, value in procedure.items() if name != "device"}
    launcher = profiling_launcher(procedure["device"], wanted[0].cpu_threads)
    node = load_environment(environment).node
    measured = measure_points(workload(key), wanted, node, launcher, Procedure(**steps))
    write_text(json.dumps(measured, indent=1) + "\n", part)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, key = snakemake.params, snakemake.wildcards.workload
        main(snakemake.output.part, key, given.points, given.environment, given.procedure)
