# What stands beside all results of a source: the ledger of claims and what the results were made with.


localrules:
    evaluate_claims,
    write_provenance,


rule evaluate_claims:
    input:
        unpack(claim_tables),
        table4_published="config/published/morphling_table4.csv",
    output:
        claims="results/{source}/claims.csv",
    log:
        "logs/{source}/evaluate_claims.log",
    benchmark:
        "benchmarks/results/{source}/evaluate_claims.tsv"
    conda:
        CPU
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        form=SETTINGS.performance_model.experiment_form,
        code=code_hash("evaluate_claims"),
    script:
        "../workflow/scripts/evaluate_claims.py"


rule write_provenance:
    input:
        pins="requirements.txt",
    output:
        record="results/{source}/provenance.json",
    log:
        "logs/{source}/write_provenance.log",
    conda:
        CPU
    resources:
        mem_mb=500,
        runtime=5,
    params:
        settings=SETTINGS.model_dump(mode="json"),
        code=code_hash("write_provenance"),
    script:
        "../workflow/scripts/write_provenance.py"
