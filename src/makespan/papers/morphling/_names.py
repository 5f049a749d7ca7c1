"""Names that several experiments share."""

__all__ = ["MORPHLING", "NAIVE", "WORKLOADS"]

MORPHLING = "Morphling"
"""The strategy and scheduler that asks the performance model and learns from its runs."""

NAIVE = "naive"
"""The short job list for getting started."""

WORKLOADS = (NAIVE, "base", "bp", "mt")
"""Names of all job lists: the short one; user-chosen plans, best plans, guarantees for a part."""
