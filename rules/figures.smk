# Figures of all papers: from the tables of a figure to PDF, PNG, SVG, the CSV behind it, and the caption.


rule draw_figure:
    input:
        unpack(figure_inputs),
        times=lambda wildcards: times_of(wildcards.source) if is_timed(wildcards) else [],
    output:
        pdf="results/{source}/{paper}/figures/{figure}.pdf",
        png=report(
            "results/{source}/{paper}/figures/{figure}.png",
            caption="../workflow/report/figure.rst",
            category=lambda wildcards: wildcards.paper.capitalize(),
            labels=lambda wildcards: {
                "figure": figure_of(wildcards).title,
                "source": shown_source_of(wildcards),
            },
        ),
        svg="results/{source}/{paper}/figures/{figure}.svg",
        csv="results/{source}/{paper}/figures/{figure}.csv",
        caption="results/{source}/{paper}/figures/{figure}.txt",
    log:
        "logs/{source}/{paper}/draw_figure/{figure}.log",
    benchmark:
        "benchmarks/results/{source}/{paper}/draw_figure/{figure}.tsv"
    wildcard_constraints:
        paper="|".join(FIGURES),
        figure="|".join(name for entries in FIGURES.values() for name in entries),
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        draw=lambda wildcards: figure_of(wildcards).function(wildcards.paper),
        options=lambda wildcards: figure_of(wildcards).arguments(SETTINGS),
        title=lambda wildcards: figure_of(wildcards).title,
        caption=lambda wildcards: figure_of(wildcards).captioned(
            wildcards.source, shown_source_of(wildcards), SETTINGS
        ),
        code=lambda wildcards: code_hash("draw_figure", figure_of(wildcards).function(wildcards.paper)),
    script:
        "../workflow/scripts/draw_figure.py"
