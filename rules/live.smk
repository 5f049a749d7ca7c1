# A live run: real training processes under a policy, beside the simulation of the same.

LIVE_SLOTS = 2


rule morphling_live:
    output:
        table=LIVE_TABLE,
        jobs="results/measured/morphling/live_jobs.csv",
    log:
        "logs/measured/morphling/morphling_live.log",
    benchmark:
        "benchmarks/results/measured/morphling/morphling_live.tsv"
    conda:
        GPU
    threads: max(LIVE_SLOTS, workflow.resource_settings.cores or 1)
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        policy="morphling",
        workload="live-small",
        slots=LIVE_SLOTS,
        code=code_hash("morphling_live", chosen=["morphling"]),
    script:
        "../workflow/scripts/morphling_live.py"
