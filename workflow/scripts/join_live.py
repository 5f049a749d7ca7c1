"""Join the live runs and summarise them: results/measured/live/live.csv and live_summary.csv."""

import pandas as pd

from makespan.logs import logged_to
from makespan.metrics import live_summary
from makespan.tables import LIVE, LIVE_SUMMARY, read_csv, write_result

with logged_to(snakemake.log[0]):
    joined = pd.concat([read_csv(path, LIVE) for path in snakemake.input], ignore_index=True)
    write_result(joined, snakemake.output.table, LIVE)
    write_result(live_summary(joined), snakemake.output.summary, LIVE_SUMMARY)
