"""GPUs: which of them processes get, what is said where there are too few, and training on them."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError
from makespan.live._segments import slots_of
from makespan.papers.oobleck import _live
from makespan.papers.oobleck._joining import join_run
from makespan.profiling import profiling_launcher, rate_runs
from makespan.runtime import (
    Identity,
    Launch,
    LocalLauncher,
    RunDirectory,
    _launch,
    _rendezvous,
    choose_device,
    join,
    n_visible_gpus,
)

torch = pytest.importorskip("torch")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def who(**changes):
    found = {"rank": 1, "size": 2, "local_rank": 1, "device": "cuda", "threads": 1, "timeout_s": 1.0}
    return Identity(**(found | {"launched_s": 0.0, "parent": None, "cpus": None} | changes))


# --- which there are --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "count"), [("", 0), ("-1", 0), ("0,1", 2), ("0,-1,2", 1), ("GPU-ab, GPU-cd", 2), ("3,", 1)]
)
def test_gpus_are_counted_as_cuda_counts_them(monkeypatch, named, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert n_visible_gpus() == count


def test_hidden_gpus_are_not_profiled(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 1024 MiB, 1.2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert profiling_launcher("auto", 1).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert profiling_launcher("auto", 1).device == "cpu"


def test_rates_are_measured_between_as_many_processes_as_there_are_gpus():
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(_rendezvous, "_store", lambda *arguments: None)
    group = "torch.distributed."
    monkeypatch.setattr(group + "init_process_group", lambda backend, **more: told.append(backend))
    monkeypatch.setattr(group + "all_gather_object", lambda every, own: told.append("met"))
    join(RunDirectory(tmp_path), who())
    assert told == [1, "cpu:gloo,cuda:nccl", "met"]
    assert choose_device(who(local_rank=0)) == torch.device("cuda", 0)


def test_a_node_that_replaces_a_lost_one_gets_its_gpu(monkeypatch, started, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    run = _live._Run.__new__(_live._Run)
    run.launcher, run.launch = LocalLauncher("cuda"), Launch("some.worker", {}, 3, tmp_path)
    run.gpus, run.on_gpu = _live._gpus_of(run.launcher), {}
    for node in range(3):
        run.start(node)
    started[1].state = -9
    run.start(3)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in started] == ["4", "6", "7", "6"]


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
    assert "0 GPU(s) at hand; accepted: one GPU for each process, or cpu" in line
    assert started == []


def test_a_live_run_has_a_gpu_for_each_slot(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert slots_of("local", "cuda", 2)((0, 1)).device == "cuda"
    with pytest.raises(InputError, match=r"3 process\(es\), but 2 GPU\(s\)"):
        slots_of("local", "cuda", 3)


def test_who_joins_a_run_names_its_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InputError, match="2 GPUs, of which this process may have one"):
        join_run(tmp_path, LocalLauncher("cuda"))


# --- on one -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("family", ["bert", "gpt", "llama"])
def test_a_schedule_agrees_with_its_model_on_a_gpu(family):
    from makespan.papers.slapo._verification import verify_schedules

    (found,) = verify_schedules([{"family": family, "options": {}}], 1, LocalLauncher("cuda"))
    assert found["is_equal"], found["report"]


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_a_stop_changes_no_bit(tmp_path):
    from elastic_job import bits, trainer

    launcher = LocalLauncher("cuda")
    whole = trainer(tmp_path / "whole").run(4, "0,1,2,3", launcher=launcher)
    stopped = trainer(tmp_path / "stopped")
    stopped.run(2, "0,1,2,3", launcher=launcher)
    assert bits(stopped.run(4, "0,1,2,3", launcher=launcher)) == bits(whole)


@pytest.mark.gpu
@on_gpu
def test_a_gpu_is_profiled(tmp_path):
    done = CliRunner().invoke(main, ["profile", "--device", "cuda", "--output", str(tmp_path), "--quiet"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "environment.toml").exists()
