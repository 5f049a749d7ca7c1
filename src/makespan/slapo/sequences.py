"""Sequence parallelism of a layer: where sequences are joined and cut again, judged by a rehearsal.

Between its products a layer then holds a part of each sequence: norms, dropout and residuals work on parts.
Whatever needs whole sequences, the columns of attention and of feed-forward parts, is handed them by a module
at or above the columns, and the rows return parts of the sums. Which module that must be depends on how the
layer is written, such as on where it reads the length. So each choice is rehearsed: threads of this process
run the parts of all processes with the exchanges of the choice, forward and backward, and the results and
gradients must be parts of those of the whole layer.
"""

import copy
import heapq
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ScheduleError
from makespan.slapo.flow import Drop, Flow, common_owner, first_tensor, fresh, is_within, upwards
from makespan.slapo.layouts import Ranks, Rehearsal, cut, sharding_of
from makespan.slapo.schedule import create_schedule
from makespan.slapo.syncing import HeadsPart, Place
from makespan.slapo.trials import Sample, Step

TOKENS = -2
"""The axis of tokens in activations, whether samples have an axis of their own or not."""
_MOST_REHEARSALS = 32
_TOLERANCE = 1e-3  # of the largest value of a tensor, for sums of gradients in another order
_SMALL = 0.01  # of the median size of gradients, below which all of a gradient may be rounding
_SEED = 7  # of other activations and of gradients; any would do


class RefusedError(Exception):
    """What a plan says cannot be done in a layer: the reason, what that is, and what to write instead."""

    def __init__(
        self,
        why: str,
        what: str = "sequence parallelism cannot be placed",
        expected: str = "a plan without it (nosp)",
    ) -> None:
        super().__init__(why)
        self.what, self.expected = what, expected


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Columns and a row of a layer, with the steps that exchange whole sequences between the processes."""

    columns: tuple[str, ...]
    row: str
    syncs: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """Steps by which some modules get whole sequences; ``is_whole`` if each process computes all of them.

    ``inside`` are the modules in which sequences are whole.
    """

    steps: tuple[Step, ...]
    inside: tuple[str, ...]
    is_whole: bool = False


@dataclass(slots=True)
class SequenceSplitter:
    """Finds where one layer joins sequences and cuts them again.

    Parameters
    ----------
    sample
        The layer.
    flow
        A run of it in training mode.
    steps
        Primitives that cut its parameters.
    exchanged
        What they have cut.
    local, results
        Arguments and results of which a process has its heads only, as of `trials.why_not`.
    learnt
        Arguments that have a gradient in training, by position or name.
    n_processes
        Number of processes.
    """

    sample: Sample
    flow: Flow
    steps: Sequence[Step]
    exchanged: Sequence[Exchanged]
    local: Sequence[Place]
    results: Mapping[int, int]
    learnt: frozenset[int | str]
    n_processes: int
    given: dict[str, dict[int | str, Tensor]] = field(default_factory=dict)
    returned: dict[str, int | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def find(self) -> list[Step]:
        """Return the steps of the first choice that passes; a `RefusedError` says why there is none."""
        length, n = self._hidden(self.sample.args, self.sample.kwargs).shape[TOKENS], self.n_processes
        if length % n:
            raise RefusedError(f"{length} tokens of the example do not divide among {n} processes")
        self._watch_tokens()
        items: list[Exchanged | str] = [*self.exchanged]
        cut_columns = {column for one in self.exchanged for column in one.columns}
        for product in self.flow.products:
            path = product.inside[-1] if product.inside else ""
            if path not in items and not (product.queries | product.keys | product.values) & cut_columns:
                items.append(path)  # an attention that is whole
        choices = [list(self._options(item)) for item in items]
        for item, options in zip(items, choices, strict=True):
            if not options:
                what = f"what {item.row!r} reads" if isinstance(item, Exchanged) else "attention"
                if item == "":
                    what = "attention in the forward of the layer itself"
                raise RefusedError(f"no module could hand whole sequences to {what}")
        reason = ""
        for chosen in itertools.islice(_by_preference(choices), _MOST_REHEARSALS):
            steps = self._joined(items, chosen)
            failed = self._why_useless(chosen) or self._why_not(steps)
            if not failed:
                return steps + self._drawn_apart(chosen)
            reason = reason or failed
        raise RefusedError(reason)

    # --- Choices ---

    def _watch_tokens(self) -> None:
        """Note the arguments of each module with an axis of tokens that depend on what the layer reads."""
        hidden = self._hidden(self.sample.args, self.sample.kwargs)
        other = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(_SEED)).to(hidden)
        seen: list[dict[str, dict[int | str, Tensor]]] = []
        for value in (hidden, other):
            seen.append(self._arguments(*_replaced((self.sample.args, self.sample.kwargs), hidden, value)))
        n_samples, length = hidden.shape[:2]
        for path, arguments in seen[0].items():
            changed = seen[1].get(path, {})
            self.given[path] = {
                place: one
                for place, one in arguments.items()
                if one.shape[:-1] in ((n_samples, length), (n_samples * length,))
                and not (place in changed and _is_same(one, changed[place]))
            }

    def _arguments(self, args: Any, kwargs: Any) -> dict[str, dict[int | str, Tensor]]:
        """Return the tensors that modules are called with first, by path and by position or name."""
        seen: dict[str, dict[int | str, Tensor]] = {}
        handles = []
        for path, module in self.sample.layer.named_modules():

            def enter(_: Any, positional: Any, named: Any, path: str = path) -> None:
                places = [*enumerate(positional), *named.items()]
                seen.setdefault(path, {place: one for place, one in places if isinstance(one, Tensor)})

            def leave(_: Any, positional: Any, named: Any, output: Any, path: str = path) -> None:
                if isinstance(output, Tensor | tuple | list):
                    self.returned.setdefault(path, None if isinstance(output, Tensor) else 0)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            self.sample.call(self.sample.layer, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    @staticmethod
    def _hidden(args: Any, kwargs: Any) -> Tensor:
        hidden = first_tensor((args, kwargs))
        if hidden is None or hidden.dim() != 3:
            shape = None if hidden is None else tuple(hidden.shape)
            raise RefusedError(f"it reads a tensor of shape {shape}; expected samples, tokens and features")
        return hidden

    def _options(self, item: Exchanged | str) -> Iterator[_Option]:
        """Iterate over the ways in which some modules can get whole sequences, the innermost ones first."""
        if isinstance(item, str):
            yield from self._whole(item, ())
            return
        read = [path for path in item.columns if self.given.get(path)]
        if not read:  # it reads some tokens only, such as those that chose an expert
            yield from self._whole(item.row, item.syncs)
            return
        kept = [step for step in item.syncs if step.arguments.get("on") == "parameters"]
        for path in item.columns:
            # What the layer is handed beside its sequence is whole, such as what a cross-attention reads.
            if path not in read and path not in (step.path for step in kept) and self._reads_numbers(path):
                kept.append(Step("sync", path, {"mode": "bwd_post", "sync_op_or_fn": "all_reduce"}))
        back = {"mode": "fwd_post", "sync_op_or_fn": "reduce_scatter", "axis": TOKENS}
        above = [(path,) for path in upwards(common_owner(read))]
        for paths in [*above[:1], *([tuple(read)] if len(read) > 1 else []), *above[1:]]:
            joins = [join for path in paths if (join := self._join(path, read)) is not None]
            if len(joins) == len(paths):
                yield _Option((*kept, *joins, Step("sync", item.row, back)), paths)
        yield from self._whole(common_owner([*read, item.row]), item.syncs)

    def _reads_numbers(self, path: str) -> bool:
        return any(one.is_floating_point() for one in self.sample.read.get(path, []))

    def _join(self, path: str, readers: Sequence[str], is_whole: bool = False) -> Step | None:
        """Return the step that hands a module whole sequences, None if it reads none."""
        given = self.given.get(path, {})
        read = [one for reader in readers for one in self.given.get(reader, {}).values()]
        direct = [place for place, one in given.items() if any(one is other for other in read)]
        places = list(given) if is_whole else direct or list(given)
        if not places:
            return None
        values: dict[str, Any] = {"mode": "fwd_pre", "sync_op_or_fn": "all_gather", "axis": TOKENS}
        if is_whole:
            values["tensor_parallel_output_grad"] = False
        return Step("sync", path, values | {"inputs": places})

    def _whole(self, path: str, syncs: Sequence[Step]) -> Iterator[_Option]:
        """Iterate over modules that could compute whole sequences, of which each process keeps its part."""
        for owner in upwards(path):
            join = self._join(owner, (), is_whole=True)
            if join is None or owner not in self.returned:
                continue
            values: dict[str, Any] = {"mode": "fwd_post", "sync_op_or_fn": "scatter", "axis": TOKENS}
            if self.returned[owner] is not None:
                values["output"] = self.returned[owner]
            yield _Option((join, *syncs, Step("sync", owner, values)), (owner,), is_whole=True)

    # --- A choice ---

    def _joined(self, items: Sequence[Exchanged | str], chosen: Sequence[_Option]) -> list[Step]:
        """Return the steps of a choice, with sums of the gradients of weights that see parts of sequences."""
        wholes = [option.inside[0] for option in chosen if option.is_whole]
        steps: list[Step] = []
        for item, option in zip(items, chosen, strict=True):
            path = item if isinstance(item, str) else item.row
            own = option.inside[0] if option.is_whole else None
            if any(is_within(path, owner) for owner in wholes if owner != own):
                steps += () if isinstance(item, str) else item.syncs  # inside of another one that is whole
            else:
                steps += [step for step in option.steps if step not in steps]
        done = {step.path for step in self.steps if step.op == "shard"}
        done |= {step.path for step in steps if step.arguments.get("on") == "parameters"}
        for path, module in self.sample.layer.named_modules():
            has_own = any(True for _ in module.parameters(recurse=False))
            if has_own and path not in done and not any(is_within(path, owner) for owner in wholes):
                values = {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "on": "parameters"}
                steps.append(Step("sync", path, values))
        return steps

    def _why_useless(self, chosen: Sequence[_Option]) -> str:
        """Return a reason if each process would compute the whole layer for whole sequences."""
        wholes = [option.inside[0] for option in chosen if option.is_whole]
        for path, module in self.sample.layer.named_modules():
            has_own = any(True for _ in module.parameters(recurse=False))
            if has_own and not any(is_within(path, owner) for owner in wholes):
                return ""
        return f"all of it would have to see whole sequences, in {', '.join(map(repr, wholes))}"

    def _drawn_apart(self, chosen: Sequence[_Option]) -> list[Step]:
        """Return steps by which dropout of parts draws apart in each process; note where it cannot."""
        apart, together = list[Drop](), list[Drop]()
        rows = {one.row for one in self.exchanged}
        of_parts = {
            path for one in self.exchanged for path in (*one.columns, *(step.path for step in one.syncs))
        }
        of_parts |= rows
        for drop in self.flow.drops:
            around = [option for option in chosen if {*option.inside} & {*drop.inside}]
            # Where sequences are whole, processes have parts of heads and features only, from columns to
            # rows, and return parts of the sequence from there, unless all that is around is whole.
            mine = {*drop.sources} - (rows if any(option.is_whole for option in around) else set())
            is_part = not around or (mine == drop.sources and bool(mine) and mine <= of_parts)
            (apart if is_part else together).append(drop)
        steps: list[Step] = []
        for place in dict.fromkeys(drop.inside[-1] if drop.inside else "" for drop in apart):
            if place and not any(place in drop.inside for drop in together):
                steps.append(Step("fork_rng", place, {}))
            else:
                where = repr(place) if place else "the layer itself"
                note = f"dropout in {where} draws the same numbers in all processes"
                self.notes.append(note)
        return steps

    # --- Rehearsal ---

    def _why_not(self, steps: Sequence[Step]) -> str:
        """Return why the parts of all processes do not compute the whole, empty if they do."""
        n, group = self.n_processes, Rehearsal(self.n_processes)
        whole = copy.deepcopy(self.sample.layer).cpu()
        leaves, expected = _run(whole, self.sample.args, self.sample.kwargs)
        result = first_tensor(expected)
        if result is None or result.shape != self._hidden(leaves[0], leaves[1]).shape:
            return "it does not return a tensor like the one that it reads"
        start = torch.randn(result.shape, generator=torch.Generator().manual_seed(_SEED))
        if result.requires_grad:
            torch.autograd.backward([result], [start])
        try:
            parts = [self._part(steps, rank, group) for rank in range(n)]
        except ScheduleError as error:
            return str(error)
        failures: dict[int, Exception] = {}

        def run(rank: int) -> None:
            try:
                self._rehearse(parts[rank], rank, group, (whole, leaves, expected, start))
            except threading.BrokenBarrierError:
                pass  # another one has failed
            except Exception as error:  # noqa: BLE001 - whatever a layer raises with parts that do not fit
                failures[rank] = error
                group.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return _said(failures[min(failures)]) if failures else ""

    def _part(self, steps: Sequence[Step], rank: int, group: Rehearsal) -> nn.Module:
        part, stand_in = copy.deepcopy(self.sample.layer).cpu(), cast(Any, group)
        sch = create_schedule(part)
        for _, node in sch.named_schedules():
            node.world_size, node.rank, node.group = self.n_processes, rank, stand_in
        for step in (*self.steps, *steps):
            step.apply(sch)
        return part

    def _rehearse(self, part: nn.Module, rank: int, group: Rehearsal, whole: tuple[Any, ...]) -> None:
        """Run one process of the rehearsal and compare it with the whole layer."""
        layer, leaves, expected, start = whole
        n = self.n_processes
        args, kwargs = HeadsPart(self.local, Ranks(rank, n, None))(part, self.sample.args, self.sample.kwargs)
        hidden = self._hidden(args, kwargs)
        args, kwargs = _replaced((args, kwargs), hidden, cut(hidden, TOKENS, n)[rank])
        given, output = _run(part, args, kwargs)
        results = [[one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]
                   for value in (output, expected)]  # fmt: skip
        if len(results[0]) != len(results[1]):
            raise _DiffersError(f"it returns {len(results[0])} tensors instead of {len(results[1])}")
        made, result = first_tensor(output), first_tensor(expected)
        for place, (found, wanted) in enumerate(zip(*results, strict=True)):
            if result is not None and wanted is result:
                wanted = cut(wanted, TOKENS, n)[rank]
            elif place in self.results:
                wanted = cut(wanted, self.results[place], n)[rank]
            _compare(found, wanted, "the result of the layer")
        if made is not None and made.requires_grad:
            torch.autograd.backward([made], [cut(start, TOKENS, n)[rank]])
        group.gathered(rank, "the end", None)
        named = [*enumerate(leaves[0]), *leaves[1].items()]
        mine: dict[int | str, Any] = dict([*enumerate(given[0]), *given[1].items()])
        heads = {place for place, _, _ in self.local}
        first = self._hidden(leaves[0], leaves[1])
        for place, one in named:
            if not isinstance(one, Tensor) or one.grad is None:
                continue
            wanted = one.grad
            if one is first:
                wanted = cut(wanted, TOKENS, n)[rank]
                _compare(mine[place].grad, wanted, "the gradient of what the layer reads")
            elif place in self.learnt and place not in heads:
                _compare(mine[place].grad, wanted, f"the gradient of the argument {place!r}")
        self._compare_weights(part, layer)

    @staticmethod
    def _compare_weights(part: nn.Module, layer: nn.Module) -> None:
        wholes = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
        sizes = sorted(float(gradient.abs().max()) for gradient in wholes.values())
        floor = _SMALL * sizes[len(sizes) // 2] if sizes else 0.0
        for path, module in part.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                gradient = wholes.get(f"{path}.{name}".lstrip("."))
                if gradient is None:
                    continue
                shard = sharding_of(module).tensors.get(name)
                size = max(float(gradient.abs().max()), floor)
                wanted = gradient if shard is None else shard.part_of(gradient)
                found = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
                _compare(found, wanted, f"the gradient of {name!r} of {path!r}", size)


def _by_preference(choices: Sequence[Sequence[_Option]]) -> Iterator[tuple[_Option, ...]]:
    """Iterate over choices of one option each: those with few whole modules first, then the first ones."""

    def cost(places: tuple[int, ...]) -> tuple[int, int]:
        return sum(of[place].is_whole for of, place in zip(choices, places, strict=True)), sum(places)

    start = (0,) * len(choices)
    waiting, seen = [(cost(start), start)], {start}
    while waiting:
        _, places = heapq.heappop(waiting)
        yield tuple(of[place] for of, place in zip(choices, places, strict=True))
        for index, of in enumerate(choices):
            following = (*places[:index], places[index] + 1, *places[index + 1 :])
            if following[index] < len(of) and following not in seen:
                seen.add(following)
                heapq.heappush(waiting, (cost(following), following))


class _DiffersError(Exception):
    """A process of a rehearsal does not compute its part."""


def _run(layer: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], Any]:
    """Run a layer; return copies of its arguments, which take gradients, and its results."""

    def leaf(one: Tensor) -> Tensor:
        return one.detach().cpu().clone().requires_grad_(one.is_floating_point())

    copies = pytree.tree_map_only(Tensor, leaf, fresh((args, kwargs)))
    with torch.enable_grad():
        # Clones, since a layer may change what it reads in place.
        positional, named = pytree.tree_map_only(Tensor, Tensor.clone, copies)
        return copies, layer(*positional, **named)


def _replaced(arguments: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments with another tensor in the place of one of them."""
    return pytree.tree_map_only(Tensor, lambda one: new if one is old else one, arguments)


def _compare(found: Any, wanted: Tensor, what: str, size: float | None = None) -> None:
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        raise _DiffersError(f"{what} has shape {shape} instead of {tuple(wanted.shape)}")
    scale = size if size is not None else float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    if not torch.allclose(found.detach(), wanted.detach(), rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True):
        raise _DiffersError(f"{what} is not as before")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, _DiffersError | ScheduleError):
        return text
    return f"with its part of the sequence, a process raises {type(error).__name__}: {text[:120]}"
