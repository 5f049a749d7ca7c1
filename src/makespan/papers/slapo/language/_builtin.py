"""The modules of the built-in primitives; importing this one registers them."""

from makespan.papers.slapo.language import _annotate as _annotate
from makespan.papers.slapo.language import _checkpoint as _checkpoint
from makespan.papers.slapo.language import _cut as _cut
from makespan.papers.slapo.language import _find as _find
from makespan.papers.slapo.language import _fork_rng as _fork_rng
from makespan.papers.slapo.language import _fused as _fused
from makespan.papers.slapo.language import _linear as _linear
from makespan.papers.slapo.language import _replace as _replace
from makespan.papers.slapo.language import _shard as _shard
from makespan.papers.slapo.language import _sync as _sync
from makespan.papers.slapo.language import _trace as _trace

__all__: list[str] = []
