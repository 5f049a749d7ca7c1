"""``makespan slapo show`` and ``makespan slapo verify``: schedules of the library, printed and checked."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from makespan.cli._output import say
from makespan.errors import InputError
from makespan.papers.slapo._verification import verify_schedules
from makespan.training.zoo import FAMILIES, build_family, family_sizes
from makespan.verbs import launcher_of, launcher_options

__all__ = ["show_command", "verify_command"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _schedule(command: _Command) -> _Command:
    """Give a command the family, its size, and options of its schedule."""
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
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise InputError(f"--set {text!r}; accepted: NAME=VALUE, where VALUE is JSON or a text")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


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
    ScheduleOptions.of(options)  # refused before any process starts
    case, how = {"family": family, "options": options}, launcher_of(launcher, device)
    (found,) = verify_schedules([case], processes, how, size=size, samples=samples, seed=seed)
    say(found["report"])
    if not found["is_equal"]:
        raise click.exceptions.Exit(1)


def _known(family: str, size: str) -> str:
    if size not in family_sizes(family):
        raise InputError(f"--size {size!r} of {family}; accepted: {', '.join(family_sizes(family))}")
    return size
