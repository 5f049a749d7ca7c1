"""Output, completion, number types and options that the verbs share, and the verb ``jobs``."""

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class

from makespan.errors import InputError, MissingDataError
from makespan.files import check_target as check_file, is_stream, parse_json
from makespan.units import HOUR, printable

if TYPE_CHECKING:
    from makespan.runtime import Launcher
    from makespan.sim import Scenario
    from makespan.studies import Run


# --- Output -----------------------------------------------------------------------------------------

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str, *, err: bool = False) -> None:
    """Print a text with control characters escaped: names from files cannot steer the terminal."""
    click.echo(printable(text), err=err)


def json_option(command: Command) -> Command:
    """Add ``--json``; the command gets ``form``, which is ``"json"`` with the option and None without."""
    return click.option("--json", "form", flag_value="json", default=None, help="Print the result as JSON.")(
        command
    )


def form_options(command: Command) -> Command:
    """Add ``--json`` and ``--csv``; the command gets the choice as ``form``, None without one."""
    text = "Print the result as CSV."
    return json_option(click.option("--csv", "form", flag_value="csv", default=None, help=text)(command))


def plain(value: Any) -> Any:
    """Return a value of a table as one of Python; a missing one, which does not equal itself, as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if value != value else value


def json_text(value: Any, indent: int | None = 1) -> str:
    """Return a result as JSON; what JSON has no number for, missing or infinite, is null at any depth."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: kept(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [kept(one) for one in value]
        value = plain(value)
        return None if isinstance(value, float) and math.isinf(value) else value

    return json.dumps(kept(value), indent=indent, default=str, allow_nan=False)


def say_result(values: Mapping[str, Any], text: str, form: str | None) -> None:
    """Print the result of a command: as JSON if that was asked for, as text otherwise."""
    if form == "json":
        say(json_text(values))
    elif text:
        say(text)


def say_drained(
    run_dir: Path, of: str, asked: Iterable[int], unknown: Iterable[int], form: str | None
) -> None:
    """Print what became of a request to drain nodes or ``processes``, and which the run does not have."""
    if missing := ", ".join(map(str, unknown)):
        say(f"{of} {missing} are not in the run; the others leave", err=True)
    say_result({"run_dir": run_dir, of: list(asked), "unknown": list(unknown)}, "", form)


def say_rows(rows: Iterable[Mapping[Any, Any]], form: str) -> None:
    """Print rows, with the columns of the first, as ``json`` or ``csv``; missing values are null or empty."""
    listed = [{name: plain(value) for name, value in row.items()} for row in rows]
    if form == "json":
        say(json_text(listed))
        return
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(listed[0]) if listed else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    say(stream.getvalue().removesuffix("\n"))


# --- Completion -------------------------------------------------------------------------------------

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completing(names: Callable[[], Iterable[str]], *, files: bool = False) -> Completer:
    """Complete names, in a list joined by commas its last part, and also files if they are accepted."""

    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        found = [CompletionItem(before + comma + name) for name in names() if name.startswith(last)]
        return [*found, CompletionItem(incomplete, type="file")] if files else found

    return offered


def _policies() -> Iterable[str]:
    from makespan.policies import policy_names

    return policy_names()


def _clusters() -> Iterable[str]:
    from makespan.hardware import cluster_names

    return cluster_names()


def _workloads() -> Iterable[str]:
    from makespan.workloads import workload_keys

    return workload_keys()


def _job_lists() -> Iterable[str]:
    from makespan.traces import VARIANTS

    return ("naive", *VARIANTS)


def _papers() -> Iterable[str]:
    from makespan.papers import PAPERS

    return PAPERS


POLICY_NAMES, CLUSTER_NAMES = _completing(_policies), _completing(_clusters)
WORKLOAD_NAMES, PAPER_NAMES = _completing(_workloads), _completing(_papers)
JOB_LIST_NAMES = _completing(_job_lists, files=True)
CLUSTER_OR_LIST_NAMES = _completing(_clusters, files=True)


# --- Numbers ----------------------------------------------------------------------------------------

_SHOWN = 40  # characters of what was given


class Bounded(click.FloatRange):
    """Number within bounds; the message gives the accepted range and the reason for the upper bound."""

    def __init__(
        self, kind: type[int] | type[float], least: float, most: float, why: str, *, above: bool = False
    ) -> None:
        super().__init__(least, most, min_open=above)
        self.name = "integer" if kind is int else "float"
        self._kind, self._least, self._most = kind, least, most
        noun = "a whole number" if kind is int else "a number"
        end = str(most) if kind is int else f"{most:g}"
        self._accepted = f"{noun} {'above' if above else 'from'} {least:g} to {end} ({why})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; anything else fails with one message."""
        try:
            number = self._kind(value)
        except (ValueError, OverflowError):
            number = float("nan")  # fails every comparison
        is_enough = number > self._least if self.min_open else number >= self._least
        if not (is_enough and number <= self._most):
            self.fail(f"{str(value)[:_SHOWN]!r}; expected {self._accepted}", param, ctx)
        return number


def whole(least: int, most: int, why: str) -> "Bounded":
    """Accept whole numbers from one to another, with the reason for the upper bound."""
    return Bounded(int, least, most, why)


def real(most: float, why: str, *, above: bool = False) -> "Bounded":
    """Accept numbers from 0 to an upper bound, with the reason; ``above`` excludes 0."""
    return Bounded(float, 0, most, why, above=above)


SECONDS: dict[str, Any] = {
    "type": real(10**9, "later times do not resolve a microsecond"),
    "metavar": "SECONDS",
}
"""Type and name of a simulated time."""
COUNT = whole(1, 10**6, "larger simulations take days and more memory than there is")
CPU_THREADS = whole(1, 4096, "no node has more")
PROCESSES = whole(1, 1024, "all of them run on one machine")
SEED = whole(0, 2**63 - 1, "seeds have 64 bits")


# --- Options of simulations and the emulator --------------------------------------------------------

CALIBRATION = "L1"
"""Constants of the emulator that are used unless others are named."""
TRACE_CPU_THREADS = 12
"""CPU threads per GPU of published traces that do not say: an even share of the node of the testbed."""
_ROUND_S, _RESTART_DELAY_S = 60.0, 260.0  # as `makespan.scenario`, which takes long to import
_FORMATS = (
    "auto", "morphling", "requests", "philly", "helios", "pai", "openb", "spot", "tiresias", "pollux",
    "gavel", "easyscale",
)  # fmt: skip
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
        raise click.BadParameter(f"{wrong!r}; expected a type of the list and a device, such as V100=v100-32")
    pairs = (text.rpartition("=") for text in values)
    return {kind.strip(): name.strip() for kind, _, name in pairs} or None


_COUNT: dict[str, Any] = {"type": COUNT, "metavar": "N"}


def failure_seed_option(rate_option: str) -> Callable[[Command], Command]:
    """Return the option ``--failure-seed``, which goes with a rate of failures."""
    return click.option(
        "--failure-seed",
        type=whole(0, 2**31 - 1, "these seeds have 31 bits"),
        metavar="N",
        show_default="1",
        help=f"With {rate_option}: seed of the failures.",
    )


_PATH = click.Path(path_type=Path)
_LIST = (
    shown_option(
        "--workload",
        default="naive",
        metavar="FILE|NAME",
        shell_complete=JOB_LIST_NAMES,
        help="A job list (- for standard input), or naive (10 jobs), base, bp (best plans) or mt "
        "(multi-tenant): generated, or the authors' lists if the source is published. A list may name models "
        "by file (config.json) or as 'makespan plan' does; their steps are predicted, whatever the source.",
    ),
    shown_option(
        "--format",
        "file_format",
        default="auto",
        type=click.Choice(_FORMATS),
        help="Format of the job list. auto: the table 'jobs' or a list of the Morphling artifact; "
        "requests: the table 'requests'; pollux: Sia's lists too. Jobs of formats other than auto and "
        "morphling train models of the Base workload, drawn with --seed.",
    ),
    click.option(
        "--jobs",
        "n_jobs",
        help="Generate this many jobs, up to 100000, at the rate of the whole list, or read this many from "
        "a list.",
        **_COUNT,
    ),
    shown_option(
        "--load",
        default=1.0,
        type=real(1000, "then all jobs are there at once", above=True),
        metavar="FACTOR",
        help="Arrival rate relative to that of the list.",
    ),
    shown_option(
        "--source",
        default="emulated",
        type=click.Choice(["emulated", "published", "measured"]),
        help="Source of the iteration times.",
    ),
    click.option(
        "--published-dir",
        type=_PATH,
        help="Directory with the published files, for source published; by default that of the environment "
        "variable MAKESPAN_PUBLISHED_DIR.",
    ),
    click.option(
        "--measured-dir",
        type=_PATH,
        help="Directory with <workload>.csv tables; format pollux: or with the profiles of Pollux or Sia.",
    ),
    click.option(
        "--tasks",
        type=_PATH,
        help="Formats pai and gavel: table of tasks, or of throughputs, unless it is beside the list.",
    ),
    click.option(
        "--epoch-time",
        "epoch_time_s",
        help="Format easyscale: duration of an epoch with all logical workers.",
        **SECONDS | {"type": real(10**9, "32 years", above=True)},
    ),
    click.option(
        "--keep-cancelled",
        is_flag=True,
        help="Formats philly and helios: keep jobs that their user cancelled, which held GPUs too.",
    ),
    click.option(
        "--keep",
        type=click.Choice(["durations", "work"]),
        show_default="work of lists that state steps, durations of others",
        help="What each job keeps from the list on any cluster: its duration as requested, or its steps.",
    ),
    click.option(
        "--recorded-on",
        metavar="CLUSTER",
        shell_complete=CLUSTER_NAMES,
        show_default="a800-64 for generated lists",
        help="With --keep work: cluster of the catalogue that converts the durations of a list to steps.",
    ),
    shown_option(
        "--too-large",
        default="drop",
        type=click.Choice(["drop", "reject"]),
        help="Jobs that request more GPUs or threads than the cluster has: drop them with a note, or stop.",
    ),
    shown_option(
        "--cluster",
        "cluster_name",
        default="a800-64",
        metavar="NAME|FILE",
        shell_complete=CLUSTER_OR_LIST_NAMES,
        help="Cluster of the catalogue ('makespan clusters' lists it), a list of nodes (.csv), or machines: "
        "a text such as 64xh100-80, or a file as for 'makespan plan' (.toml), of several types, too.",
    ),
    click.option(
        "--gpu-as",
        "gpus",
        multiple=True,
        callback=_pairs,
        metavar="TYPE=NAME",
        help="Device of the catalogue to use for a GPU type of a list of nodes; may be repeated.",
    ),
    click.option("--nodes", "n_nodes", help="Change the number of nodes.", **_COUNT),
    click.option(
        "--gpus-per-node", help="Change the GPUs per node; CPU threads and memory follow.", **_COUNT
    ),
    shown_option(
        "--seed",
        default=1,
        type=SEED,
        metavar="N",
        help="Seed of the generated workload, and of the models that jobs of foreign traces train.",
    ),
)
"""Options of the workload, the source of throughput and the cluster."""
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
    shown_option(
        "--placement",
        default="best-fit",
        type=click.Choice(["best-fit", "worst-fit"]),
        help="Nodes that policies prefer among those with enough free GPUs: those with the fewest free GPUs, "
        "which keeps whole nodes free, or those with the most, which spreads jobs.",
    ),
    click.option(
        "--predictions",
        "--steering",
        "predictions",
        show_default="sampled, if the cluster has constants of the model",
        type=click.Choice(["sampled", "requests", "exact"]),
        help="Times that policies decide by: predictions of a performance model and the times that it was "
        "fitted to (sampled), also those of each job as requested (requests), or those of the source, by "
        "which jobs always run (exact).",
    ),
    click.option(
        "--failures",
        type=_PATH,
        metavar="FILE",
        help="Failures and returns of nodes: columns time_s, node_id, kind (failed, joined), or a trace in "
        "Oobleck's form.",
    ),
    click.option(
        "--failures-per-day",
        type=real(10**5, "no cluster fails every second", above=True),
        metavar="N",
        help="Generate failures, so many a day in the whole cluster; GPUs fail independently of each other.",
    ),
    click.option(
        "--repair-hours",
        type=real(10**4, "more than a year", above=True),
        metavar="HOURS",
        show_default="6",
        help="With --failures-per-day: mean time until a node is back, exponentially distributed.",
    ),
    failure_seed_option("--failures-per-day"),
    click.option(
        "--recovery",
        type=click.Choice(["restart", "elastic", "resilient"]),
        show_default="restart, if nodes fail",
        help="What an interrupted job does: return to its checkpoint (restart), go on with other devices if "
        "it gets some at once (elastic), or go on with those that are left (resilient).",
    ),
    click.option(
        "--checkpoint-interval",
        "checkpoint_interval_s",
        show_default="1800, if nodes fail",
        help="Training between checkpoints, each of which takes 50 s.",
        **SECONDS | {"type": real(10**9, "32 years", above=True)},
    ),
)


def check_target(
    path: Path | None, *, is_directory: bool, option: str = "--output", names: Iterable[str] = ()
) -> None:
    """Check that an option's file or directory can be written and replaces no input, before the work begins.

    ``names`` are those of the files that are written to a directory.
    """
    if path is None:
        return
    if is_directory and (is_stream(path) or (path.exists() and not path.is_dir())):
        raise InputError(f"{option} {path}: expected a directory, there already or not")
    if not is_directory:
        check_file(path)
        if is_stream(path):
            return
    target = Path(os.path.realpath(path))
    parent = next(place for place in (target, *target.parents) if place.exists())
    if not is_directory and parent == target:
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise InputError(f"{option} {path}: {parent} is no directory that can be written to")
    for file in (path / name for name in names) if is_directory else (path,):
        check_no_input(file, option, _other_files(option))


def check_no_input(path: Path, option: str, files: Mapping[str | Path, str]) -> None:
    """Reject a file to write that is one of those that a command reads or writes already.

    ``files`` says of each what names it, such as an option.
    """
    for other, named_by in files.items():
        if os.path.realpath(other) == os.path.realpath(path):
            raise InputError(f"{option}: would replace {path}, which {named_by} names; expected another")


def _other_files(option: str) -> dict[str | Path, str]:
    """Return what the other options and arguments of the running command were given, and what named it."""
    ctx = click.get_current_context()
    found: dict[str | Path, str] = {}
    for parameter in ctx.command.params:
        name, value = str(parameter.name), ctx.params.get(str(parameter.name))
        is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if option in parameter.opts or not is_given:
            continue
        is_argument = isinstance(parameter, click.Argument)
        shown = parameter.make_metavar(ctx).strip("[].") if is_argument else parameter.opts[0]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str | Path) and not is_stream(one):
                found[one] = shown
    return found


def check_default(path: Path, default: Path, advice: str) -> None:
    """Raise a `MissingDataError` with advice if a file of the checkout, the default, is not found here."""
    if path == default and not path.exists():
        raise MissingDataError(f"{path}: no such file in {Path.cwd()}; {advice}")


def reject_others(
    ctx: click.Context,
    is_own: bool,
    *,
    of_own: set[str],
    kinds: tuple[str, str],
    shared: tuple[str, ...] = (),
) -> None:
    """Reject options without effect where a command takes things of the user's own, or of the package.

    Parameters
    ----------
    is_own
        True if the command was given things of the user's own.
    of_own, shared
        Parameters that go with these alone, and parameters that go with both.
    kinds
        Things of the user's own, and of the package, in words.
    """
    for parameter in ctx.command.params:
        name = str(parameter.name)
        is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not is_given or isinstance(parameter, click.Argument) or name in ("quiet", "form", *shared):
            continue
        if (name in of_own) != is_own:
            fitting, found = kinds if name in of_own else kinds[::-1]
            raise InputError(f"{parameter.opts[0]} is an option for {fitting}; it does not go with {found}")


def list_options(command: Command) -> Command:
    """Add the options that describe workload, throughput and cluster."""
    for option in reversed(_LIST):
        command = option(command)
    return command


def scenario_options(command: Command) -> Command:
    """Add the options of `list_options` and those of a simulation."""
    for option in reversed(_SIMULATION):
        command = option(command)
    return list_options(command)


def check_failure_options(
    listed: Path | None, rate: tuple[str, float | None], more: Mapping[str, float | None]
) -> None:
    """Check that failures are either listed or generated, and that options of generated ones go with these.

    Parameters
    ----------
    listed, rate, more
        File of failures; option and value of their rate; values of the options that go with a rate.
    """
    option, value = rate
    if value is not None and listed is not None:
        raise InputError(
            f"--failures {listed} and {option} {value:g} both say what fails; leave one of them out"
        )
    for name, given in more.items():
        if given is not None and value is None:
            raise InputError(f"{name} {given:g} is for generated failures; use it with {option}")


def assembled(decision_limit_s: float, request: Mapping[str, Any]) -> "Scenario":
    """Return the scenario of the options of `scenario_options`, with failures and a recovery."""
    from makespan.sim import FailureModel, Recovery
    from makespan.studies import scenario as assemble

    options = dict(request)
    per_day, hours, seed = (
        options.pop(name) for name in ("failures_per_day", "repair_hours", "failure_seed")
    )
    kind, every_s = options.pop("recovery"), options.pop("checkpoint_interval_s")
    more = {"--repair-hours": hours, "--failure-seed": seed}
    check_failure_options(options["failures"], ("--failures-per-day", per_day), more)
    if per_day is not None:
        given = {"repair_s": None if hours is None else hours * HOUR, "seed": seed}
        options["failures"] = FailureModel(
            per_day, **{name: value for name, value in given.items() if value is not None}
        )
    if kind is not None or every_s is not None:
        if every_s is not None and options["failures"] is None and kind is None:
            raise InputError(
                f"--checkpoint-interval {every_s:g} is for jobs that recover from failures; use it with "
                "--failures, --failures-per-day or --recovery"
            )
        options["recovery"] = Recovery(
            kind or "restart", **({} if every_s is None else {"checkpoint_interval_s": every_s})
        )
    return replace(assemble(**options), decision_limit_s=decision_limit_s)


def verdict_lines(done: "Run") -> list[str]:
    """Return the verdict of the validator as text."""
    from makespan.studies import violation_lines

    if not done.violations:
        return [f"schedule of {done.policy}: possible, {done.n_events} events replayed"]
    count = f"{len(done.violations)} violations in {done.n_events} events"
    lines = (f"  {line}" for line in violation_lines(done))
    return [f"schedule of {done.policy}: IMPOSSIBLE, {count}", *lines]


# --- ``jobs`` ---------------------------------------------------------------------------------------


@click.command("jobs")
@list_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("-"),
    show_default=True,
    help="File for the list (.csv); - for standard output.",
)
@json_option
def jobs_command(output: Path, form: str | None, **request: Any) -> None:
    """Write the jobs of a workload as a list.

    The list has the generated jobs, or those of a foreign trace with their models, and its load. Given as
    --workload it is read back unchanged, so every simulation of it has the same result. Dropped and repaired
    jobs are reported on the error stream.
    """
    from makespan.studies import scenario as assemble
    from makespan.traces import jobs_table, write_jobs

    check_target(output, is_directory=False)
    scenario = assemble(**request)
    say(scenario.report, err=True)
    if form is not None and is_stream(output):
        listed = sorted(scenario.jobs, key=attrgetter("submit_time_s"))
        say_rows(jobs_table(listed).to_dict("records"), form)
        return
    write_jobs(scenario.jobs, output)
    if not is_stream(output):
        values = {"output": output, "n_jobs": len(scenario.jobs)}
        say_result(values, f"{output}: {len(scenario.jobs)} jobs", form)


# --- ``completion`` ---------------------------------------------------------------------------------


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands in a shell.

    To complete commands, options and names in every new shell, add this line to ~/.bashrc, or with zsh in
    place of bash to ~/.zshrc:

        eval "$(makespan completion bash)"

    For fish, write the script to ~/.config/fish/completions/makespan.fish.
    """
    made = get_completion_class(shell)
    if made is None:
        raise InputError(f"no completion for {shell!r}")
    root = ctx.find_root()
    say(made(root.command, {}, "makespan", "_MAKESPAN_COMPLETE").source().strip("\n"))


# --- Options of training runs -----------------------------------------------------------------------


def launcher_options(command: Command) -> Command:
    """Add ``--launcher`` and ``--device``, from which `launcher_of` makes a launcher."""
    command = click.option(
        "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]),
        help="What each process computes on.",
    )(command)  # fmt: skip
    return click.option(
        "--launcher", default="local", show_default=True, type=click.Choice(["local", "slurm"]),
        help="Processes of this machine, or steps of the Slurm allocation in which the command runs.",
    )(command)  # fmt: skip


def launcher_of(launcher: str, device: str, stall_timeout_s: float | None = None) -> "Launcher":
    """Return the launcher that options name; a process in an allocation gets a core, and a GPU for CUDA.

    Parameters
    ----------
    launcher
        ``local`` or ``slurm``.
    device
        ``cpu`` or ``cuda``.
    stall_timeout_s
        Replaces the limit of the launcher [s].
    """
    from makespan.runtime import LocalLauncher, SlurmLauncher

    kind = "cuda" if device == "cuda" else "cpu"
    made: LocalLauncher | SlurmLauncher
    if launcher == "local":
        made = LocalLauncher("cuda" if kind == "cuda" else "cpu")
    else:
        gpus = ("--gres=gpu:1",) if kind == "cuda" else ()
        options = ("--nodes=1", "--cpus-per-task=1", "--mem=0", *gpus)
        made = SlurmLauncher("cuda" if kind == "cuda" else "cpu", options, threads_per_process=1)
    return made if stall_timeout_s is None else replace(made, stall_timeout_s=stall_timeout_s)


def settings_option(example: str) -> Callable[[Command], Command]:
    """Add ``--set PART.NAME=VALUE``, which `read_settings` reads as ``settings``."""
    return click.option(
        "--set", "settings", multiple=True, metavar="PART.NAME=VALUE",
        help=f"Further argument of a part, for example {example}; may be repeated.",
    )  # fmt: skip


def read_settings(settings: tuple[str, ...], parts: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Read arguments of parts, ``PART.NAME=VALUE``; a value is JSON, or else a text.

    Parameters
    ----------
    settings
        Texts from the command line.
    parts
        Parts that are accepted before the point; empty for any.

    Returns
    -------
    dict
        Arguments by part and name, with each of ``parts``.

    Raises
    ------
    InputError
        A text has another form.
    """
    by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
    shown = " or ".join(f"{part}.NAME=VALUE" for part in parts or ("PART",))
    for text in settings:
        name, equals, value = text.partition("=")
        part, dot, option = name.partition(".")
        if not (equals and dot and part and option) or (parts and part not in parts):
            raise InputError(f"--set {text!r}; expected {shown}, where VALUE is JSON or a text")
        values = by_part.setdefault(part, {})
        try:
            values[option] = parse_json(value)
        except ValueError:
            values[option] = value
    return by_part
