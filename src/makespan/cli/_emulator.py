"""The verbs ``emulate`` and ``explain``."""

from pathlib import Path

import click

from makespan.cli._names import WORKLOAD_NAMES
from makespan.cli._numbers import CPU_THREADS, SEED, real
from makespan.cli._options import calibration_option, check_target, cluster_option, shown_option
from makespan.cli._output import form_options, say, say_rows
from makespan.emulator import (
    EMULATED_NOTE,
    LEGACY_UNITS,
    MAX_NOISE,
    Explanation,
    Point,
    emulate,
    exact_pipeline,
    explain,
    load_calibration,
    read_point,
    trace_points,
    write_trace,
)
from makespan.errors import InputError
from makespan.hardware import ClusterSpec, cluster
from makespan.plans import DEFAULT_CPU_THREADS, Placement, write_exec_plan
from makespan.tables import THROUGHPUT, write_csv
from makespan.units import format_bytes, format_seconds
from makespan.workloads import Workload, workload, workload_keys

__all__ = ["emulate_command", "explain_command"]

_ALL = "all"


@click.command("emulate")
@cluster_option
@calibration_option
@shown_option(
    "--workload",
    "names",
    multiple=True,
    default=(_ALL,),
    metavar="NAME",
    shell_complete=WORKLOAD_NAMES,
    help="Workload of the zoo; may be repeated.",
)
@shown_option("--plans", default=_ALL, help="Plans in trace notation, joined by commas.")
@shown_option("--placements", default=_ALL, help="Placements, joined by commas.")
@click.option("--cpu-threads", type=CPU_THREADS, help="CPU threads a GPU of plans given by name.")
@shown_option("--seed", default=0, type=SEED, help="Seed of the noise.")
@shown_option(
    "--noise",
    default=0.0,
    type=real(MAX_NOISE, "equal points then differ by a factor of 2.7"),
    help="Scale of the noise; 0 is exact.",
)
@shown_option(
    "--layout",
    default="table",
    type=click.Choice(["table", "trace"]),
    help="One canonical table a workload, or the published layout with explanations.",
)
@click.option(
    "--units", default=LEGACY_UNITS[0], type=click.Choice(LEGACY_UNITS), help="Of published phases."
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory to write to.")
def emulate_command(
    cluster_name: str,
    calibration: str,
    names: tuple[str, ...],
    plans: str,
    placements: str,
    cpu_threads: int | None,
    seed: int,
    noise: float,
    layout: str,
    units: str,
    output: Path,
) -> None:
    """Write emulated traces, one a workload."""
    check_target(output, is_directory=True)
    where, constants = cluster(cluster_name), load_calibration(calibration)
    chosen = workload_keys() if _ALL in names else names
    specs = [workload(name) for name in dict.fromkeys(chosen)]
    selected = [(spec, _select(spec, where, plans, placements, cpu_threads)) for spec in specs]
    for spec, points in selected:
        if layout == "trace":
            path, *_ = write_trace(
                output / spec.key, spec, points, where, constants, seed=seed, noise=noise, units=units
            )
        else:
            path = output / f"{spec.key}.csv"
            write_csv(emulate(spec, points, where, constants, seed=seed, noise=noise), path, THROUGHPUT)
        say(f"{path}: {len(points)} rows, {EMULATED_NOTE}")


def _select(
    spec: Workload, where: ClusterSpec, plans: str, placements: str, cpu_threads: int | None
) -> list[Point]:
    """Choose points of the designed grid, or build those that are named."""
    plan_texts = None if plans == _ALL else [text.strip() for text in plans.split(",")]
    places = None if placements == _ALL else [Placement.parse(text) for text in placements.split(",")]
    if plan_texts is not None and places is not None:
        threads = cpu_threads or (*spec.trace_cpu_threads, DEFAULT_CPU_THREADS)[0]
        return [read_point(spec, text, place.text, threads) for text in plan_texts for place in places]
    points = [
        point
        for point in trace_points(spec, where)
        if (plan_texts is None or write_exec_plan(point.plan) in plan_texts)
        and (places is None or point.placement in places)
    ]
    if not points:
        raise InputError(
            f"no point of the trace grid of {spec.key!r} has plans {plans!r} and placements "
            f"{placements!r}; give both by name to emulate points outside the grid"
        )
    if cpu_threads is None:
        return points
    return list(dict.fromkeys(Point(p.plan.with_cpu_threads(cpu_threads), p.placement) for p in points))


@click.command("explain")
@cluster_option
@calibration_option
@shown_option("--cpu-threads", default=DEFAULT_CPU_THREADS, type=CPU_THREADS)
@click.option("--exact", is_flag=True, help="Also run the event schedule of the pipeline.")
@form_options
@click.argument("name", metavar="WORKLOAD", shell_complete=WORKLOAD_NAMES)
@click.argument("exec_plan", metavar="PLAN")
@click.argument("placement")
def explain_command(
    cluster_name: str,
    calibration: str,
    cpu_threads: int,
    exact: bool,
    form: str | None,
    name: str,
    exec_plan: str,
    placement: str,
) -> None:
    """Print every term of one point, and its memory.

    PLAN and PLACEMENT are in trace notation, for example 244 and 8888.
    """
    spec, where, constants = workload(name), cluster(cluster_name), load_calibration(calibration)
    point = read_point(spec, exec_plan, placement, cpu_threads)
    found = explain(spec, point, where, constants)
    pipeline = exact_pipeline(spec, point, where, constants) if exact and found.feasible else None
    ways = (
        {"closed form": pipeline.closed_form_s, "event schedule": pipeline.event_schedule_s}
        if pipeline
        else {}
    )
    if form is not None:
        rows = [{"part": "pipeline", "name": way, "value": value, "unit": "s"} for way, value in ways.items()]
        say_rows(_explanation_rows(found) + rows, form)
        return
    say("\n".join(_explanation_lines(spec, found)))
    for way, value in ways.items():
        say(f"pipeline, {way:<14} {format_seconds(value):>12}")


def _explanation_rows(found: Explanation) -> list[dict[str, object]]:
    """Return terms and memory, one a row; a plan that cannot run has no terms but the reason."""
    rows: list[dict[str, object]] = []
    if found.feasible:
        terms = {**found.terms_s, "iteration": found.iter_time_s}
        rows += [{"part": "time", "name": name, "value": value, "unit": "s"} for name, value in terms.items()]
    else:
        rows.append({"part": "reason", "name": found.reason, "value": None, "unit": ""})
    for part, sizes in (("memory", found.memory_bytes), ("host memory", found.host_memory_bytes)):
        rows += [{"part": part, "name": name, "value": value, "unit": "B"} for name, value in sizes.items()]
    return rows


def _explanation_lines(spec: Workload, found: Explanation) -> list[str]:
    plan = found.point.plan
    lines = [
        f"{spec.key}: {found.point.text}",
        f"micro-batch {plan.micro_batch_size} x {plan.n_microbatches} passes x {plan.dp} replicas "
        f"= {plan.global_batch_size} samples",
        f"constants {found.calibration.identifier} ({found.calibration.level}); {EMULATED_NOTE}",
        "",
    ]
    if found.feasible:
        total = found.iter_time_s
        lines += [
            f"{term:<20} {format_seconds(value):>12} {value / total:>7.1%}"
            for term, value in found.terms_s.items()
            if value
        ]
        lines += [f"{'iteration':<20} {format_seconds(total):>12}", ""]
    lines += [f"{part:<20} {format_bytes(value):>12}" for part, value in found.memory_bytes.items() if value]
    lines += [f"host {part:<15} {format_bytes(value):>12}" for part, value in found.host_memory_bytes.items()]
    lines += [f"warning: {text}" for text in found.warnings]
    return lines if found.feasible else [*lines, f"cannot run: {found.reason}"]
