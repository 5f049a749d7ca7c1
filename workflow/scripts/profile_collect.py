"""Join the jobs of a profile: results/measured/throughput/<workload>.csv and .json."""

from collections.abc import Sequence

from makespan.files import read_json, write_json
from makespan.logs import logged_to
from makespan.profiling import profile_record, profile_table
from makespan.tables import THROUGHPUT, write_result
from makespan.workloads import workload


def main(parts: Sequence[str], key: str, table: str, record: str) -> None:
    """Write the throughput table and, beside it, what stands behind it."""
    measured = [read_json(part) for part in parts]
    write_result(profile_table(measured, workload(key)), table, THROUGHPUT)
    write_json(profile_record(measured), record, indent=1)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        made = snakemake.output
        main(snakemake.input.parts, snakemake.wildcards.workload, made.table, made.record)
