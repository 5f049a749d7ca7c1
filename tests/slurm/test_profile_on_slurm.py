"""Rules with GPUs through the real executor: what Slurm granted, and what the jobs saw of it."""

import json

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

TARGET = "results/measured/profile/tiny-llama/{}.json"
MEMORY_MB, MINUTES = 1500, 7


@pytest.fixture(scope="module")
def profiled(clone):
    """Build three parts of the profile side by side and return each with the Slurm job that made it."""
    names = ("1.0", "2.0", "11.0")
    clone.snakemake(*(TARGET.format(name) for name in names), "--configfile", "slurm-test.yaml")
    parts = {name: json.loads((clone.root / TARGET.format(name)).read_text()) for name in names}
    numbers = {name: part["machine"]["slurm"]["SLURM_JOB_ID"] for name, part in parts.items()}
    assert sorted(numbers.values()) == sorted(job["JobId"] for job in clone.jobs())
    return {name: (part, clone.cluster.job(numbers[name])) for name, part in parts.items()}


def test_each_point_gets_a_job_of_its_size_and_devices_of_its_own(profiled):
    seen = []
    for processes in (1, 2):
        part, job = profiled[f"{processes}.0"]
        assert job["JobState"] == "COMPLETED"
        assert job["Partition"] == "a800"
        assert job["JOB_GRES"] == f"gpu:a800:{processes}"
        assert job["NumNodes"] == "1"
        assert job["NumCPUs"] == str(processes)
        assert f"mem={processes * MEMORY_MB}M" in job["TRES"]
        assert job["TimeLimit"] == f"00:{MINUTES:02d}:00"
        devices = part["machine"]["visible_devices"].split(",")
        assert len(devices) == processes
        seen += devices
    same_node = profiled["1.0"][1]["NodeList"] == profiled["2.0"][1]["NodeList"]
    assert len(set(seen)) == len(seen) or not same_node, "two jobs side by side share a device"


def test_what_a_job_measures_is_as_complete_as_without_slurm(profiled):
    part, _ = profiled["2.0"]
    assert {"ga", "gc", "zero-dp", "zero-offload", "121", "211"} <= {
        point["exec_plan"] for point in part["points"] if point["runs"]
    }
    assert all(run["iter_time_s"] > 0 for point in part["points"] for run in point["runs"])


def test_a_placement_on_two_nodes_gets_both_and_trains_across_them(profiled):
    part, job = profiled["11.0"]
    assert job["JobState"] == "COMPLETED"
    assert job["NumNodes"] == "2"
    assert job["TresPerNode"].endswith("gpu:a800:1")
    assert any(point["runs"] for point in part["points"])
