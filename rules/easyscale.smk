# EasyScale (SC 2023): from a job list to the tables of the cluster experiments.

EASYSCALE = SETTINGS.easyscale.simulation
BESIDE_SERVING = SETTINGS.easyscale.beside_serving()


rule easyscale_generate_jobs:
    output:
        jobs="results/{source}/easyscale/jobs.csv",
    log:
        "logs/{source}/easyscale/easyscale_generate_jobs.log",
    wildcard_constraints:
        source="emulated",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        options=EASYSCALE.job_list.model_dump(),
        code=code_hash("easyscale_generate_jobs"),
    script:
        "../workflow/scripts/easyscale_generate_jobs.py"


rule easyscale_import_jobs:
    input:
        files=lambda wildcards: registered("paper_files", "easyscale"),
        register=SETTINGS.throughput.published.register_file,
    output:
        jobs="results/published/easyscale/jobs.csv",
    log:
        "logs/published/easyscale/easyscale_import_jobs.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        directory=lambda wildcards: str(published_directory(SETTINGS)),
        dedup=EASYSCALE.dedup,
        code=code_hash("easyscale_import_jobs"),
    script:
        "../workflow/scripts/easyscale_import_jobs.py"


rule easyscale_simulate:
    input:
        **{
            artifact: f"config/published/easyscale_{artifact}.csv"
            for artifact in ("fig11", "fig12", "fig14", "fig15")
        },
        jobs="results/{source}/easyscale/jobs.csv",
    output:
        fig14="results/{source}/easyscale/fig14.csv",
        fig14_jobs="results/{source}/easyscale/fig14_jobs.csv",
        fig15="results/{source}/easyscale/fig15.csv",
        sensitivity="results/{source}/easyscale/sensitivity.csv",
    log:
        "logs/{source}/easyscale/easyscale_simulate.log",
    benchmark:
        "benchmarks/results/{source}/easyscale/easyscale_simulate.tsv"
    conda:
        CPU
    threads: 4
    resources:
        **asks(minutes=10),
    params:
        experiment="makespan.papers.easyscale:cluster_experiments",
        options=EASYSCALE.experiments(),
        code=code_hash(
            "easyscale_simulate",
            "makespan.papers.easyscale:cluster_experiments",
            chosen=[*EASYSCALE.gang_policies, *EASYSCALE.elastic_policies],
        ),
    script:
        "../workflow/scripts/easyscale_simulate.py"


rule easyscale_serving:
    input:
        **{
            artifact: f"config/published/easyscale_{artifact}.csv"
            for artifact in ("fig11", "fig12", "serving")
        },
        jobs="results/{source}/easyscale/jobs.csv",
    output:
        serving="results/{source}/easyscale/serving.csv",
        serving_rounds="results/{source}/easyscale/serving_rounds.csv",
    log:
        "logs/{source}/easyscale/easyscale_serving.log",
    benchmark:
        "benchmarks/results/{source}/easyscale/easyscale_serving.tsv"
    conda:
        CPU
    threads: 2
    resources:
        **asks(minutes=10),
    params:
        experiment="makespan.papers.easyscale:serving_experiment",
        options=BESIDE_SERVING,
        code=code_hash(
            "easyscale_simulate",
            "makespan.papers.easyscale:serving_experiment",
            chosen=BESIDE_SERVING["policies"],
        ),
    script:
        "../workflow/scripts/easyscale_simulate.py"


# Figs 10 to 13 are timed without anything beside, so they take all cores; each by itself, so that what was
# measured of one is kept whatever becomes of the next.
TIMED = ["fig10", "fig11", "fig12", "fig13"]
ON_ALL_CORES = all_cores(SETTINGS.easyscale.overheads.ranks)
for experiment, function, options, names, threads, on_gpus in (
    (
        "fig9",
        "fig9_experiment",
        SETTINGS.easyscale.fig9.experiment(),
        ["fig9", "fig9_summary"],
        4,
        profile_gpus(gpu=4),
    ),
    (
        "gap",
        "gap_experiment",
        SETTINGS.easyscale.gap.experiment(),
        ["gap", "gap_spread", "gap_curves"],
        4,
        {},
    ),
    *(
        (name, "measure_overheads", SETTINGS.easyscale.overheads.experiment(name), [name], ON_ALL_CORES, {})
        for name in TIMED
    ),
):

    rule:
        name:
            f"easyscale_{experiment}"
        input:
            **{experiment: f"config/published/easyscale_{experiment}.csv"},
        output:
            **{name: f"results/measured/easyscale/{name}.csv" for name in names},
        log:
            f"logs/measured/easyscale/easyscale_{experiment}.log",
        benchmark:
            f"benchmarks/results/measured/easyscale/easyscale_{experiment}.tsv"
        priority: 1
        conda:
            GPU
        threads: threads
        resources:
            **on_gpus,
            **asks(minutes=120, mem_mb=4000),
        params:
            experiment=f"makespan.papers.easyscale:{function}",
            options=options,
            code=code_hash(
                "run_experiment",
                f"makespan.papers.easyscale:{function}",
                "makespan.papers.easyscale:read_published",
            ),
        script:
            "../workflow/scripts/run_experiment.py"
