"""One package a paper: its experiments as functions from tables to tables, and its claims."""

__all__: list[str] = []
