# Figures of the Morphling experiments: from a table to PDF, PNG and the CSV behind them.


localrules:
    plot_morphling_table2,
    plot_morphling_prediction,
    plot_morphling_sensitivity,
    plot_morphling_sensitivity_cpu,
    plot_morphling_fig7,
    plot_morphling_fig8,
    plot_morphling_table4,
    plot_morphling_ablation,
    plot_morphling_jct_cdf,
    plot_morphling_allocation,
    plot_morphling_gantt,
    plot_morphling_load,
    plot_morphling_large_models,
    plot_morphling_rounds,
    plot_morphling_scale,


rule plot_morphling_table2:
    input:
        table="results/{source}/morphling/table2.csv",
    output:
        pdf="results/{source}/morphling/figures/table2.pdf",
        png=in_report("results/{source}/morphling/figures/table2.png", "table2", "Table 2"),
        csv="results/{source}/morphling/figures/table2.csv",
    log:
        "logs/{source}/morphling/plot_morphling_table2.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_table2.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        forms=list(SETTINGS.performance_model.forms),
        shown=SETTINGS.performance_model.experiment_form,
        code=code_hash("plot_morphling_table2"),
    script:
        "../workflow/scripts/plot_morphling_table2.py"


rule plot_morphling_prediction:
    input:
        table="results/{source}/morphling/table2_rows.csv",
    output:
        pdf="results/{source}/morphling/figures/prediction.pdf",
        png=in_report(
            "results/{source}/morphling/figures/prediction.png",
            "prediction",
            "Prediction",
        ),
        csv="results/{source}/morphling/figures/prediction.csv",
    log:
        "logs/{source}/morphling/plot_morphling_prediction.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_prediction.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        form=SETTINGS.performance_model.experiment_form,
        code=code_hash("plot_morphling_prediction"),
    script:
        "../workflow/scripts/plot_morphling_prediction.py"


rule plot_morphling_sensitivity:
    input:
        envelope="results/{source}/morphling/sensitivity.csv",
        families="results/{source}/morphling/sensitivity_families.csv",
    output:
        pdf="results/{source}/morphling/figures/sensitivity.pdf",
        png=in_report(
            "results/{source}/morphling/figures/sensitivity.png",
            "sensitivity",
            "Sensitivity",
        ),
        csv="results/{source}/morphling/figures/sensitivity.csv",
    log:
        "logs/{source}/morphling/plot_morphling_sensitivity.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_sensitivity.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_sensitivity"),
    script:
        "../workflow/scripts/plot_morphling_sensitivity.py"


rule plot_morphling_sensitivity_cpu:
    input:
        families="results/{source}/morphling/sensitivity_families.csv",
    output:
        pdf="results/{source}/morphling/figures/sensitivity_cpu.pdf",
        png=in_report(
            "results/{source}/morphling/figures/sensitivity_cpu.png",
            "sensitivity_cpu",
            "Sensitivity to CPU threads",
        ),
        csv="results/{source}/morphling/figures/sensitivity_cpu.csv",
    log:
        "logs/{source}/morphling/plot_morphling_sensitivity_cpu.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_sensitivity_cpu.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_sensitivity_cpu"),
    script:
        "../workflow/scripts/plot_morphling_sensitivity_cpu.py"


rule plot_morphling_fig7:
    input:
        table="results/{source}/morphling/fig7.csv",
    output:
        pdf="results/{source}/morphling/figures/fig7.pdf",
        png=in_report("results/{source}/morphling/figures/fig7.png", "fig7", "Fig. 7"),
        csv="results/{source}/morphling/figures/fig7.csv",
    log:
        "logs/{source}/morphling/plot_morphling_fig7.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_fig7.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        stage_duration_s=SETTINGS.morphling.fig7.stage_duration_s,
        workload=SETTINGS.morphling.fig7.workload,
        code=code_hash("plot_morphling_fig7"),
    script:
        "../workflow/scripts/plot_morphling_fig7.py"


rule plot_morphling_fig8:
    input:
        table="results/{source}/morphling/fig8.csv",
    output:
        pdf="results/{source}/morphling/figures/fig8.pdf",
        png=in_report("results/{source}/morphling/figures/fig8.png", "fig8", "Fig. 8"),
        csv="results/{source}/morphling/figures/fig8.csv",
    log:
        "logs/{source}/morphling/plot_morphling_fig8.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_fig8.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_fig8"),
    script:
        "../workflow/scripts/plot_morphling_fig8.py"


rule plot_morphling_table4:
    input:
        table="results/{source}/morphling/table4.csv",
        published="config/published/morphling_table4.csv",
    output:
        pdf="results/{source}/morphling/figures/table4.pdf",
        png=in_report("results/{source}/morphling/figures/table4.png", "table4", "Table 4"),
        csv="results/{source}/morphling/figures/table4.csv",
    log:
        "logs/{source}/morphling/plot_morphling_table4.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_table4.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        delay_s=SIM.restart_delays_s[0],
        code=code_hash("plot_morphling_table4"),
    script:
        "../workflow/scripts/plot_morphling_table4.py"


rule plot_morphling_ablation:
    input:
        table="results/{source}/morphling/table4.csv",
    output:
        pdf="results/{source}/morphling/figures/ablation.pdf",
        png=in_report("results/{source}/morphling/figures/ablation.png", "ablation", "Ablation"),
        csv="results/{source}/morphling/figures/ablation.csv",
    log:
        "logs/{source}/morphling/plot_morphling_ablation.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_ablation.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        delay_s=SIM.restart_delays_s[0],
        code=code_hash("plot_morphling_ablation"),
    script:
        "../workflow/scripts/plot_morphling_ablation.py"


rule plot_morphling_jct_cdf:
    input:
        table="results/{source}/morphling/jct.csv",
    output:
        pdf="results/{source}/morphling/figures/jct_cdf.pdf",
        png=in_report("results/{source}/morphling/figures/jct_cdf.png", "jct_cdf", "Completion times"),
        csv="results/{source}/morphling/figures/jct_cdf.csv",
    log:
        "logs/{source}/morphling/plot_morphling_jct_cdf.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_jct_cdf.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        policies=[name for name in SIM.policies if not name.endswith(ABLATIONS)],
        code=code_hash("plot_morphling_jct_cdf"),
    script:
        "../workflow/scripts/plot_morphling_jct_cdf.py"


rule plot_morphling_allocation:
    input:
        table="results/{source}/morphling/allocation.csv",
    output:
        pdf="results/{source}/morphling/figures/allocation.pdf",
        png=in_report("results/{source}/morphling/figures/allocation.png", "allocation", "GPUs over time"),
        csv="results/{source}/morphling/figures/allocation.csv",
    log:
        "logs/{source}/morphling/plot_morphling_allocation.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_allocation.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        cluster=SETTINGS.cluster,
        code=code_hash("plot_morphling_allocation"),
    script:
        "../workflow/scripts/plot_morphling_allocation.py"


rule plot_morphling_gantt:
    input:
        table="results/{source}/morphling/schedule.csv",
    output:
        pdf="results/{source}/morphling/figures/gantt.pdf",
        png=in_report("results/{source}/morphling/figures/gantt.png", "gantt", "Schedule"),
        csv="results/{source}/morphling/figures/gantt.csv",
    log:
        "logs/{source}/morphling/plot_morphling_gantt.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_gantt.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_gantt"),
    script:
        "../workflow/scripts/plot_morphling_gantt.py"


rule plot_morphling_load:
    input:
        table="results/{source}/morphling/load.csv",
    output:
        pdf="results/{source}/morphling/figures/load.pdf",
        png=in_report("results/{source}/morphling/figures/load.png", "load", "Load"),
        csv="results/{source}/morphling/figures/load.csv",
    log:
        "logs/{source}/morphling/plot_morphling_load.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_load.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_load"),
    script:
        "../workflow/scripts/plot_morphling_load.py"


rule plot_morphling_large_models:
    input:
        table="results/{source}/morphling/large_models.csv",
    output:
        pdf="results/{source}/morphling/figures/large_models.pdf",
        png=in_report("results/{source}/morphling/figures/large_models.png", "large_models", "Large models"),
        csv="results/{source}/morphling/figures/large_models.csv",
    log:
        "logs/{source}/morphling/plot_morphling_large_models.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_large_models.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_large_models"),
    script:
        "../workflow/scripts/plot_morphling_large_models.py"


rule plot_morphling_rounds:
    input:
        table="results/{source}/morphling/rounds.csv",
    output:
        pdf="results/{source}/morphling/figures/rounds.pdf",
        png=in_report("results/{source}/morphling/figures/rounds.png", "rounds", "Length of a round"),
        csv="results/{source}/morphling/figures/rounds.csv",
    log:
        "logs/{source}/morphling/plot_morphling_rounds.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_rounds.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_rounds"),
    script:
        "../workflow/scripts/plot_morphling_rounds.py"


rule plot_morphling_scale:
    input:
        table="results/{source}/morphling/scale.csv",
    output:
        pdf="results/{source}/morphling/figures/scale.pdf",
        png=in_report("results/{source}/morphling/figures/scale.png", "scale", "Scale"),
        csv="results/{source}/morphling/figures/scale.csv",
    log:
        "logs/{source}/morphling/plot_morphling_scale.log",
    benchmark:
        "benchmarks/results/{source}/morphling/plot_morphling_scale.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("plot_morphling_scale"),
    script:
        "../workflow/scripts/plot_morphling_scale.py"
