# Slapo (ASPLOS 2024): what a schedule language promises, and how its tuner finds the best schedule.


# Tables of searches and models: source, experiment, printed cells, tables.
FIGURES_OF_SLAPO = ["fig7", "fig8", "fig9"]
SEARCHES_OF_SLAPO = ["fig10", "fig10_searches", "fig10_fit"]
for source, experiment, cells, names in (
    ("emulated", "modelled", FIGURES_OF_SLAPO, FIGURES_OF_SLAPO),
    ("published", "modelled", FIGURES_OF_SLAPO, FIGURES_OF_SLAPO),
    ("emulated", "tuning", ["fig10"], SEARCHES_OF_SLAPO),
    ("published", "tuning", ["fig10"], [*SEARCHES_OF_SLAPO, "fig10_grids"]),
    ("published", "inequalities", [*FIGURES_OF_SLAPO, "fig10"], ["inequalities"]),
):

    rule:
        name:
            f"slapo_{experiment}_{source}"
        input:
            **{name: f"config/published/slapo_{name}.csv" for name in cells},
        output:
            **{name: f"results/{source}/slapo/{name}.csv" for name in names},
        log:
            f"logs/{source}/slapo/slapo_{experiment}.log",
        benchmark:
            f"benchmarks/results/{source}/slapo/slapo_{experiment}.tsv"
        conda:
            CPU
        resources:
            **asks(minutes=10),
        params:
            experiment=f"makespan.papers.slapo:{experiment}_experiment",
            options=SETTINGS.slapo.options_of(experiment, source),
            code=code_hash(
                "run_experiment",
                f"makespan.papers.slapo:{experiment}_experiment",
                "makespan.papers.slapo:read_published",
            ),
        script:
            "../workflow/scripts/run_experiment.py"


# What runs on this machine: experiment, printed cells, processes at a time, GPUs. Steps and searches are timed on
# cores, so nothing runs beside them.
VERIFIED = SETTINGS.slapo.verify.most_processes
for experiment, cells, n_processes, on_gpus in (
    ("verify", [], all_cores(VERIFIED), profile_gpus(gpu=VERIFIED)),
    ("table4", ["table4"], 1, {}),
    ("fig9_steps", [], all_cores(max(SETTINGS.slapo.fig9_steps.processes)), {}),
    ("tuner", [], all_cores(1), {}),
):

    rule:
        name:
            f"slapo_{experiment}_measured"
        input:
            **{name: f"config/published/slapo_{name}.csv" for name in cells},
        output:
            **{name: f"results/measured/slapo/{name}.csv" for name in [experiment.removesuffix("_steps")]},
        log:
            f"logs/measured/slapo/slapo_{experiment}.log",
        benchmark:
            f"benchmarks/results/measured/slapo/slapo_{experiment}.tsv"
        priority: 1
        conda:
            GPU
        threads: n_processes
        resources:
            **on_gpus,
            **asks(minutes=60, mem_mb=4000),
        params:
            experiment=f"makespan.papers.slapo:{experiment}_experiment",
            options=SETTINGS.slapo.options_of(experiment, "measured"),
            code=code_hash(
                "run_experiment",
                f"makespan.papers.slapo:{experiment}_experiment",
                "makespan.papers.slapo:read_published",
                "makespan.slapo:apply_schedule",
                "makespan.training.zoo:build_family",
            ),
        script:
            "../workflow/scripts/run_experiment.py"
