"""One package a paper: its experiments as functions from tables to tables, its figures and its claims."""

from makespan.papers._figure import FigureEntry, figures

__all__ = ["FigureEntry", "figures"]
