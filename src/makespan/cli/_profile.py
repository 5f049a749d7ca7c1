"""The command ``makespan profile``."""

from pathlib import Path
from typing import Literal

import click

from makespan.cli._numbers import CPU_THREADS, PROCESSES, whole
from makespan.cli._options import check_target
from makespan.cli._output import say
from makespan.files import write_json
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.profiling import (
    Procedure,
    environment_text,
    measure_points,
    measure_rates,
    profile_batches,
    profile_points,
    profile_record,
    profile_table,
    profiling_launcher,
)
from makespan.runtime import LocalLauncher, describe_machine
from makespan.tables import THROUGHPUT, write_csv, write_text
from makespan.workloads import small_workload_keys, workload

__all__ = ["profile_command"]

_DEFAULT = Procedure()
_LONGEST = 10_000, "a point would take hours"


@click.command("profile")
@click.option(
    "--workload",
    "keys",
    multiple=True,
    default=("tiny-gpt",),
    show_default=True,
    type=click.Choice(small_workload_keys()),
    help="Small workload; may be repeated.",
)
@click.option(
    "--placement",
    "placements",
    multiple=True,
    default=("1", "2"),
    show_default=True,
    metavar="N",
    help="Number of processes; may be repeated.",
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--cpu-threads", default=1, show_default=True, type=CPU_THREADS, help="Threads a process.")
@click.option("--warmup", default=_DEFAULT.warmup_steps, show_default=True, type=whole(0, *_LONGEST))
@click.option("--steps", default=_DEFAULT.steps, show_default=True, type=whole(1, *_LONGEST))
@click.option("--repetitions", default=_DEFAULT.repetitions, show_default=True, type=whole(1, *_LONGEST))
@click.option(
    "--environment",
    metavar="NAME",
    help="Constants of the machine: a name or a .toml file; measured if not given.",
)
@click.option(
    "--output", default=Path("profile"), show_default=True, type=click.Path(path_type=Path, file_okay=False)
)
def profile_command(
    keys: tuple[str, ...],
    placements: tuple[str, ...],
    device: Literal["auto", "cpu", "cuda"],
    cpu_threads: int,
    warmup: int,
    steps: int,
    repetitions: int,
    environment: str | None,
    output: Path,
) -> None:
    """Time small workloads under every plan on this machine.

    Writes <workload>.csv, a throughput table, <workload>.json, the record of machine and noise, and
    environment.toml, what the performance model needs to know of the machine.
    """
    check_target(output, is_directory=True)
    places = [_placement(text) for text in placements]
    if several := [place.text for place in places if place.n_nodes > 1]:
        found = ", ".join(several)
        raise click.BadParameter(f"{found}: several nodes need a job; see the rule profile_nodes")
    procedure, launcher = Procedure(warmup, steps, repetitions), profiling_launcher(device, cpu_threads)
    environment = environment or _measured_environment(keys, places, cpu_threads, launcher, output)
    node = load_environment(environment).node
    for key in keys:
        spec = workload(key)
        batches = profile_batches(profile_points(spec, places, cpu_threads), None)
        parts = [measure_points(spec, points, node, launcher, procedure) for points in batches.values()]
        table, record = profile_table(parts, spec), profile_record(parts)
        write_csv(table, output / f"{key}.csv", THROUGHPUT)
        write_json(record, output / f"{key}.json", indent=1)
        noise_pct = record["repeatability_pct"]
        noise = "not known" if noise_pct is None else f"{noise_pct:.1f} %"
        count = f"{int(table['feasible'].sum())} of {len(table)} points ran"
        say(f"{key}: {count}; two runs of a point differ by {noise}")


def _placement(text: str) -> Placement:
    """Read a placement on this machine."""
    place = Placement.parse(text)
    PROCESSES.convert(place.n_gpus, None, None)
    return place


def _measured_environment(
    keys: tuple[str, ...], places: list[Placement], cpu_threads: int, launcher: LocalLauncher, output: Path
) -> str:
    """Measure the machine, write ``environment.toml`` and return its path."""
    processes = min(2, max(place.n_gpus for place in places))
    rates = measure_rates([workload(key) for key in keys], processes, cpu_threads, launcher)
    path = output / "environment.toml"
    write_text(environment_text(rates, f"measured on {describe_machine()['processor']}"), path)
    return str(path)
