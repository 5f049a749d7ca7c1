"""Schedule real training runs and compare with their prediction: results/measured/live/<run>.csv."""

import logging
from pathlib import Path

from makespan.files import write_text
from makespan.live import live_experiment
from makespan.logs import logged_to
from makespan.policies import policy as named_policy
from makespan.tables import LIVE, LIVE_JOBS, write_result

_log = logging.getLogger(__name__)


def main(table: str, jobs: str, prediction: str, policy: str, workload: str, slots: int, seed: int) -> None:
    """Write the comparison, the jobs and the prediction; a run that was ended goes on where it was."""
    directory = Path(table).with_suffix(".run")
    result = live_experiment(
        named_policy(policy),
        workload,
        directory,
        n_slots=slots,
        seed=seed,
        tell=_log.info,
    )
    write_result(result.comparison, table, LIVE)
    write_result(result.jobs, jobs, LIVE_JOBS)
    write_text(result.prediction.text, prediction)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(*snakemake.output, **snakemake.params.setting)
