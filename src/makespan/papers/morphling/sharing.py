"""Fig. 8: two jobs share the GPUs of a node, divided equally or by their sensitivity."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.papers.experiment import SOURCES, Experiment, Figure, Given
from makespan.plans import Placement
from makespan.settings import one_of, option, shared
from makespan.workloads import workload_keys

WorkloadKey = Annotated[str, one_of(workload_keys)]
_of_fig8 = partial(option, source="Morphling, Fig. 8", changes="fig8")


@dataclass(frozen=True, slots=True)
class _Best:
    """Fastest plan of a job with some GPUs, and the same among clean rows only."""

    plan: str
    throughput: float
    clean: bool
    flag: str
    clean_throughput: float


class Fig8(Experiment):
    """Division of one node between jobs under each scheduler."""

    name = "fig8"
    tables = {"fig8": "division of one node between two jobs"}
    figures = (
        Figure(
            "fig8",
            "Fig. 8",
            "Speed-up of jobs that share {GPUs: config morphling.fig8.gpus}, "
            "relative to each job alone on all of them, computed once on {source} iteration times. Hollow "
            "diamonds on the left are the published values, stacked alike, each "
            "with its number.",
            tables=("fig8",),
        ),
    )
    cells = ("fig8",)
    sources = SOURCES
    is_timed = True
    group = "experiments"

    known: tuple[str, ...] = shared("morphling.workloads")
    workloads: tuple[WorkloadKey, ...] = _of_fig8(
        "workloads that are submitted together", ("roberta", "t5_3B"), min_length=2
    )
    gpus: int = _of_fig8("GPUs to divide, all in one node", 4, unit="GPU", ge=2)

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads of the jobs if the iteration times of all are read."""
        return self.workloads if set(self.workloads) <= set(self.known) else ()

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the table if there are workloads."""
        return super().tables_of(source, profiled) if self.timed_workloads(source, profiled) else {}

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Divide the GPUs of one node between jobs, each of which gets at least one.

        Returns
        -------
        dict of str to pandas.DataFrame
            A row per scheduler and job, with the columns ``clean, flag`` of the row behind the speed-up,
            ``clean_speedup`` (from clean rows only, NaN if there are none), ``published_gpus`` and
            ``published_plan`` behind those of the schema. Speed-ups are relative to the job alone on all GPUs
            with its best plan.

        Raises
        ------
        InputError
            There are fewer GPUs than jobs, or more than a node of the tables has.
        TraceError
            A job has no feasible row on one node with a number of GPUs that it may get.
        """
        jobs, gpus = list(given.times), self.gpus
        if gpus < len(jobs):
            raise InputError(f"{gpus} GPUs for {len(jobs)} jobs; expected at least one GPU a job")
        if not any((table["placement"] == Placement((gpus,)).text).any() for table in given.times.values()):
            raise InputError(
                f"fig8.gpus is {gpus}; expected a number that a job has on one node in some table"
            )
        curves = {job: _curve(job, table, gpus) for job, table in given.times.items()}
        share, rest = divmod(gpus, len(jobs))
        equal = tuple(share + (number < rest) for number in range(len(jobs)))
        records = []
        for scheduler, division in (("Simple", equal), ("Morphling", _best_division(jobs, gpus, curves))):
            for job, count in zip(jobs, division, strict=True):
                best, alone = curves[job][count], curves[job][gpus]
                records.append(
                    {
                        "scheduler": scheduler,
                        "job": job,
                        "gpus": count,
                        "plan": best.plan,
                        "speedup": best.throughput / alone.throughput,
                        "clean": best.clean,
                        "flag": best.flag,
                        "clean_speedup": best.clean_throughput / alone.clean_throughput,
                    }
                )
        printed = given.cells["fig8"].drop(columns="source", errors="ignore")
        if gpus != type(self).model_fields["gpus"].default:  # published are speed-ups over as many
            printed = printed[:0]
        table = pd.DataFrame(records).merge(printed, how="left", on=["scheduler", "job"])
        table["published_plan"] = table["published_plan"].fillna("")
        return {"fig8": table}


def _curve(job: str, table: pd.DataFrame, gpus: int) -> dict[int, _Best]:
    """Return the best plan of a job with 1, 2, ... GPUs of one node, or with fewer where none can run."""
    curve: dict[int, _Best] = {}
    for count in range(1, gpus + 1):
        rows = table[(table["placement"] == Placement((count,)).text) & table["feasible"]]
        if len(rows):
            ordered = rows.sort_values(["iter_time_s", "exec_plan"], kind="stable")
            first, clean = ordered.iloc[0], ordered[ordered["clean"]]
            batch = float(first["global_batch_size"])
            curve[count] = _Best(
                plan=str(first["exec_plan"]),
                throughput=batch / float(first["iter_time_s"]),
                clean=bool(first["clean"]),
                flag=str(first["flag"]),
                clean_throughput=batch / float(clean["iter_time_s"].iloc[0]) if len(clean) else math.nan,
            )
        elif count - 1 in curve:
            curve[count] = curve[count - 1]
        else:
            raise TraceError(
                f"job {job!r}: the throughput table has no feasible plan on one node with {count} GPU(s)"
            )
    return curve


def _best_division(
    jobs: Sequence[str], gpus: int, curves: Mapping[str, Mapping[int, _Best]]
) -> tuple[int, ...]:
    """Maximise the summed speed-up; of equal divisions the most even one."""

    def gain(division: tuple[int, ...]) -> tuple[float, int]:
        pairs = zip((curves[job] for job in jobs), division, strict=True)
        return sum(curve[n].throughput / curve[gpus].throughput for curve, n in pairs), -max(division)

    cuts = itertools.combinations(range(1, gpus), len(jobs) - 1)
    ends = ((0, *between, gpus) for between in cuts)
    return max((tuple(b - a for a, b in itertools.pairwise(cut)) for cut in ends), key=gain)
