"""Write the weights of a model as a file that other programs read; torch is loaded only where needed."""

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from makespan.errors import InputError
from makespan.files import atomic_path

_SAFETENSORS = ".safetensors"
_EXPORTED = (".pt", ".pth", ".bin", ".ckpt", _SAFETENSORS)  # no file of a run but in its folders


def check_weights_path(path: str | Path, run_dir: str | Path | None = None) -> None:
    """Raise an `InputError` if a file cannot be written in the format that its suffix names.

    Weights that were exported to the directory of a run may be replaced, the files of the run itself not.
    """
    if run_dir is not None and Path(path).exists():
        file, folder = Path(path).resolve(), Path(run_dir).resolve()
        is_of_run = file.parent != folder or file.suffix not in _EXPORTED
        if folder in file.parents and is_of_run:
            raise InputError(f"output is {path}, which is a file of the run; expected another one")
    if Path(path).suffix == _SAFETENSORS and find_spec("safetensors") is None:
        raise InputError(
            f"output is {path}, but the package safetensors is not installed; expected it, or a file with "
            "another suffix, which torch.load reads"
        )


def write_weights(state: Mapping[str, Any], path: str | Path) -> Path:
    """Write a ``state_dict`` to a file, in the format that its suffix names, and return the file.

    ``.safetensors`` is the format of the package of that name; a tied weight is written once for each of its
    names, because the format has no shared memory. With any other suffix, ``torch.load`` reads the file with
    ``weights_only=True``.

    Raises
    ------
    makespan.errors.InputError
        The package ``safetensors`` is missing, or an entry is not a tensor, which its format cannot hold.
    """
    import torch

    check_weights_path(path)
    if Path(path).suffix != _SAFETENSORS:
        with atomic_path(path) as target:
            torch.save(dict(state), target)
        return Path(path)
    from safetensors.torch import save_file

    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{key!r} of the model is of type {type(value).__name__}, which {_SAFETENSORS} cannot hold; "
                "expected tensors alone, or a file with another suffix"
            )
    with atomic_path(path) as target:
        # Copies, because the package refuses tensors that share memory.
        save_file({key: value.detach().clone().contiguous() for key, value in state.items()}, target)
    return Path(path)


def copy_weights(source: Path, path: str | Path) -> Path:
    """Write a file of ``torch.save`` again, in the format that the suffix of ``path`` names."""
    if Path(path).suffix == _SAFETENSORS:
        import torch

        return write_weights(torch.load(source, map_location="cpu", weights_only=True), path)
    with atomic_path(path) as target:
        shutil.copyfile(source, target)
    return Path(path)
