"""Every path of CUDA and NCCL, on as many GPUs as there are: what to run first on a machine with GPUs."""

import csv
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from elastic_job import bits, trainer
from forked import forking_servers
from group_worker import on_processes
from killers import Gate
from live_job import Fault, replayed, run
from toy_cluster import throughput_rows

from makespan import live
from makespan.cli import main
from makespan.easyscale import ElasticTrainer
from makespan.easyscale.reduction import HostCopies, synchronize
from makespan.errors import MakespanError
from makespan.live.engine import slots_of
from makespan.papers.slapo.measured import verify_schedules
from makespan.plans import ExecutionPlan
from makespan.policies import policy
from makespan.training import SmallModel, TrainingJob, train
from makespan.workloads import JobSpec

SUPPORT = Path(__file__).parents[1] / "support"
RECOVERING, SURVIVING = SUPPORT / "recovering_job.py", SUPPORT / "surviving_loop.py"
SIZES = {"n_layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "seq": 8, "vocab": 16}
ALONE = ExecutionPlan(global_batch_size=4, micro_batch_size=4)
PLANS_ALONE = {
    "accumulation": replace(ALONE, micro_batch_size=1, grad_accum_steps=4, family=None),
    "checkpointing": replace(ALONE, checkpoint_fraction=1.0, family=None),
    "selective checkpointing": replace(
        ALONE, checkpoint_fraction=1.0, checkpoint_method="selective", family=None
    ),
    "offload": replace(ALONE, zero_stage=1, offload=True, family=None),
    "ZeRO-3": replace(ALONE, zero_stage=3, family=None),
}
JOBS = [("a", 1, "ga"), ("b", 2, "zero-dp")]
PLANS_OF_TWO = {
    "DP": replace(ALONE, dp=2, micro_batch_size=2, family=None),
    "TP": replace(ALONE, tp=2, family=None),
    "PP": replace(ALONE, pp=2, micro_batch_size=1, grad_accum_steps=4, family=None),
    "ZeRO-2": replace(ALONE, dp=2, micro_batch_size=2, zero_stage=2, family=None),
    "ZeRO-3": replace(ALONE, dp=2, micro_batch_size=2, zero_stage=3, family=None),
    "ZeRO with offload": replace(ALONE, dp=2, micro_batch_size=2, zero_stage=1, offload=True, family=None),
}


def trained(plan, launcher=None, steps=5):
    """Return the losses of a small model under a plan."""
    return train(TrainingJob(SmallModel("llama", **SIZES), plan, steps), launcher=launcher).losses


def test_training_twice_gives_the_same_bits_and_the_losses_of_the_cpu(launcher):
    first, second = trained(ALONE, launcher), trained(ALONE, launcher)
    assert first == second
    np.testing.assert_allclose(first, trained(ALONE), rtol=1e-5)


@pytest.mark.parametrize("name", PLANS_ALONE)
def test_a_plan_of_one_process_trains_like_the_cpu(launcher, name):
    np.testing.assert_allclose(trained(PLANS_ALONE[name], launcher), trained(ALONE), rtol=1e-5)


@pytest.mark.devices(2)
@pytest.mark.parametrize("name", PLANS_OF_TWO)
def test_a_plan_of_two_processes_trains_like_the_cpu(launcher, name):
    np.testing.assert_allclose(trained(PLANS_OF_TWO[name], launcher), trained(ALONE), rtol=1e-5)


def test_a_stop_of_elastic_training_changes_no_bit(launcher, tmp_path):
    whole = trainer(tmp_path / "whole").run(4, "0,1,2,3", launcher=launcher)
    stopped = trainer(tmp_path / "stopped")
    stopped.run(2, "0,1,2,3", launcher=launcher)
    assert bits(stopped.run(4, "0,1,2,3", launcher=launcher)) == bits(whole)


@pytest.mark.devices(2)
def test_elastic_training_has_the_same_bits_on_one_device_and_on_two(launcher, tmp_path):
    one = trainer(tmp_path / "one").run(4, "0,1,2,3", launcher=launcher)
    changing = trainer(tmp_path / "changing")
    changing.run(2, "0,1/2,3", launcher=launcher)
    assert bits(changing.run(4, "0,1,2,3", launcher=launcher)) == bits(one)


@pytest.mark.devices(2)
def test_shards_of_the_optimizer_change_no_bit_of_elastic_training(launcher, tmp_path):
    whole = trainer(tmp_path / "whole").run(4, "0,1/2,3", launcher=launcher)
    in_shards = trainer(tmp_path / "shards").run(4, "0,1/2,3", launcher=launcher, zero_stage=1)
    assert bits(in_shards) == bits(whole)


def surviving(run_dir, launcher, mapping, gate=None, **options):
    """Train a job that loses processes where a gate lets them."""
    names = {name: f"{RECOVERING}:{name}" for name in ("data", "loss", "after_reduce")}
    held = {} if gate is None else {"model": {"held": gate.hold(run_dir.with_name("held"))}}
    of_job = {"options": held | options.pop("of_job", {}), "n_logical_workers": 4, "micro_batch_size": 4}
    job = ElasticTrainer(f"{RECOVERING}:model", "adam", run_dir=run_dir, **of_job, **names)
    result = job.run(8, mapping, launcher=launcher, on_event=gate, **options)
    steps = result.steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])
    columns = ["loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]
    return result, steps[columns[:1]].to_numpy().tolist(), steps[columns].to_numpy().tolist()[-4:]


def sharing(launcher, n_processes):
    """Return a launcher whose processes share one GPU."""
    return replace(launcher, gpus=(0,) * n_processes)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_elastic_training_survives_a_loss_on_a_gpu_that_its_processes_share(launcher, tmp_path, zero_stage):
    _, *straight = surviving(tmp_path / "straight", launcher, "0,1,2,3")
    gate = Gate(("sum", 3, [1]), enters={5: 3})
    options = {"survives": 1, "n_replacements": 1, "zero_stage": zero_stage, "hang_s": 60.0}
    result, *changed = surviving(tmp_path / "run", sharing(launcher, 3), "0,1/2/3", gate, **options)
    assert changed == straight and not gate.faults
    assert list(result.reconfigurations["cause"]) == ["start", "recovery", "join"]


@pytest.mark.devices(2)
def test_elastic_training_survives_a_loss_on_gpus_of_its_own(launcher, tmp_path):
    _, *straight = surviving(tmp_path / "straight", launcher, "0,1,2,3")
    gate = Gate(("contexts", 3, [1]), enters={5: 2})
    options = {"survives": 1, "n_replacements": 1, "hang_s": 60.0}
    result, *changed = surviving(tmp_path / "run", launcher, "0,1/2,3", gate, **options)
    assert changed == straight
    assert list(result.reconfigurations["cause"]) == ["start", "recovery", "join"]


def test_a_loop_of_its_own_survives_a_loss_on_a_gpu(launcher, tmp_path):
    def losses(run_dir, launcher, mapping, faults, **options):
        (tmp_path / f"notes-{run_dir}").mkdir()
        of_loop = {"folder": str(tmp_path / f"notes-{run_dir}"), "faults": faults}
        job = ElasticTrainer(
            loop=f"{SURVIVING}:train", run_dir=tmp_path / run_dir, n_logical_workers=4, micro_batch_size=4,
            options={"loop": of_loop},
        )  # fmt: skip
        steps = job.run(6, mapping, launcher=launcher, **options).steps
        return steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])["loss_hex"]

    straight = losses("straight", launcher, "0,1,2,3", [])
    changed = losses("run", sharing(launcher, 2), "0/1,2,3", [("second turn", 3, 0)], survives=1, hang_s=60.0)
    assert list(changed) == list(straight)
    assert len((tmp_path / "run" / "recoveries.csv").read_text().splitlines()) == 2


@pytest.mark.cuda_only
def test_a_process_whose_gpu_fails_ends_and_the_others_continue(launcher, tmp_path, caplog):
    _, *straight = surviving(tmp_path / "straight", launcher, "0,1,2,3")
    of_job = {"loss": {"breaks": {"process": 1, "calls": 7}}}
    _, *changed = surviving(
        tmp_path / "run", sharing(launcher, 2), "0,1/2,3", survives=1, hang_s=60.0, of_job=of_job
    )
    assert changed == straight
    assert "process 1 ended: " in caplog.text


@pytest.mark.cuda_only
def test_copies_to_the_host_have_what_was_there_when_they_began(device):
    where = torch.device(device, 0)
    copies, made = HostCopies(where), []
    for number in range(8):
        vector = torch.full((1 << 22,), float(number), device=where)
        made.append(copies.start([vector])[0])
        del vector  # its memory may be used again before it is copied, by somebody who waits
        torch.full((1 << 22,), -1.0, device=where)
        synchronize(where)
    copies.finish()
    assert all(one.is_pinned() and torch.all(one == number) for number, one in enumerate(made))


def test_resilient_training_goes_on_from_its_checkpoint_where_every_copy_is_lost(launcher, tmp_path):
    options = {"n_nodes": 1, "f": 0, "n0": 1, "checkpoint_every": 2, "launcher": launcher}
    with pytest.raises(MakespanError):
        run(tmp_path, 8, [Fault("forward", 5, 0)], **options)
    result, _ = run(tmp_path, 8, **options)
    assert result.iterations["iteration"].tolist() == [4, 5, 6, 7]
    ((_, plan),) = result.plans
    np.testing.assert_allclose(result.iterations["loss"], replayed([(0, plan)], 8)[0][4:], rtol=1e-4)


@pytest.mark.devices(2)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduction"])
def test_resilient_training_survives_the_loss_of_one_of_two(launcher, tmp_path, phase):
    options = {"n_nodes": 2, "n0": 1, "policy": "degrade", "launcher": launcher}
    result, (killed,) = run(tmp_path, 8, [Fault(phase, 3, 1)], **options)
    assert killed.phase == phase and result.iterations["iteration"].tolist() == list(range(8))
    np.testing.assert_allclose(result.iterations["loss"], replayed(result.plans, 8)[0], rtol=1e-4)


@pytest.mark.devices(2)
def test_resilient_training_exchanges_the_weights_of_divided_state(launcher, tmp_path):
    options = {"n_nodes": 2, "f": 0, "first_sizes": (1, 1), "zero_stage": 1, "launcher": launcher}
    result, _ = run(tmp_path, 6, **options)
    np.testing.assert_allclose(result.iterations["loss"], replayed(result.plans, 6)[0], rtol=1e-4)


@pytest.mark.devices(3)
@pytest.mark.parametrize("phase", ["committed", "weights"])
def test_resilient_training_with_divided_state_survives_the_loss_of_one_of_three(launcher, tmp_path, phase):
    options = {"n_nodes": 3, "first_sizes": (1, 1, 1), "zero_stage": 1, "launcher": launcher}
    result, (killed,) = run(tmp_path, 8, [Fault(phase, 3, 1)], **options)
    assert killed.phase == phase and result.iterations["iteration"].tolist() == list(range(8))
    np.testing.assert_allclose(result.iterations["loss"], replayed(result.plans, 8)[0], rtol=1e-4)


@pytest.mark.devices(4)
def test_resilient_pipelines_survive_the_loss_of_a_stage(launcher, tmp_path):
    options = {"n_nodes": 4, "first_sizes": (2, 2), "launcher": launcher}
    result, _ = run(tmp_path, 8, [Fault("backward", 3, 3)], **options)
    np.testing.assert_allclose(result.iterations["loss"], replayed(result.plans, 8)[0], rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt", "llama"])
def test_a_schedule_agrees_with_its_model(launcher, family):
    (found,) = verify_schedules([{"family": family, "options": {}}], 1, launcher)
    assert found["is_equal"], found["report"]


@pytest.mark.devices(2)
@pytest.mark.parametrize("family", ["bert", "gpt", "llama"])
def test_a_sharded_schedule_agrees_with_its_model(launcher, family):
    (found,) = verify_schedules([{"family": family, "options": {}}], 2, launcher)
    assert found["is_equal"], found["report"]


@pytest.mark.parametrize(
    "n_processes", [pytest.param(n, marks=pytest.mark.devices(n)) for n in (2, 4)], ids=["2", "4"]
)
def test_plans_share_layers_sequences_experts_and_stages(device, launcher, n_processes):
    with forking_servers():
        on_processes(n_processes, "gpu_cases", ("planned", {"device": device}), launcher=launcher)


def test_the_machine_and_its_devices_are_profiled(device, tmp_path):
    words = ["profile", "--device", device, "--placement", "1", "--repetitions", "1", "--quiet"]
    done = CliRunner().invoke(main, [*words, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    cluster = tomllib.loads((tmp_path / "environment.toml").read_text())["cluster"]
    assert cluster["gpu"]["memory_bandwidth_bytes_per_s"] > 0
    if device == "cuda":
        assert torch.cuda.get_device_name() in cluster["gpu"]["source"]
        host_bytes_per_s = cluster["node"]["pcie_bandwidth_bytes_per_s"]
        assert cluster["gpu"]["memory_bandwidth_bytes_per_s"] > 3 * host_bytes_per_s


@pytest.mark.cuda_only
def test_memory_of_ones_own_model_is_what_each_layout_allocated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(
        "import torch\n"
        "def make(layout, seq, batch):\n"
        "    kept = torch.zeros(layout.micro_batch << 28, dtype=torch.uint8, device='cuda')\n"
        "    return lambda: kept.add_(1)\n"
    )
    words = ["profile", "steps.py:make", "--seq", "8", "--batch", "8", "--output", "out", "--quiet"]
    done = CliRunner().invoke(main, [*words, "--layout", "mb8", "--layout", "mb4"])
    assert done.exit_code == 0, done.output
    with (tmp_path / "out/measured.csv").open() as file:
        # The second layout has half of the memory, not what is left of the first one.
        assert [float(row["memory_gib"]) for row in csv.DictReader(file)] == pytest.approx([2, 1], abs=0.01)


@pytest.mark.parametrize("n_slots", [1, pytest.param(2, marks=pytest.mark.devices(2))])
def test_jobs_are_scheduled_live(device, tmp_path, n_slots):
    jobs = [JobSpec(name, 0.0, "tiny-gpt", n, n, plan, 5) for name, n, plan in JOBS[:n_slots]]
    rows = [("ga", "1", 0.1), ("zero-dp", "2", 0.07)]
    tables = {"tiny-gpt": throughput_rows("tiny-gpt", rows, 1)}
    seeds = {job.job_id: 3 for job in jobs}
    setting = live.LiveSetting("fifo", "live-smoke", n_slots, 0, 3.0, 3.0, 26.0, tuple(jobs), seeds, tables)
    where, launch_on = live.slot_cluster(n_slots), slots_of("local", device, n_slots)
    workers = live.process_trainer(tmp_path, setting, where, launch_on, live.live_settings())
    prediction = live.predict_live(setting, policy("fifo"), where, tmp_path / "prediction.json")
    engine = live.run_live(setting, policy("fifo"), where, workers, tmp_path)
    result = live.compare_live(setting, policy("fifo"), where, engine, prediction)
    assert result.jobs["final_loss"].notna().all() and result.violations == ()
