"""Schedule real training runs and compare with their prediction: results/measured/live/<run>.csv."""

import logging
from pathlib import Path

from makespan.files import write_text
from makespan.live import live_experiment, live_failures
from makespan.logs import logged_to
from makespan.policies import policy
from makespan.tables import LIVE, LIVE_JOBS, write_result

with logged_to(snakemake.log[0]):
    table, setting = snakemake.output.table, snakemake.params.setting
    per_hour = setting.get("failures_per_hour")
    result = live_experiment(
        policy(setting["policy"]),
        setting["workload"],
        Path(table).with_suffix(".run"),  # a run that was ended goes on where it was
        n_slots=setting["slots"],
        n_nodes=setting.get("nodes", 1),
        failures=None if per_hour is None else live_failures(per_hour, seed=setting["seed"]),
        recovery=setting.get("recovery", "restart"),
        seed=setting["seed"],
        tell=logging.getLogger("run_live").info,
    )
    write_result(result.comparison, table, LIVE)
    write_result(result.jobs, snakemake.output.jobs, LIVE_JOBS)
    write_text(result.prediction.text, snakemake.output.prediction)
