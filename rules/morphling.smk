# Morphling (MLSys 2025): from throughput tables to tables, and real training runs.

from makespan.papers.morphling import EXPERIMENT_TABLES

MORPHLING = SETTINGS.morphling
SIM = MORPHLING.simulation
FORM = SETTINGS.performance_model.experiment_form
JOB_LISTS = ["naive", "base", "bp", "mt"]
JOB_LIST_FILES = {name: f"results/{{source}}/morphling/workloads/{name}.csv" for name in JOB_LISTS}

# The source that has the workloads of the paper, unlike a profile of small ones.
MODELLED = "|".join(source for source in SOURCES if source != PROFILED)


rule morphling_fit_models:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, MORPHLING.workloads),
        published="config/published/morphling_table2.csv",
    output:
        fits=[f"results/{{source}}/morphling/fits/{workload}.csv" for workload in MORPHLING.workloads],
        rows="results/{source}/morphling/table2_rows.csv",
        table="results/{source}/morphling/table2.csv",
        summary="results/{source}/morphling/table2_summary.csv",
    log:
        "logs/{source}/morphling/morphling_fit_models.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fit_models.tsv"
    wildcard_constraints:
        source=MODELLED,
    group:
        "experiments"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        cluster=SETTINGS.cluster,
        forms=list(SETTINGS.performance_model.forms),
        code=code_hash("morphling_fit_models"),
    script:
        "../workflow/scripts/morphling_fit_models.py"


rule morphling_sensitivity:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, MORPHLING.sensitivity.workloads),
    output:
        envelope="results/{source}/morphling/sensitivity.csv",
        families="results/{source}/morphling/sensitivity_families.csv",
    log:
        "logs/{source}/morphling/morphling_sensitivity.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_sensitivity.tsv"
    group:
        "experiments"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        options={
            "cluster_name": SETTINGS.cluster,
            "form": FORM,
            "max_gpus": MORPHLING.sensitivity.max_gpus,
            "cpu_threads": list(MORPHLING.sensitivity.cpu_threads),
        },
        code=code_hash("morphling_sensitivity"),
    script:
        "../workflow/scripts/morphling_sensitivity.py"


rule morphling_fig7:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, [MORPHLING.fig7.workload]),
        published="config/published/morphling_fig7.csv",
    output:
        table="results/{source}/morphling/fig7.csv",
    log:
        "logs/{source}/morphling/morphling_fig7.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fig7.tsv"
    wildcard_constraints:
        source=MODELLED,
    group:
        "experiments"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        cluster=SETTINGS.cluster,
        form=FORM,
        stages=[stage.model_dump() for stage in MORPHLING.fig7.stages],
        code=code_hash("morphling_fig7"),
    script:
        "../workflow/scripts/morphling_fig7.py"


rule morphling_fig8:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, MORPHLING.fig8.workloads),
        published="config/published/morphling_fig8.csv",
    output:
        table="results/{source}/morphling/fig8.csv",
    log:
        "logs/{source}/morphling/morphling_fig8.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_fig8.tsv"
    group:
        "experiments"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        gpus=MORPHLING.fig8.gpus,
        workloads=list(MORPHLING.fig8.workloads),
        code=code_hash("morphling_fig8"),
    script:
        "../workflow/scripts/morphling_fig8.py"


# The same on the profile of small workloads, which take the place of those of the paper.
if PROFILED:

    use rule morphling_fit_models as morphling_fit_profiled with:
        input:
            tables=throughput_tables("measured"),
            records=expand(rules.profile_collect.output.record, workload=PROFILE.workloads),
            environment=ENVIRONMENT_FILE,
        output:
            fits=expand("results/measured/morphling/fits/{workload}.csv", workload=PROFILE.workloads),
            rows="results/measured/morphling/table2_rows.csv",
            table="results/measured/morphling/table2.csv",
            summary="results/measured/morphling/table2_summary.csv",
        log:
            "logs/measured/morphling/morphling_fit_profiled.log",
        benchmark:
            "benchmarks/results/measured/morphling/morphling_fit_profiled.tsv"
        params:
            cluster=environment_of,

    use rule morphling_fig7 as morphling_fig7_profiled with:
        input:
            tables=throughput_tables("measured")[:1],
            environment=ENVIRONMENT_FILE,
        output:
            table="results/measured/morphling/fig7.csv",
        log:
            "logs/measured/morphling/morphling_fig7_profiled.log",
        benchmark:
            "benchmarks/results/measured/morphling/morphling_fig7_profiled.tsv"
        params:
            cluster=environment_of,
            stages=[stage.model_dump() for stage in MORPHLING.fig7.profiled_stages],


rule morphling_generate_workloads:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
    output:
        **JOB_LIST_FILES,
    log:
        "logs/{source}/morphling/morphling_generate_workloads.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_generate_workloads.tsv"
    wildcard_constraints:
        source="emulated|measured",
    conda:
        CPU
    resources:
        **asks(minutes=5),
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
        files=lambda wildcards: registered("paper_files", "morphling"),
        register=SETTINGS.throughput.published.register_file,
    output:
        **{name: file.format(source="published") for name, file in JOB_LIST_FILES.items()},
    log:
        "logs/published/morphling/morphling_import_workloads.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        workloads=list(SIM.workloads),
        directory=lambda wildcards: str(published_directory(SETTINGS)),
        code=code_hash("morphling_import_workloads"),
    script:
        "../workflow/scripts/morphling_import_workloads.py"


rule morphling_predictions:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
    output:
        predictions="results/{source}/morphling/predictions.csv",
    log:
        "logs/{source}/morphling/morphling_predictions.log",
    benchmark:
        "benchmarks/results/{source}/morphling/morphling_predictions.tsv"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        workloads=list(SIM.workloads),
        options={"cluster": SETTINGS.cluster, "form": FORM},
        code=code_hash("morphling_predictions"),
    script:
        "../workflow/scripts/morphling_predictions.py"


# Wall times are measured in two of them: in the small one simulations run one after the other, in `scale` two at
# a time. What takes all cores goes first, so that small jobs are left to run beside what takes one.
for experiment, options in SIM.experiments().items():

    rule:
        name:
            f"morphling_{experiment}"
        input:
            tables=lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
            lists=list(JOB_LIST_FILES.values()),
            predictions=rules.morphling_predictions.output.predictions,
        output:
            **{name: f"results/{{source}}/morphling/{name}.csv" for name in EXPERIMENT_TABLES[experiment]},
        log:
            f"logs/{{source}}/morphling/morphling_{experiment}.log",
        benchmark:
            f"benchmarks/results/{{source}}/morphling/morphling_{experiment}.tsv"
        priority: int(experiment != "getting_started")
        conda:
            CPU
        threads: {"getting_started": 1, "scale": 2}.get(experiment, 4)
        resources:
            **asks(minutes=30),
        params:
            workloads=list(SIM.workloads),
            lists=JOB_LISTS,
            cluster=SETTINGS.cluster,
            experiment=experiment,
            mode=SIM.predictions,
            drawn=SIM.drawn(experiment),
            options=options,
            code=code_hash("morphling_simulate", chosen=options.get("policies", ["morphling"])),
        script:
            "../workflow/scripts/morphling_simulate.py"


rule morphling_threads:
    output:
        table="results/emulated/morphling/threads.csv",
    log:
        "logs/emulated/morphling/morphling_threads.log",
    benchmark:
        "benchmarks/results/emulated/morphling/morphling_threads.tsv"
    priority: 1
    conda:
        CPU
    threads: 4
    resources:
        **asks(minutes=15),
    params:
        emulator=SETTINGS.throughput.emulated.model_dump()
        | {"cluster": SETTINGS.cluster, "cpu_threads": SIM.threads.cpu_threads},
        options=SIM.of_threads(FORM),
        code=code_hash("morphling_threads", chosen=SIM.threads.policies),
    script:
        "../workflow/scripts/morphling_threads.py"


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
    priority: 1
    conda:
        GPU
    threads: 4
    resources:
        **profile_gpus(gpu=MORPHLING.fig9.n_processes),
        **asks(minutes=15, mem_mb=3000),
    params:
        experiment=MORPHLING.fig9.experiment(),
        code=code_hash("morphling_fig9"),
    script:
        "../workflow/scripts/morphling_fig9.py"
