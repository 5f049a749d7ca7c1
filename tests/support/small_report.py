"""Build both reports of the small configuration in a copy of this project, with what requirements.txt brings.

``python tests/support/small_report.py [CORES]``; packages of the developer set are hidden, if there are any.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hidden_packages import hiding_all_but, with_requirements
from killed_runs import ROOT, copy_project

SMALL = sorted(path.relative_to(ROOT) for path in (ROOT / "config/test").glob("*.yaml"))


def run_set():
    """Return the names of the packages of the run set and of torch."""
    pins = re.findall(r"^[a-z].*==.*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return {pin.partition("==")[0] for pin in pins} | with_requirements(["torch"])


def report(project, *more):
    """Write the report of what is built in a copy of the project and return how many figures it has."""
    path = project / "results" / "report.zip"
    snakemake(project, "--report", path, *more)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if not any(name.endswith("report.html") for name in names):
        raise RuntimeError(f"{path} has no page")
    return sum("/data/" in name for name in names)


def page(project):
    """Return the sizes of the page of the default run and of one over a single paper [bytes]."""
    whole = (project / "results" / "report.html").stat().st_size
    alone = project / "alone"
    shutil.copytree(project / "results" / "emulated" / "slapo", alone / "emulated" / "slapo")
    command = [sys.executable, "-c", "from makespan.cli import main; main()", "report", "--results", alone]
    environment = hiding_all_but(run_set(), project / "src")
    subprocess.run(command, cwd=project, env=environment, check=True)
    return whole, (alone / "report.html").stat().st_size


def snakemake(project, *arguments):
    """Run Snakemake in a copy of the project without packages of other sets."""
    environment = hiding_all_but(run_set(), project / "src")
    files = ["--configfile", *map(str, SMALL)]
    command = [sys.executable, "-m", "snakemake", *map(str, arguments), *files]
    subprocess.run(command, cwd=project, env=environment, check=True)


def main():
    """Build everything, then the report."""
    with tempfile.TemporaryDirectory(prefix="small-report-") as folder:
        project = Path(folder) / "project"
        copy_project(project)
        snakemake(project, "--cores", *(sys.argv[1:] or ["all"]), "--quiet", "all")
        n_files, (whole, alone) = report(project), page(project)
        sizes = f"{whole / 1e6:.1f} MB, that of Slapo alone {alone / 1e6:.1f} MB"
        print(f"Snakemake's report has {n_files} files of results; report.html has {sizes}")  # noqa: T201


if __name__ == "__main__":
    main()
