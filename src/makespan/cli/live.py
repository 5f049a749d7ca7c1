"""The verbs ``profile`` and ``live``: measure small workloads, and train them under a policy."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
import pandas as pd

from makespan import live
from makespan.cli.options import (
    CPU_THREADS,
    PROCESSES,
    SEED,
    check_failure_options,
    check_target,
    decision_limit_option,
    failure_seed_option,
    json_option,
    real,
    reject_others,
    say,
    say_result,
    say_rows,
    whole,
)
from makespan.cli.progress import Countdown, clock, is_quiet
from makespan.errors import InputError
from makespan.files import read_bytes, write_json, write_text
from makespan.perf import load_environment
from makespan.plans import Placement
from makespan.policies import policy
from makespan.profiling import (
    Measurements,
    Procedure,
    environment_text,
    measure_own,
    measure_points,
    measure_rates,
    measured_by,
    measured_on,
    profile_batches,
    profile_points,
    profile_record,
    profile_table,
    profiling_launcher,
    rate_runs,
)
from makespan.profiling.own import process_number
from makespan.runtime import held_directory
from makespan.sim import RECOVERY_KINDS, ClusterView, Event, EventKind, RecoveryKind
from makespan.tables import LIVE, LIVE_FAILURES, LIVE_JOBS, LOSSES, THROUGHPUT, parse_csv, write_csv
from makespan.units import format_seconds
from makespan.workloads import small_workload_keys, workload

# --- ``profile`` ------------------------------------------------------------------------------------

_DEFAULT = Procedure()
_LONGEST = 10_000, "a point would take hours"
_UNFINISHED = "unfinished.jsonl"
_WRITTEN_S = 60.0
"""Longest wait for another call that writes its rows [s]."""
_MEASURED_KEY = ["n_gpus", "layout", "seq", "batch"]


@click.command("profile")
@click.option(
    "--workload",
    "keys",
    multiple=True,
    default=("tiny-gpt",),
    show_default=True,
    type=click.Choice(small_workload_keys()),
    help="Small workload; may be repeated.",
)
@click.option(
    "--placement",
    "placements",
    multiple=True,
    default=("1", "2"),
    show_default=True,
    metavar="N",
    help="Number of processes; may be repeated.",
)
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device to train on; auto: GPUs if there are any.",
)  # fmt: skip
@click.option(
    "--cpu-threads", default=1, show_default=True, type=CPU_THREADS, help="CPU threads per process."
)
@click.option(
    "--warmup", default=_DEFAULT.warmup_steps, show_default=True, type=whole(0, *_LONGEST),
    help="Untimed steps at the start of each run.",
)  # fmt: skip
@click.option(
    "--steps", default=_DEFAULT.steps, show_default=True, type=whole(1, *_LONGEST),
    help="Timed steps of each run.",
)  # fmt: skip
@click.option(
    "--repetitions", default=_DEFAULT.repetitions, show_default=True, type=whole(1, *_LONGEST),
    help="Runs of each plan; their median counts.",
)  # fmt: skip
@click.option(
    "--environment",
    metavar="NAME",
    help="Constants of the machine: a name or a .toml file.  [default: measured]",
)
@click.option(
    "--output",
    default=Path("profile"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to write to.",
)
@click.option(
    "--layout", "layouts", multiple=True, default=("mb1",), show_default=True,
    help="Layout of your own model to time, such as 'tp2 mb1'; may be repeated.",
)  # fmt: skip
@click.option(
    "--seq", default=4096, show_default=True, type=whole(1, 10**8, "no sample has more tokens"),
    help="Tokens of a sample of your own model.",
)  # fmt: skip
@click.option(
    "--batch", default=512, show_default=True, type=whole(1, 10**7, "no step has more samples"),
    help="Samples of a step of your own model, over all GPUs.",
)  # fmt: skip
@json_option
@click.argument("own", required=False, metavar="[FILE.py:FUNCTION]")
@click.pass_context
def profile_command(
    ctx: click.Context,
    /,
    keys: tuple[str, ...],
    placements: tuple[str, ...],
    device: Literal["auto", "cpu", "cuda"],
    cpu_threads: int,
    warmup: int,
    steps: int,
    repetitions: int,
    environment: str | None,
    output: Path,
    layouts: tuple[str, ...],
    seq: int,
    batch: int,
    form: str | None,
    own: str | None,
) -> None:
    """Time small workloads under every plan on this machine, or steps of your own model.

    This writes <workload>.csv, a throughput table, <workload>.json, the record of machine and noise, and
    environment.toml, the constants of the machine for the performance model. After an interrupt, the same
    command resumes and keeps finished measurements.

    With FILE.py:FUNCTION, FUNCTION(layout, seq, batch) returns a function that runs one training step of your
    model; measured.csv gets its times as 'makespan plan --measured' reads them, beside those of earlier
    calls. Start it with torchrun for several GPUs. --layout, --seq and --batch go with it, and so do
    --warmup, --steps and --repetitions.
    """
    check_target(output, is_directory=True)
    reject_others(
        ctx, own is not None, of_own={"layouts", "seq", "batch"}, kinds=("a model of your own", "workloads"),
        shared=("warmup", "steps", "repetitions", "output"),
    )  # fmt: skip
    if own is not None:
        # A synchronous step takes all processes of torchrun as long; the first one reports.
        is_first = process_number("RANK", unset=0) == 0
        written_to = output / "measured.csv"
        earlier = _measured_before(written_to) if is_first else None
        if earlier is not None and not is_quiet():
            say(f"{written_to}: rows of earlier calls are kept, {len(earlier)} so far", err=True)

        def keep(times: pd.DataFrame) -> None:
            with held_directory(output, "profile", _WRITTEN_S):  # another call may have written since
                before = _measured_before(written_to)
                rows = times if before is None else pd.concat([before, times], ignore_index=True)
                write_csv(rows.drop_duplicates(_MEASURED_KEY, keep="last"), written_to)
            last = times.to_dict("records")[-1]
            if form is None:
                say(f"{format_seconds(last['step_s'])} a step, {last['n_gpus']} GPUs: {last['layout']}")

        procedure = Procedure(warmup, steps, repetitions)
        times = measure_own(own, layouts, seq, batch, procedure, keep if is_first else None)
        if is_first and form is not None:
            say_rows(times.to_dict("records"), form)
        return
    places = list(dict.fromkeys(map(_placement, placements)))
    if several := [place.text for place in places if place.n_nodes > 1]:
        raise click.BadParameter(
            f"{', '.join(several)}: several nodes need an allocation; see the rule profile_nodes"
        )
    procedure, launcher = Procedure(warmup, steps, repetitions), profiling_launcher(device, cpu_threads)
    specs = [workload(key) for key in dict.fromkeys(keys)]
    points = {spec.key: profile_points(spec, places, cpu_threads) for spec in specs}
    processes = min(2, max(place.n_gpus for place in places))
    n_runs = repetitions * sum(map(len, points.values()))
    settings = {
        "placements": [place.text for place in places],
        "processes": [launcher.device, cpu_threads],
        "environment": environment,
    }
    countdown, path = Countdown("runs"), output / _UNFINISHED
    written: list[dict[str, object]] = []

    def tell(text: str) -> None:
        countdown.close()
        if not is_quiet():
            say(text, err=True)

    try:
        with held_directory(output, "profile"):
            total = n_runs + (0 if environment else rate_runs(len(specs), processes, launcher))
            kept = Measurements(path, settings | measured_by(specs, procedure), total, countdown, tell)
            if not environment:
                threads = launcher.threads_per_process or 1
                rates = measure_rates(specs, processes, threads, launcher, kept)
                environment = str(output / "environment.toml")
                write_text(environment_text(rates, measured_on(launcher)), environment)
            node = load_environment(environment).node
            for spec in specs:
                parts = [
                    measure_points(spec, batch, node, launcher, procedure, kept=kept)
                    for batch in profile_batches(points[spec.key], None).values()
                ]
                table, record = profile_table(parts, spec), profile_record(parts)
                write_csv(table, output / f"{spec.key}.csv", THROUGHPUT)
                write_json(record, output / f"{spec.key}.json", indent=1)
                noise_pct = record["repeatability_pct"]
                noise = (
                    "the noise is unknown"
                    if noise_pct is None
                    else f"two runs of a point differ by {noise_pct:.1f} %"
                )
                count = f"{int(table['feasible'].sum())} of {len(table)} points ran"
                countdown.close()
                row = {"workload": spec.key, "path": str(output / f"{spec.key}.csv"), "n_points": len(table)}
                written.append(
                    {**row, "n_feasible": int(table["feasible"].sum()), "repeatability_pct": noise_pct}
                )
                if form is None:
                    say(f"{spec.key}: {count}; {noise}")
            kept.remove()
    except KeyboardInterrupt:
        countdown.close()
        say(f"stopped; the same command resumes from {path}", err=True)
        raise click.Abort from None
    finally:
        countdown.close()
    if form is not None:
        say_rows(written, form)


def _measured_before(path: Path) -> pd.DataFrame | None:
    """Return the rows that earlier calls measured, None if there are none."""
    if not path.exists():
        return None
    rows: pd.DataFrame = parse_csv(read_bytes(path, "measured steps"), str(path), "measured steps")
    if missing := [name for name in (*_MEASURED_KEY, "step_s") if name not in rows]:
        raise InputError(f"{path}: lacks {', '.join(missing)}; expected another directory, --output")
    return rows


def _placement(text: str) -> Placement:
    """Read a placement on this machine."""
    place = Placement.parse(text)
    PROCESSES.convert(place.n_gpus, None, None)
    return place


# --- ``live`` ---------------------------------------------------------------------------------------


class _EventLines:
    """Observer that writes one line per event, in wall time.

    ``ends_s`` are the times at which jobs finish in the prediction, in order [s]. The expected end is later
    than predicted by the delay of the last finished job, or by that of the next one if that is larger
    already.
    """

    def __init__(self, setting: live.LiveSetting, ends_s: Sequence[float]) -> None:
        self._scale, self._ends_s = setting.scale, ends_s
        self._submit_s = {job.job_id: job.submit_time_s for job in setting.scaled_jobs()}
        self._late_s = 0.0

    def _end_text(self, event: Event, view: ClusterView) -> str:
        """Return the number of finished jobs, and the time until all are finished."""
        now_s = event.time_s / self._scale
        unfinished = {job.spec.job_id for job in (*view.pending, *view.running)}
        submitted = {name for name, submit_s in self._submit_s.items() if submit_s <= event.time_s}
        n_done = len(submitted - unfinished)
        if event.kind == EventKind.FINISHED and n_done:
            self._late_s = now_s - self._ends_s[n_done - 1]
        if n_done < len(self._ends_s):
            self._late_s = max(self._late_s, now_s - self._ends_s[n_done])
        left_s = max(self._ends_s[-1] + self._late_s - now_s, 0.0)
        return f"{n_done}/{len(self._ends_s)} done, about {clock(left_s)} left"

    def observe(self, event: Event, view: ClusterView) -> None:
        """Write the event, the running and waiting jobs, and the remaining time."""
        plan = f"{event.plan} on {event.n_gpus}" if event.n_gpus else ""
        queue = f"{len(view.running)} running, {len(view.pending)} waiting, {view.n_free_gpus} slot(s) free"
        is_about_steps = event.job_id and event.kind != "submitted"
        left = f"{event.steps_left:.0f} steps left" if is_about_steps else ""
        what = event.job_id or f"node {event.nodes}"
        head = f"{event.time_s / self._scale:7.1f} s  {event.kind:<12} {what:<16}"
        say(f"{head} {plan:<14} {left:<16} {queue}; {self._end_text(event, view)}", err=True)


@click.command("live")
@click.option(
    "--policy",
    "policy_name",
    default="morphling-lookahead",
    show_default=True,
    metavar="NAME|FILE",
    help="Scheduling policy: a name that 'makespan policies' lists, or your own file, ./mine.py.",
)
@click.option("--workload", default="live-small", show_default=True, metavar="NAME", help="Live workload.")
@click.option(
    "--slots", "n_slots", default=2, show_default=True, type=PROCESSES, help="Number of devices to use."
)
@click.option(
    "--nodes", "n_nodes", default=1, show_default=True, type=PROCESSES,
    help="Number of nodes over which the devices are spread evenly; they fail as a whole.",
)  # fmt: skip
@click.option(
    "--failures",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Failures and returns of nodes: columns time_s, in seconds of real time since the start of the run, "
    "node_id, kind (failed, joined), or a trace in Oobleck's form.",
)
@click.option(
    "--failures-per-hour",
    "per_hour",
    type=real(3600, "a node needs longer to fail and return", above=True),
    metavar="N",
    help="Generate failures, so many an hour of real time in the whole cluster; devices fail independently.",
)
@click.option(
    "--repair-seconds",
    "repair_s",
    type=real(10**5, "longer than a run", above=True),
    metavar="SECONDS",
    show_default=f"{live.REPAIR_WALL_S:g}",
    help="With --failures-per-hour: mean real time until a node is back, exponentially distributed.",
)
@failure_seed_option("--failures-per-hour")
@click.option(
    "--recovery",
    default="restart",
    show_default=True,
    type=click.Choice(RECOVERY_KINDS),
    help="What a job does that loses a node or a process: return to its checkpoint, or, as an elastic job "
    "under data parallelism, resume from the memory of its other processes.",
)
@click.option("--seed", default=0, show_default=True, type=SEED, help="Seed of the workload.")
@click.option(
    "--launcher",
    default="local",
    show_default=True,
    type=click.Choice(["local", "slurm"]),
    help="Start processes on this machine, or as steps of the Slurm allocation in which the command runs.",
)
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Device of a slot."
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory for live.csv, live_jobs.csv and live_prediction.json, and live_losses.csv if nodes fail.",
)
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    help="Directory of state and checkpoints and nothing else, removed at the end; an interrupted run "
    "resumes from it. "
    "[default: OUTPUT/live-POLICY]",
)
@decision_limit_option
@json_option
def live_command(
    policy_name: str,
    workload: str,
    n_slots: int,
    n_nodes: int,
    failures: Path | None,
    per_hour: float | None,
    repair_s: float | None,
    failure_seed: int | None,
    recovery: RecoveryKind,
    seed: int,
    launcher: str,
    device: str,
    output: Path,
    work_dir: Path | None,
    decision_limit_s: float,
    form: str | None,
) -> None:
    """Predict how the jobs of a workload run under a policy, train them, and compare."""
    names = ("live.csv", "live_jobs.csv", "live_prediction.json", "live_losses.csv")
    check_target(output, is_directory=True, names=names)
    more: dict[str, float | None] = {"--repair-seconds": repair_s, "--failure-seed": failure_seed}
    check_failure_options(failures, ("--failures-per-hour", per_hour), more)
    generated = None
    if per_hour is not None:
        repair_s = live.REPAIR_WALL_S if repair_s is None else repair_s
        generated = live.live_failures(per_hour, repair_s, 1 if failure_seed is None else failure_seed)
    began = time.monotonic()
    chosen = policy(policy_name)
    work = work_dir or output / f"live-{chosen.name}"

    countdown = Countdown("runs")

    def tell(text: str) -> None:
        countdown.close()
        if not is_quiet():
            say(text, err=True)

    try:
        result = live.live_experiment(
            chosen,
            workload,
            work,
            n_slots=n_slots,
            n_nodes=n_nodes,
            failures=generated or failures,
            recovery=recovery,
            seed=seed,
            launcher=launcher,
            device=device,
            observe=lambda setting, ends_s: [] if is_quiet() else [_EventLines(setting, ends_s)],
            tell=tell,
            progress=countdown,
            decision_limit_s=decision_limit_s,
        )
    except KeyboardInterrupt:
        countdown.close()
        say(f"stopped; the same command resumes from {work}", err=True)
        raise click.Abort from None
    finally:
        countdown.close()
    write_csv(result.comparison, output / "live.csv", LIVE)
    write_csv(result.jobs, output / "live_jobs.csv", LIVE_JOBS)
    write_text(result.prediction.text, output / "live_prediction.json")
    if set(LIVE_FAILURES.names) <= set(result.comparison.columns):
        write_csv(result.live_losses, output / "live_losses.csv", LOSSES)
    for violation in result.violations:
        say(f"invalid schedule: {violation.job_id}: {violation.message}", err=True)
    (row,) = result.comparison.to_dict("records")
    values = {str(name): value for name, value in row.items()}
    say_result(values, _comparison_text(result.comparison, result.jobs), form)
    tell(f"{time.monotonic() - began:.0f} s in total, including the profile")


def _comparison_text(comparison: pd.DataFrame, jobs: pd.DataFrame) -> str:
    row = comparison.to_dict("records")[0]
    titles = f"{'live JCT':>10} {'predicted':>10} {'difference':>11} {'restarts':>9}"
    lines = [f"{'job':<16} {'steps':>6} {titles}"]
    for job in jobs.to_dict("records"):
        live_s, predicted_s = job["live_jct_s"], job["predicted_jct_s"]
        head, difference = f"{job['job_id']:<16} {job['steps']:>6}", 100 * (predicted_s / live_s - 1)
        restarts = f"{job['n_restarts']:>4} ({job['predicted_n_restarts']})"
        lines.append(f"{head} {live_s:>8.1f} s {predicted_s:>8.1f} s {difference:>+9.1f} % {restarts}")
    for title, name, metric in (("average JCT", "avg_jct", "jct"), ("makespan", "makespan", "makespan")):
        live_s, predicted_s = row[f"live_{name}_s"], row[f"predicted_{name}_s"]
        difference = row[f"{metric}_difference_pct"]
        lines.append(f"{title:<23} {live_s:>8.1f} s {predicted_s:>8.1f} s {difference:>+9.1f} %")
    if set(LIVE_FAILURES.names) <= row.keys():
        lines.append(
            f"interruptions: {row['n_interruptions']} ({row['predicted_n_interruptions']} predicted); lost "
            f"steps: {row['lost_steps']:.0f} ({row['predicted_lost_steps']:.0f}); goodput: "
            f"{100 * row['goodput']:.0f} % ({100 * row['predicted_goodput']:.0f} %)"
        )
    delay_s = row["live_restart_delay_s"]  # NaN if every job resumed from memory
    in_run = "unknown in the run" if math.isnan(delay_s) else f"{delay_s:.2f} s in the run"
    lines.append(
        f"restart delay: {row['restart_delay_s']:.2f} s profiled, {in_run}; slots held "
        f"{100 * row['live_gpu_allocation_ratio']:.0f} % of the time"
    )
    lines.append(
        f"profile: steps took {row['profile_drift_pct']:+.0f} % longer after the run than before it; "
        f"hindcast from the mean of both: average JCT {row['retrodiction_jct_difference_pct']:+.1f} %"
    )
    return "\n".join(lines)
