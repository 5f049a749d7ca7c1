"""Recovery of an elastic run from memory: what processes hold, and who trains what after a change.

Every process has the parameters, and the optimizer unless that is in shards, which
`makespan.easyscale.optimizer_shards` describes. What a lost process takes along are the contexts of its
logical workers (ESTs); before a process counts a mini-batch as done, those after it are on ``survives`` other
processes for all of them, if possible on other hosts. After a loss, the processes report how many
mini-batches they have done and which contexts they hold. Repeated mini-batches have equal bits, so any number
of mini-batches that one process has done, with the contexts of all ESTs, is a state to continue from; the
highest is chosen.

A process that leaves on notice, and one that joins, change the mapping in the same way, but between two
mini-batches, so that none is repeated. A process that joins copies everything from another one.

`RecoveryPlanner` decides this in the launching process, without torch, and `RecoveryProtocol` when it does.
`makespan.easyscale.recovering_worker` is the code of the processes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from makespan.easyscale.job import RankMapping
from makespan.errors import LostWorkerError
from makespan.runtime.messages import Cause, Failed, Leave, Shared
from makespan.runtime.protocol import (
    Abort,
    Action,
    ClusterState,
    CoordinatorProtocol,
    Decision,
    Phase,
    Send,
)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Instructions to the processes of a generation: who hosts which ESTs, and where their state comes from.

    Parameters
    ----------
    mapping, nodes, hosts
        Mapping of ESTs to processes, and the node and the host of each of its processes.
    stage
        Number of the set of processes in the run, see the table ``steps``.
    step
        Mini-batches done in the state that all continue from.
    is_start
        Whether all begin from the checkpoint, or from the seed without one; the fields below are then empty.
    source, behind
        Node that sends parameters, optimizer and shared state, and the nodes that receive them.
    holders
        Node that has the context of each EST, by virtual rank.
    shards
        Nodes that have each parameter with its optimizer state, by number of the parameter, or can take its
        step; the first one sends it. Empty unless the optimizer state is in shards, see
        `makespan.easyscale.optimizer_shards`; ``source`` then sends neither.
    partial
        Nodes that have all but parameters that they do not hold. In ``behind`` are then also nodes that leave
        and have yet to take the step of what they send.
    """

    mapping: str
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    stage: int
    step: int
    is_start: bool = False
    source: int | None = None
    behind: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    shards: tuple[tuple[int, ...], ...] = ()
    partial: tuple[int, ...] = ()

    @property
    def lacking(self) -> frozenset[int]:
        """Nodes that lack the parameters in shards that they do not hold."""
        return frozenset((*self.behind, *self.partial))


ASSEMBLY = TypeAdapter(Assembly)
"""Codec of the field ``work`` of `makespan.runtime.messages.Form`."""


@dataclass(frozen=True, slots=True)
class HeldShards:
    """Parameters that a process holds with their optimizer state, of ``n_parameters``.

    Parameters
    ----------
    numbers
        Numbers of the parameters, by mini-batches done; also by those that it can do alone.
    is_partial
        Whether other parameters are not those after the mini-batches done.
    """

    n_parameters: int
    numbers: Mapping[int, Collection[int]]
    is_partial: bool = False


def holdings(
    done: int | None, contexts: Mapping[int, Collection[int]], shards: HeldShards | None = None
) -> tuple[str, ...]:
    """Describe what a process holds, for `makespan.runtime.messages.Frozen`.

    Parameters
    ----------
    done
        Mini-batches done in its parameters and optimizer; None while they are between two mini-batches.
    contexts
        Virtual ranks whose contexts it holds, by the number of mini-batches done.
    shards
        Shards of the optimizer that it holds; None if it has the whole state.
    """
    texts = [] if done is None else [f"state {done}"]
    texts += [f"context {step} {rank}" for step in sorted(contexts) for rank in contexts[step]]
    if shards is not None:
        texts += ["partial"] if shards.is_partial else []
        texts += [
            " ".join(map(str, ("shard", step, shards.n_parameters, *sorted(numbers))))
            for step, numbers in sorted(shards.numbers.items())
        ]
    return tuple(texts)


def _held(described: Collection[str]) -> tuple[int | None, set[tuple[int, int]], HeldShards | None]:
    """Return the mini-batches done, the pairs of mini-batches done and rank, and the shards of `holdings`."""
    done, contexts, shards = None, set[tuple[int, int]](), dict[int, set[int]]()
    n_parameters = 0
    for text in described:
        kind, *words = text.split()
        numbers = list(map(int, words))
        if kind == "state":
            done = numbers[0]
        elif kind == "context":
            contexts.add((numbers[0], numbers[1]))
        elif kind == "shard":
            shards[numbers[0]], n_parameters = set(numbers[2:]), numbers[1]
    is_partial = "partial" in described
    in_shards = HeldShards(n_parameters, shards, is_partial) if shards or is_partial else None
    return done, contexts, in_shards


def backups(process: int, hosts: Sequence[str], survives: int) -> list[int]:
    """Return the processes of a mapping that keep the contexts of a process: those that follow it.

    Processes on other hosts come first, because a host may be lost with all its processes.

    Parameters
    ----------
    hosts
        Host of each process.
    """
    host, n_processes = hosts[process], len(hosts)
    others = [(process + place) % n_processes for place in range(1, n_processes)]
    here = [other for other in others if hosts[other] == host]
    away = [other for other in others if hosts[other] != host]
    # Processes of one host have the same ones away, so each begins with another of them.
    first = hosts[:process].count(host) % len(away) if away else 0
    return [*away[first:], *away[:first], *here][:survives]


@dataclass(slots=True)
class RecoveryPlanner:
    """Decides who trains which ESTs, at the start and after a loss.

    Parameters
    ----------
    mapping
        Mapping of the start.
    stage, step
        Number of the first set of processes, and mini-batches done at the start.
    reason
        Returns the error of a process that failed by itself since the last loss; None if none did.
    before
        Called before each decision, while all processes wait for it.
    hosts
        Host of each node.
    """

    mapping: RankMapping
    stage: int = 0
    step: int = 0
    reason: Callable[[], Exception | None] = field(default=lambda: None)
    before: Callable[[], object] = field(default=lambda: None)
    hosts: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, state: ClusterState[Assembly]) -> Decision[Assembly] | Abort:
        """Decide; the run falls back to its checkpoint if the state of an EST is lost."""
        self.before()
        staying = [node for node in state.members if node not in state.leaving]
        # Whoever leaves is asked for state only if nobody else has it.
        order = [*staying, *state.leaving]
        if not staying:
            return Abort(LostWorkerError("all processes were lost"), saves=False)
        n_processes = min(len(staying), self.mapping.n_logical_workers)
        nodes, spare = tuple(staying[:n_processes]), tuple(staying[n_processes:])
        hosts = tuple(self.hosts.get(node, "") for node in nodes)
        if n_processes == self.mapping.n_processes:
            mapping = self.mapping
        else:
            mapping = RankMapping.even(self.mapping.n_logical_workers, n_processes)
        if state.plan is None:
            start = Assembly(str(mapping), nodes, hosts, self.stage, self.step, is_start=True)
            return Decision(start, ASSEMBLY.dump_python(start, mode="json"), spare)
        held = {node: _held(state.holdings.get(node, ())) for node in order}
        done = {node: step for node, (step, _, _) in held.items() if step is not None}
        in_shards = {node: each for node, (_, _, each) in held.items() if each is not None}
        for step in sorted(set(done.values()), reverse=True):
            contexts = {node: pairs for node, (_, pairs, _) in held.items()}
            holders = self._holders(step, mapping, nodes, contexts)
            shards = self._shards(step, in_shards)
            if holders is None or shards is None:
                continue
            sending = {node for each in shards for node in each[:1]}
            placed = (*nodes, *(node for node in state.leaving if node in sending))
            behind = tuple(node for node in placed if done.get(node) != step)
            partial = tuple(
                node
                for node in nodes
                if node not in behind and node in in_shards and in_shards[node].is_partial
            )
            source = next(node for node, reached in done.items() if reached == step) if behind else None
            assembly = Assembly(
                str(mapping), nodes, hosts, state.plan.stage + 1, step,
                source=source, behind=behind, holders=holders, shards=shards, partial=partial,
            )  # fmt: skip
            return Decision(assembly, ASSEMBLY.dump_python(assembly, mode="json"), spare)
        if (error := self.reason()) is not None:
            return Abort(error, saves=False)
        lost = sorted(set(state.plan.nodes) - set(state.members))
        return Abort(
            LostWorkerError(f"the processes {', '.join(map(str, lost))} were lost, {_MISSING}"), saves=False
        )

    @staticmethod
    def _holders(
        step: int, mapping: RankMapping, nodes: Sequence[int], held: Mapping[int, set[tuple[int, int]]]
    ) -> tuple[int, ...] | None:
        """Return who has the context of each EST after a mini-batch, its host if possible; None if nobody."""
        having: dict[int, list[int]] = {rank: [] for rank in range(mapping.n_logical_workers)}
        for node, pairs in held.items():
            for done, rank in pairs:
                if done == step:
                    having[rank].append(node)
        if not all(having.values()):
            return None
        hosts = {rank: node for node, ranks in zip(nodes, mapping.hosted, strict=True) for rank in ranks}
        return tuple(hosts[rank] if hosts[rank] in found else found[0] for rank, found in having.items())

    @staticmethod
    def _shards(step: int, held: Mapping[int, HeldShards]) -> tuple[tuple[int, ...], ...] | None:
        """Return who has each parameter with its state after a mini-batch; None if nobody has one of them."""
        n_parameters = max((each.n_parameters for each in held.values()), default=0)
        having = [
            tuple(node for node, each in held.items() if number in each.numbers.get(step, ()))
            for number in range(n_parameters)
        ]
        return tuple(having) if all(having) else None


_MISSING = "and with them the only copies of the contexts of logical workers, or of optimizer state"


def boundary_key(transaction: int) -> str:
    """Return the key by which the processes of a generation are asked to end a transaction."""
    return f"boundary {transaction}"


class RecoveryProtocol(CoordinatorProtocol[Assembly]):
    """Protocol of an elastic run, whose transactions last up to the next checkpoint unless one is cut short.

    A process that joins or leaves waits for the mini-batch that runs, not for the transaction: the others are
    told to end it there. A report says whether a checkpoint follows (``saves``), and what comes next
    (``then``):

    - ``train``: the next mini-batch
    - ``behind``: code behind the loop of a job, once the checkpoint of the last mini-batch is complete. No
      process needs another one there: the others continue without one that is lost, and a failure ends the
      run.
    - ``end``: the end of the run, or of these processes

    Parameters
    ----------
    suspend
        Called when every process is to leave: the run must then end with a checkpoint, and none is released.
    options
        Arguments of `makespan.runtime.protocol.CoordinatorProtocol`.
    """

    def __init__(self, *arguments: Any, suspend: Callable[[], object], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._suspend, self._is_behind = suspend, False

    def ready(self, node: int) -> list[Action]:
        """Admit a process after the mini-batch that runs."""
        return [*super().ready(node), *self._cut_short()]

    def drain(self, nodes: Collection[int]) -> list[Action]:
        """Release processes after the mini-batch that runs; suspend the run if none would be left."""
        if not nodes or self._present <= self.leaving | set(nodes):
            # A process that the plan in work is made without cannot stay.
            self._keep_all(self._unneeded if self.phase is Phase.FORMING else ())
            return []
        idle = set(nodes) & (self.waiting | self.spare)
        self.waiting -= idle
        self.spare -= idle
        told: list[Action] = [Send(node, Leave("drained")) for node in sorted(idle)]
        return [*told, *super().drain(nodes), *self._cut_short()]

    def lost(self, node: int) -> list[Action]:
        """Continue without a process; suspend the run if all others are leaving."""
        if self._is_behind_loop and node in self.members and len(self.members) > 1:
            self.members.discard(node)
            self.leaving.discard(node)
            self._answers.pop(node, None)
            return self._commit() if self.members <= set(self._answers) else []
        if (others := self._present - {node}) and others <= self.leaving:
            is_planned = self.phase is Phase.FORMING and node not in self.members
            self._keep_all(self._unneeded if is_planned else ())
        return super().lost(node)

    @property
    def _is_behind_loop(self) -> bool:
        """True while all processes run code behind a loop, whose checkpoint is complete."""
        return self._is_behind and self.phase is Phase.TRAINING and not self._is_asked_to_save

    def _failed(self, node: int, failure: Failed) -> list[Action]:
        if self._is_behind_loop and failure.cause == Cause.OWN:
            return self._finish(
                self._failed_error(f"node {node} failed behind its loop, which is saved: {failure.error}")
            )
        return super()._failed(node, failure)

    @property
    def _present(self) -> set[int]:
        return self.expected | self.members | self.waiting | self.spare

    def _keep_all(self, but: Collection[int]) -> None:
        self.leaving &= set(but)
        self._suspend()

    def _cut_short(self) -> list[Action]:
        """Ask the processes to end the transaction, if one runs and somebody waits for its end."""
        if self.phase is not Phase.TRAINING or not (self.waiting or self.leaving & self.members):
            return []
        return self._to_all(Shared(self.generation, {boundary_key(self.step): ""}))

    def _plan(self) -> list[Action]:
        asked = self.leaving
        if self.members <= asked:
            # Those that stay came too late for this generation; in the next one they can copy from these.
            self.leaving = set()
        planned = super()._plan()
        self.leaving = asked
        return planned

    def _commit(self) -> list[Action]:
        reports = [answer.report for answer in self._answers.values() if answer.report is not None]
        if any(report["saves"] for report in reports):
            self.save_next()
        self._is_behind = any(report["then"] == "behind" for report in reports)
        if any(report["then"] == "end" for report in reports):
            self._is_stopping = True
            if not self._is_asked_to_save:  # nothing was trained since the last checkpoint
                self.saved = self.step + 1
        return super()._commit()
