"""The entry point and the list of its verbs."""

import click

from makespan import __version__
from makespan.cli._group import LazyGroup

__all__ = ["VERBS", "main"]

VERBS = {
    "simulate": (
        "makespan.cli._simulate:simulate_command",
        "Run a workload under a policy and watch it.",
    ),
    "compare": (
        "makespan.cli._compare:compare_command",
        "Run a workload under several policies.",
    ),
    "policies": ("makespan.cli._policies:policies_command", "List the scheduling policies."),
    "emulate": ("makespan.cli._emulator:emulate_command", "Write emulated traces, one a workload."),
    "explain": (
        "makespan.cli._emulator:explain_command",
        "Print every term of one point, and its memory.",
    ),
    "calibrate": (
        "makespan.cli._calibration:calibrate_command",
        "Fit the constants of the emulator to measured traces.",
    ),
    "validate": (
        "makespan.cli._calibration:validate_command",
        "Compare the emulator with measured traces under every protocol.",
    ),
    "profile": (
        "makespan.cli._profile:profile_command",
        "Time small workloads under every plan on this machine.",
    ),
    "live": (
        "makespan.cli._live_run:live_command",
        "Train the jobs of a workload under a policy, and compare with the simulation of the same.",
    ),
    "config": ("makespan.config.command:config_command", "Check a configuration and print it whole."),
}
"""Where each verb is defined, and what it does in one line."""


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For example: makespan simulate --workload naive; "
    "makespan compare --policies morphling-work,sia,fifo --workload base; "
    "makespan explain llama7 244 8888",
)
@click.version_option(__version__, prog_name="makespan")
def main() -> None:
    """Simulate shared GPU clusters, emulate a GPU testbed, and check the emulator."""
