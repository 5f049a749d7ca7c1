"""Schedule real training runs and compare with their simulation: results/measured/live/<run>.csv."""

from pathlib import Path

from makespan.live import live_experiment
from makespan.logs import logged_to
from makespan.policies import policy as named_policy
from makespan.tables import LIVE, LIVE_JOBS, write_result


def main(table: str, jobs: str, policy: str, workload: str, slots: int) -> None:
    """Write the comparison and the jobs; a run that was ended goes on where it was."""
    result = live_experiment(named_policy(policy), workload, Path(table).with_suffix(".run"), n_slots=slots)
    write_result(result.comparison, table, LIVE)
    write_result(result.jobs, jobs, LIVE_JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(*snakemake.output, **snakemake.params.setting)
