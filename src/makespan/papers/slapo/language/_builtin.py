"""The modules of the built-in primitives; importing this one registers them."""

from makespan.papers.slapo.language import _annotate as _annotate
from makespan.papers.slapo.language import _shard as _shard
from makespan.papers.slapo.language import _sync as _sync

__all__: list[str] = []
