"""Measure the machine for the performance model: results/measured/profile/environment.toml."""

from datetime import UTC, datetime

from makespan.files import write_text
from makespan.logs import logged_to
from makespan.profiling import environment_text, measure_rates, measured_on, profiling_launcher
from makespan.workloads import workload

with logged_to(snakemake.log[0]):
    params = snakemake.params
    launcher = profiling_launcher(params.device, params.cpu_threads)
    workloads = [workload(key) for key in params.workloads]
    rates = measure_rates(workloads, params.processes, params.cpu_threads, launcher)
    source = f"{measured_on(launcher)}, {datetime.now(UTC):%Y-%m-%d}"
    write_text(environment_text(rates, source), snakemake.output.environment)
