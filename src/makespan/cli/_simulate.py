"""The verb ``simulate``."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from makespan.cli._names import POLICY_NAMES
from makespan.cli._numbers import SECONDS, real
from makespan.cli._options import (
    check_target,
    decision_limit_option,
    scenario_options,
    shown_option,
    verdict_lines,
)
from makespan.cli._output import form_options, say, say_rows

if TYPE_CHECKING:
    from makespan.studies import Run, Scenario

__all__ = ["simulate_command"]


@click.command("simulate")
@shown_option(
    "--policy",
    "policy_name",
    default="morphling-work",
    metavar="NAME|FILE",
    shell_complete=POLICY_NAMES,
    help="Who decides; 'makespan policies' lists them, or a file of your own, ./mine.py.",
)
@scenario_options
@decision_limit_option
@click.option("--output", type=click.Path(path_type=Path), help="Directory for events.csv and outcomes.csv.")
@click.option("--quiet", is_flag=True, help="No live view, only the summary.")
@shown_option(
    "--pace",
    "pace_s",
    default=1.5,
    help="In a terminal, make a short run last about this long, to be watched; 0 for full speed.",
    **SECONDS | {"type": real(3600, "nobody watches longer")},
)
@form_options
@click.pass_context
def simulate_command(
    ctx: click.Context,
    /,
    policy_name: str,
    decision_limit_s: float,
    output: Path | None,
    quiet: bool,
    pace_s: float,
    form: str | None,
    **request: Any,
) -> None:
    """Run a workload under a policy and watch it.

    Shows running jobs with plan, placement and restarts, GPUs in use, completed jobs, average completion time
    and makespan while it runs, in place in a terminal and as lines elsewhere. Then prints a summary and
    the verdict of the schedule validator. The exit status is 1 if the schedule is impossible.
    """
    from makespan.policies import policy
    from makespan.studies import comparison
    from makespan.studies import scenario as assemble

    by = policy(policy_name).title
    check_target(output, is_directory=True)
    scenario = replace(assemble(**request), decision_limit_s=decision_limit_s)
    title = f"{by} on {scenario.title}"
    say(scenario.report, err=True)
    done, wall_s = _watched(scenario, policy_name, title, quiet or form is not None, pace_s)
    if output is not None:
        _write(done, output)
    if form is not None:
        say_rows(comparison([done], done.policy).to_dict("records"), form)
    else:
        say("\n".join(_summary_lines(title, scenario.predictions, done, wall_s)))
    say("\n".join(verdict_lines(done)), err=form is not None)
    if output is not None:
        say(f"{output}: events.csv, outcomes.csv", err=form is not None)
    if done.violations:
        ctx.exit(1)


def _watched(
    scenario: "Scenario", policy_name: str, title: str, quiet: bool, pace_s: float
) -> "tuple[Run, float]":
    """Run under the eyes of the live view; return the run and its wall clock time without the view [s]."""
    from makespan.cli._view import LiveView
    from makespan.studies import run

    if quiet:
        done = run(scenario, policy_name)
        return done, done.result.wall_s
    live = LiveView(title, scenario.jobs, sys.stdout, pace_s)
    try:
        done = run(scenario, policy_name, [live])
    finally:
        live.close()
    return done, done.result.wall_s - live.spent_s


def _write(done: "Run", directory: Path) -> None:
    """Write both tables, or none."""
    from makespan.tables import EVENTS, OUTCOMES, atomic_path, write_csv

    with atomic_path(directory / "events.csv") as events, atomic_path(directory / "outcomes.csv") as outcomes:
        write_csv(done.result.events, events, EVENTS)
        write_csv(done.result.outcomes, outcomes, OUTCOMES)


def _summary_lines(title: str, predictions: str, done: "Run", wall_s: float) -> list[str]:
    from makespan.cli._view import clock

    found, result = done.metrics, done.result
    times = {
        "average JCT": found.avg_jct_s,
        "median JCT": found.p50_jct_s,
        "95th percentile of JCT": found.p95_jct_s,
        "99th percentile of JCT": found.p99_jct_s,
        "makespan": found.makespan_s,
        "average time to first start": found.avg_queueing_delay_s,
    }
    rounds = f"rounds of {done.interval_s:g} s" if done.interval_s else "decisions after each event"
    lines = ["", title, f"restart delay {done.restart_delay_s:g} s, {rounds}, knowledge: {predictions}", ""]
    lines += [f"{name:<28} {value:>12.1f} s   {clock(value):>10}" for name, value in times.items()]
    sla = found.sla_attainment
    return [
        *lines,
        f"{'GPU allocation ratio':<28} {found.gpu_allocation_ratio:>12.1%}",
        f"{'starts and restarts a job':<28} {found.reconfigurations_per_job:>12.2f}",
        f"{'guarantees kept':<28} {f'{sla:.1%}' if sla == sla else '-':>12}",
        f"{'jobs finished':<28} {found.n_jobs:>12}",
        f"{'decisions':<28} {result.n_decisions:>12}",
        f"{'wall clock time':<28} {wall_s:>12.3f} s   policy {result.policy_wall_s:.3f} s",
        "",
    ]
