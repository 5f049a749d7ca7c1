# The ledger: the statements of each paper judged by the results of each source, then over all sources.


rule evaluate_claims:
    input:
        unpack(deciding_tables),
        times=judged_times,
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
        code=lambda wildcards: code_hash("evaluate_claims", OPTIONS[wildcards.paper].checks_code()),
    script:
        "../workflow/scripts/evaluate_claims.py"


rule join_claims:
    input:
        **{
            source: [f"results/{source}/{paper}/claims.csv" for paper in papers]
            for source in dict.fromkeys(source for _, source in BUILT)
            if (papers := [paper for paper, built in BUILT if built == source])
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
