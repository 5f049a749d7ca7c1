# What all rules share: the checked configuration, wildcards, what is built of each paper for each source.

import json
import os
import re
import sys
from functools import cache
from itertools import chain
from pathlib import Path

from makespan.config import check_settings, code_hash as hash_of_code, published_directory, unknown_target
from makespan.errors import ConfigError, MakespanError
from makespan.files import read_yaml
from makespan.papers import PAPERS, paper_named
from makespan.papers.experiment import profiled_workloads
from snakemake.cli import get_argument_parser

try:
    for path in workflow.configfiles:
        read_yaml(path, "a configuration", ConfigError)  # refuses repeated keys, which Snakemake forgets
    SETTINGS = check_settings(config)
except MakespanError as error:
    raise WorkflowError(error) from None

# Jobs share the cores already: the small matrices of each stay on one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

CPU = "../envs/cpu.yaml"
GPU = "../envs/gpu.yaml"
SOURCES = ["emulated", "published", "measured"]
WORKLOADS = SETTINGS.throughput_workloads()
LIVE_TABLES = [f"results/measured/live/{name}.csv" for name in ("live", "live_summary")]
OPTIONS = SETTINGS.papers()
EXPERIMENTS = {paper: options.experiments(SETTINGS) for paper, options in OPTIONS.items()}
# Papers and sources of which everything is built by default.
BUILT = [(paper, source) for paper, options in OPTIONS.items() for source in options.sources(SETTINGS)]
FIGURES = {paper: paper_named(paper).figures() for paper in PAPERS}

# The source that is a profile of small workloads, made here, if the user has no tables to take its place.
PROFILED = "measured" if SETTINGS.throughput.measured.directory is None else None
PROFILE = SETTINGS.throughput.measured.profile


wildcard_constraints:
    source="|".join(SOURCES),
    paper="|".join(PAPERS),


def code_hash(script, *more, chosen=None):
    """Return the hash of the code that a workflow script uses; see makespan.config.code_hash."""
    return hash_of_code(Path(workflow.basedir, "workflow/scripts", f"{script}.py"), *more, chosen=chosen)


def asks(minutes, mem_mb=1000):
    """Return the resources of a job."""
    return {"mem_mb": mem_mb, "runtime": minutes}


def all_cores(least):
    """Return the cores of a job beside which nothing should run."""
    return max(least, workflow.resource_settings.cores or 1)


def throughput_tables(source, workloads=None):
    """Return the throughput tables of a source, one per workload."""
    if workloads is None:
        workloads = SETTINGS.throughput.measured.profile.workloads if source == PROFILED else WORKLOADS
    return [f"results/{source}/throughput/{workload}.csv" for workload in workloads]


def named_files(options):
    """Return the files that options name, at any depth; a .toml that is missing stops the run."""
    if isinstance(options, dict | list):
        values = options.values() if isinstance(options, dict) else options
        return sorted({path for value in values for path in named_files(value)})
    if not isinstance(options, str):
        return []
    # A folder of the name is that of a model, whose file has this name.
    paths = [options, os.path.join(options, "config.json")]
    return [path for path in paths if os.path.isfile(path)] or [options] * options.endswith(".toml")


def times_of(source):
    """Return the throughput tables that say what iteration times are; a profile made here need not be asked."""
    return [] if source == PROFILED else throughput_tables(source)


@cache
def shown_times(source):
    """Return what the iteration times of a source are said to be, as far as that is known beforehand."""
    return registered("shown_measured") if source == "measured" and PROFILED is None else source


def figure_of(wildcards):
    """Return the entry of a figure."""
    return FIGURES[wildcards.paper][wildcards.figure]


def figure_inputs(wildcards):
    """Return the files that a figure reads, by name."""
    figure, paper = figure_of(wildcards), wildcards.paper
    files = {table: f"results/{wildcards.source}/{paper}/{table}.csv" for table in figure.tables}
    return files | {f"published_{name}": f"config/published/{paper}_{name}.csv" for name in figure.cells}


def is_timed(wildcards):
    """Tell whether iteration times enter a figure."""
    return bool(set(figure_of(wildcards).tables) & OPTIONS[wildcards.paper].timed_tables())


def shown_source_of(wildcards):
    """Return what the report says of the source of a figure."""
    return shown_times(wildcards.source) if is_timed(wildcards) else wildcards.source


def untimed_tables(wildcards):
    """Return the names of deciding tables that iteration times do not enter."""
    return sorted(set(deciding_tables(wildcards)) - OPTIONS[wildcards.paper].timed_tables())


def judged_times(wildcards):
    """Return the throughput tables that say what iteration times behind deciding tables are."""
    is_needed = set(deciding_tables(wildcards)) - set(untimed_tables(wildcards))
    return times_of(wildcards.source) if is_needed else []


def paper_products(paper, source):
    """Return what is built of a paper for a source: tables, figures and ledger."""
    return [f"results/{source}/{paper}/{name}" for name in OPTIONS[paper].files_of(SETTINGS, source)]


def deciding_tables(wildcards):
    """Return the files that decide the statements of a paper for a source, by the names its checks use."""
    source, name = wildcards.source, wildcards.paper
    paper = OPTIONS[name]
    tables = paper.judged_tables(SETTINGS, source)
    files = {table: f"results/{source}/{name}/{table}.csv" for table in tables}
    if source == "measured" and SETTINGS.live.in_all and paper.judges_live:
        files["live"] = LIVE_TABLES[0]
    return files | {
        f"{cells}_published": f"config/published/{name}_{cells}.csv" for cells in paper.judged_cells
    }


def products(source):
    """Return everything that is built for a source."""
    shared = [*throughput_tables(source), f"results/{source}/provenance.json"]
    shared += LIVE_TABLES if SETTINGS.live.in_all and source == "measured" else []
    return shared + [path for paper in PAPERS for path in paper_products(paper, source)]


def registered(find, *arguments):
    """Return what a function of makespan.config.sources finds, or stop with its message."""
    # Here, because it takes a while to import and most runs do not need it.
    from makespan.config import sources

    try:
        return getattr(sources, find)(SETTINGS, *arguments)
    except MakespanError as error:
        raise WorkflowError(error) from None


def check_targets(rules):
    """Stop, with one line, where a target is made by no rule or where the authors' files are missing."""
    if Path(sys.argv[0]).name not in ("snakemake", "__main__.py"):
        return  # called from a program, which alone knows the targets
    # Snakemake itself has not looked at its targets when it reads this file.
    asked, _ = get_argument_parser().parse_known_args(sys.argv[1:])
    if asked.unlock or asked.lint:
        return
    names = {rule.name for rule in rules}
    wanted = [name if name in names else os.path.relpath(name) for name in asked.targets] or ["all"]
    try:
        for target in wanted:
            if target not in names and not Path(target).exists() and not is_made(target, rules):
                known = [rule.name for rule in rules if not rule.has_wildcards()]
                raise unknown_target(target, chain(known, *map(products, SOURCES), LIVE_TABLES))
        if any(map(reads_published, wanted)):
            published_directory(SETTINGS)
    except MakespanError as error:
        raise WorkflowError(error) from None


def is_made(target, rules):
    """Tell whether a rule makes a file; the figures of a paper are those that it has."""
    parts = Path(target).parts
    if len(parts) == 5 and parts[0] == "results" and parts[2] in PAPERS and parts[3] == "figures":
        return Path(target).stem in FIGURES[parts[2]]
    return any(rule.is_producer(target) for rule in rules)


def reads_published(target):
    """Tell whether a target is built from the authors' files."""
    if target == "published" or target.startswith("results/published/"):
        return True
    return (
        target in ("all", "claims", "results/claims.csv", "results/report.html")
        and "published" in SETTINGS.throughput.sources
    )


DEFAULT_PRODUCTS = list(
    dict.fromkeys(
        [path for source in SETTINGS.throughput.sources for path in products(source)]
        + [path for paper, source in BUILT for path in paper_products(paper, source)]
        + ["results/claims.csv"]
    )
)


# --- jobs of rules/profiling.smk ---


def placement_of(wildcards):
    """Return the placement of all points of a job."""
    return PROFILE_JOBS[wildcards.workload][wildcards.job][0].placement


def profile_job_names(is_on_one_node):
    """Return a pattern for the names of the jobs on one node, or of those on several."""
    points = {name: points[0] for jobs in PROFILE_JOBS.values() for name, points in jobs.items()}
    names = [name for name, point in points.items() if (point.placement.n_nodes == 1) == is_on_one_node]
    return "|".join(map(re.escape, sorted(names))) or "none"


def profile_threads(n_processes):
    """Return the cores of a job: those of its processes beside GPUs, else all."""
    own = n_processes * PROFILE.cpu_threads
    return own if PROFILE.gpu_model else all_cores(own)


def profile_gpus(**counts):
    """Return the resources that ask for GPUs, none where jobs run on CPU cores."""
    return counts | {"gpu_model": PROFILE.gpu_model} if PROFILE.gpu_model else {}
