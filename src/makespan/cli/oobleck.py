"""Profile layers, plan pipelines, train through the loss of nodes, and simulate systems that lose nodes."""

import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import click
from pydantic import ValidationError

from makespan.cli.fields import field_options
from makespan.cli.options import (
    SEED,
    check_default,
    check_target,
    json_option,
    json_text,
    launcher_of,
    launcher_options,
    read_settings,
    reject_others,
    say,
    say_drained,
    say_result,
    settings_option,
)
from makespan.cli.progress import Countdown, clock, is_quiet, is_terminal
from makespan.errors import ConfigError, InputError, unknown_name
from makespan.files import is_stream, parse_json, read_yaml, write_text
from makespan.oobleck.fixed import profile_chain
from makespan.oobleck.instantiation import (
    Instantiation,
    choose_plan,
    estimated_time_s,
    event_time_s,
    microbatches,
)
from makespan.oobleck.job import ChainJob
from makespan.oobleck.peers import rerouted_counts
from makespan.oobleck.plan import Pipeline
from makespan.oobleck.profile import LayerProfile, ModelProfile, read_profile, write_profile
from makespan.oobleck.reconfiguration import (
    Copy,
    InsufficientNodes,
    Reconfiguration,
    StateLost,
    reconfigure,
    regroup,
)
from makespan.oobleck.requests import WORK, Work
from makespan.oobleck.simulator import (
    MODES,
    SYSTEMS,
    Costs,
    Defect,
    ModelCosts,
    Systems,
    no_step_because,
    repairs,
    simulate,
    switches,
    unused_nodes,
)
from makespan.oobleck.templates import (
    MemoryLimit,
    cached_templates,
    check_guarantee,
    make_templates,
    read_templates,
    smallest_node_count,
    template_rows,
    template_sizes,
)
from makespan.oobleck.traces import (
    FAILURE_TRACES,
    SPOT_TRACES,
    generate_failures,
    generate_spot,
    read_trace,
)
from makespan.oobleck.trainer import (
    LiveOptions,
    drain_nodes,
    join_run,
    saved_text,
    train_resilient,
)
from makespan.papers.oobleck import PAPER
from makespan.papers.oobleck.simulation import Simulation
from makespan.runtime import LocalLauncher
from makespan.runtime.coordinator import Event
from makespan.units import MS

# --- Live view of a resilient run: a line per change, and a table in a terminal ---------------------

_REFRESH_S = 0.25
_LINE_S = 10.0  # between two lines about progress where no table can be drawn
_PACE_COMMITS = 20  # last iterations that the estimate of the remaining time uses
_CLEAR = "\x1b[2K"
_SAID = {
    "ready": "node {node} is ready, process {pid} on {host}",
    "lost": "node {node} is lost in phase {phase}",
    "hung": "node {node} does not respond and is killed",
    "leaving": "node {node} asks to leave",
    "drain": "asked to drain nodes {nodes}",
    "drain-all": "asked to end the run after this iteration, with a checkpoint",
    "gone": "node {node} has left",
    "freeze": "generation {generation}: {members} stop and drop their groups",
    "failure": "node {node} failed: {error}",
    "resume": "generation {generation} resumes with iteration {step}",
    "checkpoint": "checkpoint after {step} iterations",
    "notice": "{signal}: the run ends after this iteration, with a checkpoint; a second one ends it at once",
    "stopped": "stopped by {signal} after {step} iterations; {saved}",
}


class LiveView:
    """Listener of a coordinator that writes to a stream."""

    def __init__(self, iterations: int, stream: TextIO) -> None:
        self.iterations, self.stream, self.is_terminal = iterations, stream, is_terminal(stream)
        self.begun_s: float | None = None
        self.places: dict[int, tuple[str, int]] = {}
        self.nodes: dict[int, dict[str, Any]] = {}
        self.plan: list[dict[str, Any]] = []
        self.lost: list[int] = []
        self.done, self.loss, self.is_stopped = 0, float("nan"), False
        self._commits: deque[tuple[int, float]] = deque(maxlen=_PACE_COMMITS)
        self._drawn, self._drawn_s, self._written_s = 0, 0.0, 0.0

    def __call__(self, event: Event) -> None:
        """Handle an event, and write its line."""
        self.begun_s = event.time_s if self.begun_s is None else self.begun_s
        node, values = event.node, event.values
        if event.kind == "announce" and node is not None:
            self.places[node] = values["phase"], values["iteration"]
        elif event.kind == "ready" and node is not None:
            self.nodes[node] = dict(values)
        elif event.kind == "plan":
            self.plan, self.lost = list(values["work"]["plan"]), list(values["work"]["lost"])
            self._say(event, self._planned(WORK.validate_python(values["work"])))
        elif event.kind == "commit":
            self.done = values["iteration"] + 1
            reports = values["reports"].values()
            self.loss = next((report["loss"] for report in reports if report), self.loss)
            self._commits.append((self.done, event.time_s))
            if not self.is_terminal and event.time_s - max(self._written_s, self.begun_s) >= _LINE_S:
                self._written_s = event.time_s
                self._say(event, self._progress())
        self.is_stopped |= event.kind == "stopped"
        if event.kind in _SAID:
            phase = self.places.get(-1 if node is None else node, ("start", 0))[0]
            is_end = event.kind == "drain" and not values["nodes"]
            said = _SAID["drain-all" if is_end else event.kind]
            self._say(event, said.format(**{"node": node, "phase": phase, **values}))
        if event.kind in ("lost", "gone") and node is not None:
            self.nodes.pop(node, None)
        if self.is_terminal and time.monotonic() - self._drawn_s > _REFRESH_S:
            self._draw()

    def close(self) -> None:
        """Draw the final table."""
        if self.is_terminal and self.begun_s is not None:
            self._draw()

    def _progress(self) -> str:
        """Return how many iterations are done, the loss, and the time left at the pace of the last ones."""
        text = f"{self.done}/{self.iterations} iterations, loss {self.loss:.4f}"
        if len(self._commits) < 2:
            return text
        (first, since_s), (last, until_s) = self._commits[0], self._commits[-1]
        left_s = (until_s - since_s) / max(last - first, 1) * (self.iterations - self.done)
        return f"{text}, about {clock(left_s)} left"

    def _planned(self, work: Work) -> str:
        """Return the kinds of change, the pipelines, and the number of copies, in one line."""
        plan = work.hybrid_plan
        nodes = plan.nodes_text().split("+")
        pipelines = ", ".join(
            f"{names} with {pipeline.n_microbatches}"
            for names, pipeline in zip(nodes, work.plan, strict=True)
        )
        kinds = " ".join(work.kinds) or "as before"
        copied = f"{len(work.pieces)} piece(s) of layers" if work.pieces else f"{len(work.copies)} layer(s)"
        peers = ", ".join(f"node {node} runs {count}" for node, count in rerouted_counts(plan).items())
        return (
            f"{kinds}: pipelines {pipelines} microbatches; {copied} to copy"
            + (f"; of lost nodes {peers}" if peers else "")
            + (f"; not re-routed: {work.fallback}" if work.fallback else "")
        )

    def _say(self, event: Event, text: str) -> None:
        self._erase()
        self.stream.write(f"{event.time_s - (self.begun_s or 0.0):8.2f} s  {text}\n")
        self.stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A" + f"{_CLEAR}\n" * self._drawn + f"\x1b[{self._drawn}A")
            self._drawn = 0

    def _draw(self) -> None:
        """Draw the table of the nodes over the previous one."""
        lines = [self._progress()]
        for number, pipeline in enumerate(self.plan):
            for stage, node in enumerate(pipeline["nodes"]):
                if node in self.lost:
                    continue
                cuts = pipeline["template"]["stages"][stage :: len(pipeline["nodes"])]
                layers = ",".join(f"{cut['first_layer']}-{cut['end_layer'] - 1}" for cut in cuts)
                layers = f"layers {layers}"
                phase, iteration = self.places.get(node, ("start", 0))
                pid = self.nodes.get(node, {}).get("pid", "")
                lines.append(f"  pipeline {number}  node {node:<4} {pid:<8} {layers:<14} {phase} {iteration}")
        self._erase()
        self.stream.write("".join(f"{_CLEAR}{line}\n" for line in lines))
        self.stream.flush()
        self._drawn, self._drawn_s = len(lines), time.monotonic()


# --- Job options, and ``profile`` -------------------------------------------------------------------

_PARTS = ("model", "optimizer")
_JOB_PARTS = ("model", "model_options", "optimizer_options")  # of which no option is made


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument MODEL and options for the rest of a job, which it gets as ``job``."""

    @field_options(ChainJob, without=_JOB_PARTS, names={"n_microbatches": "microbatches"})
    @click.argument("model")
    @settings_option("model.n_layers=4")
    @wraps(command)
    def wrapped(model: str, settings: tuple[str, ...], **given: Any) -> None:
        of_job = {field.name: given.pop(field.name) for field in fields(ChainJob) if field.name in given}
        parts = read_settings(settings, _PARTS)
        job = ChainJob(model, model_options=parts["model"], optimizer_options=parts["optimizer"], **of_job)
        command(job=job, **given)

    return wrapped


@click.command("profile")
@job_options
@click.option("--replicas", default=2, show_default=True, metavar="N", type=int,
              help="Time the sum of gradients among up to N processes.")  # fmt: skip
@click.option("--repeats", default=5, show_default=True, metavar="N", type=int, help="Timed runs.")
@click.option(
    "--warm-ups", default=2, show_default=True, metavar="N", type=int, help="Untimed runs before them."
)
@launcher_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@json_option
def PROFILE(
    job: ChainJob, replicas: int, repeats: int, warm_ups: int, launcher: str, device: str, output: Path,
    form: str | None,
) -> None:  # fmt: skip
    """Time the layers of MODEL here: a family of small models, or file.py:function of your own.

    Writes the profile from which templates are planned. Forward and backward passes of a microbatch are
    measured layer by layer, and so are the sums of their gradients between processes.
    """
    check_target(output, is_directory=False)
    with ExitStack() as stack:
        # Processes of other machines see no temporary directory of this one.
        run_dir = None
        if launcher == "slurm":
            run_dir = Path(stack.enter_context(TemporaryDirectory(".tmp", "profile-", output.parent)))
        countdown = Countdown("measurements")
        stack.callback(countdown.close)
        profile = profile_chain(
            job, n_replicas=replicas, repeats=repeats, warm_ups=warm_ups,
            launcher=launcher_of(launcher, device), run_dir=run_dir, progress=countdown,
        )  # fmt: skip
    write_profile(profile, output)
    total_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    size = f"{1e3 * total_s:.2f} ms per microbatch of {job.microbatch_size}"
    if form is None:
        say(f"{output}: {profile.n_layers} layers, {size}", err=True)
    values = {"output": output, "n_layers": profile.n_layers, "microbatch_time_s": total_s}
    say_result(values, "", form)


# --- ``run``, ``export``, ``join`` and ``drain`` ----------------------------------------------------

_run_dir = click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))


def _profile(path: Path | None, job: ChainJob) -> ModelProfile:
    """Return the times of the layers from a file, or equal ones without a file."""
    from makespan.oobleck.chain import load_chain  # loads torch

    count = load_chain(job).n_layers
    if path is None:
        return ModelProfile("equal layers", (LayerProfile(1e-3, 2e-3, parameter_bytes=1.0),) * count)
    profile = read_profile(path)
    if profile.n_layers != count:
        raise InputError(f"{path}: {profile.n_layers} layers; expected those of model {job.model}, {count}")
    return profile


@click.command("run")
@job_options
@click.option("--iterations", required=True, type=int, metavar="NUMBER", help="Iterations in total.")
@click.option(
    "--run-dir", default=Path("run"), show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run, which all nodes see.",
)  # fmt: skip
@field_options(
    LiveOptions,
    without={"policy", "resume", "first_sizes"},
    names={
        "n_nodes": "nodes",
        "checkpoint_interval_s": "checkpoint-interval",
        "n_replacements": "replace",
        "hang_s": "hang",
    },
)
@click.option(
    "--policy", default="stop", show_default=True, type=click.Choice(["stop", "degrade"]),
    help="Below (f + 1) n0 nodes: stop with a checkpoint, or continue and survive fewer losses.",
)  # fmt: skip
@click.option(
    "--first", metavar="SIZES", default="", help="Nodes of the pipelines at the start, for example 1,2,2."
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="Layer times (JSON); default: equal times for all layers.",
)
@launcher_options
@json_option
def run_command(
    job: ChainJob, iterations: int, run_dir: Path, first: str, profile: Path | None,
    launcher: str, device: str, form: str | None, **given: Any,
) -> None:  # fmt: skip
    """Train MODEL, a family of small models or file.py:function, through losses of nodes.

    Ctrl-C or SIGTERM ends the run after the current iteration, with a checkpoint; a second one ends it at
    once. The same command resumes from the newest checkpoint. The directory has the newest two, and
    iterations.csv and recoveries.csv, to which every call appends.
    """
    options = LiveOptions(**given)
    if first:
        try:
            options = replace(options, first_sizes=tuple(map(int, first.split(","))))
        except ValueError:
            raise InputError(f"--first {first!r}; expected numbers of nodes, for example 1,2,2") from None
    view = LiveView(iterations, io.StringIO() if is_quiet() else sys.stderr)
    try:
        result = train_resilient(
            job,
            _profile(profile, job),
            iterations,
            run_dir,
            options,
            launcher=launcher_of(launcher, device),
            watch=view,
        )
    except KeyboardInterrupt:
        if not view.is_stopped or is_quiet():  # a second Ctrl-C, or one before the coordinator started
            say(f"stopped; {saved_text(run_dir)}", err=True)
        raise click.Abort from None
    finally:
        view.close()
    table, recoveries = result.iterations, result.recoveries
    values = {"iterations": result.step, "n_now": len(table), "n_plans": len(recoveries), "run_dir": run_dir}
    lines = [f"{result.step} iterations done, {len(table)} of them now; {len(recoveries)} plan(s)"]
    if len(table):
        again, loss = int((table["attempts"] - 1).sum()), table["loss"].iloc[-1]
        values |= {"loss": loss, "n_repeated": again}
        lines.append(f"last loss {loss:.6f}; {again} iteration(s) repeated")
    say_result(values, "\n".join([*lines, f"{run_dir}/iterations.csv, {run_dir}/recoveries.csv"]), form)


@click.command("export")
@click.option(
    "--run-dir",
    default=Path("run"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@json_option
def export_command(run_dir: Path, output: Path, form: str | None) -> None:
    """Write the model of the newest checkpoint as a plain state_dict, with keys as of nn.Sequential."""
    check_target(output, is_directory=False)
    from makespan.oobleck.export import export_model  # loads torch

    written = export_model(run_dir, output)
    say_result({"output": written}, str(written), form)


@click.command("join")
@_run_dir
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda"]),
    help="Device to train on.",
)
@json_option
def join_command(run_dir: Path, device: str, form: str | None) -> None:
    """Join the run of RUN_DIR with one more process, which leaves without loss on SIGTERM."""
    ending = join_run(run_dir, LocalLauncher("cuda" if device == "cuda" else "cpu"))
    say_result({"run_dir": run_dir, "ending": ending}, ending, form)


@click.command("drain")
@_run_dir
@click.argument("nodes", nargs=-1, type=int)
@json_option
def drain_command(run_dir: Path, nodes: tuple[int, ...], form: str | None) -> None:
    """Drain NODES from the run of RUN_DIR after an iteration; without any, end the run with a checkpoint."""
    say_drained(run_dir, "nodes", nodes, drain_nodes(run_dir, nodes), form)


# --- ``plan`` and ``instantiate`` -------------------------------------------------------------------

_FILE = click.Path(path_type=Path)
_MOST_NODES = 10_000  # planning for more takes too long
_COUNT = click.IntRange(1, _MOST_NODES)
_LOST = click.IntRange(0, _MOST_NODES)
_BATCH = click.IntRange(1, 1_000_000)


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--output``, and ``--json``, which changes nothing: the result is JSON without it."""
    to_file = click.option("--output", type=_FILE, help="File to write instead of the standard output.")
    return to_file(json_option(command))


def print_json(values: Any, output: Path | None) -> None:
    """Print plain values as JSON, or write them to a file."""
    text = json_text(values) + "\n"
    if output is None or is_stream(output):
        say(text.removesuffix("\n"))
    else:
        write_text(text, output)


def _range(text: str) -> range:
    """Read LO:HI or one number."""
    low, colon, high = text.partition(":")
    try:
        sizes = range(int(low), int(high if colon else low) + 1)
    except ValueError:
        sizes = range(0)
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_NODES:
        raise InputError(
            f"--nodes {text!r}; expected LO:HI or a number, from 1 to {_MOST_NODES}, for example 3:12"
        )
    return sizes


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_mode = click.option(
    "--mode", default="exact", show_default=True, type=click.Choice(["exact", "dc"]),
    help="Exact search for the least cost, or the published divide and conquer.",
)  # fmt: skip
_gpus = click.option(
    "--gpus", default=1, show_default=True, metavar="N", type=click.IntRange(1, 64), help="GPUs of each node."
)
_nodes_option = click.option(
    "--nodes", metavar="LO:HI", help="Numbers of nodes to find templates for; alternative to --cluster."
)
_cluster = _options(
    click.option("--cluster", metavar="N", type=_COUNT, help="Templates for a job that starts on N nodes."),
    click.option(
        "--f", default=1, show_default=True, metavar="N", type=_LOST, help="Simultaneous losses to survive."
    ),
    click.option(
        "--n0", metavar="N", type=_COUNT, help="Fewest nodes of a pipeline; default: as memory allows."
    ),
    click.option(
        "--template-set", default="full", show_default=True, type=click.Choice(["full", "minimal"]),
        help="All sizes that a pipeline may have, or the fewest sizes that cover every number of nodes.",
    ),
)  # fmt: skip
_memory = _options(
    click.option("--device-memory", metavar="BYTES", type=float, help="Memory of a GPU; default: no limit."),
    click.option(
        "--state-factor", default=6.0, show_default=True, metavar="X", type=float,
        help="Bytes held per byte of parameters.",
    ),
)  # fmt: skip


def _reject_if_given(ctx: click.Context, is_own: bool, of_own: set[str], kinds: tuple[str, str]) -> None:
    """Reject some options where they have no effect; see `reject_others`."""
    others = tuple(str(one.name) for one in ctx.command.params if one.name not in of_own)
    reject_others(ctx, is_own, of_own=of_own, kinds=kinds, shared=others)


@click.command("plan")
@click.option(
    "--latencies", required=True, type=_FILE, metavar="FILE",
    help="Layer profile, or a list of times of forward plus backward pass, in ms (JSON).",
)  # fmt: skip
@_nodes_option
@_cluster
@_gpus
@_mode
@_memory
@click.option("--cache", type=_FILE, metavar="DIR", help="Directory in which templates are cached.")
@output_option
@click.pass_context
def PLAN(
    ctx: click.Context,
    /,
    latencies: Path,
    nodes: str | None,
    cluster: int | None,
    f: int,
    n0: int | None,
    template_set: Any,
    gpus: int,
    mode: Any,
    device_memory: float | None,
    state_factor: float,
    cache: Path | None,
    output: Path | None,
    form: str | None,
) -> None:
    """Find a pipeline template for each number of nodes; prints a list, times in ms.

    With --nodes, numbers of nodes for which no template fits are left out. With --cluster, a job that could
    not use all of its nodes is an error.
    """
    check_target(output, is_directory=False)
    if (nodes is None) == (cluster is None):
        raise InputError("expected exactly one of --nodes LO:HI and --cluster N")
    for is_own, of_own, kinds in (
        (nodes is None, {"f", "n0", "template_set"}, ("--cluster", "--nodes")),
        (device_memory is not None, {"state_factor"}, ("--device-memory", "no limit of memory")),
    ):
        _reject_if_given(ctx, is_own, of_own, kinds)
    profile = read_profile(latencies)
    if device_memory is not None and not any(
        layer.parameter_bytes or layer.activation_bytes for layer in profile.layers
    ):
        raise InputError(f"{latencies}: no layer has bytes; expected mem_required beside --device-memory")
    memory = None if device_memory is None else MemoryLimit(device_memory, state_factor)
    if nodes is not None:
        sizes = _range(nodes)
    else:
        total = cluster or 0
        least = smallest_node_count(profile, memory, total, gpus) if n0 is None else n0
        sizes = template_sizes(
            least, f, total, template_set, most_possible=profile.n_layers // max(gpus.bit_count(), 1)
        )
    countdown = Countdown("templates")
    try:
        if cache is None:
            templates = make_templates(profile, sizes, gpus, mode, memory, progress=countdown)
        else:
            templates = cached_templates(cache, profile, sizes, gpus, mode, memory, progress=countdown)
    finally:
        countdown.close()
    if cluster is not None and (hole := check_guarantee(templates, sizes.start, f, cluster)) is not None:
        raise InputError(
            f"templates exist for {list(templates)} nodes, which cannot use {hole}; choose another --n0"
        )
    print_json(template_rows(templates.values()), output)


@click.command("instantiate")
@click.option(
    "--templates", required=True, type=_FILE, metavar="FILE",
    help="List of templates (JSON); n, S and T alone count as S equal stages.",
)  # fmt: skip
@click.option("--nodes", required=True, metavar="N", type=_COUNT, help="Nodes to use.")
@click.option(
    "--f",
    default=1,
    show_default=True,
    metavar="N",
    type=_LOST,
    help="Simultaneous losses to survive.",
)
@click.option(
    "--microbatches",
    "count",
    metavar="N",
    type=_BATCH,
    help="Microbatches per iteration; alternative to the next two options.",
)
@click.option("--global-batch-size", metavar="N", type=_BATCH, help="Samples per iteration.")
@click.option("--micro-batch-size", metavar="N", type=_BATCH, help="Samples per microbatch.")
@click.option(
    "--batch-mode", default="per_pipeline", show_default=True,
    type=click.Choice(["per_pipeline", "per_template"]),
    help="Microbatches chosen for each pipeline, or equal for all pipelines of a template, as published.",
)  # fmt: skip
@click.option(
    "--estimator", default="1f1b", show_default=True, type=click.Choice(["1f1b", "compat"]),
    help="Estimate of the time of a pipeline: from its schedule, or as published.",
)  # fmt: skip
@click.option(
    "--profile", type=_FILE, metavar="FILE",
    help="Layer profile of the templates; adds the wait for gradients, and times from a simulated schedule.",
)  # fmt: skip
@click.option(
    "--runners-up",
    default=10,
    show_default=True,
    metavar="N",
    type=click.IntRange(0, 1000),
    help="Next best plans to print.",
)
@output_option
def INSTANTIATE(
    templates: Path,
    nodes: int,
    f: int,
    count: int | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    batch_mode: Any,
    estimator: Any,
    profile: Path | None,
    runners_up: int,
    output: Path | None,
    form: str | None,
) -> None:
    """Choose the fastest pipelines that use all nodes; prints JSON, times in ms."""
    check_target(output, is_directory=False)
    sizes = global_batch_size, micro_batch_size
    if (count is None) == (sizes == (None, None)) or (None in sizes and count is None):
        raise InputError("expected --microbatches, or --global-batch-size and --micro-batch-size")
    n_microbatches = microbatches(sizes[0] or 0, sizes[1] or 0) if count is None else count
    times = None if profile is None else read_profile(profile)
    by_size = read_templates(templates)
    choice = choose_plan(by_size, nodes, f, n_microbatches, batch_mode, estimator, times, runners_up)
    values = {
        "plan": _plan_values(choice.best, times),
        "alternatives": [_plan_values(plan, times) for plan in choice.runners_up],
        "counts": {"plans": choice.n_plans, "infeasible": choice.n_infeasible},
    }
    print_json(values, output)


def _plan_values(plan: Instantiation, profile: ModelProfile | None) -> dict[str, Any]:
    pipelines = [
        {
            "n": template.n_nodes,
            "S": template.n_stages,
            "microbatches": count,
            "shown_ms": template.time_s / template.n_stages * count / MS,
        }
        for template, count in zip(plan.templates, plan.n_microbatches, strict=True)
    ]
    shown = {
        "counts": {str(size): count for size, count in plan.counts.items()},
        "n_pipelines": len(pipelines),
        "microbatches": list(plan.n_microbatches),
        "iter_time_ms": plan.iter_time_s / MS,
        "pipelines": pipelines,
    }
    if profile is not None:
        shown["event_time_ms"] = event_time_s(plan.templates, plan.n_microbatches, profile) / MS
    return shown


# --- ``reconfigure`` --------------------------------------------------------------------------------

_NODES = "[2,3]"


@dataclass(frozen=True, slots=True)
class _Asked:
    """Pipelines and the changes of their nodes, as given on the command line."""

    pipelines: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    drained: tuple[int, ...]
    hosts: dict[int, str] | None


def _json(option: str, text: str | None, example: str) -> Any:
    """Read JSON from an option, None if it is not given."""
    try:
        return None if text is None else parse_json(text)
    except ValueError:
        raise InputError(f"{option} {text!r}; expected JSON, for example {example}") from None


def _node_list(option: str, value: Any, example: str = _NODES) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(node) is int for node in value):
        raise InputError(f"{option} {json.dumps(value)}; expected a list of node numbers, like {example}")
    return tuple(value)


def _asked(pipelines: str, lost: str, joined: str, drained: str, hosts: str | None) -> _Asked:
    example = "[[0,1],[2,3,4]]"
    groups = _json("--pipelines", pipelines, example)
    if not isinstance(groups, list):
        raise InputError(f"--pipelines {pipelines!r}; expected a list of lists of nodes, like {example}")
    by_node = _json("--hosts", hosts, '{"0":"a","1":"b"}')
    if by_node is not None and not (isinstance(by_node, dict) and all(node.isdecimal() for node in by_node)):
        raise InputError(f'--hosts {hosts!r}; expected host by node, like {{"0":"a","1":"b"}}')
    return _Asked(
        tuple(_node_list("--pipelines", group, example) for group in groups),
        _node_list("--lost", _json("--lost", lost, _NODES)),
        _node_list("--joined", _json("--joined", joined, _NODES)),
        _node_list("--drained", _json("--drained", drained, _NODES)),
        None if by_node is None else {int(node): str(host) for node, host in by_node.items()},
    )


@click.command("reconfigure")
@click.option("--pipelines", required=True, metavar="JSON", help="Nodes of each pipeline: [[0,1],[2,3,4]].")
@click.option("--lost", default="[]", metavar="JSON", help="Nodes that are lost together with their state.")
@click.option("--joined", default="[]", metavar="JSON", help="Nodes that join.")
@click.option("--drained", default="[]", metavar="JSON", help="Nodes that leave and can still send.")
@click.option(
    "--templates",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="Templates (JSON), as written by the command plan.",
)
@click.option("--n0", required=True, metavar="N", type=click.IntRange(1), help="Fewest nodes of a pipeline.")
@click.option(
    "--f",
    default=1,
    show_default=True,
    metavar="N",
    type=click.IntRange(0),
    help="Simultaneous losses to survive.",
)
@click.option(
    "--microbatches",
    metavar="N",
    type=click.IntRange(1),
    help="Microbatches per iteration; default: 4 per node.",
)
@click.option("--hosts", metavar="JSON", help='Machine of each node: {"0":"a","1":"b"}.')
@click.option(
    "--policy", default="stop", show_default=True, type=click.Choice(["stop", "degrade"]),
    help="Below (f + 1) n0 nodes: stop, or continue with a smaller f.",
)  # fmt: skip
@click.option("--profile", type=_FILE, metavar="FILE", help="Layer profile; default: layers of equal size.")
@click.option(
    "--state-factor", default=3.0, show_default=True, metavar="X", type=click.FloatRange(0),
    help="Bytes sent per byte of parameters.",
)  # fmt: skip
@output_option
@click.pass_context
def RECONFIGURE(
    ctx: click.Context,
    /,
    pipelines: str,
    lost: str,
    joined: str,
    drained: str,
    templates: Path,
    n0: int,
    f: int,
    microbatches: int | None,
    hosts: str | None,
    policy: Any,
    profile: Path | None,
    state_factor: float,
    output: Path | None,
    form: str | None,
) -> None:
    """Find the pipelines that continue, and the state to copy between nodes; prints JSON, times in ms.

    The "outcome" is "state-lost" if no node has the state of some layer; the pipelines are then those to
    load a checkpoint into. Below (f + 1) n0 nodes it is "insufficient-nodes".
    """
    check_target(output, is_directory=False)
    asked = _asked(pipelines, lost, joined, drained, hosts)
    by_size = read_templates(templates)
    _reject_if_given(ctx, profile is not None, {"state_factor"}, ("--profile", "layers of equal size"))
    # The state of each layer: equal sizes without a profile, none if templates do not say their layers.
    layer_bytes: list[int] | None = None
    layer_counts = {template.n_layers for template in by_size.values()}
    has_bytes = False
    if profile is not None:
        sizes = [layer.parameter_bytes for layer in read_profile(profile).layers]
        has_bytes = any(sizes)
        layer_bytes = [round(size * state_factor) for size in sizes] if has_bytes else [1] * len(sizes)
        if not has_bytes:
            say(f"{profile}: no layer has bytes of parameters; they count as equal in size", err=True)
    elif len(layer_counts) == 1:
        layer_bytes = [1] * layer_counts.pop()
    n_nodes = sum(map(len, asked.pipelines)) + len(asked.joined)
    n_microbatches = 4 * n_nodes if microbatches is None else microbatches
    if missing := sorted({len(nodes) for nodes in asked.pipelines} - set(by_size)):
        raise InputError(f"pipelines of {missing} nodes; templates exist for {list(by_size)}")
    # The microbatches of the pipelines before do not matter.
    before = [Pipeline(nodes, by_size[len(nodes)], 1) for nodes in asked.pipelines]
    values: dict[str, Any]
    try:
        change = reconfigure(
            before, asked.lost, asked.joined, by_size, f, n0, n_microbatches,
            layer_bytes=layer_bytes, drained=asked.drained, hosts=asked.hosts, policy=policy,
        )  # fmt: skip
    except StateLost as error:
        # Show the groups that would train together if a checkpoint gave them the state.
        values = {"outcome": "state-lost", "lost_layers": error.layers, "pipelines": [], "kinds": []}
        with suppress(InsufficientNodes):
            groups = regroup(asked.pipelines, {*asked.lost, *asked.drained}, n0)
            values |= {"pipelines": groups.groups, "kinds": groups.kinds}
    except InsufficientNodes as error:
        values = {"outcome": "insufficient-nodes", "n_nodes": error.n_nodes, "n_needed": error.n_needed}
    else:
        copies = None if layer_bytes is None else change.copies
        values = _new_plan(change, copies, has_bytes=has_bytes)
    print_json(values, output)


def _new_plan(change: Reconfiguration, copies: Sequence[Copy] | None, *, has_bytes: bool) -> dict[str, Any]:
    """Return the new plan in plain values; bytes are null if the sizes of layers are unknown."""
    plan = change.plan.pipelines
    shares = [pipeline.n_microbatches for pipeline in plan]
    return {
        "outcome": "go-on",
        "action": change.action,
        "kinds": change.kinds,
        "pipelines": [pipeline.nodes for pipeline in plan],
        "microbatches": shares,
        "layers_per_stage": [[len(stage.layers) for stage in each.template.stages] for each in plan],
        "iter_time_ms": estimated_time_s([each.template for each in plan], shares, "1f1b") / MS,
        "f": change.f,
        "waiting": change.waiting,
        "layers_on_one_host": change.exposed,
        "copies": None
        if copies is None
        else [
            {
                "layer": copy.layer,
                "slot": copy.slot,
                "src": copy.src.node,
                "dst": copy.dst.node,
                "src_gpu": copy.src.number,
                "dst_gpu": copy.dst.number,
                "bytes": copy.n_bytes if has_bytes else None,
            }
            for copy in copies
        ],
        "copied_bytes": change.copies_bytes if has_bytes else None,
    }


# --- ``simulate`` -----------------------------------------------------------------------------------

_CELLS = Path("config/published/oobleck_throughput.csv")
_GENERATED = (*FAILURE_TRACES, *SPOT_TRACES)
_NUMBERS = {field.name: field.type for field in fields(ModelCosts) if field.type in (int, float)}


def _configured(path: Path | None) -> dict[str, Any]:
    """Return the options of simulations, the defaults or those of a configuration file."""
    if path is None:
        return Simulation().systems()
    block = read_yaml(path, "the configuration of the paper", ConfigError)
    try:
        return Simulation.model_validate_json(json.dumps(block["oobleck"]["simulation"])).systems()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("oobleck", "simulation", *first["loc"])))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: no block oobleck.simulation; expected a file with this block") from None


_COSTS_OF = {
    "bamboo": {"samples_per_step", "local_rebalance_s"},
    "varuna": {"samples_per_step", "checkpoint_s", "restart_s"},
    "oobleck": {"samples_per_step", "regroup_s"},
}  # those that have an effect, by system


def _model(
    system: str, model: str, texts: tuple[str, ...], configured: list[dict[str, Any]]
) -> tuple[dict[str, Any], set[str]]:
    """Return the costs of a model, those of the configuration or given ones, and the names of the latter."""
    costs: dict[str, Any] = {"name": model, "falls_back_on_spot": False}
    costs |= next((entry for entry in configured if entry["name"] == model), {})
    given: set[str] = set()
    for text in texts:
        name, _, value = text.partition("=")
        if name not in _NUMBERS:
            raise InputError(f"--cost {text!r}; expected NAME=NUMBER with a name of {', '.join(_NUMBERS)}")
        is_whole = _NUMBERS[name] is int
        try:
            number = int(value) if is_whole else float(value)
        except ValueError:
            number = -1
        if not 0 <= number < float("inf") or (is_whole and number < 1):
            accepted = "a whole number of 1 or more" if is_whole else "a number in s, 0 or more"
            raise InputError(f"--cost {text!r}; expected {accepted}")
        costs[name] = number
        given.add(name)
    missing = sorted(_COSTS_OF[system] - set(costs))
    if missing:
        known = ", ".join(entry["name"] for entry in configured)
        raise InputError(
            f"model {model!r} is not in the configuration ({known}); give its costs: "
            + " ".join(f"--cost {name}=..." for name in missing)
        )
    return dict.fromkeys(_NUMBERS, 0) | costs, given


def _check_simulated(
    ctx: click.Context, system: str, trace_name: str, *, falls_back: bool, no_ckpt: bool, k: int | None
) -> None:
    """Reject options of other systems, and of traces of another kind."""
    for is_own, of_own, kinds in (
        (system == "varuna", {"fallback", "no_ckpt", "k"}, ("Varuna", system.capitalize())),
        (trace_name in _GENERATED, {"seed"}, ("generated traces", f"the file {trace_name}")),
    ):
        _reject_if_given(ctx, is_own, of_own, kinds)
    if k is not None and no_ckpt and not falls_back:
        raise InputError("--k goes with checkpoints that take time or that a restart falls back on")


def _n_stages(given: int | None, config: Path | None, costs: Costs) -> int:
    """Return the stages of a pipeline; by default at most the fewest nodes that have throughput."""
    if given is not None or config is not None:
        return given or costs.n_stages
    fewest = min((n_nodes for n_nodes, rate in costs.throughput.items() if rate > 0), default=costs.n_stages)
    if fewest < costs.n_stages:
        say(
            f"pipelines have {fewest} stages, not {costs.n_stages}: the table has throughput on {fewest} "
            "nodes; --stages gives another number",
            err=True,
        )
    return min(fewest, costs.n_stages)


def _say_unused(system: str, given: set[str], costs: Costs, switched: Collection[Defect]) -> None:
    """Say which of the given costs and defects have no effect on this system, or less than all."""
    if unused := sorted(given - _COSTS_OF[system]):
        named = ", ".join(f"--cost {name}" for name in unused)
        say(f"{named}: without effect on {system.capitalize()}", err=True)
    if system == "varuna" and "restart_s" in given and costs.restart_by_nodes_ms:
        say("--cost restart_s: of the first start alone; the table has restart times by nodes", err=True)
    if system == "bamboo" and not all((costs.plain_throughput or {0: 0}).values()):
        say("redundant work counts as useful where the table has no throughput of varuna", err=True)
    if Defect.D9 in switched:
        say("--defects D9: without effect here, it is a defect of a figure", err=True)


@click.command("simulate")
@click.option(
    "--trace", "trace_name", required=True, metavar="FILE|NAME",
    help=f"File with time in ms, add or remove, and node; or a generated trace: {', '.join(_GENERATED)}.",
)  # fmt: skip
@click.option("--seed", default=1, show_default=True, type=SEED, help="Seed of a generated trace.")
@click.option("--system", required=True, type=click.Choice(SYSTEMS), help="System to simulate.")
@click.option("--model", required=True, metavar="NAME", help="Name of the model in the table of throughput.")
@click.option(
    "--mode", default="fixed", show_default=True, type=click.Choice(MODES),
    help="Simulator as released (compat), or with its defects repaired (fixed).",
)  # fmt: skip
@click.option(
    "--defects",
    default="",
    metavar="D1,D4,...",
    help="Defects to repair in mode compat, or to keep in mode fixed.",
)
@click.option(
    "--fallback", default="on", show_default=True, type=click.Choice(["on", "off"]),
    help="Varuna: a restart loses the steps since the last checkpoint, or none.",
)  # fmt: skip
@click.option("--no-ckpt", is_flag=True, help="Varuna: checkpoints take no time.")
@click.option("--k", type=click.IntRange(1), help="Varuna: steps between checkpoints.")
@click.option(
    "--stages", metavar="N", type=_COUNT,
    help="Stages of a pipeline; default: that of --config, else 12, or the fewest nodes with throughput.",
)  # fmt: skip
@click.option(
    "--throughput", "cells", default=_CELLS, show_default=True, type=click.Path(path_type=Path),
    help="Throughput by model, system and nodes; columns as in that file.",
)  # fmt: skip
@click.option(
    "--config", type=click.Path(path_type=Path),
    help="Configuration with the costs of the models.",
)  # fmt: skip
@click.option(
    "--cost", "given", multiple=True, metavar="NAME=NUMBER",
    help=f"A cost of the model instead of the configured one: {', '.join(_NUMBERS)}. May be repeated.",
)  # fmt: skip
@json_option
@click.pass_context
def simulate_command(
    ctx: click.Context,
    /,
    trace_name: str,
    seed: int,
    system: str,
    model: str,
    mode: str,
    defects: str,
    fallback: str,
    no_ckpt: bool,
    k: int | None,
    stages: int | None,
    cells: Path,
    config: Path | None,
    given: tuple[str, ...],
    form: str | None,
) -> None:
    """Simulate one system on one trace of nodes, with the costs of the default configuration."""
    falls_back, switched = fallback == "on", switches(defects)
    _check_simulated(ctx, system, trace_name, falls_back=falls_back, no_ckpt=no_ckpt, k=k)
    configured = _configured(config)
    entry, own = _model(system, model, given, configured["models"])
    check_default(cells, _CELLS, "go to a checkout of makespan, or give a table of your own, --throughput")
    systems = Systems(PAPER.read_published("throughput", cells), [entry], configured["assumptions"])
    costs = systems.costs(
        system, model, falls_back=falls_back, checkpoint_every=k, charges_checkpoints=not no_ckpt
    )
    costs = replace(costs, n_stages=_n_stages(stages, config, costs))
    if trace_name in FAILURE_TRACES:
        trace = generate_failures(trace_name, seed)
    elif trace_name in SPOT_TRACES:
        trace = generate_spot(trace_name, seed)
    elif Path(trace_name).exists():
        trace = read_trace(trace_name, Path(trace_name).stem)
    else:
        raise unknown_name("trace, neither a file nor", trace_name, _GENERATED)
    _say_unused(system, own, costs, switched)
    repaired = repairs(mode, switched)
    outcome = simulate(system, trace, costs, repaired)
    if beyond := unused_nodes(trace, costs):
        say(f"{beyond} nodes or fewer are idle: the table of throughput has no entry for so many", err=True)
    if outcome.is_feasible and not outcome.n_steps:
        say(f"no step is completed: {no_step_because(trace, costs, repaired)}", err=True)
    if form is not None:
        series = [
            [round(start, 3), round(end, 3), samples] for start, end, samples in outcome.steps().tolist()
        ]
        values = {
            "trace": trace_name,
            "system": system,
            "model": model,
            "mode": mode,
            "defects": defects,
            "feasible": outcome.is_feasible,
            "throughput_samples_per_s": outcome.throughput_samples_per_s,
            "n_steps": outcome.n_steps,
            "n_failures": outcome.n_failures,
            "times_s": {name: round(time_s, 3) for name, time_s in outcome.times_s.items()},
            "steps": series,
        }
        say(json_text(values, indent=None))
        return
    if not outcome.is_feasible:
        say(f"{model} does not fit {system}: no throughput on any number of nodes")
        return
    say(
        f"{outcome.throughput_samples_per_s:.4g} samples/s, {outcome.n_steps} steps, "
        f"{outcome.n_failures} nodes lost"
    )
    for name, time_s in outcome.times_s.items():
        if time_s:
            say(f"  {name:<11}{time_s:>14.3f} s")


@click.group("oobleck", help=__doc__)
def COMMANDS() -> None:
    """Command group."""


for command in (
    PROFILE, PLAN, INSTANTIATE, RECONFIGURE, run_command, join_command, drain_command, export_command,
    simulate_command,
):  # fmt: skip
    COMMANDS.add_command(command)
