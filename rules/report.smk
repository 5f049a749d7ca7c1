# What the results of a source were made with.


localrules:
    write_provenance,


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
