"""Every reader of requests repairs and reports the same defect in the same way, in rows and in GPU time."""

import json
from dataclasses import dataclass, replace

import pandas as pd
import pytest

from makespan.errors import TraceError
from makespan.tables import REQUESTS
from makespan.traces import (
    REPAIRS,
    ReadReport,
    Request,
    WorkloadMapping,
    cells as rules,
    map_requests,
    read_gavel_jobs,
    read_helios_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    read_pollux_jobs,
    read_requests,
    read_spot_jobs,
    read_tiresias_jobs,
    request_trace,
)


@dataclass(frozen=True)
class Asked:
    """One job in no format: times in seconds, None where a cell is empty."""

    name: str = "a"
    submit: int | None = 5000
    start: int | None = 5060
    end: int | None = 8660
    gpus: float = 2
    state: str = "ended"

    @property
    def length(self) -> int | str:
        return "" if self.start is None or self.end is None else self.end - self.start


def text(value):
    return "" if value is None else str(value)


def clock(second):
    return "" if second is None else str(pd.Timestamp("2020-06-09") + pd.Timedelta(seconds=second))


def helios(folder, jobs):
    states = {"ended": "COMPLETED", "running": "RUNNING", "unstarted": "PENDING", "cancelled": "CANCELLED"}
    lines = ["job_id,vc,gpu_num,state,submit_time,start_time,end_time"]
    for job in jobs:
        stamps = ",".join(map(clock, (job.submit, job.start, job.end)))
        lines.append(f"{job.name},v,{job.gpus},{states[job.state]},{stamps}")
    return read_helios_jobs(put(folder / "helios.csv", lines))


def philly(folder, jobs):
    states = {"ended": "Pass", "running": "Pass", "unstarted": "Pass", "cancelled": "Killed"}
    entries = []
    for job in jobs:
        detail = [{"ip": "m", "gpus": [f"gpu{n}" for n in range(int(job.gpus))]}]
        attempt = {
            "start_time": clock(job.start) or None,
            "end_time": clock(job.end) or None,
            "detail": detail,
        }
        entries.append(
            {
                "jobid": job.name,
                "status": states[job.state],
                "vc": "v",
                "submitted_time": clock(job.submit) or None,
                "attempts": [] if job.state == "unstarted" else [attempt],
            }
        )
    return read_philly_jobs(put(folder / "philly.json", [json.dumps(entries)]))


def pai(folder, jobs):
    states = {"ended": "Terminated", "running": "Running", "unstarted": "Waiting"}
    rows = [f"{job.name},i,u,{states[job.state]},{text(job.submit)},{text(job.end)}" for job in jobs]
    tasks = [
        f"{job.name},w,1,{states[job.state]},{text(job.start)},{text(job.end)},0,1,{100 * job.gpus},"
        for job in {job.name: job for job in reversed(jobs)}.values()
    ]
    return read_pai_jobs(put(folder / "jobs.csv", rows), put(folder / "tasks.csv", tasks))


def openb(folder, jobs):
    states = {"ended": "Succeeded", "unstarted": "Pending"}
    lines = ["name,num_gpu,gpu_milli,pod_phase,creation_time,deletion_time,scheduled_time"]
    for job in jobs:
        count, milli = (1, int(1000 * job.gpus)) if 0 < job.gpus < 1 else (int(job.gpus), 1000)
        stamps = ",".join(map(text, (job.submit, job.end, job.start)))
        lines.append(f"{job.name},{count},{milli},{states[job.state]},{stamps}")
    return read_openb_pods(put(folder / "openb.csv", lines))


def flat(read, header, cells):
    def inner(folder, jobs):
        return read(put(folder / "list.csv", [header, *(cells(job) for job in jobs)]))

    return inner


def gavel(folder, jobs):
    lines = [
        f"net\tcd d && run\t-n\t1\t{job.length}\t{int(job.gpus)}\t1\t-1\t{text(job.submit)}" for job in jobs
    ]
    return read_gavel_jobs(put(folder / "gavel.trace", lines), {("net", 2): 1.0})


def put(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


READERS = {
    "helios": helios,
    "philly": philly,
    "pai": pai,
    "openb": openb,
    "spot": flat(
        read_spot_jobs,
        "job_name,gpu_request,worker_num,submit_time,duration",
        lambda job: f"{job.name},{job.gpus},1,{text(job.submit)},{job.length}",
    ),
    "tiresias": flat(
        read_tiresias_jobs,
        "job_id,num_gpu,submit_time,duration",
        lambda job: f"{job.name},{job.gpus},{text(job.submit)},{job.length}",
    ),
    "pollux": flat(
        read_pollux_jobs,
        "name,time,num_replicas,duration",
        lambda job: f"{job.name},{text(job.submit)},{job.gpus},{job.length}",
    ),
    "requests": flat(
        read_requests,
        "job_id,submit_time_s,n_gpus,duration_s",
        lambda job: f"{job.name},{text(job.submit)},{job.gpus},{job.length}",
    ),
    "gavel": gavel,
}
WHOLE = ("philly", "gavel")  # they cannot state a part of a GPU
TIMED = ("helios", "philly", "pai", "openb")  # they state starts
GOOD = Asked("good")

DEFECTS = [
    (rules.GPU_PART, {"gpus": 0.5}, [name for name in READERS if name not in WHOLE]),
    (rules.NO_GPU, {"gpus": 0}, [name for name in READERS if name != "gavel"]),
    (rules.NOT_TIMED, {"start": None, "end": None}, ["helios", "philly", "spot", "tiresias", "requests"]),
    (rules.REVERSED, {"end": 5050}, [name for name in READERS if name not in ("gavel", "pai")]),
    (rules.INSTANT, {"end": 5060}, list(READERS)),
    (rules.NAME_AGAIN, {"name": "good"}, [name for name in READERS if name != "gavel"]),
    (rules.NO_SUBMISSION, {"submit": None}, [name for name in READERS if name != "pai"]),
    (rules.LATE_ROW, {"submit": 100}, list(READERS)),
    (rules.EARLY, {"submit": 5100}, list(TIMED)),
    (rules.UNSTARTED, {"state": "unstarted"}, list(TIMED)),
    (rules.RUNNING, {"state": "running", "end": None}, ["helios", "philly", "pai"]),
    (rules.CANCELLED, {"state": "cancelled"}, ["helios", "philly"]),
]


@pytest.mark.parametrize("reader", READERS)
def test_good_jobs_are_read_alike_without_a_finding_of_their_rows(reader, tmp_path):
    trace = READERS[reader](tmp_path, [GOOD, Asked("b", gpus=2)])
    assert (
        trace.table[["submit_time_s", "n_gpus", "duration_s"]].to_numpy().tolist() == [[0.0, 2.0, 3600.0]] * 2
    )
    assert trace.table.columns[: len(REQUESTS.names)].tolist() == REQUESTS.names
    assert {finding.reason for finding in trace.report.findings if finding.rows} <= {rules.MODEL}
    assert (trace.report.gpu_hours_read, trace.report.gpu_hours) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("reason", "change", "reader"),
    [(reason, change, name) for reason, change, names in DEFECTS for name in names],
)
def test_the_same_defect_has_the_same_finding_in_every_reader(reason, change, reader, tmp_path):
    trace = READERS[reader](tmp_path, [GOOD, replace(Asked("bad"), **change)])
    found = [finding for finding in trace.report.findings if finding.reason == reason]
    assert [(one.action, one.rows) for one in found] == [(REPAIRS[reason], (2,))]
    assert len(trace.table) == (1 if REPAIRS[reason] == "dropped" else 2)


@pytest.mark.parametrize("reader", [name for name in READERS if name not in WHOLE])
def test_parts_of_a_gpu_are_reported_with_the_gpu_time_that_they_gain(reader, tmp_path):
    trace = READERS[reader](tmp_path, [GOOD, Asked("part", gpus=0.25)])
    part = next(finding for finding in trace.report.findings if finding.reason == rules.GPU_PART)
    assert (part.gpu_hours, part.added_gpu_hours) == (1.0, 0.75)
    assert (trace.report.gpu_hours_read, trace.report.gpu_hours) == (2.25, 3.0)
    assert "2.2 GPU-hours read, 3 kept" in trace.report.text
    assert "repaired 1 row (1 GPU-hours, 0.75 more than stated): asks for a part" in trace.report.text


def test_dropped_rows_are_reported_with_the_gpu_time_that_is_lost(tmp_path):
    requeued = [Asked("a"), Asked("a", end=5060 + 20 * 3600, gpus=8), Asked("b", end=None), Asked("c")]
    report = helios(tmp_path, requeued).report
    again = next(finding for finding in report.findings if finding.reason == rules.NAME_AGAIN)
    assert (again.rows, again.gpu_hours) == ((2,), 160.0)
    untimed = next(finding for finding in report.findings if finding.reason == rules.NOT_TIMED)
    assert (untimed.rows, untimed.gpu_hours, untimed.n_untimed) == ((3,), None, 1)
    assert (report.gpu_hours_read, report.gpu_hours) == (164.0, 4.0)


def test_requests_that_shrink_or_are_left_out_by_the_mapping_are_counted_in_gpu_time(tmp_path):
    class Times:
        def steps(self, workload, n_gpus, plan, duration_s):
            return int(duration_s)

    trace = READERS["requests"](tmp_path, [Asked("a", gpus=3), Asked("b", gpus=64), Asked("c", gpus=2)])
    mapping = WorkloadMapping((Request("bert", 2, "ga", 1.0),), 1, max_gpus=8)
    report = map_requests(trace, mapping, Times()).report
    assert (report.gpu_hours_read, report.gpu_hours) == (69.0, 4.0)
    larger, smaller = report.findings
    assert (larger.action, larger.rows, larger.gpu_hours) == ("dropped", (2,), 64.0)
    assert (smaller.action, smaller.rows, smaller.added_gpu_hours) == ("repaired", (1,), -1.0)
    assert "1 fewer than stated" in report.text


def test_every_finding_of_a_reader_is_in_the_table_of_repairs_and_in_the_guide(root):
    guide = (root / "docs" / "guides" / "own-workloads.md").read_text("utf-8")
    for reason in REPAIRS:
        assert f"| {reason} " in guide or f"| {reason.split(';')[0]} |" in guide, reason
    names = {name for name in vars(rules) if name.isupper() and not name.startswith("_")}
    constants = {value for name in names if isinstance(value := getattr(rules, name), str)}
    assert constants - {rules.ROW, rules.FLAGS, rules.TIME} == set(REPAIRS)


def test_an_account_with_a_remainder_is_refused():
    with pytest.raises(TraceError, match="read 3 rows and kept 2, but 0 are reported"):
        ReadReport("here", 3, 2)


# --- parts of jobs --------------------------------------------------------------------------------


def test_parts_that_end_before_they_start_are_left_out_in_philly_and_pai(tmp_path):
    task = "j,{},1,Terminated,{},{},0,1,100,\n"
    (tmp_path / "jobs.csv").write_text("j,i,u,Terminated,100,900\n")
    (tmp_path / "tasks.csv").write_text(task.format("w", 200, 800) + task.format("ps", 900, 300))
    trace = read_pai_jobs(tmp_path / "jobs.csv", tmp_path / "tasks.csv")
    assert trace.table["duration_s"].tolist() == [600.0]
    assert [one.reason for one in trace.report.findings] == [rules.PART_REVERSED]


def test_a_job_row_that_contradicts_its_tasks_is_reported(tmp_path):
    (tmp_path / "jobs.csv").write_text("j,i,u,Failed,100,99\nk,i,u,Terminated,100,\n")
    (tmp_path / "tasks.csv").write_text(
        "j,w,1,Failed,110,200,0,1,100,\nk,w,1,Terminated,110,200,0,1,100,\nk,ps,1,Terminated,110,200,0,1,,\n"
    )
    trace = read_pai_jobs(tmp_path / "jobs.csv", tmp_path / "tasks.csv")
    assert trace.table["duration_s"].tolist() == [90.0, 90.0]
    found = {one.reason: one.rows for one in trace.report.findings}
    assert found == {rules.PART_REVERSED: (1,), rules.PART_UNTIMED: (2,), rules.GPU_REQUEST_MISSING: (2,)}


def test_parts_of_several_gpus_of_a_pod_hold_them_all(tmp_path):
    (tmp_path / "pods.csv").write_text(
        "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\np,2,500,0,3600,0\nq,1,0,0,3600,0\n"
    )
    trace = read_openb_pods(tmp_path / "pods.csv")
    assert trace.table["n_gpus"].tolist() == [2, 1]
    part = next(one for one in trace.report.findings if one.reason == rules.GPU_PART)
    assert (part.rows, round(part.added_gpu_hours, 2)) == ((1, 2), 2.0)


# --- requests in memory ---------------------------------------------------------------------------


def test_a_table_in_memory_is_checked_and_repaired_as_a_file():
    table = pd.DataFrame(
        {
            "job_id": [7, 8, 9],
            "submit_time_s": [30.0, -10.0, 0.0],
            "n_gpus": [1.5, 2, 4],
            "duration_s": [60, 120, None],
            "is_guaranteed": [True, False, False],
        }
    )
    trace = request_trace(table, "mine")
    assert trace.table["job_id"].tolist() == ["8", "7"]
    assert trace.table["submit_time_s"].tolist() == [0.0, 40.0]
    assert trace.table["n_gpus"].tolist() == [2, 2]
    assert trace.table["is_guaranteed"].tolist() == [False, True]
    assert trace.origin_s == -10.0
    with pytest.raises(TraceError, match=r"mine: lacks column\(s\) duration_s; found: .*; required: job_id"):
        request_trace(table.drop(columns="duration_s"), "mine")
    with pytest.raises(
        TraceError, match="mine: row 2, column 'n_gpus': found '-3'; expected a number of GPUs"
    ):
        request_trace(table.assign(n_gpus=[1, -3, 1]), "mine")
    with pytest.raises(TraceError, match="mine: no rows"):
        request_trace(table.iloc[:0], "mine")
