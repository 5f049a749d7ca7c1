"""Export the model of a resilient run as a plain ``state_dict``."""

from pathlib import Path

import torch

from makespan.errors import CheckpointError
from makespan.files import read_json
from makespan.oobleck.worker import layer_file
from makespan.runtime import sound_checkpoint
from makespan.training.weights import check_weights_path, write_weights


def export_model(run_dir: str | Path, path: str | Path) -> Path:
    """Write the model of the newest checkpoint as a plain ``state_dict``.

    Its keys are those of ``torch.nn.Sequential`` over the layers of the chain, such as ``0.weight`` for the
    weight of the first layer. A tied weight occurs in each of its layers. Buffers that a layer does not save
    (``persistent=False``) are left out.

    Parameters
    ----------
    run_dir, path
        Directory of the run, and the file to write: ``.safetensors``, if that package is installed, or a file
        that ``torch.load`` reads with ``weights_only=True``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    makespan.errors.CheckpointError
        There is no checkpoint, or every checkpoint is damaged.
    makespan.errors.InputError
        The file is to be ``.safetensors``, and the package is missing or an entry is not a tensor; or it is
        a file of the run itself.
    """
    check_weights_path(path, run_dir)
    checkpoint = sound_checkpoint(Path(run_dir) / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(
            f"run_dir is {run_dir}, which has no checkpoint; expected the directory of a run with one"
        )
    state = {}
    for layer in range(sum(name.endswith(".pt") for name in checkpoint.checksums)):
        file = checkpoint.path / layer_file(layer)
        parts = torch.load(file, map_location="cpu", weights_only=True)
        left_out = set(read_json(file.with_suffix(".json")) or ())
        for key, value in parts.items():
            kind, _, name = key.partition("/")
            if kind in ("parameter", "buffer") and name not in left_out:
                state[f"{layer}.{name}"] = value
    return write_weights(state, path)
