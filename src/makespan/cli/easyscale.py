"""Train elastically: run a job, let processes join and leave it, export its model."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from makespan.cli.fields import field_options
from makespan.cli.options import (
    check_target,
    json_option,
    launcher_of,
    launcher_options,
    read_settings,
    say,
    say_drained,
    say_result,
    settings_option,
)
from makespan.cli.progress import Countdown
from makespan.easyscale.job import ElasticJob, RunOptions
from makespan.errors import InputError
from makespan.runtime import latest_checkpoint

_run_dir = click.option(
    "--run-dir", default=Path("run"), show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run.",
)  # fmt: skip
_mapping = click.option(
    "--mapping", metavar="RANKS", help="Logical workers of each process, for example 0,1/2/3."
)
_devices = click.option("--devices", metavar="NAMES", help="Device of each process, for example A,B,B.")


@click.group("easyscale", help=__doc__)
def COMMANDS() -> None:
    """Command group."""


@COMMANDS.command("run")
@click.argument("model", required=False)
@click.option("--steps", required=True, type=int, metavar="NUMBER", help="Mini-batches in total.")
@_run_dir
@_mapping
@_devices
@settings_option("optimizer.lr=0.1")
@field_options(ElasticJob, without={"model", "options"})
@field_options(
    RunOptions,
    without={"ends_on_signals", "launcher", "progress_s", "on_progress", "on_regroup", "on_event"},
    names={"hang_s": "hang", "n_replacements": "replace"},
)
@click.option(
    "--stall-timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Restart all processes from the last checkpoint when none finishes a micro-batch for this long."
    "  [default: 300, on Slurm 1800]",
)
@launcher_options
@json_option
def _run(
    model: str | None,
    steps: int,
    run_dir: Path,
    mapping: str | None,
    devices: str | None,
    settings: tuple[str, ...],
    stall_timeout: float | None,
    launcher: str,
    device: str,
    form: str | None,
    **given: Any,
) -> None:
    """Train MODEL, a stand-in or file.py:function, up to a number of mini-batches.

    With --loop file.py:function there is no MODEL: the function builds everything and has the training loop.
    The same command resumes the run after a kill or a suspension, also with other processes; the result has
    the same bits. The directory has steps.csv, reconfigurations.csv and the newest two checkpoints, of which
    one is written every ten minutes. Ctrl-C or SIGTERM ends the run after the current mini-batch, with a
    checkpoint; a second one ends it at once.
    """
    from makespan.easyscale.trainer import ElasticTrainer  # loads pandas, which --help can do without

    options = {field.name: given.pop(field.name) for field in fields(RunOptions) if field.name in given}
    options["ends_on_signals"] = True
    trainer = ElasticTrainer(model, run_dir=run_dir, options=read_settings(settings), **given)
    options["launcher"] = launcher_of(launcher, device, stall_timeout)
    countdown = Countdown("mini-batches")

    def show(step: int, loss: float) -> None:
        countdown(step, steps, f"loss {loss:.4f}")

    try:
        result = trainer.run(steps, mapping, devices, on_progress=show, **options)
    except KeyboardInterrupt:
        countdown.close()
        saved = latest_checkpoint(trainer.folder.checkpoints)
        done = "no mini-batch is saved" if saved is None else f"{saved.step} mini-batches are saved"
        say(f"stopped; {done}; the same command resumes the run in {run_dir}", err=True)
        raise click.Abort from None
    finally:
        countdown.close()
    values: dict[str, Any] = {
        "state": result.state,
        "steps": result.step,
        "n_stages": len(result.reconfigurations),
        "micro_batches_per_s": dict(result.rates_per_s),
        "run_dir": run_dir,
    }
    lines = [f"{result.state} after {result.step} mini-batches and {len(result.reconfigurations)} stage(s)"]
    if len(result.steps):
        last = result.steps[result.steps["step"] == result.steps["step"].max()]
        values |= {"loss": last["loss"].mean(), "parameter_sha": last["parameter_sha"].iloc[0] or None}
        lines.append(
            f"mean loss {last['loss'].mean():.6f}, parameters {last['parameter_sha'].iloc[0] or 'not hashed'}"
        )
    lines += [f"device {name}: {rate:.1f} micro-batches/s" for name, rate in result.rates_per_s.items()]
    say_result(values, "\n".join([*lines, f"{run_dir}/steps.csv, {run_dir}/reconfigurations.csv"]), form)


@COMMANDS.command("request")
@_run_dir
@_mapping
@_devices
@click.option("--suspend", is_flag=True, help="Release all devices until the next call of run.")
@json_option
def _request(
    run_dir: Path, mapping: str | None, devices: str | None, suspend: bool, form: str | None
) -> None:
    """Request other processes for an active run, from the next mini-batch on."""
    from makespan.easyscale.trainer import request_change

    if suspend and (mapping is not None or devices is not None):
        raise InputError("--suspend together with --mapping or --devices; expected only one of them")
    if not suspend and mapping is None and devices is None:
        raise InputError("no change requested; expected --mapping, --devices or --suspend")
    request_change(run_dir, mapping, "" if suspend else devices)
    asked = {"run_dir": run_dir, "mapping": mapping, "devices": devices, "is_suspended": suspend}
    say_result(asked, "", form)


@COMMANDS.command("join")
@_run_dir
@launcher_options
@json_option
def _join(run_dir: Path, launcher: str, device: str, form: str | None) -> None:
    """Join a run with one more process, which leaves on SIGTERM or Ctrl-C.

    It enters between two mini-batches and copies its state from the other processes. The run must be active
    on this machine or in a job of Slurm, and have been started with --survives.
    """
    from makespan.easyscale.trainer import join_run

    ending = join_run(run_dir, launcher_of(launcher, device))
    say_result({"run_dir": run_dir, "ending": ending}, ending, form)


@COMMANDS.command("drain")
@_run_dir
@click.argument("processes", nargs=-1, required=True, type=int)
@json_option
def _drain(run_dir: Path, processes: tuple[int, ...], form: str | None) -> None:
    """Let PROCESSES leave a run after the mini-batch that runs.

    The others continue from memory, and no loss is counted. SIGTERM to a process has the same effect. The
    numbers are those of the start, from 0 on, then those of processes that joined, in order. The run must
    have been started with --survives.
    """
    from makespan.easyscale.trainer import drain_processes

    say_drained(run_dir, "processes", processes, drain_processes(run_dir, processes), form)


@COMMANDS.command("export")
@_run_dir
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@json_option
def _export(run_dir: Path, output: Path, form: str | None) -> None:
    """Write the model of the newest checkpoint as a plain state_dict."""
    check_target(output, is_directory=False)
    from makespan.easyscale.trainer import export_model

    written = export_model(run_dir, output)
    say_result({"output": written}, str(written), form)
