# Throughput tables: one table per workload, the same schema whatever the source; and what else a source shares.


rule emulate_throughput:
    input:
        constants=named_files(SETTINGS.throughput.emulated.model_dump()),
    output:
        tables=ensure(throughput_tables("emulated"), non_empty=True),
    log:
        "logs/emulated/emulate_throughput.log",
    benchmark:
        "benchmarks/results/emulated/emulate_throughput.tsv"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        workloads=WORKLOADS,
        cluster=SETTINGS.cluster,
        options=SETTINGS.throughput.emulated.model_dump(),
        code=code_hash("emulate_throughput"),
    script:
        "../workflow/scripts/emulate_throughput.py"


rule import_published:
    input:
        traces=lambda wildcards: registered("published_files"),
        register=SETTINGS.throughput.published.register_file,
    output:
        tables=ensure(throughput_tables("published"), non_empty=True),
    log:
        "logs/published/import_published.log",
    benchmark:
        "benchmarks/results/published/import_published.tsv"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        workloads=WORKLOADS,
        directory=lambda wildcards: str(published_directory(SETTINGS)),
        default_cpu_threads=SETTINGS.throughput.published.default_cpu_threads,
        code=code_hash("import_throughput"),
    script:
        "../workflow/scripts/import_throughput.py"


# The source measured is filled by one of two: the profile of small workloads, or the user's own tables.
if PROFILED:

    include: "profiling.smk"

else:

    rule import_measured:
        input:
            traces=[f"{SETTINGS.throughput.measured.directory}/{workload}.csv" for workload in WORKLOADS],
        output:
            tables=ensure(throughput_tables("measured"), non_empty=True),
        log:
            "logs/measured/import_measured.log",
        conda:
            CPU
        resources:
            **asks(minutes=10),
        params:
            workloads=WORKLOADS,
            directory=SETTINGS.throughput.measured.directory,
            code=code_hash("import_throughput"),
        script:
            "../workflow/scripts/import_throughput.py"


# Files that are in place are sources, whoever put them there; only those that are missing are fetched.
if SETTINGS.throughput.published.fetch and (MISSING := registered("missing_datasets")):

    rule fetch_published:
        input:
            register=ancient(SETTINGS.throughput.published.register_file),
        output:
            file=ensure(
                f"{SETTINGS.throughput.published.fetched_directory}/{{dataset}}",
                sha256=lambda wildcards: MISSING[wildcards.dataset].sha256,
            ),
        log:
            "logs/published/fetch_published/{dataset}.log",
        wildcard_constraints:
            dataset="|".join(re.escape(path) for path in MISSING),
        localrule: True
        conda:
            CPU
        resources:
            **asks(minutes=10),
        params:
            name=lambda wildcards: MISSING[wildcards.dataset].name,
            directory=lambda wildcards, output: output.file.removesuffix(wildcards.dataset),
        script:
            "../workflow/scripts/fetch_published.py"


rule write_provenance:
    input:
        pins="requirements.txt",
        times=lambda wildcards: times_of(wildcards.source),
    output:
        record="results/{source}/provenance.json",
    log:
        "logs/{source}/write_provenance.log",
    localrule: True
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        settings=SETTINGS.model_dump(mode="json"),
        code=code_hash("write_provenance", chosen=[]),  # names of policies are checked, none runs
    script:
        "../workflow/scripts/write_provenance.py"
