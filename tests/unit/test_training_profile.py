"""The profiler: which points, what is made of the times, and what is said of machine and noise."""

import json
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError
from makespan.perf import fit_table, load_cluster, load_environment, sampling_design
from makespan.plans import Placement, PlanFamily
from makespan.profiling import (
    Measurements,
    Procedure,
    measure_points,
    model_of,
    profile as module,
    profile_batches,
    profile_points,
    profile_record,
    profile_table,
    rates as rates_module,
)
from makespan.profiling.profile import _FAMILIES, point_plan
from makespan.profiling.rates import (
    MachineRates,
    _added_by_division,
    _rates,
    allocation_launcher,
    environment_text,
)
from makespan.runtime import LocalLauncher, describe_machine, held_directory, launch as _launch
from makespan.runtime.launch import Gpus
from makespan.tables import THROUGHPUT, read_csv
from makespan.training import RunResult, unsupported_reasons
from makespan.training.run import PhaseTimes
from makespan.workloads import small_workload_keys, workload, workload_keys

ONE, TWO = Placement((1,)), Placement((2,))
GPT = workload("tiny-gpt")
NODE = load_environment("a800-64").node
RATES = MachineRates(2, 8e9, 16e9, 1, 1e9, 5e8, 4e8, 0.9, 1e10, 1e-3, 2e-3, 2e10)


def test_small_workloads_stand_apart_from_those_of_the_papers():
    assert not set(small_workload_keys()) & set(workload_keys())
    assert all(workload(key).key == key for key in small_workload_keys())


@pytest.mark.parametrize("key", small_workload_keys())
def test_the_parameters_of_a_small_workload_are_those_of_the_model_that_trains(key):
    pytest.importorskip("torch")
    from makespan.training.zoo.small import build_model

    spec = workload(key)
    net = build_model(model_of(spec), seed=0)
    assert sum(one.numel() for one in net.parameters()) == spec.model.parameters


@pytest.mark.parametrize("key", small_workload_keys())
def test_every_point_on_two_processes_can_be_trained(key):
    spec = workload(key)
    for point in profile_points(spec, [ONE, TWO], 1):
        assert not unsupported_reasons(point_plan(point, spec, NODE), model_of(spec)), point


def test_points_have_every_family_and_all_degrees():
    points = profile_points(GPT, [TWO, Placement((2, 2))], 1)
    plans = [point.exec_plan for point in points if point.placement == TWO]
    assert plans == ["ga", "gc", "zero-dp", "zero-offload", "zero-offload+gc", "112", "121", "211"]
    assert {point.exec_plan for point in points if point.placement.n_gpus == 4} >= {
        "221",
        "141",
        "411",
        "122",
    }


def test_a_plan_of_a_family_that_the_workload_does_not_use_is_left_out():
    points = profile_points(replace(GPT, families=(PlanFamily.GC.title,)), [ONE, TWO], 1)
    assert [point.exec_plan for point in points] == ["gc", "gc"]


def test_points_are_divided_by_placement_and_size():
    points = profile_points(GPT, [ONE, TWO], 1)
    assert [len(members) for members in profile_batches(points, None).values()] == [6, 8]
    batches = profile_batches(points, 1)
    assert len(batches) == 14
    assert [point for members in batches.values() for point in members] == points
    assert list(profile_batches(points, 5)) == ["1.0", "1.1", "2.0", "2.1"]


def test_a_model_without_a_trainer_is_refused(monkeypatch):
    monkeypatch.delitem(_FAMILIES, "llama")
    llama = replace(GPT, model=workload("tiny-llama").model)
    with pytest.raises(InputError, match="family 'llama' cannot be trained here; expected gpt2"):
        model_of(llama)


@pytest.mark.parametrize("field", ["steps", "repetitions"])
def test_a_procedure_that_measures_nothing_is_refused(field):
    with pytest.raises(InputError, match=f"{field} is 0"):
        Procedure(**{field: 0})


# --- times ---------------------------------------------------------------------------------


def result(*steps):
    times = tuple(PhaseTimes(s, 0.3 * s, 0.6 * s, 0.1 * s) for s in steps)
    return RunResult(0, (1.0,) * len(steps), times, steps, False, "cpu", 0.1, 0.1, (), None, None, None, 1)


@pytest.fixture
def trained(monkeypatch):
    """Let training take given times: a function of the number of the run."""

    def install(steps_of):
        asked = []

        def train_all(jobs, **options):
            asked.append((jobs, options))
            for number in range(len(jobs)):
                options["on_beat"]([result(*steps_of(number))])

        monkeypatch.setattr(module, "train_all", train_all)
        return asked

    return install


def measured(procedure, points=None, launcher=None, **more):
    points = profile_points(GPT, [TWO], 1)[:2] if points is None else points
    return measure_points(GPT, points, NODE, launcher or LocalLauncher(), procedure, **more)


def test_warm_up_is_thrown_away_and_a_run_counts_with_its_median(trained):
    trained(lambda number: (99.0, 1.0, 5.0, 2.0))
    part = measured(Procedure(1, 3, 1))
    assert [point["runs"][0]["iter_time_s"] for point in part["points"]] == [2.0, 2.0]
    assert part["points"][0]["runs"][0]["forward_s"] == pytest.approx(0.6)


def test_all_points_take_turns_so_that_a_drift_meets_each(trained):
    asked = trained(lambda number: (float(number + 1),))
    part = measured(Procedure(0, 1, 3))
    ((jobs, _),) = asked
    assert [job.plan.checkpoint_fraction for job in jobs] == [0.0, 1.0] * 3
    assert [run["iter_time_s"] for run in part["points"][0]["runs"]] == [1.0, 3.0, 5.0]
    assert [run["iter_time_s"] for run in part["points"][1]["runs"]] == [2.0, 4.0, 6.0]


def test_a_table_holds_medians_over_the_runs_of_a_point(trained):
    trained(lambda number: (float(number + 1),))
    table = profile_table([measured(Procedure(0, 1, 3))], GPT)
    assert table["iter_time_s"].tolist() == [3.0, 4.0]
    assert table["overlap_sync_s"].tolist() == pytest.approx([1.8, 2.4])
    assert set(table["provenance"]) == {"measured"}
    assert table["feasible"].all()


def test_a_slow_spell_of_the_machine_in_one_round_of_three_does_not_count(trained):
    trained(lambda number: (1.0 + number,))
    parts = [measured(Procedure(0, 1, 1))]
    trained(lambda number: (90.0 + number,))
    parts.append(measured(Procedure(0, 1, 1)))
    trained(lambda number: (1.5 + number,))
    parts.append(measured(Procedure(0, 1, 1)))
    assert profile_table(parts, GPT)["iter_time_s"].tolist() == [1.5, 2.5]
    assert [point["n_runs"] for point in profile_record(parts)["points"]] == [3, 3]


def test_repeatability_is_the_mean_relative_difference_of_two_runs(trained):
    trained(lambda number: ([1.0, 2.0][number // 2],))
    record = profile_record([measured(Procedure(0, 1, 2))])
    assert record["repeatability_pct"] == pytest.approx((100.0 + 50.0) / 2)
    assert [point["n_runs"] for point in record["points"]] == [2, 2]


def test_one_run_alone_says_nothing_about_noise(trained):
    trained(lambda number: (1.0,))
    assert profile_record([measured(Procedure(0, 1, 1))])["repeatability_pct"] is None


def test_what_cannot_be_trained_has_a_reason_and_no_time(monkeypatch, trained):
    monkeypatch.setattr(_launch, "local_gpus", lambda interpreter: Gpus([1e9], "as made up"))
    asked = trained(lambda number: (1.0,))
    points = profile_points(GPT, [TWO], 1)
    part = measured(Procedure(0, 1, 1), points, LocalLauncher(device="cuda", gpus=(0,)))
    assert not asked
    table = profile_table([part], GPT)
    assert not table["feasible"].any()
    assert table["iter_time_s"].isna().all()
    assert all("needs 2 devices, found 1" in point["reason"] for point in profile_record([part])["points"])


def test_parts_of_another_workload_are_refused(trained):
    trained(lambda number: (1.0,))
    with pytest.raises(InputError, match="a profile of 'tiny-gpt'; expected profiles of 'tiny-bert'"):
        profile_table([measured(Procedure(0, 1, 1))], workload("tiny-bert"))


def test_the_sampling_design_leaves_rows_to_predict(trained):
    trained(lambda number: (0.1 + 0.01 * number,))
    parts = [measured(Procedure(0, 1, 1), points) for points in by_placement().values()]
    mask = sampling_design(profile_table(parts, GPT), "tiny-gpt")
    assert 7 <= mask.sum() <= 10
    assert (~mask).sum() >= 4


# --- what an interrupted profile leaves ------------------------------------------------------------


def interrupted(trained, path, after, settings=None):
    """Measure two points three times, with an interrupt after some runs; return what was asked for."""

    def time_s(number):
        if number == after:
            raise KeyboardInterrupt
        return (float(number + 1),)

    asked = trained(time_s)
    with pytest.raises(KeyboardInterrupt):
        measured(Procedure(0, 1, 3), kept=Measurements(path, settings, 6))
    return asked


def test_an_interrupted_profile_goes_on_with_the_runs_that_are_missing(trained, tmp_path):
    path, told, counts = tmp_path / "new" / "unfinished.jsonl", [], []
    interrupted(trained, path, 4)
    with path.open("a") as stream:
        stream.write('{"name": "of a process that was killed while')
    asked = trained(lambda number: (float(number + 5),))
    kept = Measurements(path, {}, 6, lambda *count: counts.append(count), told.append)
    part = measured(Procedure(0, 1, 3), kept=kept)
    assert [len(jobs) for jobs, _ in asked] == [2]
    assert [run["iter_time_s"] for run in part["points"][0]["runs"]] == [1.0, 3.0, 5.0]
    assert [run["iter_time_s"] for run in part["points"][1]["runs"]] == [2.0, 4.0, 6.0]
    assert told == [f"{path}: resuming, 4 of 6 runs are measured"]
    assert counts[0] == (4, 6) and counts[-1] == (6, 6)
    assert measured(Procedure(0, 1, 3), kept=Measurements(path, {})) == part  # also what was added behind
    assert len(asked) == 1
    kept.remove()
    assert not path.exists()


def test_other_settings_and_another_machine_begin_anew_and_say_so(trained, tmp_path, monkeypatch):
    path, told = tmp_path / "unfinished.jsonl", []
    interrupted(trained, path, 4, {"steps": 1})
    before, hosts = path.read_text(), f"found {socket.gethostname()!r}, expected 'elsewhere'"
    anew = f"starting anew, its runs go to {path}.old"
    assert "tiny-gpt on 2: machine" not in Measurements(path, {"steps": 2}, 6, None, told.append)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert "tiny-gpt on 2: machine" not in Measurements(path, {"steps": 1}, 6, None, told.append)
    assert told == [
        f"{path}: was measured with other settings; settings.steps: found 1, expected 2; {anew}",
        f"{path}: was measured on another machine; machine.host: {hosts}; {anew}",
    ]
    assert path.read_text() == before  # until something else is measured
    asked = trained(lambda number: (1.0,))
    measured(Procedure(0, 1, 3), kept=Measurements(path, {"steps": 1}, 6))
    assert len(asked[0][0]) == 6
    assert '"elsewhere"' in path.read_text().splitlines()[0]
    assert Path(f"{path}.old").read_text() == before


def test_another_micro_batch_is_another_run(trained, tmp_path):
    path = tmp_path / "unfinished.jsonl"
    interrupted(trained, path, 4)
    path.write_text(path.read_text().replace("micro-batch", "micro-batch 99, not"))
    asked = trained(lambda number: (1.0,))
    measured(Procedure(0, 1, 3), kept=Measurements(path, {}, 6))
    assert len(asked[0][0]) == 6


def test_points_that_cannot_run_count_as_done(trained):
    counts, points = [], profile_points(GPT, [TWO], 1)
    trained(lambda number: (1.0,))
    kept = Measurements(None, {}, len(points), lambda *count: counts.append(count))
    measured(Procedure(0, 1, 1), points, LocalLauncher(device="cuda", gpus=(0,)), kept=kept)
    kept.beat()
    assert counts[-1] == (len(points), len(points))


def by_placement():
    return profile_batches(profile_points(GPT, [ONE, TWO], 1), None)


# --- machine -------------------------------------------------------------------------------


def test_the_machine_is_described_in_plain_values(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    machine = json.loads(json.dumps(describe_machine()))
    assert machine["cpus"] >= 1
    assert machine["memory_bytes"] > 1e8
    assert machine["visible_devices"] == "3,5"
    assert machine["slurm"]["SLURM_JOB_ID"] == "17"
    assert {"python", "numpy"} <= set(machine["versions"])


def test_gpus_are_listed_by_their_driver_tool(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 1024 MiB, 1.2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = describe_machine()["gpus"]
    assert gpu == {"name": "Some GPU", "memory.total": "1024 MiB", "driver_version": "1.2"}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert describe_machine()["gpus"] == []


def test_processes_on_several_nodes_are_started_with_what_steps_do_not_inherit(tmp_path):
    (point, *_) = profile_points(GPT, [Placement((2, 2))], 3)
    launcher = allocation_launcher(point, "cpu", "gpu:a800:2", tmp_path)
    assert {"--nodes=2", "--ntasks-per-node=2", "--gres=gpu:a800:2", "--cpus-per-task=3"} <= set(
        launcher.options
    )
    uneven = replace(point, placement=Placement((1, 3)))
    assert not [
        one
        for one in allocation_launcher(uneven, "cpu", "", tmp_path).options
        if "ntasks" in one or "gres" in one
    ]


def test_an_environment_file_is_read_back_as_it_was_measured(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(environment_text(RATES, "measured here"))
    environment = load_environment(str(path))
    assert environment.constants.intra_bandwidth_bytes_per_s == RATES.ring_bytes_per_s
    assert environment.constants.p2p_bandwidth_bytes_per_s == RATES.transfer_bytes_per_s / 2
    assert environment.constants.forward_launch_s == RATES.forward_launch_s
    assert environment.node.gpu.memory_bytes == RATES.device_memory_bytes
    assert load_cluster(str(path)).n_gpus == 2
    values = tomllib.loads(path.read_text())
    assert all(entry["source"] and entry["unit"] for entry in values["constants"].values())
    assert all("measured here" in values["constants"][name]["source"] for name in ("gather_efficiency",))


def test_rates_of_ring_passes_follow_from_the_times_of_collectives():
    times = {
        "bytes": 8e6, "activation_bytes": 1e5, "copy_s": 1e-3, "all_reduce_s": 8e-3, "transfer_s": 1e-3,
    }  # fmt: skip
    rates = _rates(times, 2)
    assert rates["ring_bytes_per_s"] == pytest.approx(1e9)
    assert rates["transfer_bytes_per_s"] == pytest.approx(1e8)
    assert min(_rates(times, 1).values()) >= 1e12


def test_what_dividing_a_model_costs_is_what_it_adds_to_a_step(monkeypatch):
    def step_s(plan):
        if plan.tp == 2:
            return 0.9  # 0.3 s of it apart from the passes' half
        return 0.8 + 0.1 * (plan.zero_stage > 0) if plan.dp == 2 else 1.2

    def train_all(jobs, on_beat, **_):
        on_beat([result(*[step_s(job.plan)] * 20) for job in jobs])

    monkeypatch.setattr(module, "train_all", train_all)
    alone = rates_module._alone([GPT], LocalLauncher(), Measurements())
    found = _added_by_division([GPT], alone, LocalLauncher(), 1e9, 2, Measurements())
    activations = 8 * GPT.global_batch_size * sum(b.n_layers * b.seq * b.hidden for b in GPT.model.blocks)
    assert found["tensor_bytes_per_s"] == pytest.approx(activations / (0.9 * (0.9 - 1.2 / 2)))
    assert found["gather_efficiency"] == pytest.approx(4 * GPT.model.parameters / 2 / 1e9 / 0.1)
    alone_too = _added_by_division([GPT], alone, LocalLauncher(), 1e9, 1, Measurements())
    assert alone_too["gather_efficiency"] == 1.0


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(InputError, match="measured copy_bytes_per_s is 0"):
        replace(RATES, copy_bytes_per_s=0.0)


# --- for real ------------------------------------------------------------------------------


@pytest.mark.xdist_group("training")
def test_a_directory_in_which_a_profile_is_measured_is_refused_to_others(tmp_path):
    pytest.importorskip("torch")
    words = ["profile", "--workload", "tiny-llama", "--placement", "1", "--device", "cpu"]
    with held_directory(tmp_path, "profile"):
        done = CliRunner().invoke(main, [*words, "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert f"Error: {tmp_path}: another profile is active here" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_one_command_interrupted_measures_the_machine_and_every_plan_on_it(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    arguments = ["--workload", "tiny-llama", "--placement", "2", "--device", "cpu", "--warmup", "1"]
    arguments += ["--steps", "1", "--repetitions", "2", "--output", str(tmp_path)]
    counts = []

    def interrupt(countdown, done, total, doing=""):
        counts.append((done, total))
        if done == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("makespan.cli.progress.Countdown.__call__", interrupt)
        done = CliRunner().invoke(main, ["profile", *arguments])
    path = tmp_path / "unfinished.jsonl"
    assert done.exit_code == 130
    assert f"stopped; the same command resumes from {path}" in done.stderr
    assert counts[0] == (0, 23) and len({done for done, _ in counts}) == 11  # seven for the machine
    done = CliRunner().invoke(main, ["profile", *arguments])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"{path}: resuming, 10 of 23 runs are measured\n")
    assert done.stdout.startswith("tiny-llama: 8 of 8 points ran; two runs of a point differ by")
    assert not path.exists()
    table = read_csv(tmp_path / "tiny-llama.csv", THROUGHPUT)
    assert (table["iter_time_s"] > 0).all()
    phases = table[["forward_s", "overlap_sync_s", "optimize_s"]].to_numpy()
    assert (phases > 0).all()
    assert (phases.sum(axis=1) <= 1.05 * table["iter_time_s"]).all()
    record = json.loads((tmp_path / "tiny-llama.json").read_text())
    assert record["machines"][0]["versions"]["torch"]
    assert record["devices"] == ["cpu"]
    fitted = fit_table(table, "tiny-llama", "extended", load_environment(str(tmp_path / "environment.toml")))
    assert np.isfinite(fitted.predicted_s).all()


def test_several_nodes_are_left_to_the_workflow():
    done = CliRunner().invoke(main, ["profile", "--placement", "11"])
    assert done.exit_code == 2
    assert "several nodes need an allocation; see the rule profile_nodes" in done.output
