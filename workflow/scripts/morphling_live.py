"""Schedule real training runs and compare with their simulation: results/measured/morphling/live.csv."""

from pathlib import Path

from makespan.live import live_experiment
from makespan.logs import logged_to
from makespan.policies import policy
from makespan.tables import LIVE, LIVE_JOBS, write_csv


def main(table: str, jobs: str, policy_name: str, workload: str, n_slots: int) -> None:
    """Write the comparison and the jobs; a run that was ended goes on where it was."""
    work = Path(table).parent / f"live-{policy_name}"
    result = live_experiment(policy(policy_name), workload, work, n_slots=n_slots)
    write_csv(result.comparison, table, LIVE)
    write_csv(result.jobs, jobs, LIVE_JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        params = snakemake.params
        main(*snakemake.output, params.policy, params.workload, params.slots)
