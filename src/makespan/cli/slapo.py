"""Print schedules, verify them, and search for the best one."""

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from makespan.cli.options import (
    SEED,
    check_default,
    json_option,
    json_text,
    launcher_of,
    launcher_options,
    say,
    say_result,
)
from makespan.cli.progress import Countdown
from makespan.errors import InputError
from makespan.files import parse_json
from makespan.papers.slapo import PAPER
from makespan.papers.slapo.measured import verify_schedules
from makespan.papers.slapo.performance import IMPLEMENTATIONS, constants, emulated, modelled
from makespan.papers.slapo.throughput import Settings, run_of
from makespan.papers.slapo.tuning import BATCH, RATIO, Grid, Tuning
from makespan.slapo.tuning import (
    STRATEGIES,
    Exhaustive,
    Frontier,
    Polygon,
    Result,
    Space,
    strategy_named,
    tune,
)
from makespan.training.zoo import (
    FAMILIES,
    TransformerSpec,
    build_family,
    family_batch,
    family_sizes,
    family_spec,
)

# --- ``tune`` ---------------------------------------------------------------------------------------

_CELLS = Path("config/published/slapo_fig10.csv")


def _print_result(result: Result, optimum: float | None) -> None:
    for order, trial in enumerate(result.history, start=1):
        outcome = "out of memory" if trial.value is None else f"{trial.value:8.1f} samples/s"
        say(f"{order:4d}  batch {trial.point[BATCH]:>4}  recomputed {trial.point[RATIO]:<5}{outcome}")
    if result.best is None or optimum is None:
        say("no point fits into memory")
        return
    say(
        f"best: batch {result.best[BATCH]}, {result.best[RATIO]} recomputed, "
        f"{result.best_value:.1f} samples/s, {100 * result.share_of(optimum):.1f} % of the best of all\n"
        f"{result.n_eval} of {result.n_space} points evaluated, {result.n_oom} out of memory; "
        f"{result.stopped}"
    )
    if result.optimum == "local":
        say("a local optimum: changing one symbol is no improvement, changing several at once may be one")


@click.command("tune")
@click.option(
    "--grid", "cells", default=_CELLS, show_default=True, type=click.Path(path_type=Path),
    help="CSV file of throughput by batch size and share of recomputed layers.",
)  # fmt: skip
@click.option(
    "--model", metavar="FAMILY:SIZE",
    help="Model of the zoo, for example opt:2.7b, on the modelled machine of the paper; replaces --grid.",
)  # fmt: skip
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(1, 8), help="GPUs for --model.")
@click.option(
    "--implementation", default="slapo-zero3", show_default=True, type=click.Choice(sorted(IMPLEMENTATIONS)),
    help="Implementation for --model.",
)  # fmt: skip
@click.option(
    "--emulator", is_flag=True, help="Predict times by the emulator, not by the model of the paper's machine."
)
@click.option(
    "--strategy", default="frontier", show_default=True, type=click.Choice(sorted(STRATEGIES)),
    help="Search strategy.",
)  # fmt: skip
@click.option("--polygon", metavar="RATIO,BATCH ...", help="Search only inside this polygon of corners.")
@click.option(
    "--patience", type=click.IntRange(1), help="Stop after this many rounds without a better point."
)
@click.option("--budget", type=click.IntRange(1), help="Stop after this many evaluations.")
@click.option("--seed", default=0, show_default=True, type=SEED, help="Seed of random strategies.")
@click.option(
    "--db", type=click.Path(path_type=Path, dir_okay=False),
    help="File with one evaluation per line, as JSON; its points are not evaluated again.",
)  # fmt: skip
@json_option
def tune_command(
    cells: Path,
    model: str | None,
    gpus: int,
    implementation: str,
    emulator: bool,
    strategy: str,
    polygon: str | None,
    patience: int | None,
    budget: int | None,
    seed: int,
    db: Path | None,
    form: str | None,
) -> None:
    """Search batch sizes and shares of recomputed layers for the highest throughput that fits into memory."""
    if model is None:
        if emulator:
            raise InputError("--emulator needs --model FAMILY:SIZE")
        check_default(cells, _CELLS, "go to a checkout of makespan, or give --model or a table, --grid")
        searched: Grid | Settings = Grid.printed(PAPER.read_published(*Tuning.cells, cells))
    else:
        family, _, size = model.partition(":")
        spec = family_spec(family, size or "tiny")
        if emulator and not isinstance(spec, TransformerSpec):
            raise InputError(
                f"--emulator with --model {model}; expected a transformer: the emulator has no convolutions"
            )
        performance_model = emulated() if emulator else modelled(constants(), bounds=False)
        searched = Settings(spec, run_of(implementation, gpus, gpus, 1.0), performance_model)
    region = None
    if polygon is not None:
        try:
            pairs = [corner.split(",") for corner in polygon.split()]
            corners = tuple((float(ratio), float(batch)) for ratio, batch in pairs)
        except ValueError:
            raise InputError(
                f"--polygon is {polygon!r}; expected corners RATIO,BATCH, for example "
                "'0.25,104 0.25,176 1.0,176'"
            ) from None
        region = Polygon(RATIO, BATCH, corners)

    def declare(space: Space) -> None:
        searched.declare(space)
        if region is not None:
            space.constrain(region)

    chosen = Frontier(BATCH, RATIO) if strategy == Frontier.name else strategy_named(strategy)
    space = Space(declare)
    total = min(len(space.enumerate()), budget or sys.maxsize)
    countdown, evaluated = Countdown("points at most"), itertools.count()

    def look_up(point: Mapping[str, Any]) -> Any:
        settings = ", ".join(f"{name} {value}" for name, value in point.items())
        countdown(next(evaluated), total, f"evaluating {settings}")
        return searched.look_up(point)

    try:
        result = tune(declare, look_up, chosen, budget=budget, patience=patience, db=db, seed=seed)
    finally:
        countdown.close()
    if form is None:
        _print_result(result, tune(declare, searched.look_up, Exhaustive()).best_value)
        return
    history = [
        {**trial.point, "status": trial.status, "throughput_samples_per_s": trial.value}
        for trial in result.history
    ]
    summary = {
        "best": result.best,
        "throughput_samples_per_s": result.best_value,
        "stopped": result.stopped,
        "optimum": result.optimum,
    }
    say(json_text({**summary, "space": result.n_space, "history": history}, indent=None))


# --- ``show`` and ``verify`` ------------------------------------------------------------------------

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _schedule_arguments(command: _Command) -> _Command:
    """Add the argument FAMILY, and options for the size of the model and for its schedule."""
    settings = click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE",
        help="Option of the schedule, for example ckpt_ratio=0.5 or attn=sdpa; repeatable.",
    )  # fmt: skip
    planned = click.option(
        "--plan", metavar="TEXT",
        help="Schedule by a plan and by the structure that a run finds, not by the family: tp2 pp2 mb1.",
    )  # fmt: skip
    named = click.option(
        "--size", default="tiny", show_default=True, metavar="NAME", help="Size of the model."
    )
    return click.argument("family", type=click.Choice(FAMILIES))(named(planned(settings(command))))


def _parse_options(settings: tuple[str, ...]) -> dict[str, Any]:
    """Parse options ``NAME=VALUE``; a value that is not JSON is a string."""
    options: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise InputError(f"--set is {text!r}; expected NAME=VALUE, where VALUE is JSON or a string")
        try:
            options[name] = parse_json(value)
        except ValueError:
            options[name] = value
    return options


@click.command("show")
@_schedule_arguments
@click.option("--steps", is_flag=True, help="Print the steps in their order instead of the tree.")
@json_option
def show_command(
    family: str, size: str, plan: str | None, settings: tuple[str, ...], steps: bool, form: str | None
) -> None:
    """Print the schedule of FAMILY: the tree of its modules, each with the primitives applied to it."""
    from makespan.slapo import apply_plan, apply_schedule

    options, size = _parse_options(settings), _checked_size(family, size)
    _check_one_way(plan, options)
    if plan is None:
        schedule = apply_schedule(build_family(family, size, meta=True), family, **options)
    else:
        inputs = family_batch(family_spec(family, size), 2, 0).inputs
        schedule = apply_plan(build_family(family, size), plan, inputs)
        if form is None:
            say(f"{schedule.metadata.structure}\n")
    if form is not None:
        journal = list(map(str, schedule.metadata.journal))
        say_result({"family": family, "size": size, "steps": journal, "tree": str(schedule)}, "", form)
        return
    if steps:
        for number, step in enumerate(schedule.metadata.journal, start=1):
            say(f"{number:4d}  {step}")
        return
    say(str(schedule))


@click.command("verify")
@_schedule_arguments
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Number of processes that share the model.",
)
@click.option("--samples", default=2, show_default=True, type=click.IntRange(1), help="Samples per batch.")
@click.option("--seed", default=0, show_default=True, type=SEED, help="Seed of weights and inputs.")
@click.option(
    "--by-layers",
    is_flag=True,
    help="Compare repeated layers one at a time, and equal ones once, in less time and memory.",
)
@launcher_options
@json_option
def verify_command(
    family: str,
    size: str,
    plan: str | None,
    settings: tuple[str, ...],
    processes: int,
    samples: int,
    seed: int,
    by_layers: bool,
    launcher: str,
    device: str,
    form: str | None,
) -> None:
    """Compare the scheduled model of FAMILY with the original, outputs and gradients, on every process."""
    from makespan.slapo import ScheduleOptions
    from makespan.slapo.planned import read_division

    options, size = _parse_options(settings), _checked_size(family, size)
    ScheduleOptions.of(options)  # rejects wrong options before any process starts
    _check_one_way(plan, options)
    if plan is not None:
        division = read_division(plan)
        if division.tp > 1 and division.cp > 1:
            raise InputError("--plan with tp and cp needs two groups of processes; expected one of them")
        if (degree := division.tp * division.cp) != processes:
            raise InputError(f"--plan shares layers among {degree} processes; expected --processes {degree}")
    case = {"family": family, "options": options, "plan": plan}
    countdown = Countdown("parts")
    try:
        (report,) = verify_schedules(
            [case], processes, launcher_of(launcher, device), size=size, samples=samples, seed=seed,
            by_layers=by_layers, progress=countdown,
        )  # fmt: skip
    finally:
        countdown.close()
    say_result(report, report["report"], form)
    if not report["is_equal"]:
        raise click.exceptions.Exit(1)


def _check_one_way(plan: str | None, options: dict[str, Any]) -> None:
    if plan is not None and options:
        raise InputError(f"--plan and --set {min(options)} exclude each other; a plan has no options")


def _checked_size(family: str, size: str) -> str:
    if size not in family_sizes(family):
        raise InputError(
            f"--size is {size!r}; expected one of the sizes of {family}: {', '.join(family_sizes(family))}"
        )
    return size


@click.group("slapo", help=__doc__)
def COMMANDS() -> None:
    """Command group."""


for command in (show_command, verify_command, tune_command):
    COMMANDS.add_command(command)
