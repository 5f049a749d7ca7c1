"""Which samples a logical worker gets, and where it is in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from makespan.errors import InputError

__all__ = ["LoaderState", "Shards"]


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a logical worker is in its data, and what its loaders draw next; the same for all hosts.

    Parameters
    ----------
    epoch, batch
        The batch that comes next.
    streams
        Random states of each of the W loaders before its next batch; None for one that has made none in
        this epoch.
    """

    epoch: int
    batch: int
    streams: tuple[bytes | None, ...]

    def values(self) -> dict[str, Any]:
        """Return the state as plain values and uint8 tensors, for a checkpoint."""
        streams = [
            None if one is None else torch.frombuffer(bytearray(one), dtype=torch.uint8)
            for one in self.streams
        ]
        return {"epoch": self.epoch, "batch": self.batch, "streams": streams}

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> "LoaderState":
        """Return the state of which these are the `values`."""
        streams = (None if one is None else one.numpy().tobytes() for one in values["streams"])
        return LoaderState(int(values["epoch"]), int(values["batch"]), tuple(streams))


@dataclass(frozen=True, slots=True)
class Shards:
    """How samples are dealt to logical workers; part of what a job is, because it decides the bits.

    Parameters
    ----------
    n_logical_workers
        N; the samples of an epoch are dealt as `torch.utils.data.DistributedSampler` does.
    micro_batch_size
        Samples of a batch of one logical worker.
    seed
        Seed of the order of samples, with the epoch, and of the loaders, with virtual rank and epoch.
    n_loaders
        W, loaders of each logical worker; with 0 its samples are read in the training process, with the
        random states that are there.
    shuffle
        Whether samples are dealt in a new random order each epoch.
    drop_last_samples
        Whether samples that do not go round are left out; otherwise the first ones are dealt again.
    drop_last_batch
        Whether a last batch of less than full size is left out.

    Raises
    ------
    InputError
        If a number is out of range.
    """

    n_logical_workers: int
    micro_batch_size: int
    seed: int
    n_loaders: int = 2
    shuffle: bool = True
    drop_last_samples: bool = False
    drop_last_batch: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("n_logical_workers", 1), ("micro_batch_size", 1), ("n_loaders", 0), ("seed", 0)):
            if getattr(self, name) < least:
                found = getattr(self, name)
                raise InputError(f"{name} is {found}; accepted: a whole number >= {least}")

    def start(self) -> LoaderState:
        """Return the state of a logical worker that has read nothing."""
        return LoaderState(0, 0, (None,) * self.n_loaders)

    def batches(self, dataset: Any, rank: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the samples of each batch of a logical worker in an epoch.

        Parameters
        ----------
        dataset
            The data set, of which only the length is used.
        rank
            Virtual rank.
        epoch
            Epoch, from 0.

        Returns
        -------
        list of tuple of int
            Indices of samples; as many batches, of the same sizes, for every rank.

        Raises
        ------
        InputError
            If the data set has no length, or too few samples for a single batch.
        """
        if not hasattr(dataset, "__len__"):
            found = type(dataset).__name__
            raise InputError(f"data set {found} has no length; accepted: a map-style data set")
        size, per_batch, n_workers = len(dataset), self.micro_batch_size, self.n_logical_workers
        least = (n_workers if self.drop_last_samples else 1) * (per_batch if self.drop_last_batch else 1)
        if self.drop_last_batch and not self.drop_last_samples:
            least = n_workers * (per_batch - 1) + 1
        if size < least:
            raise InputError(
                f"data set has {size} samples; accepted: at least {least}, for one batch of {per_batch} to "
                f"each of {n_workers} logical workers"
            )
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, n_workers, rank, self.shuffle, self.seed, drop_last=self.drop_last_samples
        )
        sampler.set_epoch(epoch)
        dealt = list(sampler)
        end = len(dealt) - len(dealt) % per_batch if self.drop_last_batch else len(dealt)
        return [tuple(dealt[first : first + per_batch]) for first in range(0, end, per_batch)]
