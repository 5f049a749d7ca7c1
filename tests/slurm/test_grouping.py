"""Short jobs travel together: the profile puts the experiments of a source into one Slurm job."""

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


def test_short_experiments_share_one_slurm_job(clone):
    made = ["table2_rows", "sensitivity", "fig7", "fig8"]
    clone.snakemake(
        *(f"results/emulated/morphling/{name}.csv" for name in made),
        "--configfile",
        "config/test/morphling.yaml",
    )
    for name in made:
        assert (clone.root / f"results/emulated/morphling/{name}.csv").is_file()
    emulation, experiments = sorted(clone.jobs(), key=lambda job: int(job["JobId"]))
    assert emulation["JobState"] == experiments["JobState"] == "COMPLETED"
    assert experiments["JOB_GRES"] == "(null)"
