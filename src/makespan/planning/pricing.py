"""Price the layouts of a training run, and rank the fastest that fit, with costs and reasons."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.arguments import check_fields, check_range, typed
from makespan.errors import InfeasiblePlanError, InputError, TraceError, cell_error, unknown_name
from makespan.files import read_bytes
from makespan.hardware import MOST_GPUS, ClusterSpec, cluster_of, pools
from makespan.planning.architecture import Architecture, Experts, Layers
from makespan.planning.factors import Z90, Calibrated, Knowledge, calibrate_rows, knowledge, uncalibrated
from makespan.planning.layout import Layout, Recompute, parse_layout
from makespan.planning.memory import components_of, fits, memory_table
from makespan.planning.stacks import Software, Training
from makespan.planning.steptime import Grid, ideal_terms, names_of
from makespan.planning.ties import Joint
from makespan.tables import parse_csv
from makespan.units import GIB, HOUR

Array = NDArray[np.float64]
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_MOST_TENSOR = 8
_CHUNKS = (2, 3, 4, 5, 6, 8)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_TIE = 0.1  # chance to be faster from which a layout is a tie
_LEAST_MFU, _MOST_SCATTER = 0.001, 2  # a measured step beyond these is in another unit, or a mistake
_MOST_TIES = 200  # layouts that are compared with each other
_BETWEEN = 8  # steps between a power of two and the next, in which a number of devices is searched
_LEAST_PIECE = 8192  # tokens; every published row with context parallelism has at least as many


@dataclass(frozen=True, slots=True)
class Priced:
    """One layout with its prediction.

    Parameters
    ----------
    layout
        The layout.
    step_s, low_s, high_s
        Time of a step, and its interval of 90 % [s].
    tokens_per_s_per_gpu, mfu
        Throughput, and model FLOP over the dense peak [1].
    usd_per_million_tokens
        Cost; NaN where the cluster has no price.
    memory_bytes
        Memory of the fullest device by component, keys as in `makespan.planning.COMPONENTS`, and those of
        recurrent layers.
    terms_s
        The step by term, keys as in `makespan.planning.TERMS`, and those of recurrent layers; they add up to
        ``step_s``.
    is_feasible
        True if it fits into the memory of the device, or was measured and so ran.
    reason
        Why its counted memory does not fit; empty if it does.
    """

    layout: Layout
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    usd_per_million_tokens: float
    memory_bytes: dict[str, float]
    terms_s: dict[str, float]
    is_feasible: bool
    reason: str = ""

    @property
    def total_memory_bytes(self) -> float:
        """Memory of the fullest device [B]."""
        return sum(self.memory_bytes.values())

    def over(self, best: "Priced") -> str:
        """Say which terms make this layout slower than another one, the largest first."""
        extra = {name: value - best.terms_s[name] for name, value in self.terms_s.items()}
        slower = sorted((name for name in extra if extra[name] > 0.02 * best.step_s), key=lambda n: -extra[n])
        return ", ".join(f"{name} +{extra[name]:.3g} s" for name in slower[:3])


MeasuredStep = tuple[Training, Layout, ClusterSpec, float]
"""A measured step: the run, its layout, the cluster, and the time [s]."""


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices the layouts of a run on a cluster with a stack, refined by measured rows.

    `calibrated_by` sets ``calibrated`` and ``measured``, the rows behind it.
    """

    training: Training
    cluster: ClusterSpec
    stack: Software
    calibrated: Calibrated = field(default_factory=uncalibrated)
    base: Knowledge = field(default_factory=knowledge)
    measured: tuple[MeasuredStep, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.cluster.gpu.sustained  # raises if there are several, or if its sustained rates are unknown
        if len(self.cluster.runs) > 1:
            pools(self.cluster)  # raises where nodes differ in more than their sizes
        object.__setattr__(self, "calibrated", self.calibrated.with_terms(len(self._names())))

    @property
    def machines(self) -> ClusterSpec:
        """Name of ``cluster`` in the last version; warns."""
        warnings.warn("Pricer.machines is now cluster", DeprecationWarning, stacklevel=2)
        return self.cluster

    def _names(self, measured: Sequence[MeasuredStep] = ()) -> tuple[str, ...]:
        """Return the terms of the steps of the run and of measured ones, in the order of their columns."""
        models = (self.training.model, *(run.model for run, *_ in (*self.measured, *measured)))
        return max((names_of(model) for model in models), key=len)

    def _of_run(self, run: Training, grid: Grid, cluster: ClusterSpec, n_terms: int) -> tuple[Array, Array]:
        """Return logarithms of factors, (n_terms,), and ideal terms [s], (n_layouts, n_terms)."""
        logs = self.base.logs(self.stack.family, cluster.gpu.kind, run)
        terms = ideal_terms(run, grid, cluster, self.stack)
        if missing := n_terms - len(logs):  # beside a model that has further terms
            return np.pad(logs, (0, missing)), np.pad(terms, ((0, 0), (0, missing)))
        return logs, terms

    def parts_s(self, grid: Grid) -> Array:
        """Return the steps of all columns of a grid by term [s], (n_layouts, n_terms)."""
        n_terms = len(self._names())
        parts_s, start = np.empty((len(grid), n_terms)), 0
        for block in grid.blocks():  # each into its place, so that memory is reused while it is in caches
            logs, terms = self._of_run(self.training, block, self.cluster, n_terms)
            parts_s[start : start + len(block)] = self.calibrated.parts_s(logs, terms)
            start += len(block)
        return parts_s

    def steps_of(self, measured: Sequence[MeasuredStep]) -> Array:
        """Return the predicted steps of measured rows by term [s], (n_rows, n_terms)."""
        logs, terms = self._known(measured)
        return self.calibrated.with_terms(terms.shape[1]).parts_s(logs, terms)

    def _known(self, measured: Sequence[MeasuredStep]) -> tuple[Array, Array]:
        """Return logarithms of factors and ideal terms [s] of measured rows, (n_rows, n_terms) each."""
        n_terms = len(self._names(measured))
        if not measured:
            return np.zeros((0, n_terms)), np.zeros((0, n_terms))
        found = [self._of_run(run, Grid.of([layout]), where, n_terms) for run, layout, where, _ in measured]
        return np.array([logs for logs, _ in found]), np.concatenate([terms for _, terms in found])

    def mfu(self, step_s: float | Array) -> float | Array:
        """Return the model FLOP of steps [s] over the dense peak of all devices [1]."""
        return _mfu(self.training, self.cluster, step_s)

    def joint(self, layouts: Sequence[Layout]) -> Joint:
        """Return the joint posterior of the steps of layouts, measured ones among them or not."""
        measured_s = [self.measured_s(layout) for layout in layouts]
        return Joint.of(
            self.calibrated, self.parts_s(Grid.of(layouts)), measured_s, self.has_rows(self.training)
        )

    def spread(self, parts_s: Array) -> Array:
        """Return the spread of the logarithms of steps of the run [1], (n_layouts,)."""
        return self.calibrated.spread(parts_s, self.has_rows(self.training))

    def has_rows(self, training: Training) -> bool:
        """Tell whether the model of a run is among the measured ones."""
        return any(run.model == training.model for run, *_ in self.measured)

    def measured_s(self, layout: Layout) -> float | None:
        """Return the measured step of a layout on this cluster [s], the geometric mean of several."""
        logs = [
            math.log(step_s)
            for run, other, where, step_s in self.measured
            if other.text == layout.text and run == self.training and where.n_gpus == self.cluster.n_gpus
        ]
        return math.exp(sum(logs) / len(logs)) if logs else None

    @typed
    def price(self, layout: Layout) -> Priced:
        """Price one layout, whether it fits or not.

        Raises `PlanError` where the batch cannot be divided, `InputError` where the layout does not go with
        the model or the cluster.
        """
        training, cluster = self.training, self.cluster
        check_layout(training, cluster, layout)
        grid = Grid.of([layout])
        parts_s = self.parts_s(grid)
        memory = memory_table(training, grid, self.stack)
        step_s, spread = float(parts_s.sum()), float(self.spread(parts_s)[0])
        throughput = training.tokens_per_step / step_s / cluster.n_gpus
        price = cluster.usd_per_gpu_hour
        does_fit, ran = bool(fits(memory, cluster)[0]), self.measured_s(layout) is not None
        most = cluster.gpu.sustained.memory_bytes
        reason = f"counted with {memory[0].sum() / GIB:.1f} GiB on a device of {most / GIB:.1f} GiB"
        return Priced(
            layout=layout,
            step_s=step_s,
            low_s=step_s * math.exp(-Z90 * spread),
            high_s=step_s * math.exp(Z90 * spread),
            tokens_per_s_per_gpu=throughput,
            mfu=float(self.mfu(step_s)),
            usd_per_million_tokens=price / HOUR / throughput * 1e6 if price else float("nan"),
            memory_bytes=dict(zip(components_of(training.model), memory[0].tolist(), strict=True)),
            terms_s=dict(zip(self._names(), parts_s[0].tolist(), strict=True)),
            is_feasible=does_fit or ran,
            reason="" if does_fit else reason + ", but it ran" * ran,
        )


def _mfu(training: Training, cluster: ClusterSpec, step_s: float | Array) -> float | Array:
    """Return the model FLOP of steps [s] over the dense peak of all devices [1]."""
    peak = cluster.n_gpus * cluster.gpu.sustained_peak(training.precision)
    return training.flop_per_step / step_s / peak


def check_layout(training: Training, cluster: ClusterSpec, layout: Layout) -> None:
    """Reject a layout that does not go with model, batch or cluster: `PlanError` or `InputError`."""
    layout.microbatches(training.global_batch)
    if layout.n_gpus != cluster.n_gpus:
        raise InputError(
            f"layout {layout.text!r} is for {layout.n_gpus} GPUs; the cluster has {cluster.n_gpus}"
        )
    if training.seq % layout.cp:
        raise InputError(
            f"layout {layout.text!r}: context parallelism over {layout.cp} does not divide samples of "
            f"{training.seq} tokens"
        )
    if problem := misfit(training.model, layout):
        raise InputError(f"layout {layout.text!r}: {problem}")


def misfit(model: Architecture, layout: Layout) -> str:
    """Say why a layout does not go with a model; empty if it does."""
    if layout.pp * layout.interleave > model.n_layers:
        return f"{layout.pp} stages of {layout.interleave} chunks for {model.n_layers} layers"
    if layout.cp > 1 and model.is_recurrent:
        return f"context parallelism over {layout.cp} is not modelled for scans of recurrent layers"
    for run in model.kinds:
        for count, what in _divided_by_tensor(run, layout):
            if count % layout.tp:
                return f"tensor parallelism over {layout.tp} does not divide {count} {what}"
        if (part := run.recurrent) is not None:
            # A group of a scan has its keys, and often a norm over its channels.
            parts, what = (part.groups, "group") if part.has_heads else (part.heads, "channel")
            what += "s" * (parts > 1)
            if parts % layout.tp:
                return (
                    f"tensor parallelism over {layout.tp} does not divide {parts} {what} of recurrent layers"
                )
    if layout.recompute == "selective" and not model.has_attention:
        return "recompute=selective computes attention again, but the model has none"
    experts = [run.ffn.n_experts for run in model.kinds if isinstance(run.ffn, Experts)]
    if layout.ep > 1 and not experts:
        return f"experts over {layout.ep} devices, but the model has none"
    if experts and any(count % layout.ep for count in experts):
        return f"expert parallelism over {layout.ep} does not divide {experts[0]} experts"
    return ""


def _divided_by_tensor(run: Layers, layout: Layout) -> Iterator[tuple[int, str]]:
    """Yield what devices of a tensor group share out besides scans, and its name."""
    for part in (run.attention, run.cross_attention):
        if part is not None:
            yield part.heads, "heads"
            if part.latent is None:
                yield part.kv_heads, "heads of keys and values"
    if isinstance(run.ffn, Experts):
        if layout.ep == 1:
            yield run.ffn.size, "channels of an expert"
        yield run.ffn.shared_size, "channels of the shared expert"
    elif run.ffn is not None:
        yield run.ffn.size, "channels of the feed-forward part"


@typed
def layouts(training: Training, cluster: ClusterSpec) -> Iterator[Layout]:
    """Yield the layouts that go with a run and a cluster, whether they fit into memory or not.

    Tensor parallelism stays inside a node; degrees are divisors. It divides norms and dropout, too, where its
    devices have equally many tokens. Data parallelism shards the optimizer
    (ZeRO-1) or, without a pipeline, also the parameters (FSDP), over all devices or those of a node (HSDP).
    """
    model, n = training.model, cluster.n_gpus
    experts = next((run.ffn.n_experts for run in model.kinds if isinstance(run.ffn, Experts)), 1)
    items = (model.n_layers, model.n_layers + 2)  # with embedding and loss as layers of their own
    lengths = {model.tokens(run, training.seq) for run in model.kinds}
    recomputations = [kind for kind in _RECOMPUTE if kind != "selective" or model.has_attention]
    for tp, pp in itertools.product(_divisors(n), _divisors(n)):
        if n % (tp * pp) or tp > min(_MOST_TENSOR, cluster.gpus_per_node):
            continue
        if n > cluster.gpus_per_node and cluster.gpus_per_node % tp:  # a group would lie on two nodes
            continue
        chunks = [v for v in _CHUNKS if pp > 1 and any(count % (pp * v) == 0 for count in items)]
        for cp in _divisors(n // (tp * pp)):
            if cp > 1 and (training.seq % cp or training.seq // cp < _LEAST_PIECE):
                continue
            is_cut_evenly = all(length % (cp * tp) == 0 for length in lengths)
            dp = n // (tp * pp * cp)
            peers, node = dp * cp, cluster.gpus_per_node // tp
            sharded = [(1, 0)]
            if pp == 1 and peers > 1:
                sharded.append((3, 0))
                if 1 < node < peers and peers % node == 0:
                    sharded.append((3, node))
            degrees = [ep for ep in _divisors(dp * cp * tp) if experts % ep == 0]
            for ep, interleave, micro in itertools.product(degrees, [1, *chunks], _MICRO_BATCHES):
                if training.global_batch % (dp * micro):
                    continue
                if interleave > 1 and training.global_batch // (dp * micro) < pp:
                    continue  # Megatron-LM has no interleaved order for fewer micro-batches than stages
                chunked = pp * interleave
                shared: dict[str, Any] = {
                    "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "interleave": interleave,
                    "micro_batch": micro, "sequence_parallel": tp > 1 and is_cut_evenly,
                    "ends_as_layers": pp > 1 and model.n_layers % chunked != 0 and items[1] % chunked == 0,
                }  # fmt: skip
                first = Layout(**shared)
                if misfit(model, first):
                    continue
                yield first
                variants = itertools.product(sharded, recomputations)
                next(variants)  # of ``first``
                for (zero, shard), recompute in variants:
                    yield Layout(**shared, zero=zero, shard=shard, recompute=recompute)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


@dataclass(frozen=True, slots=True)
class Plans:
    """Layouts to choose from, best first, and the number of layouts that were tried.

    Layouts that have a chance of 0.1 or more to be faster than the fastest prediction are ties. They come
    first, by expected regret, up to 200 of them; the other layouts follow by their expected steps.

    Parameters
    ----------
    pricer
        Pricer of the run.
    best
        The first layouts, as many as asked for.
    regrets
        Expected slowdown of each against the fastest of all ties [1]; NaN for one that is no tie.
    chances
        Probability that each would turn out faster than the first, if both were measured [1].
    ties
        All ties, in the same order; ``best`` may have fewer layouts, or more.
    n_tried, n_feasible
        Layouts that go with the run, and those of them that fit into memory.
    n_ran
        Further layouts, which were measured although they do not fit by the count of their memory.
    """

    pricer: Pricer
    best: tuple[Priced, ...]
    regrets: tuple[float, ...]
    chances: tuple[float, ...]
    ties: tuple[Layout, ...]
    n_tried: int
    n_feasible: int
    n_ran: int = 0

    def table(self) -> pd.DataFrame:
        """Return the layouts as a table, units in the names of its columns."""
        return pd.DataFrame(
            [
                {
                    "layout": priced.layout.text,
                    "dp": priced.layout.dp,
                    "step_s": priced.step_s,
                    "low_s": priced.low_s,
                    "high_s": priced.high_s,
                    "expected_regret": regret,
                    "chance_to_be_faster": chance,
                    "tokens_per_s_per_gpu": priced.tokens_per_s_per_gpu,
                    "mfu": priced.mfu,
                    "memory_gib": priced.total_memory_bytes / GIB,
                    "usd_per_million_tokens": priced.usd_per_million_tokens,
                    "slower_by": "" if priced is self.best[0] else priced.over(self.best[0]),
                    "is_feasible": priced.is_feasible,
                    "reason": priced.reason,
                    "measured_s": self.pricer.measured_s(priced.layout),
                }
                for priced, regret, chance in zip(self.best, self.regrets, self.chances, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """All layouts of a run, with steps [s] and memory [B]."""

    tried: list[Layout]
    step_s: Array
    memory: Array
    fit: NDArray[np.bool_]


def _ran(pricer: Pricer) -> dict[str, Layout]:
    """Return the layouts of the run that were measured, by their texts."""
    measured = [layout for _, layout, *_ in pricer.measured]
    return {layout.text: layout for layout in measured if pricer.measured_s(layout) is not None}


def _search(pricer: Pricer) -> _Search:
    """Price all layouts of a run; raises `InfeasiblePlanError` where none fits, and none was measured."""
    training, cluster = pricer.training, pricer.cluster
    # Fused attention keeps no scores that it could compute again.
    is_fused = pricer.stack.attention != "unfused"
    tried = [
        layout for layout in layouts(training, cluster) if not (is_fused and layout.recompute == "selective")
    ]
    if not tried:
        raise InfeasiblePlanError(
            f"no layout divides a batch of {training.global_batch} samples over {cluster.n_gpus} GPUs; "
            "expected a batch that has the data-parallel degree as a divisor"
        )
    blocks = list(Grid.of(tried).blocks())
    step_s = np.concatenate([pricer.parts_s(grid).sum(axis=1) for grid in blocks])
    memory = np.concatenate([memory_table(training, grid, pricer.stack) for grid in blocks])
    fit = fits(memory, cluster)
    if not fit.any() and not _ran(pricer):
        needed = memory.sum(axis=1)
        least = int(np.argmin(needed))
        raise InfeasiblePlanError(
            f"none of {len(tried):,} layouts fits: the smallest, {tried[least].text!r}, needs "
            f"{needed[least] / GIB:.0f} GiB on a device with "
            f"{cluster.gpu.sustained.memory_bytes / GIB:.0f} GiB; more GPUs or a smaller model would help"
        )
    return _Search(tried, step_s, memory, fit)


@typed
def plan(pricer: Pricer, n_best: int = 5) -> Plans:
    """Find the fastest layouts that fit, ties among them by expected regret.

    A layout that was measured takes part with its measured step, whatever the count of its memory says.

    Raises
    ------
    InfeasiblePlanError
        None fits, and the message says how much memory the smallest one needs; or none divides the batch.
    """
    check_range("n_best", n_best, 1)
    search = _search(pricer)
    order = np.argsort(np.where(search.fit, search.step_s, np.inf), kind="stable")
    order = order[: min(max(n_best, _MOST_TIES), int(search.fit.sum()))]
    pool = [search.tried[i] for i in order]
    ran = _ran(pricer)
    texts = {layout.text for layout in pool}
    pool += [layout for text, layout in ran.items() if text not in texts]
    joint = pricer.joint(pool)
    are_ties = joint.chances_over(int(np.argmin(joint.mean))) >= _TIE
    # Ties do not depend on how many layouts are asked for.
    are_ties &= [at < _MOST_TIES or layout.text in ran for at, layout in enumerate(pool)]
    regrets = np.full(len(pool), np.nan)
    regrets[are_ties] = joint.among(are_ties).regrets()
    at = np.lexsort((joint.mean, np.where(are_ties, regrets, np.inf)))
    chances, shown = joint.chances_over(int(at[0])), at[:n_best]
    return Plans(
        pricer=pricer,
        best=tuple(pricer.price(pool[i]) for i in shown),
        regrets=tuple(float(regrets[i]) for i in shown),
        chances=tuple(float(chances[i]) for i in shown),
        ties=tuple(pool[i] for i in at if are_ties[i]),
        n_tried=len(search.tried),
        n_feasible=int(search.fit.sum()),
        n_ran=sum(bool(pricer.price(layout).reason) for layout in ran.values()),
    )


@typed
def feasible_table(pricer: Pricer) -> pd.DataFrame:
    """Return all layouts that fit or were measured, the fastest prediction first.

    Returns
    -------
    pandas.DataFrame
        One row per layout: ``n_gpus``, ``layout`` and ``step_s`` [s], as in a file for `read_measured`, the
        ends ``low_s`` and ``high_s`` of the interval of 90 %, ``tokens_per_s_per_gpu``, ``mfu``,
        ``memory_gib`` of the fullest device, ``reason`` as of `Priced`, and the degrees and other fields of
        `Layout`.
    """
    search = _search(pricer)
    at = np.flatnonzero(search.fit)
    chosen, step_s, memory = [search.tried[i] for i in at], search.step_s[at], search.memory[at].sum(axis=1)
    texts = {layout.text for layout in chosen}
    reasons = [""] * len(chosen)
    for priced in [pricer.price(layout) for text, layout in _ran(pricer).items() if text not in texts]:
        chosen.append(priced.layout)
        reasons.append(priced.reason)
        step_s, memory = np.append(step_s, priced.step_s), np.append(memory, priced.total_memory_bytes)
    order = np.argsort(step_s, kind="stable")
    chosen, step_s, memory = [chosen[i] for i in order], step_s[order], memory[order]
    spread = np.concatenate([pricer.spread(pricer.parts_s(block)) for block in Grid.of(chosen).blocks()])
    throughput = pricer.training.tokens_per_step / step_s / pricer.cluster.n_gpus
    names = [column.name for column in fields(Layout)]
    return pd.DataFrame(
        {
            "n_gpus": pricer.cluster.n_gpus,
            "layout": [layout.text for layout in chosen],
            "step_s": step_s,
            "low_s": step_s * np.exp(-Z90 * spread),
            "high_s": step_s * np.exp(Z90 * spread),
            "tokens_per_s_per_gpu": throughput,
            "mfu": pricer.mfu(step_s),
            "memory_gib": memory / GIB,
            "reason": [reasons[i] for i in order],
            **{name: [getattr(layout, name) for layout in chosen] for name in names},
        }
    )


_OWN, _OPTIONAL = ("n_gpus", "layout", "step_s"), ("seq", "batch", "precision", "memory_gib")


@typed
def read_measured(path: str | Path, training: Training, cluster: ClusterSpec) -> list[MeasuredStep]:
    """Read measured steps of one model on one kind of device from a CSV.

    Columns: ``n_gpus``, ``layout`` (such as ``tp4 pp4 mb1``) and ``step_s`` [s]; ``seq``, ``batch`` and
    ``precision`` where they differ from those of the run, and ``memory_gib``, see `read_memory`.

    Raises
    ------
    TraceError
        A cell is not accepted; the message names file, row and column.
    """
    where = str(path)
    content = read_bytes(path, "measured steps (CSV)", TraceError)
    frame = parse_csv(content, where, "measured steps", dtype="str", keep_default_na=False)
    if missing := [name for name in _OWN if name not in frame.columns]:
        raise TraceError(f"{where}: column {missing[0]!r} is missing; expected {', '.join(_OWN)}")
    if unknown := [name for name in frame.columns if name not in (*_OWN, *_OPTIONAL)]:
        raise TraceError(f"{where}: {unknown_name('column', unknown[0], (*_OWN, *_OPTIONAL))}")
    rows: list[MeasuredStep] = []
    for number, record in enumerate(frame.to_dict("records"), start=1):
        cells = {str(name): str(cell).strip() for name, cell in record.items() if str(cell).strip()}
        place = partial(_positive, cells, where, number)
        n_gpus, step_s = place("n_gpus", int), place("step_s", float)
        if "memory_gib" in cells:
            place("memory_gib", float)
        if "layout" not in cells:
            raise cell_error(where, number, "layout", "", "words such as tp4 pp2 mb1")
        try:
            there = cluster.with_gpus(n_gpus)
            layout = parse_layout(cells["layout"], there.n_gpus)
            run = replace(
                training,
                seq=place("seq", int) if "seq" in cells else training.seq,
                global_batch=place("batch", int) if "batch" in cells else training.global_batch,
                precision=cells.get("precision", training.precision),
            )
            check_layout(run, there, layout)
            mfu = float(_mfu(run, there, step_s))
        except TraceError:
            raise
        except InputError as error:
            raise TraceError(f"{where}: row {number}: {error}") from None
        if not _LEAST_MFU <= mfu <= 1:
            raise TraceError(
                f"{where}: row {number}: a step of {step_s:g} s is {100 * mfu:.2g} % of the peak of "
                f"{n_gpus} GPUs; expected {100 * _LEAST_MFU:g} to 100 %, and seconds per step"
            )
        for other, (*same, other_s) in enumerate(rows, start=1):
            if same == [run, layout, there] and max(step_s, other_s) > _MOST_SCATTER * min(step_s, other_s):
                raise TraceError(
                    f"{where}: row {number}: {step_s:g} s, but row {other} has {other_s:g} s for the "
                    f"same run; expected times within a factor of {_MOST_SCATTER}"
                )
        rows.append((run, layout, there, step_s))
    if not rows:
        raise TraceError(f"{where}: has no row; expected measured steps")
    return rows


@typed
def read_memory(path: str | Path) -> list[float]:
    """Return ``memory_gib`` of the rows that `read_measured` accepts [GiB], NaN where it is empty.

    It is the most that programs allocated on the fullest device, without libraries and free blocks.
    """
    content = read_bytes(path, "measured steps (CSV)", TraceError)
    frame = parse_csv(content, str(path), "measured steps", dtype="str", keep_default_na=False)
    cells = frame["memory_gib"] if "memory_gib" in frame.columns else [""] * len(frame)
    return [float(cell) if str(cell).strip() else math.nan for cell in cells]


def _positive(cells: Mapping[str, str], where: str, row: int, name: str, kind: Callable[[str], Any]) -> Any:
    """Return a cell as a positive number; raises `TraceError` with its place."""
    text = cells.get(name, "")
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        accepted = "a whole number >= 1" if kind is int else "a number above 0"
        raise cell_error(where, row, name, text, accepted)
    return value


@typed
def calibrated_by(pricer: Pricer, measured: Sequence[MeasuredStep]) -> Pricer:
    """Return a pricer refined by measured steps [s] of the same model, stack and cluster."""
    if not measured:
        return replace(pricer, calibrated=uncalibrated(), measured=())
    step_s = np.array([step_s for *_, step_s in measured])
    calibrated = calibrate_rows(*pricer._known(measured), step_s)
    return replace(pricer, calibrated=calibrated, measured=tuple(measured))


@typed
def describe(one: Priced) -> dict[str, Any]:
    """Return a priced layout as plain values, ready for JSON."""
    return {
        "layout": one.layout.text,
        "dp": one.layout.dp,
        "step_s": one.step_s,
        "low_s": one.low_s,
        "high_s": one.high_s,
        "interval_90_s": [one.low_s, one.high_s],
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "mfu": one.mfu,
        "usd_per_million_tokens": None
        if math.isnan(one.usd_per_million_tokens)
        else one.usd_per_million_tokens,
        "memory_gib": one.total_memory_bytes / GIB,
        "is_feasible": one.is_feasible,
        "reason": one.reason,
        "memory_bytes": one.memory_bytes,
        "terms_s": {name: value for name, value in one.terms_s.items() if value > 0},
    }


@typed
def size_clusters(
    training: Training,
    kind: str,
    stack: Software,
    *,
    tokens: float,
    most_gpus: int,
    usd_per_gpu_hour: float = 0.0,
    most_days: float | None = None,
) -> pd.DataFrame:
    """Return how long a run takes and what it costs on growing numbers of devices.

    Numbers are powers of two and ``most_gpus`` itself. With ``most_days``, those in between are tried where
    the first number in time may lie: from the last power of two that is too slow to the next, in eighths of
    it that are whole nodes, or any number below one node.

    Parameters
    ----------
    tokens
        Tokens to train on.
    kind, most_gpus
        Key of the device, and the most of them.
    usd_per_gpu_hour
        Price; 0 for none.
    most_days
        Days until it must be done; None to look at powers of two and the most alone.

    Returns
    -------
    pandas.DataFrame
        One row per number of devices on which the model fits, with its best layout, days with their interval,
        and cost (NaN without a price).
    """
    if not 0 < tokens < math.inf:
        raise InputError(f"tokens is {tokens}; expected a finite number above 0")
    check_range("most_gpus", most_gpus, 1, MOST_GPUS)

    def row(n_gpus: int) -> dict[str, Any] | None:
        cluster = replace(cluster_of(kind, n_gpus), usd_per_gpu_hour=usd_per_gpu_hour)
        try:
            best = plan(Pricer(training, cluster, stack), 1).best[0]
        except InfeasiblePlanError:  # too small for the model, or more devices than the batch has samples
            return None
        days = tokens / training.tokens_per_step * best.step_s / (24 * HOUR)
        return {
            "n_gpus": n_gpus,
            "days": days,
            "low_days": days * best.low_s / best.step_s,
            "high_days": days * best.high_s / best.step_s,
            "tokens_per_s_per_gpu": best.tokens_per_s_per_gpu,
            "mfu": best.mfu,
            "usd": days * 24 * n_gpus * usd_per_gpu_hour if usd_per_gpu_hour else float("nan"),
            "layout": best.layout.text,
        }

    numbers = [2**power for power in range(most_gpus.bit_length())]
    found = {number: row(number) for number in dict.fromkeys([*numbers, most_gpus])}
    if most_days is not None:
        in_time = [number for number, one in found.items() if one and one["days"] <= most_days]
        first = min(in_time, default=most_gpus)
        below = max((number for number in numbers if number < first), default=first)
        node = cluster_of(kind, most_gpus).gpus_per_node
        for number in range(below + 1, first):
            is_usual = number < node or number % node == 0
            if is_usual and (number - below) * _BETWEEN % below == 0:
                found[number] = row(number)
    return pd.DataFrame([found[number] for number in sorted(found) if found[number] is not None])
