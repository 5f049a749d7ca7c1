"""The modules of the built-in primitives; importing this one registers them."""

from makespan.slapo import _annotate as _annotate
from makespan.slapo import _checkpoint as _checkpoint
from makespan.slapo import _cut as _cut
from makespan.slapo import _find as _find
from makespan.slapo import _fork_rng as _fork_rng
from makespan.slapo import _fused as _fused
from makespan.slapo import _linear as _linear
from makespan.slapo import _replace as _replace
from makespan.slapo import _shard as _shard
from makespan.slapo import _sync as _sync
from makespan.slapo import _trace as _trace

__all__: list[str] = []
