"""Draw the distribution of completion times: results/<source>/morphling/figures/jct_cdf.*."""

from collections.abc import Sequence

from makespan.logs import logged_to
from makespan.plots import plot_jct_cdf, save_figure
from makespan.tables import JCT, read_csv


def main(table: str, stem: str, source: str, policies: Sequence[str]) -> None:
    """Draw the figure and save it with the table behind it."""
    jobs = read_csv(table, JCT)
    shown = jobs[jobs["policy"].isin(policies)]
    save_figure(plot_jct_cdf(shown, source), shown, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source, snakemake.params.policies)
