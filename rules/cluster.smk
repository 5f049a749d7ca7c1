# Cluster experiments of the Morphling paper: job lists, what policies know, simulations. One job runs many.


localrules:
    morphling_import_workloads,


rule morphling_generate_workloads:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
    output:
        **{name: f"results/{{source}}/morphling/workloads/{name}.csv" for name in JOB_LIST_NAMES},
    log:
        "logs/{source}/morphling/morphling_generate_workloads.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_generate_workloads.tsv"
    wildcard_constraints:
        source="emulated|measured",
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        workloads=list(SIM.workloads),
        options={
            "seed": SIM.job_lists.seed,
            "n_jobs": SIM.job_lists.jobs,
            "naive_jobs": SIM.job_lists.naive_jobs,
            "naive_span_s": SIM.job_lists.naive_span_s,
        },
        code=code_hash("morphling_generate_workloads"),
    script:
        "../workflow/scripts/morphling_generate_workloads.py"


rule morphling_import_workloads:
    input:
        files=published_job_lists,
        register=SETTINGS.throughput.published.register_file,
    output:
        **{name: f"results/published/morphling/workloads/{name}.csv" for name in JOB_LIST_NAMES},
    log:
        "logs/published/morphling/morphling_import_workloads.log",
    benchmark:
        "benchmarks/results/published/morphling/morphling_import_workloads.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        workloads=list(SIM.workloads),
        directory=lambda wildcards: str(published_directory(SETTINGS)),
        code=code_hash("morphling_import_workloads"),
    script:
        "../workflow/scripts/morphling_import_workloads.py"


rule morphling_steering:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
        lists=lambda wildcards: job_lists(wildcards.source),
    output:
        knowledge="results/{source}/morphling/steering.csv",
    log:
        "logs/{source}/morphling/morphling_steering.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_steering.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        options={
            "cluster": SETTINGS.cluster,
            "form": SETTINGS.performance_model.experiment_form,
            "mode": SIM.predictions,
        },
        code=code_hash("morphling_steering"),
    script:
        "../workflow/scripts/morphling_steering.py"


rule morphling_getting_started:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/getting_started.csv",
    log:
        "logs/{source}/morphling/morphling_getting_started.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_getting_started.tsv"
    conda:
        CPU
    threads: 1
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        options={
            "policies": list(SIM.policies),
            "delays_s": list(SIM.restart_delays_s),
            "interval_s": SIM.interval_s,
        },
        code=code_hash("morphling_getting_started", chosen=SIM.policies),
    script:
        "../workflow/scripts/morphling_getting_started.py"


rule morphling_table4:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/table4.csv",
        jct="results/{source}/morphling/jct.csv",
        allocation="results/{source}/morphling/allocation.csv",
        schedule="results/{source}/morphling/schedule.csv",
    log:
        "logs/{source}/morphling/morphling_table4.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_table4.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        options={
            "traces": list(SIM.traces),
            "policies": list(SIM.policies),
            "delays_s": list(SIM.restart_delays_s),
            "interval_s": SIM.interval_s,
            "shown": list(SIM.shown),
        },
        code=code_hash("morphling_table4", chosen=SIM.policies),
    script:
        "../workflow/scripts/morphling_table4.py"


rule morphling_perturbed:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/perturbed.csv",
    log:
        "logs/{source}/morphling/morphling_perturbed.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_perturbed.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        options={
            "traces": list(SIM.traces),
            "policies": list(SIM.perturbed.policies),
            "delays_s": list(SIM.restart_delays_s),
            "interval_s": SIM.interval_s,
            "seeds": list(SIM.perturbed.seeds),
            "std_s": SIM.perturbed.std_s,
        },
        code=code_hash("morphling_perturbed", chosen=SIM.perturbed.policies),
    script:
        "../workflow/scripts/morphling_perturbed.py"


rule morphling_load:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/load.csv",
        summary="results/{source}/morphling/load_summary.csv",
    log:
        "logs/{source}/morphling/morphling_load.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_load.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        study="load",
        drawn=drawn_lists(SIM.load.seeds),
        options={
            "policies": list(SIM.load.policies),
            "factors": list(SIM.load.factors),
            "delay_s": SIM.restart_delays_s[0],
            "interval_s": SIM.interval_s,
        },
        code=code_hash("morphling_study", chosen=SIM.load.policies),
    script:
        "../workflow/scripts/morphling_study.py"


rule morphling_large_models:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/large_models.csv",
        summary="results/{source}/morphling/large_models_summary.csv",
    log:
        "logs/{source}/morphling/morphling_large_models.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_large_models.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        study="large_models",
        drawn=drawn_lists(SIM.large_models.seeds),
        options={
            "policies": list(SIM.large_models.policies),
            "shares": list(SIM.large_models.shares),
            "delay_s": SIM.restart_delays_s[0],
            "interval_s": SIM.interval_s,
        },
        code=code_hash("morphling_study", chosen=SIM.large_models.policies),
    script:
        "../workflow/scripts/morphling_study.py"


rule morphling_rounds:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/rounds.csv",
        summary="results/{source}/morphling/rounds_summary.csv",
    log:
        "logs/{source}/morphling/morphling_rounds.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_rounds.tsv"
    conda:
        CPU
    threads: 4
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        study="rounds",
        drawn=drawn_lists(SIM.rounds.seeds),
        options={
            "policies": list(SIM.rounds.policies),
            "intervals_s": list(SIM.rounds.intervals_s),
            "delay_s": SIM.restart_delays_s[0],
        },
        code=code_hash("morphling_study", chosen=SIM.rounds.policies),
    script:
        "../workflow/scripts/morphling_study.py"


rule morphling_scale:
    input:
        **simulation_inputs(),
    output:
        table="results/{source}/morphling/scale.csv",
    log:
        "logs/{source}/morphling/morphling_scale.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_scale.tsv"
    conda:
        CPU
    threads: 1
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        workloads=list(SIM.workloads),
        lists=JOB_LIST_NAMES,
        cluster=SETTINGS.cluster,
        options={
            "policies": list(SIM.scale.policies),
            "sizes": [(size.jobs, size.gpus) for size in SIM.scale.sizes],
            "delay_s": SIM.restart_delays_s[0],
            "interval_s": SIM.interval_s,
        },
        code=code_hash("morphling_scale", chosen=SIM.scale.policies),
    script:
        "../workflow/scripts/morphling_scale.py"
