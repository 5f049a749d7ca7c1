# What all rules share: the checked configuration, wildcards, the hash of the code that a rule uses.

import hashlib
import re
from functools import cache
from pathlib import Path

from makespan.config import check_settings, published_directory
from makespan.errors import MakespanError

try:
    SETTINGS = check_settings(config)
except MakespanError as error:
    raise WorkflowError(error) from None

CPU = "../envs/cpu.yaml"
GPU = "../envs/gpu.yaml"

# The files of src/makespan that a stage uses; a test compares them with what the scripts import. Throughput
# tables and job lists share the package of traces, but an edit of one leaves the jobs of the other alone.
DOMAIN = [
    "units.py",
    "errors.py",
    "logs.py",
    "presets.py",
    "tables/**/*",
    "hardware/**/*",
    "workloads/**/*",
    "plans/**/*",
]
TRACES = [*DOMAIN, "throughput/**/*"]
TESTBED = [*DOMAIN, "throughput/_clean.py", "throughput/_emulated.py", "emulator/**/*"]
READERS = [*DOMAIN, *(f"traces/_{name}.py" for name in ["files", "jobs", "report"])]
REFERENCE = [*READERS, "throughput/_reference.py"]
GENERATOR = [
    *REFERENCE,
    *(f"traces/_{name}.py" for name in ["generate", "statistics", "transform"]),
    "traces/presets/*",
]
PERF = [*DOMAIN, "perf/**/*"]
PLOTS = ["units.py", "errors.py", "logs.py", "tables/**/*", "plots/**/*"]
PAPER = "papers/morphling"
TABLE2 = [*PERF, f"{PAPER}/_table2.py", f"{PAPER}/_published.py"]
FIG7 = [*PERF, *(f"{PAPER}/_{name}.py" for name in ["fig7", "names", "online", "published"])]
TRAINING = [*PERF, "runtime/**/*", "training/**/*", "profiling/**/*"]
MEASURED = [*FIG7, f"{PAPER}/_table2.py", f"{PAPER}/_measured.py"]
FIG8 = [*DOMAIN, f"{PAPER}/_fig8.py", f"{PAPER}/_published.py"]
EXECUTOR = [*DOMAIN, "runtime/**/*", "training/**/*"]
LIVE = [*TRAINING, "live/**/*", "traces/**/*", "throughput/**/*", "sim/**/*", "policies/**/*", "metrics/**/*"]
FIG9_CODE = [*EXECUTOR, f"{PAPER}/_fig9.py", f"{PAPER}/_published.py"]
JOB_LISTS = [*GENERATOR, "throughput/_register.py", f"{PAPER}/_names.py", f"{PAPER}/_workloads.py"]
STEERING = [
    *READERS,
    *PERF,
    *(f"sim/_{name}.py" for name in ["catalogue", "configuration", "events"]),
    "studies/_scenario.py",
    f"{PAPER}/_steering.py",
]
SIMULATION = [
    *STEERING,
    "throughput/_reference.py",
    *("sim/**/*", "policies/**/*", "metrics/**/*", "studies/**/*"),
    f"{PAPER}/_open.py",
]
COMPARISON = [*SIMULATION, f"{PAPER}/_names.py", f"{PAPER}/_table4.py"]
STUDIES = [*SIMULATION, *JOB_LISTS, f"{PAPER}/_studies.py"]
CLAIMS = [
    *DOMAIN,
    *(
        f"{PAPER}/{name}"
        for name in [
            "_claims.py",
            "_checks.py",
            "_cluster_checks.py",
            "_fig9.py",
            "_finding.py",
            "_names.py",
            "_published.py",
            "claims.csv",
        ]
    ),
]
CURVES = [*PLOTS, "presets.py", "plans/**/*", "workloads/**/*", "hardware/**/*", f"{PAPER}/_curves.py"]

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
SIMULATED_FIGURES = [
    "table4",
    "ablation",
    "jct_cdf",
    "allocation",
    "gantt",
    "load",
    "large_models",
    "rounds",
    "scale",
]
FIGURES = [
    name
    for name in [
        "table2",
        "prediction",
        "sensitivity",
        "sensitivity_cpu",
        "fig7",
        "fig8",
        *SIMULATED_FIGURES,
    ]
    if name not in LEFT_OUT
]

# Tables that no statement is about.
UNJUDGED = {"table2_rows", "load_summary", "large_models_summary", "rounds", "rounds_summary", "scale"}
JUDGED = [name for name in TABLES if name not in UNJUDGED]

SIM = SETTINGS.morphling.simulation
JOB_LIST_NAMES = ["naive", "base", "bp", "mt"]
ABLATIONS = ("-e", "-r", "-n")


wildcard_constraints:
    source="emulated|published|measured",


@cache
def code_hash(script, *patterns):
    """Return the sha256 over a workflow script and the files of the package that match a pattern.

    As a parameter it makes jobs run again when that code changes, and only then: path and content count,
    modification times do not (profiles/default turns off the trigger that looks at those of scripts).
    """
    base = Path(workflow.basedir)
    root = base / "src" / "makespan"
    found = {path for pattern in patterns for path in root.glob(pattern)}
    digest = hashlib.sha256()
    for path in [base / "workflow" / "scripts" / f"{script}.py", *sorted(found)]:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(base)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def throughput_tables(source, workloads=SETTINGS.morphling.workloads):
    """Return the throughput tables of a source, one a workload."""
    return expand("results/{source}/morphling/throughput/{workload}.csv", source=source, workload=workloads)


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
        figure=FIGURES,
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
    """Return the tables that decide the claims of a source, by name."""
    names = [] if is_profiled(wildcards.source) else list(JUDGED)
    names += ["fig9"] if wildcards.source == "measured" else []
    # Not built by default: it needs all cores for itself for a few minutes.
    names += ["live"] if wildcards.source == "measured" and Path(LIVE_TABLE).is_file() else []
    return {name: f"results/{wildcards.source}/morphling/{name}.csv" for name in names}


def products(source):
    """Return everything that is built for one source."""
    if is_profiled(source):
        return [*profile_products(), *training_products(), "results/measured/claims.csv"]
    return [
        *morphling_products(source),
        *(training_products() if source == "measured" else []),
        f"results/{source}/claims.csv",
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


def in_report(path, name, title):
    """Mark a file for the report, with the caption of its figure."""
    return report(
        path,
        caption=f"../workflow/report/morphling_{name}.rst",
        category="Morphling",
        labels={"figure": title, "source": "{source}"},
    )


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
