"""Embeddings of which each process has a part of the rows, and vocabularies that divide among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.slapo._errors import ArgumentError, ConflictError, PathError
from makespan.slapo._layouts import sharding_of

__all__ = ["VocabularyPart", "pad_vocabulary"]


class VocabularyPart(nn.Module):
    """An embedding that has the rows from ``first_row`` on, and zeros for the ids of other rows."""

    first_row = 0

    if TYPE_CHECKING:
        weight: nn.Parameter
        num_embeddings: int
        padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the ids that are this process's own."""
        is_own = (ids >= self.first_row) & (ids < self.first_row + self.num_embeddings)
        rows = F.embedding(torch.where(is_own, ids - self.first_row, 0), self.weight, self.padding_idx)
        return rows * is_own.unsqueeze(-1).to(rows.dtype)


def pad_vocabulary(model: nn.Module, paths: Sequence[str], multiple: int) -> int:
    """Enlarge a vocabulary so that it divides among processes, before a model is scheduled.

    The new rows are zero: no id leads to them, and the logits that they add are for the loss to leave out.

    Parameters
    ----------
    model
        Any model, on any device; it is changed.
    paths
        All its modules that have a row for each token: embeddings, and linear layers that return logits.
        What is tied among them stays tied.
    multiple
        What the size shall be a multiple of, Megatron-LM takes 128 times the number of processes.

    Returns
    -------
    The new size.

    Raises
    ------
    PathError
        There is no such module; also a `KeyError`.
    ArgumentError
        A module is no embedding or linear layer, sizes differ, or ``multiple`` is less than one; also a
        `ValueError`. The model is as it was.
    ConflictError
        A module is sharded already; also a `RuntimeError`.
    """
    layers = [(path, _table(model, path)) for path in paths]
    sizes = {len(layer.weight) for _, layer in layers}
    if len(sizes) != 1 or multiple < 1:
        found = ", ".join(f"{path!r} with {len(layer.weight)}" for path, layer in layers) or "no path"
        raise ArgumentError(
            f"pad_vocabulary: {found} to a multiple of {multiple}; accepted: one size, and 1 or more"
        )
    missing = -sizes.pop() % multiple
    padded: dict[int, nn.Parameter] = {}
    for _, layer in layers:
        for name, old in list(layer.named_parameters(recurse=False)):
            if id(old) not in padded:
                rows = torch.cat([old.detach(), old.new_zeros(missing, *old.shape[1:])])
                padded[id(old)] = nn.Parameter(rows, old.requires_grad)
                vars(padded[id(old)]).update(vars(old))
            setattr(layer, name, padded[id(old)])
        size = len(layer.weight)
        if isinstance(layer, nn.Embedding):
            layer.num_embeddings = size
        else:
            layer.out_features = size
    return size


def _table(model: nn.Module, path: str) -> nn.Embedding | nn.Linear:
    try:
        layer = model.get_submodule(path)
    except AttributeError as error:
        raise PathError(f"pad_vocabulary: no module {path!r}; {error}") from None
    if not isinstance(layer, nn.Embedding | nn.Linear):
        raise ArgumentError(
            f"pad_vocabulary: {path!r} is a {type(layer).__name__}; accepted: an embedding or a linear layer"
        )
    if sharding_of(layer).tensors:
        raise ConflictError(f"pad_vocabulary: {path!r} is sharded already; accepted: pad first")
    return layer
