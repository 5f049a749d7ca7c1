"""Many validated simulations: a scenario as a value, a pool that runs it, comparisons with intervals."""

from makespan.studies._catalogue import TableCatalogue

__all__ = ["TableCatalogue"]
