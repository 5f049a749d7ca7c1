"""Exported weights are read by the safetensors package."""

import pytest

torch = pytest.importorskip("torch")
load_file = pytest.importorskip(
    "safetensors.torch", reason="the safetensors package is missing; make hf-test installs it"
).load_file

from makespan.errors import InputError
from makespan.training.weights import copy_weights, write_weights

pytestmark = pytest.mark.hf


@pytest.fixture
def state():
    """Two names of one weight, a part of another tensor, a transposed one, 16 bits and a counter."""
    tied = torch.randn(4, 3)
    return {
        "embedding.weight": tied,
        "head.weight": tied,
        "row": torch.randn(4, 3)[1],
        "turned": torch.randn(4, 3).T,
        "half": torch.randn(2).bfloat16(),
        "count": torch.tensor(7),
    }


def test_all_tensors_come_back_with_their_bits(state, tmp_path):
    path = write_weights(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    again = copy_weights(tmp_path / "model.pt", tmp_path / "again.safetensors")
    for written in (path, again):
        found = load_file(written)
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_is_no_tensor_is_refused_by_name_and_nothing_is_written(state, tmp_path):
    with pytest.raises(InputError, match=r"^.version. of the model is of type str, which \.safetensors"):
        write_weights(state | {"version": "1"}, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
