"""The verb ``compare``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from makespan.cli._names import POLICY_NAMES
from makespan.cli._numbers import PROCESSES
from makespan.cli._options import (
    check_target,
    decision_limit_option,
    scenario_options,
    shown_option,
    verdict_lines,
)
from makespan.cli._output import form_options, say, say_rows
from makespan.errors import InputError
from makespan.files import is_stream

if TYPE_CHECKING:
    import pandas as pd

    from makespan.studies import Demand

__all__ = ["compare_command"]

_ALL = "all"

# Column of the table, title, format.
_COLUMNS = (
    ("policy", "policy", "{}"),
    ("avg_jct_s", "avg JCT", "{:.0f}"),
    ("p50_jct_s", "p50", "{:.0f}"),
    ("p99_jct_s", "p99", "{:.0f}"),
    ("makespan_s", "makespan", "{:.0f}"),
    ("gpu_allocation_ratio", "GPUs", "{:.1%}"),
    ("reconfigurations_per_job", "restarts", "{:.2f}"),
    ("sla_attainment", "SLA", "{:.1%}"),
    ("jct_ratio", "JCT/B", "{:.2f}"),
    ("makespan_ratio", "span/B", "{:.2f}"),
    ("avg_waiting_time_s", "wait", "{:.0f}"),
    ("wall_s", "wall", "{:.2f}"),
)
_LEGEND = (
    "JCT, its percentiles, makespan, waiting and wall clock time in s; GPUs: share of their time that jobs\n"
    "hold them; restarts: of a job, the first start included; SLA: guarantees kept; wait: mean time without\n"
    "GPUs; /B: over that of {baseline}"
)
_IDLE = (
    "no job waited for longer than a round under any policy, so this comparison says nothing about queueing; "
    "at most {most} of {n_gpus} GPUs are asked for at a time: raise --load or --jobs, or take fewer --nodes"
)


@click.command("compare")
@shown_option(
    "--policies",
    default="morphling-lookahead,morphling-work,sia,synergy,fifo",
    metavar="NAMES|FILES",
    shell_complete=POLICY_NAMES,
    help="Joined by commas, or all; files of your own like ./mine.py.",
)
@click.option(
    "--baseline", metavar="NAME", show_default="the first one", help="Policy that ratios compare with."
)
@scenario_options
@decision_limit_option
@click.option(
    "--workers",
    type=PROCESSES,
    metavar="N",
    show_default="one a processor, one for short runs",
    help="Processes.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the table (.csv); - for standard output."
)
@click.option("--quiet", is_flag=True, help="No progress, only the table.")
@form_options
@click.pass_context
def compare_command(
    ctx: click.Context,
    /,
    policies: str,
    baseline: str | None,
    decision_limit_s: float,
    workers: int | None,
    output: Path | None,
    quiet: bool,
    form: str | None,
    **request: Any,
) -> None:
    """Run a workload under several policies.

    Prints what the jobs ask for, one row a policy, ratios to one of them, and the verdict of the schedule
    validator. Load is the GPU time of the jobs as requested over that of the cluster while jobs arrive.
    A policy that fails is named last, and the others keep their rows. The exit status is 1 if one failed or
    a schedule is impossible.
    """
    from makespan.cli._view import Progress
    from makespan.studies import Case, RunError, attempt_all, comparison, demand, nobody_waited
    from makespan.studies import scenario as assemble
    from makespan.tables import COMPARISON, write_csv

    chosen = _chosen(policies)
    names = tuple(chosen)
    base = names[0] if baseline is None else baseline
    if base not in names:
        raise InputError(f"--baseline {base!r} does not take part; accepted: {', '.join(names)}")
    check_target(output, is_directory=False)
    beside = form is not None or is_stream(output)  # of the table, which is alone on the standard output
    scenario = replace(assemble(**request), decision_limit_s=decision_limit_s)
    say(scenario.report, err=True)
    asked = demand(scenario)
    progress = None if quiet else Progress(names)
    try:
        cases = [Case(scenario, given) for given in chosen.values()]
        attempts = attempt_all(cases, workers, progress=progress, can_spawn=True)
    finally:
        if progress is not None:
            progress.close()
    done = [item for item in attempts if not isinstance(item, RunError)]
    failures = [item for item in attempts if isinstance(item, RunError)]
    if not done:
        raise failures[0]
    table = comparison(done, base).assign(offered_load=asked.load)
    if output is not None:
        write_csv(table, output, COMPARISON)
    rounds = f"rounds of {scenario.interval_s:g} s" if scenario.interval_s else "decisions after each event"
    setting = f"restart delay {done[0].restart_delay_s:g} s, {rounds}, knowledge: {scenario.predictions}"
    say(f"{scenario.title}\n{setting}\n{_load(asked, scenario.cluster.n_gpus)}\n", err=beside)
    if form is not None:
        say_rows(table.to_dict("records"), form)
    else:
        say(_text(table), err=beside)
    wrong = [item for item in done if item.violations]
    verdict = f"schedules: {len(done) - len(wrong)} of {len(done)} possible"
    n_events = sum(item.n_events for item in done)
    say(f"\n{_LEGEND.format(baseline=base)}\n\n{verdict}, {n_events} events replayed", err=beside)
    for item in wrong:
        say("\n".join(verdict_lines(item)), err=beside)
    if output is not None:
        say(f"{output}: {len(table)} rows", err=beside)
    if nobody_waited(done):
        say(f"Warning: {_IDLE.format(most=asked.most_gpus, n_gpus=scenario.cluster.n_gpus)}", err=True)
    for failure in failures:
        say(f"Error: {failure}", err=True)
    if wrong or failures:
        ctx.exit(1)


def _load(asked: "Demand", n_gpus: int) -> str:
    """Say what the jobs ask for; all at once, they have no load."""
    load = f"load {asked.load:.2f}, " if asked.load == asked.load else ""
    return f"{load}at most {asked.most_gpus} of {n_gpus} GPUs asked for at a time"


def _chosen(text: str) -> dict[str, str]:
    """Return the names of policies, each with the name or file by which it was given."""
    from makespan.policies import policy, policy_names

    parts = policy_names() if text.strip() == _ALL else [part.strip() for part in text.split(",")]
    chosen: dict[str, str] = {}
    for given in dict.fromkeys(parts):
        name = policy(given).name
        if name in chosen and policy(given) is not policy(chosen[name]):
            both = f"{chosen[name]} and {given} are both named {name!r}"
            raise InputError(f"--policies: {both}; accepted: policies with different names")
        chosen.setdefault(name, given)
    return chosen


def _text(table: "pd.DataFrame") -> str:
    """Lay the table out for reading; missing values are dashes."""
    cells = [[title for _, title, _ in _COLUMNS]]
    cells += [[_cell(row[name], form) for name, _, form in _COLUMNS] for row in table.to_dict("records")]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))]) for line in cells
    )


def _cell(value: Any, form: str) -> str:
    return "-" if value != value else form.format(value)
