# The ledger: the statements of each paper judged by the results of each source, then over all sources.


localrules:
    evaluate_claims,
    join_claims,


rule evaluate_claims:
    input:
        unpack(claim_tables),
    output:
        claims="results/{source}/{paper}/claims.csv",
    log:
        "logs/{source}/{paper}/evaluate_claims.log",
    benchmark:
        "benchmarks/results/{source}/{paper}/evaluate_claims.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        options={"form": SETTINGS.performance_model.experiment_form},
        code=lambda wildcards: code_hash("evaluate_claims", f"makespan.papers.{wildcards.paper}:LEDGER"),
    script:
        "../workflow/scripts/evaluate_claims.py"


rule join_claims:
    input:
        **{source: claim_ledgers(source) for source in SETTINGS.throughput.sources},
    output:
        claims="results/claims.csv",
    log:
        "logs/join_claims.log",
    conda:
        CPU
    resources:
        mem_mb=500,
        runtime=5,
    params:
        code=code_hash("join_claims"),
    script:
        "../workflow/scripts/join_claims.py"
