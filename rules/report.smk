# The report: one page over all results.


rule write_report:
    input:
        DEFAULT_PRODUCTS,
    output:
        page="results/report.html",
    log:
        "logs/write_report.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        settings=SETTINGS.model_dump(mode="json"),
        code=code_hash("write_report", chosen=[]),
    script:
        "../workflow/scripts/write_report.py"
