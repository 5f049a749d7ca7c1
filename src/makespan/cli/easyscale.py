"""Train elastically: run a job, ask a run for other processes, export its model."""

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

from makespan.cli.options import launcher_of, launcher_options, read_settings, say, settings_option
from makespan.easyscale.job import ElasticJob
from makespan.easyscale.trainer import ElasticTrainer, RunOptions, export_model, request_change
from makespan.errors import InputError
from makespan.runtime import latest_checkpoint

_HELP = {
    "optimizer": "sgd, adam, adamw, or a function of the model.",
    "data": "Function that returns a data set; a stand-in has its own.",
    "loss": "Function of outputs and targets; a stand-in has its own.",
    "lr_scheduler": "step, or a function of the optimizer.",
    "after_reduce": "Function of the model, called before the optimizer.",
    "scaler": "grad, or a function that returns a scaler of losses.",
    "collate": "Function that joins samples to a batch.",
    "n_logical_workers": "Logical workers, for which the job is written.",
    "micro_batch_size": "Samples of a batch of each.",
    "determinism": "none, D0, D1, D0+D2, D1+D2, or auto: by a scan of the model.",
    "seed": "Of model, order of samples, loaders and logical workers.",
    "n_loaders": "Loaders of each logical worker.",
    "buffers": "per_rank, or rank0: those of the first for all.",
    "bucket_cap_bytes": "Size of a bucket of gradients.",
    "scaling": "Gradients are divided before (pre) or after (post) the sum.",
    "fold": "Order of the sum: auto, ring or rank.",
    "shuffle": "Deal samples in a new order each epoch.",
    "drop_last_samples": "Leave out samples that do not go round.",
    "drop_last_batch": "Leave out a last batch of less than full size.",
    "checkpoint_every": "Mini-batches between checkpoints; 0 for none by their number.",
    "checkpoint_every_s": "Seconds between checkpoints; 0 for none by the clock.",
    "hash_every": "Mini-batches between hashes; 0 for none.",
    "loader_processes": "Processes that load samples for each process.",
    "prefetch": "Batches that they are ahead.",
    "max_restarts": "Starts in a row after a process was killed.",
    "mixes_devices": "Allow several types of device at a time without D2.",
    "resume": "Go on with what the directory has, or refuse it.",
}
_NUMBERS = ("bucket_cap_bytes",)
_run_dir = click.option(
    "--run-dir", default=Path("run"), show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run.",
)  # fmt: skip
_mapping = click.option("--mapping", metavar="RANKS", help="Who hosts whom, for example 0,1/2/3.")
_devices = click.option("--devices", metavar="NAMES", help="Device of each process, for example A,B,B.")


def _options(kind: type[Any], left_out: set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for each field of a dataclass."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed([field for field in fields(kind) if field.name not in left_out]):
            flag, default = "--" + field.name.replace("_", "-"), field.default
            shown: dict[str, Any] = {"default": default, "show_default": default is not None}
            if isinstance(default, bool):
                flag = f"{flag}/--no-{flag.removeprefix('--')}"
            elif isinstance(default, int | float) or field.name in _NUMBERS:
                shown |= {"type": float if isinstance(default, float) else int, "metavar": "NUMBER"}
            else:
                shown |= {"metavar": "NAME"}
            command = click.option(flag, help=_HELP[field.name], **shown)(command)
        return command

    return add


@click.group("easyscale", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


@COMMANDS.command("run")
@click.argument("model")
@click.option("--steps", required=True, type=int, metavar="NUMBER", help="Mini-batches in all.")
@_run_dir
@_mapping
@_devices
@settings_option("optimizer.lr=0.1")
@_options(ElasticJob, {"model", "options"})
@_options(RunOptions, {"ends_on_signals", "launcher", "on_progress"})
@click.option(
    "--stall-timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="When no process finishes a micro-batch for so long, all start again from the last checkpoint."
    "  [default: 300, on Slurm 1800]",
)
@launcher_options
def _run(
    model: str,
    steps: int,
    run_dir: Path,
    mapping: str | None,
    devices: str | None,
    settings: tuple[str, ...],
    stall_timeout: float | None,
    launcher: str,
    device: str,
    **given: Any,
) -> None:
    """Train MODEL, a stand-in or file.py:function, until so many mini-batches are done.

    The same command goes on after a kill, a suspension, or with other processes; no bit depends on them. The
    directory has steps.csv, reconfigurations.csv and the newest two checkpoints. Ctrl-C or SIGTERM ends it
    after the mini-batch that goes on, with a checkpoint; a second one at once. There is a checkpoint every
    ten minutes, too.
    """
    options = {field.name: given.pop(field.name) for field in fields(RunOptions) if field.name in given}
    options["ends_on_signals"] = True
    # An option without a value leaves the field to its default; other fields have to be given.
    defaults = {field.name: field.default for field in fields(ElasticJob)}
    of_job = {
        name: value
        for name, value in given.items()
        if not (value is None and defaults[name] in (None, MISSING))
    }
    trainer = ElasticTrainer(model, run_dir=run_dir, options=read_settings(settings), **of_job)
    chosen = launcher_of(launcher, device, stall_timeout)
    try:
        result = trainer.run(steps, mapping, devices, launcher=chosen, on_progress=_shown(steps), **options)
    except KeyboardInterrupt:
        saved = latest_checkpoint(trainer.folder.checkpoints)
        done = "no mini-batch is saved" if saved is None else f"{saved.step} mini-batches are saved"
        say(f"stopped; {done}; the same command goes on from {run_dir}", err=True)
        raise click.Abort from None
    if sys.stderr.isatty():
        say("", err=True)
    lines = [f"{result.state} after {result.step} mini-batches and {len(result.reconfigurations)} stage(s)"]
    if len(result.steps):
        last = result.steps[result.steps["step"] == result.steps["step"].max()]
        lines.append(
            f"mean loss {last['loss'].mean():.6f}, parameters {last['parameter_sha'].iloc[0] or 'not hashed'}"
        )
    lines += [f"device {name}: {rate:.1f} micro-batches/s" for name, rate in result.rates_per_s.items()]
    say("\n".join([*lines, f"{run_dir}/steps.csv, {run_dir}/reconfigurations.csv"]))


def _shown(steps: int) -> Callable[[int, float], object] | None:
    """Return a function that shows the progress in one line of a terminal; None without a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(step: int, loss: float) -> None:
        sys.stderr.write(f"\r{step}/{steps} mini-batches, loss {loss:.4f} ")
        sys.stderr.flush()

    return show


@COMMANDS.command("request")
@_run_dir
@_mapping
@_devices
@click.option("--suspend", is_flag=True, help="Run on no device until the next call of run.")
def _request(run_dir: Path, mapping: str | None, devices: str | None, suspend: bool) -> None:
    """Ask a run that is going on for other processes, from the next mini-batch on."""
    if suspend and (mapping is not None or devices is not None):
        raise InputError("--suspend beside --mapping or --devices; expected one of them")
    if not suspend and mapping is None and devices is None:
        raise InputError("nothing is asked for; expected --mapping, --devices or --suspend")
    request_change(run_dir, mapping, "" if suspend else devices)


@COMMANDS.command("export")
@_run_dir
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
def _export(run_dir: Path, output: Path) -> None:
    """Write the model of the newest checkpoint as a plain state_dict."""
    say(str(export_model(run_dir, output)))
