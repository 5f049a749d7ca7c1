"""Process of an elastic run that survives losses: ``python -m makespan.easyscale.recovering_worker <path>``.

One transaction of the protocol is the stretch up to the next checkpoint, or up to the mini-batch after which
a process joins or leaves: within it, processes take mini-batches without asking the coordinator. After a
change each of them reports what it holds, and `makespan.easyscale.recovery` decides from where they continue.

`RecoveringParts` trains a job whose functions are given by name, `RecoveringLoop` one with a training loop of
its own; `RecoveringProcess` is what both share.
"""

import gc
import importlib
import io
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from makespan.easyscale.context import patch_distributed
from makespan.easyscale.data import LoaderPool
from makespan.easyscale.hosting import HostedESTs, MiniBatchResult
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import KERNEL_SET_VARIABLE
from makespan.easyscale.loop import LoopSuspended
from makespan.easyscale.recovery import ASSEMBLY, Assembly, HeldShards, backups, boundary_key, holdings
from makespan.easyscale.reduction import BucketMap, Steps, over_links
from makespan.easyscale.saved import (
    Data,
    Hosted,
    SavedJob,
    bind_late_buffers,
    copied,
    est_values,
    load_states,
    load_values,
    model_values,
    shared_values,
    tensors_of,
    write_saved,
    write_values,
)
from makespan.easyscale.user_state import is_watched
from makespan.easyscale.worker import Ending, Generation, TrainingProcess, check_equal_hashes, divergence
from makespan.errors import CheckpointError, TrainingError, WorkerError
from makespan.files import read_json
from makespan.runtime import (
    Identity,
    RunDirectory,
    check_device,
    end_worker,
    gpu_name,
    hold_gpu,
    run_worker,
)
from makespan.runtime.links import LostPeerError, PeerLinks
from makespan.runtime.messages import LOOPBACK, Form, Save
from makespan.runtime.node import (
    ADDRESS_FILE,
    JOINING,
    Announcing,
    BroadcastStore,
    Serving,
    SupersededError,
    take_part,
)
from makespan.training.bits import raw_bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")
PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before it forks the first worker."""
_MEET_S = 300.0
"""Longest time to connect; a last resort, because losses are detected and some build longer than others."""


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes; torch would write an archive for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter):
            return NotImplemented
        trains = value.requires_grad if isinstance(value, nn.Parameter) else None
        raw = raw_bytes(value).numpy().tobytes()
        return _tensor, (raw, value.dtype, tuple(value.shape), trains, value.device.type)


def _tensor(
    raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], trains: bool | None, device: str
) -> Tensor:
    """Return a tensor on the device of its type that this process has."""
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    made = flat.view(dtype).view(shape).to(device)
    return made if trains is None else nn.Parameter(made, trains)


def _packed(values: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(values)
    return stream.getvalue()


class RecoveringProcess(Generation):
    """Elastic training of one process, which the coordinator drives (`makespan.runtime.node.Engine`).

    ``contexts`` has the contexts of its own ESTs and those that it keeps for other processes, packed, by
    mini-batches done and rank. Those after a mini-batch are kept until this process has done the next one:
    until then, others may have to return to it. ``whole`` is the number of mini-batches done in the
    parameters, optimizers and other shared state that this process can continue from or send to others; None
    if it has none.
    """

    words_before = 0  # mini-batches by which sums of words are behind
    # Links move host memory. Communicators of NCCL would be faster, and hang when a member is lost.
    sums_on_host = True

    def __init__(self, process: TrainingProcess) -> None:
        super().__init__(process, process.requests[0])
        self.links: PeerLinks | None = None
        self.device_name = os.environ.get(KERNEL_SET_VARIABLE, self.device_name)
        self.devices = list[str]()  # kernel set of each process of the mapping
        self.places, self.nodes = list[int](), tuple[int, ...]()
        self.ranks: dict[int, int] = {}  # numbers of nodes among the links
        self.whole: int | None = None
        self.contexts: dict[int, dict[int, bytes]] = {}
        self.saved_step, self.is_first_done = self.done, False
        self.generation, self.boundary = 0, ""
        self.stack = ExitStack()
        # Processes of several machines, as those of an allocation of Slurm may be, reach each other by name.
        address = read_json(process.directory.path / ADDRESS_FILE)
        self.is_alone = address is None or address["host"] == LOOPBACK

    # --- calls of the coordinator ---------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """What this process holds, see `makespan.easyscale.recovery.holdings`."""
        return holdings(self.whole, self.contexts, self.held_shards)

    @property
    def held_shards(self) -> HeldShards | None:
        """The part of the optimizer that this process holds; None if it holds all."""
        return None

    @property
    def is_waiting(self) -> bool:
        """True while this process waits for another one."""
        return self.links is not None and self.links.is_waiting

    def prepare(
        self, node: int, request: Any, announce: Announcing, board: BroadcastStore, serving: Serving
    ) -> None:
        """Take what the node provides; a process that joins also loads code of the user."""
        self.node, self.announce, self.board, self.serving = node, announce, board, serving
        if request["stage"] != self.request.generation:
            raise WorkerError(
                "the run changed its processes at the same time; expected another attempt to join"
            )
        torch.set_num_threads(self.process.who.threads)
        self.process.start_s = time.time() - self.process.who.launched_s
        # A group of this process alone, which user code never sees: code asks whether there is one.
        dist: Any = importlib.import_module("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        patch_distributed(self.job.n_logical_workers)
        if node < self.mapping.n_processes:
            return  # processes of the start load code of the user when they form, and report its errors
        self.process.set_handlers()
        self.load()
        self.compare_code()

    def compare_code(self) -> None:
        """Add a notice for each file of the user that this process has loaded in another version."""
        code = self.request.manifest["code"]
        for file in [file for file, sha in self.job.code().items() if code.get(file) != sha]:
            self.notices.add(f"{file} has changed since the run began; equal bits are not guaranteed")

    def check_device(self) -> None:
        """Raise the error of a device that no longer computes."""
        check_device(self.device)

    def drop(self) -> None:
        """Drop the links to other processes."""
        if self.links is not None:
            self.links.close()

    def form(self, form: Form, forgets: bool) -> Mapping[str, str]:
        """Connect, take over ESTs, and copy contexts to other processes."""
        self.process.set_handlers()
        assembly: Assembly = ASSEMBLY.validate_python(form.work)
        self.announce("connect", assembly.step)
        ranks = {node: rank for rank, node in enumerate(form.members)}
        self.links = PeerLinks(
            ranks[self.node], len(ranks), self.board, form.generation, _MEET_S, is_alone=self.is_alone
        )
        self.ranks, self.places = ranks, [ranks[node] for node in assembly.nodes]
        self.nodes, self.hosts = assembly.nodes, assembly.hosts
        self.generation = form.generation
        self.announce("copy", assembly.step)
        mapping = RankMapping.parse(assembly.mapping)
        state, ests = (None, {}) if assembly.is_start else self._copied(mapping, assembly, ranks)
        if self.node not in assembly.nodes:
            if state is not None:
                self.catch_up(assembly.step, state)
            self.exchange_shards(assembly)
            return {}
        self.mapping, self.number = mapping, assembly.nodes.index(self.node)
        return self.take_over(assembly, state, ests)

    def apply(self, iteration: int) -> None:
        """Continue after a transaction, whose rows the coordinator has."""
        self.saved_step, self.ending = self.done, Ending.CONTINUE
        self.rows.clear()

    def write(self, save: Save) -> None:
        """Write the files of this process into the checkpoint that is being made."""
        directory, begun_s = self.request.run_dir / "checkpoints" / ".partial", time.monotonic()
        try:
            self.write_files(directory)
        except OSError as error:
            problem = f"{error.filename or directory}: {error.strerror}"
            raise CheckpointError(f"{problem}; earlier checkpoints are intact") from error
        self.saved_at = time.monotonic()
        self.save_s = self.saved_at - begun_s

    # --- what depends on the kind of the job ----------------------------------------------------

    def load(self) -> None:
        """Load code of the user, before this process has a place in the run."""
        raise NotImplementedError

    def take_over(
        self, assembly: Assembly, state: Mapping[str, Any] | None, ests: Mapping[int, Any]
    ) -> Mapping[str, str]:
        """Host the ESTs of this process, and return the names of what it writes into checkpoints.

        Parameters
        ----------
        assembly
            Plan that this process has a place in.
        state
            `state` of another process; None if this one has all but contexts, or at the start.
        ests
            Context and position in the data of each EST to host, by rank; empty at the start.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return model and shared state for a process that is behind."""
        raise NotImplementedError

    def hold(self) -> None:
        """Hold the state after a mini-batch, as ``whole``."""
        raise NotImplementedError

    def catch_up(self, step: int, state: Mapping[str, Any]) -> None:
        """Load the `state` of another process into one that leaves, and take the step of its shard."""

    def exchange_shards(self, assembly: Assembly) -> None:
        """Send and receive shards of the optimizer, with the parameters that others lack."""

    def settle(self, assembly: Assembly) -> None:
        """Drop shards of the optimizer that belong to others now; all of these have theirs."""

    def share_parameters(self) -> None:
        """Exchange the parameters that have been stepped in shards, and hash what has to be."""

    def write_files(self, directory: Path) -> None:
        """Write the files of this process."""
        raise NotImplementedError

    # --- takeover -------------------------------------------------------------------------------

    def _copied(
        self, mapping: RankMapping, assembly: Assembly, ranks: Mapping[int, int]
    ) -> tuple[Mapping[str, Any] | None, dict[int, Any]]:
        """Exchange state and contexts; return the state if this process is behind, and its ESTs."""
        links, step, nodes = self._linked(), assembly.step, assembly.nodes
        if self.node == assembly.source:
            message = _packed(self.state() | self._progress())
            for node in assembly.behind:
                links.post(ranks[node], message)
        hosts = [nodes[mapping.host(rank)] for rank in range(mapping.n_logical_workers)]
        for rank, (holder, host) in enumerate(zip(assembly.holders, hosts, strict=True)):
            if holder == self.node != host:
                links.post(ranks[host], self.contexts[step][rank])
        state: Any = None
        if self.node in assembly.behind and assembly.source is not None:
            state = pickle.loads(links.take(ranks[assembly.source]))
        taken = {
            rank: self.contexts[step][rank] if holder == host else links.take(ranks[holder])
            for rank, (holder, host) in enumerate(zip(assembly.holders, hosts, strict=True))
            if host == self.node
        }
        links.finish()
        self.contexts.setdefault(step, {}).update(taken)
        return state, {rank: pickle.loads(packed) for rank, packed in taken.items()}

    def _progress(self) -> dict[str, Any]:
        """Return what a process that is behind needs besides `state`."""
        return {
            "rows": self.rows, "order": self.order, "restart_s": self.restart_s,
            "saved": (self.saved_step, self.saved_at, self.save_s),
        }  # fmt: skip

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        self.rows, self.order, self.restart_s = state["rows"], state["order"], state["restart_s"]
        self.saved_step, self.saved_at, self.save_s = state["saved"]  # all have the same clock

    def _begun(self, assembly: Assembly) -> Mapping[str, str]:
        """Keep copies of contexts for each other, and begin to train; see `take_over`."""
        # The contexts are on other processes before anybody trains, as in every mini-batch later.
        self.announce("replicate", assembly.step)
        own = self._own_contexts()
        # Until all have theirs, this process may be the only one that has a context of another one.
        self.contexts = {self.done: self.contexts.get(self.done, {}) | own}
        self._send_contexts(own)
        received = self._received_contexts()
        self.contexts[self.done] |= received
        told = self.gather((self.device_name, gpu_name(self.device)))
        self.contexts[self.done] = own | received
        self.devices = [name for name, _ in told]
        if len(names := sorted({name for _, name in told})) > 1:
            self.notices.add(
                f"GPUs of several types train, {', '.join(names)}; equal bits are not guaranteed"
            )
        self.stage, self.first_step, self.ending = assembly.stage, self.done, Ending.CONTINUE
        self.settle(assembly)
        self.is_first_done, self.process.reports = False, self.number == 0
        shared = ("shared",) if 0 in self.hosted.ranks else ()
        return dict.fromkeys((*(f"worker-{rank}" for rank in self.hosted.ranks), *shared), "")

    # --- mini-batches ---------------------------------------------------------------------------

    def over(self, steps: Steps[T]) -> T:
        """Carry out the steps of this process together with the other processes."""
        return over_links(steps, self._linked(), self.places, self.number)

    @property
    def _is_save_due(self) -> bool:
        return self.saves_after(self.done) or self.ending > Ending.REGROUP_DUE

    def _report(self, then: str) -> dict[str, Any] | None:
        """Return the report at the end of a transaction, see `RecoveryProtocol`; the first process has it."""
        result = self.result() | {
            "rows": self._all_rows(), "restart_s": self.restart_s, "saves": self._is_save_due, "then": then,
        }  # fmt: skip
        return result if self.number == 0 else None

    def ending_now(self) -> int:
        """Return whether this process would continue, regroup or save; a signal is a notice to it alone."""
        with suppress(RuntimeError):  # the generation is over
            if self.board.has(self.generation, self.boundary):
                return max(Ending.REGROUP_DUE, self.requested_ending())
        return self.requested_ending()

    def finish(self, batch: MiniBatchResult, *, stops: bool = False) -> None:
        """Check and record a mini-batch."""
        self.parts.groups(may_grow=self.shards is None)
        self.done += 1
        self.hold()
        for step in [step for step in self.contexts if step < self.done]:
            del self.contexts[step]
        self.ending = Ending(batch.ending)
        saves = self._is_save_due
        # Rows first: others may take over what this process has done as soon as it regroups. Shards have no
        # hashes before all have exchanged them.
        shared = self.shared_hashes(saves) if self.shards is None else {}
        own = {row["rank"]: row for row in self.rows_of(batch, saves, shared)}
        elsewhere = dict.fromkeys(("context_sha", "micro_batch_s", "sync_s"))
        for rank, loss in enumerate(batch.losses):
            number = self.mapping.host(rank)
            others = {
                "rank": rank, "process": number, "device": self.devices[number],
                "loss": loss, "loss_hex": loss.hex(), **elsewhere,
            }  # fmt: skip
            self.rows.append(own.get(rank) or next(iter(own.values())) | others)
        self.tell("done")
        self.share_parameters()
        self.notices.update(self.process.set_handlers())
        if is_watched(self.done - self.first_step - 1):
            self.check_agreement(self.done - self.first_step)
        if len(set(batch.word_sums)) > 1:
            raise divergence(self.done - self.words_before, "parameters", batch.word_sums)
        self.process.heap.check()
        if self.process.report_progress(self.done, batch.losses[-1]):
            self.announce("progress", self.done)
        if not self.is_first_done:
            self.is_first_done = True
            self.announce("trained", self.done)

    def _all_rows(self) -> list[dict[str, Any]]:
        """Return the rows since the last checkpoint; what only a lost process knew is missing in some."""
        known = {(row["step"], row["rank"]): row for row in self.rows}
        for rows in self.gather([row for row in self.rows if row["micro_batch_s"] is not None]):
            known |= {(row["step"], row["rank"]): row for row in rows}
        rows = [known[key] for key in sorted(known)]
        check_equal_hashes(rows)
        return rows

    # --- contexts and state ---------------------------------------------------------------------

    def _own_contexts(self) -> dict[int, bytes]:
        return {rank: _packed(est_values(rank, self.hosted, self.data)) for rank in self.hosted.ranks}

    def _send_contexts(self, contexts: Mapping[int, bytes]) -> None:
        """Send the contexts of the hosted ESTs to the processes that keep them."""
        message = _packed(contexts)
        for other in backups(self.number, self.hosts, self.request.survives):
            self._linked().post(self.places[other], message)

    def _received_contexts(self) -> dict[int, bytes]:
        """Return the contexts that this process keeps for others, by rank."""
        hosts, survives = self.hosts, self.request.survives
        kept_for = [other for other in range(len(hosts)) if self.number in backups(other, hosts, survives)]
        received = dict[int, bytes]()
        for message in self._linked().take_all([self.places[other] for other in kept_for]):
            received |= pickle.loads(message)
        return received

    # --- communication --------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of the mapping, in every process."""
        links, others = self._linked(), [place for place in self.places if place != self.places[self.number]]
        message = _packed(value)
        for place in others:
            links.post(place, message)
        received = dict(zip(others, map(pickle.loads, links.take_all(others)), strict=True))
        return [received.get(place, value) for place in self.places]

    def collect(self, value: Any, target: int) -> list[Any]:
        """Return the values of all processes of the mapping in one of them, and nothing in the others."""
        links, place = self._linked(), self.places[target]
        if self.number != target:
            links.post(place, _packed(value))
            links.take_all(())  # sends it: this process may have nothing else to wait for
            return []
        others = [each for each in self.places if each != place]
        return [value, *map(pickle.loads, links.take_all(others))]

    def _linked(self) -> PeerLinks:
        if self.links is None:
            raise LostPeerError("this process has no links")
        return self.links

    def tell(self, phase: str) -> None:
        """Announce a phase of the next mini-batch, if somebody listens."""
        if self.request.announces:
            self.announce(phase, self.done + 1)


# --- a job whose functions are given by name ---


class RecoveringParts(RecoveringProcess):
    """Training of a job whose functions are given by name.

    A process changes parameters and optimizer only when it has all that others contribute to a mini-batch,
    the contexts that it keeps included. So it can always finish the step alone, and keeps no copy of them.
    With shards of the optimizer it can finish that of its shard: for ``shard_step``, ``ready`` and
    ``is_partial`` see `HeldShards`, and for the reasons `makespan.easyscale.optimizer_shards`.
    """

    words_before = 1
    hosted: HostedESTs
    data: LoaderPool

    def __init__(self, process: TrainingProcess) -> None:
        super().__init__(process)
        self.layout: BucketMap | None = None
        self.changes: Mapping[str, Mapping[str, Any]] = {}
        self.is_built = False
        self.shard_step: int | None = None  # mini-batches done in the shard of this process
        self.ready: int | None = None  # the mini-batch whose step of the shard it can take alone
        self.is_partial = False  # whether it lacks parameters of others

    def load(self) -> None:
        """Build the parts, and start the loaders."""
        self.load_parts()
        self.data = self.loaders(self.stack, self.data_set, self.collate, self.user_state)

    def take_over(
        self, assembly: Assembly, state: Mapping[str, Any] | None, ests: Mapping[int, Any]
    ) -> Mapping[str, str]:
        """Build everything at the start, from the checkpoint if there is one; otherwise move."""
        if assembly.is_start:
            self.stack.close()
            self.begin(*self.build(self.stack))
            self.is_built = True
            self.whole, self.layout, self.changes = self.done, self.hosted.bucket_map, {}
            self.shard_step, self.ready, self.is_partial = self.done, None, False
            return self._begun(assembly)
        self._finish_step(assembly.step)
        self.whole = None
        contexts = {rank: each["context"] for rank, each in ests.items()}
        if state is not None and not self.is_built:
            late = state["shared"]["late_buffers"]
            bind_late_buffers(self.parts.model, late, [context["buffers"] for context in contexts.values()])
            self.order = state["order"]
            self.hosted, self.is_built = self.host(late_buffers=late), True
        if state is not None:
            self._load(state)
        self.hosted.move(self.mapping, self.number, self.layout, contexts, self.changes)
        if state is not None:
            self.hosted.contexts.install_shared(state["shared"]["of_all"])
        positions = {rank: each["loader"] for rank, each in ests.items()}
        self.data.move(self.loader_states(positions))
        self.done = self.whole = assembly.step
        self.rows = [row for row in self.rows if row["step"] <= assembly.step]
        self.exchange_shards(assembly)
        return self._begun(assembly)

    def compute(self, iteration: int) -> Any:
        """Train up to the next checkpoint, or until a change is requested."""
        self.boundary = boundary_key(iteration)
        while not self._is_at_boundary:
            self.tell("forward")
            steps = self.hosted.mini_batch(
                self.data.next, watches=self.watches(), ending=self.ending_now, replication=self
            )
            self.finish(self.over(steps))
        is_over = self.done >= self.request.steps or self.ending > Ending.CHECKPOINT_DUE
        return self._report("end" if is_over else "train")

    @property
    def _is_at_boundary(self) -> bool:
        is_due = self.saves_after(self.done) and self.done != self.saved_step
        return is_due or self.done >= self.request.steps or self.ending != Ending.CONTINUE

    def hold(self) -> None:
        """Take notice that parameters and optimizer are those after a mini-batch."""
        self.hosted.contexts.close_for_all()
        self.whole, self.layout = self.done, self.hosted.bucket_map
        self.changes = self.hosted.contexts.changes_for_all
        if self.shards is not None:
            self.shard_step, self.ready, self.is_partial = self.done, None, True

    def write_files(self, directory: Path) -> None:
        """Write the files of this process."""
        write_saved(directory, self.parts, self.hosted, self.data)

    def state(self) -> dict[str, Any]:
        """Return model and shared state, and what belongs to them."""
        buffers = {name for name, _ in self.parts.model.named_buffers()}
        left_out = set[int]()
        shared = shared_values(self.parts, self.hosted)
        if self.shards is not None:  # these come from those that hold them
            left_out = set(map(id, self.shards.parameters))
            shared["optimizer"] = shared["optimizer"] | {"state": {}}
        model = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in self.parts.model.state_dict(keep_vars=True).items()
            if name not in buffers and id(value) not in left_out
        }
        return {"model": model, "shared": shared, "layout": self.layout, "changes": self.changes}

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load the state of another process."""
        self.parts.model.load_state_dict(state["model"], strict=False)
        held = {} if self.shards is None else self.shards.state()
        load_states(self.parts, state["shared"])
        if self.shards is not None:
            self.shards.receive(held, ())
            self.is_partial = True
        frozen = set(state["shared"]["frozen"])
        for name, parameter in self.parts.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.layout, self.changes = state["layout"], state["changes"]
        self._load_progress(state)

    # Shards of the optimizer, see `makespan.easyscale.optimizer_shards`.

    @property
    def held_shards(self) -> HeldShards | None:
        """The part of the optimizer that this process holds; None if it holds all."""
        if self.shards is None:
            return None
        steps = [step for step in (self.shard_step, self.ready) if step is not None]
        numbers = dict.fromkeys(steps, self.shards.numbers)
        return HeldShards(len(self.shards.parameters), numbers, self.is_partial)

    def _finish_step(self, step: int) -> None:
        """Take the step of the shard, if others have taken theirs."""
        if self.shards is None:
            return
        if self.ready == step:
            self.whole = self.shard_step = self.ready = None
            self.hosted.take_step()
            self.shard_step = step
        self.ready = None
        if self.shard_step != step:  # after a failure amid a step, or in a process that joins
            self.shards.numbers, self.shard_step = set(), step

    def catch_up(self, step: int, state: Mapping[str, Any]) -> None:
        """Take the step of the shard, and load the `state` of another process, before this one leaves."""
        self._finish_step(step)
        self.whole = None
        self._load(state)
        self.done = self.whole = step

    def exchange_shards(self, assembly: Assembly) -> None:
        """Send and receive shards of the optimizer, with the parameters that others lack."""
        if self.shards is None:
            return
        links, shards, nodes = self._linked(), self.shards, assembly.nodes
        lacking = assembly.lacking.intersection(nodes)
        sent: dict[int, dict[int, tuple[Any, Any]]] = {}
        sources = dict[int, None]()
        for number, (having, processes) in enumerate(
            zip(assembly.shards, shards.holders(assembly.hosts), strict=True)
        ):
            holding = {nodes[process] for process in processes}
            for node in sorted((holding | lacking).difference(having)):
                if node == self.node:
                    sources[self.ranks[having[0]]] = None
                if having[0] == self.node:
                    value = shards.parameters[number].detach() if node in lacking else None
                    state = shards.state([number]) if node in holding else None
                    sent.setdefault(self.ranks[node], {})[number] = value, state
        for rank, values in sent.items():
            links.post(rank, _packed(values))
        received: dict[int, tuple[Any, Any]] = {}
        for message in links.take_all(sources):
            received |= pickle.loads(message)
        with torch.no_grad():
            for number, (value, _) in received.items():
                if value is not None:
                    shards.parameters[number].copy_(value)
        states = {number: state for number, (_, state) in received.items() if state is not None}
        shards.receive({key: each for state in states.values() for key, each in state.items()}, states)
        self.is_partial = False

    def settle(self, assembly: Assembly) -> None:
        """Drop shards of the optimizer that belong to others now; all of these have theirs."""
        if self.shards is not None:
            self.shards.place(self.number, self.hosts)
            if not assembly.is_start:  # a loss may have come before the hashes of the last mini-batch
                self._hash_rows(self.saves_after(self.done))

    def share_parameters(self) -> None:
        """Exchange the parameters that have been stepped in shards, and hash what has to be."""
        if self.shards is not None:
            self.over(self.shards.share())
            self.is_partial = False
            self._hash_rows(self._is_save_due)

    def _hash_rows(self, saves: bool) -> None:
        """Hash parameters and optimizer for the rows of the last mini-batch, if that has hashes."""
        self.collect_optimizer(saves)
        shared = self.shared_hashes(saves)
        self.rows = [row | (shared if row["step"] == self.done else {}) for row in self.rows]

    # Calls of the mini-batch, see `makespan.easyscale.hosting.Replication`.

    def after_passes(self) -> None:
        """Send the contexts of the hosted ESTs."""
        self.tell("backward")
        self.contexts[self.done + 1] = own = self._own_contexts()
        self._send_contexts(own)
        self.tell("sum")

    def after_sum(self) -> None:
        """Wait for the contexts that this process keeps for others."""
        self.tell("contexts")
        self.contexts[self.done + 1] |= self._received_contexts()

    def before_results(self) -> None:
        """Take notice that this process can take the step of its shard alone."""
        if self.shards is not None:
            self.ready = self.done + 1

    def before_step(self) -> None:
        """Begin a step: parameters and optimizer are between two mini-batches until `finish`."""
        self.tell("step")
        self.whole = self.shard_step = self.ready = None


# --- a job with a training loop of its own ---


class RecoveringLoop(RecoveringProcess):
    """Training of a job with a loop of its own, whose function is called anew in each set of processes.

    A body may step several times and change shared state anywhere, so a process cannot finish a mini-batch
    alone. It holds a copy of the state after the last one, as a checkpoint has it, and a mini-batch counts as
    done when all processes have done its body and have the contexts after it that they keep for others.

    `take_over` calls the function, which calls back where the loop begins, in sums, and between mini-batches.
    There the process answers the coordinator, until the next mini-batch is to be computed. If it is to
    regroup or to leave, an exception ends the function, which ``except Exception`` does not catch.
    """

    def __init__(self, process: TrainingProcess) -> None:
        super().__init__(process)
        self.held: dict[str, Any] = {}
        self.ests: Mapping[int, Any] = {}
        self.is_loaded = self.is_stopped = False
        self.reason: TrainingError | None = None  # for which the function has to end
        self.default_dtype = torch.get_default_dtype()
        gc.freeze()  # all that is here stays, and need not be looked through each time that a call ends

    def load(self) -> None:
        """Load the file or module of the function."""
        self.load_loop()
        self.is_loaded = True

    def take_over(
        self, assembly: Assembly, state: Mapping[str, Any] | None, ests: Mapping[int, Any]
    ) -> Mapping[str, str]:
        """Call the function of the job; it ends where this process is to regroup or to leave."""
        self.assembly, self.ests = assembly, ests
        if assembly.is_start:
            self.held, self.whole, self.is_stopped = {}, None, False
            self.done, self.contexts = self.request.first_step, {}
        else:
            if state is not None:
                self.held = {"model": state["model"], "shared": state["shared"]}
                self.is_stopped = state["is_stopped"]
                self._load_progress(state)
            self.done = self.whole = assembly.step
            self.rows = [row for row in self.rows if row["step"] <= assembly.step]
        if not self.is_loaded:
            self.load()
            self.compare_code()
        try:
            with torch.enable_grad():
                is_over = self.call_loop(self.stack)
            if is_over:
                self.between()  # of a loop that was left with break
                self._answer({"saves": False, "then": "end"})
        except LoopSuspended:
            pass
        except Exception as error:
            if self.reason is None:
                raise
            _log.warning("the loop was left for a change of processes, and then raised: %s", error)
        finally:
            reason = self._forget()
        raise reason

    def _forget(self) -> TrainingError:
        """Drop what the function has made, and the modules of the user: the next call begins anew.

        Returns
        -------
        TrainingError
            The reason for which the function had to end.
        """
        self.stack.close()
        if "hosted" in vars(self):
            self.notices.update(self.hosted.notices, self.hosted.contexts.notices, self.data.notices)
            self.hosted.contexts.discard()
        for name in ("hosted", "data", "parts"):
            vars(self).pop(name, None)
        for module in self.modules:
            if str(module.__file__).endswith(".py"):
                sys.modules.pop(module.__name__, None)
        self.is_loaded = False
        torch.set_default_dtype(self.default_dtype)
        gc.collect()  # optimizers and schedulers refer to each other, and would keep a second model here
        reason, self.reason = self.reason, None
        return reason or SupersededError("the function of the loop has ended")

    def compute(self, iteration: int) -> Any:
        """Raise an error: mini-batches are computed in `take_over`."""
        raise WorkerError(f"transaction {iteration} is to be computed by a process without a place")

    # --- calls of the loop, see `makespan.easyscale.loop.Generation` ---

    @contextmanager
    def _ends_function(self) -> Iterator[None]:
        """End the function if another process is lost, or this one is to regroup or to leave."""
        if self.reason is not None:  # code of the user that was to end calls the loop again
            raise LoopSuspended
        try:
            yield
        except (LostPeerError, SupersededError) as error:
            self.reason = type(error)(str(error))  # without the frames, which hold model and data
            raise LoopSuspended from None

    @property
    def is_run_over(self) -> bool:
        """True if no later generation trains the job any further."""
        return self.done >= self.request.steps or self.is_stopped

    @property
    def goes_on(self) -> bool:
        """True if there is another mini-batch."""
        return not self.is_run_over

    def over(self, steps: Steps[T]) -> T:
        """Carry out the steps of this process together with the other processes."""
        with self._ends_function():
            return super().over(steps)

    def tell(self, phase: str) -> None:
        """Announce a phase of the next mini-batch, if somebody listens."""
        with self._ends_function():
            super().tell(phase)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of the mapping, in every process."""
        with self._ends_function():
            return super().gather(value)

    def check_equal(self, name: str, value: Any) -> None:
        """Raise a `TrainingError` if a value differs between processes at the start."""
        if self.assembly.is_start:
            super().check_equal(name, value)

    def saved(self, ranks: tuple[int, ...]) -> SavedJob | None:
        """Load the state that this process holds, or the checkpoint; return the rest of it."""
        if self.assembly.is_start:
            return super().saved(ranks)
        return load_values(self.parts, self.ests, self.held["model"], copied(self.held["shared"]))

    def begin(self, hosted: Hosted, data: Data) -> None:
        """Begin the loop."""
        with self._ends_function():
            if self.assembly.is_start:
                super().begin(hosted, data)
                self.hold()
            else:
                self.hosted, self.data = hosted, data
            self.boundary = boundary_key(self.serving.formed(self._begun(self.assembly)))

    def between(self) -> None:
        """End the transaction where a checkpoint or a change of the processes is due."""
        with self._ends_function():
            while self._is_at_boundary:
                is_left = self.ending > Ending.CHECKPOINT_DUE
                then = "end" if is_left else "behind" if self.is_run_over else "train"
                self._answer(self._report(then))

    @property
    def _is_at_boundary(self) -> bool:
        is_due = self._is_save_due and self.done != self.saved_step
        return is_due or self.ending != Ending.CONTINUE

    @property
    def _is_save_due(self) -> bool:
        return super()._is_save_due or self.is_stopped

    def _answer(self, report: Any) -> None:
        with self._ends_function():
            self.boundary = boundary_key(self.serving.computed(report))

    def replicate(self) -> None:
        """Send the contexts after a mini-batch, and wait for those that this process keeps for others."""
        with self._ends_function():
            self.tell("contexts")
            self.contexts[self.done + 1] = own = self._own_contexts()
            self._send_contexts(own)
            self.contexts[self.done + 1] |= self._received_contexts()

    def finish(self, batch: MiniBatchResult, *, stops: bool = False) -> None:
        """Count a mini-batch as done; check and record it."""
        with self._ends_function():
            self.is_stopped = stops
            super().finish(batch)

    def result(self) -> dict[str, Any]:
        """Return the values that the launching process needs, with the notices of all processes."""
        return super().result() | ({"ending": "stopped"} if self.is_stopped else {})

    # --- state ---

    def hold(self) -> None:
        """Copy model and shared state, over the copy after the mini-batch before."""
        self.whole = None
        model = model_values(self.parts, self.hosted)
        shared = shared_values(self.parts, self.hosted, records=False)
        self.held = copied({"model": model, "shared": shared}, self.held)
        self.whole = self.done

    def private(self) -> Iterable[Tensor]:
        """Return the tensors of the copies."""
        return tensors_of(self.held)

    def state(self) -> dict[str, Any]:
        """Return the copies, and whether the loop has stopped."""
        return self.held | {"is_stopped": self.is_stopped}

    def write_files(self, directory: Path) -> None:
        """Write the files of this process from its copies: code behind the loop may have changed the rest."""
        own = {
            rank: pickle.loads(self.contexts[self.done][rank]) for rank in self.mapping.hosted[self.number]
        }
        if 0 in own:
            write_values(directory, own, self.held["model"], self.held["shared"])
        else:
            write_values(directory, own)


def train_recovering(directory: RunDirectory, who: Identity) -> None:
    """Take part in a run until it is over."""
    process = TrainingProcess(directory, who)
    joins = who.rank >= JOINING
    hold_gpu(directory, process.device, is_free=joins or who.parent is None)
    has_loop = process.requests[0].job.loop is not None
    training = RecoveringLoop(process) if has_loop else RecoveringParts(process)
    reason = take_part(directory.path, training, None if joins else who.rank)
    training.stack.close()
    if joins:
        directory.write_result(reason, who.rank)


if __name__ == "__main__":
    # Ctrl-C of a terminal reaches all its processes; the launching process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_worker(run_worker(sys.argv[1], train_recovering))
