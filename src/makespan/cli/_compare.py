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
    ("wall_s", "wall", "{:.2f}"),
)
_LEGEND = (
    "JCT, its percentiles, makespan and wall clock time in s; GPUs: share of their time that jobs hold\n"
    "them; restarts: of a job, the first start included; SLA: guarantees kept; /B: over that of {baseline}"
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

    Prints one row a policy, ratios to one of them, and the verdict of the
    schedule validator. The exit status is 1 if a schedule is impossible.
    """
    from makespan.cli._view import Progress
    from makespan.studies import Case, comparison, run_all
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
    progress = None if quiet else Progress(names)
    try:
        cases = [Case(scenario, given) for given in chosen.values()]
        done = run_all(cases, workers, progress=progress, is_strict=False, can_spawn=True)
    finally:
        if progress is not None:
            progress.close()
    table = comparison(done, base)
    if output is not None:
        write_csv(table, output, COMPARISON)
    rounds = f"rounds of {scenario.interval_s:g} s" if scenario.interval_s else "decisions after each event"
    setting = f"restart delay {done[0].restart_delay_s:g} s, {rounds}, knowledge: {scenario.predictions}"
    say(f"{scenario.title}\n{setting}\n", err=beside)
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
    if wrong:
        ctx.exit(1)


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
