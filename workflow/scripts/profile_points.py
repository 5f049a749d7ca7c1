"""Profile the plans of one placement: results/measured/profile/<workload>/<job>.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from makespan.files import write_json
from makespan.logs import logged_to
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.profiling import (
    Procedure,
    ProfilePoint,
    allocation_launcher as on_nodes,
    measure_points,
    profiling_launcher as on_this_machine,
)
from makespan.workloads import workload


def main(
    part: str, key: str, points: Sequence[Any], machine: str, procedure: Mapping[str, Any], gres: str | None
) -> None:
    """Train every point for a few steps, on the nodes of an allocation if it asks for any, and write."""
    wanted = [ProfilePoint(plan, Placement.parse(place), threads) for plan, place, threads in points]
    steps = {name: value for name, value in procedure.items() if name != "device"}
    node, device = load_environment(machine).node, procedure["device"]
    run_dir = None if gres is None else Path(part).with_suffix(".run")
    if run_dir is None:
        launcher = on_this_machine(device, wanted[0].cpu_threads)
    else:
        launcher = on_nodes(wanted[0], device, gres, run_dir)
    measured = measure_points(workload(key), wanted, node, launcher, Procedure(**steps), run_dir)
    write_json(measured, part, indent=1)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, gres = snakemake.params, snakemake.resources.get("gres")
        key, part = snakemake.wildcards.workload, snakemake.output.part
        main(part, key, given.points, given.environment, given.procedure, gres)
