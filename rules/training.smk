# Real training runs: losses under several execution plans, on GPUs where there are enough, else on CPU.


localrules:
    plot_morphling_fig9,


rule morphling_fig9:
    input:
        published="config/published/morphling_fig9.csv",
    output:
        table="results/measured/morphling/fig9.csv",
        summary="results/measured/morphling/fig9_summary.csv",
    log:
        "logs/measured/morphling/morphling_fig9.log",
    benchmark:
        "benchmarks/results/measured/morphling/morphling_fig9.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=3000,
        runtime=15,
    params:
        experiment=fig9_experiment(),
        code=code_hash("morphling_fig9"),
    script:
        "../workflow/scripts/morphling_fig9.py"


rule plot_morphling_fig9:
    input:
        table="results/measured/morphling/fig9.csv",
        summary="results/measured/morphling/fig9_summary.csv",
    output:
        pdf="results/measured/morphling/figures/fig9.pdf",
        png=report(
            "results/measured/morphling/figures/fig9.png",
            caption="../workflow/report/morphling_fig9.rst",
            category="Morphling",
            labels={"figure": "Fig. 9", "source": "measured"},
        ),
        csv="results/measured/morphling/figures/fig9.csv",
    log:
        "logs/measured/morphling/plot_morphling_fig9.log",
    benchmark:
        "benchmarks/results/measured/morphling/plot_morphling_fig9.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        limit=0.1,
        code=code_hash("plot_morphling_fig9"),
    script:
        "../workflow/scripts/plot_morphling_fig9.py"
