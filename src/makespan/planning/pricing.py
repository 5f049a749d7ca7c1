"""The fastest feasible layouts of a training run, with what each costs and why the next is slower."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.errors import InfeasiblePlanError, InputError
from makespan.planning.architecture import Architecture, Experts
from makespan.planning.factors import Calibrated, Knowledge, calibrate_rows, knowledge, predict_rows
from makespan.planning.layout import Layout
from makespan.planning.machines import Machines, read_machines
from makespan.planning.memory import COMPONENTS, fits, memory_table
from makespan.planning.stacks import Software, Training
from makespan.planning.steptime import NAMES, Grid, ideal_terms
from makespan.units import GIB, HOUR

Array = NDArray[np.float64]
_Z90 = 1.645  # half width of an interval of 90 %, in spreads
_BLOCK = 20_000  # layouts that are priced at once
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_MOST_TENSOR = 8
_CHUNKS = (2, 3, 4, 5, 6, 8)
_LEAST_PIECE = 8192  # tokens; every published row with context parallelism has at least as many


@dataclass(frozen=True, slots=True)
class Priced:
    """One layout with its prediction.

    Parameters
    ----------
    layout
        What runs.
    step_s, low_s, high_s
        Time of a step, and its interval of 90 % [s].
    tokens_per_s_per_gpu, mfu
        Throughput, and model FLOP over the dense peak [1].
    usd_per_million_tokens
        Cost; NaN where the cluster has no price.
    memory_bytes
        Memory of the fullest device by component, keys as in `makespan.planning.COMPONENTS`.
    terms_s
        The step by term, keys as in `makespan.planning.TERMS`; they add up to ``step_s``.
    is_feasible
        True if it fits into the memory of the device.
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

    @property
    def total_memory_bytes(self) -> float:
        """Memory of the fullest device [B]."""
        return sum(self.memory_bytes.values())

    def over(self, best: "Priced") -> str:
        """Say which terms make this layout slower than another one, the largest first."""
        extra = {name: self.terms_s[name] - best.terms_s[name] for name in NAMES}
        slower = sorted((name for name in NAMES if extra[name] > 0.02 * best.step_s), key=lambda n: -extra[n])
        return ", ".join(f"{name} +{extra[name]:.3g} s" for name in slower[:3])


@dataclass(frozen=True, slots=True)
class Pricer:
    """What prices layouts: a run, a cluster, a stack, and what measured rows taught about them."""

    training: Training
    machines: Machines
    stack: Software
    calibrated: Calibrated | None = None
    base: Knowledge | None = None

    @property
    def _logs(self) -> Array:
        known = self.base or knowledge()
        return known.logs(self.stack.family, self.machines.device.name, self.training.precision)

    def times(self, grid: Grid) -> tuple[Array, Array, Array]:
        """Return steps [s], the spreads of their logarithms, and ideal terms [s] of all columns of a grid."""
        terms = ideal_terms(self.training, grid, self.machines, self.stack)
        step_s, spread = predict_rows(self._logs, terms, self.calibrated)
        return step_s, spread, terms

    def memory(self, grid: Grid) -> Array:
        """Return the memory by component [B], (n_layouts, n_components)."""
        return memory_table(self.training, grid, self.machines, self.stack)

    def price(self, layout: Layout) -> Priced:
        """Price one layout, whether it fits or not.

        Raises `PlanError` where the batch cannot be divided, `InputError` where the layout does not go with
        the model or the cluster.
        """
        layout.microbatches(self.training.global_batch)
        if layout.n_gpus != self.machines.n_gpus:
            raise InputError(
                f"layout {layout.text!r} is for {layout.n_gpus} GPUs; the cluster has {self.machines.n_gpus}"
            )
        if problem := misfit(self.training.model, layout):
            raise InputError(f"layout {layout.text!r}: {problem}")
        grid = Grid.of([layout])
        step_s, spread, terms = self.times(grid)
        logs, offsets = self._logs, self.calibrated.offsets if self.calibrated else np.zeros(len(NAMES) + 1)
        own = np.exp(logs + offsets[0] + offsets[1:]) * terms[0]
        memory = self.memory(grid)
        return self._priced(
            layout, float(step_s[0]), float(spread[0]), own, memory[0], bool(fits(memory, self.machines)[0])
        )

    def _priced(
        self, layout: Layout, step_s: float, spread: float, terms_s: Array, memory: Array, is_feasible: bool
    ) -> Priced:
        training, machines = self.training, self.machines
        throughput = training.tokens_per_step / step_s / machines.n_gpus
        flop = training.global_batch * training.model.flop_per_sample(training.seq) * training.computed_share
        peak = machines.n_gpus * machines.device.peak_flop_per_s(training.precision)
        price = machines.usd_per_gpu_hour
        return Priced(
            layout=layout,
            step_s=step_s,
            low_s=step_s * math.exp(-_Z90 * spread),
            high_s=step_s * math.exp(_Z90 * spread),
            tokens_per_s_per_gpu=throughput,
            mfu=flop / step_s / peak,
            usd_per_million_tokens=price / HOUR / throughput * 1e6 if price else float("nan"),
            memory_bytes=dict(zip(COMPONENTS, map(float, memory), strict=True)),
            terms_s=dict(zip(NAMES, map(float, terms_s), strict=True)),
            is_feasible=is_feasible,
        )


def misfit(model: Architecture, layout: Layout) -> str:
    """Say why a layout does not go with a model; empty if it does."""
    if layout.pp * layout.interleave > model.n_layers:
        return f"{layout.pp} stages of {layout.interleave} chunks for {model.n_layers} layers"
    for run in model.kinds:
        if run.attention.heads % layout.tp:
            return f"tensor parallelism over {layout.tp} does not divide {run.attention.heads} heads"
    experts = [run.ffn.n_experts for run in model.kinds if isinstance(run.ffn, Experts)]
    if layout.ep > 1 and not experts:
        return f"experts over {layout.ep} devices, but the model has none"
    if experts and any(count % layout.ep for count in experts):
        return f"expert parallelism over {layout.ep} does not divide {experts[0]} experts"
    return ""


def layouts(training: Training, machines: Machines) -> Iterator[Layout]:
    """Yield the layouts that go with a run and a cluster, whether they fit into memory or not.

    Tensor parallelism stays inside a node; degrees are divisors. What is sharded is the optimizer (ZeRO-1)
    or, without a pipeline, also the parameters (FSDP), over all devices or those of a node (HSDP).
    """
    model, n = training.model, machines.n_gpus
    experts = next((run.ffn.n_experts for run in model.kinds if isinstance(run.ffn, Experts)), 1)
    items = (model.n_layers, model.n_layers + 2)  # with embedding and loss as layers of their own
    for tp, pp in itertools.product(_divisors(n), _divisors(n)):
        if n % (tp * pp) or tp > min(_MOST_TENSOR, machines.gpus_per_node):
            continue
        chunks = [v for v in _CHUNKS if pp > 1 and any(count % (pp * v) == 0 for count in items)]
        for cp in _divisors(n // (tp * pp)):
            if cp > 1 and training.seq // cp < _LEAST_PIECE:
                continue
            dp = n // (tp * pp * cp)
            degrees = [ep for ep in _divisors(dp * cp * tp) if experts % ep == 0]
            for ep, interleave, micro in itertools.product(degrees, [1, *chunks], _MICRO_BATCHES):
                if training.global_batch % (dp * micro):
                    continue
                base = Layout(
                    dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, interleave=interleave, micro_batch=micro,
                    sequence_parallel=tp > 1,
                )  # fmt: skip
                if not misfit(model, base):
                    yield from _variants(base, machines, model)


def _variants(base: Layout, machines: Machines, model: Architecture) -> Iterator[Layout]:
    """Yield a layout with everything that may be sharded and recomputed."""
    chunks = base.pp * base.interleave
    ends = base.pp > 1 and model.n_layers % chunks != 0 and (model.n_layers + 2) % chunks == 0
    base = replace(base, ends_as_layers=ends)
    peers = base.dp * base.cp
    sharded = [base]
    if base.pp == 1 and peers > 1:
        sharded.append(replace(base, zero=3))
        node = machines.gpus_per_node // base.tp
        if 1 < node < peers and peers % node == 0:
            sharded.append(replace(base, zero=3, shard=node))
    for one in sharded:
        for recompute in ("none", "selective", "full"):
            yield replace(one, recompute=recompute)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


@dataclass(frozen=True, slots=True)
class Plans:
    """The fastest feasible layouts, best first, out of how many that were tried."""

    pricer: Pricer
    best: tuple[Priced, ...]
    n_tried: int
    n_feasible: int

    @property
    def n_ties(self) -> int:
        """Layouts shown whose step is at most 2 % above that of the first."""
        return sum(one.step_s <= 1.02 * self.best[0].step_s for one in self.best)

    def table(self) -> pd.DataFrame:
        """Return the layouts as a table, units in the names of its columns."""
        return pd.DataFrame(
            [
                {
                    "layout": one.layout.text,
                    "dp": one.layout.dp,
                    "step_s": one.step_s,
                    "low_s": one.low_s,
                    "high_s": one.high_s,
                    "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
                    "mfu": one.mfu,
                    "memory_gib": one.total_memory_bytes / GIB,
                    "usd_per_million_tokens": one.usd_per_million_tokens,
                    "slower_by": "" if one is self.best[0] else one.over(self.best[0]),
                }
                for one in self.best
            ]
        )


def plan(pricer: Pricer, n_best: int = 5) -> Plans:
    """Find the fastest layouts that fit.

    Raises
    ------
    InfeasiblePlanError
        None fits; the message says how much memory the smallest one needs.
    InputError
        No layout divides the batch over the devices.
    """
    tried = list(layouts(pricer.training, pricer.machines))
    if not tried:
        raise InputError(
            f"no layout divides a batch of {pricer.training.global_batch} samples over "
            f"{pricer.machines.n_gpus} GPUs; expected a batch that has the data-parallel degree as a divisor"
        )
    step_s, spread, memory, is_feasible = [], [], [], []
    for start in range(0, len(tried), _BLOCK):
        grid = Grid.of(tried[start : start + _BLOCK])
        times = pricer.times(grid)
        table = pricer.memory(grid)
        step_s.append(times[0])
        spread.append(times[1])
        memory.append(table.sum(axis=1))
        is_feasible.append(fits(table, pricer.machines))
    steps, fit, needed = np.concatenate(step_s), np.concatenate(is_feasible), np.concatenate(memory)
    if not fit.any():
        least = int(np.argmin(needed))
        raise InfeasiblePlanError(
            f"none of {len(tried):,} layouts fits: the smallest, {tried[least].text!r}, needs "
            f"{needed[least] / GIB:.0f} GiB on a device with {pricer.machines.device.memory_gib:.0f} GiB; "
            "more GPUs or a smaller model would help"
        )
    order = np.argsort(np.where(fit, steps, np.inf), kind="stable")[: min(n_best, int(fit.sum()))]
    return Plans(pricer, tuple(pricer.price(tried[i]) for i in order), len(tried), int(fit.sum()))


def calibrated_by(pricer: Pricer, measured: Sequence[tuple[Training, Layout, Machines, float]]) -> Pricer:
    """Return a pricer refined by measured steps [s] of the same model, stack and cluster."""
    if not measured:
        return pricer
    terms = np.concatenate(
        [ideal_terms(run, Grid.of([layout]), where, pricer.stack) for run, layout, where, _ in measured]
    )
    known = pricer.base or knowledge()
    logs = np.array(
        [known.logs(pricer.stack.family, where.device.name, run.precision) for run, _, where, _ in measured]
    )
    return replace(
        pricer, calibrated=calibrate_rows(logs, terms, np.array([step_s for *_, step_s in measured]))
    )


def describe(one: Priced) -> dict[str, Any]:
    """Return a priced layout as plain values, ready for JSON."""
    return {
        "layout": one.layout.text,
        "dp": one.layout.dp,
        "step_s": one.step_s,
        "interval_90_s": [one.low_s, one.high_s],
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "mfu": one.mfu,
        "usd_per_million_tokens": None
        if math.isnan(one.usd_per_million_tokens)
        else one.usd_per_million_tokens,
        "memory_bytes": one.memory_bytes,
        "terms_s": {name: value for name, value in one.terms_s.items() if value > 0},
    }


def size_clusters(
    training: Training,
    kind: str,
    stack: Software,
    *,
    tokens: float,
    most_gpus: int,
    usd_per_gpu_hour: float = 0.0,
) -> pd.DataFrame:
    """Return how long a run takes and what it costs on growing numbers of devices.

    Parameters
    ----------
    tokens
        Tokens to train on.
    kind, most_gpus
        Key of the device, and the most of them; numbers are powers of two.
    usd_per_gpu_hour
        Price; 0 for none.

    Returns
    -------
    pandas.DataFrame
        One row per number of devices on which the model fits, with its best layout, days with their interval,
        and cost (NaN without a price).
    """
    rows = []
    n_gpus = 1
    while n_gpus <= most_gpus:
        machines = replace(read_machines(f"{n_gpus}x{kind}"), usd_per_gpu_hour=usd_per_gpu_hour)
        try:
            best = plan(Pricer(training, machines, stack), 1).best[0]
        except InputError:  # too small for the model, or more devices than the batch has samples
            n_gpus *= 2
            continue
        days = tokens / training.tokens_per_step * best.step_s / (24 * HOUR)
        rows.append(
            {
                "n_gpus": n_gpus,
                "days": days,
                "low_days": days * best.low_s / best.step_s,
                "high_days": days * best.high_s / best.step_s,
                "tokens_per_s_per_gpu": best.tokens_per_s_per_gpu,
                "mfu": best.mfu,
                "usd": days * 24 * n_gpus * usd_per_gpu_hour if usd_per_gpu_hour else float("nan"),
                "layout": best.layout.text,
            }
        )
        n_gpus *= 2
    return pd.DataFrame(rows)
