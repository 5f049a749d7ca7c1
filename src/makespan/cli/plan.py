"""The verbs ``plan``, ``size`` and ``validate-public``, and what other verbs do with a model of one's own."""

import csv
import io
import math
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from makespan.cli.options import (
    check_no_input,
    check_target,
    form_options,
    json_option,
    json_text,
    real,
    say,
    say_result,
    say_rows,
    whole,
)
from makespan.errors import InfeasiblePlanError, InputError
from makespan.files import is_stream, read_text, write_text
from makespan.hardware import Gpu, gpu, gpu_names, read_machines
from makespan.planning import (
    LEAST_ROWS,
    PRECISIONS,
    RECURRENT_TERMS,
    TERMS,
    Advice,
    Priced,
    Pricer,
    Training,
    advise,
    calibrated_by,
    describe,
    differences,
    feasible_table,
    find_tables,
    frontier,
    growth,
    judge,
    judge_memory,
    judged_text,
    knowledge,
    model_names,
    parse_layout,
    plan,
    predictions,
    read_measured,
    read_memory,
    read_model,
    read_rows,
    recorded_errors,
    size_clusters,
    software,
    stack_names,
    takes_part,
    validate_rows,
)
from makespan.tables import write_csv
from makespan.units import GIB
from makespan.workloads import workload, workload_keys

if TYPE_CHECKING:
    import pandas as pd

    from makespan.planning import Plans

_SAMPLES = whole(1, 10**7, "no step has more samples")
_TOKENS = whole(1, 10**8, "no sample has more tokens")
_SCATTERS = 1.05  # scatter of measured steps, over that of published rows, from which it is said


def run_options(command: Any) -> Any:
    """Add the options that say what is trained: precision, stack, batch and seq."""
    options = (
        click.option(
            "--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True,
            help="Precision of matrix products.",
        ),
        click.option(
            "--stack", type=click.Choice(stack_names()), default="megatron-bridge", show_default=True,
            help="Training software.",
        ),
        click.option(
            "--batch", type=_SAMPLES, default=512, show_default=True,
            help="Samples of a step, over all GPUs.",
        ),
        click.option(
            "--seq", type=_TOKENS, default=4096, show_default=True, help="Tokens of a sample."
        ),
    )  # fmt: skip
    for option in options:
        command = option(command)
    return command


def _training(model: str, seq: int, batch: int, precision: str, gpu: Gpu) -> Training:
    """Return the run that options describe, and report what of it is not as one may think."""
    training = Training(read_model(model), seq, batch, precision)
    for remark in training.remarks:
        say(remark, err=True)
    if used := gpu.sustained.used_instead.get(precision):
        say(f"{gpu.name} has no {precision}: steps are those of {used}, which programs use instead", err=True)
    return training


def _kept(context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Return a file with what came through a pipe, which can be read once; other paths as they are."""
    if path is None or not path.is_fifo():
        return path
    file = Path(context.with_resource(TemporaryDirectory())) / "measured.csv"
    write_text(read_text(path, "measured steps (CSV)"), file)
    return file


measured_option = click.option(
    "--measured", type=click.Path(path_type=Path), callback=_kept,
    help="Measured steps of this model and stack (CSV).",
)  # fmt: skip


@click.command("plan")
@click.argument("model")
@click.argument("cluster")
@run_options
@measured_option
@click.option("--layout", "text", help="Price this layout alone, such as 'tp4 pp4 mb1'.")
@click.option(
    "--top",
    type=whole(1, 1000, "nobody reads longer lists"),
    show_default="5",
    help="Layouts to show.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Figure to write (.png, .svg or .pdf): throughput against GPUs, and memory against time.",
)
@form_options
def plan_command(
    model: str,
    cluster: str,
    seq: int,
    batch: int,
    stack: str,
    precision: str,
    measured: Path | None,
    text: str | None,
    top: int | None,
    plot: Path | None,
    form: str | None,
) -> None:
    """Find the fastest layouts of a training run that fit into memory.

    MODEL is a config.json, a folder with one, a TOML file, or a name such as llama3-70b. CLUSTER is a TOML
    file, a text such as 64xh100-80, or one of 'makespan clusters'. For example: makespan plan llama3-70b
    64xh100-80 --seq 8192 --batch 256
    """
    if text is not None and not text.strip():
        raise InputError("--layout is empty; expected words such as 'tp4 pp4 mb1'")
    if plot is not None:
        from makespan.plots import figure_kind  # loads matplotlib, which takes longer than the search

        figure_kind(plot)
        check_target(plot, is_directory=False, option="--plot")
    pricer = own_pricer(model, cluster, seq, batch, stack, precision, measured)
    if text is not None:
        for option, value in (("--plot", plot), ("--top", top)):
            if value is not None:
                raise InputError(f"{option} is about several layouts; expected it without --layout")
        say_one(pricer.price(parse_layout(text, pricer.cluster.n_gpus)), pricer, form)
        return
    found = plan(pricer, 5 if top is None else top)
    if plot is not None:
        from makespan.plots import plot_frontier, write_figure

        sizes, table = frontier(pricer)
        taught = f", refined by {len(pricer.measured)} measured steps" if pricer.measured else ""
        source = f"predicted for {pricer.stack.name}{taught}"
        write_figure(
            plot_frontier(sizes, table, pricer.cluster.gpu.sustained.memory_bytes / GIB, source), plot
        )
    if form == "csv":
        say_rows(found.table().to_dict("records"), "csv")
    elif form == "json":
        rows = zip(found.best, found.table().to_dict("records"), strict=True)
        say(json_text([{**row, **describe(one)} for one, row in rows]))
    else:
        _say_plans(found)


def _say_plans(found: "Plans") -> None:
    pricer, best = found.pricer, found.best[0]
    _say_run(pricer)
    further = f", {found.n_ran} more ran" if found.n_ran else ""
    batch, n_gpus = pricer.training.global_batch, pricer.cluster.n_gpus
    most = math.gcd(batch, n_gpus)
    odd = n_gpus // most
    odd //= odd & -odd  # twos go to tensor parallelism as well
    if odd > 1:
        unit = most * odd
        say(
            f"a batch of {batch} samples is not a multiple of {unit}: data parallelism is over at most "
            f"{most} of the {n_gpus} GPUs; {max(1, round(batch / unit)) * unit} samples leave more layouts"
        )
    say(f"{found.n_feasible:,} of {found.n_tried:,} layouts fit{further}; the best to choose:")
    say(
        f"  {'step':>8}  {'90 % interval':>15}  {'tokens/s/GPU':>12}  {'MFU':>6}  {'memory':>8}"
        f"  {'regret':>6}  layout"
    )
    for one, regret, chance in zip(found.best, found.regrets, found.chances, strict=True):
        interval = f"{_time(one.low_s)}-{_time(one.high_s)}"
        say(
            f"  {_time(one.step_s):>6} s  {interval:>13} s  {one.tokens_per_s_per_gpu:>12,.0f}"
            f"  {one.mfu:>6.1%}  {one.total_memory_bytes / GIB:>4.0f} GiB  "
            f"{'-' if math.isnan(regret) else f'{regret:.1%}':>6}"
            f"  dp{one.layout.dp} {one.layout.text}"
        )
        notes = []
        if (ran_s := pricer.measured_s(one.layout)) is not None:
            notes.append(f"measured at {_time(ran_s)} s")
        if one.reason:
            notes.append(one.reason)
        if one is not best:
            if reason := one.over(best):
                notes.append(f"slower by {reason}")
            notes.append(f"faster than the first with a chance of {chance:.0%}")
        if notes:
            say(f"{'':12}{'; '.join(notes)}")
    if len(found.ties) > 1:
        say(
            f"{len(found.ties)} layouts are ties, which only a measurement can tell apart. Regret is the\n"
            "expected slowdown against the fastest of them; 'makespan calibrate' says which to measure."
        )
    _say_terms(best)


def say_one(one: Priced, pricer: Pricer, form: str | None) -> None:
    """Print the step and the memory of one layout by what they are made of."""
    ran_s = pricer.measured_s(one.layout)
    values = {**describe(one), "measured_s": ran_s}
    if form == "csv":
        say_rows([{key: value for key, value in values.items() if not isinstance(value, dict | list)}], "csv")
        return
    if form == "json":
        say(json_text(values))
        return
    _say_run(pricer)
    state = "fits into" if not one.reason else "ran on" if one.is_feasible else "does not fit into"
    say(
        f"dp{one.layout.dp} {one.layout.text}: {_time(one.step_s)} s a step ({_time(one.low_s)} to "
        f"{_time(one.high_s)} s), {one.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, MFU {one.mfu:.1%}; "
        f"{state} {pricer.cluster.gpu.sustained.memory_bytes / GIB:.0f} GiB"
    )
    if notes := [*([] if ran_s is None else [f"measured at {_time(ran_s)} s"]), *filter(None, [one.reason])]:
        text = "; ".join(notes)
        say(f"{text[0].upper()}{text[1:]}.")
    _say_terms(one)


def _say_run(pricer: Pricer) -> None:
    training, cluster, stack = pricer.training, pricer.cluster, pricer.stack
    gpu = cluster.gpu
    model = training.model
    active = f", {_billions(model.active_parameters)} of them active" if model.is_mixture else ""
    say(
        f"{model.name}: {_billions(model.parameters)} parameters{active}; {training.global_batch} samples of "
        f"{training.seq} tokens a step in {training.precision}"
    )
    per_node = max(cluster.gpus_per_node, cluster.part_of)
    say(f"{cluster.n_gpus} x {gpu.name}, {per_node} a node; {gpu.sustained.evidence}")
    counts = knowledge().rows.get(stack.family, {})
    behind = f"{sum(counts.values()) or 'no'} measured rows stand behind it"
    here = f", {counts.get(gpu.kind) or 'none'} of them on this device" if counts else ""
    taught = f"; refined by {pricer.calibrated.n_rows} rows of your own" if pricer.calibrated.n_rows else ""
    without = ", none of them of a model with recurrent layers" if counts and model.is_recurrent else ""
    say(f"stack {stack.name}: {behind}{here}{without}{taught}")


def _say_terms(one: Priced) -> None:
    say("Where the time goes:")
    for name, value in sorted(one.terms_s.items(), key=lambda pair: -pair[1]):
        if value >= 0.005 * one.step_s:
            say(f"  {value / one.step_s:>6.1%}  {_time(value):>7} s  {(TERMS | RECURRENT_TERMS)[name]}")
    say("What memory holds:")
    for name, value in sorted(one.memory_bytes.items(), key=lambda pair: -pair[1]):
        if value >= 0.005 * one.total_memory_bytes:
            say(f"  {value / GIB:>8.1f} GiB  {name}")
    if not math.isnan(one.usd_per_million_tokens):
        say(f"${one.usd_per_million_tokens:.4g} per million tokens")


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B"


def _time(value_s: float) -> str:
    return f"{value_s:.3g}" if value_s < 100 else f"{value_s:.0f}"


# --- What ``calibrate``, ``validate``, ``explain`` and ``emulate`` do with a model of one's own -------


def own_pricer(
    model: str, cluster: str, seq: int, batch: int, stack: str, precision: str, measured: Path | None = None
) -> Pricer:
    """Return what prices layouts of a run, refined by a file of measured steps if there is one."""
    machines = read_machines(cluster)
    pricer = Pricer(_training(model, seq, batch, precision, machines.gpu), machines, software(stack))
    if measured is None:
        return pricer
    return calibrated_by(pricer, read_measured(measured, pricer.training, pricer.cluster))


def is_own_run(model: str, cluster: str) -> bool:
    """Tell a model and a cluster of one's own from a workload and a plan of the emulator."""
    if re.fullmatch(r"\s*\d+\s*x\s*[A-Za-z].*", cluster) or Path(cluster).suffix == ".toml":
        return True
    is_workload = model in {name for key in workload_keys() for name in (key, *workload(key).aliases)}
    return not is_workload and (model in model_names() or Path(model).exists())


def write_layouts(pricer: Pricer, folder: Path, measured: Path | None) -> dict[str, object]:
    """Write the predicted steps of all layouts that fit to a folder; return model, path and row count."""
    name = re.sub(r"[^\w.-]+", "-", pricer.training.model.name)
    path = folder / f"{name}.csv"
    check_no_input(path, "--output", {} if measured is None else {measured: "--measured"})
    table = feasible_table(pricer)
    write_csv(table, path)
    return {"workload": name, "path": str(path), "n_rows": len(table)}


def say_advice(pricer: Pricer, measured: Path | None, form: str | None) -> None:
    """Print what measured rows taught, which contradicts the others, and what to measure next."""
    lines = [] if measured is None else _lines_of_rows(measured)
    advice = advise(pricer, pricer.measured)
    if form is not None:
        lessons = [
            {"line": lines[int(row["row"]) - 1], **{str(key): value for key, value in row.items()}}
            for row in advice.lessons.to_dict("records")
        ]
        values = {
            "rows": lessons,
            "contradicting_lines": [lines[row - 1] for row in advice.contradicting],
            "n_ties": len(advice.ties),
            "half_width_before": advice.half_width_before,
            "half_width": advice.half_width,
            "scatter": pricer.calibrated.scatter,
            "spread_of_comparisons": advice.spread,
            "to_measure": advice.to_measure.to_dict("records"),
        }
        say(json_text(values))
        return
    _say_run(pricer)
    if lines:
        _say_lessons(advice, lines, pricer)
    if not len(advice.to_measure):
        say("Nothing to measure: no other layout may be as fast as the best one.")
        return
    say(f"Measure next; two of the {len(advice.ties)} ties are now compared to {advice.spread:.1%}:")
    say(f"  {'then to':>8}  {'step':>8}  {'memory':>8}  layout")
    for row in advice.to_measure.to_dict("records"):
        say(
            f"  {row['spread']:>8.1%}  {_time(row['step_s']):>6} s  {row['memory_gib']:>4.0f} GiB  "
            f"{row['layout']}"
        )


def _say_lessons(advice: Advice, lines: list[int], pricer: Pricer) -> None:
    say(
        f"{len(advice.ties)} layouts may be the fastest; their steps were known to "
        f"{advice.half_width_before:.0%} without rows, and are to {advice.half_width:.0%} now."
    )
    say("What each row taught, given the others:")
    say(f"  line  {'measured':>8}  {'expected':>8}  {'off by':>12}  {'narrows':>7}  {'moves':>6}  layout")
    for row in advice.lessons.to_dict("records"):
        say(
            f"  {lines[row['row'] - 1]:>4}  {_time(row['step_s']):>6} s  {_time(row['others_s']):>6} s  "
            f"{row['spreads']:>+4.1f} spreads  {row['narrowed']:>7.1%}  {row['moved']:>6.1%}  {row['layout']}"
        )
    if (scatter := pricer.calibrated.scatter) >= _SCATTERS:
        say(f"They scatter {scatter:.1f} times as far as published rows do, and intervals are wider for it.")
    listed = [lines[row - 1] for row in advice.contradicting]
    if not listed:
        say("No row contradicts the others.")
    elif len(lines) == 1:
        say(f"Line {listed[0]} contradicts what published rows lead to expect: check its unit and layout.")
    elif len(lines) == len(listed):
        say(f"Lines {listed[-2]} and {listed[-1]} contradict each other: measure one of them again.")
    else:
        for number in advice.contradicting:
            one = advice.lessons.iloc[number - 1]
            say(
                f"Line {lines[number - 1]} contradicts the others: {_time(one['step_s'])} s, where they lead "
                f"to expect {_time(one['others_low_s'])} to {_time(one['others_high_s'])} s. Check it, or "
                "measure it again."
            )


def say_validated(pricer: Pricer, measured: Path, output: Path | None, form: str | None) -> None:
    """Print the errors of predictions on measured rows, without and with these rows, and write them."""
    table = validate_rows(pricer, pricer.measured, read_memory(measured))
    table.insert(0, "line", _lines_of_rows(measured))
    beside = form is not None or is_stream(output)  # of the table, which is alone on the standard output
    if form is not None:
        say_rows(table.to_dict("records"), form)
    else:
        if not beside:
            _say_run(pricer)
        say("Relative errors of predicted steps:", err=beside)
        say(
            f"  line  {'measured':>8}  {'no row':>8}  {'all rows':>8}  {'others':>8}  {'interval':>8}"
            "  layout",
            err=beside,
        )
        for row in table.to_dict("records"):
            say(
                f"  {row['line']:>4}  {_time(row['step_s']):>6} s  {row['before_error']:>+8.1%}  "
                f"{row['after_error']:>+8.1%}  {row['left_out_error']:>+8.1%}  "
                f"{'inside' if row['is_inside'] else 'outside':>8}  {row['layout']}",
                err=beside,
            )
        means = [table[f"{name}_error"].abs().mean() for name in ("before", "after", "left_out")]
        say(f"  mean of sizes     {'  '.join(f'{mean:>8.1%}' for mean in means)}", err=beside)
        say(
            "'others' are predictions from the rows of other layouts, which is what to expect of a new one.",
            err=beside,
        )
        if "memory_gib" in table:
            _say_memory(table.dropna(subset="memory_gib"), beside)
    if output is not None:
        write_csv(table, output)


def _say_memory(table: "pd.DataFrame", beside: bool) -> None:
    """Print the memory that was allocated beside the count."""
    say("Memory that programs allocate on the fullest GPU:", err=beside)
    say(f"  line  {'measured':>9}  {'counted':>9}  {'error':>7}", err=beside)
    for row in table.to_dict("records"):
        measured, counted = row["memory_gib"], row["counted_gib"]
        say(
            f"  {row['line']:>4}  {measured:>5.1f} GiB  {counted:>5.1f} GiB  {counted / measured - 1:>+7.1%}",
            err=beside,
        )


def _lines_of_rows(path: Path) -> list[int]:
    """Return the lines on which the rows of a CSV end, which blank lines and line breaks in cells move."""
    reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    return [reader.line_num for cells in reader if len(cells) > 1 or "".join(cells).strip()][1:]


@click.command("size")
@click.argument("model")
@click.option(
    "--device",
    "kind",
    type=click.Choice(gpu_names(sustained=True)),
    default="h100-80",
    show_default=True,
    help="Kind of GPU.",
)
@click.option(
    "--tokens",
    type=real(1e18, "there is no more text", above=True),
    required=True,
    help="Tokens to train on.",
)
@click.option(
    "--deadline",
    "days",
    type=real(1e6, "nobody waits longer", above=True),
    help="Days until it must be done.",
)
@click.option(
    "--budget",
    "usd",
    type=real(1e15, "there is no more money", above=True),
    help="Dollars that may be spent.",
)
@click.option("--price", type=real(1e6, "no GPU costs more"), default=0.0, help="Dollars for a GPU and hour.")
@click.option(
    "--most",
    type=whole(1, 65536, "no cluster has more"),
    default=4096,
    show_default=True,
    help="Most GPUs; this number, powers of two, and numbers between those around the deadline are tried.",
)
@run_options
@form_options
def size_command(
    model: str,
    kind: str,
    tokens: float,
    days: float | None,
    usd: float | None,
    price: float,
    most: int,
    seq: int,
    batch: int,
    stack: str,
    precision: str,
    form: str | None,
) -> None:
    """Say how many GPUs train a model in time and within a budget.

    For example: makespan size llama3-8b --tokens 1e12 --deadline 30 --price 2.2 --batch 1024 --seq 8192
    """
    if usd is not None and not price:
        raise InputError("--budget needs --price, the dollars for a GPU and hour; expected both")
    training = _training(model, seq, batch, precision, gpu(kind))
    table = size_clusters(
        training,
        kind,
        software(stack),
        tokens=tokens,
        most_gpus=most,
        usd_per_gpu_hour=price,
        most_days=days or (math.inf if usd else None),
    )
    if not len(table):
        raise InfeasiblePlanError(
            f"{training.model.name} fits on no number of {kind} up to {most} that was tried (powers of two, "
            f"and {most}); expected more GPUs"
        )
    in_time = table["days"] <= (days or math.inf)
    within = table["usd"].fillna(0.0) <= (usd or math.inf)
    table["enough"] = in_time & within
    if form:
        say_rows(table.to_dict("records"), form)
        return
    say(
        f"{training.model.name} on {tokens:.3g} tokens, {kind}, stack {stack}, "
        f"batch {batch} x {training.seq}:"
    )
    say(f"  {'GPUs':>6}  {'days':>8}  {'90 % interval':>17}  {'tokens/s/GPU':>12}  {'cost':>12}  layout")
    for row in table.to_dict("records"):
        cost = "-" if not price else f"${row['usd']:,.0f}"
        mark = "*" if row["enough"] and (days or usd) else " "
        say(
            f"{mark} {row['n_gpus']:>6}  {row['days']:>8.3g}  {row['low_days']:>7.3g} to "
            f"{row['high_days']:<6.3g}  {row['tokens_per_s_per_gpu']:>12,.0f}  {cost:>12}  {row['layout']}"
        )
    if days or usd:
        _say_enough(table, days or math.inf, usd or math.inf, most)


def _say_enough(table: "pd.DataFrame", days: float, usd: float, most: int) -> None:
    """Print the least number of GPUs that is enough, and whether its interval is, too."""
    enough = table[table["enough"]]
    if not len(enough):
        say(
            f"No number of GPUs that was tried is enough (powers of two, {most}, and numbers in between "
            "around the\ndeadline): allow more days, more dollars, or a larger batch."
        )
        return
    first = enough.iloc[0]
    say(f"{int(first['n_gpus'])} GPUs are enough (*).")
    at_most = enough["high_days"] / enough["days"]
    is_sure = (enough["high_days"] <= days) & ((enough["usd"] * at_most).fillna(0.0) <= usd)
    if is_sure.iloc[0]:
        return
    limits = []
    if first["high_days"] > days:
        limits.append(f"{first['high_days']:.3g} days")
    if (most_usd := first["usd"] * at_most.iloc[0]) > usd:
        limits.append(f"${most_usd:,.0f}")
    surely = enough[is_sure]
    also = f" {int(surely.iloc[0]['n_gpus'])} GPUs are enough even then." if len(surely) else ""
    say(f"But the interval goes up to {' and '.join(limits)}.{also}")


@click.command("validate-public")
@click.argument("tables", nargs=-1, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Table to write (CSV).")
@click.option(
    "--predictions",
    "predicted",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Table with the prediction of each row to write (CSV).",
)
@click.option(
    "--published-dir",
    type=click.Path(path_type=Path),
    help="Directory with the published files, whose public-rows/ is read if no TABLES are given; by default "
    "that of the environment variable MAKESPAN_PUBLISHED_DIR.",
)
@click.option(
    "--against-record",
    is_flag=True,
    help="Fail if an error is larger than recorded for this release, by over half a percentage point.",
)
@json_option
def validate_public_command(
    tables: tuple[Path, ...],
    output: Path | None,
    predicted: Path | None,
    published_dir: Path | None,
    against_record: bool,
    form: str | None,
) -> None:
    """Judge predictions on tables of published rows, each source left out in turn.

    TABLES are CSV files, or folders of them; without any, the registered tables of the published files are
    read, and must be unchanged. For example: makespan validate-public public-rows/
    """
    if tables and published_dir is not None:
        raise InputError(
            f"--published-dir {published_dir}: is read only if no tables are given, got {tables[0]}; leave "
            "one out"
        )
    published = published_dir or os.environ.get("MAKESPAN_PUBLISHED_DIR")
    if tables:
        files = [
            file for table in tables for file in (sorted(table.glob("*.csv")) if table.is_dir() else [table])
        ]
        if not files:
            raise InputError(f"{tables[0]}: has no CSV file; expected tables of measured rows")
    elif not published:
        raise InputError(
            "no tables are given; expected CSV files, or a directory with the published files by "
            "--published-dir or MAKESPAN_PUBLISHED_DIR"
        )
    else:
        files = find_tables(published)
    if repeated := next((file for file in files if files.count(file) > 1), None):
        raise InputError(f"{repeated}: is given twice; expected each table once")
    for path, option in ((output, "--output"), (predicted, "--predictions")):
        check_target(path, is_directory=False, option=option)
        if path is not None:
            check_no_input(path, option, dict.fromkeys(files, "TABLES"))
    rows, refused = read_rows(files)
    for line in differences(files):
        say(line, err=True)
    if not rows:
        reason = f"none of {len(refused)} rows can be used, as {refused[0].reason}" if refused else "no rows"
        raise InputError(f"{files[0]}: {reason}")
    source, *others = {row.source for row in rows}
    if not others and takes_part(source):
        say(
            f"{source} is the only source, and the factors that ship are fitted to its rows: these errors "
            "are not held out. Give tables of other sources, too.",
            err=True,
        )
    table = judge(rows)
    if not len(table):
        raise InputError(
            f"{files[0]}: no group of source, device and precision has {LEAST_ROWS} rows that can be used; "
            "expected more rows"
        )
    if output is not None:
        write_csv(table, output)
    if predicted is not None:
        write_csv(predictions(rows), predicted)
    say_result(
        {
            "rows": len(rows),
            "refused": len(refused),
            "judged": table.to_dict("records"),
            "memory": judge_memory(rows).to_dict("records"),
        },
        judged_text(table, rows, refused),
        form,
    )
    if against_record and (grown := growth(table, recorded_errors())):
        for line in grown:
            say(line, err=True)
        raise click.exceptions.Exit(1)
