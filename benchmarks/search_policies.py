"""Search the parameters of our policies after Morphling, and draw average JCT against makespan.

Run with ``python benchmarks/search_policies.py VARIANT``; MAKESPAN_PUBLISHED_DIR must name a directory
with the published files. Every point is one set of parameters: at first the shipped one, then changes of
sets that no other beats so far. Job lists serve this search alone: published ones with shifted arrivals or
without a fifth of the jobs, and generated ones, on 32, 64 and 128 GPUs, with restarts of 260 and 78 s.
Results are reported on lists with other seeds. Points go to ``benchmarks/search/VARIANT.csv``; ``--draw``
puts those of both variants into ``docs/images/policies-search.png`` and ``docs/background``.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import click
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from makespan.files import atomic_path
from makespan.plots import PALETTE, TWO_COLUMNS_IN, figure_style, new_figure
from makespan.policies.lookahead import MorphlingLookahead, MorphlingWork, Tuning
from makespan.sim import simulate
from makespan.studies import Scenario, resized, scenario
from makespan.tables import write_csv
from makespan.traces import subsampled, with_perturbed_arrivals

FIRST_SEED = 1001
SHIFT_S, SHARE = 900.0, 0.8
TRACES, DELAYS_S = ("base", "mt"), (260.0, 78.0)
OTHER_SIZES = (4, 16)  # nodes
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "search"
FIGURE, PAGE = (
    ROOT / "docs" / "images" / "policies-search.png",
    ROOT / "docs/background/policies-morphling.md",
)
VARIANTS = {it.name: it for it in (MorphlingLookahead(), MorphlingWork())}
SPREAD = 0.5  # of a changed parameter, standard deviation of its logarithm
SEARCHED = (
    "start_horizon_s",
    "growth_horizon_s",
    "preempt_horizon_s",
    "cost_tolerance",
    "guarantee_factor",
    "preempt_factor",
    "blocking_limit",
    "last_share",
    "min_growth_share",
    "expected_s",
    "expected_share",
)
MEASURES = [f"{what}_{trace}" for what in ("jct", "makespan") for trace in TRACES]


def cases(n_seeds: int) -> list[tuple[str, Scenario]]:
    """Return trace and scenario of everything that a set of parameters is judged by."""
    found = []
    for trace in TRACES:
        listed = scenario(trace, source="published")
        seeds = range(FIRST_SEED, FIRST_SEED + n_seeds)
        shifted = [replace(listed, jobs=with_perturbed_arrivals(listed.jobs, SHIFT_S, it)) for it in seeds]
        parts = [replace(listed, jobs=subsampled(listed.jobs, SHARE, it)) for it in seeds]
        drawn = [scenario(trace, seed=it) for it in range(FIRST_SEED, FIRST_SEED + (n_seeds + 1) // 2)]
        for delay_s in DELAYS_S:
            found += [(trace, replace(it, restart_delay_s=delay_s)) for it in (*shifted, *parts, *drawn)]
        found += [(trace, on_nodes(shifted[0], count)) for count in OTHER_SIZES]
    return found


def on_nodes(given: Scenario, n_nodes: int) -> Scenario:
    """Return a scenario on another number of nodes, without the jobs that cannot run there."""
    where = resized(given.cluster.name, n_nodes)
    possible = given.catalogue.on(where)
    counts = {key: {item.n_gpus for item in possible.all(key)} for key in possible.workloads}
    jobs = tuple(job for job in given.jobs if job.n_gpus in counts.get(job.workload, ()))
    return replace(given, cluster=where, jobs=jobs)


@cache
def _cases(n_seeds: int) -> list[tuple[str, Scenario]]:
    return cases(n_seeds)


def _times_s(judge: MorphlingLookahead | MorphlingWork, n_seeds: int, rank: int) -> tuple[float, float]:
    """Return average JCT and makespan of one case [s]; runs in a process of the pool."""
    jobs = simulate(_cases(n_seeds)[rank][1], judge).outcomes
    jct_s = jobs["finish_time_s"] - jobs["submit_time_s"]
    return float(jct_s.mean()), float(jobs["finish_time_s"].max() - jobs["submit_time_s"].min())


def judged(
    judge: MorphlingLookahead | MorphlingWork, n_seeds: int, pool: ProcessPoolExecutor
) -> dict[str, float]:
    """Return the geometric means of average JCT and makespan [s], by trace."""
    traces = [trace for trace, _ in _cases(n_seeds)]
    times_s = pool.map(partial(_times_s, judge, n_seeds), range(len(traces)), chunksize=4)
    logs: dict[str, list[float]] = {name: [] for name in MEASURES}
    for trace, (jct_s, makespan_s) in zip(traces, times_s, strict=True):
        logs[f"jct_{trace}"].append(np.log(jct_s))
        logs[f"makespan_{trace}"].append(np.log(makespan_s))
    return {name: float(np.exp(np.mean(values))) for name, values in logs.items()}


def parameters(judge: MorphlingLookahead | MorphlingWork) -> dict[str, float]:
    """Return the searched parameters of a variant; what is infinite is a rule that it does without."""
    own = {field.name for field in fields(judge)}
    where = {name: judge if name in own else judge.tuning for name in SEARCHED}
    values = {name: float(getattr(it, name)) for name, it in where.items() if hasattr(it, name)}
    return {name: value for name, value in values.items() if np.isfinite(value)}


def with_parameters(
    judge: MorphlingLookahead | MorphlingWork, values: Mapping[str, float]
) -> MorphlingLookahead | MorphlingWork:
    """Return a variant with other parameters."""
    shared = {field.name for field in fields(Tuning)}
    tuning = replace(judge.tuning, **{name: value for name, value in values.items() if name in shared})
    own = {name: value for name, value in values.items() if name not in shared}
    return replace(judge, tuning=tuning, **own)


def with_ratios(points: pd.DataFrame) -> pd.DataFrame:
    """Add average JCT and makespan over those of the first point, and whether no point beats it."""
    table = points.drop_duplicates(ignore_index=True)
    for what in ("jct", "makespan"):
        ratios = [table[f"{what}_{trace}"] / table[f"{what}_{trace}"].iloc[0] for trace in TRACES]
        table[what] = np.sqrt(ratios[0] * ratios[1])
    pairs = table[["jct", "makespan"]].to_numpy()
    table["on_front"] = [
        not any((other <= pair).all() and (other < pair).any() for other in pairs) for pair in pairs
    ]
    return table


def search(
    judge: MorphlingLookahead | MorphlingWork,
    n_points: int,
    n_seeds: int,
    seed: int,
    pool: ProcessPoolExecutor,
    known: Sequence[Mapping[str, float]] = (),
) -> Iterator[pd.DataFrame]:
    """Judge what is shipped and points that are known, then changes of the front; yield all after each."""
    rng, start = np.random.default_rng(seed), parameters(judge)
    rows: list[dict[str, float]] = []
    for point in [start, *(one for one in known if one != start)]:
        rows.append({**point, **judged(with_parameters(judge, point), n_seeds, pool)})
        yield with_ratios(pd.DataFrame(rows))
    for _ in range(n_points):
        table = with_ratios(pd.DataFrame(rows))
        front = table[table["on_front"]]
        parent = front.iloc[int(rng.integers(len(front)))]
        values = {name: float(parent[name]) for name in start}
        for name in rng.permutation(list(start))[: int(rng.integers(1, 4))]:
            changed = changed_value(name, values[name], rng)
            values[name] = float(f"{changed:.2g}")
        rows.append(values | judged(with_parameters(judge, values), n_seeds, pool))
        yield with_ratios(pd.DataFrame(rows))


def changed_value(name: str, value: float, rng: np.random.Generator) -> float:
    """Return a parameter changed at random; a tolerance stays above 1, what is 0 may grow."""
    factor = float(np.exp(rng.normal(0.0, SPREAD)))
    if name == "cost_tolerance":
        return 1.0 + (value - 1.0) * factor
    if value == 0.0:
        return 0.1 * factor
    return value * factor


def front_table(points: Mapping[str, pd.DataFrame]) -> str:
    """Return the points that no other beats as a Markdown table, the shortest average JCT first."""
    rows = [
        "| policy | average JCT | makespan | parameters that differ from the shipped ones |",
        "| --- | --- | --- | --- |",
    ]
    for name, table in points.items():
        start = table.iloc[0]
        for _, row in with_ratios(table).query("on_front").sort_values("jct").iterrows():
            changed = [f"`{it}` {row[it]:g}" for it in SEARCHED if it in table and row[it] != start[it]]
            said = ", ".join(changed) or "none"
            rows.append(f"| `{name}` | {row['jct']:.3f} | {row['makespan']:.3f} | {said} |")
    return "\n".join(rows) + "\n"


@figure_style
def figure_of(points: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw average JCT against makespan, one panel a variant."""
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(points), squeeze=False).flat
    for axes, (name, found) in zip(panels, points.items(), strict=True):
        table = with_ratios(found)
        front = table[table["on_front"]].sort_values("jct")
        axes.scatter(table["jct"], table["makespan"], s=10, color=PALETTE["blue"], label="tried")
        axes.plot(
            front["jct"], front["makespan"], color=PALETTE["vermilion"], marker="o", ms=4, label="not beaten"
        )
        axes.plot(1.0, 1.0, color="black", marker="x", ls="", label="shipped")
        axes.set(xlabel="average JCT over that shipped", ylabel="makespan over that shipped", title=name)
        axes.legend()
    return figure


def draw() -> None:
    """Draw the points of all variants, and write those that no other beats into the page on policies."""
    points = {name: pd.read_csv(FOLDER / f"{name}.csv") for name in VARIANTS}
    with atomic_path(FIGURE) as path:
        figure_of(points).savefig(path, format="png", metadata={"Software": None})
    head, rest = PAGE.read_text("utf-8").split("<!-- front -->\n")
    tail = rest[rest.index("<!-- end of front -->") :]
    PAGE.write_text(f"{head}<!-- front -->\n{front_table(points)}{tail}", "utf-8")


@click.command(help=__doc__)
@click.argument("variant", required=False, type=click.Choice(tuple(VARIANTS)))
@click.option("--points", default=60, show_default=True, help="Sets of parameters to try.")
@click.option("--lists", default=1, show_default=True, help="Shifts and subsamples of each published list.")
@click.option("--seed", default=1, show_default=True, help="Seed of the changes.")
@click.option("--again", is_flag=True, help="Judge the points on record too, as policies have changed.")
@click.option("--draw", "only_draw", is_flag=True, help="Draw what was found before, and search nothing.")
def main(variant: str | None, points: int, lists: int, seed: int, *, again: bool, only_draw: bool) -> None:
    """Search one variant and write its points after each."""
    if variant is None and not only_draw:
        raise click.UsageError(f"no variant; expected {', '.join(VARIANTS)}, or --draw")
    if variant is not None:
        FOLDER.mkdir(exist_ok=True)
        judge, path = VARIANTS[variant], FOLDER / f"{variant}.csv"
        known = pd.read_csv(path)[list(parameters(judge))].to_dict("records") if again else []
        with ProcessPoolExecutor() as pool:
            for n_judged, table in enumerate(search(judge, points, lists, seed, pool, known), 1):
                if n_judged >= len(known):  # until then the record stays as it is
                    write_csv(table.drop(columns=["jct", "makespan", "on_front"]), path)
    if only_draw:
        draw()


if __name__ == "__main__":
    main()
