# Small workloads profiled on the hardware at hand, and the same experiments on those measurements.
#
# Where GPUs are asked for, a job is as large as its points need. Without GPUs a job takes all cores, so that
# nothing else runs beside what is timed.


localrules:
    profile_collect,


# The profiled workloads take the place of those of the paper.
ruleorder: profile_fit_models > morphling_fit_models
ruleorder: profile_fit_models > morphling_table2
ruleorder: profile_fig7 > morphling_fig7


rule profile_environment:
    output:
        environment=ensure("results/measured/profile/environment.toml", non_empty=True),
    log:
        "logs/measured/profile_environment.log",
    benchmark:
        "benchmarks/results/measured/profile_environment.tsv"
    conda:
        GPU
    threads: profile_threads(PROFILE_PAIR)
    resources:
        **profile_gpus(gpu=PROFILE_PAIR),
        mem_mb=PROFILE_PAIR * PROFILE.mem_mb_per_process,
        runtime=PROFILE.runtime_min,
    params:
        workloads=list(PROFILE.workloads),
        processes=PROFILE_PAIR,
        cpu_threads=PROFILE.cpu_threads,
        device=PROFILE.device,
        code=code_hash("profile_environment"),
    script:
        "../workflow/scripts/profile_environment.py"


rule profile_points:
    input:
        environment=PROFILE_ENVIRONMENT if PROFILE_ENVIRONMENT.endswith(".toml") else [],
    output:
        part=ensure("results/measured/profile/{workload}/{job}.json", non_empty=True),
    log:
        "logs/measured/profile_points/{workload}/{job}.log",
    benchmark:
        "benchmarks/results/measured/profile_points/{workload}/{job}.tsv"
    wildcard_constraints:
        job=profile_job_names(True),
    conda:
        GPU
    threads: lambda wildcards: profile_threads(profile_placement(wildcards).n_gpus)
    resources:
        **profile_gpus(gpu=lambda wildcards: profile_placement(wildcards).n_gpus),
        mem_mb=lambda wildcards: profile_placement(wildcards).n_gpus * PROFILE.mem_mb_per_process,
        runtime=PROFILE.runtime_min,
    params:
        environment=lambda wildcards, input: input.environment or PROFILE.environment,
        points=profile_texts,
        procedure=PROFILE_PROCEDURE,
        code=code_hash("profile_points"),
    script:
        "../workflow/scripts/profile_points.py"


rule profile_nodes:
    input:
        environment=PROFILE_ENVIRONMENT if PROFILE_ENVIRONMENT.endswith(".toml") else [],
    output:
        part=ensure("results/measured/profile/{workload}/{job}.json", non_empty=True),
    log:
        "logs/measured/profile_nodes/{workload}/{job}.log",
    benchmark:
        "benchmarks/results/measured/profile_nodes/{workload}/{job}.tsv"
    wildcard_constraints:
        job=profile_job_names(False),
    conda:
        GPU
    threads: lambda wildcards: profile_placement(wildcards).gpus_per_node[-1] * PROFILE.cpu_threads
    resources:
        mpi="srun",
        nodes=lambda wildcards: profile_placement(wildcards).n_nodes,
        tasks=lambda wildcards: profile_placement(wildcards).n_nodes,
        tasks_per_gpu=0,
        mem_mb=lambda wildcards: profile_placement(wildcards).gpus_per_node[-1] * PROFILE.mem_mb_per_process,
        runtime=PROFILE.runtime_min,
        gres=lambda wildcards: profile_gres(profile_placement(wildcards)),
    params:
        environment=lambda wildcards, input: input.environment or PROFILE.environment,
        points=profile_texts,
        procedure=PROFILE_PROCEDURE,
        code=code_hash("profile_nodes"),
    script:
        "../workflow/scripts/profile_nodes.py"


rule profile_collect:
    input:
        parts=lambda wildcards: [
            f"results/measured/profile/{wildcards.workload}/{job}.json"
            for job in PROFILE_JOBS[wildcards.workload]
        ],
    output:
        table=ensure("results/measured/throughput/{workload}.csv", non_empty=True),
        record=ensure("results/measured/throughput/{workload}.json", non_empty=True),
    log:
        "logs/measured/profile_collect/{workload}.log",
    wildcard_constraints:
        workload="|".join(map(re.escape, PROFILE.workloads)),
    conda:
        GPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=code_hash("profile_collect"),
    script:
        "../workflow/scripts/profile_collect.py"


rule profile_fit_models:
    input:
        tables=expand(rules.profile_collect.output.table, workload=PROFILE.workloads),
        records=expand(rules.profile_collect.output.record, workload=PROFILE.workloads),
        environment=PROFILE_ENVIRONMENT if PROFILE_ENVIRONMENT.endswith(".toml") else [],
    output:
        fits=expand("results/measured/morphling/fits/{workload}.csv", workload=PROFILE.workloads),
        rows="results/measured/morphling/table2_rows.csv",
        table="results/measured/morphling/table2.csv",
        summary="results/measured/morphling/table2_summary.csv",
    log:
        "logs/measured/morphling/profile_fit_models.log",
    benchmark:
        "benchmarks/results/measured/morphling/profile_fit_models.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        environment=lambda wildcards, input: input.environment or PROFILE.environment,
        forms=list(SETTINGS.performance_model.forms),
        code=code_hash("profile_fit_models"),
    script:
        "../workflow/scripts/profile_fit_models.py"


rule profile_fig7:
    input:
        table=f"results/measured/throughput/{PROFILE.workloads[0]}.csv",
        environment=PROFILE_ENVIRONMENT if PROFILE_ENVIRONMENT.endswith(".toml") else [],
    output:
        table="results/measured/morphling/fig7.csv",
    log:
        "logs/measured/morphling/profile_fig7.log",
    benchmark:
        "benchmarks/results/measured/morphling/profile_fig7.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        environment=lambda wildcards, input: input.environment or PROFILE.environment,
        form=SETTINGS.performance_model.experiment_form,
        stages=[stage.model_dump() for stage in SETTINGS.morphling.fig7.profiled_stages],
        code=code_hash("profile_fig7"),
    script:
        "../workflow/scripts/profile_fig7.py"
