"""A local Slurm cluster, and a clean clone of the project that runs on it."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, missing_packages

ROOT = Path(__file__).resolve().parents[2]
PROFILE = """
throughput:
  sources: [measured]
  measured:
    profile:
      workloads: [tiny-llama]
      placements: ["1", "2", "11"]
      environment: a800-64
      gpu_model: a800
      warmup_steps: 0
      steps: 1
      repetitions: 1
      mem_mb_per_process: 1500
      runtime_min: 7
"""


@pytest.fixture(scope="session")
def slurm():
    """Start a cluster of two nodes with eight GPUs each that do not exist; skip without Slurm."""
    missing = missing_packages()
    if missing:
        pytest.skip(f"the Slurm daemons are missing; make slurm-test installs them ({', '.join(missing)})")
    with LocalSlurm(n_nodes=2, gpus=8, cpus=16) as cluster:
        yield cluster


@dataclass(frozen=True)
class Clone:
    """What a fresh clone contains, and the cluster to which its jobs go."""

    root: Path
    cluster: LocalSlurm
    earlier: frozenset

    def jobs(self):
        """Return the Slurm jobs of this clone by the text that the executor left in their comment."""
        return [job for job in self.cluster.jobs() if job["JobId"] not in self.earlier]

    def snakemake(self, *arguments):
        """Run Snakemake under the profile of the project and return its output; fail if it fails."""
        environment = {
            key: value
            for key, value in self.cluster.environment.items()
            if not key.startswith(("COV_", "PYTEST_", "MAKESPAN_"))
        }
        environment["PYTHONPATH"] = str(self.root / "src")
        # No accounting here, so the queue says how jobs are.
        options = ["--profile", "slurm", "--slurm-status-command", "squeue"]
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments, *options, "--slurm-logdir", "slurm-logs"],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3600,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def clone(slurm, tmp_path_factory):
    """Return a directory with every file of the project that git does not ignore, and no product."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    root = tmp_path_factory.mktemp("slurm") / "clone"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / "slurm-test.yaml").write_text(PROFILE)
    return Clone(root, slurm, frozenset(job["JobId"] for job in slurm.jobs()))
