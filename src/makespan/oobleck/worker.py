"""Process of one node of a resilient run: ``python -m makespan.oobleck.worker <run directory>``.

The directory is that of the processes, where the coordinator publishes its address.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from makespan.errors import CheckpointError
from makespan.files import atomic_path, read_json, write_json
from makespan.oobleck.requests import NODE, WORK, NodeRequest, Work
from makespan.oobleck.shards import Piece, read_piece
from makespan.oobleck.stage import PeerGroups, StageExecutor, State
from makespan.runtime import (
    Identity,
    RunDirectory,
    check_device,
    choose_device,
    end_worker,
    hold_gpu,
    run_worker,
)
from makespan.runtime.messages import Form, Save
from makespan.runtime.node import (
    ADDRESS_FILE,
    JOINING,
    Announcing,
    BroadcastStore,
    Serving,
    store_on,
    take_part,
)

PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load, which takes long: a fork server loads them before it forks a worker."""
_MEET_S = 25.0
"""Longest time to build groups; with the one retry, it stays below a minute."""
_LONGEST_WAIT_S = 7 * 24 * 3600.0
"""Longest wait in a pass or a sum; a last resort, because steps may be long and losses are detected."""
_LOOK_S = 0.01
"""Time between two looks for a file of another node [s]."""


def layer_file(layer: int | str) -> str:
    """Return the name of the file of a layer in a checkpoint."""
    return f"layer-{int(layer):04d}.pt"


def _weight_file(piece: Piece) -> str:
    """Return the name of the file by which a weight and its optimizer state reach the writer of the layer."""
    return f"layer-{piece.layer:04d}-weight-{piece.weight}.part"


class TrainingEngine:
    """Executor driven by the coordinator; layers it no longer owns stay held until others have copies."""

    def __init__(self, device: str = "cpu", timeout_s: float = 300.0) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._owned: tuple[int, ...] = ()
        self._iteration, self._is_backward, self._tells = 0, False, False

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that are held, including those that are not owned any more; pieces if state is divided."""
        return tuple(self._executor.pieces() if self._is_divided else map(str, self._executor.layers))

    @property
    def is_waiting(self) -> bool:
        """True while this process waits for another one."""
        return PeerGroups.n_waiting > 0

    def prepare(
        self, node: int, request: Any, announce: Announcing, board: BroadcastStore, serving: Serving
    ) -> None:
        """Load the model."""
        self._node, self._announce, self._board = node, announce, board
        node_request: NodeRequest = NODE.validate_python(request)
        self._partial, self._is_divided = node_request.partial, node_request.is_divided
        self._executor = StageExecutor(
            node_request.job, self._device, self._enter, self._timeout_s, _MEET_S, node_request.pass_order,
            reroutes=node_request.reroutes, is_divided=node_request.is_divided,
        )  # fmt: skip

    def check_device(self) -> None:
        """Raise the error of a device that no longer computes."""
        check_device(torch.device(self._device))

    def drop(self) -> None:
        """Drop every group."""
        self._executor.disconnect()

    def form(self, form: Form, forgets: bool) -> Mapping[str, str]:
        """Build groups, copy layers, and return the checksums of the layers that are owned."""
        executor = self._executor
        work: Work = WORK.validate_python(form.work)
        if forgets:
            executor.keep(())
        self._announce("group build", form.step)
        plan = work.hybrid_plan
        also = [node for node in form.members if node not in plan.nodes]
        executor.connect(plan, self._node, store_on(self._board, form.generation, self._timeout_s), also)
        self._announce("copy", form.step)
        for layer, source, target in work.copies:
            if source == self._node:
                executor.send_layer(layer, target)
            elif target == self._node:
                executor.receive_layer(layer, source)
        for text, source, target in work.pieces:
            if source == self._node:
                executor.send_piece(read_piece(text)[0], target)
            elif target == self._node:
                executor.receive_piece(read_piece(text)[0], source)
        self._owned = tuple(
            layer
            for pipeline in plan.pipelines if self._node in pipeline.nodes
            for stage in pipeline.template.stages_of(pipeline.nodes.index(self._node))
            for layer in stage.layers
        )  # fmt: skip
        if work.is_start:
            # No node could send these layers: initialise them, or load them from the checkpoint.
            missing = [layer for layer in self._owned if layer not in executor.layers]
            states = {}
            if work.origin is not None:
                for layer in missing:
                    file = work.origin / layer_file(layer)
                    states[layer] = torch.load(file, map_location=self._device, weights_only=True)
            executor.hold(missing)
            for layer, state in states.items():
                executor.load_layer_state(layer, state)
        self._tells = self._node == plan.nodes[0]
        if self._is_divided:
            holders = {(layer, number): nodes for layer, number, nodes in work.holders}
            return executor.divide(work.f + 1, dict(work.hosts), holders)
        return {str(layer): executor.checksum(layer) for layer in self._owned}

    def compute(self, iteration: int) -> Any:
        """Run the passes and sums of an iteration; the first node of the plan reports the loss."""
        # Training has resumed, so all copies have arrived, and other layers are not needed any more.
        self._executor.keep(self._owned)
        self._iteration, self._is_backward = iteration, False
        self._executor.compute(iteration)
        facts = self._executor.reduce()
        return {"loss": facts.loss, "gradient_norm": facts.gradient_norm} if self._tells else None

    def _enter(self, phase: str) -> None:
        """Announce phases; forward passes between backward passes count as backward."""
        self._is_backward = phase == "backward" or (self._is_backward and phase == "forward")
        self._announce("backward" if self._is_backward else phase, self._iteration)

    def apply(self, iteration: int) -> None:
        """Take the optimizer step."""
        self._executor.apply()

    def write(self, save: Save) -> None:
        """Write layers into the checkpoint that is being made."""
        if self._is_divided:
            self._write_pieces(save)
            return
        for layer in save.layers:
            self._write_layer(int(layer), self._executor.layer_state(int(layer)))

    def _write_layer(self, layer: int, state: State) -> None:
        file = self._partial / layer_file(layer)
        with self._writing(file):
            torch.save(state, file)
            if unsaved := self._executor.unsaved_buffers(layer):
                write_json(unsaved, file.with_suffix(".json"))

    @contextmanager
    def _writing(self, file: Path) -> Iterator[None]:
        """Report a file that cannot be written, with the free space there."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as an unexpected file position.
            free = shutil.disk_usage(self._partial).free if self._partial.is_dir() else 0
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{file}: cannot be written, {free} bytes are free there: {reason}"
            ) from None

    def _write_pieces(self, save: Save) -> None:
        """Write whole layers whose frames this node is to save, with the optimizer state of all nodes.

        States that others are to save arrive in files, for which there need be no connection. A weight comes
        with its state, because it may be behind where its state is not.
        """
        executor, own = self._executor, {read_piece(text)[0] for text in save.layers}
        states = [piece for piece in sorted(own) if piece.kind == "state"]
        whole = [piece.layer for piece in sorted(own) if piece.kind == "frame"]
        self._announce("checkpoint", save.step)
        for piece in states:
            if piece.layer not in whole:
                file = self._partial / _weight_file(piece)
                weight = executor.piece_state(Piece(piece.layer, "weight", piece.weight))
                with self._writing(file), atomic_path(file) as path:
                    torch.save(weight | executor.piece_state(piece), path)
        for layer in whole:
            state = executor.layer_state(layer)
            arrived = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer/")}
            for number in range(executor.n_trained(layer)):
                piece = Piece(layer, "state", number)
                if piece in own:
                    arrived |= executor.piece_state(piece)
                    continue
                file = self._partial / _weight_file(piece)
                while not file.exists():
                    self._announce("checkpoint", save.step)  # ends the wait when a node is lost
                    time.sleep(_LOOK_S)
                arrived |= torch.load(file, weights_only=True)
                file.unlink()
            self._write_layer(layer, arrived)


def work(directory: RunDirectory, who: Identity) -> None:
    """Take part until the run is over."""
    torch.set_num_threads(who.threads)
    # Not use_deterministic_algorithms, which would load a compiler that nothing here uses.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    address = read_json(directory.path / ADDRESS_FILE)
    if address is not None and address["host"] != "127.0.0.1":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.pop(name, None)  # set by a launcher for this machine only
    device = choose_device(who)
    hold_gpu(directory, device, is_free=who.rank >= JOINING or who.parent is None)
    engine = TrainingEngine(str(device), _LONGEST_WAIT_S)
    why = take_part(directory.path, engine, who.rank if who.rank < JOINING else None)
    directory.write_result(why, who.rank)


if __name__ == "__main__":
    # Ctrl-C of a terminal reaches all its processes; the coordinator decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_worker(run_worker(sys.argv[1], work))
