"""Options that several verbs share."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from makespan.cli._names import CLUSTER_NAMES, CLUSTER_OR_LIST_NAMES, JOB_LIST_NAMES
from makespan.cli._numbers import COUNT, SECONDS, SEED, real
from makespan.errors import InputError
from makespan.files import check_target as check_file
from makespan.files import is_stream

if TYPE_CHECKING:
    from makespan.studies import Run

__all__ = [
    "CALIBRATION",
    "TRACE_CPU_THREADS",
    "calibration_option",
    "check_target",
    "cluster_option",
    "decision_limit_option",
    "list_options",
    "scenario_options",
    "shown_option",
    "verdict_lines",
]

CALIBRATION = "L1"
"""Constants of the emulator that are used unless others are named."""

TRACE_CPU_THREADS = 12
"""CPU threads a GPU of published traces that do not say: an even share of the node of the testbed."""

_ROUND_S, _RESTART_DELAY_S = 60.0, 260.0  # as `makespan.scenario`, which takes long to import

_FORMATS = (
    "auto", "morphling", "requests", "philly", "helios", "pai", "openb", "spot", "tiresias", "pollux",
    "gavel", "easyscale",
)  # fmt: skip

Command = TypeVar("Command", bound=Callable[..., Any])

shown_option = partial(click.option, show_default=True)

cluster_option = shown_option(
    "--cluster",
    "cluster_name",
    default="a800-64",
    metavar="NAME",
    shell_complete=CLUSTER_NAMES,
    help="Cluster of the catalogue; 'makespan clusters' lists them.",
)

calibration_option = shown_option(
    "--calibration",
    default=CALIBRATION,
    metavar="NAME",
    help="Shipped constants (L0, L1), or a .toml file written by 'makespan calibrate'.",
)


def _decision_limit_s() -> float:
    from makespan.sim import DECISION_LIMIT_S

    return DECISION_LIMIT_S


decision_limit_option = click.option(
    "--decision-limit",
    "decision_limit_s",
    default=_decision_limit_s,
    show_default="600",
    help="Interrupt a policy that takes longer for one decision; 0 for no limit.",
    **SECONDS,
)
"""Wall time that one call of a policy may take."""


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Split each text at its last =; None if there is none."""
    wrong = next((text for text in values if "=" not in text), None)
    if wrong is not None:
        raise click.BadParameter(
            f"{wrong!r}; accepted: a type of the list and a device, such as V100=v100-32"
        )
    pairs = (text.rpartition("=") for text in values)
    return {kind.strip(): name.strip() for kind, _, name in pairs} or None


_COUNT: dict[str, Any] = {"type": COUNT, "metavar": "N"}
_PATH = click.Path(path_type=Path)

_LIST = (
    shown_option(
        "--workload",
        default="naive",
        metavar="FILE|NAME",
        shell_complete=JOB_LIST_NAMES,
        help="A job list (- for standard input), or naive (10 jobs), base, bp (best plans) or mt "
        "(multi-tenant): generated, or the authors' lists if the source is published.",
    ),
    shown_option(
        "--format",
        "file_format",
        default="auto",
        type=click.Choice(_FORMATS),
        help="Of the job list. auto: the table 'jobs' or a list of the Morphling artifact; "
        "requests: the table 'requests'; pollux: Sia's lists too. Jobs of formats after the second train "
        "what the Base workload trains, chosen by --seed.",
    ),
    click.option(
        "--jobs",
        "n_jobs",
        help="Jobs to generate, at the rate of the whole list, or how many of a list to take.",
        **_COUNT,
    ),
    shown_option(
        "--load",
        default=1.0,
        type=real(1000, "then all jobs are there at once", above=True),
        metavar="FACTOR",
        help="Arrival rate over that of the list.",
    ),
    shown_option(
        "--source",
        default="emulated",
        type=click.Choice(["emulated", "published", "measured"]),
        help="Where iteration times come from.",
    ),
    click.option(
        "--published-dir",
        type=_PATH,
        envvar="MAKESPAN_PUBLISHED_DIR",
        show_envvar=True,
        help="Directory with the published files.",
    ),
    click.option("--measured-dir", type=_PATH, help="Directory with <workload>.csv tables."),
    click.option(
        "--tasks",
        type=_PATH,
        help="Formats pai and gavel: the task table, or that of throughputs, if not beside the list.",
    ),
    click.option(
        "--epoch-time",
        "epoch_time_s",
        help="Format easyscale: duration of an epoch with all logical workers.",
        **SECONDS | {"type": real(10**9, "32 years", above=True)},
    ),
    click.option(
        "--keep",
        type=click.Choice(["durations", "work"]),
        show_default="work of lists that state steps, durations of others",
        help="What stays as in the list on any cluster: how long jobs take as requested, or their steps.",
    ),
    click.option(
        "--recorded-on",
        metavar="CLUSTER",
        shell_complete=CLUSTER_NAMES,
        show_default="a800-64 for generated lists",
        help="With --keep work: cluster of the catalogue on which the durations of a list become steps.",
    ),
    shown_option(
        "--too-large",
        default="drop",
        type=click.Choice(["drop", "reject"]),
        help="Jobs that request more GPUs or CPU threads than the cluster has: leave them out and say so, or "
        "stop.",
    ),
    shown_option(
        "--cluster",
        "cluster_name",
        default="a800-64",
        metavar="NAME|FILE",
        shell_complete=CLUSTER_OR_LIST_NAMES,
        help="Cluster of the catalogue, or a list of nodes (.csv); 'makespan clusters' lists the first.",
    ),
    click.option(
        "--gpu-as",
        "gpus",
        multiple=True,
        callback=_pairs,
        metavar="TYPE=NAME",
        help="Device of the catalogue that stands for a type of GPU in a list of nodes; may be repeated.",
    ),
    click.option("--nodes", "n_nodes", help="Another number of nodes.", **_COUNT),
    click.option(
        "--gpus-per-node", help="Another number of GPUs a node; CPU threads and memory follow.", **_COUNT
    ),
    shown_option(
        "--seed",
        default=1,
        type=SEED,
        metavar="N",
        help="Of the generated workload, and of what the jobs of foreign traces train.",
    ),
)
"""What says which jobs there are, and where."""

_SIMULATION = (
    shown_option(
        "--delay",
        "restart_delay_s",
        default=_RESTART_DELAY_S,
        help="Time without progress after every start and change.",
        **SECONDS,
    ),
    shown_option(
        "--interval",
        "interval_s",
        default=_ROUND_S,
        help="Length of a round; 0 to decide after each event.",
        **SECONDS,
    ),
    click.option(
        "--predictions",
        "--steering",
        "predictions",
        show_default="sampled, if the cluster has constants of the model",
        type=click.Choice(["sampled", "requests", "exact"]),
        help="What policies know: predictions of a fitted performance model and what was sampled for it, "
        "also what users state of their requests, or the source's own times, by which jobs always run.",
    ),
)


def check_target(path: Path | None, *, is_directory: bool) -> None:
    """Check that a file or a directory can be written there, before the work begins."""
    if path is None:
        return
    if is_directory and (is_stream(path) or (path.exists() and not path.is_dir())):
        raise InputError(f"--output {path}: accepted: a directory, there already or not")
    if not is_directory:
        check_file(path)
        if is_stream(path):
            return
    target = Path(os.path.realpath(path))
    parent = next(place for place in (target, *target.parents) if place.exists())
    if not is_directory and parent == target:
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise InputError(f"--output {path}: {parent} is no directory that can be written to")


def list_options(command: Command) -> Command:
    """Add the options that describe workload, throughput and cluster."""
    for option in reversed(_LIST):
        command = option(command)
    return command


def scenario_options(command: Command) -> Command:
    """Add the same, and the options that say how a simulation goes."""
    for option in reversed(_SIMULATION):
        command = option(command)
    return list_options(command)


def verdict_lines(done: "Run") -> list[str]:
    """Return what the validator found, in words."""
    from makespan.studies import violation_lines

    if not done.violations:
        return [f"schedule of {done.policy}: possible, {done.n_events} events replayed"]
    found = f"{len(done.violations)} violations in {done.n_events} events"
    lines = (f"  {line}" for line in violation_lines(done))
    return [f"schedule of {done.policy}: IMPOSSIBLE, {found}", *lines]
