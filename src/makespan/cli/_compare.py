"""The verb ``compare``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from makespan.cli._numbers import PROCESSES
from makespan.cli._options import check_target, scenario_options, shown_option, verdict_lines
from makespan.cli._output import say
from makespan.errors import InputError

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
    default="morphling,morphling-work,sia,synergy,fifo",
    metavar="NAMES",
    help="Joined by commas, or all.",
)
@click.option(
    "--baseline", metavar="NAME", show_default="the first one", help="Policy that ratios compare with."
)
@scenario_options
@click.option(
    "--workers",
    type=PROCESSES,
    metavar="N",
    show_default="one a processor, one for short runs",
    help="Processes.",
)
@click.option("--output", type=click.Path(path_type=Path), help="File for the table (.csv).")
@click.option("--quiet", is_flag=True, help="No progress, only the table.")
@click.pass_context
def compare_command(
    ctx: click.Context,
    /,
    policies: str,
    baseline: str | None,
    workers: int | None,
    output: Path | None,
    quiet: bool,
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

    names = _names(policies)
    base = names[0] if baseline is None else baseline
    if base not in names:
        raise InputError(f"--baseline {base!r} does not take part; accepted: {', '.join(names)}")
    check_target(output, is_directory=False)
    scenario = assemble(**request)
    say(scenario.report, err=True)
    progress = None if quiet else Progress(names)
    try:
        cases = [Case(scenario, name) for name in names]
        done = run_all(cases, workers, progress=progress, is_strict=False, can_spawn=True)
    finally:
        if progress is not None:
            progress.close()
    table = comparison(done, base)
    if output is not None:
        write_csv(table, output, COMPARISON)
    rounds = f"rounds of {scenario.interval_s:g} s" if scenario.interval_s else "decisions after each event"
    setting = f"restart delay {done[0].restart_delay_s:g} s, {rounds}, by {scenario.predictions} times"
    say(f"{scenario.title}\n{setting}\n")
    say(_text(table))
    wrong = [item for item in done if item.violations]
    verdict = f"schedules: {len(done) - len(wrong)} of {len(done)} possible"
    n_events = sum(item.n_events for item in done)
    say(f"\n{_LEGEND.format(baseline=base)}\n\n{verdict}, {n_events} events replayed")
    for item in wrong:
        say("\n".join(verdict_lines(item)))
    if output is not None:
        say(f"{output}: {len(table)} rows")
    if wrong:
        ctx.exit(1)


def _names(text: str) -> tuple[str, ...]:
    """Return the policies that are named, each once."""
    from makespan.policies import policy, policy_names

    if text.strip() == _ALL:
        return policy_names()
    return tuple(policy(name).name for name in dict.fromkeys(part.strip() for part in text.split(",")))


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
