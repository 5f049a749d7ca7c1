"""Profile the plans of a placement on several nodes: results/measured/profile/<workload>/<job>.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from makespan.logs import logged_to
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.profiling import Procedure, ProfilePoint, allocation_launcher, measure_points
from makespan.tables import write_text
from makespan.workloads import workload


def main(
    part: str,
    key: str,
    points: Sequence[tuple[str, str, int]],
    environment: str,
    procedure: Mapping[str, Any],
    gres: str,
) -> None:
    """Train every point for a few steps on the nodes of this job and write the times."""
    wanted = [ProfilePoint(plan, Placement.parse(place), threads) for plan, place, threads in points]
    steps = {name: value for name, value in procedure.items() if name != "device"}
    launcher = allocation_launcher(wanted[0], procedure["device"], gres)
    node, run_dir = load_environment(environment).node, Path(part).with_suffix(".run")
    measured = measure_points(workload(key), wanted, node, launcher, Procedure(**steps), run_dir)
    write_text(json.dumps(measured, indent=1) + "\n", part)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, key = snakemake.params, snakemake.wildcards.workload
        gres = snakemake.resources.gres
        main(snakemake.output.part, key, given.points, given.environment, given.procedure, gres)
