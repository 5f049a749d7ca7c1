"""Run the study of CPU threads: results/emulated/morphling/threads.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.hardware import cluster
from makespan.logs import logged_to
from makespan.papers.morphling import threads_study
from makespan.tables import write_result
from makespan.throughput import EmulatedSource


def main(table: str, emulator: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write one row a simulation."""
    source = EmulatedSource(cluster(emulator["cluster"]), *(emulator[name] for name in _EMULATOR))
    write_result(threads_study(source, **options), table)


_EMULATOR = ("calibration", "seed", "noise", "cpu_threads")

if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        options = dict(snakemake.params.options, n_processes=snakemake.threads)
        main(snakemake.output.table, snakemake.params.emulator, options)
