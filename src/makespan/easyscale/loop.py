"""Training loop of a job's own: the run that its function gets, and the iterator over mini-batches.

The function runs in every process, again in each generation, and ends inside the loop where a later
generation goes on with it.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from traceback import walk_tb
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import default_collate

from makespan.easyscale.context import own_communication
from makespan.easyscale.data import LoaderPool, LoaderState, Streams
from makespan.easyscale.hosting import MiniBatchResult
from makespan.easyscale.job import ElasticJob, RankMapping
from makespan.easyscale.loop_parts import LoopParts, Variables, map_style, unused_options
from makespan.easyscale.loop_turns import LoopESTs, LoopMiniBatch, Together
from makespan.easyscale.randomness import parameter_sha
from makespan.easyscale.reduction import Reduction
from makespan.easyscale.requests import GenerationRequest
from makespan.easyscale.saved import Data, Hosted, SavedJob, SharedParts
from makespan.easyscale.user_state import UserState, is_watched
from makespan.errors import InputError, TrainingError
from makespan.training.bits import WordSum


class LoopSuspended(BaseException):
    """Ends the function of a job where a later generation goes on with its loop."""


class Generation(Together, Protocol):
    """The generation of a run in this process, as far as a loop needs it."""

    request: GenerationRequest
    job: ElasticJob
    mapping: RankMapping
    number: int
    device: torch.device
    sums_on_host: bool
    done: int
    first_step: int
    parts: SharedParts
    process: Any

    @property
    def goes_on(self) -> bool:
        """True if the generation has another mini-batch."""

    @property
    def is_run_over(self) -> bool:
        """True if no later generation trains the job any further."""

    def reduction(self) -> Reduction:
        """Return the order and scaling of the sum of gradients."""

    def loaders(self, stack: ExitStack, data: Any, collate: Any, user_state: UserState) -> LoaderPool:
        """Start the loaders of a map-style data set, which have no ESTs yet."""

    def loader_states(self, positions: Mapping[int, Mapping[str, Any]] | None) -> dict[int, LoaderState]:
        """Return the states of the loaders of this process, at the start or from positions in the data."""

    def saved(self, ranks: tuple[int, ...]) -> SavedJob | None:
        """Load the state to continue from into the parts; return the rest of it, None at the start."""

    def begin(self, hosted: Hosted, data: Data) -> None:
        """Take what mini-batches are made of."""

    def between(self) -> None:
        """Do what is due between two mini-batches."""

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after a mini-batch, whatever happens until then."""

    def watches(self) -> bool:
        """Return True if the next mini-batch looks for changes by user code."""

    def ending_now(self) -> int:
        """Return whether this process would continue, checkpoint or end the generation."""

    def finish(self, batch: MiniBatchResult, *, stops: bool = False) -> None:
        """Check and record a mini-batch, and write a checkpoint if one is due."""

    def check_equal(self, name: str, value: Any) -> None:
        """Raise a `TrainingError` if a value differs between processes."""


# --- The run: what the function of a job gets ---


class LoopRun:
    """The run that the function of a job with a ``loop`` gets.

    The function builds models, optimizers and data, which has to give the same result in every process and
    after every restart, and passes them to `loop`. Random states are seeded before it is called. It is called
    again in each set of processes, and ends early where the next set goes on. In a run that survives losses,
    a process that is in both sets calls it again, too, with modules of the user that are loaded anew.
    """

    def __init__(self, generation: Generation, modules: Sequence[ModuleType], stack: ExitStack) -> None:
        self._generation, self._modules, self._stack = generation, modules, stack
        self._loop: TrainingLoop | None = None

    @property
    def device(self) -> torch.device:
        """Device of this process; models belong there before their optimizers are built."""
        return self._generation.device

    @property
    def step(self) -> int:
        """Mini-batches done; at 0, a function may load weights, which later starts take from a checkpoint."""
        return self._generation.done

    @property
    def n_logical_workers(self) -> int:
        """Number of logical workers, N."""
        return self._generation.job.n_logical_workers

    def loop(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        *,
        optimizers: Any,
        data: Any,
        schedulers: Any = (),
        scaler: torch.amp.GradScaler | None = None,
        shared: Mapping[str, Any] | None = None,
        collate: Any = None,
    ) -> "TrainingLoop":
        """Return the loop over all mini-batches that this set of processes trains.

        If the run has a checkpoint, or goes on from memory, that state is loaded into all objects given here.

        Parameters
        ----------
        model
            A model, or several by name. Each is summed like one `DistributedDataParallel`.
        optimizers, schedulers
            One, several, or several by name. `LoopMiniBatch.step` steps optimizers, own code schedulers.
        data
            A map-style data set, whose samples are dealt out as `Shards` describes; a plain `DataLoader` of
            one, whose options have to be those of the job; or a function of the virtual rank and the number
            of logical workers that returns an iterable of batches with ``state_dict``, ``load_state_dict``.
        scaler
            Scales the losses of `LoopMiniBatch.backward`; the loop updates it after each mini-batch.
        shared
            Further objects with ``state_dict`` and ``load_state_dict`` that code outside of turns changes,
            for example an average of the weights; checkpoints hold them.
        collate
            Function that joins a list of samples of a map-style data set into a batch. None for torch's
            default.

        Raises
        ------
        makespan.errors.InputError
            An argument cannot be used; the message has its name and what is expected.
        makespan.errors.TrainingError
            Parameters differ between processes.
        """
        if self._loop is not None:
            raise InputError("run.loop is called twice; expected one loop, which may have several passes")
        parts = LoopParts(model, optimizers, schedulers, scaler, shared, self.device)
        self._loop = TrainingLoop(self._generation, parts, data, collate, self._modules, self._stack)
        return self._loop

    def suspended(self, error: LoopSuspended) -> None:
        """Look for variables whose changes are lost where the function is called again.

        Raises
        ------
        makespan.errors.InputError
            A variable that changed has tensors.
        """
        frame = None
        for each, _ in walk_tb(error.__traceback__):  # those of the user come before those of the loop
            is_own = each.f_globals.get("__name__", "").startswith("makespan.")
            if is_own and frame is not None:
                break
            frame = None if is_own else each
        if self._loop is not None and frame is not None:
            self._loop._hosted.local_notices |= self._loop._variables.changes(frame)

    def close(self) -> None:
        """Leave a turn that an error has interrupted."""
        if self._loop is not None:
            self._loop._hosted.close()

    def end(self) -> None:
        """End the loop that the function has left or finished."""
        if self._loop is None:
            raise InputError("the function of the loop returned without calling run.loop; expected one call")
        self._loop._end()


# --- The loop ---


class TrainingLoop:
    """Iterator over the mini-batches of a run, made by `LoopRun.loop`.

    It ends after the last mini-batch of the run, or after the current one if its body ends with ``break`` or
    `stop` was called; code behind it then runs once. If the run is suspended or gets other processes, the
    function ends inside the loop and is called again, and the loop resumes from the state of all processes
    after a mini-batch: that of a checkpoint, or from memory if the run survives losses.

    Attributes
    ----------
    state
        Plain values (numbers, texts, lists and dictionaries of these, tensors) that checkpoints hold.
    """

    def __init__(
        self,
        generation: Generation,
        parts: LoopParts,
        data: Any,
        collate: Any,
        modules: Sequence[ModuleType],
        stack: ExitStack,
    ) -> None:
        self._generation, self._parts = generation, parts
        self.state = parts.state
        self._current: LoopMiniBatch | None = None
        self._stops = self._is_over = False
        generation.parts = SharedParts(parts.model, parts.states, parts.compared)
        others = {name: each for name, each in parts.states.items() if not isinstance(each, nn.Module)}
        unused = unused_options(data)
        is_stream = callable(data) and not hasattr(data, "__getitem__")
        if not is_stream:
            data, collate = map_style(data, collate, generation.job)
            others |= {"data": data, "collate": collate}
        elif collate is not None:
            raise InputError(
                "collate is given with a function as data; expected None, because it makes batches"
            )
        user_state = UserState(parts.model, modules, others)
        pool: LoaderPool | None = None
        if not is_stream:
            pool = generation.loaders(stack, data, collate or default_collate, user_state)
        with own_communication():
            generation.check_equal("parameters", parameter_sha(parts.model, by_sum=True))
            ranks = generation.mapping.hosted[generation.number]
            saved = generation.saved(ranks)
            self._hosted = LoopESTs(
                parts, generation.device, generation.mapping, generation.number, generation.reduction(),
                generation.job.level, seed=generation.job.seed,
                layouts={} if saved is None else saved.layout, user_state=user_state,
                late_buffers=() if saved is None else saved.late_buffers, together=generation,
                on_micro_batch=generation.process.report_micro_batch,
                sums_on_host=generation.sums_on_host,
            )  # fmt: skip
            if saved is not None:
                saved.install(parts.model, self._hosted.contexts)
        self._hosted.local_notices |= unused
        positions = None if saved is None else saved.positions
        n_workers = generation.job.n_logical_workers
        if pool is None:
            self._data: Data = Streams(data, ranks, n_workers, positions, generation.job.seed)
        else:
            pool.move(generation.loader_states(positions))
            self._data = pool
        self._variables = Variables(modules, parts.known_ids() | {id(self), id(data), id(collate)})
        self._hosted.variables = self._variables
        self._word_sum = WordSum(parts.model.parameters())
        self._at_start: int | None = int(self._word_sum())
        with own_communication():
            generation.begin(self._hosted, self._data)

    @property
    def step(self) -> int:
        """Number of the current mini-batch, from 1; behind the loop, mini-batches done."""
        return self._generation.done + (self._current is not None)

    @property
    def losses(self) -> tuple[float, ...]:
        """Losses of the last finished mini-batch by virtual rank; empty in the first one of the run."""
        return tuple(self._parts.last["losses"])

    def stop(self) -> None:
        """End the run after the current mini-batch; all processes have to call this in the same one."""
        self._stops = True

    def __iter__(self) -> "TrainingLoop":
        """Return the loop."""
        if self._current is not None:
            raise InputError("a second iteration of the loop began inside the first; expected a single one")
        return self

    def __next__(self) -> "LoopMiniBatch":
        """End the current mini-batch and begin the next one."""
        hosted, generation = self._hosted, self._generation
        frame = sys._getframe(1)
        if self._at_start is not None:
            if int(self._word_sum()) != self._at_start:
                raise InputError(
                    "parameters changed between run.loop and the first mini-batch; expected changes before "
                    "run.loop, which loads the checkpoint of a later start"
                )
            self._at_start = None
            self._variables.record(frame)
            with own_communication():
                hosted.open_first()
        elif self._current is not None:
            number = generation.done - generation.first_step
            self._finish(stops=self._stops)
            if is_watched(number) or generation.saves_after(self.step):
                hosted.local_notices |= self._variables.changes(frame)
        with own_communication():
            generation.between()
        if self._is_over or not generation.goes_on:
            if not generation.is_run_over:
                raise LoopSuspended
            self._is_over = True
            raise StopIteration
        hosted.begin(generation.done + 1, self._data.next, watches=generation.watches())
        self._current = LoopMiniBatch(hosted, generation.done + 1)
        return self._current

    def _finish(self, *, stops: bool) -> None:
        """End the current mini-batch, and the run if ``stops``."""
        hosted, generation = self._hosted, self._generation
        with own_communication():
            result, stopping = hosted.finish(generation.ending_now, stops=stops)
            if len(set(stopping)) > 1:
                odd = [str(number) for number, each in enumerate(stopping) if each]
                raise TrainingError(
                    f"mini-batch {self.step}: the loop stops in process {', '.join(odd)} only; expected a "
                    "decision from values that are the same in all, for example loop.losses"
                )
            self._current, self._parts.last["losses"] = None, list(result.losses)
            generation.finish(result, stops=stops)
        hosted.contexts.open_for_all()
        self._is_over = stops

    def _end(self) -> None:
        """End the loop where the function has returned."""
        if self._current is not None:  # left with break, return, or an exception that was caught
            self._finish(stops=True)
        elif not (self._is_over or self._generation.is_run_over or not self._generation.goes_on):
            raise InputError(
                "the function of the loop returned before its first mini-batch; expected a loop over it"
            )
