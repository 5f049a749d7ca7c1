"""Laws of job traces: damaged files give an error of ours or a full account; changes keep the rest."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from makespan.errors import MakespanError
from makespan.tables import JOBS, REQUESTS, write_csv
from makespan.throughput import ReferenceTimes
from makespan.traces import (
    generate_jobs,
    jobs_table,
    read_easyscale_jobs,
    read_helios_jobs,
    read_jobs,
    read_oobleck_nodes,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    scaled,
    statistics,
    with_guarantees,
    with_large_share,
    with_load,
    with_perturbed_arrivals,
)

MORPHLING = (
    "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla\n"
    "a,5,60,roberta,2,16,0,zero-dp,100,1\nb,9,1.5,llama7,16,128,1.25,182,7,0\n"
)
EASYSCALE = (
    "name,time,application,max_parallelism,batch_size,epochs,enable_heterogeneous_deterministic,preferred_gpu,\n"
    "bert-0,115,bert,16,8,4,40,v100,0.4\nvgg-1,230,vgg19,4,4,200,1,V100\n"
)
OOBLECK = "0,add,n1\n0,add,n2\n5000,remove,n1\n9000,add,n3\n"
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "1,u,v,2,8,1,COMPLETED,2020-06-09 00:00:00,2020-06-09 00:01:00,2020-06-09 00:03:00,120,60\n"
    "2,u,v,1,4,1,FAILED,2020-06-09 00:00:00,2020-06-09 00:01:00,2020-06-09 00:09:00,480,60\n"
)
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p0,12500,1,8,1000,,LS,Succeeded,100,400,150\np1,4000,1,1,220,,BE,Failed,200,300,210\n"
)
PHILLY = json.dumps(
    [
        {
            "status": "Pass",
            "vc": "v",
            "jobid": name,
            "user": "u",
            "submitted_time": "2017-10-07 01:00:00",
            "attempts": [
                {
                    "start_time": "2017-10-07 01:10:00",
                    "end_time": "2017-10-07 01:20:00",
                    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
                }
            ],
        }
        for name in ("a", "b")
    ]
)
PAI_JOBS = "j1,i1,u1,Terminated,100,900\nj2,i2,u2,Failed,50,400\n"
PAI_TASKS = "j1,w,2,Terminated,110,890,600,29,50,T4\nj2,w,1,Failed,60,400,100,10,100,V100\n"


def pai_from_jobs(path):
    tasks = path.with_name("tasks.csv")
    tasks.write_text(PAI_TASKS)
    return read_pai_jobs(path, tasks)


def pai_from_tasks(path):
    jobs = path.with_name("jobs.csv")
    jobs.write_text(PAI_JOBS)
    return read_pai_jobs(jobs, path)


READERS = {
    "morphling": (MORPHLING, lambda path: read_jobs(path).report),
    "easyscale": (EASYSCALE, lambda path: read_easyscale_jobs(path)[1]),
    "oobleck": (OOBLECK, lambda path: read_oobleck_nodes(path)[1]),
    "helios": (HELIOS, lambda path: read_helios_jobs(path).report),
    "openb": (OPENB, lambda path: read_openb_pods(path).report),
    "philly": (PHILLY, lambda path: read_philly_jobs(path).report),
    "pai jobs": (PAI_JOBS, lambda path: pai_from_jobs(path).report),
    "pai tasks": (PAI_TASKS, lambda path: pai_from_tasks(path).report),
}
PIECES = st.sampled_from(
    [
        "",
        ",",
        "\n",
        "\r\n",
        '"',
        "nan",
        "inf",
        "-1",
        "0",
        "1e999",
        "1e30",
        "NULL",
        "x",
        " ",
        "\x00",
        "é",
        "[",
        "{",
    ]
)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_give_an_error_of_ours_or_an_account_without_remainder(name, data, tmp_path):
    text, read = READERS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(PIECES) + text[stop:]
    path = tmp_path / "damaged.csv"
    path.write_bytes(text.encode())
    try:
        report = read(path)
    except MakespanError as error:
        assert "damaged.csv" in str(error) or "jobs.csv" in str(error)
        return
    dropped = sum(len(finding.rows) for finding in report.findings if finding.action == "dropped")
    assert report.n_read == report.n_kept + dropped
    assert report.n_kept >= 1


def test_whole_files_are_read_without_loss(tmp_path):
    for name, (text, read) in READERS.items():
        path = tmp_path / "whole.csv"
        path.write_text(text)
        report = read(path)
        assert report.n_read == report.n_kept, name


def table_of(requests):
    rows = [(plan, "-".join(["8"] * (n // 8) + [str(n % 8)] * (n % 8 > 0)), n) for n, plan in requests]
    return pd.DataFrame(
        [
            (plan, f"{text}-" if "-" not in text and len(text) > 1 else text, 1.0 / n, True)
            for plan, text, n in rows
        ],
        columns=["exec_plan", "placement", "iter_time_s", "feasible"],
    )


TIMES = ReferenceTimes(
    {
        key: table_of([(r.n_gpus, r.plan) for r in statistics().requests if r.workload == key])
        for key in {request.workload for request in statistics().requests}
    }
)


@settings(max_examples=25)
@given(n_jobs=st.integers(1, 300), seed=st.integers(0, 2**32), variant=st.sampled_from(["base", "bp", "mt"]))
def test_generated_workloads_survive_their_table_and_every_change(n_jobs, seed, variant, tmp_path_factory):
    jobs = generate_jobs(variant, n_jobs, seed, TIMES).jobs
    path = tmp_path_factory.mktemp("jobs") / "jobs.csv"
    write_csv(jobs_table(jobs), path, JOBS)
    assert read_jobs(path).jobs == jobs
    assert len({job.job_id for job in jobs}) == n_jobs
    changed = [
        with_load(jobs, 1.7),
        with_guarantees(jobs, 0.4, seed),
        with_large_share(jobs, 0.6, seed, TIMES),
        with_perturbed_arrivals(jobs, 500.0, seed),
    ]
    for result in changed:
        assert len(result) == len({job.job_id for job in result}) == n_jobs
        submissions = [job.submit_time_s for job in result]
        assert submissions == sorted(submissions)
    assert len({job.job_id for job in scaled(jobs, 3, seed)}) == 3 * n_jobs
    assert with_guarantees(jobs, 0.0, seed) == tuple(replace(job, is_guaranteed=False) for job in jobs)


def test_request_tables_are_in_order_from_zero(tmp_path):
    path = tmp_path / "philly"
    path.write_text(PHILLY)
    table = read_philly_jobs(path).table
    assert list(table.columns) == REQUESTS.names
    assert table["submit_time_s"].iloc[0] == 0.0
    assert table["submit_time_s"].is_monotonic_increasing
