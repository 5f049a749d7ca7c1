"""The verbs ``calibrate`` and ``validate``."""

from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pandas as pd

from makespan.cli._options import CALIBRATION, TRACE_CPU_THREADS, check_target, cluster_option, shown_option
from makespan.cli._output import say
from makespan.emulator import (
    CONSTANTS,
    CalibrationFit,
    Observations,
    calibrate,
    calibration_set,
    calibration_text,
    load_calibration,
    observe,
    refined_set,
    validate,
)
from makespan.errors import InputError, MissingDataError
from makespan.files import is_stream
from makespan.hardware import ClusterSpec, cluster, cluster_names
from makespan.tables import shown_source, write_csv, write_text
from makespan.throughput import MeasuredSource, PublishedSource, ThroughputSource, shipped_register
from makespan.workloads import model_keys

__all__ = ["calibrate_command", "validate_command"]

_STRONG_CORRELATION = 0.8

_traces_argument = click.argument("traces", type=click.Path(path_type=Path))


@click.command("calibrate")
@cluster_option
@click.option("--holdout", metavar="MODEL", help="Model to leave out of the fit to all others.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the constants (.toml); - for standard output."
)
@click.option("--source", help="What the rows are, for the provenance in that file.")
@shown_option(
    "--level",
    default="L1",
    type=click.Choice(["L1", "L1a", "L2", "L3"]),
    help="L1 for other models; L1a, L2, L3 to refine the shipped constants for these.",
)
@_traces_argument
def calibrate_command(
    cluster_name: str, holdout: str | None, output: Path | None, source: str | None, level: str, traces: Path
) -> None:
    """Fit the constants of the emulator to measured traces.

    TRACES is a directory with the published files, or with one canonical table a workload.
    With --output, a file for --calibration is written: at level L1 the fit to all models and one
    for each model left out; at L1a, L2 and L3 the shipped constants, refined for the models in
    TRACES by one row a workload, up to three rows a plan class, or all rows.
    """
    check_target(output, is_directory=False)
    beside = is_stream(output)  # of the table, which is alone on the standard output
    data, shown = _observations(traces, cluster(cluster_name))
    clean = data.subset(data.clean)
    if holdout is not None:
        if holdout not in set(clean.model):
            known = ", ".join(key for key in model_keys() if key in set(clean.model))
            raise InputError(f"--holdout {holdout!r}: no rows of that model; the traces have: {known}")
        clean = clean.subset(clean.model != holdout)
    fit = calibrate(clean)
    say("\n".join(_fit_lines(fit)), err=beside)
    if output is not None:
        rows = "clean rows" if shown == "measured" else f"clean rows ({shown})"
        given = output.stem, clean, source or f"robust fit to the {rows} of {traces.name or traces}"
        if level == "L1":
            made = calibration_set(*given)
        else:
            made = refined_set(*given, level, load_calibration(CALIBRATION))
        write_text(calibration_text(made), output)
        say(f"{output}: level {level}, {made.n_rows} rows behind it", err=beside)


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


@click.command("validate")
@cluster_option
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the table (.csv); - for standard output."
)
@_traces_argument
@click.pass_context
def validate_command(ctx: click.Context, cluster_name: str, output: Path | None, traces: Path) -> None:
    """Compare the emulator with measured traces under every protocol.

    TRACES is a directory with the published files, or with one canonical table a workload.
    The exit status is 1 if a bound is missed.
    """
    check_target(output, is_directory=False)
    beside = is_stream(output)  # of the table, which is alone on the standard output
    data, shown = _observations(traces, cluster(cluster_name))
    result = validate(data)
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
    """Return the rows of a directory and what they are: measured, by whomever, or what else they say."""
    if not directory.is_dir():
        raise MissingDataError(f"{directory}: no such directory; expected measured traces")
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
        f"{directory}: neither the published files nor <workload>.csv tables; clusters known: "
        f"{', '.join(cluster_names())}"
    )
