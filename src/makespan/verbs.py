"""Command-line options that several systems share: how processes are launched, and arguments of job parts."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from makespan.errors import InputError
from makespan.runtime import Launcher, LocalLauncher, SlurmLauncher

__all__ = ["launcher_of", "launcher_options", "read_settings", "settings_option"]

Command = TypeVar("Command", bound=Callable[..., Any])


def launcher_options(command: Command) -> Command:
    """Give a command ``--launcher`` and ``--device``, of which `launcher_of` makes a launcher."""
    command = click.option(
        "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]),
        help="What each process computes on.",
    )(command)  # fmt: skip
    return click.option(
        "--launcher", default="local", show_default=True, type=click.Choice(["local", "slurm"]),
        help="Processes of this machine, or steps of the Slurm allocation in which the command runs.",
    )(command)  # fmt: skip


def launcher_of(launcher: str, device: str, stall_timeout_s: float | None = None) -> Launcher:
    """Return the launcher that options name; a process of an allocation gets a core, and a GPU for CUDA.

    Parameters
    ----------
    launcher
        ``local`` or ``slurm``.
    device
        ``cpu`` or ``cuda``.
    stall_timeout_s
        In place of that of the launcher [s].
    """
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
    """Give a command ``--set PART.NAME=VALUE``, which `read_settings` reads as ``settings``."""
    return click.option(
        "--set", "settings", multiple=True, metavar="PART.NAME=VALUE",
        help=f"Further argument of a part, for example {example}; may be repeated.",
    )  # fmt: skip


def read_settings(settings: tuple[str, ...], parts: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Read arguments of parts, ``PART.NAME=VALUE``; a value is JSON, or else a text.

    Parameters
    ----------
    settings
        As they were given.
    parts
        What is accepted before the point; empty for anything.

    Returns
    -------
    dict
        Arguments by part and name, with each of ``parts``.

    Raises
    ------
    InputError
        Something else was given.
    """
    found: dict[str, dict[str, Any]] = {part: {} for part in parts}
    shown = " or ".join(f"{part}.NAME=VALUE" for part in parts or ("PART",))
    for text in settings:
        name, equals, value = text.partition("=")
        part, dot, option = name.partition(".")
        if not (equals and dot and part and option) or (parts and part not in parts):
            raise InputError(f"--set {text!r}; accepted: {shown}, where VALUE is JSON or a text")
        try:
            found.setdefault(part, {})[option] = json.loads(value)
        except ValueError:
            found[part][option] = value
    return found
