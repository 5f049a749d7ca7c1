"""A live run inside an allocation: every stretch of a job is a step that Slurm starts."""

import re
import sys

import pytest
from toy_cluster import throughput_rows

from makespan import live
from makespan.tables import LIVE, LIVE_JOBS, read_csv
from makespan.workloads import JobSpec

pytest.importorskip("torch")

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

COMMAND = """{python} -c \\
  'from makespan.cli.live import live_command; live_command()' \\
  --policy fifo --workload live-smoke --launcher slurm --output {output} --work-dir {work}"""


def test_jobs_run_as_steps_of_an_allocation_at_the_same_time(slurm, tmp_path):
    rows = [("ga", "1", 0.1), ("zero-dp", "2", 0.07)]
    jobs = [
        JobSpec("a", 0.0, "tiny-gpt", 1, 1, "ga", 30),
        JobSpec("b", 0.0, "tiny-gpt", 1, 1, "ga", 30),
        JobSpec("c", 1.0, "tiny-gpt", 2, 2, "zero-dp", 3),
    ]
    tables = {"tiny-gpt": throughput_rows("tiny-gpt", rows, 1)}
    setting = live.LiveSetting(
        "fifo", "live-smoke", 2, 0, 5.0, 5.0, 15.0, tuple(jobs), dict.fromkeys("abc", 1), tables
    )
    setting.save(tmp_path / "work")
    command = COMMAND.format(python=sys.executable, output=tmp_path, work=tmp_path / "work")
    number, _ = slurm.allocation(command, tmp_path)
    assert read_csv(tmp_path / "live.csv", LIVE)["jobs"].tolist() == [3]
    table = read_csv(tmp_path / "live_jobs.csv", LIVE_JOBS).set_index("job_id")
    assert table["final_loss"].notna().all()
    ends = table["submit_time_s"] + table["live_jct_s"]
    assert max(table["live_first_start_s"][["a", "b"]]) < min(ends[["a", "b"]])
    started = "".join(path.read_text() for path in slurm.root.glob("slurmd-*.out"))
    steps = set(re.findall(rf"StepId={number}\.(\d+)", started))
    assert len(steps) > 3  # one a job, and those of the profile that follows
