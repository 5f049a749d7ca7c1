"""EasyScale: a job starts on one GPU and grows while free GPUs make it faster, on one type or on several.

A job has as many logical workers as it requests GPUs; those that share a GPU run one after another, as with
gradient accumulation. In each round a waiting job gets one GPU of the slowest type on which it may run. Each
running job proposes, for every type, the growth with the largest speed-up per added GPU, and at most one
exchange of GPUs for those of another type; the best proposals for which GPUs are free are accepted. Jobs
shrink only where the withdrawal of capacity is announced.

Ties between proposals, and between jobs that wait for the same GPU, go to the job submitted first. Jobs
submitted at the same time are ordered by name, with numbers compared by value, so the order of the rows in a
job list does not matter.

Deviation: a job without a configuration on one GPU starts as requested once that fits, and never changes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from makespan.hardware import ClusterSpec
from makespan.policies.placing import Fit, FreeResources, fastest_by_placement
from makespan.sim import (
    Allocation,
    Catalogue,
    ClusterView,
    Configuration,
    Decision,
    Devices,
    JobView,
    NodeEventKind,
)

_REFERENCES = (
    "Li et al., EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs, "
    "SC 2023",
)
_ROUNDING = 1e-9
_DIGITS = 9  # decimals of a score, so that proposals that differ by rounding alone are ties
Options = tuple[Configuration, ...]
_Turn = tuple[float, tuple[tuple[int, str], ...], str]
_NUMBERS = re.compile(r"(\d+)")


class _Proposal(NamedTuple):
    """A change that a job proposes: its score, the GPUs that it needs, and the options after it."""

    score: float
    n_gpus: int
    gpu_type: str
    options: Options


class _ScalingOptions:
    """Cache of the options of workloads and of the proposals of jobs, by the devices that they hold."""

    def __init__(self, catalogue: Catalogue, cluster: ClusterSpec, policy: "EasyScale") -> None:
        self._catalogue, self._policy = catalogue, policy
        self._cluster_types = ("", *cluster.gpu_types)
        self._types: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
        self._options: dict[tuple[str, Devices], Options] = {}
        self._proposals: dict[tuple[Configuration, int, tuple[str, ...]], tuple[_Proposal, ...]] = {}
        self._turns: dict[str, _Turn] = {}

    def turn(self, job: JobView) -> _Turn:
        """Return the key that breaks ties between jobs: time of submission, then name."""
        spec = job.spec
        if spec.job_id not in self._turns:
            parts = _NUMBERS.split(spec.job_id)  # text and digits alternate
            key = tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
            self._turns[spec.job_id] = (spec.submit_time_s, key, spec.job_id)
        return self._turns[spec.job_id]

    def options(self, workload: str, devices: Devices) -> Options:
        """Return the options of a workload on exactly these devices, one per placement."""
        key = (workload, devices)
        if key not in self._options:
            held = self._catalogue.holding(workload, devices)
            self._options[key] = tuple(
                fastest_by_placement(item for item in held if item.plan == self._policy.plan)
            )
        return self._options[key]

    def types(self, job: JobView) -> tuple[str, ...]:
        """Return the GPU types on which a job may run, slowest first; none if no single GPU is enough."""
        workload = job.spec.workload
        home = () if self._policy.mixes_types else self._catalogue.requested(job.spec).gpu_types or ("",)
        key = (workload, home)
        if key not in self._types:
            allowed = [name for name in self._cluster_types if not home or name in home]
            able = [name for name in allowed if self.options(workload, ((name, 1),))]
            self._types[key] = tuple(sorted(able, key=lambda name: self._rate(workload, ((name, 1),))))
        return self._types[key]

    def proposals(self, job: JobView) -> tuple[_Proposal, ...]:
        """Return the proposals of a running job."""
        types = self.types(job)
        if job.allocation is None or not types:
            return ()
        held, most = job.allocation.configuration, job.spec.n_gpus
        key = (held, most, types)
        if key not in self._proposals:
            ordered = [name for name in self._cluster_types if name in types]
            growth = [self._best_growth(held, most, name) for name in ordered]
            swap = self._best_swap(held, ordered) if self._policy.swaps else None
            self._proposals[key] = tuple(proposal for proposal in (*growth, swap) if proposal is not None)
        return self._proposals[key]

    def _best_growth(self, held: Configuration, most: int, gpu_type: str) -> _Proposal | None:
        counts = range(1, min(held.n_gpus, most - held.n_gpus) + 1)
        return _best(self._offer(held, {gpu_type: count}, count, gpu_type, 0.0) for count in counts)

    def _best_swap(self, held: Configuration, types: Iterable[str]) -> _Proposal | None:
        return _best(
            self._offer(held, {new: count, old: -count}, count, new, self._policy.min_swap_gain)
            for new in types
            for old, owned in held.devices
            if old != new
            for count in range(1, owned + 1)
        )

    def _offer(
        self, held: Configuration, change: Mapping[str, int], n_gpus: int, gpu_type: str, least_gain: float
    ) -> _Proposal | None:
        """Return a change as a proposal; None if it gains too little or leaves too much capability unused."""
        devices = changed(held.devices, change)
        options = self.options(held.workload, devices)
        if not options:
            return None
        rate = self._rate(held.workload, devices)
        gain = rate * held.predicted_iter_time_s - 1.0
        # Speed of the same GPUs if each ran a job of its own: a mixed job waits for its slowest GPU.
        capability = sum(count * self._rate(held.workload, ((name, 1),)) for name, count in devices)
        if gain <= _ROUNDING or gain < least_gain - _ROUNDING or not capability:
            return None
        if 1.0 - rate / capability > self._policy.max_waste + _ROUNDING:
            return None
        return _Proposal(round(gain / n_gpus, _DIGITS), n_gpus, gpu_type, options)

    def _rate(self, workload: str, devices: Devices) -> float:
        """Return the predicted steps/s on the fastest placement of these devices, 0 if there is none."""
        times = [item.predicted_iter_time_s for item in self.options(workload, devices)]
        return 1.0 / min(times) if times else 0.0


def _best(proposals: Iterable[_Proposal | None]) -> _Proposal | None:
    """Return the proposal with the highest score; ties go to the most GPUs, then to the first."""
    possible = [proposal for proposal in proposals if proposal is not None]
    return max(possible, key=lambda proposal: proposal[:2], default=None)


def changed(devices: Devices, change: Mapping[str, int]) -> Devices:
    """Return devices after a change: positive numbers are added, negative ones removed."""
    totals = dict(devices)
    for name, count in change.items():
        totals[name] = totals.get(name, 0) + count
    return tuple(sorted((name, count) for name, count in totals.items() if count > 0))


@dataclass(frozen=True, slots=True)
class EasyScale:
    """Elastic jobs on equal or on mixed GPUs.

    Parameters
    ----------
    mixes_types
        True if a job uses all types on which it has configurations, False if only the requested one.
    swaps
        True if a job exchanges GPUs for those of another type.
    max_waste
        Share of the capability of its GPUs that a job may leave unused after a change.
    min_swap_gain
        Least relative speed-up for which a job exchanges GPUs.
    plan
        Plan of its configurations, in trace notation.
    """

    name: str
    title: str
    mixes_types: bool
    swaps: bool
    interval_s: float = 60.0
    max_waste: float = 0.3
    min_swap_gain: float = 0.1
    plan: str = "ga"
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = _REFERENCES

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> _ScalingOptions:
        """Return an empty cache of options."""
        return _ScalingOptions(catalogue, cluster, self)

    def decide(self, view: ClusterView, state: _ScalingOptions) -> tuple[Decision, _ScalingOptions]:
        """Shrink jobs where devices are withdrawn, start waiting jobs, then accept the best proposals."""
        round_ = _Round(view, state)
        round_.scale_in()
        if round_.free[""] > 0:
            round_.start()
            round_.accept()
        # After a change, jobs may grow further in the next round; without one it would find the same.
        again_s = view.time_s + (view.interval_s or self.interval_s)
        return Decision(round_.changes, again_s if round_.changes else None), state


class _Round:
    """State of one decision.

    ``free`` counts the GPUs that may be handed out now, by type and in total (key ``""``). It can be lower
    than what ``_free`` has on the nodes: GPUs that will be withdrawn, and those that an exchange releases,
    are not handed out in this round.
    """

    def __init__(self, view: ClusterView, scaling: _ScalingOptions) -> None:
        self._view, self._scaling = view, scaling
        self._free = FreeResources.of(view, is_tight=True)
        self.changes: dict[str, Allocation | None] = {}
        self.free = {"": view.n_free_gpus}
        for name, count in zip(view.gpu_types, view.free_gpus, strict=True):
            self.free[name] = self.free.get(name, 0) + count

    def scale_in(self) -> None:
        """Shrink jobs on nodes whose devices will be withdrawn, those that started last first."""
        withdrawn: dict[int, int] = {}
        for event in self._view.announced:
            if event.kind is NodeEventKind.WITHDRAWN and event.n_gpus:
                withdrawn[event.node_id] = withdrawn.get(event.node_id, 0) + event.n_gpus
        for node, n_gpus in sorted(withdrawn.items()):
            name, missing = self._view.gpu_types[node], n_gpus - self._view.free_gpus[node]
            for job in reversed(list(self._view.running)):
                if missing > 0 and job.spec.job_id not in self.changes and job.allocation is not None:
                    missing -= self._shrink(job, job.allocation, node, missing)
            for kind in ("", name):
                self.free[kind] = max(self.free[kind] - n_gpus, 0)

    def _shrink(self, job: JobView, held: Allocation, node: int, missing: int) -> int:
        """Take devices of a node from a job, all of them if it cannot run on the rest; return how many."""
        share, configuration = dict(held.shares).get(node, 0), held.configuration
        if not share:
            return 0
        name = dict(zip(held.nodes, configuration.gpu_types, strict=False)).get(node, "")
        self._free.give(configuration, held.nodes[::-1])
        # A job without a configuration on exactly the rest gives up more devices than are missing.
        for count in range(min(missing, share), share + 1):
            devices = changed(configuration.devices, {name: -count})
            options = self._scaling.options(job.spec.workload, devices) if devices else ()
            fit = self._free.first_fit(options) if devices else None
            if fit is not None:
                self._take(job, fit)
                return count
        self.changes[job.spec.job_id] = None
        return share

    def start(self) -> None:
        """Give each waiting job one GPU of the slowest free type; jobs that need more start as requested."""
        for job in sorted(self._view.pending, key=self._scaling.turn):
            types = self._scaling.types(job)
            wanted = [self._scaling.options(job.spec.workload, ((name, 1),)) for name in types]
            if not types:
                wanted = [self._view.catalogue.as_requested(job.spec)]
            for options in wanted:
                affordable = tuple(
                    item for item in options if all(self.free[name] >= count for name, count in item.devices)
                )
                fit = self._free.first_fit(affordable) if affordable else None
                if fit is not None:
                    self._take(job, fit)
                    self._spend(fit[0].devices)
                    break

    def accept(self) -> None:
        """Accept the best proposals of running jobs, at most one per job."""
        # Ties are broken by the number of GPUs, the turn of the job, the type, and the order of proposals.
        types = {name: rank for rank, name in enumerate(("", *self._view.cluster.gpu_types))}
        proposals = [
            (
                -proposal.score,
                -proposal.n_gpus,
                self._scaling.turn(job),
                types[proposal.gpu_type],
                number,
                proposal,
                job,
            )
            for job in self._view.running
            if job.spec.job_id not in self.changes
            for number, proposal in enumerate(self._scaling.proposals(job))
        ]
        for *_, proposal, job in sorted(proposals, key=lambda entry: entry[:5]):
            held = job.allocation
            # Further proposals of a changed job refer to devices that it no longer holds.
            if (
                job.spec.job_id in self.changes
                or held is None
                or self.free[proposal.gpu_type] < proposal.n_gpus
            ):
                continue
            self._free.give(held.configuration, held.nodes[::-1])  # it may use its present devices again
            fit = self._free.first_fit(proposal.options)
            if fit is None:
                self._free.take(held.configuration, held.nodes[::-1])
                continue
            self._take(job, fit)
            self._spend(((proposal.gpu_type, proposal.n_gpus),))

    def _take(self, job: JobView, fit: Fit) -> None:
        self._free.take(*fit)
        self.changes[job.spec.job_id] = fit[0].on(fit[1])

    def _spend(self, devices: Devices) -> None:
        """Count devices as handed out; GPUs that an exchange releases stay free until the next round."""
        for name, count in devices:
            for kind in {"", name}:
                self.free[kind] -= count


POLICIES = (
    EasyScale("easyscale-heter", "EasyScale-heter", mixes_types=True, swaps=True),
    EasyScale("easyscale-heter-growth", "EasyScale-heter without swaps", mixes_types=True, swaps=False),
    EasyScale("easyscale-homo", "EasyScale-homo", mixes_types=False, swaps=False),
)
