"""Job traces in the forms in which people send them: packed, encoded, separated and written in other ways."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError, MissingDataError, TraceError
from makespan.files import read_bytes, read_text
from makespan.studies import read_trace, scenario
from makespan.traces import (
    NODE_LIST,
    JobTrace,
    read_easyscale_jobs,
    read_gavel_jobs,
    read_gavel_throughputs,
    read_helios_jobs,
    read_jobs,
    read_nodes,
    read_oobleck_nodes,
    read_openb_nodes,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    read_pollux_jobs,
    read_requests,
    read_spot_jobs,
    read_spot_nodes,
    read_tiresias_jobs,
    request_trace,
)

HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration\n"
    "71,ann,v1,4,32,1,COMPLETED,2021-03-02 08:00:00,2021-03-02 08:01:00,2021-03-02 10:01:00,7200\n"
    "72,ben,v2,16,128,2,FAILED,2021-03-02 08:30:00,2021-03-02 09:00:00,2021-03-02 09:20:00,1200\n"
)
PODS = (
    "name,num_gpu,gpu_milli,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p,2,1000,Succeeded,10,3610,20\nq,1,1000,Failed,30,630,40\n"
)
SPOT = (
    "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
    "501,12,A10,8,1,4,0,7200,HP\n502,13,H800,16,8,2,60,3600,Spot\n"
)
JOBS = (
    "job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,is_guaranteed,tenant,duration_s\n"
    "x,0,vit,1,8,ga,100,true,t,\ny,60,bert,4,32,zero-dp,200,false,u,\n"
)
LISTS = {
    "helios": (read_helios_jobs, HELIOS),
    "openb": (read_openb_pods, PODS),
    "spot": (read_spot_jobs, SPOT),
    "jobs": (read_jobs, JOBS),
}


def in_tar(content: bytes, mode: str = "w", *more: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name in ("folder/list.csv", *more):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def in_zip(content: bytes, *more: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("list.csv", "__MACOSX/._list.csv", *more):
            archive.writestr(name, content)
    return packed.getvalue()


def with_index(text: str) -> str:
    return "".join(f"{number if number else ''},{line}\n" for number, line in enumerate(text.splitlines()))


FORMS = {
    "gzip": lambda text: gzip.compress(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "zip": lambda text: in_zip(text.encode()),
    "tar": lambda text: in_tar(text.encode()),
    "tar.gz": lambda text: in_tar(text.encode(), "w:gz"),
    "tar.xz": lambda text: in_tar(text.encode(), "w:xz"),
    "gzip of utf-16": lambda text: gzip.compress(text.encode("utf-16")),
    "utf-8 with mark": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "utf-16 without mark": lambda text: text.encode("utf-16-le"),
    "big-endian utf-16 without mark": lambda text: text.encode("utf-16-be"),
    "utf-32": lambda text: text.encode("utf-32"),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "tabs": lambda text: text.replace(",", "\t").encode(),
    "bars": lambda text: text.replace(",", "|").encode(),
    "Windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "Mac line ends": lambda text: text.replace("\n", "\r").encode(),
    "comments": lambda text: b"# exported, by hand\n\n# twice\n" + text.encode(),
    "commented header": lambda text: b"# " + text.encode(),
    "separator as Excel states it": lambda text: b"sep=;\r\n" + text.replace(",", ";").encode(),
    "index column": lambda text: with_index(text).encode(),
    "names in capitals": lambda text: text.replace(
        *[text.splitlines()[0], text.splitlines()[0].upper()]
    ).encode(),
    "blanks after separators": lambda text: text.replace(",", ", ").encode(),
    "all in quotes": lambda text: "".join(
        ",".join(f'"{cell}"' for cell in line.split(",")) + "\n" for line in text.splitlines()
    ).encode(),
    "semicolons, utf-16, tar.gz": lambda text: in_tar(text.replace(",", ";").encode("utf-16"), "w:gz"),
}


def content_of(trace):
    return trace.jobs if isinstance(trace, JobTrace) else trace.table.to_dict("records")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_the_same_in_every_form(name, form, tmp_path):
    read, text = LISTS[name]
    (tmp_path / "plain.csv").write_text(text)
    (tmp_path / "other").write_bytes(FORMS[form](text))
    plain, other = read(tmp_path / "plain.csv"), read(tmp_path / "other")
    assert content_of(other) == content_of(plain)
    assert other.report.n_kept == 2


NODES = {
    "own": "node_id,n_gpus,n_cpus,memory_bytes,gpu\nn1,8,96,5e11,T4\nn2,4,48,2e11,V100\n",
    "openb": "sn,cpu_milli,memory_mib,gpu,model\nn1,96000,786432,8,V100M32\nn2,64000,262144,2,T4\n",
    "spot": "node_name,gpu_model,gpu_capacity_num,cpu_num\ns1,T4,4,48\ns2,A10,2,96\n",
    "pai": "machine,gpu_type,cap_cpu,cap_mem,cap_gpu\nm1,T4,96,512,2\nm2,P100,64,512,8\n",
    "philly": "machineId,number of GPUs,single GPU mem\nm1,8,24GB\nm2,2,12GB\n",
    "helios": "date,vcA,vcB,total\n2020-09-01,8,8,16\n2020-09-02,16,12,28\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NODES)
def test_a_list_of_nodes_is_the_same_in_every_form(name, form, tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES[name])
    expected = read_nodes(tmp_path / "nodes.csv")[0]
    (tmp_path / "nodes.csv").write_bytes(FORMS[form](NODES[name]))
    found = read_nodes(tmp_path / "nodes.csv")[0]
    if name == "helios":  # its column names are those of virtual clusters, which nodes are named after
        found, expected = (table.assign(node_id=table["node_id"].str.upper()) for table in (found, expected))
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("form", ["gzip", "utf-16", "semicolons", "tabs", "Windows line ends", "comments"])
@pytest.mark.parametrize("name", ["pai", "philly"])
def test_machine_lists_without_header_are_the_same_in_every_form(name, form, tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES[name])
    expected = read_nodes(tmp_path / "nodes.csv")[0]
    (tmp_path / "nodes.csv").write_bytes(FORMS[form](NODES[name].partition("\n")[2]))
    pd.testing.assert_frame_equal(read_nodes(tmp_path / "nodes.csv")[0], expected)


def test_zstd_is_read_where_its_library_is_there_and_named_elsewhere(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "list.csv.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(HELIOS.encode()))
    assert len(read_helios_jobs(path).table) == 2


@pytest.mark.parametrize("magic", [b"\x28\xb5\x2f\xfd....", b"PAR1...."])
def test_what_needs_a_library_names_it_or_says_that_the_file_is_broken(magic, tmp_path):
    (tmp_path / "list").write_bytes(magic)
    expected = (
        r"list: (cannot be unpacked as a job trace: |cannot be read as Parquet: |Parquet needs the package)"
    )
    with pytest.raises(TraceError, match=expected):
        read_helios_jobs(tmp_path / "list")


def test_parquet_is_read_as_its_csv(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "list.csv").write_text(HELIOS)
    table = pd.read_csv(tmp_path / "list.csv", parse_dates=["submit_time", "start_time", "end_time"])
    table.to_parquet(tmp_path / "list.parquet")
    plain = read_helios_jobs(tmp_path / "list.csv")
    assert read_helios_jobs(tmp_path / "list.parquet").table.equals(plain.table)
    zoned = table.assign(
        **{name: table[name].dt.tz_localize("Asia/Shanghai") for name in table if "time" in name}
    )
    zoned.to_parquet(tmp_path / "zoned.parquet")
    assert read_helios_jobs(tmp_path / "zoned.parquet").table.equals(plain.table)
    with pytest.raises(TraceError, match=r"lacks column\(s\) gpu_num"):
        table.drop(columns="gpu_num").to_parquet(tmp_path / "list.parquet")
        read_helios_jobs(tmp_path / "list.parquet")


def test_a_parquet_table_of_more_cells_than_memory_is_refused_by_its_size(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("makespan.traces.cells._MOST_PARQUET_CELLS", 4000)
    zeros = [0] * 1001
    pd.DataFrame(dict.fromkeys(("job_id", "submit_time_s", "n_gpus", "duration_s"), zeros)).to_parquet(
        tmp_path / "list.parquet"
    )
    with pytest.raises(TraceError, match=r"list\.parquet: has 1001 rows of 4 columns; expected at most"):
        read_requests(tmp_path / "list.parquet")


def test_pai_tables_are_read_from_their_archives_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("makespan.traces.readers._CHUNK_ROWS", 1)
    files = {
        "jobs": "j,i,u,Terminated,100,900\n",
        "tasks": "j,w,2,Terminated,110,890,600,29,100,T4\n",
        "instances": "j,w,a,w1,i,Terminated,130,700,m1\nj,w,b,w2,i,Terminated,140,800,m2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(in_tar(text.encode(), "w:gz"))
    trace = read_pai_jobs(*(tmp_path / name for name in files), machines={"m1": 8, "m2": 8})
    assert trace.table[["n_gpus", "duration_s"]].to_numpy().tolist() == [[2.0, 670.0]]


def test_the_second_table_of_a_trace_is_found_packed_as_the_first(tmp_path):
    jobs, tasks = "j1,i,u,Terminated,100,900\n", "j1,w,1,Terminated,110,890,600,1,100,T4\n"
    (tmp_path / "pai_job_table.tar.gz").write_bytes(in_tar(jobs.encode(), "w:gz"))
    (tmp_path / "pai_task_table.tar.gz").write_bytes(in_tar(tasks.encode(), "w:gz"))
    assert read_trace(tmp_path / "pai_job_table.tar.gz", "pai").table["duration_s"].tolist() == [780.0]
    (tmp_path / "june").mkdir()
    (tmp_path / "june" / "jobs.csv.gz").write_bytes(gzip.compress(jobs.encode()))
    with pytest.raises(MissingDataError, match=r"june/pai_task_table\.csv: no such file"):
        read_trace(tmp_path / "june" / "jobs.csv.gz", "pai")
    (tmp_path / "june" / "pai_task_table.csv.gz").write_bytes(gzip.compress(tasks.encode()))
    assert len(read_trace(tmp_path / "june" / "jobs.csv.gz", "pai").table) == 1
    (tmp_path / "jobs.trace").write_text(GAVEL_ROWS["ten cells"] + "\n")
    table = {"v100": {"('LM', 2)": {"null": 4.0}}}
    (tmp_path / "simulation_throughputs.json.gz").write_bytes(gzip.compress(json.dumps(table).encode()))
    assert read_trace(tmp_path / "jobs.trace", "gavel").table["duration_s"].tolist() == [150.0]


def test_philly_logs_are_read_as_json_lines_too(tmp_path):
    attempt = {
        "start_time": "2017-10-07 01:10:00",
        "end_time": "2017-10-07 01:20:00",
        "detail": [{"ip": "m", "gpus": ["0"]}],
    }
    job = {"jobid": "a", "status": "Pass", "submitted_time": "2017-10-07 01:00:00", "attempts": [attempt]}
    entries = [job, job | {"jobid": "b"}]
    (tmp_path / "log").write_text(json.dumps(entries))
    (tmp_path / "lines").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert read_philly_jobs(tmp_path / "lines").table.equals(read_philly_jobs(tmp_path / "log").table)
    (tmp_path / "broken").write_text(json.dumps(job) + "\n\n{'a'}\n")
    with pytest.raises(TraceError, match="broken: line 3, column 2: no JSON"):
        read_philly_jobs(tmp_path / "broken")


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("index column", "commented header")])
def test_lists_of_the_artifacts_are_the_same_in_every_form(form, tmp_path):
    jobs = (
        "name,time,application,max_parallelism,batch_size,epochs,enable_heterogeneous_deterministic,preferred_gpu\n"
        "n-0,30,ncf,4,8,2,1,v100\nn-1,60,ncf,2,8,3,0,t4\n"
    )
    nodes = "0,add,n1\n0,add,n2\n5000,remove,n1\n"
    for read, text in ((read_easyscale_jobs, jobs), (read_oobleck_nodes, nodes)):
        if form == "names in capitals" and read is read_oobleck_nodes:
            continue  # its first line is a row
        (tmp_path / "plain").write_text(text)
        (tmp_path / "other").write_bytes(FORMS[form](text))
        assert read(tmp_path / "other")[0].equals(read(tmp_path / "plain")[0])


# --- what cannot be unpacked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, bz2.compress, lzma.compress, in_zip, lambda content: in_tar(content, "w:gz")],
)
def test_a_decompression_bomb_is_refused_within_bounds(pack, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(pack(b"a,b\n1,2\n" * (1 << 22)))  # 32 MiB, packed into some kilobytes
    largest = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(
            InputError, match=r"bomb: has [\d.]+ MB or more; expected a list of at most 1\.0 MB"
        ):
            read_bytes(path, "a list", largest=largest)
        assert tracemalloc.get_traced_memory()[1] < 16 * largest
    finally:
        tracemalloc.stop()


def test_lists_that_are_read_in_pieces_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr("makespan.files._LARGEST", 1 << 16)
    (tmp_path / "jobs").write_text("j,i,u,Terminated,100,900\n")
    (tmp_path / "tasks").write_text("j,w,2,Terminated,110,890,600,29,100,T4\n")
    row = b"j,w,a,w1,i,Terminated,130,700,m1\n"
    (tmp_path / "instances").write_bytes(gzip.compress(row * 100_000))
    with pytest.raises(TraceError, match=r"instances: has .* or more; expected a job trace of at most"):
        read_pai_jobs(tmp_path / "jobs", tmp_path / "tasks", tmp_path / "instances")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            in_zip(b"a\n", "second.csv"),
            "the zip archive has several files, 'list.csv' and 'second.csv' among them",
        ),
        (
            in_tar(b"a\n", "w:gz", "b.csv"),
            "the tar archive has several files, 'folder/list.csv' and 'b.csv' among",
        ),
        (in_zip(b"a\n").replace(b"list.csv", b".hid.csv"), "the zip archive has no file; expected one"),
        (gzip.compress(HELIOS.encode())[:-20], "cannot be unpacked as a job trace"),
        (gzip.compress(HELIOS.encode())[:60] + b"garbage" * 9, "cannot be unpacked as a job trace"),
        (lzma.compress(HELIOS.encode())[:-30], "cannot be unpacked as a job trace"),
        (bz2.compress(HELIOS.encode())[:-10], "cannot be unpacked as a job trace"),
        (in_zip(HELIOS.encode())[:-40], "cannot be unpacked as a job trace"),
        (in_zip(b"a\n", "[Content_Types].xml"), "a workbook or document of an office; save the table as CSV"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            "is a pointer of Git LFS, not the file",
        ),
        (HELIOS.encode("utf-16") + b"\x00", "cannot be read as a job trace: broken utf-16"),
        (HELIOS.encode().replace(b"ann", b"a\0n"), "it has zero bytes; expected text in UTF-8 or UTF-16"),
        (
            HELIOS.replace("ann", "J\xe9").encode("latin-1"),
            "cannot be read as CSV: byte 0xe9 is not UTF-8; save it in",
        ),
    ],
    ids=range(13),  # packed bytes have the time in them, so no two processes would agree on their names
)
def test_what_cannot_be_unpacked_is_one_line(content, message, tmp_path):
    path = tmp_path / "list"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_helios_jobs(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_packed_again_and_again_is_refused(tmp_path):
    content = HELIOS.encode()
    for layer in range(5):
        (tmp_path / f"{layer}").write_bytes(content)
        content = gzip.compress(content)
    assert read_text(tmp_path / "3", "a list") == HELIOS
    with pytest.raises(InputError, match="4: packed more than 3 times"):
        read_text(tmp_path / "4", "a list")


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_with_thousands_or_a_decimal_comma_are_read_and_reported(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(HELIOS.replace(",7200", ',"7,200"').replace(",4,32,", ',"0,5",32,'))
    trace = read_helios_jobs(path)
    assert trace.table["n_gpus"].tolist() == [1, 16]
    found = {finding.reason.split(";")[0]: finding.rows for finding in trace.report.findings}
    assert found["numbers with commas between thousands"] == (1,)
    assert found["numbers with a decimal comma"] == (1,)
    assert "duration contradicts" not in trace.report.text


def test_a_comma_before_three_digits_is_refused_where_semicolons_separate(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(SPOT.replace(",", ";").replace(";7200;", ";7,200;"))
    with pytest.raises(
        TraceError, match=r"row 1, column 'duration': found '7,200'.*without a comma before three"
    ):
        read_spot_jobs(path)
    path.write_text(SPOT.replace(",", ";").replace(";7200;", ";7200,5;"))
    assert read_spot_jobs(path).table["duration_s"].tolist() == [7200.5, 3600.0]


# --- times ----------------------------------------------------------------------------------------

STAMP = pd.Timestamp("2021-03-02 08:00:00")


def with_times(write):
    text = HELIOS
    for stamp in sorted({cell for line in HELIOS.splitlines()[1:] for cell in line.split(",")[7:10]}):
        text = text.replace(stamp, write(pd.Timestamp(stamp)))
    return text


@pytest.mark.parametrize(
    "write",
    [
        lambda stamp: stamp.strftime("%Y/%m/%d %H:%M:%S"),
        lambda stamp: f"{stamp.year}/{stamp.month}/{stamp.day} {stamp.hour}:{stamp.minute:02}:00",
        lambda stamp: stamp.strftime("%Y-%m-%d %H:%M"),
        lambda stamp: stamp.isoformat() + "Z",
        lambda stamp: stamp.isoformat() + "+08:00",
        lambda stamp: stamp.strftime("%Y-%m-%d %H:%M:%S.250 -0530"),
        lambda stamp: stamp.strftime("%Y-%m-%d %H:%M:%S UTC"),
        lambda stamp: f"{stamp.timestamp():.0f}",
        lambda stamp: f"{stamp.timestamp():.3f}",
        lambda stamp: f"{1e3 * stamp.timestamp():.0f}",
        lambda stamp: f"{1e6 * stamp.timestamp():.0f}",
        lambda stamp: f"{1e9 * stamp.timestamp():.0f}",
        lambda stamp: stamp.tz_localize("UTC").tz_convert("Asia/Tokyo").isoformat(),
    ],
)
def test_times_are_the_same_in_every_form(write, tmp_path):
    (tmp_path / "plain.csv").write_text(HELIOS)
    (tmp_path / "other.csv").write_text(with_times(write))
    plain, other = read_helios_jobs(tmp_path / "plain.csv"), read_helios_jobs(tmp_path / "other.csv")
    pd.testing.assert_frame_equal(other.table, plain.table)


def test_what_a_time_leaves_out_is_reported_as_that(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(HELIOS.replace("2021-03-02 08:00:00", "2021-03-02 08"))
    told = "a time without minutes; minutes and seconds are taken as zero (row"
    assert told in read_helios_jobs(path).report.text
    path.write_text(HELIOS.replace("2021-03-02 08:00:00", "2021-03-02 08:00"))
    assert "a time without seconds; they are taken as zero (row" in read_helios_jobs(path).report.text


def test_zones_decide_what_times_mean_across_a_change_of_the_clock(tmp_path):
    row = "9,u,v,1,1,1,COMPLETED,{},{},{},1800\n"
    stamps = ("2021-10-31T02:20:00+02:00", "2021-10-31T02:50:00+02:00", "2021-10-31T02:20:00+01:00")
    (tmp_path / "zoned.csv").write_text(HELIOS.splitlines()[0] + "\n" + row.format(*stamps))
    trace = read_helios_jobs(tmp_path / "zoned.csv")
    assert trace.table["duration_s"].tolist() == [1800.0]
    assert [finding.text for finding in trace.report.findings] == [
        "repaired 1 row: times state a zone or count seconds since 1970; read in UTC (row 1)"
    ]
    (tmp_path / "local.csv").write_text(
        HELIOS + row.format(*(stamp[:19].replace("T", " ") for stamp in stamps))
    )
    assert (
        "dropped 1 row: ends before it starts (row 3)" in read_helios_jobs(tmp_path / "local.csv").report.text
    )


def test_some_times_in_utc_beside_local_ones_are_reported_and_another_zone_is_refused(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(HELIOS.replace("2021-03-02 08:00:00", "2021-03-02 08:00:00Z"))
    text = read_helios_jobs(path).report.text
    assert "these times state no zone beside others in UTC; read in UTC too (rows 1, 2)" in text
    path.write_text(HELIOS.replace("2021-03-02 08:00:00", "2021-03-02 08:00:00+08:00"))
    message = (
        r"row 2, column 'submit_time': found '2021-03-02 08:30:00'; expected a time with a zone, as other"
    )
    with pytest.raises(TraceError, match=message):
        read_helios_jobs(path)


# --- columns --------------------------------------------------------------------------------------


def test_columns_that_are_not_needed_may_be_missing(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(
        "job_id,gpu_num,submit_time,start_time,end_time\n"
        "1,2,2021-03-02 08:00:00,2021-03-02 08:01:00,2021-03-02 08:02:00\n"
    )
    trace = read_helios_jobs(path)
    assert trace.table.loc[0, ["n_gpus", "n_cpus", "tenant", "status"]].tolist() == [2, 0, "", ""]
    assert "no column says how jobs ended" in trace.report.text
    path.write_text("job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps\nx,0,vit,1,8,ga,100\n")
    jobs = read_jobs(path)
    assert (jobs.jobs[0].is_guaranteed, jobs.jobs[0].duration_s, jobs.jobs[0].tenant) == (False, None, "")
    assert "no column says which jobs are guaranteed; none is" in jobs.report.text


def test_all_states_of_slurm_are_known(tmp_path):
    path = tmp_path / "list.csv"
    for state, left in [
        ("OUT_OF_MEMORY", 2),
        ("PREEMPTED", 2),
        ("DEADLINE", 2),
        ("CANCELLED by 1001", 1),
        ("CANCELLED+", 1),
        ("REQUEUED", 1),
        ("COMPLETING", 1),
    ]:
        path.write_text(HELIOS.replace("FAILED", state))
        assert len(read_helios_jobs(path).table) == left
    path.write_text(HELIOS.replace("FAILED", "MELTED"))
    with pytest.raises(
        TraceError, match="row 2, column 'state': found 'MELTED'; expected COMPLETED, CANCELLED"
    ):
        read_helios_jobs(path)


def test_pods_without_times_are_refused_with_what_is_missing(tmp_path):
    (tmp_path / "pods.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1000,1,1,1000\n")
    with pytest.raises(
        TraceError, match=r"lacks column\(s\) creation_time, .*the list states requests of pods without"
    ):
        read_openb_pods(tmp_path / "pods.csv")


@pytest.mark.parametrize(("name", "text"), [("helios", HELIOS), ("openb", PODS), ("spot", SPOT)])
def test_a_list_of_another_format_is_recognised_by_its_columns(name, text, tmp_path):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(TraceError, match=f"such columns are those of format {name} \\(--format {name}\\)"):
        read_trace(tmp_path / "list.csv")
    assert len(read_trace(tmp_path / "list.csv", name).table) == 2


def test_a_list_that_lacks_columns_says_which_are_required_and_no_others(tmp_path):
    (tmp_path / "list.csv").write_text(HELIOS)
    required = "required: job_id, submit_time_s, workload, n_gpus, n_cpus, plan, steps; such"
    with pytest.raises(TraceError, match=required):
        read_jobs(tmp_path / "list.csv")


def test_columns_of_a_table_of_requests_that_have_no_effect_are_reported(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(
        ",job_id,submit_time_s,n_gpus,duration_s,workload,priority,note\n0,a,0,4,900,llama7,5,\n1,b,60,2,600,t5,1,\n"
    )
    told = "ignored: columns that have no effect: 'workload', 'priority' (whole file)"
    assert told in read_requests(path).report.text
    table = pd.DataFrame({"job_id": ["a"], "submit_time_s": 0.0, "n_gpus": 4, "duration_s": 90.0, "steps": 8})
    assert "columns that have no effect: 'steps'" in request_trace(table).report.text
    assert request_trace(table.drop(columns="steps")).report.findings == ()


def test_requests_that_do_not_say_whether_they_are_guaranteed_are_reported(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("job_id,submit_time_s,n_gpus,duration_s,is_guaranteed\na,0,1,900,true\nb,60,2,600,\n")
    trace = read_requests(path)
    assert trace.table["is_guaranteed"].tolist() == [True, False]
    assert "does not say whether it is guaranteed; it is not (row 2)" in trace.report.text


# --- the spot trace and the lists of other schedulers ---------------------------------------------


def test_spot_jobs_hold_what_their_workers_ask_for_and_high_priority_is_guaranteed(tmp_path):
    (tmp_path / "jobs.csv").write_text(SPOT)
    trace = read_spot_jobs(tmp_path / "jobs.csv")
    assert trace.table["n_gpus"].tolist() == [4, 16]
    assert trace.table["n_cpus"].tolist() == [32, 32]
    assert trace.table["tenant"].tolist() == ["12", "13"]
    assert trace.table["gpu"].tolist() == ["A10", "H800"]
    assert trace.table["is_guaranteed"].tolist() == [True, False]
    assert "asks for a type of GPU; it runs on those of the cluster (rows 1, 2)" in trace.report.text
    (tmp_path / "jobs.csv").write_text(SPOT.replace("Spot", "Batch"))
    with pytest.raises(TraceError, match="row 2, column 'job_type': found 'Batch'; expected HP, Spot"):
        read_spot_jobs(tmp_path / "jobs.csv")


def test_spot_nodes_are_a_node_list_without_memory(tmp_path):
    path = tmp_path / "nodes.csv"
    rows = "node_name,gpu_model,gpu_capacity_num,cpu_num\n0,A10,1,96\n1,H800,8,192\n1,H800,8,192\n2,,0,64\n"
    path.write_text(rows)
    table, report = read_spot_nodes(path)
    assert table.columns.tolist() == NODE_LIST.names
    assert table["n_gpus"].tolist() == [1, 8, 0]
    assert table["gpu"].tolist() == ["A10", "H800", ""]
    assert table["memory_bytes"].isna().all()
    assert "node occurs again with the same resources (row 3)" in report.text
    path.write_text(rows + "1,H800,4,192\n")
    with pytest.raises(TraceError, match="row 5, column 'node_name': found '1'; expected one row per node"):
        read_spot_nodes(path)
    path.write_bytes(gzip.compress(b"sn;cpu_milli;memory_mib;gpu;model\nn;32000;1024;2;T4\n"))
    assert read_openb_nodes(path)[0]["n_gpus"].tolist() == [2]


def test_lists_of_tiresias_and_pollux_are_read(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,4,5,900,alexnet,300,5\n"
    )
    trace = read_tiresias_jobs(path)
    assert trace.table[["n_gpus", "duration_s", "model"]].to_numpy().tolist() == [[4, 300.0, "alexnet"]]
    assert trace.origin_s == 5.0
    assert "names what it trains" in trace.report.text
    path.write_text(path.read_text().replace(",", " "))
    assert read_tiresias_jobs(path).table.equals(trace.table)
    path.write_text("name,time,application,num_replicas,batch_size\nncf-1,40,ncf,2,512\n")
    with pytest.raises(TraceError, match=r"lacks column\(s\) duration; .*add a column duration, in seconds"):
        read_pollux_jobs(path)
    path.write_text("name,time,application,num_replicas,batch_size,duration\nncf-1,40,ncf,2,512,90\n")
    assert read_pollux_jobs(path).table[["n_gpus", "duration_s"]].to_numpy().tolist() == [[2.0, 90.0]]


GAVEL_ROWS = {
    "six cells": "LM\tcd l && run\t--steps\t600\t30\t2",
    "seven cells": "LM\tcd l && run\t--steps\t1\t600\t30.0\t2",
    "nine cells": "LM\tcd l && run\t--steps\t1\t600\t2\t1\t-1.0\t30.0",
    "nine cells with a directory": "LM\trun --batch_size 5\t/l\t--steps\t1\t600\t2\t-1.0\t30.0",
    "ten cells": "LM\trun --batch_size 5\t/l\t--steps\t1\t600\t2\t1\t-1.0\t30.0",
}


@pytest.mark.parametrize("row", GAVEL_ROWS.values(), ids=GAVEL_ROWS)
def test_traces_of_gavel_are_read_with_their_throughputs(row, tmp_path):
    (tmp_path / "jobs.trace").write_text(row + "\n" + row.replace("600", "1200").replace("30", "90") + "\n")
    table = {"v100": {"('LM', 2)": {"null": 4.0, "('LM', 1)": [1.0, 1.0]}, "('LM', 1)": {"null": 2.5}}}
    (tmp_path / "simulation_throughputs.json").write_text(json.dumps(table))
    trace = read_trace(tmp_path / "jobs.trace", "gavel")
    assert trace.table["job_id"].tolist() == ["0", "1"]
    assert trace.table["submit_time_s"].tolist() == [0.0, 60.0]
    assert trace.table["n_gpus"].tolist() == [2, 2]
    assert trace.table["duration_s"].tolist() == [150.0, 300.0]


def test_what_a_trace_of_gavel_lacks_is_one_line(tmp_path):
    path, rates = tmp_path / "jobs.trace", tmp_path / "rates.json"
    path.write_text(GAVEL_ROWS["ten cells"] + "\n")
    with pytest.raises(TraceError, match="state steps, not durations; expected the table of throughputs"):
        read_trace(path, "gavel")
    with pytest.raises(
        TraceError, match="row 1, column 'job_type': found 'LM'; expected a type with a through"
    ):
        read_gavel_jobs(path, {("LM", 1): 3.0})
    for text in ("{}", "[]", '{"v100": {"LM": {"null": 1}}}', '{"v100": {"(\'LM\', 2)": 3}}'):
        rates.write_text(text)
        with pytest.raises(TraceError, match="no throughputs of Gavel for v100"):
            read_gavel_throughputs(rates)
    path.write_text(HELIOS)
    with pytest.raises(TraceError, match="no trace of Gavel: 1 cells in the first line"):
        read_gavel_jobs(path, {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--format", "spot"), SPOT.encode()),
        (("--format", "helios"), gzip.compress(HELIOS.encode())),
        (("--format", "requests"), b"job_id;submit_time_s;n_gpus;duration_s\na;0;1;900\nb;60;2;600\n"),
    ],
    ids=["spot", "packed", "requests"],
)
def test_lists_of_requests_are_simulated_from_the_command_line(options, text, tmp_path):
    path = Path(tmp_path, "list")
    path.write_bytes(text)
    done = CliRunner().invoke(
        main, ["simulate", "--policy", "fifo", "--workload", str(path), *options, "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert "GPU-hours read" in done.output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[{"status": "Pass", "vc": "v"}]\n', "philly"),
        ("j1,i1,u1,Terminated,494400.0,498000.0\n", "pai"),
        ("ResNet-18 (batch size 32)\tpython3 main.py\t--num_steps\t1\t1000\t1\t-1\t0\n", "gavel"),
    ],
)
def test_lists_without_a_header_name_the_format_to_choose(tmp_path, text, named):
    path = tmp_path / "list"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"\(--format {named}\)"):
        read_jobs(path)


def test_cancelled_jobs_are_kept_on_request(tmp_path):
    path = tmp_path / "acme.csv"
    path.write_text(
        "job_id,gpu_num,state,submit_time,start_time,end_time\n"
        "a,8,COMPLETED,2023-03-01 08:00:00,2023-03-01 08:00:30,2023-03-01 09:00:30\n"
        "b,8,CANCELLED,2023-03-01 08:00:00,2023-03-01 08:00:30,2023-03-01 10:00:30\n"
    )
    for keep, kept in ((False, ["a"]), (True, ["a", "b"])):
        given = scenario(path, file_format="helios", keep_cancelled=keep)
        assert [job.job_id for job in given.jobs] == kept
    with pytest.raises(InputError, match="does not say which jobs were cancelled; leave keep_cancelled out"):
        scenario(path, file_format="spot", keep_cancelled=True)
    with pytest.raises(InputError, match="naive does not say which jobs were cancelled"):
        scenario("naive", keep_cancelled=True)
