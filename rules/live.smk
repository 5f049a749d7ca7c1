# Live runs: real training processes under a policy, beside the prediction of the same, written before.

LIVE_RUNS = SETTINGS.live.runs()


rule run_live:
    output:
        table="results/measured/live/{run}.csv",
        jobs="results/measured/live/{run}_jobs.csv",
        prediction="results/measured/live/{run}_prediction.json",
    log:
        "logs/measured/run_live/{run}.log",
    benchmark:
        "benchmarks/results/measured/run_live/{run}.tsv"
    wildcard_constraints:
        run="|".join(map(re.escape, LIVE_RUNS)),
    conda:
        GPU
    threads: all_cores(SETTINGS.live.slots)
    resources:
        **asks(minutes=20, mem_mb=4000),
    params:
        setting=lambda wildcards: LIVE_RUNS[wildcards.run],
        code=lambda wildcards: code_hash("run_live", chosen=[LIVE_RUNS[wildcards.run]["policy"]]),
    script:
        "../workflow/scripts/run_live.py"


rule join_live:
    input:
        expand("results/measured/live/{run}.csv", run=LIVE_RUNS),
    output:
        table="results/measured/live/live.csv",
        summary="results/measured/live/live_summary.csv",
    log:
        "logs/measured/join_live.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        code=code_hash("join_live"),
    script:
        "../workflow/scripts/join_live.py"
