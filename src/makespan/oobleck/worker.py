"""Process of one node of a resilient run: ``python -m makespan.oobleck.worker <run directory>``."""

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from makespan.errors import CheckpointError
from makespan.files import read_json, write_json
from makespan.oobleck.job import job_from
from makespan.oobleck.messages import Form, Save
from makespan.oobleck.node import ADDRESS_FILE, JOINING, Announcing, Board, store_on, take_part
from makespan.oobleck.plan import plan_from
from makespan.oobleck.stage import Links, StageExecutor
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, run_worker

# ------------------------------------------------------------------------------------------------
# What a node of a resilient run computes with: its stage, its groups, and the layers it holds.


_MEET_S = 25.0
"""Twice that is less than a minute: building groups is tried again once."""


def layer_file(layer: int | str) -> str:
    """Name of the file of a layer in a checkpoint."""
    return f"layer-{int(layer):04d}.pt"


class TrainingEngine:
    """An executor that does as the coordinator says; what it holds stays until others have their copies."""

    def __init__(self, device: str = "cpu", timeout_s: float = 300.0) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._owned: tuple[int, ...] = ()
        self._iteration, self._is_backward, self._tells = 0, False, False

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that are held, also those that are not owned any more."""
        return tuple(map(str, self._executor.layers))

    @property
    def is_waiting(self) -> bool:
        """Whether this process waits for another one."""
        return Links.n_waiting > 0

    def prepare(self, node: int, request: Any, announce: Announcing, board: Board) -> None:
        """Load the model."""
        self._node, self._announce, self._board = node, announce, board
        self._partial = Path(request["partial"])
        self._executor = StageExecutor(
            job_from(request["job"]), self._device, self._enter, self._timeout_s, _MEET_S
        )

    def drop(self) -> None:
        """Give up every group."""
        self._executor.disconnect()

    def form(self, form: Form, forgets: bool) -> Mapping[str, str]:
        """Build groups, copy layers, and return the checksums of those that are owned."""
        executor, work = self._executor, form.work
        if forgets:
            executor.keep(())
        self._announce("group build", form.step)
        plan = plan_from(work["plan"])
        also = [node for node in form.members if node not in plan.nodes]
        executor.connect(plan, self._node, store_on(self._board, form.generation, self._timeout_s), also)
        self._announce("copy", form.step)
        for layer, source, target in work["copies"]:
            if source == self._node:
                executor.send_layer(layer, target)
            elif target == self._node:
                executor.receive_layer(layer, source)
        self._owned = tuple(
            layer
            for one in plan.pipelines if self._node in one.nodes
            for layer in one.template.stages[one.nodes.index(self._node)].layers
        )  # fmt: skip
        if work["is_start"]:
            self._begin(work["origin"])
        self._tells = self._node == plan.nodes[0]
        return {str(layer): executor.checksum(layer) for layer in self._owned}

    def _begin(self, origin: str | None) -> None:
        """Hold what nobody could send, as at the start or as in a checkpoint."""
        missing = [layer for layer in self._owned if str(layer) not in self.layers]
        states = {} if origin is None else {
            layer: torch.load(Path(origin, layer_file(layer)), map_location=self._device, weights_only=True)
            for layer in missing
        }  # fmt: skip
        self._executor.hold(missing)
        for layer, state in states.items():
            self._executor.load_layer_state(layer, state)

    def compute(self, iteration: int) -> Any:
        """Do the passes and the sums of an iteration; one node tells the loss."""
        self._executor.keep(self._owned)
        self._iteration, self._is_backward = iteration, False
        self._executor.compute(iteration)
        facts = self._executor.reduce()
        return {"loss": facts.loss, "gradient_norm": facts.gradient_norm} if self._tells else None

    def _enter(self, phase: str) -> None:
        """Announce phases; forward passes between backward ones are no phase of their own."""
        self._is_backward = phase == "backward" or (self._is_backward and phase == "forward")
        self._announce("backward" if self._is_backward else phase, self._iteration)

    def apply(self, iteration: int) -> None:
        """Do the step."""
        self._executor.apply()

    def write(self, save: Save) -> None:
        """Write layers where a checkpoint is being made."""
        for layer in save.layers:
            file = self._partial / layer_file(layer)
            try:
                torch.save(self._executor.layer_state(int(layer)), file)
                if unsaved := self._executor.unsaved_buffers(int(layer)):
                    write_json(unsaved, file.with_suffix(".json"))
            except (OSError, RuntimeError) as error:
                # torch reports a full disk as a file position that it did not expect.
                free = shutil.disk_usage(self._partial).free if self._partial.is_dir() else 0
                what = str(error).partition("\n")[0]
                raise CheckpointError(
                    f"{file}: cannot be written, {free} bytes are free there: {what}"
                ) from None


# ------------------------------------------------------------------------------------------------
# One node of a resilient run: ``python -m <this module> <directory of its processes>``.

OF_SEVERAL = ("torch._dynamo",)
"""What optimizers load, and takes long: a fork server has it before the first worker is forked."""


_LONGEST_WAIT_S = 7 * 24 * 3600.0
"""For another process in a pass or a sum; a last resort, because steps may be long and losses are noticed."""


def work(directory: RunDirectory, who: Identity) -> None:
    """Take part until the run is over."""
    torch.set_num_threads(who.threads)
    # Not use_deterministic_algorithms, which loads a compiler that nothing here uses.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    address = read_json(directory.path / ADDRESS_FILE)
    if address is not None and address["host"] != "127.0.0.1":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.pop(name, None)  # of a launcher that knows this machine only
    engine = TrainingEngine(str(choose_device(who)), _LONGEST_WAIT_S)
    why = take_part(directory.path, engine, who.rank if who.rank < JOINING else None)
    directory.write_result(why, who.rank)


if __name__ == "__main__":
    # Ctrl-C of a terminal reaches all its processes; the coordinator decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_worker(run_worker(sys.argv[1], work))
