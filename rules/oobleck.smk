# Oobleck (SOSP 2023): simulations of systems that lose nodes.

OOBLECK = SETTINGS.oobleck.simulation


# Where the traces of a source come from: seeds of generated ones, or the authors' files.
OOBLECK_TRACES = {
    "emulated": lambda seeds: {"seeds": seeds},
    "published": lambda seeds: {
        "names": list(seeds),
        "directory": str(published_directory(SETTINGS)),
        "register": SETTINGS.throughput.published.register_file,
    },
}


for kind, seeds, cells, results in (
    ("failure", OOBLECK.failure_traces, ("fig9", "fig13"), ("fig1", "fig9", "fig12", "fig13")),
    ("spot", OOBLECK.spot_traces, ("fig10",), ("fig10", "fig14", "fig15", "ablation")),
):

    rule:
        name:
            f"oobleck_{kind}"
        input:
            **{name: f"config/published/oobleck_{name}.csv" for name in ("throughput", *cells)},
            files=lambda wildcards: (
                registered("paper_files", "oobleck") if wildcards.source == "published" else []
            ),
        output:
            **{name: f"results/{{source}}/oobleck/{name}.csv" for name in results},
        log:
            f"logs/{{source}}/oobleck/oobleck_{kind}.log",
        benchmark:
            f"benchmarks/results/{{source}}/oobleck/oobleck_{kind}.tsv"
        wildcard_constraints:
            source="emulated|published",
        conda:
            CPU
        resources:
            **asks(minutes=10),
        params:
            experiment=f"makespan.papers.oobleck:{kind}_experiments",
            traces=lambda wildcards, seeds=seeds: OOBLECK_TRACES[wildcards.source](seeds),
            options=OOBLECK.experiments(kind),
            code=code_hash("oobleck_simulate", f"makespan.papers.oobleck:{kind}_experiments"),
        script:
            "../workflow/scripts/oobleck_simulate.py"


# Tables that rest on no trace: the experiment and the printed cells that it reads.
OOBLECK_TABLES = {
    "templates": ("makespan.papers.oobleck:template_experiment", []),
    "instantiation": ("makespan.papers.oobleck:instantiation_experiment", ["instantiation"]),
    "reconfiguration": ("makespan.papers.oobleck:reconfiguration_experiment", ["reconfiguration"]),
    "layer_throughput": ("makespan.papers.oobleck:layer_throughput_experiment", ["throughput"]),
    "studies": ("makespan.papers.oobleck:studies_experiment", ["throughput"]),
}


rule oobleck_table:
    input:
        lambda wildcards: [
            f"config/published/oobleck_{cells}.csv" for cells in OOBLECK_TABLES[wildcards.table][1]
        ],
    output:
        "results/emulated/oobleck/{table}.csv",
    log:
        "logs/emulated/oobleck/oobleck_{table}.log",
    benchmark:
        "benchmarks/results/emulated/oobleck/oobleck_{table}.tsv"
    wildcard_constraints:
        table="|".join(OOBLECK_TABLES),
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        experiment=lambda wildcards: OOBLECK_TABLES[wildcards.table][0],
        cells=lambda wildcards: OOBLECK_TABLES[wildcards.table][1],
        options=lambda wildcards: SETTINGS.oobleck.options_of(wildcards.table),
        code=lambda wildcards: code_hash("oobleck_table", OOBLECK_TABLES[wildcards.table][0]),
    script:
        "../workflow/scripts/oobleck_table.py"


# Timed without anything beside it, so it takes all cores.
rule oobleck_predictions:
    output:
        "results/measured/oobleck/predictions.csv",
    log:
        "logs/measured/oobleck/oobleck_predictions.log",
    benchmark:
        "benchmarks/results/measured/oobleck/oobleck_predictions.tsv"
    priority: 1
    conda:
        GPU
    threads: all_cores(SETTINGS.oobleck.execution.predictions.most_nodes)
    resources:
        **asks(minutes=30, mem_mb=4000),
    params:
        experiment="makespan.papers.oobleck:predictions_experiment",
        cells=[],
        options=SETTINGS.oobleck.execution.options_of("predictions"),
        code=code_hash("oobleck_table", "makespan.papers.oobleck:predictions_experiment"),
    script:
        "../workflow/scripts/oobleck_table.py"


# Pauses are timed, so nothing runs beside.
rule oobleck_hybrid:
    output:
        hybrid="results/measured/oobleck/hybrid.csv",
        kills="results/measured/oobleck/hybrid_kills.csv",
        summary="results/measured/oobleck/hybrid_summary.csv",
    log:
        "logs/measured/oobleck/oobleck_hybrid.log",
    benchmark:
        "benchmarks/results/measured/oobleck/oobleck_hybrid.tsv"
    priority: 1
    conda:
        GPU
    threads: all_cores(SETTINGS.oobleck.hybrid.nodes)
    resources:
        **asks(minutes=60, mem_mb=4000),
    params:
        experiment="makespan.papers.oobleck:hybrid_experiment",
        cells=[],
        options=SETTINGS.oobleck.hybrid.model_dump(),
        code=code_hash("oobleck_table", "makespan.papers.oobleck:hybrid_experiment"),
    script:
        "../workflow/scripts/oobleck_table.py"
