"""One mini-batch of a job's own training loop: turns of the ESTs of a process, sums, steps, and its end.

The body of ``for batch in mini_batch`` runs once per hosted EST, in the context of that EST. Everything else
runs once per process, in a state that is the same in all of them: `Contexts.open_for_all` is in effect from
the end of a pass to the next one, unless somebody needs a context in between.
"""

import sys
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from makespan.easyscale.context import Contexts, own_communication, virtual_rank
from makespan.easyscale.data import to_device
from makespan.easyscale.hosting import (
    MiniBatchResult,
    ModelChecks,
    ModelGradients,
    check_modules,
    gather_results,
    joined_halves,
    word_halves,
)
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import DeterminismLevel
from makespan.easyscale.loop_parts import LoopParts, Variables
from makespan.easyscale.randomness import value_sha
from makespan.easyscale.reduction import HostCopies, Reduction, Steps, synchronize
from makespan.easyscale.user_state import UserState
from makespan.errors import InputError
from makespan.training.bits import WordSum

T = TypeVar("T")


class Together(Protocol):
    """What the processes of a loop do together."""

    def over(self, steps: Steps[T]) -> T:
        """Carry out the steps of this process together with the other processes."""

    def tell(self, phase: str) -> None:
        """Announce a phase of the current mini-batch, if somebody listens."""

    def replicate(self) -> None:
        """Copy the contexts after a mini-batch to other processes, if the run survives losses."""


class LoopMiniBatch:
    """One mini-batch of a loop; iterating over it gives each hosted EST its turn, with its batch.

    A second iteration is a second pass over the same batches.
    """

    def __init__(self, hosted: "LoopESTs", number: int) -> None:
        self._hosted, self._number = hosted, number

    def __iter__(self) -> Iterator[Any]:
        """Run the turns of all hosted ESTs, then return to the state that all processes share."""
        self._hosted.check_current(self._number)
        return self._hosted.turns()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of a scalar loss to those of this turn.

        The sum of all losses of a turn is the loss in the table of steps. An
        `makespan.errors.InputError` is raised outside of a turn and for other values.
        """
        given: object = loss
        if not isinstance(given, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            is_tensor = isinstance(given, Tensor)
            shown = f"tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise InputError(f"mini_batch.backward got a {shown}; expected a scalar tensor with a gradient")
        self._hosted.backward(loss.reshape(()) if loss.ndim else loss, retain_graph=retain_graph)

    def report(self, **numbers: float | Tensor) -> None:
        """Keep numbers of this turn, such as an accuracy, for `reported`."""
        self._hosted.report(numbers)

    def reported(self, name: str) -> tuple[float, ...]:
        """Return a reported number of all ESTs by virtual rank; all processes have to call this together.

        The name ``loss`` is that of the sum of losses. An `makespan.errors.InputError` is raised inside of a
        turn, and if an EST did not report the number.
        """
        self._hosted.check_current(self._number)
        return self._hosted.reported(name)

    def sum(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients of the last pass over all ESTs, for the models of an optimizer.

        Afterwards the gradients of their parameters are the sums, which own code may read and change, for
        example to clip them. With a scaler they are no longer scaled.
        """
        self._hosted.check_current(self._number)
        self._hosted.sum(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients as `sum` does unless that is done, and take the step of an optimizer."""
        self._hosted.check_current(self._number)
        self._hosted.step(optimizer)


class LoopESTs:
    """The ESTs that one process hosts in a loop: their turns, and the sums and steps between them.

    Parameters
    ----------
    parts, device
        Models, optimizers and shared state, and the device of the models.
    mapping, process
        Mapping of ESTs to processes, and the number of this process in it.
    reduction, level, seed
        Order of the sum of gradients, determinism level, and seed of the random states of the ESTs.
    layouts
        Bucket layout of each model from a checkpoint; empty at the start of a job.
    user_state, late_buffers
        See `Contexts`.
    together
        What this process does together with the others.
    on_micro_batch
        Called after each turn.
    sums_on_host
        See `makespan.easyscale.reduction.HostCopies`.
    """

    def __init__(
        self,
        parts: LoopParts,
        device: torch.device,
        mapping: RankMapping,
        process: int,
        reduction: Reduction,
        level: DeterminismLevel,
        *,
        seed: int,
        layouts: Mapping[str, Sequence[Sequence[str]] | None],
        user_state: UserState,
        late_buffers: Collection[str],
        together: Together,
        on_micro_batch: Callable[[], object],
        sums_on_host: bool = False,
    ) -> None:
        check_modules(parts.model, mapping)
        self._parts, self._device, self._mapping, self._process = parts, device, mapping, process
        self.ranks = mapping.hosted[process]
        copies = HostCopies(device, sums_on_host=sums_on_host)
        self._together, self._on_micro_batch = together, on_micro_batch
        self._gradients = {}
        for name, model in parts.models.items():
            layout = layouts.get(name)
            self._gradients[name] = ModelGradients(
                model, mapping, process, reduction, level, copies,
                None if layout is None else tuple(map(tuple, layout)), keeps_sums=False, accumulates=True,
            )  # fmt: skip
        self._checks = ModelChecks(parts.model, "code outside of the turns")
        self._parameters = list(parts.model.parameters())
        self._word_sum = WordSum(self._parameters)
        self.contexts = Contexts(parts.model, device, self.ranks, seed, user_state, late_buffers)
        self.state_names = set(parts.model.state_dict())
        self.local_notices = set[str]()
        self.variables: Variables | None = None  # of user code around the loop
        self._number, self._pass, self._calls, self._watches = 0, 0, 0, False
        self._live: int | None = None  # EST whose turn it is
        self._left: int | None = None  # EST in whose turn a pass was left
        self._turns: weakref.ref[Generator[Any, None, None]] | None = None
        for name, optimizer in parts.optimizers.items():
            self._listen(f"optimizer {name}".rstrip(), optimizer)

    def layout(self) -> dict[str, Any]:
        """Return the layout of buckets by model as plain values."""
        return {name: each.layout() for name, each in self._gradients.items()}

    @property
    def notices(self) -> list[str]:
        """Notices about what user code does."""
        of_gradients = (notice for each in self._gradients.values() for notice in each.notices)
        return [*self._checks.notices, *of_gradients, *sorted(self.local_notices)]

    def _listen(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Check each step of an optimizer, also one that user code takes without the mini-batch."""

        def before(*_: Any) -> None:
            if self._live is not None:
                raise InputError(
                    f"{label} steps in the turn of a logical worker; expected mini_batch.step behind it"
                )
            if not self._is_summed(optimizer):
                raise InputError(
                    f"{label} steps before the gradients are summed; expected mini_batch.step, or "
                    "mini_batch.sum before it"
                )

        def after(*_: Any) -> None:
            self._stepped.add(id(optimizer))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def open_first(self) -> None:
        """Show the state of all before the first mini-batch."""
        self._together.over(self.contexts.send_first_buffers(self._mapping, self._process))
        self.contexts.open_for_all()

    def begin(self, number: int, fetch: Callable[[int], Any], *, watches: bool) -> None:
        """Begin a mini-batch.

        Parameters
        ----------
        number, fetch
            Number of the mini-batch, and function that returns the batch of a virtual rank.
        watches
            Whether to look for changes by user code, as in `HostedESTs.mini_batch`.
        """
        self._number, self._fetch, self._watches, self._pass = number, fetch, watches, 0
        self._batches: dict[int, Any] = {}
        self._losses: dict[int, Tensor] = {}
        self._reports: dict[int, dict[str, Tensor]] = {rank: {} for rank in self.ranks}
        self._gathered: dict[str, tuple[float, ...]] = {}
        self._summed, self._unscaled, self._stepped = set[str](), set[int](), set[int]()
        self._micro_batch_s, self._sync_s = dict.fromkeys(self.ranks, 0.0), 0.0
        if watches:
            self.contexts.begin_watching()
            self.contexts.open_for_all(watches=True)

    def check_current(self, number: int) -> None:
        """Reject the use of a mini-batch that has ended, or whose turns were left."""
        if number != self._number:
            raise InputError(
                f"mini-batch {number} is used after its end; expected the current one, mini-batch "
                f"{self._number}"
            )
        if self._left is not None:
            raise InputError(
                f"the turns were left in that of logical worker {self._left}; expected all turns of "
                "'for batch in mini_batch', because every logical worker takes part"
            )

    # --- turns ---

    def _live_rank(self, caller: str) -> int:
        """Return the EST whose turn it is; outside of a turn an `InputError` is raised."""
        if self._live is None:
            raise InputError(
                f"mini_batch.{caller} is called outside of a turn; expected it in 'for batch in mini_batch'"
            )
        return self._live

    def turns(self) -> Iterator[Any]:
        """Return the turns of all hosted ESTs in a new pass."""
        if self._live is not None:
            raise InputError("a pass began inside of a turn; expected passes one after the other")
        turns = self._run_turns()
        # A weak reference: leaving the turns early has to end them at once.
        self._turns = weakref.ref(turns)
        return turns

    def close(self) -> None:
        """Leave a turn that an error has interrupted."""
        if self._turns is not None and (turns := self._turns()) is not None:
            turns.close()

    def _run_turns(self) -> Generator[Any, None, None]:
        self._drop_gradients()
        self._pass, self._summed, self._unscaled, self._gathered = self._pass + 1, set(), set(), {}
        self.contexts.store()
        self._together.tell("forward")
        self._checks.begin()
        n_workers = self._mapping.n_logical_workers
        with ExitStack() as stack:
            for gradients in self._gradients.values():
                stack.enter_context(gradients.listening())
            for rank in self.ranks:
                begun = time.perf_counter()
                with virtual_rank(rank, n_workers), self.contexts.live(rank, watches=self._watches):
                    shared = self._shared()
                    self._checks.before_turn(watches=self._watches)
                    if self._watches and self.variables is not None:
                        self.variables.before_turn(sys._getframe(1))
                    for gradients in self._gradients.values():
                        gradients.begin(rank)
                    self._live, self._calls = rank, 0
                    try:
                        if rank not in self._batches:
                            self._batches[rank] = to_device(self._fetch(rank), self._device)
                        yield self._batches[rank]
                        if self._watches and self.variables is not None:
                            self.local_notices |= self.variables.after_turn(sys._getframe(1))
                    except GeneratorExit:
                        self._left = rank
                        raise
                    finally:
                        self._live = None
                    if not self._calls:
                        raise InputError(
                            f"the turn of logical worker {rank} ended without mini_batch.backward; expected "
                            "one call at least in each turn"
                        )
                self._checks.after_turn(watches=self._watches)
                self._check_shared(shared)
                self._checks.check_frozen()
                for gradients in self._gradients.values():
                    gradients.finish()
                synchronize(self._device)
                self._micro_batch_s[rank] += time.perf_counter() - begun
                self._on_micro_batch()
        with own_communication():
            self._together.over(self.contexts.send_first_buffers(self._mapping, self._process))
        self.contexts.open_for_all(watches=self._watches)

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run a backward pass of the live EST."""
        rank, scaler = self._live_rank("backward"), self._parts.scaler
        self._calls += 1
        scaled = loss if scaler is None else scaler.scale(loss)
        with ExitStack() as stack:
            for gradients in self._gradients.values():
                stack.enter_context(gradients.passing())
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        before = self._losses.get(rank)
        self._losses[rank] = loss.detach() if before is None else before + loss.detach()

    def report(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Keep numbers of the live EST."""
        rank = self._live_rank("report")
        self._reports[rank] |= {name: torch.as_tensor(value).detach() for name, value in numbers.items()}

    def _shared(self) -> dict[str, object]:
        """Return what all logical workers share besides models, by its name in a checkpoint.

        In a mini-batch that is not watched these are the options of optimizers alone.
        """
        if self._watches:
            return {
                name: value_sha(each.state_dict(), by_sum=True)
                for name, each in self._parts.states.items()
                if each is not None and each is not self._parts.last
            }
        return {
            f"optimizer {name}".rstrip(): [
                {option: value for option, value in group.items() if isinstance(value, int | float | tuple)}
                for group in optimizer.param_groups
            ]
            for name, optimizer in self._parts.optimizers.items()
        }

    def _check_shared(self, before: Mapping[str, object]) -> None:
        """Reject changes of shared state in a turn, because they depend on the mapping."""
        now = self._shared()
        if changed := [name for name, value in before.items() if now[name] != value]:
            raise InputError(
                f"the turn of a logical worker changes {changed[0]}, which all share; expected changes "
                "outside of the turns, or a buffer or an attribute of the model, of which each has its own"
            )

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # --- sums and steps ---

    def _name_of(self, optimizer: Any) -> str:
        for name, each in self._parts.optimizers.items():
            if each is optimizer:
                return name
        raise InputError(
            f"{type(optimizer).__name__} is no optimizer of the loop; expected one that run.loop got"
        )

    def _is_summed(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._summed.issuperset(self._parts.models_of(self._name_of(optimizer)))

    def sum(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients of the models of an optimizer, unless that is done."""
        name, begun = self._name_of(optimizer), time.perf_counter()
        if self._live is not None or not self._pass:
            where = "before a pass" if self._live is None else "in the turn of a logical worker"
            raise InputError(
                f"gradients are summed {where}; expected mini_batch.sum and mini_batch.step behind "
                "'for batch in mini_batch'"
            )
        with own_communication():
            for model in self._parts.models_of(name):
                if model not in self._summed:
                    self._together.tell("sum")
                    self._together.over(self._gradients[model].sum())
                    self._summed.add(model)
        if self._parts.scaler is not None and id(optimizer) not in self._unscaled:
            self._parts.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
        self._sync_s += time.perf_counter() - begun

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step of an optimizer."""
        self.sum(optimizer)
        begun = time.perf_counter()
        if self._parts.scaler is None:
            optimizer.step()
        else:
            self._parts.scaler.step(optimizer)
        self._stepped.add(id(optimizer))  # also if the scaler skips it
        self._sync_s += time.perf_counter() - begun

    # --- the end of a mini-batch ---

    def reported(self, name: str) -> tuple[float, ...]:
        """Return the loss, or a number that is reported, of all ESTs by virtual rank."""
        if self._live is not None or not self._pass:
            raise InputError("mini_batch.reported is called before the end of a pass; expected it behind it")
        if not self._gathered:
            own, names = self._rows()
            with own_communication():
                rows, _ = self._together.over(gather_results(own, [], self._mapping))
            self._gathered = {each: tuple(rows[:, place].tolist()) for place, each in enumerate(names)}
        if name not in self._gathered:
            raise InputError(f"no turn reported {name!r}; expected {', '.join(self._gathered)}")
        return self._gathered[name]

    def _rows(self) -> tuple[Tensor, list[str]]:
        """Return loss and reported numbers of each hosted EST, and their names."""
        names = sorted(self._reports[self.ranks[0]])
        rows = []
        for rank in self.ranks:
            numbers = self._reports[rank]
            if sorted(numbers) != names:
                odd = next(iter(set(numbers) ^ set(names)))
                raise InputError(f"only some turns report {odd!r}; expected the same names in each turn")
            values = [self._losses[rank], *(numbers[name] for name in names)]
            rows.append(torch.stack([each.reshape(()).to(self._device, torch.float64) for each in values]))
        return torch.stack(rows).cpu(), ["loss", *names]

    def finish(self, ending: Callable[[], int], *, stops: bool) -> tuple[MiniBatchResult, list[bool]]:
        """End a mini-batch; return its results, and by process whether it is the last one.

        The value of ``ending`` goes to all processes, as in `HostedESTs.mini_batch`.
        """
        self.check_current(self._number)
        if not self._stepped:
            raise InputError(
                f"the body of the loop ended in mini-batch {self._number} without mini_batch.step; expected "
                "one step at least; accumulate gradients inside of the turns"
            )
        begun = time.perf_counter()
        if self._parts.scaler is not None and self._unscaled_states():
            self._parts.scaler.update()
        self._drop_gradients()
        if self._watches:
            self._checks.check_hooks("code outside of the turns")
        is_alone = self._mapping.n_processes == 1
        halves = (0, 0) if is_alone else word_halves(self._word_sum())
        own, _ = self._rows()
        self._together.replicate()
        steps = gather_results(own[:, :1], [ending(), stops, *halves], self._mapping)
        rows, by_process = self._together.over(steps)
        word_sums = () if is_alone else tuple(joined_halves(high, low) for *_, high, low in by_process)
        times = tuple(self._micro_batch_s[rank] for rank in self.ranks)
        sync_s = self._sync_s + time.perf_counter() - begun
        endings = max(int(each[0]) for each in by_process)
        result = MiniBatchResult(tuple(rows[:, 0].tolist()), times, sync_s, endings, word_sums)
        return result, [bool(each[1]) for each in by_process]

    def _unscaled_states(self) -> bool:
        """Return True if the scaler has looked for overflows since its last update, also one by user code."""
        scaler: Any = self._parts.scaler
        return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())
