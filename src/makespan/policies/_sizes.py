"""The device counts between which a job can be scaled without changing the kind of its plan."""

from dataclasses import dataclass, field

from makespan.plans import ExecutionPlan, read_plan
from makespan.sim import Catalogue, Configuration
from makespan.workloads import JobSpec

__all__ = ["Size", "Sizes"]


@dataclass(frozen=True, slots=True)
class Size:
    """One device count of a kind of job.

    Parameters
    ----------
    n_gpus
        Devices.
    options
        Configurations with that many, fewest nodes first.
    speed
        Predicted throughput over that of the smallest size, times the devices of the smallest.
    """

    n_gpus: int
    options: tuple[Configuration, ...]
    speed: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of each kind of request, computed once a kind.

    A data-parallel plan keeps its name and takes any number of devices; a plan that splits the model
    keeps its tensor and pipeline degree and changes the number of replicas. Inside a node, counts
    are powers of two; beyond, whole nodes; what the job asked for is always among them. Counts
    that bring no speed are left out.

    Parameters
    ----------
    gpus_per_node
        Devices of the largest node.
    max_slowdown
        Placements on more nodes are options if their steps are predicted at most this many times as
        long.
    """

    gpus_per_node: int
    max_slowdown: float
    _known: dict[tuple[str, str, int], tuple[Size, ...]] = field(default_factory=dict)

    def of(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        """Return the sizes of a job, smallest first, each faster than the one before."""
        key = (spec.workload, spec.plan, spec.n_gpus)
        if key not in self._known:
            self._known[key] = self._look_up(spec, catalogue)
        return self._known[key]

    def _look_up(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        reference = catalogue.requested(spec)
        by_count: dict[int, list[Configuration]] = {}
        for item in _variants(reference, catalogue):
            if item.n_gpus == reference.n_gpus or self._is_regular(item.n_gpus):
                by_count.setdefault(item.n_gpus, []).append(item)
        sizes: list[Size] = []
        for n_gpus, items in sorted(by_count.items()):
            step_s = items[0].predicted_iter_time_s
            smallest = sizes[0] if sizes else None
            base = items[0] if smallest is None else smallest.options[0]
            speed = base.n_gpus * base.predicted_iter_time_s / step_s
            if sizes and speed <= sizes[-1].speed:
                continue
            limit_s = self.max_slowdown * step_s
            options = tuple(item for item in items if item.predicted_iter_time_s <= limit_s)
            sizes.append(Size(n_gpus, options, speed))
        return tuple(sizes)

    def _is_regular(self, n_gpus: int) -> bool:
        if n_gpus >= self.gpus_per_node:
            return n_gpus % self.gpus_per_node == 0
        return n_gpus & (n_gpus - 1) == 0


def _variants(reference: Configuration, catalogue: Catalogue) -> list[Configuration]:
    """Return the configurations that differ from a reference in devices only, fastest threads each."""
    degrees = _degrees(reference)
    best: dict[tuple[int, ...], Configuration] = {}
    for item in catalogue.all(reference.workload):
        if item.plan != reference.plan and (degrees is None or _degrees(item) != degrees):
            continue
        known = best.get(item.counts)
        if known is None or item.predicted_iter_time_s < known.predicted_iter_time_s:
            best[item.counts] = item
    return list(best.values())


def _degrees(item: Configuration) -> tuple[int, int] | None:
    """Return tensor and pipeline degree of a plan that splits the model, None for any other."""
    # Only the degrees are of interest, so one sample a device is batch enough for any of them.
    plan: ExecutionPlan = read_plan(item.plan, n_gpus=item.n_gpus, global_batch_size=item.n_gpus)
    return (plan.tp, plan.pp) if plan.is_model_parallel else None
