"""Names that several experiments share."""

__all__ = ["MORPHLING"]

MORPHLING = "Morphling"
"""The strategy and scheduler that asks the performance model and learns from its runs."""
