"""Runs on devices that lose processes have the bits of an undisturbed run, on stand-ins for GPUs."""

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.utils.backend_registration", reason="needs devices written in Python")
if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no devices written in Python", allow_module_level=True)

from elastic_job import last_bits
from forked import own_servers
from killers import Gate
from stand_in_gpu import StandInLauncher

from makespan.easyscale import ElasticTrainer, join_run
from makespan.errors import InputError

pytestmark = pytest.mark.xdist_group("training")

SUPPORT = Path(__file__).parents[1] / "support"
JOB, LOOP = SUPPORT / "recovering_job.py", SUPPORT / "surviving_loop.py"
GPUS = StandInLauncher()


@pytest.fixture(scope="module", autouse=True)
def servers():
    with own_servers():  # they have not loaded a worker that would choose another device
        yield


def parts(run_dir, **options):
    names = {name: f"{JOB}:{name}" for name in ("data", "loss", "after_reduce")}
    return ElasticTrainer(
        f"{JOB}:model", "adam", run_dir=run_dir, n_logical_workers=4, micro_batch_size=4, options=options,
        **names,
    )  # fmt: skip


def loop(run_dir, **options):
    return ElasticTrainer(
        loop=f"{LOOP}:train", run_dir=run_dir, n_logical_workers=4, micro_batch_size=4,
        options={"loop": options},
    )  # fmt: skip


def used(run_dir):
    """Names of the GPUs that processes of a run have had."""
    return sorted(path.name for path in (run_dir / "processes").glob("gpu-*"))


def test_processes_that_are_lost_replaced_or_join_cost_no_bit_with_the_optimizer_in_shards(tmp_path):
    """One of three processes is replaced, on its GPU; another one joins, on a GPU that is free."""

    def join():
        for gpu in (1, 3):
            try:
                ended.append(join_run(tmp_path / "run", StandInLauncher(gpus=(gpu,))))
            except InputError as error:
                ended.append(str(error))

    ended, joining = [], threading.Thread(target=join, daemon=True)
    straight = parts(tmp_path / "straight").run(9, "0,1,2,3", launcher=GPUS)
    gate = Gate(("sum", 3, [1]), enters={5: 3, 7: 4}, acts=[("forward", 6, joining.start)])
    job = parts(tmp_path / "run", model={"held": gate.hold(tmp_path / "held")})
    options = {"survives": 1, "zero_stage": 1, "n_replacements": 1, "on_event": gate}
    result = job.run(9, "0,1/2/3", launcher=GPUS, **options)
    assert not gate.faults and last_bits(result) == last_bits(straight)
    assert list(result.reconfigurations["cause"]) == ["start", "recovery", "join", "join"]
    joining.join()
    refused, finished = ended
    assert refused.startswith(
        "another process of the run has the GPU of this one, stand-in GPU (1); expected"
    )
    assert finished == "finished"
    assert used(tmp_path / "run") == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]


def test_a_loop_that_loses_a_process_keeps_its_bits(tmp_path):
    straight = loop(tmp_path / "straight").run(6, "0,1,2,3", launcher=GPUS)
    (notes := tmp_path / "notes").mkdir()
    losing = loop(tmp_path / "run", folder=str(notes), faults=[("second turn", 3, 0)])
    result = losing.run(6, "0/1,2,3", survives=1, launcher=GPUS)
    assert last_bits(result) == last_bits(straight)
    assert list(result.reconfigurations["cause"]) == ["start", "recovery"]
    assert used(tmp_path / "run") == ["gpu-0", "gpu-1"]


def test_a_process_whose_device_fails_ends_and_the_others_continue(tmp_path, caplog):
    straight = parts(tmp_path / "straight").run(6, "0,1,2,3", launcher=GPUS)
    job = parts(tmp_path / "run", loss={"breaks": {"process": 1, "calls": 7}})
    result = job.run(6, "0,1/2,3", survives=1, launcher=GPUS)
    assert last_bits(result) == last_bits(straight)
    assert "process 1 ended: RuntimeError: the stand-in for a GPU is broken" in caplog.text
    (row,) = (tmp_path / "run" / "recoveries.csv").read_text().splitlines()[1:]
    assert row.startswith("1,3,lost,1,")
