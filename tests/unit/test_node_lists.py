"""Lists of nodes become clusters, and every policy runs on mixed ones."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import makespan
from makespan.cli import main
from makespan.errors import InputError, MissingDataError, TraceError
from makespan.hardware import ClusterSpec, cluster
from makespan.policies import policy_names
from makespan.studies import read_cluster
from makespan.tables import THROUGHPUT, write_csv
from makespan.traces import read_nodes
from makespan.workloads import JobSpec

MIXED = "v100-p100-t4-64"
OWN = "node_id,n_gpus,n_cpus,memory_bytes,gpu\n"
LISTS = {
    "own": (
        OWN + "n1,8,64,5e11,V100-32\nn2,4,0,0,t4\nn3,0,96,1e12,\n",
        [("v100-32", 8, 64), ("t4-16", 4, 48)],
    ),
    "openb": (
        "sn,cpu_milli,memory_mib,gpu,model\nb-1,94000,262144,2,T4\nb-2,96000,786432,8,V100M32\nb-3,32000,1,0,\n",
        [("t4-16", 2, 94), ("v100-32", 8, 96)],
    ),
    "pai": ("m1,P100,64,512,2\nm2,T4,96,512,2\nm3,CPU,96,512,0\n", [("p100-16", 2, 64), ("t4-16", 2, 96)]),
    "pai with header": ("machine,gpu_type,cap_cpu,cap_mem,cap_gpu\nm1,T4,96,512,2\n", [("t4-16", 2, 96)]),
    "philly": (
        "machineId,number of GPUs,single GPU mem\nm1,8,24GB\nm2,2,24GB\n",
        [("v100-32", 8, 96), ("v100-32", 2, 24)],
    ),
    "spot": (
        "node_name,gpu_model,gpu_capacity_num,cpu_num\ns1,T4,4,48\ns2,T4,2,0\n",
        [("t4-16", 4, 48), ("t4-16", 2, 24)],
    ),
    "helios": (
        "date,vcA,vcB,total\n2020-09-01,8,8,16\n2020-09-02,16,12,28\n",
        [("v100-32", 8, 96), ("v100-32", 8, 96), ("v100-32", 8, 96), ("v100-32", 4, 48)],
    ),
}
PATIENT = {
    *("antman", "easyscale-homo", "fifo-serial", "sjf", "srtf", "synergy", "tiresias"),
    *("morphling-lookahead-e", "morphling-lookahead-n"),
}
"""Policies whose jobs here rather wait than run several times as long on a slower type of GPU."""
NAMED = {"philly": {"24GB": "v100-32"}, "helios": {"": "v100-32"}}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def written(text: str, folder: Path, name: str = "nodes.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", LISTS)
def test_a_list_of_every_form_becomes_a_cluster(form: str, tmp_path: Path) -> None:
    text, expected = LISTS[form]
    found, report = read_cluster(written(text, tmp_path), NAMED.get(form))
    assert [(node.gpu_type, node.n_gpus, node.cpu_threads) for node in found.nodes] == expected
    assert found.name == "nodes" and report.n_kept == len(expected)
    assert ("node without GPU" in report.text) == (form in ("own", "openb", "pai"))


def test_a_list_of_nodes_without_cpus_and_memory_takes_those_of_the_catalogue(tmp_path: Path) -> None:
    short, long = "node_id,n_gpus,gpu\nn1,8,a800-80\n", OWN + "n1,8,96,1600e9,a800-80\n"
    found, expected = (read_cluster(written(text, tmp_path))[0] for text in (short, long))
    assert found.nodes == expected.nodes


def test_a_list_of_nodes_like_the_catalogue_gives_the_same_schedules(tmp_path: Path) -> None:
    rows = "".join(f"n{number},8,96,1600e9,a800-80\n" for number in range(8))
    path = written(OWN + rows, tmp_path)
    listed, named = makespan.scenario("naive", cluster_name=path), makespan.scenario("naive")
    assert listed.jobs == named.jobs and listed.cluster.nodes == named.cluster.nodes
    assert listed.predictions == named.predictions == "sampled"
    for policy in ("sia", "morphling-work"):
        one, other = (makespan.simulate(given, policy).result.events for given in (listed, named))
        pd.testing.assert_frame_equal(one, other)


def test_the_order_of_nodes_changes_no_times(tmp_path: Path) -> None:
    base = cluster(MIXED)
    turned = replace(base, nodes=base.nodes[::-1])
    first, second = (makespan.scenario("naive", cluster_name=given) for given in (base, turned))
    assert first.jobs == second.jobs
    for key in first.catalogue.workloads:
        assert repr(first.catalogue.all(key)) == repr(second.catalogue.all(key))


@pytest.fixture(scope="module")
def mixed() -> makespan.Scenario:
    return makespan.scenario("mt", n_jobs=40, load=500, cluster_name=MIXED)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_runs_on_the_mixed_cluster_of_the_catalogue(mixed: makespan.Scenario, name: str) -> None:
    done = makespan.simulate(mixed, name)
    assert done.metrics.n_jobs == 40 and done.violations == ()
    types = [node.gpu_type for node in mixed.cluster.nodes]
    events = done.result.events
    for nodes in events["nodes"]:
        assert len({types[int(share.split(":")[0])] for share in nodes.split()}) <= 1
    used = {types[int(share.split(":")[0])] for nodes in events["nodes"] for share in nodes.split()}
    assert name in PATIENT or len(used) > 1


def test_a_job_takes_as_long_as_the_type_of_gpu_that_it_holds_needs(mixed: makespan.Scenario) -> None:
    times = {
        gpu_type: makespan.emulate("bert", name, noise=1.0).set_index(["exec_plan", "placement"])[
            "iter_time_s"
        ]
        for gpu_type, name in (("v100-32", "p3dn-64"), ("p100-16", "p100-64"), ("t4-16", "t4-64"))
    }
    job = JobSpec("a", 0.0, "bert", 4, 16, "ga", 100)
    given = makespan.scenario([job], cluster_name=MIXED)
    for gpu_type, table in times.items():
        found = [
            item.iter_time_s
            for item in given.catalogue.holding("bert", ((gpu_type, 4),))
            if item.plan == "ga" and item.placement.text == "4"
        ]
        assert found == [table["ga", "4"]]
    assert given.catalogue.requested(job).gpu_types == ("v100-32",)


def test_the_command_line_takes_lists_of_nodes(tmp_path: Path) -> None:
    path = written(LISTS["openb"][0], tmp_path)
    done = run("simulate", "--cluster", str(path), "--workload", "naive", "--policy", "fifo", "--quiet")
    assert done.exit_code == 0, done.output
    assert "10 jobs on 2 nodes with 2 t4-16, 8 v100-32" in done.output
    assert "dropped 1 row: node without GPU" in done.output
    philly = written(LISTS["philly"][0], tmp_path, "machines")
    options = ("--cluster", str(philly), "--gpu-as", "24GB=v100-32", "--jobs", "3", "--quiet")
    assert run("simulate", *options).exit_code == 0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (LISTS["philly"][0], (), "found '24GB'; expected a800-80"),
        (LISTS["philly"][0], ("--gpu-as", "24GB=h100"), "found '24GB'; expected a800-80"),
        (LISTS["openb"][0], ("--gpu-as", "G2=t4-16"), "has no GPU of type 'G2', named in gpus (--gpu-as)"),
        (LISTS["openb"][0], ("--gpu-as", "G2"), "'G2'; expected a type of the list and a device"),
        (LISTS["openb"][0], ("--nodes", "3"), "has several kinds of node"),
        (LISTS["openb"][0], ("--predictions", "sampled"), "no constants of the performance model"),
        (
            LISTS["openb"][0],
            ("--source", "measured", "--measured-dir", "."),
            "no tables for the types of GPU",
        ),
        ("a,b\n1,2\n", (), "are of no known list of nodes; expected own: node_id"),
        (
            OWN + "n,2,1,1,t4\nn,4,1,1,t4\n",
            (),
            "row 2, column 'node_id': found 'n'; expected one row per node",
        ),
        (OWN + "n,2.5,1,1,t4\n", (), "row 1, column 'n_gpus': found '2.5'"),
        (OWN + "n,0,1,1,t4\n", (), "0 nodes with up to 0 GPUs; expected from 1"),
        ("", (), "the file is empty"),
    ],
)
def test_mistakes_in_lists_of_nodes_give_one_message(
    text: str, options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(text, tmp_path)
    result = run("simulate", "--cluster", "nodes.csv", *options)
    assert result.exit_code == 2, result.output
    assert message in result.output and "Traceback" not in result.output


def test_a_missing_list_and_a_misspelt_name_are_told_apart(tmp_path: Path) -> None:
    assert "no such file" in run("simulate", "--cluster", str(tmp_path / "gone.csv")).output
    assert "Did you mean 'a800-64'" in run("simulate", "--cluster", "a800-46").output
    with pytest.raises(InputError, match="of the catalogue"):
        makespan.scenario("naive", cluster_name="a800-64", gpus={"T4": "t4-16"})
    with pytest.raises(TraceError, match="no known list of nodes"):
        read_nodes(written("x,y,z\n", tmp_path))
    with pytest.raises(MissingDataError):
        read_cluster(tmp_path / "gone.csv")
    with pytest.raises(TraceError, match="is no regular file"):
        read_cluster("/dev/null")


def test_measured_times_of_a_mixed_cluster_lie_in_a_directory_for_each_type(tmp_path: Path) -> None:
    row = {"workload": "mine", "exec_plan": "ga", "cpu_threads": 4, "global_batch_size": 8, "feasible": True,
           "clean": True, "flag": "", "provenance": "measured", "forward_s": float("nan"),
           "overlap_sync_s": float("nan"), "optimize_s": float("nan")}  # fmt: skip
    for gpu_type, time_s in (("v100-32", 1.0), ("t4-16", 4.0)):
        (tmp_path / gpu_type).mkdir()
        rows = [row | {"placement": place, "iter_time_s": time_s / len(place)} for place in ("1", "2")]
        write_csv(pd.DataFrame(rows), tmp_path / gpu_type / "mine.csv", THROUGHPUT)
    jobs = [JobSpec(f"j{number}", 0.0, "mine", 2, 8, "ga", 100) for number in range(25)]
    given = makespan.scenario(jobs, source="measured", measured_dir=tmp_path, cluster_name=MIXED)
    done = makespan.simulate(given, "fifo")
    starts = done.result.events[done.result.events["kind"] == "started"]
    assert sorted(set(starts["iter_time_s"])) == [1.0, 4.0]
    assert makespan.compare(given, ["gavel", "sia"])["jobs"].tolist() == [25, 25]


@pytest.mark.parametrize("name", [MIXED, "p3dn-64", "h200-64"])
def test_published_times_do_not_pass_for_those_of_other_devices(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"its times are of a800-80, cluster '{name}' has"):
        makespan.scenario("naive", source="published", published_dir=tmp_path, cluster_name=name)


def test_nodes_with_one_name_of_device_and_other_links_are_refused() -> None:
    node = cluster("t4-64").node
    slow = replace(node, nic_bandwidth_bytes_per_s=1e9)
    odd = ClusterSpec("odd", (node, slow), cluster("t4-64").network)
    with pytest.raises(InputError, match="'t4-16' differ in their links"):
        makespan.scenario("naive", cluster_name=odd)


def test_more_nodes_with_other_numbers_of_gpus_have_the_same_times() -> None:
    few, many = (makespan.scenario("naive", gpus_per_node=4, n_nodes=count) for count in (16, 20))
    known = {item.key: item.iter_time_s for key in few.catalogue.workloads for item in few.catalogue.all(key)}
    assert few.jobs == many.jobs and known
    for key in many.catalogue.workloads:
        for item in many.catalogue.all(key):
            assert known.get(item.key, item.iter_time_s) == item.iter_time_s
