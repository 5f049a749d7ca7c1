"""Let blocked jobs take devices from running ones, where all known jobs together gain."""

from collections.abc import Iterable, Sequence
from math import inf

from makespan.policies.morphling._draft import Draft, Slot, Task
from makespan.policies.morphling._outlook import Outlook, foresee
from makespan.policies.morphling._pricing import Moment
from makespan.sim import Configuration

__all__ = ["clear", "take_devices"]


def take_devices(draft: Draft, blocked: list[Task], moment: Moment) -> tuple[Draft, list[Task]]:
    """Carry out the best taking of devices, again and again until none pays.

    Each of the first blocked jobs is tried with each of its choices; the look-ahead tells what a
    draft is worth, the jobs that lose and those that wait behind included. A job that took devices
    does not lose them again in the same decision.

    Returns
    -------
    tuple[Draft, list[Task]]
        The draft that is worth most, and who is still blocked.
    """
    tuning = moment.tuning
    winners: set[Task] = set()
    outlook = _foresee(draft, blocked, moment)
    while outlook is not None and blocked and len(winners) < tuning.max_takings:
        best: tuple[Outlook, Task, Draft, list[Task]] | None = None
        bar_s = outlook.cost_s - tuning.min_gain_s
        for task in blocked[: tuning.max_takers]:
            if outlook.waits_s[task] < tuning.min_wait_delays * moment.delay_s:
                continue
            for item in task.choices:
                trial = _try(draft, blocked, task, item, winners, moment)
                if trial is None:
                    continue
                foreseen = _foresee(*trial, moment, bar_s)
                if foreseen is not None:
                    bar_s = foreseen.cost_s
                    best = (foreseen, task, *trial)
        if best is None:
            break
        outlook, winner, draft, blocked = best
        winners.add(winner)
    return draft, blocked


def _foresee(draft: Draft, blocked: Sequence[Task], moment: Moment, bar_s: float = inf) -> Outlook | None:
    tuning = moment.tuning
    return foresee(
        draft,
        blocked,
        moment.now_s,
        last_weight=tuning.last_weight,
        grain_s=tuning.grain_s,
        max_foreseen=tuning.max_foreseen,
        bar_s=bar_s,
    )


def _try(
    draft: Draft,
    blocked: Sequence[Task],
    task: Task,
    item: Configuration,
    protected: set[Task],
    moment: Moment,
) -> tuple[Draft, list[Task]] | None:
    """Return the draft in which a job takes a configuration by force, and who waits then."""
    cleared = clear(draft, task, item, protected, moment.delay_s)
    if cleared is None:
        return None
    trial, homeless = cleared
    moment.admit(homeless)
    queue = sorted([*(other for other in blocked if other is not task), *homeless], key=_rank)
    return trial, trial.start(queue)


def _rank(task: Task) -> tuple[float, ...]:
    return task.rank


def clear(
    draft: Draft, task: Task, item: Configuration, protected: Iterable[Task], delay_s: float
) -> tuple[Draft, list[Task]] | None:
    """Return a copy in which a job holds a configuration, and who lost everything for it.

    The nodes are those on which the least is destroyed. Whoever loses devices there is moved or
    shrunk if that ends earlier than waiting for the job to finish.

    Returns
    -------
    tuple[Draft, list[Task]] or None
        None if there are not enough nodes, or a guaranteed job could not be kept.
    """
    runtime_s = delay_s + task.steps * item.predicted_iter_time_s
    chosen = _cheapest_nodes(draft, item, set(protected), delay_s, runtime_s)
    if chosen is None:
        return None
    nodes, victims = chosen
    trial = draft.copy()
    lost = [(victim, trial.remove(victim)) for victim in victims]
    trial.place(task, item, nodes)
    lost.sort(key=lambda entry: (not entry[0].is_guaranteed, entry[1].finish_s, entry[0].index))
    homeless = []
    for victim, slot in lost:
        if not _resettle(trial, victim, slot, delay_s, runtime_s + delay_s):
            if victim.is_guaranteed:
                return None
            homeless.append(victim)
    return None if trial.room.has_shortage() else (trial, homeless)


def _resettle(trial: Draft, victim: Task, slot: Slot, delay_s: float, break_s: float) -> bool:
    """Place a job elsewhere on as many devices at most, unless a break as long as given is better."""
    best: tuple[float, Configuration, tuple[int, ...]] | None = None
    for item in victim.options:
        if item.n_gpus > slot.item.n_gpus:
            break
        time_s = item.predicted_iter_time_s
        if best is None or time_s < best[0]:
            nodes = trial.room.fit(item)
            if nodes is not None:
                best = (time_s, item, nodes)
    if best is None:
        return False
    waiting_s = break_s + victim.steps * slot.item.predicted_iter_time_s
    if not victim.is_guaranteed and delay_s + victim.steps * best[0] > waiting_s:
        return False
    trial.place(victim, best[1], best[2])
    return True


def _cheapest_nodes(
    draft: Draft, item: Configuration, protected: set[Task], delay_s: float, runtime_s: float
) -> tuple[tuple[int, ...], list[Task]] | None:
    """Choose nodes for a configuration, and whom to remove from them, greedily by what it costs."""
    residents = _residents(draft, protected, delay_s, runtime_s)
    nodes: list[int] = []
    victims: dict[Task, None] = {}
    for count in item.counts:
        best: tuple[tuple[float, int, int], list[Task]] | None = None
        for node, free in enumerate(draft.room.gpus):
            if node in nodes:
                continue
            found = _cheapest_victims(residents[node], victims, count - free)
            if found is None:
                continue
            key = (found[0], free, node)
            if best is None or key < best[0]:
                best = (key, found[1])
        if best is None:
            return None
        nodes.append(best[0][2])
        victims.update(dict.fromkeys(best[1]))
    return tuple(nodes), list(victims)


Residents = list[tuple[float, int, Task, int]]


def _residents(draft: Draft, protected: set[Task], delay_s: float, runtime_s: float) -> list[Residents]:
    """List for every node who could be removed: cost a device [s], index, job, devices there.

    Removing a job costs a restart; one on several nodes hardly finds as many again, so it also
    waits for the newcomer.
    """
    residents: list[Residents] = [[] for _ in draft.room.gpus]
    for task, slot in draft.slots.items():
        if task in protected:
            continue
        cost_s = delay_s if len(slot.nodes) == 1 else delay_s + runtime_s
        for node, count in zip(slot.nodes, slot.item.counts, strict=True):
            residents[node].append((cost_s / count, task.index, task, count))
    for entries in residents:
        entries.sort(key=lambda entry: entry[:2])
    return residents


def _cheapest_victims(
    residents: Residents, removed: dict[Task, None], shortfall: int
) -> tuple[float, list[Task]] | None:
    """Return what it costs to free so many devices of a node, and whom to remove; None if impossible."""
    if shortfall <= 0:
        return 0.0, []
    for _, _, task, count in residents:
        if task in removed:
            shortfall -= count
    cost_s, victims = 0.0, []
    for rate_s, _, task, count in residents:
        if shortfall <= 0:
            break
        if task not in removed:
            victims.append(task)
            cost_s += rate_s * count
            shortfall -= count
    return None if shortfall > 0 else (cost_s, victims)
