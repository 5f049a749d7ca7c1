"""Join the jobs of a profile: results/measured/throughput/<workload>.csv and .json."""

import json
from collections.abc import Sequence
from pathlib import Path

from makespan.logs import logged_to
from makespan.profiling import profile_record, profile_table
from makespan.tables import THROUGHPUT, write_csv, write_text
from makespan.workloads import workload


def main(parts: Sequence[str], key: str, table: str, record: str) -> None:
    """Write the throughput table and, beside it, what stands behind it."""
    measured = [json.loads(Path(part).read_text(encoding="utf-8")) for part in parts]
    write_csv(profile_table(measured, workload(key)), table, THROUGHPUT)
    write_text(json.dumps(profile_record(measured), indent=1) + "\n", record)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        made = snakemake.output
        main(snakemake.input.parts, snakemake.wildcards.workload, made.table, made.record)
