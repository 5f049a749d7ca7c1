"""Processes that work together: launch, rendezvous, watch, run directory, checkpoint files, machine facts."""
