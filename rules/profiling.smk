# Small workloads profiled on the hardware at hand.
#
# Where GPUs are asked for, a job is as large as its points need. Without GPUs a job takes all cores, so that
# nothing else runs beside what is timed.

from makespan.plans import Placement
from makespan.profiling import profile_batches, profile_points
from makespan.workloads import workload as load_workload

PROFILE_PLACEMENTS = [Placement.parse(text) for text in PROFILE.placements]
PROFILE_JOBS = {
    key: profile_batches(
        profile_points(load_workload(key), PROFILE_PLACEMENTS, PROFILE.cpu_threads), PROFILE.points_per_job
    )
    for key in PROFILE.workloads
}
PROFILE_PAIR = min(2, max(placement.gpus_per_node[-1] for placement in PROFILE_PLACEMENTS))
# The constants of the machine: measured, a file, or the name of shipped ones.
ENVIRONMENT = PROFILE.environment or "results/measured/profile/environment.toml"
ENVIRONMENT_FILE = ENVIRONMENT if ENVIRONMENT.endswith(".toml") else []


rule profile_environment:
    output:
        environment=ensure("results/measured/profile/environment.toml", non_empty=True),
    log:
        "logs/measured/profile_environment.log",
    benchmark:
        "benchmarks/results/measured/profile_environment.tsv"
    priority: 2
    conda:
        GPU
    threads: profile_threads(PROFILE_PAIR)
    resources:
        **profile_gpus(gpu=PROFILE_PAIR),
        **asks(PROFILE.runtime_min, PROFILE_PAIR * PROFILE.mem_mb_per_process),
    params:
        workloads=list(PROFILE.workloads),
        processes=PROFILE_PAIR,
        cpu_threads=PROFILE.cpu_threads,
        device=PROFILE.device,
        code=code_hash("profile_environment"),
    script:
        "../workflow/scripts/profile_environment.py"


rule profile_points:
    input:
        environment=ENVIRONMENT_FILE,
    output:
        part=ensure("results/measured/profile/{workload}/{job}.json", non_empty=True),
    log:
        "logs/measured/profile_points/{workload}/{job}.log",
    benchmark:
        "benchmarks/results/measured/profile_points/{workload}/{job}.tsv"
    wildcard_constraints:
        job=profile_job_names(True),
    priority: 2
    conda:
        GPU
    threads: lambda wildcards: profile_threads(placement_of(wildcards).n_gpus)
    resources:
        **profile_gpus(gpu=lambda wildcards: placement_of(wildcards).n_gpus),
        mem_mb=lambda wildcards: placement_of(wildcards).n_gpus * PROFILE.mem_mb_per_process,
        runtime=PROFILE.runtime_min,
    params:
        environment=lambda wildcards, input: input.environment or ENVIRONMENT,
        points=lambda wildcards: [
            [point.exec_plan, point.placement.text, point.cpu_threads]
            for point in PROFILE_JOBS[wildcards.workload][wildcards.job]
        ],
        procedure=PROFILE.model_dump(include={"device", "warmup_steps", "steps", "repetitions"}),
        code=code_hash("profile_points"),
    script:
        "../workflow/scripts/profile_points.py"


# The same on several nodes; the job starts its processes with srun.
use rule profile_points as profile_nodes with:
    log:
        "logs/measured/profile_nodes/{workload}/{job}.log",
    benchmark:
        "benchmarks/results/measured/profile_nodes/{workload}/{job}.tsv"
    wildcard_constraints:
        job=profile_job_names(False),
    threads: lambda wildcards: placement_of(wildcards).gpus_per_node[-1] * PROFILE.cpu_threads
    resources:
        mpi="srun",
        nodes=lambda wildcards: placement_of(wildcards).n_nodes,
        tasks=lambda wildcards: placement_of(wildcards).n_nodes,
        tasks_per_gpu=0,
        mem_mb=lambda wildcards: placement_of(wildcards).gpus_per_node[-1] * PROFILE.mem_mb_per_process,
        runtime=PROFILE.runtime_min,
        gres=lambda wildcards: (
            f"gpu:{PROFILE.gpu_model}:{placement_of(wildcards).gpus_per_node[-1]}"
            if PROFILE.gpu_model
            else ""
        ),


rule profile_collect:
    input:
        parts=lambda wildcards: [
            f"results/measured/profile/{wildcards.workload}/{job}.json"
            for job in PROFILE_JOBS[wildcards.workload]
        ],
    output:
        table=ensure("results/measured/throughput/{workload}.csv", non_empty=True),
        record=ensure("results/measured/throughput/{workload}.json", non_empty=True),
    log:
        "logs/measured/profile_collect/{workload}.log",
    wildcard_constraints:
        workload="|".join(map(re.escape, PROFILE.workloads)),
    localrule: True
    conda:
        GPU
    resources:
        **asks(minutes=5),
    params:
        code=code_hash("profile_collect"),
    script:
        "../workflow/scripts/profile_collect.py"
