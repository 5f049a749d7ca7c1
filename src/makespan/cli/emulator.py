"""The verbs ``emulate``, ``explain``, ``calibrate`` and ``validate``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from makespan.cli.options import (
    CALIBRATION,
    CPU_THREADS,
    SEED,
    TRACE_CPU_THREADS,
    WORKLOAD_NAMES,
    calibration_option,
    check_no_input,
    check_target,
    cluster_option,
    form_options,
    json_option,
    real,
    reject_others,
    say,
    say_rows,
    shown_option,
)
from makespan.cli.plan import (
    is_own_run,
    measured_option,
    own_pricer,
    run_options,
    say_advice,
    say_one,
    say_validated,
    write_layouts,
)
from makespan.cli.progress import Countdown
from makespan.emulator import (
    CONSTANTS,
    EMULATED_NOTE,
    LEGACY_UNITS,
    MAX_NOISE,
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
from makespan.errors import InputError, MakespanError, MissingDataError
from makespan.files import is_stream, write_text
from makespan.hardware import ClusterSpec, cluster
from makespan.planning import parse_layout
from makespan.plans import DEFAULT_CPU_THREADS, Placement, write_exec_plan
from makespan.tables import THROUGHPUT, read_csv, shown_source, write_csv
from makespan.throughput import MeasuredSource, PublishedSource, ThroughputSource, shipped_register
from makespan.units import format_bytes, format_seconds
from makespan.workloads import Workload, model_keys, workload, workload_keys

# --- A model of one's own ------------------------------------------------------------------------

_OF_RUN = {"seq", "batch", "stack", "precision", "measured"}
_reject_others = partial(
    reject_others, of_own=_OF_RUN, kinds=("a MODEL and a CLUSTER of your own", "the emulator")
)


# --- ``emulate`` and ``explain`` --------------------------------------------------------------------

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
@click.option("--cpu-threads", type=CPU_THREADS, help="CPU threads per GPU of plans given by name.")
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
    help="One canonical table per workload, or the published layout with explanations.",
)
@click.option(
    "--units",
    default=LEGACY_UNITS[0],
    type=click.Choice(LEGACY_UNITS),
    help="Units of the phases in the published layout.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory to write to.")
@json_option
@run_options
@measured_option
@click.argument("model", required=False, metavar="[MODEL")
@click.argument("machines", required=False, metavar="CLUSTER]")
@click.pass_context
def emulate_command(
    ctx: click.Context,
    /,
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
    form: str | None,
    model: str | None,
    machines: str | None,
    **run: Any,
) -> None:
    """Write emulated traces, one per workload, or the predicted steps of your own model.

    With MODEL and CLUSTER, as 'makespan plan' takes them, the table has all layouts that fit, or ran by
    --measured. Options from --seq to --measured go with them, the others with the emulator.
    """
    check_target(output, is_directory=True)
    _reject_others(ctx, model is not None, shared=("output",))
    if model is not None:
        if machines is None:
            raise InputError(f"MODEL {model!r} has no CLUSTER; expected both, or --workload for the emulator")
        own = write_layouts(own_pricer(model, machines, **run), output, run["measured"])
        if form is None:
            which = "fit" if run["measured"] is None else "fit or ran"
            say(f"{own['path']}: {own['n_rows']} layouts that {which}, predicted")
        else:
            say_rows([own], form)
        return
    where, constants = cluster(cluster_name), load_calibration(calibration)
    chosen = workload_keys() if _ALL in names else names
    specs = [workload(name) for name in dict.fromkeys(chosen)]
    for spec in specs:
        _check_replaced(output / (f"{spec.key}.csv" if layout == "table" else f"{spec.key}/placements.csv"))
    selected = [(spec, _select(spec, where, plans, placements, cpu_threads)) for spec in specs]
    written: list[dict[str, object]] = []
    for spec, points in selected:
        if layout == "trace":
            path, *_ = write_trace(
                output / spec.key, spec, points, where, constants, seed=seed, noise=noise, units=units
            )
        else:
            path = output / f"{spec.key}.csv"
            write_csv(emulate(spec, points, where, constants, seed=seed, noise=noise), path, THROUGHPUT)
        written.append({"workload": spec.key, "path": str(path), "n_rows": len(points)})
        if form is None:
            say(f"{path}: {len(points)} rows, {EMULATED_NOTE}")
    if form is not None:
        say_rows(written, form)


def _check_replaced(path: Path) -> None:
    """Reject a table to write in place of one that was not emulated, such as measurements."""
    if not path.exists() or path.with_suffix(".meta.json").exists():  # the latter beside emulated traces
        return
    try:
        is_emulated = set(read_csv(path, THROUGHPUT)["provenance"]) <= {"emulated"}
    except MakespanError:
        is_emulated = False
    if not is_emulated:
        raise InputError(
            f"--output: would replace {path}, which was not emulated; expected another directory, or remove "
            "the file"
        )


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
@shown_option("--cpu-threads", default=DEFAULT_CPU_THREADS, type=CPU_THREADS, help="CPU threads per GPU.")
@click.option("--exact", is_flag=True, help="Also run the event schedule of the pipeline.")
@form_options
@run_options
@measured_option
@click.argument("name", metavar="WORKLOAD", shell_complete=WORKLOAD_NAMES)
@click.argument("exec_plan", metavar="PLAN")
@click.argument("placement")
@click.pass_context
def explain_command(
    ctx: click.Context,
    /,
    cluster_name: str,
    calibration: str,
    cpu_threads: int,
    exact: bool,
    form: str | None,
    name: str,
    exec_plan: str,
    placement: str,
    **run: Any,
) -> None:
    """Explain the iteration time of one point, term by term, and its memory.

    PLAN and PLACEMENT are in trace notation, for example 244 and 8888. A model of your own takes the same
    place, with a cluster and a layout as 'makespan plan' has them: makespan explain config.json 64xh100-80
    'tp4 pp2 mb1'. Options from --seq to --measured go with it, the others with the emulator.
    """
    is_own = is_own_run(name, exec_plan)
    _reject_others(ctx, is_own)
    if is_own:
        pricer = own_pricer(name, exec_plan, **run)
        say_one(pricer.price(parse_layout(placement, pricer.cluster.n_gpus)), pricer, form)
        return
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
        rows: list[dict[str, object]] = [
            {"part": "pipeline", "name": way, "value": value, "unit": "s"} for way, value in ways.items()
        ]
        parts: list[dict[str, object]] = []
        if found.feasible:
            terms = {**found.terms_s, "iteration": found.iter_time_s}
            parts += [
                {"part": "time", "name": key, "value": value, "unit": "s"} for key, value in terms.items()
            ]
        else:  # a plan that cannot run has its reason instead of terms
            parts.append({"part": "reason", "name": found.reason, "value": None, "unit": ""})
        for part, sizes in (("memory", found.memory_bytes), ("host memory", found.host_memory_bytes)):
            parts += [
                {"part": part, "name": key, "value": value, "unit": "B"} for key, value in sizes.items()
            ]
        say_rows(parts + rows, form)
        return
    say("\n".join(_explanation_lines(spec, found)))
    for way, value in ways.items():
        say(f"pipeline, {way:<14} {format_seconds(value):>12}")


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


# --- ``calibrate`` and ``validate`` -----------------------------------------------------------------

_STRONG_CORRELATION = 0.8
_traces_argument = click.argument("traces", type=click.Path(path_type=Path), metavar="TRACES|MODEL")
_machines_argument = click.argument("machines", required=False, metavar="[CLUSTER]")


@click.command("calibrate")
@cluster_option
@click.option("--holdout", metavar="MODEL", help="Model to leave out of the fit to all others.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the constants (.toml); - for standard output."
)
@click.option("--source", help="Source of the rows, recorded as provenance in that file.")
@shown_option(
    "--level",
    default="L1",
    type=click.Choice(["L1", "L1a", "L2", "L3"]),
    help="L1 for other models; L1a, L2, L3 to refine the shipped constants for these.",
)
@json_option
@run_options
@measured_option
@_traces_argument
@_machines_argument
@click.pass_context
def calibrate_command(
    ctx: click.Context,
    /,
    cluster_name: str,
    holdout: str | None,
    output: Path | None,
    source: str | None,
    level: str,
    form: str | None,
    traces: Path,
    machines: str | None,
    **run: Any,
) -> None:
    """Fit the constants of the emulator to measured traces, or learn from steps of your own model.

    TRACES is a directory with the published files, or with one canonical table per workload.
    With --output, a file for --calibration is written: at level L1 the fit to all models and one
    for each model left out; at L1a, L2 and L3 the shipped constants, refined for the models in
    TRACES by one row per workload, up to three rows per plan class, or all rows.

    MODEL and CLUSTER are those of 'makespan plan', with the steps that you measured in --measured: this says
    what each row taught, which one contradicts the others, and which layout to measure next. Options from
    --seq to --measured go with them, the others with the emulator.
    """
    _reject_others(ctx, machines is not None)
    if machines is not None:
        say_advice(own_pricer(str(traces), machines, **run), run["measured"], form)
        return
    check_target(output, is_directory=False)
    beside = is_stream(output)  # of the table, which is alone on the standard output
    data, shown = _observations(traces, cluster(cluster_name))
    clean = data.subset(data.clean)
    if holdout is not None:
        if holdout not in set(clean.model):
            known = ", ".join(key for key in model_keys() if key in set(clean.model))
            raise InputError(f"--holdout {holdout!r}: no rows of that model; the traces have: {known}")
        clean = clean.subset(clean.model != holdout)
    countdown = Countdown("fits")
    countdown(0, 1, "the fit to all models")
    try:
        fit = calibrate(clean)
    finally:
        countdown.close()
    lines = [f"{fit.n_rows} rows, objective {fit.cost:.1f}", ""]
    for constant, value, error in zip(CONSTANTS, fit.theta, fit.std_err_log, strict=True):
        fitted = f"{constant.name:<12} {value:>12.4g} {constant.unit:<4} +- {100 * error:5.1f} %"
        lines.append(f"{fitted}  {constant.meaning}")
    lines += ["", "at their bound: " + (", ".join(fit.active_bounds) or "none")]
    pairs = [
        f"{CONSTANTS[i].name}-{CONSTANTS[j].name} {fit.correlation[i, j]:+.2f}"
        for i, j in np.argwhere(np.triu(np.abs(fit.correlation) > _STRONG_CORRELATION, 1))
    ]
    if form is not None:
        say_rows(
            [
                {"constant": one.name, "value": value, "unit": one.unit, "std_err_log": error}
                for one, value, error in zip(CONSTANTS, fit.theta, fit.std_err_log, strict=True)
            ],
            form,
        )
    else:
        say("\n".join([*lines, "strongly correlated: " + (", ".join(pairs) or "none")]), err=beside)
    if output is not None:
        rows = "clean rows" if shown == "measured" else f"clean rows ({shown})"
        given = output.stem, clean, source or f"robust fit to the {rows} of {traces.name or traces}"
        if level == "L1":
            try:
                made = calibration_set(*given, progress=countdown)
            finally:
                countdown.close()
        else:
            made = refined_set(*given, level, load_calibration(CALIBRATION))
        write_text(calibration_text(made), output)
        say(f"{output}: level {level}, {made.n_rows} rows behind it", err=beside or form is not None)


@click.command("validate")
@cluster_option
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the table (.csv); - for standard output."
)
@json_option
@run_options
@measured_option
@_traces_argument
@_machines_argument
@click.pass_context
def validate_command(
    ctx: click.Context,
    /,
    cluster_name: str,
    output: Path | None,
    form: str | None,
    traces: Path,
    machines: str | None,
    **run: Any,
) -> None:
    """Compare the emulator, or predictions for your own model, with what was measured.

    TRACES is a directory with the published files, or with one canonical table per workload; they are judged
    under every protocol. The exit status is 1 if a bound is missed.

    MODEL and CLUSTER are those of 'makespan plan', with the steps that you measured in --measured: each is
    compared with what was expected before, from all rows, and from those of other layouts. Options from
    --seq to --measured go with them.
    """
    check_target(output, is_directory=False)
    _reject_others(ctx, machines is not None, shared=("output",))
    if machines is not None:
        if run["measured"] is None:
            raise InputError(
                "nothing to compare predictions with; expected --measured, a CSV of measured steps"
            )
        say_validated(own_pricer(str(traces), machines, **run), run["measured"], output, form)
        return
    if output is not None:
        tables: dict[str | Path, str] = {traces / f"{key}.csv": str(traces) for key in workload_keys()}
        check_no_input(output, "--output", tables)
    beside = form is not None or is_stream(output)  # of the table, which is alone on the standard output
    data, shown = _observations(traces, cluster(cluster_name))
    countdown = Countdown("groups of fits")
    try:
        result = validate(data, progress=countdown)
    finally:
        countdown.close()
    if form is not None:
        say_rows(result.table.to_dict("records"), form)
    say(f"{len(data)} {shown} rows, {int(data.clean.sum())} of them clean\n", err=beside)
    say(_text(result.table.drop(columns="known"), 3), err=beside)
    for kind, found in (("model", result.by_model), ("training software", result.by_software)):
        say(f"\nmean relative error [%] by {kind}\n", err=beside)
        say(_text(found.reset_index(names="protocol"), 1), err=beside)
    scales = ", ".join(f"{name} {value:.2f}" for name, value in result.anchors.items())
    say(f"\ncompute scale of the anchors (L1a): {scales}", err=beside)
    say("constants at their bound: " + (", ".join(result.active_bounds) or "none"), err=beside)
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


def _observations(directory: Path, where: ClusterSpec) -> tuple[Observations, str]:
    """Return the rows of a directory and their kind: ``measured``, also if published, or what they state."""
    if not directory.is_dir():
        raise MissingDataError(
            f"{directory}: no such directory; expected one with measured traces, or MODEL and CLUSTER"
        )
    sources: list[ThroughputSource] = [
        PublishedSource(directory, TRACE_CPU_THREADS, shipped_register()),
        MeasuredSource(directory),
    ]
    for source in sources:
        try:
            keys = source.workload_keys()
        except MissingDataError:
            continue
        tables = {key: source.load(key) for key in keys}
        shown = shown_source(source.name, (kind for table in tables.values() for kind in table["provenance"]))
        return observe(tables, where), "measured" if shown == "published" else shown
    raise MissingDataError(
        f"{directory}: neither the published files nor <workload>.csv tables of workloads that the emulator "
        f"knows; expected one or more of {', '.join(workload_keys())}"
    )
