# Oobleck (SOSP 2023): simulations of systems that lose nodes, and what becomes of pipelines that do.

OOBLECK = SETTINGS.oobleck.simulation


def oobleck_traces(source):
    """Return where the traces of a source come from: seeds of generated ones, or the authors' files."""
    if source == "emulated":
        return {"n_seeds": OOBLECK.seeds}
    return {
        "directory": str(published_directory(SETTINGS)),
        "register": SETTINGS.throughput.published.register_file,
    }


rule oobleck_fig9:
    input:
        **{name: f"config/published/oobleck_{name}.csv" for name in ("throughput", "fig9")},
        files=lambda wildcards: (
            registered("paper_files", "oobleck") if wildcards.source == "published" else []
        ),
    output:
        fig9="results/{source}/oobleck/fig9.csv",
    log:
        "logs/{source}/oobleck/oobleck_fig9.log",
    benchmark:
        "benchmarks/results/{source}/oobleck/oobleck_fig9.tsv"
    wildcard_constraints:
        source="emulated|published",
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        experiment="makespan.papers.oobleck:fig9_experiment",
        names=list(OOBLECK.failure_traces),
        traces=lambda wildcards: oobleck_traces(wildcards.source),
        options=OOBLECK.systems(),
        code=code_hash("oobleck_simulate", "makespan.papers.oobleck:fig9_experiment"),
    script:
        "../workflow/scripts/oobleck_simulate.py"


rule oobleck_reconfiguration:
    input:
        reconfiguration="config/published/oobleck_reconfiguration.csv",
    output:
        reconfiguration="results/emulated/oobleck/reconfiguration.csv",
    log:
        "logs/emulated/oobleck/oobleck_reconfiguration.log",
    benchmark:
        "benchmarks/results/emulated/oobleck/oobleck_reconfiguration.tsv"
    conda:
        CPU
    resources:
        **asks(minutes=10),
    params:
        experiment="makespan.papers.oobleck:reconfiguration_experiment",
        options=SETTINGS.oobleck.losses.model_dump(),
        code=code_hash("oobleck_experiment", "makespan.papers.oobleck:reconfiguration_experiment"),
    script:
        "../workflow/scripts/oobleck_experiment.py"
