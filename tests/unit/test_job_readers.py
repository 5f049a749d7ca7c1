"""Readers of job traces: each on files of a few lines, whole and broken."""

import json

import pandas as pd
import pytest

from makespan.errors import MissingDataError, TraceError
from makespan.sim import read_failures
from makespan.tables import JOBS, REQUESTS, write_csv
from makespan.traces import (
    jobs_table,
    read_easyscale_jobs,
    read_helios_jobs,
    read_helios_quota,
    read_jobs,
    read_morphling_jobs,
    read_oobleck_nodes,
    read_openb_nodes,
    read_openb_pods,
    read_pai_jobs,
    read_pai_machines,
    read_philly_jobs,
    read_philly_machines,
)
from makespan.traces.readers import _CHUNK_ROWS

HEAD = "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla\n"
GOOD = "a,5,60,roberta,2,16,0,zero-dp,100,1\nb,9,,llama2-7b,16,128,1.25,182,7,0\n"


@pytest.fixture
def write(tmp_path):
    def inner(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return inner


def reasons(report):
    return {finding.reason.split(";")[0].split(",")[0]: finding.rows for finding in report.findings}


# --- Morphling and canonical ----------------------------------------------------------------


def test_morphling_list_is_read_into_jobs(write):
    trace = read_morphling_jobs(write(HEAD + GOOD))
    first, second = trace.jobs
    assert (first.job_id, first.submit_time_s, first.workload, first.n_gpus) == ("a", 5.0, "roberta", 2)
    assert (first.n_cpus, first.plan, first.steps, first.is_guaranteed) == (16, "zero-dp", 100, True)
    assert first.duration_s == 60.0
    assert (second.workload, second.plan, second.is_guaranteed) == ("llama7", "182", False)
    assert second.duration_s is None
    ignored = {"columns that have no effect: 'bandwidth'": ()}
    assert reasons(trace.report) == {"duration missing": (2,)} | ignored


def test_windows_line_ends_and_byte_order_mark_are_repaired_and_reported(write):
    unix = read_morphling_jobs(write(HEAD + GOOD))
    text = b"\xef\xbb\xbf" + (HEAD + GOOD).replace("\n", "\r\n").encode()
    windows = read_morphling_jobs(write(text, "windows.csv"))
    assert windows.jobs == unix.jobs
    assert "Windows line ends" in windows.report.text
    assert "Windows" not in unix.report.text


def test_descending_times_are_sorted_and_reported(write):
    trace = read_jobs(
        write(HEAD + "a,9,1,vit,1,8,0,ga,1,0\nb,5,1,vit,1,8,0,ga,1,0\nc,7,1,vit,1,8,0,ga,1,0\n")
    )
    assert [job.job_id for job in trace.jobs] == ["b", "c", "a"]
    assert reasons(trace.report) == {"submitted before the row above": (2,)}


def test_canonical_table_survives_writing_and_reading(write, tmp_path):
    trace = read_jobs(write(HEAD + GOOD))
    write_csv(jobs_table(trace.jobs), tmp_path / "jobs.csv", JOBS)
    again = read_jobs(tmp_path / "jobs.csv")
    assert again.jobs == trace.jobs


def test_bad_cells_are_named_with_file_row_column_and_what_is_accepted(write):
    for row, column, accepted in [
        ("a,-1,1,vit,1,8,0,ga,1,0", "submission_time", "0 or more"),
        ("a,nan,1,vit,1,8,0,ga,1,0", "submission_time", "0 or more"),
        ("a,inf,1,vit,1,8,0,ga,1,0", "submission_time", "0 or more"),
        ("a,0,-3,vit,1,8,0,ga,1,0", "duration", "0 or more"),
        ("a,0,1,resnet,1,8,0,ga,1,0", "application", "roberta"),
        ("a,0,1,vit,0,8,0,ga,1,0", "num_gpus", "1 or more"),
        ("a,0,1,vit,1.5,8,0,ga,1,0", "num_gpus", "whole number"),
        ("a,0,1,vit,,8,0,ga,1,0", "num_gpus", "1 or more"),
        ("a,0,1,vit,1,-8,0,ga,1,0", "num_cpus", "0 or more"),
        ("a,0,1,vit,1,8,0,magic,1,0", "exec_plan", "zero-dp"),
        ("a,0,1,gpt2,8,64,0,222x,1,0", "exec_plan", "zero-dp"),
        ("a,0,1,gpt2,6,64,0,222,1,0", "exec_plan", "multiply to the GPUs"),
        ("a,0,1,vit,1,8,0,ga,nan,0", "steps", "whole number"),
        ("a,0,1,vit,1,8,0,ga,1e300,0", "steps", "whole number"),
        ("a,0,1,vit,1,8,0,ga,1,2", "is_sla", "0 or 1"),
        (",0,1,vit,1,8,0,ga,1,0", "name", "a name"),
    ]:
        path = write(HEAD + "ok,0,1,vit,1,8,0,ga,1,0\n" + row + "\n")
        with pytest.raises(TraceError) as caught:
            read_jobs(path)
        message = str(caught.value)
        assert str(path) in message
        assert "row 2" in message
        assert repr(column) in message
        assert accepted in message


def test_a_number_beyond_the_largest_is_told_the_largest_and_a_plan_the_batch_that_it_cannot_split(write):
    limit = "up to 9007199254740992, as larger numbers are not kept exactly"
    for row, column, accepted in [
        ("a,1e18,1,vit,1,8,0,ga,1,0", "submission_time", f"a time in s, 0 or more, {limit}"),
        ("a,0,1e18,vit,1,8,0,ga,1,0", "duration", f"a time in s, 0 or more, {limit}"),
        ("a,0,1,vit,1,8,0,ga,9000000000000000000,0", "steps", f"a whole number, 1 or more, {limit}"),
        ("a,0,1,vit,1,8,0,ga,99999999999999999999,0", "steps", f"a whole number, 1 or more, {limit}"),
        ("a,0,1,vit,1,9e99,0,ga,1,0", "num_cpus", f"a whole number, 0 or more, {limit}"),
        ("a,0,1,roberta,1000000000,8,0,zero-dp,1,0", "exec_plan", "that divides it, at most 64"),
    ]:
        with pytest.raises(TraceError) as caught:
            read_jobs(write(HEAD + row + "\n"))
        assert repr(column) in str(caught.value) and accepted in str(caught.value)
    assert "three degrees" not in str(caught.value)


def test_duplicate_names_name_both_rows(write):
    with pytest.raises(TraceError, match=r"row 3, column 'name': found 'a'.*row 1 has the same"):
        read_jobs(write(HEAD + "a,0,1,vit,1,8,0,ga,1,0\nb,0,1,vit,1,8,0,ga,1,0\na,1,1,vit,1,8,0,ga,1,0\n"))


def test_files_without_jobs_or_columns_are_refused(write):
    for text in ["", "\n", "\ufeff", HEAD, HEAD.replace("steps,", "")]:
        with pytest.raises(TraceError, match=r"empty|no rows|lacks column\(s\) steps"):
            read_morphling_jobs(write(text))


def test_a_row_of_another_length_is_refused(write):
    good = "a,0,1,vit,1,8,0,ga,1,0\n"
    for rows, message in [
        (
            good + "\nb,0,1,vit,1,8,0,ga,1,0,7\n",
            "row 2, column 'number 11': found '7'; expected 10 cells a row",
        ),
        ("a,0,1,vit,1,8,0,ga,1,0,7\n" + good, "row 1, column 'number 11': found '7'"),
        (good.replace("\n", ",\n"), "row 1, column 'number 11': found ''"),
        (
            good + "b,0,1,vit,1,8,ga,1,0\n",
            "row 2, column 'is_sla': found 'nothing'; expected 10 cells a row",
        ),
        (good + '"b,0,1,vit,1,8,0,ga,1,0\n', "cannot be read as CSV: .*EOF inside string"),
    ]:
        with pytest.raises(TraceError, match=message):
            read_morphling_jobs(write(HEAD + rows))


def refused(read, path):
    with pytest.raises(TraceError) as caught:
        read(path)
    return str(caught.value)


def test_rows_of_another_length_are_refused_in_every_list(write):
    quota, pod = "2020-09-01,8,24", "p0,12500,1,8,1000,,LS,Failed,100,400"
    for read, text, message in [
        (read_helios_jobs, HELIOS + helios() + helios()[2:], "row 2, column 'queue': found 'nothing'"),
        (read_helios_jobs, HELIOS + helios()[:-1] + ",9\n", "row 1, column 'number 13': found '9'"),
        (read_helios_quota, f"date,vca,vcb,total\n{quota}\n", "row 1, column 'total': found 'nothing'"),
        (read_openb_pods, f"{PODS.split()[0]}\n{pod}\n", "row 1, column 'scheduled_time': found 'nothing'"),
        (read_openb_nodes, NODES + "n2,1,1,0\n", "row 3, column 'model': found 'nothing'"),
        (read_philly_machines, "m1,8,24GB\nm2,8\n", "row 2, column 'single GPU mem': found 'nothing'"),
        (read_pai_machines, "m1,T4,96,512,8,1\n", "row 1, column 'number 6': found '1'"),
        (read_oobleck_nodes, "0,add,a\n1,add\n", "row 2, column 'node': found 'nothing'"),
        (read_oobleck_nodes, "0,add,a,b\n", "row 1, column 'number 4': found 'b'"),
        (
            read_easyscale_jobs,
            EASY_HEAD + "a,0,x,4,8,1,1\n",
            "row 1, column 'preferred_gpu': found 'nothing'",
        ),
    ]:
        path = write(text)
        assert refused(read, path).startswith(f"{path}: {message}; expected ")


def test_short_rows_are_found_in_later_pieces(pai, monkeypatch):
    monkeypatch.setattr("makespan.traces.readers._CHUNK_ROWS", 1)
    short = INSTANCE_TABLE + "j2,tensorflow,d,w4,i2,Failed,0,0\n"
    with pytest.raises(TraceError, match=r"instances\.csv: row 4, column 'machine': found 'nothing'"):
        pai(instances=short)


def test_a_column_that_occurs_twice_is_refused_if_it_is_read(write):
    message = refused(read_helios_jobs, write(HELIOS.replace("queue", "vc") + helios()))
    assert "column(s) vc occur twice; expected each name once" in message
    unread = HELIOS.replace("queue", "queue,queue") + helios()[:-1] + ",0\n"
    assert len(read_helios_jobs(write(unread)).table) == 1


def test_names_and_whole_numbers_are_asked_for_in_every_list(write):
    for read, text, message in [
        (read_helios_jobs, HELIOS + helios(job=""), "row 1, column 'job_id': found ''; expected a name"),
        (read_philly_machines, ",8,24GB\n", "row 1, column 'machineId': found ''; expected a name"),
        (read_openb_nodes, NODES + ",1,1,0,\n", "row 3, column 'sn': found ''; expected a name"),
        (read_openb_nodes, NODES + "n2,1,1,0.5,\n", "row 3, column 'gpu': found '0.5'; expected a whole"),
        (read_helios_quota, "date,vca,total\n2020-09-01,1.5,2\n", "row 1, column 'vca': found '1.5'"),
        (read_helios_quota, "date,vca,total\n2020-09-99,1,2\n", "row 1, column 'date': found '2020-09-99'"),
        (read_philly_jobs, json.dumps([philly(jobid=None)]), "row 1, column 'jobid': found None"),
        (
            read_easyscale_jobs,
            EASY_HEAD + "a,0,x,4.5,8,1,1,v\n",
            "row 1, column 'max_parallelism': found '4.5'",
        ),
    ]:
        assert message in refused(read, write(text))


def test_times_of_iso_8601_are_read_in_either_form(write):
    plain, iso = HELIOS + helios(), HELIOS + helios().replace("2020-06-09 ", "2020-06-09T")
    assert read_helios_jobs(write(iso)).table.equals(read_helios_jobs(write(plain)).table)
    both = [json.dumps([philly(submitted_time=f"2017-10-07{one}01:00:00")]) for one in " T"]
    first, second = (read_philly_jobs(write(text)).table for text in both)
    assert first.equals(second)
    for wrong in ("2020-06-09", "09/06/2020 00:01:00", "2020-06-31T00:01:00", "20200609", "00:01:00"):
        row = helios().replace("2020-06-09 00:01:00", wrong)
        accepted = (
            "expected a time such as 2020-06-09 18:41:01, 2020-06-09T18:41:01+08:00 or 1591728061, or n"
        )
        assert accepted in refused(read_helios_jobs, write(HELIOS + row))
        assert accepted in refused(read_philly_jobs, write(json.dumps([philly(submitted_time=wrong)])))


def test_bytes_that_are_no_text_are_refused(write):
    with pytest.raises(TraceError, match="cannot be read"):
        read_jobs(write(HEAD.encode() + b"\xff\xfe\x00\x9f,0\n"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_philly_jobs(write(b"[\x80\x00\x9f"))


def test_missing_files_are_named(tmp_path):
    for read in [
        read_jobs,
        read_morphling_jobs,
        read_helios_jobs,
        read_philly_jobs,
        read_openb_pods,
        read_oobleck_nodes,
    ]:
        with pytest.raises(MissingDataError, match=r"nowhere\.csv: no such file"):
            read(tmp_path / "nowhere.csv")


# --- EasyScale --------------------------------------------------------------------------------

EASY_HEAD = (
    "name,time,application,max_parallelism,batch_size,epochs,"
    "enable_heterogeneous_deterministic,preferred_gpu,\n"
)
EASY = (
    EASY_HEAD + "bert-0,115,bert,16,8,4,40,v100,0.4\n"
    "vgg-1,230,vgg19,4,4,200,1,V100\n"
    "bert-0,100,bert,8,16,3,0,p100,0.1\n"
)


def test_easyscale_rows_are_jobs_and_every_defect_is_reported(write):
    table, report = read_easyscale_jobs(write(EASY))
    assert table["job_id"].tolist() == ["bert-0#2", "bert-0", "vgg-1"]
    assert table["is_heterogeneous"].tolist() == [False, True, True]
    assert table["home_gpu"].tolist() == ["p100", "v100", "v100"]
    assert (report.n_read, report.n_kept) == (3, 3)
    assert reasons(report) == {
        "cells beyond the last named column": (1, 3),
        "flag is neither 0 nor 1": (1,),
        "name occurs again": (3,),
        "submitted before the row above": (3,),
    }


def test_easyscale_artifact_mode_lets_later_rows_replace_earlier_ones_in_place(write):
    table, report = read_easyscale_jobs(write(EASY), dedup="artifact")
    assert table["job_id"].tolist() == ["bert-0", "vgg-1"]
    assert table["submit_time_s"].tolist() == [100.0, 230.0]
    assert (report.n_read, report.n_kept) == (3, 2)


def test_easyscale_errors_name_the_cell(write):
    with pytest.raises(TraceError, match=r"row 2, column 'max_parallelism': found '0'.*1 or more"):
        read_easyscale_jobs(write(EASY.replace("vgg19,4", "vgg19,0")))
    with pytest.raises(TraceError, match="row 2, column 'preferred_gpu': found 'nothing'"):
        read_easyscale_jobs(write(EASY.replace(",1,V100", ",1")))
    with pytest.raises(TraceError, match="column 'header'"):
        read_easyscale_jobs(write("a,b\n1,2\n"))
    with pytest.raises(TraceError, match="at least one job"):
        read_easyscale_jobs(write(EASY.splitlines()[0]))


# --- Oobleck ----------------------------------------------------------------------------------


def test_nodes_take_the_lowest_free_slot(write):
    table, report = read_oobleck_nodes(
        write("0,add,n1\n0,add,n2\n5000,remove,n1\n9000,add,n3\n9000,add,n4\n")
    )
    assert table["node_id"].tolist() == [0, 1, 0, 0, 2]
    assert table["kind"].tolist() == ["joined", "joined", "failed", "joined", "joined"]
    assert table["time_s"].tolist() == [0.0, 0.0, 5.0, 9.0, 9.0]
    assert not report.findings


def test_node_traces_are_failures_that_the_simulator_takes(write):
    table, _ = read_oobleck_nodes(write("0,add,n1\n0,add,n2\n5000,remove,n1\n"))
    events = read_failures(table, "here")
    assert [(event.time_s, event.node_id, event.kind.value) for event in events] == [
        (0.0, 0, "joined"),
        (0.0, 1, "joined"),
        (5.0, 0, "failed"),
    ]


def test_broken_node_traces_are_refused_with_row_and_column(write):
    for text, message in [
        ("5,add,a\n4,add,b\n", "row 2, column 'time': found 4; expected times that do not fall"),
        ("-5,add,a\n", "row 1, column 'time'"),
        ("1.5,add,a\n", "whole number of ms"),
        ("0,add,a\n1,add,a\n", "row 2, column 'node': found 'a'; expected a node that was not added"),
        ("0,add,a\n1,remove,a\n2,add,a\n", "row 3, column 'node'"),
        ("0,add,a\n1,remove,b\n", "row 2, column 'node': found 'b'; expected a node that is there: a"),
        ("0,remove,b\n", "a node that is there: none"),
        ("0,explode,a\n", "column 'event': found 'explode'; expected add, remove"),
        ("0,add\n", "row 1, column 'node': found 'nothing'; expected 3 cells a row"),
        ("0,add,\n", "column 'node': found ''; expected a name"),
        ("", "file is empty"),
    ]:
        with pytest.raises(TraceError) as caught:
            read_oobleck_nodes(write(text))
        assert message in str(caught.value)


# --- Philly -----------------------------------------------------------------------------------


def attempt(start, end, **machines):
    detail = [{"ip": ip, "gpus": [f"gpu{n}" for n in range(count)]} for ip, count in machines.items()]
    return {"start_time": start, "end_time": end, "detail": detail}


def philly(**changes):
    entry = {
        "status": "Pass",
        "vc": "v1",
        "jobid": "j1",
        "user": "u1",
        "submitted_time": "2017-10-07 01:00:00",
        "attempts": [attempt("2017-10-07 01:10:00", "2017-10-07 01:20:00", m1=4)],
    }
    return entry | changes


@pytest.fixture
def philly_file(write):
    return lambda *entries: write(json.dumps(entries), "cluster_job_log")


def test_philly_durations_add_up_over_attempts_and_the_last_one_has_the_gpus(philly_file):
    attempts = [
        attempt("2017-10-07 01:10:00", "2017-10-07 01:20:00", m1=4),
        attempt("2017-10-07 02:00:00", "2017-10-07 02:05:00", m1=4, m2=4),
    ]
    trace = read_philly_jobs(philly_file(philly(attempts=attempts)))
    assert list(trace.table.columns) == REQUESTS.names
    row = trace.table.iloc[0]
    assert (row["n_gpus"], row["duration_s"], row["tenant"], row["status"]) == (8, 900.0, "v1", "Pass")
    assert row["submit_time_s"] == 0.0
    assert trace.origin_s == pd.Timestamp("2017-10-07 01:00:00").timestamp()
    assert reasons(trace.report) == {"attempts differ in their GPUs": (1,)}


def test_philly_hours_count_each_attempt_with_its_own_gpus(philly_file):
    wide = {f"m{number}": 8 for number in range(8)}
    attempts = [
        attempt("2017-10-07 02:00:00", "2017-10-07 12:00:00", **wide),
        attempt("2017-10-07 13:00:00", "2017-10-07 13:01:00", m1=1),
    ]
    report = read_philly_jobs(philly_file(philly(attempts=attempts))).report
    assert report.gpu_hours == pytest.approx(10 + 1 / 60)
    assert report.gpu_hours_read == pytest.approx(640 + 1 / 60)
    assert "640.0 GPU-hours read, 10.0 kept" in report.text
    assert "(10.0 GPU-hours, 630.0 fewer than stated)" in report.text


def test_philly_drops_and_repairs_are_reported(philly_file):
    end = "2017-10-07 01:20:00"
    good = "2017-10-07 01:10:00"
    entries = [
        philly(jobid="ok"),
        philly(jobid="never", attempts=[]),
        philly(jobid="running", attempts=[attempt(good, None, m1=1)]),
        philly(jobid="killed", status="Killed"),
        philly(jobid="no gpu", attempts=[attempt(good, end)]),
        philly(jobid="no times", attempts=[attempt("None", "None", m1=1)]),
        philly(jobid="reversed", attempts=[attempt(end, good, m1=1)]),
        philly(jobid="half", attempts=[attempt(good, None, m1=1), attempt(good, end, m1=1)]),
        philly(jobid="ok"),
        philly(jobid="early", submitted_time="2017-10-07 00:00:00"),
        philly(jobid="instant", attempts=[attempt(good, good, m1=1)]),
        philly(jobid="unknown time", submitted_time=None),
    ]
    trace = read_philly_jobs(philly_file(*entries))
    assert trace.table["job_id"].tolist() == ["early", "ok", "half"]
    assert reasons(trace.report) == {
        "never started": (2,),
        "running at the end of the trace": (3,),
        "cancelled": (4,),
        "a part lacks its start or end": (8,),
        "submission time missing": (12,),
        "no GPU requested": (5,),
        "end or start missing": (6,),
        "ends before it starts": (7,),
        "held its GPUs for no time": (11,),
        "job name occurs again": (9,),
        "submitted before the row above": (10,),
    }
    assert trace.report.n_read - trace.report.n_kept == 9
    kept = read_philly_jobs(philly_file(*entries), keep_cancelled=True)
    assert "killed" in kept.table["job_id"].tolist()


def test_philly_jobs_that_contradict_the_machine_list_are_dropped(philly_file, write):
    machines, report = read_philly_machines(write("m1,8, 24GB\nm2,2, 12GB\nm2,2, 12GB\n", "machines"))
    assert machines == {"m1": 8, "m2": 2}
    assert reasons(report) == {"node occurs again with the same resources": (3,)}
    span = ("2017-10-07 01:10:00", "2017-10-07 01:20:00")
    entries = [
        philly(jobid="fits", attempts=[attempt(*span, m1=8, m2=2)]),
        philly(jobid="too many", attempts=[attempt(*span, m2=3)]),
        philly(jobid="nowhere", attempts=[attempt(*span, m9=1)]),
    ]
    trace = read_philly_jobs(philly_file(*entries), machines=machines)
    assert trace.table["job_id"].tolist() == ["fits"]
    assert reasons(trace.report) == {"machines contradict the machine list": (2, 3)}


def test_contradictory_philly_machines_name_the_row(write):
    with pytest.raises(TraceError, match=r"row 2, column 'number of GPUs': found 2; expected 8 as in"):
        read_philly_machines(write("m1,8,24GB\nm1,2,12GB\n"))


def test_broken_philly_files_are_refused(write):
    for text, message in [
        ("", "file is empty"),
        ("{", "line 1, column 2"),
        ("{}", "found dict; expected a JSON list"),
        ("[]", "a JSON list with a job or more"),
        ("[3]", "row 1, column 'job'"),
        (json.dumps([{"jobid": "a"}]), "row 1, column 'status': found 'nothing'"),
        (json.dumps([philly(status="Odd")]), "column 'status': found 'Odd'; expected Pass, Killed, Failed"),
        (json.dumps([philly(submitted_time="soon")]), "column 'submitted_time': found 'soon'"),
        (json.dumps([philly(attempts=[3])]), "column 'attempts'"),
        (json.dumps([philly(attempts=[{"detail": [3]}])]), "column 'detail'"),
        (json.dumps([philly(attempts=[])]), "no job left of 1 rows"),
    ]:
        with pytest.raises(TraceError) as caught:
            read_philly_jobs(write(text))
        assert message in str(caught.value)


# --- Helios -----------------------------------------------------------------------------------

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"


def helios(
    job="1", gpus="2", state="COMPLETED", submit="00:00:00", start="00:01:00", end="00:03:00", took="120"
):
    day = "2020-06-09 "
    times = ",".join(day + time if time else "" for time in (submit, start, end))
    return f"{job},u1,vc1,{gpus},8,1,{state},{times},{took},0\n"


def test_helios_drops_and_repairs_are_reported(write):
    rows = [
        helios("1"),
        helios("2", state="CANCELLED"),
        helios("3", gpus="0"),
        helios("4", end=""),
        helios("5", state="RUNNING", end="", took=""),
        helios("6", end="00:00:30"),
        helios("7", took="999"),
        helios("8", submit="00:02:00"),
        helios("1"),
        helios("9", state="TIMEOUT", submit="00:00:30"),
    ]
    trace = read_helios_jobs(write(HELIOS + "".join(rows)))
    assert trace.table["job_id"].tolist() == ["1", "7", "9", "8"]
    assert trace.table["submit_time_s"].tolist() == [0.0, 0.0, 30.0, 60.0]
    assert trace.table["duration_s"].tolist() == [120.0] * 4
    found = reasons(trace.report)
    assert found["running at the end of the trace"] == (5,)
    assert found["cancelled"] == (2,)
    assert found["no GPU requested"] == (3,)
    assert found["end or start missing"] == (4,)
    assert found["ends before it starts"] == (6,)
    assert 7 in found["duration contradicts start and end"]
    assert found["starts before its submission"] == (8,)
    assert found["job name occurs again"] == (9,)
    assert found["submitted before the row above"] == (10,)


def test_helios_hours_that_were_read_are_those_of_the_stated_duration(write):
    report = read_helios_jobs(write(HELIOS + helios(took="999"))).report
    assert (report.gpu_hours, report.gpu_hours_read) == pytest.approx((2 * 120 / 3600, 2 * 999 / 3600))


def test_broken_helios_rows_are_refused(write):
    for row, message in [
        (helios(state="EXPLODED"), "row 1, column 'state': found 'EXPLODED'"),
        (helios(submit="25:00:00"), "row 1, column 'submit_time': found '2020-06-09 25:00:00'"),
        (helios(gpus="many"), "row 1, column 'gpu_num': found 'many'"),
        (helios(gpus="-1"), "row 1, column 'gpu_num': found '-1'"),
        (helios(gpus="0"), "no job left of 1 rows"),
    ]:
        with pytest.raises(TraceError) as caught:
            read_helios_jobs(write(HELIOS + row))
        assert message in str(caught.value)


def test_helios_quota_is_long_and_wrong_totals_are_reported(write):
    table, report = read_helios_quota(write("date,vca,vcb,total\n2020-09-01,8,16,24\n2020-09-02,8,16,99\n"))
    assert table["n_gpus"].tolist() == [8, 16, 8, 16]
    assert table["tenant"].tolist() == ["vca", "vcb", "vca", "vcb"]
    assert reasons(report) == {"total differs from the sum of the virtual clusters": (2,)}


def test_broken_quota_tables_are_refused(write):
    for text, message in [
        ("date,vca,total\n1.9.2020,8,8\n", "column 'date': found '1.9.2020'"),
        ("date,vca,total\n2020-09-01,8,8\n2020-09-01,8,8\n", "row 2, column 'date'"),
        ("date,vca,total\n2020-09-01,x,8\n", "column 'vca': found 'x'"),
        ("date,total\n2020-09-01,8\n", "no virtual cluster"),
        ("date,vca\n2020-09-01,8\n", "lacks column(s) total"),
    ]:
        with pytest.raises(TraceError) as caught:
            read_helios_quota(write(text))
        assert message in str(caught.value)


# --- PAI --------------------------------------------------------------------------------------

JOB_TABLE = (
    "j1,i1,u1,Terminated,100,900\nj2,i2,u2,Failed,50,400\nj3,i3,u1,Running,10,\nj4,i4,u1,Waiting,20,\n"
)
TASK_TABLE = (
    "j1,ps,1,Terminated,110,890,600,29,0,\n"
    "j1,worker,2,Terminated,120,880,400,29,50,T4\n"
    "j2,tensorflow,3,Failed,60,400,100,10,100,V100\n"
    "j3,worker,1,Running,10,,400,29,100,T4\n"
)
INSTANCE_TABLE = (
    "j1,worker,a,w1,i1,Terminated,130,700,m1\n"
    "j1,worker,b,w2,i1,Terminated,140,800,m2\n"
    "j2,tensorflow,c,w3,i2,Failed,0,0,m1\n"
)


@pytest.fixture
def pai(write):
    def inner(jobs=JOB_TABLE, tasks=TASK_TABLE, instances=None, **options):
        extra = [write(instances, "instances.csv")] if instances else []
        return read_pai_jobs(write(jobs, "jobs.csv"), write(tasks, "tasks.csv"), *extra, **options)

    return inner


def test_pai_requests_in_percent_become_devices(pai):
    trace = pai()
    table = trace.table.set_index("job_id")
    assert table.loc["j1", ["n_gpus", "n_cpus", "duration_s"]].tolist() == [1, 14, 780.0]
    assert table.loc["j2", ["n_gpus", "n_cpus", "duration_s"]].tolist() == [3, 3, 340.0]
    assert table["submit_time_s"].tolist() == [0.0, 50.0]
    assert trace.origin_s == 50.0
    found = reasons(trace.report)
    assert found["running at the end of the trace"] == (3,)
    assert found["never started"] == (4,)


def test_pai_instances_decide_the_time_where_given(pai):
    trace = pai(instances=INSTANCE_TABLE)
    table = trace.table.set_index("job_id")
    assert table.loc["j1", "duration_s"] == 670.0
    assert table.loc["j2", "duration_s"] == 350.0
    assert reasons(trace.report)["a part lacks its start or end"] == (2,)


def test_pai_tables_are_read_in_pieces_to_the_same_result(pai, monkeypatch):
    whole = pai(instances=INSTANCE_TABLE, machines={"m1": 8, "m2": 2})
    monkeypatch.setattr("makespan.traces.readers._CHUNK_ROWS", 1)
    pieces = pai(instances=INSTANCE_TABLE, machines={"m1": 8, "m2": 2})
    pd.testing.assert_frame_equal(pieces.table, whole.table)
    assert _CHUNK_ROWS > 1


def test_pai_parts_of_a_gpu_are_rounded_up_and_reported(pai):
    trace = pai(jobs="j1,i1,u1,Terminated,100,900\n", tasks="j1,w,1,Terminated,110,890,150,1,25,T4\n")
    assert trace.table[["n_gpus", "n_cpus"]].iloc[0].tolist() == [1, 2]
    assert reasons(trace.report) == {
        "asks for a part of a GPU": (1,),
        "asks for a part of a CPU": (1,),
        "asks for a type of GPU": (1,),
    }


def test_pai_jobs_on_unknown_machines_or_without_task_are_dropped(pai):
    trace = pai(
        jobs=JOB_TABLE + "j5,i5,u1,Terminated,30,40\n",
        instances=INSTANCE_TABLE,
        machines={"m1": 8},
    )
    assert trace.table["job_id"].tolist() == ["j2"]
    found = reasons(trace.report)
    assert found["machines contradict the machine list"] == (1,)
    assert found["no task of that job in the task table"] == (5,)


def test_pai_header_line_is_accepted_and_statuses_are_checked(pai, write):
    header = "job_name,inst_id,user,status,start_time,end_time\n"
    assert pai(jobs=header + JOB_TABLE).table.equals(pai().table)
    with pytest.raises(TraceError, match="row 1, column 'status': found 'Lost'"):
        pai(jobs="j1,i1,u1,Lost,100,900\n")
    with pytest.raises(TraceError, match="row 1, column 'plan_gpu': found '-5'"):
        pai(tasks="j1,w,1,Terminated,110,890,150,1,-5,T4\n")
    with pytest.raises(TraceError, match="column 'plan_gpu': found '1e30'"):
        pai(tasks="j1,w,1,Terminated,110,890,150,1,1e30,T4\n")
    with pytest.raises(TraceError, match=r"row 1, column 'n_gpus': found .* up to 1e\+06 devices"):
        pai(tasks="j1,w,1e9,Terminated,110,890,150,1,1e9,T4\n")
    with pytest.raises(TraceError, match="row 2, column 'cap_gpu': found 2; expected 8"):
        read_pai_machines(write("m1,T4,96,512,8\nm1,T4,96,512,2\n"))
    with pytest.raises(TraceError, match=r"row 1, column .cap_gpu.: found '1\.5'"):
        read_pai_machines(write("m1,T4,96,512,1.5\n"))
    assert read_pai_machines(write("m1,T4,96,512,8\nm1,T4,96,512,8\n")) == {"m1": 8}


# --- openb ------------------------------------------------------------------------------------

PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p0,12500,1,8,1000,,Burstable,Succeeded,100,400,150\n"
    "p1,4000,1,1,220,,BE,Failed,200,300,210\n"
    "p2,4000,1,0,0,,LS,Succeeded,200,300,210\n"
    "p3,4000,1,1,1000,,BE,Pending,200,300,\n"
    "p4,4000,1,1,1000,,LS,Running,100,900,150\n"
    "p5,4000,1,1,1000,,LS,Running,100,900,150\n"
    "p6,4000,1,2,1000,V100,LS,Running,100,800,90\n"
)


def test_openb_pods_are_read_with_report(write):
    trace = read_openb_pods(write(PODS))
    table = trace.table.set_index("job_id")
    assert table.index.tolist() == ["p6", "p0", "p1"]
    assert table.loc["p0", ["n_gpus", "n_cpus", "duration_s", "tenant"]].tolist() == [
        8,
        13,
        250.0,
        "Burstable",
    ]
    assert table.loc["p6", "submit_time_s"] == 0.0
    found = reasons(trace.report)
    assert found["no GPU requested"] == (3,)
    assert found["never started"] == (4,)
    assert found["running at the end of the trace"] == (5, 6)
    assert found["asks for a part of a GPU"] == (2,)
    assert found["starts before its submission"] == (7,)


def test_openb_phase_is_checked(write):
    with pytest.raises(TraceError, match="row 1, column 'pod_phase': found 'Odd'"):
        read_openb_pods(write(PODS.splitlines()[0] + "\np0,1,1,1,1000,,LS,Odd,1,2,1\n"))


NODES = "sn,cpu_milli,memory_mib,gpu,model\nn0,32000,1024,0,\nn1,96000,2048,8,V100M32\n"


def test_openb_nodes_are_read_and_contradictions_refused(write):
    table, report = read_openb_nodes(write(NODES + "n1,96000,2048,8,V100M32\n"))
    assert table["n_gpus"].tolist() == [0, 8]
    assert table["memory_bytes"].tolist() == [2.0**30, 2.0**31]
    assert table["gpu"].tolist() == ["", "V100M32"]
    assert reasons(report) == {"node occurs again with the same resources": (3,)}
    with pytest.raises(TraceError, match="row 3, column 'sn': found 'n1'; expected one row per node"):
        read_openb_nodes(write(NODES + "n1,96000,2048,4,V100M32\n"))


# --- published files --------------------------------------------------------------------------


def test_published_lists_lose_no_row(published_dir):
    for name, jobs in (("naive", 10), ("workload-base", 406), ("workload-bp", 406), ("workload-mt", 406)):
        trace = read_jobs(published_dir / "morphling" / "workloads" / f"{name}.csv")
        assert len(trace.jobs) == jobs
        assert trace.report.n_read == trace.report.n_kept
    assert sum(job.is_guaranteed for job in trace.jobs) == 194
    path = published_dir / "easyscale" / "workload.csv"
    table, report = read_easyscale_jobs(path)
    assert len(table) == table["job_id"].nunique() == 68
    assert sum(len(one.rows) for one in report.findings if "name occurs again" in one.reason) == 6
    assert len(read_easyscale_jobs(path, dedup="artifact")[0]) == 62


def test_published_node_traces_use_as_many_slots_as_nodes_are_alive(published_dir):
    for name, events, alive in [
        ("p3-trace", 344, 32),
        ("g4dn-trace", 153, 24),
        ("scaled/scale_gcp-trace", 161, 30),
        ("10m", 45, 30),
    ]:
        table, report = read_oobleck_nodes(published_dir / "oobleck" / "traces" / f"{name}.csv")
        assert len(table) == events
        assert table["node_id"].max() + 1 == alive
        assert report.n_read == report.n_kept
