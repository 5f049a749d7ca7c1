"""Elastic training whose result does not depend on the processes: what a process of a job does.

Importing the package loads nothing; what it shows imports torch.

- `Shards` deals samples to logical workers, and a `LoaderPool` loads them for all that a process hosts; its
  `LoaderState` is independent of both
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.easyscale.runtime._loader import LoaderPool
    from makespan.papers.easyscale.runtime._shards import LoaderState, Shards

__all__ = ["LoaderPool", "LoaderState", "Shards"]

__getattr__ = shown_lazily(__name__, __file__)
