"""Measure the machine for the performance model: results/measured/profile/environment.toml."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from makespan.files import write_text
from makespan.logs import logged_to
from makespan.profiling import environment_text, measure_rates, profiling_launcher
from makespan.runtime import describe_machine
from makespan.workloads import workload

Device = Literal["auto", "cpu", "cuda"]


def main(path: str, workloads: Sequence[str], processes: int, cpu_threads: int, device: Device) -> None:
    """Measure bandwidths and launch times and write them as an environment."""
    launcher = profiling_launcher(device, cpu_threads)
    rates = measure_rates([workload(key) for key in workloads], processes, cpu_threads, launcher)
    machine = describe_machine()
    source = f"measured on {machine['processor']}, {datetime.now(UTC):%Y-%m-%d}"
    write_text(environment_text(rates, source), path)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(snakemake.output.environment, given.workloads, given.processes, given.cpu_threads, given.device)
