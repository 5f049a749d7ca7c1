# What the rules of rules/measured.smk share: the jobs of the profile and what each asks for.

from makespan.plans import Placement
from makespan.profiling import profile_batches, profile_points
from makespan.workloads import workload as load_workload

PROFILE = SETTINGS.throughput.measured.profile
PROFILE_PROCEDURE = {
    name: getattr(PROFILE, name) for name in ["device", "warmup_steps", "steps", "repetitions"]
}
PROFILE_ENVIRONMENT = PROFILE.environment or "results/measured/profile/environment.toml"
PROFILE_PLACEMENTS = [Placement.parse(text) for text in PROFILE.placements]
PROFILE_JOBS = {
    key: profile_batches(
        profile_points(load_workload(key), PROFILE_PLACEMENTS, PROFILE.cpu_threads), PROFILE.points_per_job
    )
    for key in PROFILE.workloads
}
PROFILE_PAIR = min(2, max(placement.gpus_per_node[-1] for placement in PROFILE_PLACEMENTS))


def profile_placement(wildcards):
    """Return the placement of all points of a job."""
    return PROFILE_JOBS[wildcards.workload][wildcards.job][0].placement


def profile_job_names(is_on_one_node):
    """Return a pattern for the names of the jobs on one node, or of those on several."""
    names = {
        name
        for jobs in PROFILE_JOBS.values()
        for name, points in jobs.items()
        if (points[0].placement.n_nodes == 1) == is_on_one_node
    }
    return "|".join(map(re.escape, sorted(names))) or "none"


def profile_threads(n_processes):
    """Return the cores of a job: those of its processes beside GPUs, else all."""
    own = n_processes * PROFILE.cpu_threads
    return own if PROFILE.gpu_model else max(own, workflow.resource_settings.cores or 1)


def profile_gpus(**counts):
    """Return the resources that ask for GPUs, none where jobs run on CPU cores."""
    return counts | {"gpu_model": PROFILE.gpu_model} if PROFILE.gpu_model else {}


def profile_gres(placement):
    """Return the request for GPUs on each node of a placement."""
    return f"gpu:{PROFILE.gpu_model}:{placement.gpus_per_node[-1]}" if PROFILE.gpu_model else ""


def profile_texts(wildcards):
    """Return the points of a job as plain values."""
    points = PROFILE_JOBS[wildcards.workload][wildcards.job]
    return [[point.exec_plan, point.placement.text, point.cpu_threads] for point in points]
