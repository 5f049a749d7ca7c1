# What all rules share: the checked configuration, wildcards.

import re
from pathlib import Path

from makespan.config import check_settings, code_hash as config_code_hash, published_directory
from makespan.errors import MakespanError
from makespan.papers import figures

try:
    SETTINGS = check_settings(config)
except MakespanError as error:
    raise WorkflowError(error) from None

CPU = "../envs/cpu.yaml"
GPU = "../envs/gpu.yaml"

# Tables and figures of the Morphling experiments; one whose workloads are not configured is left out.
NEEDS = {
    "fig7": {SETTINGS.morphling.fig7.workload},
    "fig8": set(SETTINGS.morphling.fig8.workloads),
}
LEFT_OUT = {name for name, needed in NEEDS.items() if not needed <= set(SETTINGS.morphling.workloads)}
SIMULATED = [
    "getting_started",
    "table4",
    "perturbed",
    "load",
    "load_summary",
    "large_models",
    "large_models_summary",
    "rounds",
    "rounds_summary",
    "scale",
]
TABLES = [
    name
    for name in [
        "table2",
        "table2_rows",
        "table2_summary",
        "sensitivity",
        "sensitivity_families",
        "fig7",
        "fig8",
        *SIMULATED,
    ]
    if name not in LEFT_OUT
]
PAPERS = ["morphling"]
FIGURES = {paper: figures(paper) for paper in PAPERS}

# Tables that no statement is about.
UNJUDGED = {
    *("table2_rows", "table2_summary", "rounds", "rounds_summary", "scale"),
    *("load_summary", "large_models_summary"),
}
JUDGED = [name for name in TABLES if name not in UNJUDGED]

SIM = SETTINGS.morphling.simulation
JOB_LIST_NAMES = ["naive", "base", "bp", "mt"]
ABLATIONS = ("-e", "-r", "-n")


wildcard_constraints:
    source="emulated|published|measured",
    paper="|".join(PAPERS),


def code_hash(script, *more, chosen=None):
    """Return the hash of the code that a workflow script uses; see makespan.config.code_hash."""
    return config_code_hash(
        Path(workflow.basedir, "workflow", "scripts", f"{script}.py"), *more, chosen=chosen
    )


def throughput_tables(source, workloads=SETTINGS.morphling.workloads):
    """Return the throughput tables of a source, one a workload."""
    return expand("results/{source}/throughput/{workload}.csv", source=source, workload=workloads)


def job_lists(source):
    """Return the job lists of a source."""
    return expand("results/{source}/morphling/workloads/{name}.csv", source=source, name=JOB_LIST_NAMES)


def simulation_inputs():
    """Return what every simulation reads: iteration times, what policies know of them, job lists."""
    return {
        "tables": lambda wildcards: throughput_tables(wildcards.source, SIM.workloads),
        "lists": lambda wildcards: job_lists(wildcards.source),
        "knowledge": "results/{source}/morphling/steering.csv",
    }


def drawn_lists(seeds):
    """Return how the lists of a study are drawn: new ones, or the authors' with shifted arrivals."""
    return lambda wildcards: {
        "seeds": list(seeds),
        "draw": "perturbed" if wildcards.source == "published" else "generated",
        "std_s": SIM.perturbed.std_s,
    }


def morphling_products(source):
    """Return the tables and figures of the Morphling experiments for one source."""
    return expand("results/{source}/morphling/{table}.csv", source=source, table=TABLES) + expand(
        "results/{source}/morphling/figures/{figure}.{kind}",
        source=source,
        figure=[
            name for name, entry in FIGURES["morphling"].items() if name not in LEFT_OUT and not entry.sources
        ],
        kind=["pdf", "png", "csv"],
    )


def is_profiled(source):
    """Whether a source is the profile of small workloads, which only some of the experiments can use."""
    return source == "measured" and SETTINGS.throughput.measured.directory is None


def profile_products():
    """Return what is built from the profile of small workloads."""
    tables = ["table2", "table2_rows", "table2_summary", "fig7"]
    return [
        *throughput_tables("measured", SETTINGS.throughput.measured.profile.workloads),
        *expand("results/measured/morphling/{table}.csv", table=tables),
        *expand(
            "results/measured/morphling/figures/{figure}.{kind}",
            figure=["table2", "prediction", "fig7"],
            kind=["pdf", "png", "csv"],
        ),
        "results/measured/provenance.json",
    ]


def training_products():
    """Return what is built from real training runs."""
    figures = expand("results/measured/morphling/figures/fig9.{kind}", kind=["pdf", "png", "csv"])
    return ["results/measured/morphling/fig9.csv", "results/measured/morphling/fig9_summary.csv", *figures]


LIVE_TABLE = "results/measured/morphling/live.csv"


def claim_tables(wildcards):
    """Return the tables that decide the claims of a paper for a source, by name."""
    names = [] if is_profiled(wildcards.source) else list(JUDGED)
    names += ["fig9"] if wildcards.source == "measured" else []
    # Not built by default: it needs all cores for itself for a few minutes.
    names += ["live"] if wildcards.source == "measured" and Path(LIVE_TABLE).is_file() else []
    tables = {name: f"results/{wildcards.source}/{wildcards.paper}/{name}.csv" for name in names}
    return tables | {"table4_published": f"config/published/{wildcards.paper}_table4.csv"}


def claim_ledgers(source):
    """Return the ledgers of a source, one a paper."""
    return expand("results/{source}/{paper}/claims.csv", source=source, paper=PAPERS)


def products(source):
    """Return everything that is built for one source."""
    if is_profiled(source):
        return [*profile_products(), *training_products(), *claim_ledgers("measured")]
    return [
        *morphling_products(source),
        *(training_products() if source == "measured" else []),
        *claim_ledgers(source),
        f"results/{source}/provenance.json",
    ]


def published_files(wildcards):
    """Find the authors' traces, in whichever layout the directory has."""
    return published_inputs("published_files")


def published_job_lists(wildcards):
    """Find the authors' job lists, in whichever layout the directory has."""
    return published_inputs("published_job_lists")


def published_inputs(kind):
    """Find the authors' files of a kind."""
    # Here, because it takes a while to import and most runs do not need it.
    from makespan.config import sources

    try:
        return getattr(sources, kind)(SETTINGS)
    except MakespanError as error:
        raise WorkflowError(error) from None


def missing_datasets():
    """Return the authors' files that are still to be fetched, by their path in the directory."""
    from makespan.config.sources import job_list_datasets, published_datasets

    directory = Path(SETTINGS.throughput.published.fetched_directory)
    datasets = [*published_datasets(SETTINGS).values(), *job_list_datasets(SETTINGS)]
    return {dataset.path: dataset for dataset in datasets if not (directory / dataset.path).is_file()}


def measured_files(wildcards):
    """Find the user's own tables."""
    directory = SETTINGS.throughput.measured.directory
    if directory is None:
        raise WorkflowError(
            "the source measured needs throughput.measured.directory: a directory with one table a workload"
        )
    return [f"{directory}/{workload}.csv" for workload in SETTINGS.morphling.workloads]


def figure_of(wildcards):
    """Return the entry of a figure."""
    return FIGURES[wildcards.paper][wildcards.figure]


FIG9 = SETTINGS.morphling.fig9


def fig9_experiment():
    """Return what the script of Fig. 9 needs, as plain values."""
    plans = {one.name: one.plan(FIG9.global_batch_size) for one in FIG9.plans}
    degrees = ["dp", "tp", "pp", "grad_accum_steps", "zero_stage", "offload", "checkpoint_fraction"]
    sizes = ["global_batch_size", "micro_batch_size"]
    return {
        "model": FIG9.model.model_dump(),
        "plans": {
            name: {field: getattr(plan, field) for field in degrees + sizes} for name, plan in plans.items()
        },
        "switches": [[switch.step, switch.name] for switch in FIG9.switches],
        "options": {name: getattr(FIG9, name) for name in ["steps", "learning_rate", "seed", "data_seed"]},
        "other_seed": FIG9.other_seed,
        "device": FIG9.device,
    }
