"""The modules of the built-in primitives; importing this one registers them."""

from makespan.papers.slapo.language import _annotate as _annotate

__all__: list[str] = []
