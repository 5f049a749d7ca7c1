"""Transfers between the processes of a plan, over groups that can be dropped and built anew.

Groups are objects of their own beside those that `torch.distributed` knows of. What closes their sockets, and
so releases whoever waits for this process, is that nobody refers to them or to a work any more. Both are
attributes of objects of this module only, which `Links.close` empties: whatever else still refers to these,
the frames of an exception for example, keeps no socket open.
"""

import importlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from makespan.errors import TrainingError

__all__ = ["Links", "LostPeerError", "Transfer"]


_LOOK_S = 0.02


class LostPeerError(TrainingError):
    """A transfer failed because a process at its other end is gone, or has dropped its groups."""


class Transfer:
    """One that was started; it keeps its tensor."""

    def __init__(self, work: Any, tensor: Tensor, pending: set["Transfer"]) -> None:
        self._work, self._tensor, self._pending = work, tensor, pending
        pending.add(self)

    def finish(self) -> None:
        """Wait for its end; a `LostPeerError` says that the other side is gone."""
        Links.n_waiting += 1
        try:
            if self._work is not None:
                _guarded(lambda: self._work.wait())
        finally:
            Links.n_waiting -= 1
            self.drop()

    def drop(self) -> None:
        """Forget it."""
        self._work = None
        self._pending.discard(self)


class Links:
    """Point-to-point transfers between all members, and sums over groups of them.

    Parameters
    ----------
    members, own
        Nodes in the order of their ranks, and the node of this process.
    groups
        Nodes that add up together, in an order that all members share.
    store
        Where the members meet, of this generation alone; closed, it releases those who still wait there.
    meet_s
        Longest time until all groups are built [s]; None for ``timeout_s``.
    """

    n_waiting = 0
    """Waits of this process for others that have not ended."""

    def __init__(
        self,
        members: Sequence[int],
        own: int,
        groups: Sequence[tuple[int, ...]],
        store: Any,
        device: torch.device,
        timeout_s: float,
        meet_s: float | None = None,
    ) -> None:
        self.own, self.device, self._timeout = own, device, timedelta(seconds=timeout_s)
        self._meet_s = timeout_s if meet_s is None else meet_s
        self._meet_until_s = time.monotonic() + self._meet_s
        self._ranks = {node: rank for rank, node in enumerate(members)}
        self._pending: set[Transfer] = set()

        self._built: dict[tuple[int, ...] | None, Any] = {}
        problem = None
        try:
            for number, group in enumerate([None, *groups]):
                among = list(members) if group is None else list(group)
                if own in among and len(among) > 1:
                    self._built[group] = self._meet(str(number), among, store)
            # Nobody begins before all are there: who gave up in the middle keeps connections for a while,
            # and whoever waited at the other end of one would not be told.
            _guarded(lambda: store.set(f"met/{own}", "1"))
            left = timedelta(seconds=max(self._meet_until_s - time.monotonic(), _LOOK_S))
            _guarded(lambda: store.wait([f"met/{node}" for node in members], left))
        except LostPeerError as error:
            problem = str(error)
        if problem is not None:  # raised here, so that it refers to no frame that still knows a group
            self.close()
            raise LostPeerError(f"node {own} could not meet nodes {list(members)}: {problem}")

    def _meet(self, name: str, among: list[int], store: Any) -> Any:
        """Build a group, unless the store is closed meanwhile: gloo would wait long for who died just now."""
        found, problems, done = list[Any](), list[str](), threading.Event()

        def build() -> None:
            try:
                found.append(self._build(name, among, store))
            except RuntimeError as error:
                problems.append(str(error).partition("\n")[0])
            finally:
                done.set()

        threading.Thread(target=build, daemon=True).start()
        while not done.wait(_LOOK_S):
            _guarded(lambda: store.check([name]))
            if time.monotonic() > self._meet_until_s:
                raise LostPeerError(f"timed out after {self._meet_s:g} s building the group of nodes {among}")
        if problems:
            raise LostPeerError(problems[0])
        return found.pop()

    def _build(self, name: str, among: list[int], store: Any) -> Any:
        # The stubs of torch hide its public stores and backends.
        dist: Any = importlib.import_module("torch.distributed")
        backend = dist.ProcessGroupGloo if self.device.type == "cpu" else dist.ProcessGroupNCCL
        return backend(dist.PrefixStore(name, store), among.index(self.own), len(among), self._timeout)

    def send(self, tensor: Tensor, node: int, tag: int) -> Transfer:
        """Start to send a tensor, which must not change until the transfer is finished."""
        return self._started(tensor, lambda: self._built[None].send([tensor], self._ranks[node], tag))

    def receive(self, tensor: Tensor, node: int, tag: int) -> Tensor:
        """Fill a tensor with what a node sends under the same tag; those of one tag come in their order."""
        self._started(tensor, lambda: self._built[None].recv([tensor], self._ranks[node], tag)).finish()
        return tensor

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Transfer:
        """Start to replace a tensor by its sum over a group; all of its members start theirs in one order."""
        return self._started(tensor, lambda: self._built[group].allreduce([tensor]))

    def send_values(self, values: Any, node: int, tag: int) -> list[Transfer]:
        """Start to send what JSON can write."""
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([text.numel()], device=self.device)
        return [self.send(size, node, tag), self.send(text, node, tag)]

    def receive_values(self, node: int, tag: int) -> Any:
        """Receive what a node sends with `send_values`."""
        size = self.receive(torch.empty(1, dtype=torch.int64, device=self.device), node, tag)
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        return json.loads(bytes(self.receive(text, node, tag).tolist()))

    def close(self) -> None:
        """Drop all groups and works; never waits for anybody."""
        for transfer in list(self._pending):
            transfer.drop()
        groups = list(self._built.values())
        self._built.clear()
        # The end of a group waits for sums that are under way in it, which may wait for a process that waits
        # for another of these groups: so each ends by itself.
        while groups:
            threading.Thread(target=_drop, args=([groups.pop()], self.device)).start()

    def _started(self, tensor: Tensor, start: Callable[[], Any]) -> Transfer:
        if not self._built:
            raise LostPeerError(f"node {self.own} is connected to nobody")
        return Transfer(_guarded(start), tensor, self._pending)


def _guarded(call: Callable[[], Any]) -> Any:
    """Call what torch raises errors of the network from; no frame of theirs is left in the one raised."""
    problem = ""
    try:
        return call()
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    raise LostPeerError(problem)


def _drop(groups: list[Any], device: torch.device) -> None:
    if device.type == "cuda":
        groups[0].abort()
    groups.clear()
