# Real training runs: losses under several execution plans, on GPUs where there are enough, else on CPU.


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
