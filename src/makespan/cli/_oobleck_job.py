"""What is trained, as options of commands, and the command that times its layers."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from makespan.cli._output import say
from makespan.files import check_target
from makespan.oobleck.planning import write_profile
from makespan.oobleck.runtime import ChainJob, profile_chain
from makespan.verbs import launcher_of, launcher_options, read_settings, settings_option

__all__ = ["PROFILE", "job_options"]

_HELP = {
    "n_microbatches": "Microbatches of an iteration.",
    "microbatch_size": "Samples of a microbatch.",
    "seed": "Seed of weights and of what layers draw.",
    "data_seed": "Seed of the order of the samples.",
    "optimizer": "adam, adamw or sgd.",
    "learning_rate": "Rate of the optimizer.",
    "warmup_steps": "Iterations over which the rate grows.",
    "clip_norm": "Largest norm of all gradients.",
    "dtype": "float32 or float64.",
    "reduction": "ordered, with the same bits for any pipelines, or allreduce.",
    "bucketed": "Send layers with the same owners in one message.",
}
_PARTS = ("model", "optimizer")


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument MODEL and options for the rest of a job, which it gets as ``job``."""

    @click.argument("model")
    @settings_option("model.n_layers=4")
    @wraps(command)
    def wrapped(model: str, settings: tuple[str, ...], **given: Any) -> None:
        own = {name: given.pop(name) for name in _HELP}
        parts = read_settings(settings, _PARTS)
        job = ChainJob(model, model_options=parts["model"], optimizer_options=parts["optimizer"], **own)
        command(job=job, **given)

    decorated: Callable[..., None] = wrapped
    for field in reversed([one for one in fields(ChainJob) if one.name in _HELP]):
        flag, default = "--" + field.name.removeprefix("n_").replace("_", "-"), field.default
        kinds: dict[str, Any] = {"default": default, "show_default": default is not None}
        if isinstance(default, bool):
            flag = f"{flag}/--no-{field.name}"
        else:
            kinds |= {"type": float if default is None else type(default)}
            kinds |= {"metavar": "NAME" if isinstance(default, str) else "NUMBER"}
        decorated = click.option(flag, field.name, help=_HELP[field.name], **kinds)(decorated)
    return decorated


@click.command("profile")
@job_options
@click.option("--replicas", default=2, show_default=True, metavar="N", type=int,
              help="Time the sum of gradients among up to N processes.")  # fmt: skip
@click.option("--repeats", default=5, show_default=True, metavar="N", type=int, help="Timed runs.")
@click.option("--warm-ups", default=2, show_default=True, metavar="N", type=int, help="Runs before them.")
@launcher_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write.")
def PROFILE(
    job: ChainJob, replicas: int, repeats: int, warm_ups: int, launcher: str, device: str, output: Path
) -> None:
    """Time the layers of MODEL here: a family of small models, or file.py:function of your own.

    Writes the profile from which templates are planned. Forward and backward passes of a microbatch are
    measured layer by layer, and so are the sums of their gradients between processes.
    """
    check_target(output)
    with ExitStack() as stack:
        # Processes of other machines see no temporary directory of this one.
        run_dir = None
        if launcher == "slurm":
            run_dir = Path(stack.enter_context(TemporaryDirectory(".tmp", "profile-", output.parent)))
        profile = profile_chain(
            job, n_replicas=replicas, repeats=repeats, warm_ups=warm_ups,
            launcher=launcher_of(launcher, device), run_dir=run_dir,
        )  # fmt: skip
    write_profile(profile, output)
    total_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    size = f"{1e3 * total_s:.2f} ms a microbatch of {job.microbatch_size}"
    say(f"{output}: {profile.n_layers} layers, {size}", err=True)
