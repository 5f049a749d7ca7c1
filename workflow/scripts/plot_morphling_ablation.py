"""Draw what each part of Morphling is worth: results/<source>/morphling/figures/ablation.*."""

from makespan.logs import logged_to
from makespan.plots import plot_ablation, save_figure
from makespan.tables import TABLE4, read_csv


def main(table: str, stem: str, source: str, delay_s: float) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, TABLE4)
    kept = rows[rows["policy"].str.startswith("morphling")]
    save_figure(plot_ablation(kept, source, delay_s), kept, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source, snakemake.params.delay_s)
