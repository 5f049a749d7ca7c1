"""Command line: emulate a testbed, explain a point, calibrate the emulator and validate it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from makespan import __version__
from makespan.config.command import config_command
from makespan.errors import InputError, MakespanError, MissingDataError
from makespan.hardware import ClusterSpec, cluster, cluster_names
from makespan.plans import DEFAULT_CPU_THREADS, Placement, write_plan
from makespan.tables import THROUGHPUT, write_csv, write_text
from makespan.testbed import (
    CONSTANTS,
    EMULATED_NOTE,
    LEGACY_UNITS,
    CalibrationFit,
    Explanation,
    Observations,
    Point,
    calibrate,
    calibration_set,
    calibration_text,
    emulate,
    exact_pipeline,
    explain,
    load_calibration,
    observe,
    read_point,
    refined_set,
    trace_points,
    validate,
    write_trace,
)
from makespan.traces import MeasuredSource, PublishedSource, ThroughputSource
from makespan.training.command import profile_command
from makespan.training.live_command import live_command
from makespan.units import format_bytes, format_seconds
from makespan.workloads import Workload, model_keys, workload, workload_keys

__all__ = ["main"]

_ALL = "all"
_CLUSTER = "a800-64"
_CALIBRATION = "L1"
_TRACE_CPU_THREADS = 12
_STRONG_CORRELATION = 0.8

_cluster_option = click.option(
    "--cluster",
    "cluster_name",
    default=_CLUSTER,
    show_default=True,
    metavar="NAME",
    help="Cluster of the catalogue.",
)
_calibration_option = click.option(
    "--calibration",
    default=_CALIBRATION,
    show_default=True,
    metavar="NAME",
    help="Shipped constants (L0, L1), or a .toml file written by 'makespan calibrate'.",
)
_traces_argument = click.argument("traces", type=click.Path(path_type=Path))


class _Failure(click.ClickException):
    """One line on the error stream and exit status 2."""

    exit_code = 2


class _Group(click.Group):
    """A group whose commands turn expected errors into one message."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that the package raises on purpose has no traceback."""
        try:
            return super().invoke(ctx)
        except MakespanError as error:
            raise _Failure(str(error)) from None
        except OSError as error:
            raise _Failure(f"{error.filename or 'file'}: {error.strerror or error}") from None


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For example: makespan emulate --workload bert --output traces; "
    "makespan explain llama7 244 8888; makespan validate path/to/published",
)
@click.version_option(__version__, prog_name="makespan")
def main() -> None:
    """Emulate a GPU testbed, and check the emulator against measured traces."""


main.add_command(config_command)
main.add_command(profile_command)
main.add_command(live_command)


@main.command("emulate")
@_cluster_option
@_calibration_option
@click.option(
    "--workload",
    "names",
    multiple=True,
    default=(_ALL,),
    show_default=True,
    metavar="NAME",
    help="Workload of the zoo; may be repeated.",
)
@click.option("--plans", default=_ALL, show_default=True, help="Plans in trace notation, joined by commas.")
@click.option("--placements", default=_ALL, show_default=True, help="Placements, joined by commas.")
@click.option("--cpu-threads", type=click.IntRange(1), help="CPU threads a GPU of plans given by name.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the noise.")
@click.option(
    "--noise",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Scale of the noise; 0 is exact.",
)
@click.option(
    "--layout",
    default="table",
    show_default=True,
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
            frame = emulate(spec, points, where, constants, seed=seed, noise=noise)
            write_csv(frame, path, THROUGHPUT)
        click.echo(f"{path}: {len(points)} rows, {EMULATED_NOTE}")


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
        if (plan_texts is None or write_plan(point.plan) in plan_texts)
        and (places is None or point.placement in places)
    ]
    if not points:
        raise InputError(
            f"no point of the trace grid of {spec.key!r} has plans {plans!r} and placements "
            f"{placements!r}; give both by name to emulate points outside the grid"
        )
    if cpu_threads is not None:
        changed = (Point(p.plan.with_cpu_threads(cpu_threads), p.placement) for p in points)
        return list(dict.fromkeys(changed))
    return points


@main.command("explain")
@_cluster_option
@_calibration_option
@click.option("--cpu-threads", default=DEFAULT_CPU_THREADS, show_default=True, type=click.IntRange(1))
@click.option("--exact", is_flag=True, help="Also run the event schedule of the pipeline.")
@click.argument("name", metavar="WORKLOAD")
@click.argument("exec_plan", metavar="PLAN")
@click.argument("placement")
def explain_command(
    cluster_name: str,
    calibration: str,
    cpu_threads: int,
    exact: bool,
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
    click.echo("\n".join(_explanation_lines(spec, found)))
    if exact and found.feasible:
        pipeline = exact_pipeline(spec, point, where, constants)
        click.echo(f"pipeline, closed form    {format_seconds(pipeline.closed_form_s):>12}")
        click.echo(f"pipeline, event schedule {format_seconds(pipeline.event_schedule_s):>12}")


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


@main.command("calibrate")
@_cluster_option
@click.option("--holdout", metavar="MODEL", help="Model to leave out of the fit to all others.")
@click.option("--output", type=click.Path(path_type=Path), help="File for the constants (.toml).")
@click.option("--source", help="What the rows are, for the provenance in that file.")
@click.option(
    "--level",
    default="L1",
    show_default=True,
    type=click.Choice(["L1", "L1a", "L2", "L3"]),
    help="L1 for other models; L1a, L2, L3 to refine the shipped constants for these.",
)
@_traces_argument
def calibrate_command(
    cluster_name: str,
    holdout: str | None,
    output: Path | None,
    source: str | None,
    level: str,
    traces: Path,
) -> None:
    """Fit the constants of the emulator to measured traces.

    TRACES is a directory with the published files, or with one canonical table a workload.
    With --output, a file for --calibration is written: at level L1 the fit to all models and one
    for each model left out; at L1a, L2 and L3 the shipped constants, refined for the models in
    TRACES by one row a workload, up to three rows a plan class, or all rows.
    """
    data = _observations(traces, cluster(cluster_name))
    clean = data.subset(data.clean)
    if holdout is not None:
        if holdout not in set(clean.model):
            known = ", ".join(key for key in model_keys() if key in set(clean.model))
            raise InputError(f"--holdout {holdout!r}: no rows of that model; the traces have: {known}")
        clean = clean.subset(clean.model != holdout)
    fit = calibrate(clean)
    click.echo("\n".join(_fit_lines(fit)))
    if output is not None:
        provenance = source or f"robust fit to the clean rows of {traces.name or traces}"
        if level == "L1":
            made = calibration_set(output.stem, clean, provenance)
        else:
            shipped = load_calibration(_CALIBRATION)
            made = refined_set(output.stem, clean, provenance, level, shipped)
        write_text(calibration_text(made), output)
        click.echo(f"{output}: level {level}, {made.n_rows} rows behind it")


def _fit_lines(fit: CalibrationFit) -> list[str]:
    lines = [f"{fit.n_rows} rows, objective {fit.cost:.1f}", ""]
    for constant, value, error in zip(CONSTANTS, fit.theta, fit.std_err_log, strict=True):
        fitted = f"{constant.name:<12} {value:>12.4g} {constant.unit:<4} +- {100 * error:5.1f} %"
        lines.append(f"{fitted}  {constant.meaning}")
    lines += ["", "at their bound: " + (", ".join(fit.active_bounds) or "none")]
    rows, columns = np.nonzero(np.triu(np.abs(fit.correlation) > _STRONG_CORRELATION, 1))
    pairs = [
        f"{CONSTANTS[i].name}-{CONSTANTS[j].name} {fit.correlation[i, j]:+.2f}"
        for i, j in zip(rows, columns, strict=True)
    ]
    return [*lines, "strongly correlated: " + (", ".join(pairs) or "none")]


@main.command("validate")
@_cluster_option
@click.option("--output", type=click.Path(path_type=Path), help="File for the table (.csv).")
@_traces_argument
@click.pass_context
def validate_command(ctx: click.Context, cluster_name: str, output: Path | None, traces: Path) -> None:
    """Compare the emulator with measured traces under every protocol.

    TRACES is a directory with the published files, or with one canonical table a workload.
    The exit status is 1 if a bound is missed.
    """
    data = _observations(traces, cluster(cluster_name))
    result = validate(data)
    click.echo(f"{len(data)} measured rows, {int(data.clean.sum())} of them clean\n")
    click.echo(_text(result.table, 3))
    click.echo("\nmean relative error [%] by model\n")
    click.echo(_text(result.by_model.reset_index(names="protocol"), 1))
    scales = ", ".join(f"{name} {value:.2f}" for name, value in result.anchors.items())
    click.echo(f"\ncompute scale of the anchors (L1a): {scales}")
    click.echo("constants at their bound: " + (", ".join(result.active_bounds) or "none"))
    if output is not None:
        write_csv(result.table, output)
    if not result.passed:
        ctx.exit(1)


def _text(frame: pd.DataFrame, decimals: int) -> str:
    def shown(value: float) -> str:
        if np.isnan(value):
            return "-"
        return f"{value:.3g}" if abs(value) >= 1e4 else f"{value:.{decimals}f}"

    formats: dict[str, Callable[[float], str]] = {
        str(name): shown for name in frame.columns if pd.api.types.is_float_dtype(frame[name])
    }
    return str(frame.to_string(index=False, formatters=formats))


def _observations(directory: Path, where: ClusterSpec) -> Observations:
    if not directory.is_dir():
        raise MissingDataError(f"{directory}: no such directory; expected measured traces")
    sources: Sequence[ThroughputSource] = (
        PublishedSource(directory, _TRACE_CPU_THREADS),
        MeasuredSource(directory),
    )
    for source in sources:
        try:
            keys = source.workload_keys()
        except MissingDataError:
            continue
        return observe({key: source.load(key) for key in keys}, where)
    raise MissingDataError(
        f"{directory}: neither the published files nor <workload>.csv tables; clusters known: "
        f"{', '.join(cluster_names())}"
    )
