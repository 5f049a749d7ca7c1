# The ledger: the statements of each paper judged by the results of each source, then over all sources.


rule evaluate_claims:
    input:
        unpack(deciding_tables),
        times=lambda wildcards: times_of(wildcards.source),
    output:
        claims="results/{source}/{paper}/claims.csv",
    log:
        "logs/{source}/{paper}/evaluate_claims.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        options={"form": SETTINGS.performance_model.experiment_form},
        untimed=untimed_tables,
        code=lambda wildcards: code_hash("evaluate_claims", f"makespan.papers.{wildcards.paper}:LEDGER"),
    script:
        "../workflow/scripts/evaluate_claims.py"


rule join_claims:
    input:
        **{
            source: expand("results/{source}/{paper}/claims.csv", source=source, paper=PAPERS)
            for source in SETTINGS.throughput.sources
        },
    output:
        claims="results/claims.csv",
    log:
        "logs/join_claims.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        code=code_hash("join_claims"),
    script:
        "../workflow/scripts/join_claims.py"
