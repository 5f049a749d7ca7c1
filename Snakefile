# From configuration to tables and figures: snakemake --cores all
#
# Targets: all (the configured sources), emulated, published, measured (one source), morphling (one paper),
# claims, and any file under results/ by its path.

from snakemake.utils import min_version

min_version("9.16")


configfile: "config/config.yaml"
configfile: "config/papers/morphling.yaml"


include: "rules/common.smk"


localrules:
    all,
    emulated,
    published,
    measured,
    morphling,
    claims,
    live,


rule all:
    default_target: True
    input:
        [products(source) for source in SETTINGS.throughput.sources],
        "results/claims.csv",


rule emulated:
    input:
        products("emulated"),


rule published:
    input:
        products("published"),


rule measured:
    input:
        products("measured"),


rule morphling:
    input:
        [morphling_products(source) for source in SETTINGS.throughput.sources if not is_profiled(source)],
        [profile_products() for source in SETTINGS.throughput.sources if is_profiled(source)],


rule claims:
    input:
        "results/claims.csv",


rule live:
    input:
        LIVE_TABLE,
        LIVE_TABLE.replace("live.csv", "live_jobs.csv"),


include: "rules/traces.smk"
include: "rules/morphling.smk"
include: "rules/cluster.smk"
include: "rules/profiling.smk"
include: "rules/training.smk"
include: "rules/live.smk"
include: "rules/figures.smk"
include: "rules/claims.smk"
include: "rules/report.smk"


# Whoever has tables of measurements needs no profile.
if SETTINGS.throughput.measured.directory is None:

    include: "rules/measured.smk"
