"""Checkpoints of scheduled models are read under any layout, with this package and with torch alone."""

import pytest

torch = pytest.importorskip("torch")

import odd_transformers
import torch.distributed.checkpoint as dcp
from forked import forking_servers
from group_worker import on_processes
from saving_cases import adam, trained
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from makespan.errors import CheckpointError
from makespan.slapo import (
    ArgumentError,
    create_schedule,
    init_empty_weights,
    load_sharded,
    save_sharded,
    saving,
)

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of one process: two models with their optimizer, one without, and another model."""
    directory = tmp_path_factory.mktemp("saved")
    for kind in ("Forest", "Harbour"):
        model, optimizer = trained(kind)
        save_sharded(create_schedule(model), directory / kind, step=2, optimizer=optimizer)
    save_sharded(create_schedule(trained("Forest")[0]), directory / "Forest-plain", step=2)
    save_sharded(create_schedule(trained("Harbour")[0]), directory / "Forest-other", step=2)
    return directory


def as_torch_reads_it(directory, kind, steps, target):
    """Compare a checkpoint with one process, by the readers of torch, which know nothing of schedules."""
    expected, optimizer = trained(kind, steps)
    (path,) = directory.glob("step-*")
    dcp_to_torch_save(path, target)
    whole = torch.load(target)
    assert list(whole) == ["model", "optimizer"]
    fresh = odd_transformers.seeded(kind)
    fresh.load_state_dict(whole["model"])
    state = {"model": odd_transformers.seeded(kind).state_dict()}
    dcp.load(state, checkpoint_id=path)
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[key], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(state["model"][key], fresh.state_dict()[key])
    names = dict(expected.named_parameters())
    for name, parameter in names.items():
        found = whole["optimizer"][f"state.{name}.exp_avg"]
        torch.testing.assert_close(found, optimizer.state[parameter]["exp_avg"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Forest", "Harbour"])
def test_what_one_process_wrote_two_read_train_and_write_for_one(kind, written, tmp_path):
    on_processes(
        2, "saving_cases", ("read", {"kind": kind, "layout": "tp", "directory": str(written / kind)})
    )
    as_torch_reads_it(written / f"{kind}-tp", kind, 3, tmp_path / "whole.pt")
    sch = create_schedule(odd_transformers.seeded(kind))
    assert load_sharded(sch, written / f"{kind}-tp", optimizer=adam(sch.mod)) == 3


@pytest.mark.parametrize(("layout", "steps"), [("fsdp", 3), ("pp", 2)])
def test_so_do_sharded_data_parallelism_and_stages(layout, steps, written, tmp_path):
    options = {"kind": "Harbour", "layout": layout, "directory": str(written / "Harbour")}
    on_processes(2, "saving_cases", ("read", options))
    as_torch_reads_it(written / f"Harbour-{layout}", "Harbour", steps, tmp_path / "whole.pt")


def test_four_processes_cut_parts_again_by_sharded_data_parallelism(written, tmp_path):
    options = {"kind": "Forest", "layout": "tp2 fsdp", "directory": str(written / "Forest")}
    on_processes(4, "saving_cases", ("read", options))
    as_torch_reads_it(written / "Forest-tp2-fsdp", "Forest", 3, tmp_path / "whole.pt")


def test_what_does_not_fit_is_refused_by_all_processes(written):
    on_processes(2, "saving_cases", ("refused", {"directory": str(written / "Forest")}))


def test_a_model_without_values_and_a_damaged_checkpoint_are_refused(tmp_path):
    with init_empty_weights():
        empty = create_schedule(odd_transformers.Forest())
    with pytest.raises(ArgumentError, match="has no values; build the model first"):
        save_sharded(empty, tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    sch = create_schedule(odd_transformers.seeded("Forest"))
    path = save_sharded(sch, tmp_path / "one", step=7)
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        load_sharded(sch, tmp_path / "one")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CheckpointError, match="file"):
        save_sharded(sch, tmp_path / "file")


def test_a_part_says_where_it_belongs_and_cannot_be_computed_with():
    part = torch.arange(24.0).view(6, 4)
    shard = saving.TensorShard((12, 4), 0, (8, 4), 1, 2)
    saved = saving.SavedPart(part, shard)
    assert repr(saved) == "SavedPart of (12, 4): (4, 4) at (4, 0), (2, 4) at (10, 0)"
    whole = torch.zeros(12, 4)
    for chunk, piece in saved.boxes:
        whole[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]] = piece
    assert torch.equal(shard.part_of(whole), part)
    with pytest.raises(ArgumentError, match="can be saved and loaded, not computed with"):
        saved + 1
