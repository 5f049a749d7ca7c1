"""The command ``makespan profile``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from makespan.cli._numbers import CPU_THREADS, PROCESSES, whole
from makespan.cli._options import check_target
from makespan.cli._output import say
from makespan.files import write_json
from makespan.hardware import NodeSpec
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.profiling import (
    Measurements,
    Procedure,
    ProfilePoint,
    environment_text,
    measure_points,
    measure_rates,
    measured_by,
    profile_batches,
    profile_points,
    profile_record,
    profile_table,
    profiling_launcher,
    rate_runs,
)
from makespan.runtime import LocalLauncher, describe_machine
from makespan.tables import THROUGHPUT, write_csv, write_text
from makespan.workloads import Workload, small_workload_keys, workload

__all__ = ["profile_command"]

_DEFAULT = Procedure()
_LONGEST = 10_000, "a point would take hours"
_UNFINISHED = "unfinished.jsonl"


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
@click.option("--quiet", is_flag=True, help="No progress, only the result.")
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
    quiet: bool,
) -> None:
    """Time small workloads under every plan on this machine.

    Writes <workload>.csv, a throughput table, <workload>.json, the record of machine and noise, and
    environment.toml, what the performance model needs to know of the machine. Interrupted, the same
    command goes on with what it has measured.
    """
    from makespan.cli._view import Countdown

    check_target(output, is_directory=True)
    places = list(dict.fromkeys(map(_placement, placements)))
    if several := [place.text for place in places if place.n_nodes > 1]:
        found = ", ".join(several)
        raise click.BadParameter(f"{found}: several nodes need a job; see the rule profile_nodes")
    procedure, launcher = Procedure(warmup, steps, repetitions), profiling_launcher(device, cpu_threads)
    specs = [workload(key) for key in dict.fromkeys(keys)]
    points = {spec.key: profile_points(spec, places, cpu_threads) for spec in specs}
    processes = min(2, max(place.n_gpus for place in places))
    n_runs = repetitions * sum(map(len, points.values()))
    settings = {
        "placements": [place.text for place in places],
        "processes": [launcher.device, cpu_threads],
        "environment": environment,
    }
    countdown, path = Countdown("runs", is_shown=not quiet), output / _UNFINISHED

    def tell(text: str) -> None:
        countdown.close()
        if not quiet:
            say(text, err=True)

    try:
        total = n_runs + (0 if environment else rate_runs(len(specs), processes, launcher))
        kept = Measurements(path, settings | measured_by(specs, procedure), total, countdown, tell)
        environment = environment or _measured_environment(specs, processes, launcher, kept, output)
        node = load_environment(environment).node
        for spec in specs:
            result = _write_profile(spec, points[spec.key], node, launcher, procedure, kept, output)
            countdown.close()
            say(result)
    except KeyboardInterrupt:
        countdown.close()
        say(f"stopped; the same command goes on from {path}", err=True)
        raise click.Abort from None
    finally:
        countdown.close()
    kept.remove()


def _placement(text: str) -> Placement:
    """Read a placement on this machine."""
    place = Placement.parse(text)
    PROCESSES.convert(place.n_gpus, None, None)
    return place


def _measured_environment(
    specs: Sequence[Workload], processes: int, launcher: LocalLauncher, kept: Measurements, output: Path
) -> str:
    """Measure the machine, write ``environment.toml`` and return its path."""
    threads = launcher.threads_per_process or 1
    rates = measure_rates(specs, processes, threads, launcher, kept)
    path = output / "environment.toml"
    write_text(environment_text(rates, f"measured on {describe_machine()['processor']}"), path)
    return str(path)


def _write_profile(
    spec: Workload,
    points: Sequence[ProfilePoint],
    node: NodeSpec,
    launcher: LocalLauncher,
    procedure: Procedure,
    kept: Measurements,
    output: Path,
) -> str:
    """Measure the points of a workload, write table and record, and return what came of it."""
    batches = profile_batches(points, None).values()
    parts = [measure_points(spec, batch, node, launcher, procedure, kept=kept) for batch in batches]
    table, record = profile_table(parts, spec), profile_record(parts)
    write_csv(table, output / f"{spec.key}.csv", THROUGHPUT)
    write_json(record, output / f"{spec.key}.json", indent=1)
    noise_pct = record["repeatability_pct"]
    noise = "not known" if noise_pct is None else f"{noise_pct:.1f} %"
    count = f"{int(table['feasible'].sum())} of {len(table)} points ran"
    return f"{spec.key}: {count}; two runs of a point differ by {noise}"
