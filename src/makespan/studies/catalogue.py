"""Catalogue of configurations built from throughput tables, and the predictions that policies decide by.

A policy decides by predicted times, the simulation runs by true ones. Predictions come from the model that is
fitted to the sampled rows, whose times are known. Any other time is known only to a job that has run in that
configuration itself (`makespan.sim.JobView.has_observed`) or, if users state what their requests take, from
its submission on. No job learns from another one, and a trial run costs its time like any other run.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Generic, Literal, TypeVar

import numpy as np
import pandas as pd

from makespan.errors import InputError, TraceError, unknown_name
from makespan.hardware import ClusterSpec, NodeSpec
from makespan.numerics import significant
from makespan.perf import Environment, Learner, fit_table, load_environment, points_from_table
from makespan.plans import (
    Placement,
    memory_estimate,
    read_plan,
    write_plan,
)
from makespan.sim import Catalogue, Configuration, Devices
from makespan.tables import ON_DEMAND, PREDICTIONS, THROUGHPUT, cached_table
from makespan.throughput import (
    fitted_workload,
    is_planned,
    placement_order,
    planned_workload,
    reference_plan,
    sampled_plans,
)
from makespan.workloads import JobSpec, is_in_zoo, workload_of

T = TypeVar("T")
Busy = tuple[float, float]  # shares of a step in which devices compute, and in which data move
# Time that policies see [s], whether they may rely on it, and the busy shares.
Seen = tuple[float, bool, Busy | None]


@dataclass(frozen=True, slots=True)
class Keyed(Generic[T]):
    """A value that cannot be hashed, as an argument of cached functions; two are equal if their keys are."""

    value: T = field(compare=False)
    key: str


def keyed_table(frame: pd.DataFrame) -> Keyed[pd.DataFrame]:
    """Return a table with a hash of its column names and cells as the key."""
    # The text of a list of floats has all their bits, and NaN equals itself there.
    cells = [(name, frame[name].tolist()) for name in frame.columns]
    return Keyed(frame, hashlib.sha256(repr(cells).encode()).hexdigest())


class TableCatalogue:
    """Configurations by workload; immutable, and a `makespan.sim.Catalogue`. Only these may run.

    All answers are cached, so that policies may ask in their inner loops.

    Raises
    ------
    InputError
        A time is not positive and finite, a share not within 0 and 1, or a configuration occurs twice.
    """

    __slots__ = ("_all", "_as_requested", "_fitting", "_holding", "_index")

    def __init__(self, configurations: Iterable[Configuration]) -> None:
        groups: dict[str, list[Configuration]] = {}
        self._index: dict[object, Configuration] = {}
        for item in configurations:
            for name in ("iter_time_s", "predicted_iter_time_s"):
                value = getattr(item, name)
                if not (math.isfinite(value) and value > 0):
                    raise InputError(
                        f"catalogue: {_label(item)}: {name} is {value!r}; expected a positive time in s"
                    )
            if item.busy is not None and not all(0 <= share <= 1 for share in item.busy):
                raise InputError(
                    f"catalogue: {_label(item)}: busy is {item.busy!r}; expected shares from 0 to 1"
                )
            if item.key in self._index:
                raise InputError(f"catalogue: configuration {_label(item)} occurs twice")
            self._index[item.key] = item
            groups.setdefault(item.workload, []).append(item)
        self._all = {key: tuple(sorted(group, key=_order)) for key, group in sorted(groups.items())}
        self._as_requested: dict[tuple[str, str, int, int], tuple[Configuration, ...]] = {}
        self._holding: dict[str, dict[Devices, tuple[Configuration, ...]]] = {}
        self._fitting: dict[ClusterSpec, TableCatalogue] = {}

    @classmethod
    def from_tables(
        cls,
        frames: Iterable[pd.DataFrame] | Mapping[str, pd.DataFrame],
        predicted: Mapping[str, Sequence[float]] | None = None,
        *,
        known: Mapping[str, Sequence[bool]] | None = None,
        busy: Mapping[str, Sequence[Busy]] | None = None,
        node: NodeSpec | None = None,
        gpu_type: str | None = None,
    ) -> "TableCatalogue":
        """Build the catalogue from throughput tables; rows that cannot run are left out.

        Parameters
        ----------
        frames
            Tables of schema `makespan.tables.THROUGHPUT`, as a sequence or by workload.
        predicted
            Predicted iteration times [s] of each row, by workload; exact where absent.
        known
            Whether each row was measured beforehand, by workload, so that policies know its time and may
            rely on it for a guarantee. Where absent, all rows without predictions are known.
        busy
            Shares of a step in which the devices compute, and in which data move, of each row, by workload;
            unknown where absent.
        node, gpu_type
            Kind of node for the estimate of memory, and type of the devices of the tables, None for any.

        Raises
        ------
        TraceError
            A table does not follow the schema, a plan does not fit its placement, a time is not
            positive, or the predictions, marks or shares are not as many as the rows.
        """
        tables = frames.values() if isinstance(frames, Mapping) else frames
        configurations: list[Configuration] = []
        for frame in tables:
            checked = THROUGHPUT.validate(frame, where="catalogue")
            for key, rows in checked.groupby("workload", sort=False):
                times = None if predicted is None else predicted.get(str(key))
                marks = None if known is None else known.get(str(key))
                shares = None if busy is None else busy.get(str(key))
                seen = _seen(str(key), rows, times, marks, shares)
                configurations += _read_rows(str(key), rows, seen, node, gpu_type)
        return cls(configurations)

    @classmethod
    def joined(cls, parts: Iterable["TableCatalogue"]) -> "TableCatalogue":
        """Return one catalogue of several, for example of those for each type of device in a cluster."""
        return cls(item for part in parts for item in part)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Keys of all workloads, sorted."""
        return tuple(self._all)

    def __len__(self) -> int:
        """Return the number of configurations."""
        return len(self._index)

    def __iter__(self) -> Iterator[Configuration]:
        """Iterate over the configurations in the order of their tables."""
        return iter(self._index.values())

    def all(self, workload_key: str) -> tuple[Configuration, ...]:
        """Return every configuration of a workload, by devices, nodes, counts and plan."""
        try:
            return self._all[workload_key]
        except KeyError:
            raise unknown_name("workload in the catalogue", workload_key, self._all) from None

    def holding(self, workload_key: str, devices: Devices) -> tuple[Configuration, ...]:
        """Return the configurations of a workload on just these devices, by nodes, counts and plan."""
        if workload_key not in self._holding:
            groups: dict[Devices, list[Configuration]] = {}
            for item in self.all(workload_key):
                groups.setdefault(item.devices, []).append(item)
            self._holding[workload_key] = {key: tuple(group) for key, group in groups.items()}
        return self._holding[workload_key].get(devices, ())

    def accepts(self, configuration: Configuration) -> bool:
        """Return whether a configuration is one of this catalogue."""
        return self._index.get(configuration.key) is configuration

    def find(
        self, workload_key: str, plan: str, placement: str, cpu_threads: int, gpu_types: tuple[str, ...] = ()
    ) -> Configuration | None:
        """Return one configuration by its labels, or None if it may not run; see `makespan.sim.Catalogue`."""
        labels = (workload_key, plan, placement, cpu_threads)
        return self._index.get((*labels, gpu_types)) or self._index.get((*labels, ()))

    def requested(self, job: JobSpec) -> Configuration:
        """Return the reference of a job: its request, in the form that is measured.

        This is the requested plan with the requested devices on the fewest nodes for which it is
        measured. If it is not measured at all, the fastest measured plan with as many devices stands in
        (Morphling artifact: job lists name pairs that its traces lack).
        """
        return self.as_requested(job)[0]

    def as_requested(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return all configurations with plan and devices of `requested`, fewest nodes first.

        One for each placement and type of device, with the most CPU threads that do not exceed the
        request, or the fewest that are measured; policies that keep the user's plan choose from these.
        """
        key = (job.workload, job.plan, job.n_gpus, job.n_cpus)
        items = self._as_requested.get(key)
        if items is None:
            items = self._as_requested[key] = self._look_up(job)
        return items

    def on(self, cluster: ClusterSpec) -> "TableCatalogue":
        """Return the catalogue of what fits an empty cluster; itself if everything does."""
        if cluster not in self._fitting:
            fitting = [item for item in self if _fits(item, cluster)]
            self._fitting[cluster] = self if len(fitting) == len(self) else TableCatalogue(fitting)
        return self._fitting[cluster]

    def _look_up(self, job: JobSpec) -> tuple[Configuration, ...]:
        group = self.all(job.workload)
        plan_text = canonical_plan(job)
        same_size = [item for item in group if item.n_gpus == job.n_gpus]
        if not same_size:
            sizes = ", ".join(str(size) for size in sorted({item.n_gpus for item in group}))
            raise InputError(
                f"job {job.job_id!r}: no configuration of {job.workload!r} with {job.n_gpus} GPUs fits; "
                f"expected {sizes}"
            )
        plan = reference_plan(plan_text, ((item.plan, item.counts, item.iter_time_s) for item in same_size))
        n_threads = job.n_cpus // job.n_gpus
        best: dict[tuple[Placement, tuple[str, ...]], tuple[tuple[bool, int], Configuration]] = {}
        for item in same_size:
            if item.plan == plan:
                # By distance to the threads asked for, fewer before more; of equal ones the first counts.
                distance = (item.cpu_threads > n_threads, abs(item.cpu_threads - n_threads))
                where = (item.placement, item.gpu_types)
                if where not in best or distance < best[where][0]:
                    best[where] = distance, item
        return tuple(
            sorted(
                (item for _, item in best.values()),
                key=lambda item: (*_order(item)[:3], item.predicted_iter_time_s),
            )
        )


def canonical_plan(job: JobSpec) -> str:
    """Return the plan of a job as throughput tables spell it; CPU threads have a column of their own there.

    Raises
    ------
    NotationError, PlanError
        The plan cannot be read, or its degrees do not multiply to the GPUs of the job.
    """
    plan = read_plan(job.plan, n_gpus=job.n_gpus, global_batch_size=None)
    return write_plan(plan, cpu_threads=plan.cpu_threads)


def _label(item: Configuration) -> str:
    return f"{item.plan} on {item.placement.text} with {item.cpu_threads} thread(s) of {item.workload!r}"


def _order(item: Configuration) -> tuple[int, int, tuple[int, ...], str, int, tuple[str, ...]]:
    return (item.n_gpus, *placement_order(item.counts), item.plan, item.cpu_threads, item.gpu_types)


def _fits(item: Configuration, cluster: ClusterSpec) -> bool:
    """Return whether an empty cluster can hold a configuration, each share on the smallest node with room."""
    if item.n_nodes > cluster.n_nodes:
        return False
    if cluster.is_homogeneous:
        types = set(item.gpu_types) or {""}
        return all(_node_holds(cluster.nodes[0], item, item.counts[0], name) for name in types)
    free = sorted(cluster.nodes, key=lambda node: node.n_gpus)
    for count, wanted in zip(item.counts, item.types_by_count, strict=True):
        chosen = next((node for node in free if _node_holds(node, item, count, wanted)), None)
        if chosen is None:
            return False
        free.remove(chosen)
    return True


def _node_holds(node: NodeSpec, item: Configuration, count: int, gpu_type: str) -> bool:
    return (
        count <= node.n_gpus
        and gpu_type in ("", node.gpu.name)
        and count * item.cpu_threads <= node.cpu_threads
        and count * item.host_memory_bytes_per_gpu <= node.host_memory_bytes
    )


def _seen(
    key: str,
    rows: pd.DataFrame,
    predicted: Sequence[float] | None,
    known: Sequence[bool] | None,
    busy: Sequence[Busy] | None,
) -> list[Seen]:
    """Return what policies see of each row; a known row shows its true time."""
    truth = rows["iter_time_s"].tolist()
    for name, values in (("predicted times", predicted), ("marks", known), ("busy shares", busy)):
        if values is not None and len(values) != len(rows):
            raise TraceError(
                f"catalogue: {len(values)} {name} for the {len(rows)} rows of {key!r}; "
                "expected one for each row"
            )
    times = truth if predicted is None else [float(value) for value in predicted]
    shares = [None] * len(rows) if busy is None else busy
    if known is None:
        return [(time_s, predicted is None, share) for time_s, share in zip(times, shares, strict=True)]
    rows_seen = zip(truth, times, known, shares, strict=True)
    return [(exact_s if mark else time_s, bool(mark), share) for exact_s, time_s, mark, share in rows_seen]


def _read_rows(
    key: str, rows: pd.DataFrame, seen: Sequence[Seen], node: NodeSpec | None, gpu_type: str | None
) -> list[Configuration]:
    """Return the configurations of the feasible rows of a workload."""
    # The memory estimate needs the layers of a model, which only models of the zoo have.
    batch = int(rows["global_batch_size"].iloc[0])
    spec = workload_of(key, batch, 1.0) if is_in_zoo(key) else None
    columns = ("exec_plan", "placement", "cpu_threads", "iter_time_s", "provenance")
    values = zip(*(rows[name].tolist() for name in columns), strict=True)
    configurations: list[Configuration] = []
    parse_placement = cache(Placement.parse)
    # Rows with the same plan on other nodes are many: read each plan once.
    parse_plan = cache(partial(read_plan, global_batch_size=batch))
    for row, (predicted_s, is_known, busy), feasible in zip(values, seen, rows["feasible"], strict=True):
        if not feasible:
            continue
        plan_text, placement_text, cpu_threads, iter_time_s, provenance = row
        try:
            placement = parse_placement(placement_text)
            plan = parse_plan(plan_text, n_gpus=placement.n_gpus, cpu_threads=cpu_threads)
        except InputError as error:
            where = f"catalogue: {plan_text!r} on {placement_text!r} of {key!r}"
            raise TraceError(f"{where}: {error}") from error
        device_bytes = host_bytes = 0.0
        if node is not None and spec is None:
            device_bytes = node.gpu.usable_bytes  # may need all of a device, so it shares none
        elif node is not None and spec is not None:
            needed = memory_estimate(plan, spec, node, placement)
            job_bytes = needed.device_bytes - needed.bytes_by_component.get("reserved", 0.0)
            # The table says that the plan has run, so the estimate may not exceed the device.
            device_bytes = min(job_bytes, node.gpu.usable_bytes)
            host_bytes = needed.host_bytes / max(placement.gpus_per_node) if plan.offload else 0.0
        configurations.append(
            Configuration(
                workload=key,
                plan=plan_text,
                family=plan.plan_family.title,
                placement=placement,
                cpu_threads=cpu_threads,
                host_memory_bytes_per_gpu=host_bytes,
                iter_time_s=iter_time_s,
                predicted_iter_time_s=predicted_s,
                provenance=provenance,
                is_known=is_known,
                device_memory_bytes_per_gpu=device_bytes,
                busy=busy,
                gpu_types=() if gpu_type is None else (gpu_type,) * placement.n_nodes,
            )
        )
    return configurations


# --- Predictions ---

PredictionMode = Literal["sampled", "requests", "exact"]
PREDICTION_MODES: tuple[PredictionMode, ...] = ("sampled", "requests", "exact")
"""Times that policies know: those of sampled rows, also those that users state of requests, or all."""
_PAIR = ["exec_plan", "placement", "cpu_threads"]
_PREDICTED_BY = (
    "makespan.perf", "makespan.plans", "makespan.workloads", "makespan.hardware", "makespan.least_squares",
    "makespan.numerics", "makespan.throughput.planned", __name__,
)  # fmt: skip


def predictions(tables: Mapping[str, pd.DataFrame], cluster: str | Environment, form: str) -> pd.DataFrame:
    """Predict the time of every pair of plan and placement, and mark the times that are known beforehand.

    Known are the rows to which the performance model is fitted.

    Parameters
    ----------
    tables
        Throughput table (schema `makespan.tables.THROUGHPUT`) by workload.
    cluster, form
        Cluster whose constants enter the performance model, by name or as its environment, and form of the
        model.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.PREDICTIONS`, one row per feasible row of the tables.
    """
    environment = load_environment(cluster) if isinstance(cluster, str) else cluster
    parts = []
    for table in tables.values():
        rows = table[table["feasible"]].reset_index(drop=True)
        parts.append(_predicted(keyed_table(rows), Keyed(environment, repr(environment)), form))
    return PREDICTIONS.validate(pd.concat(parts, ignore_index=True), where="predictions")


# Scenarios that differ in jobs or delay share predictions, and a fit takes long.
@lru_cache(maxsize=64)
def _predicted(rows: Keyed[pd.DataFrame], environment: Keyed[Environment], form: str) -> pd.DataFrame:
    key = (rows.key, form, environment.key)
    return cached_table(PREDICTIONS, key, _PREDICTED_BY, lambda: _fitted(rows.value, environment.value, form))


def _fitted(rows: pd.DataFrame, environment: Environment, form: str) -> pd.DataFrame:
    """Return true times of the sampled rows and predictions elsewhere; all shares are predicted.

    Rows computed on demand are predicted but never sampled, so that a request of one job does not change
    what policies believe of all others.
    """
    key = str(rows["workload"].iloc[0])
    if is_planned(key):
        is_sampled, spec = sampled_plans(rows), fitted_workload(planned_workload(key))
        fit = fit_table(rows, key, form, environment, sampled=is_sampled, spec=spec).fit
    else:
        in_table = (rows["provenance"] != ON_DEMAND).to_numpy(dtype=bool)
        learner = Learner.from_table(rows[in_table], form, environment)
        fit = learner.fit()
        is_sampled = np.zeros(len(rows), dtype=bool)
        is_sampled[in_table] = [bool(reason) for reason in learner.reasons]
    points = points_from_table(rows, fit.points.workload, environment)
    computing, moving = fit.busy_shares(points)
    times_s = rows["iter_time_s"].to_numpy(dtype=np.float64)
    return rows[["workload", *_PAIR]].assign(
        predicted_iter_time_s=np.where(is_sampled, times_s, significant(fit.predict(points))),
        known=is_sampled,
        computing_share=significant(computing),
        moving_share=significant(moving),
    )


def predicted_catalogue(
    tables: Mapping[str, pd.DataFrame], predicted_times: pd.DataFrame, node: NodeSpec
) -> TableCatalogue:
    """Return the catalogue of throughput tables with the times of a table of `predictions`."""
    return with_predicted_times(measured_catalogue(tables.values(), node), predicted_times)


def measured_catalogue(
    tables: Iterable[pd.DataFrame], node: NodeSpec, gpu_type: str | None = None
) -> TableCatalogue:
    """Return the catalogue of throughput tables with their own times, which policies know.

    Reading plans and estimating memory takes long, and scenarios share tables: equal tables give the same
    catalogue. Arguments are those of `TableCatalogue.from_tables`.
    """
    return joined_catalogue(tuple([_measured(keyed_table(table), node, gpu_type) for table in tables]))


@lru_cache(maxsize=128)
def _measured(table: Keyed[pd.DataFrame], node: NodeSpec, gpu_type: str | None) -> TableCatalogue:
    return TableCatalogue.from_tables([table.value], node=node, gpu_type=gpu_type)


@lru_cache(maxsize=64)
def joined_catalogue(parts: tuple[TableCatalogue, ...]) -> TableCatalogue:
    """Return one catalogue of several, the same one for the same parts."""
    return parts[0] if len(parts) == 1 else TableCatalogue.joined(parts)


def with_predicted_times(catalogue: TableCatalogue, predicted_times: pd.DataFrame) -> TableCatalogue:
    """Return a catalogue in which policies decide by the times of a table of `predictions`.

    Raises
    ------
    InputError
        The table lacks a configuration of the catalogue.
    TraceError
        The table has two rows for one configuration.
    """
    return _with_predicted_times(catalogue, keyed_table(predicted_times))


@lru_cache(maxsize=32)
def _with_predicted_times(catalogue: TableCatalogue, table: Keyed[pd.DataFrame]) -> TableCatalogue:
    frame = table.value
    placements = {text: Placement.parse(text) for text in frame["placement"].unique()}
    columns = ("workload", "exec_plan", "placement", "cpu_threads")
    labels = [
        (workload, plan, placements[placement], threads)
        for workload, plan, placement, threads in zip(
            *(frame[name].tolist() for name in columns), strict=True
        )
    ]
    columns = ("predicted_iter_time_s", "known", "computing_share", "moving_share")
    rows = dict(zip(labels, zip(*(frame[name].tolist() for name in columns), strict=True), strict=True))
    if len(rows) < len(labels):
        twice = next(label for rank, label in enumerate(labels) if label in labels[:rank])
        raise TraceError(
            f"predictions: two rows for plan {twice[1]!r} on {twice[2].text} with {twice[3]} thread(s) of "
            f"{twice[0]!r}; expected one"
        )
    missing = (math.nan, False, math.nan, math.nan)  # the new catalogue rejects it, and names it
    predicted: list[Configuration] = []
    for item in catalogue:
        time_s, is_sampled, *busy = rows.get(
            (item.workload, item.plan, item.placement, item.cpu_threads), missing
        )
        predicted.append(
            replace(
                item,
                predicted_iter_time_s=item.iter_time_s if is_sampled else time_s,
                is_known=bool(is_sampled),
                busy=(busy[0], busy[1]),
            )
        )
    return TableCatalogue(predicted)


def with_exact_times(catalogue: Catalogue) -> TableCatalogue:
    """Return a catalogue of the same configurations in which policies know all true times."""
    return TableCatalogue(
        replace(item, predicted_iter_time_s=item.iter_time_s, is_known=True)
        for key in catalogue.workloads
        for item in catalogue.all(key)
    )
