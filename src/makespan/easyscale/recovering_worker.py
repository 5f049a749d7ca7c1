"""Process of an elastic run that survives losses: ``python -m makespan.easyscale.recovering_worker <path>``.

One transaction of the protocol is the stretch up to the next checkpoint, or up to the mini-batch after which
a process joins or leaves: within it, processes take mini-batches without asking the coordinator. After a
change each of them reports what it holds, and `makespan.easyscale.recovery` decides from where they continue.
"""

import importlib
import io
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from makespan.easyscale.context import patch_distributed
from makespan.easyscale.hosting import HostedESTs, MiniBatchResult
from makespan.easyscale.job import RankMapping
from makespan.easyscale.recovery import ASSEMBLY, Assembly, backups, boundary_key, holdings
from makespan.easyscale.reduction import BucketMap, over_links
from makespan.easyscale.saved import (
    bind_late_buffers,
    est_values,
    load_states,
    shared_values,
    write_saved,
)
from makespan.easyscale.user_state import is_watched
from makespan.easyscale.worker import Ending, Generation, TrainingProcess, check_equal_hashes, divergence
from makespan.errors import CheckpointError, WorkerError
from makespan.runtime import Identity, RunDirectory, end_worker, run_worker
from makespan.runtime.links import LostPeerError, PeerLinks
from makespan.runtime.messages import Form, Save
from makespan.runtime.node import JOINING, Announcing, BroadcastStore, take_part
from makespan.training.bits import raw_bytes

PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before it forks the first worker."""
_MEET_S = 300.0
"""Longest time to connect; a last resort, because losses are detected and some build longer than others."""


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes; torch would write an archive for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter):
            return NotImplemented
        return _tensor, (raw_bytes(value).numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _packed(values: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(values)
    return stream.getvalue()


class RecoveringTraining(Generation):
    """Elastic training of one process, which the coordinator drives (`makespan.runtime.node.Engine`).

    ``contexts`` has the contexts of its own ESTs and those that it keeps for other processes, packed, by
    mini-batches done and rank. Those after a mini-batch are kept until this process has done the next one:
    until then, others may have to return to it.
    """

    hosted: HostedESTs

    def __init__(self, process: TrainingProcess) -> None:
        super().__init__(process, process.requests[0])
        self.links: PeerLinks | None = None
        self.places, self.nodes = list[int](), tuple[int, ...]()
        self.whole: int | None = None
        self.layout: BucketMap | None = None
        self.changes: Mapping[str, Mapping[str, Any]] = {}
        self.contexts: dict[int, dict[int, bytes]] = {}
        self.saved_step, self.is_first_done, self.is_built = self.done, False, False
        self.generation, self.boundary = 0, ""
        self.stack = ExitStack()

    # --- calls of the coordinator ---------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """What this process holds, see `makespan.easyscale.recovery.holdings`."""
        return holdings(self.whole, self.contexts)

    @property
    def is_waiting(self) -> bool:
        """True while this process waits for another one."""
        return self.links is not None and self.links.is_waiting

    def prepare(self, node: int, request: Any, announce: Announcing, board: BroadcastStore) -> None:
        """Take what the node provides; a process that joins also loads code of the user."""
        self.node, self.announce, self.board = node, announce, board
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
        self.load_parts()
        code = self.request.manifest["code"]
        for file in [file for file, sha in self.job.code().items() if code.get(file) != sha]:
            self.notices.add(f"{file} has changed since the run began; equal bits are not guaranteed")

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
        self.links = PeerLinks(ranks[self.node], len(ranks), self.board, form.generation, _MEET_S)
        self.places, self.nodes = [ranks[node] for node in assembly.nodes], assembly.nodes
        self.generation = form.generation
        self.announce("copy", assembly.step)
        mapping = RankMapping.parse(assembly.mapping)
        if assembly.is_start:
            self._start(mapping, assembly)
        else:
            self._take_over(mapping, assembly, ranks)
        if self.node not in assembly.nodes:
            return {}
        # The contexts are on other processes before anybody trains, as in every mini-batch later.
        self.announce("replicate", assembly.step)
        own = self._own_contexts()
        # Until all have theirs, this process may be the only one that has a context of another one.
        self.contexts = {self.done: self.contexts.get(self.done, {}) | own}
        self._send_contexts(own)
        received = self._received_contexts()
        self.contexts[self.done] |= received
        self.gather(None)
        self.contexts[self.done] = own | received
        self.stage, self.first_step, self.ending = assembly.stage, self.done, Ending.CONTINUE
        self.is_first_done, self.process.reports = False, self.number == 0
        return dict.fromkeys((*(f"worker-{rank}" for rank in self.hosted.ranks), *self._shared_files()), "")

    def _shared_files(self) -> tuple[str, ...]:
        return ("shared",) if 0 in self.hosted.ranks else ()

    def _start(self, mapping: RankMapping, assembly: Assembly) -> None:
        """Build everything, from the checkpoint if there is one."""
        if self.node not in assembly.nodes:
            return
        self.stack.close()
        self.mapping, self.number = mapping, assembly.nodes.index(self.node)
        self.begin(*self.build(self.stack))
        self.is_built = True
        self.whole, self.layout, self.changes = self.done, self.hosted.bucket_map, {}

    def _take_over(self, mapping: RankMapping, assembly: Assembly, ranks: Mapping[int, int]) -> None:
        """Continue after the mini-batches of the assembly, with contexts that some processes hold."""
        links, step, own = self._linked(), assembly.step, assembly.nodes
        if self.node == assembly.source:
            message = _packed(self._state())
            for node in assembly.behind:
                links.post(ranks[node], message)
        hosts = [own[mapping.host(rank)] for rank in range(mapping.n_logical_workers)]
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
        if self.node not in own:
            return
        values = {rank: pickle.loads(packed) for rank, packed in taken.items()}
        self.whole = None
        self.mapping, self.number = mapping, own.index(self.node)
        contexts = {rank: each["context"] for rank, each in values.items()}
        if state is not None and not self.is_built:
            late = state["shared"]["late_buffers"]
            bind_late_buffers(self.parts.model, late, [context["buffers"] for context in contexts.values()])
            self.order = state["order"]
            self.hosted, self.is_built = self.host(late_buffers=late), True
        if state is not None:
            self._load(state)
        self.hosted.move(mapping, self.number, self.layout, contexts, self.changes)
        if state is not None:
            self.hosted.contexts.install_shared(state["shared"]["of_all"])
        self.stack.close()
        positions = {rank: each["loader"] for rank, each in values.items()}
        self.data = self.loaders(self.stack, self.data_set, self.collate, self.user_state, positions)
        self.done = self.whole = step
        self.rows = [row for row in self.rows if row["step"] <= step]

    def compute(self, iteration: int) -> Any:
        """Train up to the next checkpoint, or until a change is requested."""
        self.boundary = boundary_key(iteration)
        while not self._is_at_boundary:
            self._tell("forward")
            steps = self.hosted.mini_batch(
                self.data.next, watches=self.watches(), ending=self.ending_now, replication=self
            )
            self.finish(over_links(steps, self._linked(), self.places, self.number))
            if not self.is_first_done:
                self.is_first_done = True
                self.announce("trained", self.done)
        result = self.result() | {
            "rows": self._all_rows(), "restart_s": self.restart_s, "saves": self._is_save_due,
        }  # fmt: skip
        return result if self.number == 0 else None

    @property
    def _is_at_boundary(self) -> bool:
        is_due = self.saves_after(self.done) and self.done != self.saved_step
        return is_due or self.done >= self.request.steps or self.ending != Ending.CONTINUE

    @property
    def _is_save_due(self) -> bool:
        return self.saves_after(self.done) or self.ending > Ending.REGROUP_DUE

    def ending_now(self) -> int:
        """Return whether this process would continue, regroup or save; a signal is a notice to it alone."""
        with suppress(RuntimeError):  # the generation is over
            if self.board.has(self.generation, self.boundary):
                return max(Ending.REGROUP_DUE, self.requested_ending())
        return self.requested_ending()

    def apply(self, iteration: int) -> None:
        """Continue after a transaction, whose rows the coordinator has."""
        self.saved_step, self.ending = self.done, Ending.CONTINUE
        self.rows.clear()

    def write(self, save: Save) -> None:
        """Write the files of this process into the checkpoint that is being made."""
        directory, begun_s = self.request.run_dir / "checkpoints" / ".partial", time.monotonic()
        try:
            write_saved(directory, self.parts, self.hosted, self.data)
        except OSError as error:
            problem = f"{error.filename or directory}: {error.strerror}"
            raise CheckpointError(f"{problem}; earlier checkpoints are intact") from error
        self.saved_at = time.monotonic()
        self.save_s = self.saved_at - begun_s

    # --- mini-batches ---------------------------------------------------------------------------

    def after_passes(self) -> None:
        """Send the contexts of the hosted ESTs (see `makespan.easyscale.hosting.Replication`)."""
        self._tell("backward")
        self.contexts[self.done + 1] = own = self._own_contexts()
        self._send_contexts(own)
        self._tell("sum")

    def after_sum(self) -> None:
        """Wait for the contexts that this process keeps for others."""
        self._tell("contexts")
        self.contexts[self.done + 1] |= self._received_contexts()

    def before_step(self) -> None:
        """Begin a step: parameters and optimizer are between two mini-batches until `finish`."""
        self._tell("step")
        self.whole = None

    def finish(self, batch: MiniBatchResult, *, stops: bool = False) -> None:
        """Check and record a mini-batch."""
        self.hosted.contexts.close_for_all()
        self.done += 1
        self.whole, self.layout = self.done, self.hosted.bucket_map
        self.changes = self.hosted.contexts.changes_for_all
        for step in [step for step in self.contexts if step < self.done]:
            del self.contexts[step]
        self.ending = Ending(batch.ending)
        # Rows first: others may take over what this process has done as soon as it regroups.
        own = {row["rank"]: row for row in self.rows_of(batch, self._is_save_due)}
        elsewhere = dict.fromkeys(("context_sha", "micro_batch_s", "sync_s"))
        for rank, loss in enumerate(batch.losses):
            number = self.mapping.host(rank)
            others = {
                "rank": rank, "process": number, "device": self.devices[number],
                "loss": loss, "loss_hex": loss.hex(), **elsewhere,
            }  # fmt: skip
            self.rows.append(own.get(rank) or next(iter(own.values())) | others)
        self._tell("done")
        self.notices.update(self.process.set_handlers())
        if is_watched(self.done - self.first_step - 1):
            self.check_agreement(self.done - self.first_step)
        if len(set(batch.word_sums)) > 1:
            raise divergence(self.done - 1, "parameters", batch.word_sums)
        if self.process.report_progress(self.done, batch.losses[-1]):
            self.announce("progress", self.done)

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
        for other in backups(self.number, self.mapping.n_processes, self.request.survives):
            self._linked().post(self.places[other], message)

    def _received_contexts(self) -> dict[int, bytes]:
        """Return the contexts that this process keeps for others, by rank."""
        n_processes, survives = self.mapping.n_processes, self.request.survives
        kept_for = [
            other for other in range(n_processes) if self.number in backups(other, n_processes, survives)
        ]
        received = dict[int, bytes]()
        for message in self._linked().take_all([self.places[other] for other in kept_for]):
            received |= pickle.loads(message)
        return received

    def _state(self) -> dict[str, Any]:
        """Return what a process needs that is behind, besides contexts."""
        buffers = {name for name, _ in self.parts.model.named_buffers()}
        model = {name: value for name, value in self.parts.model.state_dict().items() if name not in buffers}
        shared = shared_values(self.parts, self.hosted)
        return {
            "model": model, "shared": shared, "layout": self.layout, "changes": self.changes,
            "rows": self.rows, "order": self.order, "restart_s": self.restart_s,
            "saved": (self.saved_step, self.saved_at, self.save_s),
        }  # fmt: skip

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load `_state` of another process."""
        self.parts.model.load_state_dict(state["model"], strict=False)
        load_states(self.parts, state["shared"])
        frozen = set(state["shared"]["frozen"])
        for name, parameter in self.parts.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.layout, self.changes, self.rows = state["layout"], state["changes"], state["rows"]
        self.restart_s = state["restart_s"]
        self.saved_step, self.saved_at, self.save_s = state["saved"]  # all have the same clock

    # --- communication --------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of the mapping, in every process."""
        links, others = self._linked(), [place for place in self.places if place != self.places[self.number]]
        message = _packed(value)
        for place in others:
            links.post(place, message)
        received = dict(zip(others, map(pickle.loads, links.take_all(others)), strict=True))
        return [received.get(place, value) for place in self.places]

    @property
    def devices(self) -> list[str]:
        """Device of each process of the mapping."""
        return [self.request.placing.device(node) for node in self.nodes]

    def _linked(self) -> PeerLinks:
        if self.links is None:
            raise LostPeerError("this process has no links")
        return self.links

    def _tell(self, phase: str) -> None:
        """Announce a phase of the next mini-batch, if somebody listens."""
        if self.request.announces:
            self.announce(phase, self.done + 1)


def train_recovering(directory: RunDirectory, who: Identity) -> None:
    """Take part in a run until it is over."""
    training = RecoveringTraining(TrainingProcess(directory, who))
    joins = who.rank >= JOINING
    reason = take_part(directory.path, training, None if joins else who.rank)
    training.stack.close()
    if joins:
        directory.write_result(reason, who.rank)


if __name__ == "__main__":
    # Ctrl-C of a terminal reaches all its processes; the launching process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_worker(run_worker(sys.argv[1], train_recovering))
