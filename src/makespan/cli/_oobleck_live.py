"""``makespan oobleck run|join|drain``: train through losses, bring nodes in, let nodes go."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from makespan.cli._oobleck_job import job_options
from makespan.cli._output import say
from makespan.errors import InputError
from makespan.oobleck._joining import drain_nodes, join_run
from makespan.oobleck._live import LiveOptions, LiveResult, saved_text, train_resilient
from makespan.oobleck._view import LiveView
from makespan.oobleck.planning import LayerProfile, ModelProfile, read_profile
from makespan.oobleck.runtime import ChainJob
from makespan.runtime import LocalLauncher
from makespan.verbs import launcher_of, launcher_options

__all__ = ["drain_command", "export_command", "join_command", "run_command"]

_run_dir = click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))


def _profile(path: Path | None, job: ChainJob) -> ModelProfile:
    """Return times of the layers, of a file or, without one, the same for all."""
    from makespan.oobleck.runtime import load_chain  # loads torch

    count = load_chain(job).n_layers
    if path is None:
        return ModelProfile("equal layers", (LayerProfile(1e-3, 2e-3, parameter_bytes=1.0),) * count)
    found = read_profile(path)
    if found.n_layers != count:
        raise InputError(f"{path}: {found.n_layers} layers; accepted: those of model {job.model}, {count}")
    return found


@click.command("run")
@job_options
@click.option("--iterations", required=True, type=int, metavar="NUMBER", help="Iterations in all.")
@click.option(
    "--run-dir", default=Path("run"), show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run, which all nodes see.",
)  # fmt: skip
@click.option("--nodes", required=True, type=int, metavar="N", help="Processes at the start, one a node.")
@click.option("--f", default=1, show_default=True, metavar="N", help="Losses at once that are survived.")
@click.option("--n0", default=1, show_default=True, metavar="N", help="Fewest nodes of a pipeline.")
@click.option(
    "--profile", type=click.Path(path_type=Path), help="Layer times (JSON); without, all are equal."
)
@click.option("--template-set", default="full", show_default=True, type=click.Choice(["full", "minimal"]))
@click.option(
    "--policy", default="stop", show_default=True, type=click.Choice(["stop", "degrade"]),
    help="Below (f + 1) n0 nodes: stop with a checkpoint, or go on and survive less.",
)  # fmt: skip
@click.option(
    "--first", metavar="SIZES", default="", help="Nodes of the pipelines at the start, for example 1,2,2."
)
@click.option(
    "--checkpoint-every",
    default=0,
    show_default=True,
    metavar="N",
    help="Iterations between checkpoints; 0 for none by count.",
)
@click.option(
    "--checkpoint-interval",
    "checkpoint_interval_s",
    default=600.0,
    show_default=True,
    metavar="S",
    help="Seconds between checkpoints; 0 for none by time. One is written at the end anyway.",
)
@click.option("--replace", "n_replacements", default=0, show_default=True, metavar="N",
              help="Processes that are started for lost ones.")  # fmt: skip
@click.option(
    "--hang", "hang_s", default=10.0, show_default=True, metavar="S", help="Silence of a hung process."
)
@launcher_options
def run_command(
    job: ChainJob, iterations: int, run_dir: Path, nodes: int, first: str, profile: Path | None,
    launcher: str, device: str, **given: Any,
) -> None:  # fmt: skip
    """Train MODEL, a family of small models or file.py:function, through the loss of nodes.

    Ctrl-C or SIGTERM ends the run after the running iteration, with a checkpoint; a second one at once. The
    same command resumes from the newest checkpoint. The directory has the newest two, and iterations.csv and
    recoveries.csv, to which every call appends.
    """
    options = LiveOptions(nodes, **given)
    if first:
        try:
            options = replace(options, first_sizes=tuple(map(int, first.split(","))))
        except ValueError:
            raise InputError(f"--first {first!r}; accepted: numbers of nodes, for example 1,2,2") from None
    view = LiveView(iterations, sys.stderr)
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
        if not view.is_stopped:  # a second Ctrl-C, or one before anything was started
            say(f"stopped; {saved_text(run_dir)}", err=True)
        raise click.Abort from None
    finally:
        view.close()
    say(_told(result, run_dir))


def _told(result: LiveResult, run_dir: Path) -> str:
    """Say in a few lines what came of a run."""
    table, recoveries = result.iterations, result.recoveries
    lines = [f"{result.step} iterations done, {len(table)} of them now; {len(recoveries)} plan(s)"]
    if len(table):
        again = int((table["attempts"] - 1).sum())
        lines.append(f"last loss {table['loss'].iloc[-1]:.6f}; {again} iteration(s) done again")
    return "\n".join([*lines, f"{run_dir}/iterations.csv, {run_dir}/recoveries.csv"])


@click.command("export")
@click.option(
    "--run-dir",
    default=Path("run"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
def export_command(run_dir: Path, output: Path) -> None:
    """Write the model of the newest checkpoint as a plain state_dict, with keys as of nn.Sequential."""
    from makespan.oobleck.runtime import export_model  # loads torch

    say(str(export_model(run_dir, output)))


@click.command("join")
@_run_dir
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def join_command(run_dir: Path, device: str) -> None:
    """Take part in the run of RUN_DIR with one more process; SIGTERM lets it leave without loss."""
    say(join_run(run_dir, LocalLauncher("cuda" if device == "cuda" else "cpu")))


@click.command("drain")
@_run_dir
@click.argument("nodes", nargs=-1, type=int)
def drain_command(run_dir: Path, nodes: tuple[int, ...]) -> None:
    """Let NODES leave the run of RUN_DIR after an iteration; without any it ends with a checkpoint."""
    drain_nodes(run_dir, nodes)
