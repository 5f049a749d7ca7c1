# Experiments of the Morphling paper: from throughput tables to tables.


localrules:
    morphling_table2,


rule morphling_fit_models:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source),
        published="config/published/morphling_table2.csv",
    output:
        fits=[
            f"results/{{source}}/morphling/fits/{workload}.csv" for workload in SETTINGS.morphling.workloads
        ],
        rows="results/{source}/morphling/table2_rows.csv",
    log:
        "logs/{source}/morphling/morphling_fit_models.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fit_models.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cluster=SETTINGS.cluster,
        forms=list(SETTINGS.performance_model.forms),
        code=code_hash("morphling_fit_models"),
    script:
        "../workflow/scripts/morphling_fit_models.py"


rule morphling_table2:
    input:
        rows="results/{source}/morphling/table2_rows.csv",
        published="config/published/morphling_table2.csv",
    output:
        table="results/{source}/morphling/table2.csv",
        summary="results/{source}/morphling/table2_summary.csv",
    log:
        "logs/{source}/morphling/morphling_table2.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_table2.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=code_hash("morphling_table2"),
    script:
        "../workflow/scripts/morphling_table2.py"


rule morphling_sensitivity:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SETTINGS.morphling.sensitivity.workloads),
    output:
        envelope="results/{source}/morphling/sensitivity.csv",
        families="results/{source}/morphling/sensitivity_families.csv",
    log:
        "logs/{source}/morphling/morphling_sensitivity.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_sensitivity.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cluster=SETTINGS.cluster,
        form=SETTINGS.performance_model.experiment_form,
        max_gpus=SETTINGS.morphling.sensitivity.max_gpus,
        cpu_threads=list(SETTINGS.morphling.sensitivity.cpu_threads),
        code=code_hash("morphling_sensitivity"),
    script:
        "../workflow/scripts/morphling_sensitivity.py"


rule morphling_fig7:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, [SETTINGS.morphling.fig7.workload]),
        published="config/published/morphling_fig7.csv",
    output:
        table="results/{source}/morphling/fig7.csv",
    log:
        "logs/{source}/morphling/morphling_fig7.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fig7.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cluster=SETTINGS.cluster,
        form=SETTINGS.performance_model.experiment_form,
        stages=[stage.model_dump() for stage in SETTINGS.morphling.fig7.stages],
        code=code_hash("morphling_fig7"),
    script:
        "../workflow/scripts/morphling_fig7.py"


rule morphling_fig8:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SETTINGS.morphling.fig8.workloads),
        published="config/published/morphling_fig8.csv",
    output:
        table="results/{source}/morphling/fig8.csv",
    log:
        "logs/{source}/morphling/morphling_fig8.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fig8.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        gpus=SETTINGS.morphling.fig8.gpus,
        workloads=list(SETTINGS.morphling.fig8.workloads),
        code=code_hash("morphling_fig8"),
    script:
        "../workflow/scripts/morphling_fig8.py"
