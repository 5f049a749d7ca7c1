"""Join the jobs of a profile: results/measured/throughput/<workload>.csv and .json."""

from makespan.files import read_json, write_json
from makespan.logs import logged_to
from makespan.profiling import profile_record, profile_table
from makespan.tables import THROUGHPUT, write_result
from makespan.workloads import workload

with logged_to(snakemake.log[0]):
    measured = [read_json(path) for path in snakemake.input.parts]
    table = profile_table(measured, workload(snakemake.wildcards.workload))
    write_result(table, snakemake.output.table, THROUGHPUT)
    write_json(profile_record(measured), snakemake.output.record, indent=1)
