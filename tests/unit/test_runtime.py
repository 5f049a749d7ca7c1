"""Processes of any kind: what each gets, who hears of a loss, and what no one needs to import."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from forked import SUPPORT, own_servers

from makespan.errors import InputError, LostWorkerError, WorkerError
from makespan.files import read_json
from makespan.runtime import (
    Launch,
    LocalLauncher,
    ProcessOptions,
    RunDirectory,
    SlurmLauncher,
    finish_checkpoint,
    forkserver as _forkserver,
    latest_checkpoint,
    launch as _launch,
    resident_bytes,
    start_checkpoint,
)
from makespan.runtime.forkserver import how_ended

TOY = [sys.executable, str(SUPPORT / "toy_worker.py")]
FORKED = "toy_worker"


def launch(do, run_dir, n_processes=2, worker=TOY, **more):
    return Launch(worker, {"do": do}, n_processes, run_dir, **more)


def seen(run_dir):
    return [read_json(run_dir / f"seen-{rank}.json") for rank in range(2)]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition):
    deadline = time.monotonic() + 3600
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def forking():
    """Let workers of the tests be forked, by a server of this test; returns the process of the server."""
    with own_servers() as servers:
        yield lambda: servers()[0]


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """Put a stand-in for srun in the way, which starts tasks with the variables that srun sets."""
    stand_in = tmp_path / "srun"
    stand_in.write_text(
        "#!/bin/sh\n"
        'tasks=$(echo "$1" | sed s/--ntasks=//); how=$2; [ "$3" = --exclusive ] || exit 9; shift 3; i=0\n'
        '[ "$how" = --exact ] && { SLURM_LOCALID=0 exec "$@"; }\n'
        'while [ $i -lt "$tasks" ]; do\n'
        '  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$tasks "$@" & i=$((i + 1))\n'
        "done\nwait\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return SlurmLauncher("cpu", options=("--exclusive",), threads_per_process=3)


# --- one dies, the others are told ------------------------------------------------------------------


@pytest.mark.xdist_group("training")
def test_processes_with_something_of_their_own_meet_anew_without_a_lost_one(srun, tmp_path):
    """Steps of Slurm, which find each other by the name of the host."""
    pytest.importorskip("torch")
    run_dir, cpu = tmp_path / "run", min(os.sched_getaffinity(0))
    options = [ProcessOptions({"GREETING": "hello"}), ProcessOptions({"GREETING": "bye"}, 2, (cpu,))]
    lost = srun.run(launch("meet_anew", run_dir, options=options, on_loss="tell"))
    assert lost == {0: "process 0 of 2 was ended by signal SIGKILL"}
    directory, (first, second) = RunDirectory(run_dir), seen(run_dir)
    pids = [first["pid"], second["pid"]]
    assert directory.result() == {"lost": {"0": lost[0]}, "alone": pids[1:], "sum": 3}
    assert (directory.meeting(), directory.meeting(1)) == (pids, pids[1:])
    assert read_json(run_dir / "sum.json") == [pids, 3, 2]
    assert [(one["greeting"], one["threads"]) for one in (first, second)] == [("hello", 3), ("bye", 2)]
    assert second["cpus"] == [cpu]


def test_on_one_machine_the_others_are_told_too(tmp_path):
    options = [ProcessOptions({"GREETING": "hello"}), ProcessOptions(threads=2)]
    lost = LocalLauncher().run(launch("survive", tmp_path, options=options, on_loss="tell"))
    assert RunDirectory(tmp_path).lost() == lost == {0: "process 0 of 2 was ended by signal SIGKILL"}
    assert RunDirectory(tmp_path).result() == {"0": lost[0]}
    assert [(one["greeting"], one["threads"]) for one in seen(tmp_path)] == [("hello", 1), (None, 2)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.perturb=0", "glibc.malloc.perturb=0:glibc.malloc.hugetlb=1"),
    ],
)
def test_processes_ask_for_huge_pages_unless_the_user_has_said_what_they_shall_get(
    tmp_path, monkeypatch, asked, expected
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if asked is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", asked)
    LocalLauncher().run(launch("end", tmp_path))
    assert {one["tunables"] for one in seen(tmp_path)} == {expected}


@pytest.mark.parametrize(
    ("state", "said"),
    [(7, "ended with status 7"), (-9, "was ended by signal SIGKILL"), (-35, "was ended by signal 35")],
)
def test_the_end_of_a_process_is_said_by_its_status_or_signal(state, said):
    assert how_ended(state) == said


def test_a_run_of_which_no_process_is_left_has_failed(tmp_path):
    with pytest.raises(
        WorkerError, match="all processes are lost; the first: process 0 of 1 ended with status 7"
    ):
        LocalLauncher().run(launch("leave", tmp_path, 1, on_loss="tell"))


# --- one dies, all end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("fail", r"process 1 of 2 failed: ValueError: the data are bad\nTraceback"),
        ("kill", r"process 1 of 2 was ended by signal SIGKILL"),
        ("leave", r"process 0 of 2 ended with status 7 before it could report"),
        ("hang", r"no progress within 0\.5 s \(stall_timeout_s\); the run was killed"),
    ],
)
@pytest.mark.parametrize("worker", [TOY, FORKED], ids=["started", "forked"])
def test_all_end_with_the_error_of_the_first(forking, tmp_path, do, message, worker):
    with pytest.raises(WorkerError, match=message):
        LocalLauncher(stall_timeout_s=0.5).run(launch(do, tmp_path, worker=worker))
    assert RunDirectory(tmp_path).result() is None
    assert not any(is_running(one["pid"]) for one in seen(tmp_path))


def test_a_message_to_users_comes_without_a_traceback(tmp_path):
    with pytest.raises(WorkerError) as caught:
        LocalLauncher().run(launch("refuse", tmp_path))
    assert str(caught.value) == "process 1 of 2 failed: InputError: samples is 0; expected 1 or more"


def test_before_the_processes_have_met_no_time_is_too_long(tmp_path):
    assert LocalLauncher(stall_timeout_s=0.1).run(launch("start_slowly", tmp_path)) == {}


@pytest.mark.xdist_group("training")
def test_processes_that_start_long_after_each_other_meet_whatever_a_stall_may_take(tmp_path):
    pytest.importorskip("torch")
    with suppress(WorkerError):  # on a slow machine what comes after they have met
        LocalLauncher(stall_timeout_s=0.5).run(launch("meet_late", tmp_path))
    assert RunDirectory(tmp_path).meeting() == [one["pid"] for one in seen(tmp_path)]


def test_processes_wait_for_each_other_as_long_as_the_run_may_take(srun, tmp_path):
    for launcher in (LocalLauncher(timeout_s=123.0, stall_timeout_s=60.0), replace(srun, timeout_s=123.0)):
        run_dir = tmp_path / type(launcher).__name__
        launcher.run(launch("end", run_dir))
        assert [one["timeout_s"] for one in seen(run_dir)] == [123.0, 123.0]


@pytest.mark.parametrize("worker", [TOY, FORKED], ids=["started", "forked"])
def test_a_process_that_stops_answering_counts_as_killed(forking, tmp_path, worker):
    launcher = LocalLauncher(silence_timeout_s=2.0)
    told = "process 1 of 2 gave no sign of life for 2 s and counts as killed"
    with pytest.raises(LostWorkerError, match=told):
        launcher.run(launch("stop", tmp_path / "end", worker=worker))
    assert not any(is_running(one["pid"]) for one in seen(tmp_path / "end"))
    lost = launcher.run(launch("stop", tmp_path / "tell", worker=worker, on_loss="tell"))
    assert lost == RunDirectory(tmp_path / "tell").lost() == {1: told}


def test_processes_that_cannot_meet_end(tmp_path):
    with pytest.raises(WorkerError, match=r"2 processes were ready but did not meet within 0.3 s; check"):
        LocalLauncher(meet_timeout_s=0.3).run(launch("miss", tmp_path))


def test_a_run_has_no_limit_unless_one_is_set(tmp_path, srun):
    for launcher in (LocalLauncher(), replace(srun)):
        assert launcher.timeout_s is None
        run_dir = tmp_path / type(launcher).__name__
        launcher.run(launch("end", run_dir))
        assert min(one["timeout_s"] for one in seen(run_dir)) > 14 * 24 * 3600


def test_a_run_may_not_take_longer_than_allowed(tmp_path):
    with pytest.raises(WorkerError, match=r"longer than 0.2 s"):
        LocalLauncher(timeout_s=0.2).run(launch("hang", tmp_path))


class Unkillable:
    """A process in a call that not even SIGKILL interrupts."""

    pid = 0

    def poll(self):
        return None

    def kill(self):
        pass

    def wait(self, timeout=None):
        raise subprocess.TimeoutExpired("worker", timeout)


def test_a_process_that_cannot_be_killed_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalLauncher, "start", lambda self, launch, rank: Unkillable())
    with pytest.raises(WorkerError, match=r"longer than 0.05 s"):
        LocalLauncher(timeout_s=0.05).run(launch("hang", tmp_path))


def test_workers_do_not_outlive_the_process_that_started_them(tmp_path):
    code = (
        "import sys; from pathlib import Path; from makespan.runtime import Launch, LocalLauncher\n"
        "LocalLauncher().run(Launch(sys.argv[2:], {'do': 'hang'}, 2, Path(sys.argv[1])))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *TOY])
    try:
        until(lambda: RunDirectory(tmp_path).meeting())
        pids = [one["pid"] for one in seen(tmp_path)]
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(lambda: not any(map(is_running, pids)))
    finally:
        parent.kill()
        parent.wait()


def test_what_cannot_start_is_named(tmp_path, monkeypatch):
    with pytest.raises(WorkerError, match="cannot start no-such-command"):
        LocalLauncher(interpreter=("no-such-command",)).run(Launch("some.module", {}, 1, tmp_path))
    with pytest.raises(InputError, match="options of 1 processes; expected none, or those of 3"):
        launch("end", tmp_path, 3, options=[ProcessOptions()])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match="cannot start srun"):
        SlurmLauncher().run(launch("end", tmp_path))


def test_ranks_of_srun_are_understood(srun, tmp_path):
    assert srun.run(launch("end", tmp_path / "run")) == {}
    found = [(one["rank"], one["size"], one["local_rank"], one["threads"]) for one in seen(tmp_path / "run")]
    assert found == [(0, 2, 0, 3), (1, 2, 1, 3)]


# --- forked workers ---------------------------------------------------------------------------------


def start_forking(worker, folder):
    """Start a process that launches a forked worker in a folder, in a session of its own."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from makespan.runtime import Launch, LocalLauncher, launch\n"
        "launch.can_fork = lambda worker: True\n"
        "LocalLauncher().run(Launch(sys.argv[1], {'do': 'hang'}, 2, Path('run')))"
    )
    command = [sys.executable, "-c", code, worker]
    path = f"{folder}:{os.environ['PYTHONPATH']}"
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


def group_has_ended(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_forked_worker_finds_what_a_started_one_would(forking, tmp_path, monkeypatch):
    LocalLauncher().run(launch("end", tmp_path / "first", worker=FORKED))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "set after the server was started")
    options = [ProcessOptions(), ProcessOptions({"GREETING": "own"}, threads=2)]
    assert LocalLauncher().run(launch("speak", tmp_path / "run", worker=FORKED, options=options)) == {}
    first, second = seen(tmp_path / "run")
    assert first["greeting"] == "set after the server was started"
    assert (second["greeting"], second["threads"], second["rank"], second["size"]) == ("own", 2, 1, 2)
    assert first["directory"] == str(tmp_path)
    logs = [RunDirectory(tmp_path / "run").log_path(rank).read_text() for rank in range(2)]
    assert logs == ["said aloud\nand complained\n"] * 2
    assert forking().poll() is None


def test_a_pipe_is_waited_for_in_a_program_with_many_open_files():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 2000:
        pytest.skip("no process may open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    read, write = os.pipe()
    try:
        high = os.dup2(read, 1999)
        assert not _forkserver.is_readable(high, 0.0)
        os.write(write, b"1")
        assert _forkserver.is_readable(high) and os.read(high, 2) == b"1"
        os.close(write)
        assert _forkserver.is_readable(high)  # it is closed
        os.close(high)
    finally:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(5)", 5),
        ("raise ValueError('bad')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_exit_status_of_a_forked_worker_is_told(forking, tmp_path, monkeypatch, ending, status):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    (tmp_path / "ending.py").write_text(f"if __name__ == '__main__':\n    {ending}\n")
    process = _forkserver.fork_worker("ending", "argument", os.environ, tmp_path / "log")
    assert process.wait() == process.poll() == status
    assert ("ValueError: bad" in (tmp_path / "log").read_text()) == (status == 1)


def test_workers_are_forked_from_a_parent_with_the_variables_that_are_read_once(tmp_path):
    options = [ProcessOptions(one) for one in ({"ATEN_CPU_CAPABILITY": "default"}, {"GREETING": "hello"})]
    with own_servers() as servers:
        for number in range(2):
            run_dir = tmp_path / str(number)
            LocalLauncher().run(launch("end", run_dir, worker=FORKED, options=options))
            assert [one["greeting"] for one in seen(run_dir)] == [None, "hello"]
        plain, other = (Path(f"/proc/{one.pid}/environ").read_text().split("\0") for one in servers())
    assert "ATEN_CPU_CAPABILITY=default" in plain
    assert not [one for one in other if one.startswith(("ATEN_CPU_CAPABILITY", "GREETING"))]


def test_a_server_killed_between_runs_is_replaced(forking, tmp_path):
    for name in ("first", "second"):
        assert LocalLauncher().run(launch("end", tmp_path / name, worker=FORKED)) == {}
        os.kill(forking().pid, signal.SIGKILL)


def test_a_server_killed_in_a_run_takes_its_workers_along(forking, tmp_path):
    with pytest.raises(WorkerError, match="was ended by signal SIGKILL"):
        LocalLauncher().run(launch("kill_server", tmp_path, worker=FORKED))
    until(lambda: not any(is_running(one["pid"]) for one in seen(tmp_path)))


def test_a_worker_that_its_launcher_gave_up_is_killed(forking, tmp_path):
    RunDirectory(tmp_path).prepare({"do": "hang"})
    alone = {"MAKESPAN_RANK": "0", "MAKESPAN_WORLD_SIZE": "1", "MAKESPAN_LOCAL_RANK": "0"}
    shared = _launch._run_variables("cpu", 60.0) | _launch._thread_variables(1)
    process = _forkserver.fork_worker(FORKED, str(tmp_path), shared | alone, tmp_path / "log")
    os.close(process._status)
    until(lambda: not is_running(process.pid))
    assert forking().poll() is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.parametrize("moment", ["first", "loading", "working"])
def test_no_process_outlives_a_launcher_that_is_ended_at_any_moment(forking, tmp_path, how, moment):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time; pathlib.Path('loading').touch(); time.sleep(600)\n"
    )
    process = start_forking(FORKED if moment == "working" else "slow", tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    reached = {
        "first": children.read_text,
        "loading": (tmp_path / "loading").exists,
        "working": lambda: RunDirectory(tmp_path / "run").meeting(),
    }
    try:
        until(reached[moment])
        (os.kill if how == signal.SIGKILL else os.killpg)(process.pid, how)
        assert process.wait() != 0
        until(lambda: group_has_ended(process.pid))
    finally:
        process.kill()
        process.communicate()


# --- files and imports ------------------------------------------------------------------------------


def test_the_newest_checkpoints_of_anything_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        (start_checkpoint(tmp_path) / "state").write_text(str(step))
        finish_checkpoint(tmp_path, step, 0.5, {"stages": [step]}, keep=2 if step > 3 else 3)
        found = latest_checkpoint(tmp_path)
        assert (found.step, found.save_s, found.values) == (step, 0.5, {"stages": [step]})
        found.verify()
    start_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == found
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000010"]


def test_saving_the_same_step_again_keeps_the_old_one_until_then(tmp_path):
    for expected in ("step-00000004", "step-00000004.1"):
        (start_checkpoint(tmp_path) / "state").write_text(expected)
        assert finish_checkpoint(tmp_path, 4, 0.5, {}).name == expected
        assert latest_checkpoint(tmp_path).path.name == expected
    assert (tmp_path / "step-00000004" / "state").read_text() == "step-00000004"


def test_faces_are_read_without_what_only_workers_and_tables_need():
    code = (
        "import sys, makespan.runtime\n"
        "from makespan.training import TrainingJob, check_supported, train\n"
        "from makespan.profiling import profile_batches, profile_points\n"
        "print(sorted({'torch', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- memory -----------------------------------------------------------------------------------------


def test_the_memory_of_a_process_is_its_own_and_not_that_of_the_one_that_started_it():
    ballast = b"x" * (400 << 20)
    program = "from makespan.runtime import resident_bytes as b; print(b(), b(peak=True))"
    now, peak = map(int, subprocess.check_output([sys.executable, "-c", program]).split())
    assert 0 < now <= peak < len(ballast) < resident_bytes() <= resident_bytes(peak=True)


CHURN = """
import sys
import torch
from makespan.runtime import KeptHeap, keep_freed, resident_bytes

check = KeptHeap().check if sys.argv[1] == "bound" else keep_freed
kept, found = [], []
for number in range(40):
    large = []
    for place in range(4):
        large.append(torch.ones(2_500_000))
        kept.append(torch.ones(4 * number + place))
    del large
    check()
    found.append(resident_bytes())
print(found[1], max(found))
"""


def test_a_heap_that_keeps_what_is_freed_stays_within_a_bound():
    def grown(how):
        done = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=True)
        first, most = map(int, done.stdout.split())
        return most / first

    # A small tensor that is kept beside each large one leaves a gap in which no other large one fits.
    if grown("free") < 2:
        pytest.skip("the heap of this system finds room for them")
    assert grown("bound") < 2
