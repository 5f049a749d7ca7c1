"""GPUs: how many torch has, which of them processes get, and what is said of too few."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError
from makespan.live.elastic import ElasticRun
from makespan.live.engine import slots_of
from makespan.oobleck.trainer import join_run
from makespan.plans import Placement
from makespan.profiling import (
    allocation_launcher,
    measured_on,
    profile_points,
    profiling_launcher,
    rate_runs,
    rates as _rates,
)
from makespan.runtime import (
    GpuSlots,
    Identity,
    Launch,
    LocalLauncher,
    RunDirectory,
    choose_device,
    describe_machine,
    hold_gpu,
    join,
    launch as _launch,
    local_gpus,
    local_launcher,
    rendezvous as _rendezvous,
)
from makespan.runtime.launch import Gpus
from makespan.workloads import workload

torch = pytest.importorskip("torch")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
SOURCE = Path(__file__).resolve().parents[2] / "src"
FAKE_TORCH = """
from types import SimpleNamespace
__version__, version = "9.9", SimpleNamespace(cuda="9", hip=None)
cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: {count},
    get_device_properties=lambda index: SimpleNamespace(
        total_memory=(index + 1) * 2**30, name=f"GPU {{index}}"
    ),
)
"""


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that gives this machine so many GPUs, as processes would find them."""

    def give(count):
        monkeypatch.setattr(_launch, "local_gpus", lambda interpreter=(): Gpus([1e9] * count, "as made up"))

    return give


def who(**changes):
    found = {"rank": 1, "size": 2, "local_rank": 1, "device": "cuda", "threads": 1, "timeout_s": 1.0}
    return Identity(**(found | {"launched_s": 0.0, "parent": None, "cpus": None} | changes))


# --- which there are --------------------------------------------------------------------------------


def test_gpus_are_those_that_torch_counts_where_processes_run(monkeypatch, tmp_path):
    """In a process started as those of a run are, whose torch is a stand-in with two GPUs."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(count=2))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SOURCE}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8,9")
    found = local_gpus((sys.executable, "-B"))
    assert found.memory_bytes == [2**30, 2**31]
    assert found.names == ["GPU 0", "GPU 1"]
    assert found.source == "as torch 9.9 counts them with CUDA_VISIBLE_DEVICES=7,8,9"
    assert LocalLauncher("cuda", interpreter=(sys.executable, "-B")).n_devices == 2
    assert LocalLauncher("cuda", gpus=(1, 2), interpreter=(sys.executable, "-B")).n_devices == 1


@without_gpu
def test_what_was_granted_is_no_gpu_where_torch_has_none(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 1024 MiB, 1.2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for granted in ("0,1", None):
        if granted is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", granted)
        assert local_gpus().count == 0
        assert profiling_launcher("auto", 1).device == local_launcher("auto", 1).device == "cpu"
        with pytest.raises(InputError, match=r"found 0 GPU\(s\) \(.*torch "):
            profiling_launcher("cuda", 1)


@without_gpu
def test_a_machine_is_profiled_where_torch_has_none_of_the_gpus_that_were_granted(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.chdir(tmp_path)
    command = "profile --workload tiny-gpt --placement 1 --steps 1 --repetitions 1 --output here --quiet"
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "here" / "tiny-gpt.json").read_text())
    assert "cpu" in json.dumps(record)


def test_auto_takes_gpus_where_there_is_one_for_each_process(gpus):
    gpus(2)
    assert [local_launcher("auto", count).device for count in (1, 2, 3)] == ["cuda", "cuda", "cpu"]
    gpus(0)
    assert local_launcher("auto", 1).device == "cpu"
    assert local_launcher("cpu", 9).device == "cpu"


@without_gpu
def test_tasks_of_slurm_are_asked_whether_each_has_a_gpu(monkeypatch, tmp_path):
    """Tasks run with a stand-in for srun; the second has a torch that counts no GPU."""
    for task, count in enumerate((1, 0)):
        (tmp_path / f"node{task}").mkdir()
        (tmp_path / f"node{task}" / "torch.py").write_text(FAKE_TORCH.format(count=count))
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do case $1 in --ntasks=*) n=${1#*=};; esac; shift; done\n'
        "for task in $(seq 0 $((n - 1))); do\n"
        f"  SLURM_PROCID=$task SLURM_NTASKS=$n SLURM_LOCALID=0 PYTHONPATH={tmp_path}/node$task:{SOURCE} "
        '"$@" || exit 1\n'
        "done\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kinds = {}
    for text in ("1", "11"):
        (point, *_) = profile_points(workload("tiny-gpt"), [Placement.parse(text)], 1)
        kinds[text] = allocation_launcher(point, "auto", "gpu:a800:1", tmp_path / "run").device
    assert kinds == {"1": "cuda", "11": "cpu"}


@without_gpu
def test_a_process_says_that_torch_has_no_gpu_for_it():
    with pytest.raises(InputError, match=r"process 1 of its node, but found 0 GPU\(s\) \(.*torch "):
        choose_device(who())


def test_constants_of_a_gpu_are_those_of_the_gpu_by_name(monkeypatch):
    named = Gpus([2e9, 2e9], "", ["Some GPU 80GB", "Some GPU 80GB"])
    monkeypatch.setattr(_rates, "local_gpus", lambda interpreter: named)
    processor = describe_machine()["processor"]
    assert measured_on(LocalLauncher("cuda")) == f"measured on Some GPU 80GB beside {processor}"
    assert measured_on(LocalLauncher()) == f"measured on {processor}"


def test_memory_of_a_device_is_that_of_the_smallest_gpu_that_torch_has(monkeypatch):
    monkeypatch.setattr(_rates, "local_gpus", lambda: Gpus([3e9, 2e9], ""))
    assert _rates._device_memory("cuda", 2) == 2e9


def test_rates_are_measured_between_as_many_processes_as_there_are_gpus(gpus):
    gpus(3)
    one, many = LocalLauncher("cuda", gpus=(0,)), LocalLauncher("cuda", gpus=(0, 1, 2))
    assert rate_runs(3, 2, one) == rate_runs(3, 1, many) < rate_runs(3, 2, many)
    assert rate_runs(3, 2, many) == rate_runs(3, 2, LocalLauncher())


# --- which a process gets ---------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Environments of what a launcher would have started, and its processes, which go on."""
    found = []

    def start(command, environment, log):
        process = SimpleNamespace(environment=environment, state=None)
        process.poll = lambda: process.state
        found.append(process)
        return process

    monkeypatch.setattr(_launch, "_start", start)
    return found


def test_gpus_are_places_among_those_that_were_granted(monkeypatch, started, tmp_path):
    launcher, launch = LocalLauncher("cuda", gpus=(1, 0)), Launch("some.worker", {}, 2, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher.start(launch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,5")
    launcher.start(launch, 0)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in started] == ["1,0", "5,GPU-ab"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(InputError, match="GPU 1, but 1 granted"):
        launcher.start(launch, 0)


def test_each_process_meets_the_others_on_its_own_gpu(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(_rendezvous, "gpus_of_torch", lambda: Gpus([1e9, 1e9], ""))
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(_rendezvous, "_store", lambda *arguments: None)
    group = "torch.distributed."
    monkeypatch.setattr(group + "init_process_group", lambda backend, **more: told.append(backend))
    monkeypatch.setattr(group + "all_gather_object", lambda every, own: told.append("met"))
    join(RunDirectory(tmp_path), who())
    assert told == [1, "cpu:gloo,cuda:nccl", "met"]
    assert choose_device(who(local_rank=0)) == torch.device("cuda", 0)


def test_a_node_that_replaces_a_lost_one_gets_its_gpu(monkeypatch, gpus, started, tmp_path):
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7,9")
    killed = []
    slots, launch = GpuSlots(LocalLauncher("cuda")), Launch("some.worker", {}, 3, tmp_path)
    monkeypatch.setattr(LocalLauncher, "end", lambda launcher, process: killed.append(process))
    for node in range(3):
        slots.start(launch, node)
    slots.start(launch, 3, replaced=1)  # whose process is still ending
    assert killed == [started[1]]
    started[0].state = -9
    slots.start(launch, 4, replaced=0)
    slots.start(launch, 5, replaced=17)  # one that joined from outside
    found = [one.environment["CUDA_VISIBLE_DEVICES"] for one in started]
    assert found == ["4", "6", "7", "6", "4", "9"]


def test_processes_share_a_gpu_that_a_launcher_names_twice(gpus, started, tmp_path):
    gpus(1)
    launcher = LocalLauncher("cuda", gpus=(0, 0))
    assert launcher.n_devices == 2
    slots = GpuSlots(launcher)
    for node in range(2):
        slots.start(Launch("some.worker", {}, 2, tmp_path), node)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in started] == ["0", "0"]


def test_a_process_joins_on_a_gpu_that_no_other_process_of_the_run_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="G", uuid=uuid))
    directory, device, uuid = RunDirectory(tmp_path), torch.device("cuda", 0), "ab"
    for _ in range(2):
        hold_gpu(directory, device, is_free=False)
    with pytest.raises(InputError, match=r"another process of the run has the GPU of this one, G \(ab\)"):
        hold_gpu(directory, device, is_free=True)
    uuid = "cd"
    hold_gpu(directory, device, is_free=True)
    with pytest.raises(InputError, match=r"G \(cd\); expected a free one, by its number in CUDA_VISIBLE_D"):
        hold_gpu(directory, device, is_free=True)


# --- too few ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "slapo verify bert --processes 2 --device cuda",
        "oobleck run gpt --iterations 1 --nodes 2 --device cuda",
        "oobleck join run --device cuda",
        "profile --device cuda",
        "live --device cuda --output results",
        "easyscale run neumf --steps 1 --device cuda",
    ],
)
def test_without_gpus_a_verb_says_so_before_anything_starts(monkeypatch, started, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert "found 0 GPU(s) (" in line and "; expected one GPU for each process, or cpu" in line
    assert started == []


def test_a_live_run_has_a_gpu_for_each_slot(gpus):
    gpus(2)
    assert slots_of("local", "cuda", 2)((0, 1)).device == "cuda"
    with pytest.raises(InputError, match=r"3 process\(es\), but found 2 GPU\(s\)"):
        slots_of("local", "cuda", 3)


def test_elastic_jobs_of_a_live_run_have_the_gpus_of_their_slots(gpus, tmp_path):
    gpus(2)
    found = []
    trainer = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path), job=SimpleNamespace(n_logical_workers=4),
        run=lambda steps, **options: found.append(options["launcher"]),
    )  # fmt: skip
    ElasticRun().train(trainer, (0, 1), slots_of("local", "cuda", 2), 1, steps=1, checkpoint_every=1)
    assert (found[0].device, found[0].n_devices) == ("cuda", None)


def test_who_joins_a_run_names_its_gpu(gpus, tmp_path):
    gpus(2)
    with pytest.raises(InputError, match="2 GPUs, of which this process may have one"):
        join_run(tmp_path, LocalLauncher("cuda"))
