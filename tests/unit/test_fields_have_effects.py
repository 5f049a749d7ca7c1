"""Every field of jobs, models, software, clusters and every column of a job list: what changes with it.

A field or a column without an entry here fails, so that nothing is accepted and then ignored.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.emulator import (
    emulate,
    explain,
    load_calibration,
    observe,
    read_point,
    trace_points,
    write_trace,
)
from makespan.errors import InputError, MakespanError
from makespan.hardware import ClusterSpec, Gpu, Network, NodeSpec, cluster, gpu, homogeneous, node
from makespan.planning import Pricer, Training, describe, parse_layout, read_model, software
from makespan.studies import run, scenario
from makespan.tables import JOBS, write_csv
from makespan.traces import (
    jobs_table,
    read_easyscale_jobs,
    read_helios_jobs,
    read_jobs,
    read_morphling_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
)
from makespan.workloads import BlockSpec, JobSpec, ModelSpec, Stack, Workload, stack, workload

WHERE = cluster("a800-64")
POINTS = (
    ("ga", "44"),
    ("zero-dp", "44"),
    ("zero-offload", "1"),
    ("1-4-2", "8"),
    ("2-2-4", "88"),
    ("ga", "1"),
)


def names(*records: type) -> list[tuple[str, str]]:
    return [(record.__name__, field.name) for record in records for field in fields(record) if field.init]


# --- models, software, devices -----------------------------------------------------------------------


def written(spec: Workload, where: ClusterSpec, folder: Path) -> str:
    """Return all that the emulator writes of a workload on a cluster: times, memory, labels, sources."""
    points = [read_point(spec, plan, place, 8) for plan, place in POINTS]
    paths = write_trace(folder, spec, points, where, load_calibration(), seed=1, noise=1.0)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return "\n".join(
        [*texts, str(len(trace_points(spec, where))), f"{where.gpu_types} {where.max_cpu_threads(2)}"]
    )


def on_nodes(changed: NodeSpec) -> ClusterSpec:
    return homogeneous(changed, 8, WHERE.network, WHERE.name)


def with_model(changed: ModelSpec, spec: Workload) -> Workload:
    return replace(spec, model=changed)


def with_stack(changed: Stack, spec: Workload) -> Workload:
    return replace(spec, data_parallel_stack=changed, model_parallel_stack=changed)


GPT, VIT = workload("gpt2"), workload("vit")
BLOCK = GPT.model.blocks[0]
T5 = workload("t5")
DECODER_FIRST = replace(T5, model=replace(T5.model, blocks=T5.model.blocks[::-1]))

# What to put in place of a field, and the workload in which that shows; a text where it shows elsewhere.
CHANGES: dict[tuple[str, str], tuple[Any, Workload | str]] = {
    ("BlockSpec", "n_layers"): (24, GPT),
    ("BlockSpec", "kind"): ("enc", DECODER_FIRST),
    ("BlockSpec", "seq"): (512, GPT),
    ("BlockSpec", "hidden"): (800, GPT),
    ("BlockSpec", "heads"): (50, GPT),
    ("BlockSpec", "kv_heads"): (5, GPT),
    ("BlockSpec", "ffn"): (3200, GPT),
    ("BlockSpec", "gated"): (True, GPT),
    ("BlockSpec", "kv_channels"): (32, GPT),
    ("ModelSpec", "key"): ("other", GPT),
    ("ModelSpec", "title"): ("Other", "list"),
    ("ModelSpec", "family"): ("llama", GPT),
    ("ModelSpec", "blocks"): ((BLOCK, BLOCK), GPT),
    ("ModelSpec", "vocab"): (60_000, GPT),
    ("ModelSpec", "tied_head"): (False, GPT),
    ("ModelSpec", "max_positions"): (50_000, GPT),
    ("ModelSpec", "parameters"): (1_600_000_000, GPT),
    ("ModelSpec", "source"): ("elsewhere", GPT),
    ("Stack", "name"): ("other", GPT),
    ("Stack", "version"): ("1999", GPT),
    ("Stack", "gradient_bytes"): (2, GPT),
    ("Stack", "overlaps_gradients"): (True, GPT),
    ("Stack", "partitioned_bytes"): (4, GPT),
    ("Stack", "fused_optimizer"): (True, GPT),
    ("Stack", "host_optimizer"): ("slow", GPT),
    ("Stack", "fused_attention"): (True, GPT),
    ("Stack", "sequence_parallel"): (True, GPT),
    ("Stack", "full_checkpointing"): (True, GPT),
    ("Stack", "hierarchical_collectives"): (True, GPT),
    ("Stack", "phase_style"): ("3d", GPT),
    ("Stack", "calibrated"): (False, GPT),
    ("Stack", "source"): ("elsewhere", GPT),
    ("Stack", "variant_of"): ("megatron", "software"),
    ("ClusterSpec", "name"): ("other", GPT),  # noise is drawn by it
    ("ClusterSpec", "nodes"): ((node("h200"),) * 8, GPT),
    ("ClusterSpec", "network"): (cluster("p3dn-64").network, GPT),
    ("ClusterSpec", "usd_per_gpu_hour"): (2.0, "predictions"),
    ("ClusterSpec", "part_of"): (16, "sizes"),
    ("NodeSpec", "name"): ("other", GPT),
    ("NodeSpec", "gpu"): (gpu("h200-141"), GPT),
    ("NodeSpec", "n_gpus"): (4, GPT),
    ("NodeSpec", "intra_bandwidth_bytes_per_s"): (50e9, GPT),
    ("NodeSpec", "intra_latency_s"): (1e-3, GPT),
    ("NodeSpec", "intra_kind"): ("pair", GPT),
    ("NodeSpec", "pcie_bandwidth_bytes_per_s"): (8e9, GPT),
    ("NodeSpec", "n_nics"): (1, "cards"),
    ("NodeSpec", "nic_bandwidth_bytes_per_s"): (5e9, GPT),
    ("NodeSpec", "gpus_per_nic"): (8, GPT),
    ("NodeSpec", "cpu_threads"): (48, GPT),
    ("NodeSpec", "host_memory_bytes"): (1e9, GPT),
    ("NodeSpec", "host_bandwidth_bytes_per_s"): (5e9, GPT),
    ("NodeSpec", "adam_rate_per_thread"): (1e7, GPT),
    ("NodeSpec", "adam_rate_cap"): (1e7, GPT),
    ("NodeSpec", "loader_rate_per_thread"): (1.0, VIT),
    ("NodeSpec", "source"): ("elsewhere", GPT),
    ("Gpu", "name"): ("other", GPT),
    ("Gpu", "peak_flop_per_s"): ((("fp16", 100e12),), GPT),
    ("Gpu", "memory_bytes"): (20e9, GPT),
    ("Gpu", "memory_bandwidth_bytes_per_s"): (500e9, GPT),
    ("Gpu", "reserved_bytes"): (3e9, GPT),
    ("Gpu", "launch_gap_s"): (1e-6, VIT),
    ("Gpu", "memory_efficiency"): (0.5, GPT),
    ("Gpu", "source"): ("elsewhere", GPT),
    ("Gpu", "kind"): ("h100-80", "predictions"),
    ("Gpu", "shares"): (gpu("h100-80").shares, "predictions"),
    ("Network", "latency_s"): (1e-3, GPT),
    ("Network", "oversubscription"): (4.0, GPT),
    ("Network", "rdma"): (False, GPT),
    ("Network", "tcp_factor"): (0.1, GPT),
    ("Workload", "key"): ("other", GPT),  # noise is drawn by it
    ("Workload", "aliases"): (("gpt2-xl",), "list"),
    ("Workload", "model"): (workload("bert").model, GPT),
    ("Workload", "global_batch_size"): (32, GPT),
    ("Workload", "precision"): ("fp32", GPT),
    ("Workload", "families"): (("DP",), GPT),
    ("Workload", "data_parallel_stack"): (stack("modern"), GPT),
    ("Workload", "model_parallel_stack"): (stack("modern"), GPT),
    ("Workload", "max_microbatches"): (4, GPT),
    ("Workload", "source"): ("elsewhere", GPT),
    ("Workload", "model_parallel_seq"): ((256,), GPT),
    ("Workload", "trace_cpu_threads"): ((2, 4), GPT),
    ("Workload", "used_for_calibration"): (False, "calibration"),
}


def changed(record: str, field: str, value: Any, spec: Workload) -> tuple[Workload, ClusterSpec]:
    """Return workload and cluster after one field of one of their parts has another value."""
    new = {field: value}
    model, block, software = spec.model, spec.model.blocks[0], spec.data_parallel_stack
    parts: dict[str, Callable[[], tuple[Workload, ClusterSpec]]] = {
        "BlockSpec": lambda: (
            with_model(derived(model, blocks=(replace(block, **new), *model.blocks[1:])), spec),
            WHERE,
        ),
        "ModelSpec": lambda: (with_model(derived(model, **new), spec), WHERE),
        "Stack": lambda: (with_stack(replace(software, **new), spec), WHERE),
        "Workload": lambda: (replace(spec, **new), WHERE),
        "ClusterSpec": lambda: (spec, replace(WHERE, **new)),
        "NodeSpec": lambda: (spec, on_nodes(replace(WHERE.node, **new))),
        "Gpu": lambda: (spec, on_nodes(replace(WHERE.node, gpu=replace(WHERE.node.gpu, **new)))),
        "Network": lambda: (spec, replace(WHERE, network=replace(WHERE.network, **new))),
    }
    return parts[record]()


def derived(model: ModelSpec, **new: Any) -> ModelSpec:
    """Return a model with other fields, whose parameters follow from its layers unless they are given."""
    return replace(model, **{"parameters": 0, **new})


RECORDS = (BlockSpec, ModelSpec, Stack, Workload, ClusterSpec, NodeSpec, Gpu, Network)


@pytest.mark.parametrize(("record", "field"), names(*RECORDS))
def test_every_field_of_what_is_emulated_has_an_effect_or_is_rejected(record, field, tmp_path):
    value, shown = CHANGES[record, field]
    if isinstance(shown, str):
        SHOWN[shown](field, value)
        return
    before = with_model(derived(shown.model), shown) if record in ("BlockSpec", "ModelSpec") else shown
    there = WHERE
    if field == "tcp_factor":  # which counts where there is no RDMA
        there = replace(WHERE, network=replace(WHERE.network, rdma=False))
        after, other = shown, replace(there, network=replace(there.network, tcp_factor=value))
    else:
        after, other = changed(record, field, value, shown)
    usual, new = written(before, there, tmp_path / "a"), written(after, other, tmp_path / "b")
    assert usual != new


def rejects_too_few_cards(field: str, value: Any) -> None:
    with pytest.raises(InputError, match="1 network cards for 2 device"):
        replace(WHERE.node, **{field: value})


def is_listed(field: str, value: Any) -> None:
    """Check that the list of workloads shows a title or an alias."""
    other = (
        replace(GPT, aliases=value)
        if field == "aliases"
        else with_model(derived(GPT.model, title=value), GPT)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("makespan.workloads.workload", lambda _: other)
        rows = json.loads(CliRunner().invoke(main, ["workloads", "--json"]).output)
    assert rows[0]["title"] == other.model.title and rows[0]["aliases"] == " ".join(other.aliases)


def names_software(field: str, value: Any) -> None:
    software = GPT.data_parallel_stack
    assert (software.software, replace(software, **{field: value}).software) == (software.name, value)


def is_left_out_of_calibrations(field: str, value: Any) -> None:
    tables = {"gpt2": emulate(GPT, trace_points(GPT, cluster("a800-8")), cluster("a800-8"))}
    assert set(observe(tables, cluster("a800-8")).model) == {GPT.model.key}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("makespan.emulator.validation.load_workload", lambda _: replace(GPT, **{field: value}))
        with pytest.raises(MakespanError):
            observe(tables, cluster("a800-8"))


def is_predicted_otherwise(field: str, value: Any) -> None:
    _, other = changed("ClusterSpec" if field == "usd_per_gpu_hour" else "Gpu", field, value, GPT)
    training, layout = Training(read_model("llama3-8b"), 4096, 64), parse_layout("fsdp mb1", 64)
    usual, new = (
        describe(Pricer(training, where, software("megatron-bridge")).price(layout))
        for where in (WHERE, other)
    )
    assert usual != new


def is_the_size_of_more_nodes(field: str, value: Any) -> None:
    assert WHERE.with_gpus(64).gpus_per_node == 8
    assert replace(WHERE, **{field: value}).with_gpus(64).gpus_per_node == value


SHOWN: dict[str, Callable[[str, Any], None]] = {
    "cards": rejects_too_few_cards,
    "list": is_listed,
    "software": names_software,
    "calibration": is_left_out_of_calibrations,
    "predictions": is_predicted_otherwise,
    "sizes": is_the_size_of_more_nodes,
}


def test_all_entries_are_of_fields_that_there_are():
    assert set(CHANGES) == set(names(*RECORDS))


def test_software_without_measured_rows_is_labelled():
    spec = with_stack(stack("modern"), GPT)
    found = explain(spec, read_point(spec, "ga", "8", 8), WHERE)
    assert found.warnings == ("no measured row stands behind stack modern@2025",)
    assert explain(GPT, read_point(GPT, "ga", "8", 8), WHERE).warnings == ()


# --- jobs --------------------------------------------------------------------------------------------

FIRST = JobSpec("a", 0.0, "llama7", 8, 16, "zero-offload", 20, duration_s=3600.0)
OTHERS = (JobSpec("z", 0.0, "roberta", 8, 64, "zero-dp", 400, duration_s=900.0),)
JOB_CHANGES: dict[str, tuple[Any, str]] = {
    "job_id": ("b", "job_id"),
    "submit_time_s": (120.0, "first_start_s"),
    "workload": ("gpt2", "reference_iter_time_s"),
    "n_gpus": (4, "attained_service_gpu_s"),
    "n_cpus": (64, "reference_iter_time_s"),
    "plan": ("zero-offload+gc", "reference_plan"),
    "steps": (40, "finish_time_s"),
    "is_guaranteed": (True, "is_guaranteed"),
    "tenant": ("vision", "tenant"),
    "duration_s": (7200.0, "steps"),
}


@pytest.mark.parametrize("field", [field.name for field in fields(JobSpec)])
def test_every_field_of_a_job_has_an_effect(field):
    value, column = JOB_CHANGES[field]
    keep = "durations" if field == "duration_s" else "work"
    rows = [
        run(scenario([job, *OTHERS], keep=keep), "fifo").result.outcomes.query("job_id != 'z'").iloc[0]
        for job in (FIRST, replace(FIRST, **{field: value}))
    ]
    assert rows[0][column] != rows[1][column]


def test_a_guaranteed_job_gets_devices_of_its_own_and_is_done_sooner():
    running = [replace(OTHERS[0], job_id=f"w{n}", n_gpus=8, steps=20_000) for n in range(3)]
    last = replace(OTHERS[0], job_id="last", submit_time_s=300.0)
    ends = []
    for sure in (False, True):
        jobs = [*running, replace(last, is_guaranteed=sure)]
        outcomes = run(scenario(jobs, n_nodes=2), "antman").result.outcomes.set_index("job_id")
        ends.append(outcomes.loc["last", "finish_time_s"])
    assert ends[1] < ends[0]


# --- columns of job lists ------------------------------------------------------------------------------

CANONICAL = "job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,is_guaranteed,tenant,duration_s"
MORPHLING = "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla"
HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time"
)
EASYSCALE = (
    "name,time,application,max_parallelism,batch_size,epochs,enable_heterogeneous_deterministic,preferred_gpu"
)
DAY = "2020-06-09"
# Reader, header, a row, and another cell for every column that the reader knows.
LISTS: dict[str, tuple[Callable[[Path], Any], str, str, dict[str, str]]] = {
    "canonical": (
        read_jobs,
        CANONICAL,
        "a,5,roberta,2,16,zero-dp,100,true,vision,60",
        {
            "job_id": "b", "submit_time_s": "7", "workload": "bert", "n_gpus": "4", "n_cpus": "8",
            "plan": "ga", "steps": "7", "is_guaranteed": "0", "tenant": "text", "duration_s": "9",
        },
    ),
    "morphling": (
        read_morphling_jobs,
        MORPHLING,
        "a,5,60,roberta,2,16,0,zero-dp,100,1",
        {
            "name": "b", "submission_time": "7", "duration": "9", "application": "bert", "num_gpus": "4",
            "num_cpus": "8", "bandwidth": "1.25", "exec_plan": "ga", "steps": "7", "is_sla": "0",
        },
    ),
    "helios": (
        read_helios_jobs,
        HELIOS,
        f"1,u1,vc1,2,8,1,COMPLETED,{DAY} 00:00:00,{DAY} 00:01:00,{DAY} 00:03:00,120",
        {
            "job_id": "2", "vc": "vc2", "gpu_num": "4", "cpu_num": "9", "state": "FAILED",
            "submit_time": f"{DAY} 00:02:00", "start_time": f"{DAY} 00:00:30", "end_time": f"{DAY} 00:09:00",
            "duration": "999",
        },
    ),
    "openb": (
        read_openb_pods,
        PODS,
        "p,12500,1,1,1000,,Burstable,Succeeded,100,400,150",
        {
            "name": "q", "cpu_milli": "900", "num_gpu": "2", "gpu_milli": "500", "qos": "LS",
            "pod_phase": "Failed", "creation_time": "160", "deletion_time": "500", "scheduled_time": "200",
        },
    ),
    "easyscale": (
        read_easyscale_jobs,
        EASYSCALE,
        "bert-0,115,bert,16,8,4,1,v100",
        {
            "name": "x", "time": "7", "application": "vit", "max_parallelism": "8", "batch_size": "4",
            "epochs": "5", "enable_heterogeneous_deterministic": "0", "preferred_gpu": "t4",
        },
    ),
}  # fmt: skip
# Columns that no reader of the form asks for: a file without them is read, and they change nothing.
NOT_READ = {
    "helios": {"user", "node_num"},
    "openb": {"memory_mib", "gpu_spec"},
}


def read_text(form: str, folder: Path, header: str, row: str) -> str:
    """Return all that a reader says of one row: table or jobs, report, and the clock of the trace."""
    path = folder / "list.csv"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    found = LISTS[form][0](path)
    if isinstance(found, tuple):
        return f"{found[0].to_csv()} {found[1].text}"
    told = found.jobs if hasattr(found, "jobs") else f"{found.table.to_csv()} {found.origin_s}"
    return f"{told} {found.report.text}"


@pytest.mark.parametrize(
    ("form", "column"), [(form, column) for form in LISTS for column in LISTS[form][1].split(",")]
)
def test_every_column_of_a_job_list_has_an_effect_or_is_not_asked_for(form, column, tmp_path):
    _, header, row, others = LISTS[form]
    columns, cells = header.split(","), row.split(",")
    index = columns.index(column)
    usual = read_text(form, tmp_path, header, row)
    if column in NOT_READ.get(form, ()):
        kept = [i for i in range(len(columns)) if i != index]
        same = read_text(form, tmp_path, ",".join(columns[i] for i in kept), ",".join(cells[i] for i in kept))
        assert same == usual
        return
    cells[index] = others[column]
    assert read_text(form, tmp_path, header, ",".join(cells)) != usual


def test_further_columns_of_a_job_list_are_reported_and_those_that_say_nothing_are_not(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(jobs_table([OTHERS[0]]), path, JOBS)
    text = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{text[0]},priority,deadline_s,spare\n{text[1]},high,900,0\n", encoding="utf-8")
    report = read_jobs(path).report.text
    assert "ignored: columns that have no effect: 'priority', 'deadline_s' (whole file)" in report
    assert "spare" not in report
    assert "ignored" in scenario(path).report


def test_what_an_elastic_list_trains_is_reported_where_models_are_drawn(tmp_path):
    path = tmp_path / "elastic.csv"
    path.write_text(f"{EASYSCALE}\n{LISTS['easyscale'][2]}\n", encoding="utf-8")
    found = scenario(path, file_format="easyscale", epoch_time_s=60.0)
    assert "ignored: what a row trains, its batch size and where it may run" in found.report


def test_cpu_threads_of_a_foreign_trace_that_the_tables_lack_are_reported(tmp_path):
    path = tmp_path / "helios.csv"
    path.write_text(f"{HELIOS}\n{LISTS['helios'][2].replace(',2,8,', ',2,4,')}\n", encoding="utf-8")
    assert (
        "they request fewer CPU threads per GPU than the tables have"
        in scenario(path, file_format="helios").report
    )


ATTEMPT = {
    "start_time": "2017-10-07 01:10:00",
    "end_time": "2017-10-07 01:20:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
}
PHILLY = {
    "status": "Pass",
    "vc": "v1",
    "jobid": "j1",
    "submitted_time": "2017-10-07 01:00:00",
    "attempts": [ATTEMPT],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", "Failed"),
        ("vc", "v2"),
        ("jobid", "j2"),
        ("submitted_time", "2017-10-07 00:00:00"),
        ("attempts", [ATTEMPT | {"end_time": "2017-10-07 02:00:00"}]),
        ("attempts", [ATTEMPT | {"start_time": "2017-10-07 01:00:00"}]),
        ("attempts", [ATTEMPT | {"detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]),
    ],
)
def test_every_key_of_a_nested_job_has_an_effect(key, value, tmp_path):
    tables = []
    for entry in (PHILLY, PHILLY | {key: value}):
        (tmp_path / "log.json").write_text(json.dumps([entry]), encoding="utf-8")
        found = read_philly_jobs(tmp_path / "log.json")
        tables.append(f"{found.table.to_csv()} {found.origin_s}")
    assert tables[0] != tables[1]


PAI = {
    "jobs": ("j1,i1,u1,Terminated,100,900", {0: "j2", 2: "u2", 3: "Failed", 4: "50", 5: "1200"}),
    "tasks": (
        "j1,worker,2,Terminated,120,880,400,29,100,T4",
        {0: "j2", 2: "4", 4: "150", 5: "990", 6: "900", 8: "300"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "column"), [(name, column) for name, (_, others) in PAI.items() for column in others]
)
def test_columns_of_the_tables_of_a_job_with_parts_have_an_effect(table, column, tmp_path):
    def read(changed: str | None) -> str:
        for name, (row, _) in PAI.items():
            cells = row.split(",")
            if name == table and changed is not None:
                cells[column] = changed
            (tmp_path / name).write_text(",".join(cells) + "\n", encoding="utf-8")
        try:
            found = read_pai_jobs(tmp_path / "jobs", tmp_path / "tasks")
        except InputError as error:
            return str(error)
        return f"{found.table.to_csv()} {found.origin_s} {found.report.text}"

    usual, other = read(None), read(PAI[table][1][column])
    if (table, column) in (("jobs", 5),):  # the job row counts where its parts lack their end
        (tmp_path / "tasks").write_text("j1,worker,2,Terminated,120,,400,29,100,T4\n", encoding="utf-8")
        spans = []
        for end in ("900", "1200"):
            (tmp_path / "jobs").write_text(f"j1,i1,u1,Terminated,100,{end}\n", encoding="utf-8")
            spans.append(read_pai_jobs(tmp_path / "jobs", tmp_path / "tasks").table["duration_s"].iloc[0])
        assert spans[0] != spans[1]
        return
    assert usual != other
