"""Profile the plans of one placement: results/measured/profile/<workload>/<job>.json."""

from pathlib import Path

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

with logged_to(snakemake.log[0]):
    params, part = snakemake.params, snakemake.output.part
    points = [ProfilePoint(plan, Placement.parse(text), threads) for plan, text, threads in params.points]
    procedure = dict(params.procedure)
    device, gres = procedure.pop("device"), snakemake.resources.get("gres")
    if gres is None:
        run_dir, launcher = None, on_this_machine(device, points[0].cpu_threads)
    else:
        run_dir = Path(part).with_suffix(".run")
        launcher = on_nodes(points[0], device, gres, run_dir)
    node = load_environment(params.environment).node
    key = snakemake.wildcards.workload
    measured = measure_points(workload(key), points, node, launcher, Procedure(**procedure), run_dir)
    write_json(measured, part, indent=1)
