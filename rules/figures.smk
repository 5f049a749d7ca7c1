# Figures of the Morphling experiments: from a table to PDF, PNG and the CSV behind them.


localrules:
    plot_morphling_table2,
    plot_morphling_prediction,
    plot_morphling_sensitivity,
    plot_morphling_sensitivity_cpu,
    plot_morphling_fig7,
    plot_morphling_fig8,


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
        code=code_hash("plot_morphling_table2", *PLOTS),
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
        code=code_hash("plot_morphling_prediction", *PLOTS),
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
        code=code_hash("plot_morphling_sensitivity", *CURVES),
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
        code=code_hash("plot_morphling_sensitivity_cpu", *CURVES),
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
        code=code_hash("plot_morphling_fig7", *PLOTS, "presets.py", "workloads/**/*"),
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
        code=code_hash("plot_morphling_fig8", *PLOTS),
    script:
        "../workflow/scripts/plot_morphling_fig8.py"
