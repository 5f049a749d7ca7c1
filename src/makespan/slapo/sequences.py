"""Sequence parallelism of a layer: where sequences are joined and cut again, judged by a rehearsal.

Between its products a layer then holds a part of each sequence: norms, dropout and residuals work on parts.
Whatever needs whole sequences, the columns of attention and of feed-forward parts, is handed them by a module
at or above the columns, and the rows return parts of the sums. Which module that must be depends on how the
layer is written, such as on where it reads the length. So each choice is rehearsed: threads of this process
run the parts of all processes with the exchanges of the choice, forward and backward, and the results and
gradients must be parts of those of the whole layer.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from makespan.slapo.flow import Drop, Flow, common_owner, is_source, is_within, upwards
from makespan.slapo.rehearsals import TOKENS, LayerRehearsal, RefusedError, hidden_of, replaced
from makespan.slapo.syncing import Place
from makespan.slapo.trials import Sample, Step

_MOST_REHEARSALS = 32
_SEED = 7  # of other activations; any would do


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

    @property
    def rehearsal(self) -> LayerRehearsal:
        """The rehearsal that judges a choice."""
        return LayerRehearsal(self.sample, self.local, self.results, self.learnt, self.n_processes)

    def find(self) -> list[Step]:
        """Return the steps of the first choice that passes; a `RefusedError` says why there is none."""
        length, n = hidden_of(self.sample.args, self.sample.kwargs).shape[TOKENS], self.n_processes
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
            useless = self._why_useless(chosen)
            # What reads no tokens, such as a part that makes biases of scores, may have whole gradients.
            ways = [self._joined(items, chosen, all_are_parts) for all_are_parts in (True, False)]
            for steps in ways[: 1 if ways[0] == ways[1] else 2]:
                failed = useless or self.rehearsal.why_not([*self.steps, *steps])
                if not failed:
                    return steps + self._drawn_apart(chosen)
                reason = reason or failed
        raise RefusedError(reason)

    # --- Choices ---

    def _watch_tokens(self) -> None:
        """Note the arguments of each module with an axis of tokens that depend on what the layer reads."""
        hidden = hidden_of(self.sample.args, self.sample.kwargs)
        other = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(_SEED)).to(hidden)
        seen: list[dict[str, dict[int | str, Tensor]]] = []
        for value in (hidden, other):
            seen.append(self._arguments(*replaced((self.sample.args, self.sample.kwargs), hidden, value)))
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

    def _joined(
        self, items: Sequence[Exchanged | str], chosen: Sequence[_Option], all_are_parts: bool
    ) -> list[Step]:
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
        done = [step for step in self.steps if step.op == "shard" and step.is_over("tensor")]
        done += [step for step in steps if step.arguments.get("on") == "parameters"]
        for path, module in self.sample.layer.named_modules():
            is_part = all_are_parts or bool(self.given.get(path)) or not is_source(module)
            if is_part and not any(is_within(path, owner) for owner in wholes):
                names = _not_summed(module, [step.arguments for step in done if step.path == path])
                values = {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "on": "parameters"}
                steps += [Step("sync", path, {**values, **more}) for more in names]
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


def _not_summed(module: nn.Module, done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the arguments of a sum of the gradients of a module's own parameters that are left, if any."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if not own or (done and is_source(module)):  # the exchange around a layer with a part has its bias, too
        return []
    names = [values.get("tensor_name", values.get("inputs", own)) for values in done]
    known = {name for some in names for name in ([some] if isinstance(some, str) else some)}
    left = [name for name in own if name not in known]
    return [{"inputs": left} if known else {}] if left else []


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
