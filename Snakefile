# From configuration to tables and figures: snakemake --cores all
#
# Targets: all (the configured sources), emulated, published, measured (one source), every paper by its name,
# claims, live, results/report.html, and any file under results/ by its path.

import gc

from snakemake.utils import min_version

from makespan.cleanup import leave_run, register_run

min_version("9.16")

# The modules and the jobs of a workflow stay until its end: looking for garbage among them takes a fifth of a dry run.
gc.freeze()
gc.set_threshold(50_000)

# Locks, jobs and temporary files of runs that were killed here go away; jobs of Slurm do not end with this run.
if workflow.is_main_process:
    if in_use := register_run(workflow.snakemake_tmp_dir, workflow.sourcecache.runtime_cache_path):
        logger.warning(in_use)
elif workflow.remote_exec:
    leave_run()


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/throughput.smk"
include: "rules/live.smk"
include: "rules/experiments.smk"
include: "rules/figures.smk"
include: "rules/claims.smk"
include: "rules/report.smk"


localrules:
    all,
    claims,
    live,


onstart:
    # With a limit to jobs per second Snakemake looks for jobs again a second after each look, so that looks add
    # up over a run, to a hundred a second. Its default limit is beyond what this machine could start.
    limiter = getattr(workflow.scheduler, "job_rate_limiter", None)
    if workflow.local_exec and limiter and (limiter.max_jobs, limiter.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None


rule all:
    default_target: True
    input:
        DEFAULT_PRODUCTS,
        "results/report.html",


for source in SOURCES:

    rule:
        name:
            source
        input:
            products(source),
        localrule: True


for paper in PAPERS:

    rule:
        name:
            paper
        input:
            [
                paper_products(paper, source)
                for source in sorted({*OPTIONS[paper].sources(SETTINGS), "measured"})
            ],
        localrule: True


rule claims:
    input:
        "results/claims.csv",


rule live:
    input:
        LIVE_TABLES,


if workflow.is_main_process:
    check_targets(workflow.rules)
