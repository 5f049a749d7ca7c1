"""The verbs ``simulate`` and ``compare``, and their live views in a terminal or a log."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from makespan.cli.options import (
    POLICY_NAMES,
    PROCESSES,
    SECONDS,
    assembled,
    check_target,
    decision_limit_option,
    form_options,
    real,
    say,
    say_rows,
    scenario_options,
    shown_option,
    verdict_lines,
)
from makespan.cli.progress import Panel, PolicyProgress, bar, clock, is_quiet, is_terminal, one_line
from makespan.errors import InputError
from makespan.files import is_stream
from makespan.sim import Allocation, ClusterView, Event, EventKind, JobView, Scenario
from makespan.units import HOUR
from makespan.workloads import JobSpec

if TYPE_CHECKING:
    import pandas as pd

    from makespan.studies import Run


# --- Live views -------------------------------------------------------------------------------------

_FRAME_S = 0.1  # least wall time between two frames in a terminal
_HEARTBEAT_S = 5.0  # longest wall time without a line elsewhere
_N_LINES = 20  # lines of a run elsewhere, besides those
_BAR_WIDTH = 20
_LINE_JOBS = 3  # that a line names
_JOB = "{:<14} {:>4}  {:<13} {:<18} {:>8}  {}"
_LINE = "{:>9} {:>9} {:>8} {:>8} {:>9}  {:>9}  {}"
_RUNNING_HEAD = "running jobs: plan @ node:GPUs (restarts)"
_LINE_HEAD = ("time", "done", "waiting", "running", "GPUs", "avg JCT", _RUNNING_HEAD)
_FINISHED, _SUBMITTED, _READY = (
    kind.value for kind in (EventKind.FINISHED, EventKind.SUBMITTED, EventKind.READY)
)


class LiveView:
    """Observer that shows the cluster: in place in a terminal, elsewhere as occasional lines.

    It sees every event but draws only after some wall clock time, and never while a decision is only partly
    carried out. In a terminal it waits so that the whole run takes about ``pace_s``; ``spent_s`` is the wall
    clock time that drawing and waiting took [s].
    """

    def __init__(self, title: str, jobs: Sequence[JobSpec], stream: TextIO, pace_s: float = 0.0) -> None:
        self.spent_s = 0.0
        self._title = title
        self._submit_s = {job.job_id: job.submit_time_s for job in jobs}
        self._first_s = min(self._submit_s.values(), default=0.0)
        self._stream = stream
        self._panel = Panel(stream) if is_terminal(stream) else None
        self._pace_s = pace_s if self._panel else 0.0
        self._n_done = self._n_submitted = self._n_due = self._n_written = 0
        self._jct_sum_s = 0.0
        self._began = time.perf_counter()
        self._next_frame = self._began

    @property
    def _progress(self) -> float:
        return (self._n_done + self._n_submitted) / (2 * max(len(self._submit_s), 1))

    @property
    def _avg_jct_s(self) -> float:
        return self._jct_sum_s / self._n_done if self._n_done else float("nan")

    def observe(self, event: Event, view: ClusterView) -> None:
        """Count the event, and draw if it is time to."""
        kind = event.kind
        if kind == _FINISHED:
            self._n_done += 1
            self._jct_sum_s += event.time_s - self._submit_s[event.job_id]
        elif kind == _SUBMITTED:
            self._n_submitted += 1
            if len(view.pending) > 1:  # with one pending job, wait for its start, which shows more
                self._maybe_draw(view)
        elif kind == _READY:
            self._maybe_draw(view)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel:
            self._panel.clear()

    def _maybe_draw(self, view: ClusterView) -> None:
        now = time.perf_counter()
        if self._panel is None:
            due = self._progress * _N_LINES >= self._n_due + 1
            if due or now >= self._next_frame + _HEARTBEAT_S:
                self._n_due = int(self._progress * _N_LINES)
                self._next_frame = now
                self._write_line(view)
        else:
            early_s = self._began + self._pace_s * self._progress - now
            if early_s > 0:
                time.sleep(early_s)
            if early_s > 0 or now >= self._next_frame:
                self._panel.show(self._frame(view, self._panel.room()[1]))
                self._next_frame = time.perf_counter() + _FRAME_S
        self.spent_s += time.perf_counter() - now

    def _write_line(self, view: ClusterView) -> None:
        if not self._n_written:
            self._stream.write(f"{one_line(self._title)}\n{_LINE.format(*_LINE_HEAD)}\n")
        self._n_written += 1
        running = _by_submission(view)
        named = ", ".join(
            f"{job.spec.job_id} {held.configuration.plan} @ {_nodes(held)} ({job.restart_count})"
            for job in running[:_LINE_JOBS]
            if (held := job.allocation) is not None
        )
        more = f", and {len(running) - _LINE_JOBS} more" if len(running) > _LINE_JOBS else ""
        cells = (
            clock(view.time_s),
            f"{self._n_done}/{len(self._submit_s)}",
            len(view.pending),
            len(running),
            f"{view.n_gpus - view.n_free_gpus}/{view.n_gpus}",
            clock(self._avg_jct_s),
            named + more,
        )
        self._stream.write(one_line(_LINE.format(*cells).rstrip()) + "\n")
        self._stream.flush()

    def _frame(self, view: ClusterView, rows: int) -> list[str]:
        used, n_jobs = view.n_gpus - view.n_free_gpus, len(self._submit_s)
        running = _by_submission(view)
        lines = [
            self._title,
            "",
            f"time      {clock(view.time_s):<12} makespan so far {clock(view.time_s - self._first_s)}",
            _share_line("jobs", "done", self._n_done, n_jobs)
            + f"  {len(view.pending)} waiting, {len(running)} running",
            _share_line("GPUs", "in use", used, view.n_gpus),
            f"avg JCT   {clock(self._avg_jct_s)}",
            "",
            _JOB.format("running job", "GPUs", "plan", "node:GPUs", "restarts", "state"),
        ]
        room = max(rows - len(lines), 1)
        shown = running if len(running) <= room else running[: room - 1]
        lines += [_job_line(job, view.time_s) for job in shown]
        if len(shown) < len(running):
            lines.append(f"and {len(running) - len(shown)} more")
        return lines


def _share_line(name: str, what: str, count: int, total: int) -> str:
    return f"{name:<9} {f'{count}/{total} {what}':<18} {bar(count / max(total, 1), _BAR_WIDTH)}"


def _by_submission(view: ClusterView) -> list[JobView]:
    return sorted(view.running, key=lambda job: job.index)


def _job_line(job: JobView, now_s: float) -> str:
    held = job.allocation
    if held is None:
        return job.spec.job_id
    state = f"guest at {job.speed:.0%}" if held.is_guest else f"since {clock(job.ready_time_s)}"
    if now_s < job.ready_time_s:
        state = "restarting" if job.restart_count else "starting"
    it = held.configuration
    return _JOB.format(job.spec.job_id, it.n_gpus, it.plan, _nodes(held), job.restart_count, state)


def _nodes(held: Allocation) -> str:
    """Return the devices by node, with equal neighbours joined, ``'0-3:8 5:4'``."""
    groups: list[list[int]] = []
    for node, count in held.shares:
        if groups and groups[-1][1] == node - 1 and groups[-1][2] == count:
            groups[-1][1] = node
        else:
            groups.append([node, node, count])
    return " ".join(f"{first}:{n}" if first == last else f"{first}-{last}:{n}" for first, last, n in groups)


# --- ``simulate`` -----------------------------------------------------------------------------------


@click.command("simulate")
@shown_option(
    "--policy",
    "policy_name",
    default="morphling-work",
    metavar="NAME|FILE",
    shell_complete=POLICY_NAMES,
    help="Scheduling policy: a name that 'makespan policies' lists, or your own file, ./mine.py.",
)
@scenario_options
@decision_limit_option
@click.option("--output", type=click.Path(path_type=Path), help="Directory for events.csv and outcomes.csv.")
@shown_option(
    "--pace",
    "pace_s",
    default=1.5,
    help="In a terminal, slow a short run down to about this time to watch it; 0 for full speed.",
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
    pace_s: float,
    form: str | None,
    **request: Any,
) -> None:
    """Run a workload under a policy and watch it.

    While it runs, this shows running jobs with plan, placement and restarts, GPUs in use, completed jobs,
    average completion time and makespan: in place in a terminal, as lines elsewhere. A summary and the
    verdict of the schedule validator follow. The exit status is 1 if the schedule is impossible.
    """
    from makespan.files import atomic_path
    from makespan.policies import policy
    from makespan.studies import comparison, run
    from makespan.tables import EVENTS, LOSSES, OUTCOMES, write_csv

    by = policy(policy_name).title
    check_target(output, is_directory=True, names=("events.csv", "outcomes.csv", "losses.csv"))
    scenario = assembled(decision_limit_s, request)
    title = f"{by} on {scenario.title}"
    say(scenario.report, err=True)
    if is_quiet() or form is not None:
        done = run(scenario, policy_name)
        wall_s = done.result.wall_s
    else:
        live = LiveView(title, scenario.jobs, sys.stdout, pace_s)
        try:
            done = run(scenario, policy_name, [live])
        finally:
            live.close()
        wall_s = done.result.wall_s - live.spent_s
    if output is not None:
        events_path, outcomes_path = output / "events.csv", output / "outcomes.csv"
        with atomic_path(events_path) as events, atomic_path(outcomes_path) as outcomes:  # both or none
            write_csv(done.result.events, events, EVENTS)
            write_csv(done.result.outcomes, outcomes, OUTCOMES)
        if done.goodput is not None:
            write_csv(done.result.losses, output / "losses.csv", LOSSES)
    if form is not None:
        say_rows(comparison([done], done.policy).to_dict("records"), form)
    else:
        say("\n".join(_summary_lines(title, _knowledge(scenario), done, wall_s)))
    say("\n".join(verdict_lines(done)), err=form is not None)
    if output is not None:
        more = "" if done.goodput is None else ", losses.csv"
        say(f"{output}: events.csv, outcomes.csv{more}", err=form is not None)
    if done.violations:
        ctx.exit(1)


def _knowledge(scenario: Scenario) -> str:
    """Return what policies know, and the rule of placement if it is not the usual one."""
    placement = "" if scenario.placement == "best-fit" else f", placement: {scenario.placement}"
    return f"knowledge: {scenario.predictions}{placement}"


def _summary_lines(title: str, knowledge: str, done: "Run", wall_s: float) -> list[str]:
    metrics, result = done.metrics, done.result
    times = {
        "average JCT": metrics.avg_jct_s,
        "median JCT": metrics.p50_jct_s,
        "95th percentile of JCT": metrics.p95_jct_s,
        "99th percentile of JCT": metrics.p99_jct_s,
        "makespan": metrics.makespan_s,
        "average time to first start": metrics.avg_queueing_delay_s,
    }
    rounds = f"rounds of {done.interval_s:g} s" if done.interval_s else "decisions after each event"
    lines = ["", title, f"restart delay {done.restart_delay_s:g} s, {rounds}, {knowledge}", ""]
    lines += [f"{name:<28} {value:>12.1f} s   {clock(value):>10}" for name, value in times.items()]
    sla = metrics.sla_attainment
    return [
        *lines,
        f"{'GPU allocation ratio':<28} {metrics.gpu_allocation_ratio:>12.1%}",
        f"{'starts and restarts per job':<28} {metrics.reconfigurations_per_job:>12.2f}",
        f"{'guarantees kept':<28} {f'{sla:.1%}' if sla == sla else '-':>12}",
        f"{'jobs finished':<28} {metrics.n_jobs:>12}",
        *_failure_lines(done),
        f"{'decisions':<28} {result.n_decisions:>12}",
        f"{'wall clock time':<28} {wall_s:>12.3f} s   policy {result.policy_wall_s:.3f} s",
        "",
    ]


def _failure_lines(done: "Run") -> list[str]:
    """Return what failures cost; nothing if there are no failures and no recovery."""
    goodput = done.goodput
    if goodput is None:
        return []
    return [
        f"{'interruptions of jobs':<28} {goodput.n_interruptions:>12}",
        f"{'goodput':<28} {goodput.ratio:>12.1%}",
        f"{'lost work':<28} {goodput.lost_gpu_s / HOUR:>12.1f} GPU h",
        f"{'time in recovery':<28} {goodput.recovery_s:>12.1f} s   {clock(goodput.recovery_s):>10}",
    ]


# --- ``compare`` ------------------------------------------------------------------------------------

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
_GOODPUT = ("goodput", "goodput", "{:.1%}")
_LEGEND = (
    "JCT, its percentiles, makespan, waiting and wall clock time in s; GPUs: share of GPU time that jobs\n"
    "hold; restarts: per job, with the first start; SLA: guarantees kept; wait: mean time without GPUs;\n"
    "/B: over that of {baseline}"
)
_GOODPUT_LEGEND = "goodput: GPU time of steps that were kept over all that jobs held"
_IDLE = (
    "no job waited for longer than a round under any policy, so this comparison says nothing about queueing; "
    "jobs request at most {most} of {n_gpus} GPUs at a time: raise --load or --jobs, or use fewer --nodes"
)


@click.command("compare")
@shown_option(
    "--policies",
    default="morphling-lookahead,morphling-work,sia,synergy,fifo",
    metavar="NAMES|FILES",
    shell_complete=POLICY_NAMES,
    help="Policies joined by commas, or all; your own files, like ./mine.py, too.",
)
@click.option("--baseline", metavar="NAME", show_default="the first one", help="Baseline of the ratios.")
@scenario_options
@decision_limit_option
@click.option(
    "--workers",
    type=PROCESSES,
    metavar="N",
    show_default="one per processor, one for short runs",
    help="Number of simulations at a time.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for the table (.csv); - for standard output."
)
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
    form: str | None,
    **request: Any,
) -> None:
    """Run a workload under several policies.

    This prints the load, one row per policy with ratios to a baseline, and the verdict of the schedule
    validator. Load is the GPU time that jobs request over that of the cluster while jobs arrive. If a policy
    fails, the others keep their rows, and its error is printed last. Ctrl-C prints the rows of those that are
    done, and writes no file. The exit status is 1 if a policy failed or a schedule is impossible.
    """
    from makespan.studies import (
        Attempt,
        Run,
        RunError,
        SimulationSpec,
        attempt_all,
        comparison,
        demand,
        nobody_waited,
    )
    from makespan.tables import COMPARISON, write_csv

    chosen = _policies_by_name(policies)
    names = tuple(chosen)
    base = names[0] if baseline is None else baseline
    if base not in names:
        raise InputError(f"--baseline {base!r} is not among the policies; expected {', '.join(names)}")
    check_target(output, is_directory=False)
    is_data = form is not None or is_stream(output)  # then standard output has nothing but the table
    scenario = assembled(decision_limit_s, request)
    say(scenario.report, err=True)
    asked = demand(scenario)
    progress, reached = PolicyProgress(names), list[Attempt | None]()

    def follow(shares: Sequence[float], ended: Sequence[Attempt | None]) -> None:
        reached[:] = ended
        progress(shares, ended)

    try:
        cases = [SimulationSpec(scenario, given) for given in chosen.values()]
        attempts = attempt_all(cases, workers, progress=follow, can_spawn=True)
    except KeyboardInterrupt:
        progress.close()
        kept = [item for item in reached if isinstance(item, Run)]
        if kept:
            say(f"{scenario.title}\n{_table_text(comparison(kept, base))}", err=is_data)
            say(f"stopped; {len(kept)} of {len(names)} policies are done; nothing is written", err=True)
        raise click.Abort from None
    finally:
        progress.close()
    done = [item for item in attempts if not isinstance(item, RunError)]
    failures = [item for item in attempts if isinstance(item, RunError)]
    if not done:
        raise failures[0]
    table = comparison(done, base).assign(offered_load=asked.load)
    if output is not None:
        write_csv(table, output, COMPARISON)
    rounds = f"rounds of {scenario.interval_s:g} s" if scenario.interval_s else "decisions after each event"
    setting = f"restart delay {done[0].restart_delay_s:g} s, {rounds}, {_knowledge(scenario)}"
    load = f"load {asked.load:.2f}, " if asked.load == asked.load else ""  # NaN if all jobs come at once
    load += f"at most {asked.most_gpus} of {scenario.cluster.n_gpus} GPUs requested at a time"
    say(f"{scenario.title}\n{setting}\n{load}\n", err=is_data)
    if form is not None:
        say_rows(table.to_dict("records"), form)
    else:
        say(_table_text(table), err=is_data)
    wrong = [item for item in done if item.violations]
    verdict = f"schedules: {len(done) - len(wrong)} of {len(done)} possible"
    n_events = sum(item.n_events for item in done)
    goodput = f"\n{_GOODPUT_LEGEND}" if "goodput" in table else ""
    say(f"\n{_LEGEND.format(baseline=base)}{goodput}\n\n{verdict}, {n_events} events replayed", err=is_data)
    for item in wrong:
        say("\n".join(verdict_lines(item)), err=is_data)
    if output is not None:
        say(f"{output}: {len(table)} rows", err=is_data)
    if nobody_waited(done):
        say(f"Warning: {_IDLE.format(most=asked.most_gpus, n_gpus=scenario.cluster.n_gpus)}", err=True)
    for failure in failures:
        say(f"Error: {failure}", err=True)
    if wrong or failures:
        ctx.exit(1)


def _policies_by_name(text: str) -> dict[str, str]:
    """Return the chosen policies by name, each as given on the command line, a name or a file."""
    from makespan.policies import policy, policy_names

    parts = policy_names() if text.strip() == _ALL else [part.strip() for part in text.split(",")]
    chosen: dict[str, str] = {}
    for given in dict.fromkeys(parts):
        name = policy(given).name
        if name in chosen and policy(given) is not policy(chosen[name]):
            both = f"{chosen[name]} and {given} are both named {name!r}"
            raise InputError(f"--policies: {both}; expected policies with different names")
        chosen.setdefault(name, given)
    return chosen


def _table_text(table: "pd.DataFrame") -> str:
    """Format the table for people; missing values are dashes."""
    shown = [column for column in (*_COLUMNS, _GOODPUT) if column[0] in table]
    cells = [[title for _, title, _ in shown]]
    cells += [
        ["-" if row[name] != row[name] else form.format(row[name]) for name, _, form in shown]
        for row in table.to_dict("records")
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))]) for line in cells
    )
