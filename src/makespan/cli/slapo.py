"""Print schedules, verify them, and search for the best one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from makespan.cli.options import launcher_of, launcher_options, say
from makespan.errors import InputError
from makespan.papers.slapo import PAPER
from makespan.papers.slapo.measured import verify_schedules
from makespan.papers.slapo.performance import IMPLEMENTATIONS, constants, emulated, modelled
from makespan.papers.slapo.throughput import Settings, run_of
from makespan.papers.slapo.tuning import BATCH, RATIO, Grid
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
from makespan.training.zoo import FAMILIES, TransformerSpec, build_family, family_sizes, family_spec

# --- ``tune`` ---------------------------------------------------------------------------------------

_CELLS = Path("config/published/slapo_fig10.csv")


def _searched(
    model: str | None, cells: Path, n_gpus: int, implementation: str, by_emulator: bool
) -> Grid | Settings:
    """Return the space to search: a grid in a file, or the settings of a model on the paper's machine."""
    if model is None:
        if by_emulator:
            raise InputError("--emulator without --model; accepted: --emulator --model FAMILY:SIZE")
        return Grid.printed(PAPER.read_published("fig10", cells))
    family, _, size = model.partition(":")
    spec = family_spec(family, size or "tiny")
    if by_emulator and not isinstance(spec, TransformerSpec):
        raise InputError(
            f"--model {model} --emulator; accepted: transformers, the emulator knows no convolutions"
        )
    ask = emulated() if by_emulator else modelled(constants(), bounds=False)
    return Settings(spec, run_of(implementation, n_gpus, n_gpus, 1.0), ask)


def _say(found: Result, optimum: float | None) -> None:
    for order, trial in enumerate(found.history, start=1):
        outcome = "out of memory" if trial.value is None else f"{trial.value:8.1f} samples/s"
        say(f"{order:4d}  batch {trial.point[BATCH]:>4}  recomputed {trial.point[RATIO]:<5}{outcome}")
    if found.best is None or optimum is None:
        say("no point fits into memory")
        return
    say(
        f"best: batch {found.best[BATCH]}, {found.best[RATIO]} recomputed, {found.best_value:.1f} samples/s, "
        f"{100 * found.share_of(optimum):.1f} % of the best of all\n"
        f"{found.n_eval} of {found.n_space} points evaluated, {found.n_oom} out of memory; {found.stopped}"
    )
    if found.optimum == "local":
        say("a local optimum: no symbol alone has a better value; points that differ in several may")


@click.command("tune")
@click.option(
    "--grid", "cells", default=_CELLS, show_default=True, type=click.Path(path_type=Path),
    help="Throughput by batch size and share of recomputed layers, columns as in that file.",
)  # fmt: skip
@click.option(
    "--model", metavar="FAMILY:SIZE",
    help="Instead of a grid: a model of the zoo, for example opt:2.7b, on the modelled machine of the paper.",
)  # fmt: skip
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(1, 8), help="Of a model.")
@click.option(
    "--implementation", default="slapo-zero3", show_default=True, type=click.Choice(sorted(IMPLEMENTATIONS)),
    help="Of a model.",
)  # fmt: skip
@click.option("--emulator", is_flag=True, help="Ask the emulator of a model, not the machine of the paper.")
@click.option("--strategy", default="frontier", show_default=True, type=click.Choice(sorted(STRATEGIES)))
@click.option("--polygon", metavar="RATIO,BATCH ...", help="Search only inside these corners.")
@click.option("--patience", type=click.IntRange(1), help="Rounds without a better point after which it ends.")
@click.option("--budget", type=click.IntRange(1), help="Evaluations after which it ends.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of strategies that draw.")
@click.option(
    "--db", type=click.Path(path_type=Path, dir_okay=False),
    help="File of evaluations, one JSON line each; points in it are not evaluated again.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print everything, every evaluation included, as JSON.")
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
    is_json: bool,
) -> None:
    """Search batch sizes and shares of recomputed layers, for the highest throughput that memory allows."""
    searched = _searched(model, cells, gpus, implementation, emulator)
    region = None
    if polygon is not None:
        try:
            pairs = [corner.split(",") for corner in polygon.split()]
            corners = tuple((float(ratio), float(batch)) for ratio, batch in pairs)
        except ValueError:
            raise InputError(
                f"--polygon {polygon!r}; accepted: corners RATIO,BATCH, for example "
                "'0.25,104 0.25,176 1.0,176'"
            ) from None
        region = Polygon(RATIO, BATCH, corners)

    def declare(space: Space) -> None:
        searched.declare(space)
        if region is not None:
            space.constrain(region)

    chosen = Frontier(BATCH, RATIO) if strategy == Frontier.name else strategy_named(strategy)
    found = tune(declare, searched.look_up, chosen, budget=budget, patience=patience, db=db, seed=seed)
    if not is_json:
        _say(found, tune(declare, searched.look_up, Exhaustive()).best_value)
        return
    history = [
        {**trial.point, "status": trial.status, "throughput_samples_per_s": trial.value}
        for trial in found.history
    ]
    summary = {
        "best": found.best,
        "throughput_samples_per_s": found.best_value,
        "stopped": found.stopped,
        "optimum": found.optimum,
    }
    say(json.dumps({**summary, "space": found.n_space, "history": history}))


# --- ``show`` and ``verify`` ------------------------------------------------------------------------

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _schedule(command: _Command) -> _Command:
    """Add the argument of the family, its size, and options of its schedule."""
    settings = click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE",
        help="Option of the schedule, for example ckpt_ratio=0.5 or attn=sdpa; may be repeated.",
    )  # fmt: skip
    named = click.option(
        "--size", default="tiny", show_default=True, metavar="NAME", help="Size of the model."
    )
    return click.argument("family", type=click.Choice(FAMILIES))(named(settings(command)))


def _options(settings: tuple[str, ...]) -> dict[str, Any]:
    """Read options, ``NAME=VALUE``; a value is JSON, or else a text."""
    options: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise InputError(f"--set {text!r}; accepted: NAME=VALUE, where VALUE is JSON or a text")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


@click.command("show")
@_schedule
@click.option("--steps", is_flag=True, help="Print the steps in their order instead of the tree.")
def show_command(family: str, size: str, settings: tuple[str, ...], steps: bool) -> None:
    """Print the schedule of FAMILY: the tree of its modules, each with what is applied to it."""
    from makespan.slapo import apply_schedule

    options = _options(settings)
    schedule = apply_schedule(build_family(family, _known(family, size), meta=True), family, **options)
    if steps:
        for number, step in enumerate(schedule.metadata.journal, start=1):
            say(f"{number:4d}  {step}")
        return
    say(str(schedule))


@click.command("verify")
@_schedule
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Processes that share the model.",
)
@click.option("--samples", default=2, show_default=True, type=click.IntRange(1), help="Samples of a batch.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of all that is drawn.")
@launcher_options
def verify_command(
    family: str,
    size: str,
    settings: tuple[str, ...],
    processes: int,
    samples: int,
    seed: int,
    launcher: str,
    device: str,
) -> None:
    """Compare the schedule of FAMILY with its model as it is: outputs and gradients, on every process."""
    from makespan.slapo import ScheduleOptions

    options, size = _options(settings), _known(family, size)
    ScheduleOptions.of(options)  # rejects wrong options before any process starts
    case, how = {"family": family, "options": options}, launcher_of(launcher, device)
    (found,) = verify_schedules([case], processes, how, size=size, samples=samples, seed=seed)
    say(found["report"])
    if not found["is_equal"]:
        raise click.exceptions.Exit(1)


def _known(family: str, size: str) -> str:
    if size not in family_sizes(family):
        raise InputError(f"--size {size!r} of {family}; accepted: {', '.join(family_sizes(family))}")
    return size


@click.group("slapo", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (show_command, verify_command, tune_command):
    COMMANDS.add_command(command)
