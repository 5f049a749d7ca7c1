# Live runs: real training processes under a policy, beside the simulation of the same.

LIVE = {f"{run.policy}-{run.workload}": run for run in SETTINGS.live}


rule run_live:
    output:
        table="results/measured/live/{run}.csv",
        jobs="results/measured/live/{run}_jobs.csv",
    log:
        "logs/measured/run_live/{run}.log",
    benchmark:
        "benchmarks/results/measured/run_live/{run}.tsv"
    wildcard_constraints:
        run="|".join(LIVE) or "none",
    conda:
        GPU
    threads: lambda wildcards: all_cores(LIVE[wildcards.run].slots)
    resources:
        **asks(minutes=15, mem_mb=4000),
    params:
        setting=lambda wildcards: LIVE[wildcards.run].model_dump(include={"policy", "workload", "slots"}),
        code=lambda wildcards: code_hash("run_live", chosen=[LIVE[wildcards.run].policy]),
    script:
        "../workflow/scripts/run_live.py"
