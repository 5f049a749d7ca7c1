"""Join the live runs and summarise them: results/measured/live/live.csv and live_summary.csv."""

from collections.abc import Sequence

import pandas as pd

from makespan.logs import logged_to
from makespan.metrics import live_summary
from makespan.tables import LIVE, LIVE_SUMMARY, read_csv, write_result


def main(runs: Sequence[str], table: str, summary: str) -> None:
    """Write every run, then their means and the worst."""
    joined = pd.concat([read_csv(path, LIVE) for path in runs], ignore_index=True)
    write_result(joined, table, LIVE)
    write_result(live_summary(joined), summary, LIVE_SUMMARY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.input, *snakemake.output)
