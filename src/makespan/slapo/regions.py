"""Columns and rows of a layer, found by its data flow and judged by trials.

A linear layer whose input comes from other linear layers through functions alone is a row; those others are
its columns. They are an attention if a product of shares (softmax) and values lies between them, which also
gives the size of a head, and a feed-forward part otherwise. Columns and rows are a proposal only:
`trials.why_not` decides, with the blocks, attributes and arguments that must be cut, and what does not pass
stays whole.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.contexts import ContextSplitter
from makespan.slapo.errors import StructureError
from makespan.slapo.flow import (
    Flow,
    Handed,
    LeafCall,
    Origin,
    by_called_owner,
    common_owner,
    first_tensor,
    is_source,
    is_within,
    own_matrices,
    upwards,
    watched,
)
from makespan.slapo.graphs import copied_object, is_object
from makespan.slapo.layouts import Blocks
from makespan.slapo.rehearsals import LayerRehearsal, RefusedError
from makespan.slapo.sequences import Exchanged, SequenceSplitter
from makespan.slapo.syncing import Place
from makespan.slapo.trials import Sample, Step, sample_of, why_not

How = Literal["columns", "rows", "columns and rows", "experts", "vocabulary", "whole"]
EXPERTS = ("experts cannot be dealt out", "a plan without ep")
"""What is refused about experts, and what is expected instead."""
OWN_SAMPLES = "processes have samples of their own, so that only experts are dealt out"
"""Reason of what is whole with data parallelism."""
_MOST_ATTRIBUTES = 8
_MOST_CUTS_OF_WEIGHTS = 32
_MOST_TRIALS = 300  # of one pair of columns and rows; four attributes and three layouts need 48


@dataclass(frozen=True, slots=True)
class StructurePart:
    """A module with parameters: its role, path and class, how it is cut, and why it is whole if it is."""

    role: str
    path: str
    kind: str
    how: How
    reason: str = ""


# --- Roles of modules ---


@dataclass(frozen=True, slots=True)
class Linear:
    """A module that multiplies by one matrix: names of its parameters, and the axis of its outputs."""

    weight: str
    bias: str | None
    out_axis: int
    n_in: int
    n_out: int


def linear_of(module: nn.Module, call: LeafCall) -> Linear | None:
    """Return the linear layer that a module is by its parameters and the shapes of a call, else None."""
    matrices = own_matrices(module)
    given, made = call.input, call.output
    if len(matrices) != 1 or given is None or made is None or not given.is_floating_point():
        return None
    weight = getattr(module, matrices[0])
    if weight.dim() != 2 or not given.dim() or given.shape[:-1].numel() != made.shape[:-1].numel():
        return None
    biases = [name for name, one in module.named_parameters(recurse=False) if one.dim() == 1]
    sizes = (given.shape[-1], made.shape[-1])
    fits = [axis for axis in (0, 1) if sizes == (weight.shape[1 - axis], weight.shape[axis])]
    if not fits or len(biases) > 1:
        return None
    if len(fits) == 2 and not isinstance(module, nn.Linear):  # square: only the values tell
        added = getattr(module, biases[0]) if biases else 0.0
        with torch.no_grad():
            product = (given @ weight + added).reshape(made.shape)
            fits = [1] if torch.allclose(product, made, rtol=1e-3, atol=1e-4) else [0]
    return Linear(matrices[0], biases[0] if biases else None, fits[0], *sizes)


def is_table(module: nn.Module, call: LeafCall) -> bool:
    """Return True for a module that looks up rows of a matrix by numbers."""
    given = call.input
    return given is not None and not given.is_floating_point() and len(own_matrices(module)) == 1


# --- One layer ---


@dataclass(slots=True)
class Cut:
    """How a layer is cut; paths are those below it.

    Parameters
    ----------
    steps, syncs
        Primitives that cut it, and those that exchange what the parts compute.
    rows
        Modules whose results are summed, as of `trials.why_not`.
    local
        Modules that read and return parts.
    parts
        What each module is.
    notes
        What a user should know.
    results
        Tensors of its result that are parts, and their axis.
    context
        Primitives by which processes of context parallelism hold parts of sequences.
    """

    steps: list[Step] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    parts: list[StructurePart] = field(default_factory=list)
    syncs: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    results: Mapping[int, int] = field(default_factory=dict)
    context: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Region:
    """Columns and a row that belong together, and the modules between them."""

    columns: tuple[str, ...]
    row: str
    between: frozenset[str]
    head_size: int | None = None
    heads: int = 0
    kv_heads: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[tuple[str, str], ...] = ()
    """Parameters between columns and row that functions read: paths of their modules, and names."""

    @property
    def modules(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


class LayerFinder:
    """Finds what can be cut in one layer.

    Parameters
    ----------
    layer
        The layer.
    handed
        A call of it.
    n_processes
        Number of processes.
    parts
        Axis and size of tensors of which each process has its part only, by their identities in the run.
    along_sequence
        True if processes hold parts of sequences, too, between what they share.
    deal_experts
        True if each process holds some experts whole, instead of a part of every expert.
    n_context
        Number of processes of context parallelism, which hold parts of sequences throughout.
    has_own_samples
        True if each process has samples of its own, so that nothing but experts is dealt out.
    n_data
        Number of processes with samples of their own, beside those that share layers, to which experts are
        dealt out; with one, experts are shared like layers.
    deal_to_context
        True if experts are dealt out to the processes of context parallelism, too.
    """

    def __init__(
        self,
        layer: nn.Module,
        handed: Handed,
        n_processes: int,
        parts: Mapping[int, tuple[int, int]],
        along_sequence: bool = False,
        deal_experts: bool = False,
        n_context: int = 1,
        has_own_samples: bool = False,
        n_data: int = 1,
        deal_to_context: bool = False,
    ) -> None:
        self.has_own_samples, self.n_data = has_own_samples, n_data
        # Kinds of processes with tokens of their own to which experts are dealt out.
        self.senders = [*["experts"] * (n_data > 1), *["context"] * deal_to_context]
        self.layer, self.handed, self.n, self.n_context = layer, handed, n_processes, n_context
        self.along_sequence = along_sequence and n_processes > 1
        self.deal_experts = deal_experts and n_processes > 1
        self.exchanged: list[Exchanged] = []
        self.counts: list[list[Step]] = []
        self.local = self._local_arguments(parts)
        self.sample = sample_of(layer, handed.args, handed.kwargs)
        self.flow = self._watch()
        self.calls: dict[str, list[LeafCall]] = {}
        for call in self.flow.calls:
            self.calls.setdefault(call.path, []).append(call)
        self.modules = dict(layer.named_modules())
        self.linears = {
            path: linear
            for path, calls in self.calls.items()
            if (linear := linear_of(self.sample.layer.get_submodule(path), calls[0])) is not None
        }
        self.cut = Cut()
        self.used: frozenset[int | str] = frozenset()
        self.failed: list[_Region] = []
        self.reasons: dict[str, str] = {}

    def _watch(self) -> Flow:
        """Run a copy of the layer in training mode, which drops values and changes running statistics."""
        copied = copy.deepcopy(self.sample.layer).train()
        args, kwargs = self.sample.args, self.sample.kwargs
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pairs = [
            (leaf, Origin(through=origin.through, is_learnt=origin.is_learnt))
            for leaf, origin in zip(leaves, self.handed.origins, strict=True)
        ]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with watched(copied, origins=pairs) as flow:
                # The tensors themselves, not copies, so that their origins are known.
                copied(*copied_object(args), **copied_object(kwargs))
        return flow

    def find(self) -> Cut:
        """Return all cuts that pass their trials."""
        rows = [path for path in self.calls if path in self.linears and not self.has_own_samples]
        for is_attention in (True, False):  # first, since a small part may only make the bias of its scores
            for path in rows:
                region = self._region(path)
                if region is None or is_attention != (region.head_size is not None):
                    continue
                if not self._try([region]):
                    self.failed.append(region)
        if len(self.failed) > 1:  # an attribute that two attentions read is divided for both at once
            self._try(self.failed)
        for path, module in self.modules.items():
            if len(own_matrices(module)) > 1 and path not in self.cut.local:
                has_experts = any(one.dim() > 2 for one in module.parameters(recurse=False))
                if has_experts and (self.deal_experts or self.senders):
                    self._deal_experts(path, module)
                elif not self.has_own_samples:
                    self._try_inside(path, module)
        if unused := sorted(map(repr, self.local.keys() - self.used)):
            raise StructureError(
                f"a layer is handed a part as its argument {unused[0]}, but nothing that is cut reads it"
            )
        if self.along_sequence:
            self._split_sequence()
        # Numbers of the experts of a process: the whole rehearsal of sequences has them among fewer.
        if self.n_context > 1:
            for tried, in_context, _ in self.counts:
                self.cut.steps[self.cut.steps.index(tried)] = in_context
            self._share_context()
        for tried, in_context, final in self.counts:
            before = in_context if self.n_context > 1 else tried
            self.cut.steps[self.cut.steps.index(before)] = final
        self._follow_siblings()
        self._describe_whole()
        return self.cut

    def _split_sequence(self) -> None:
        """Exchange parts of sequences instead of whole ones."""
        local = [self.local[place] for place in self.used]
        splitter = SequenceSplitter(
            self.sample, self.flow, self.cut.steps, self.exchanged, local, self.cut.results,
            self._learnt_arguments(), self.n,
        )  # fmt: skip
        self.cut.syncs = splitter.find()
        self.cut.notes += splitter.notes

    def _share_context(self) -> None:
        """Hold a part of every sequence in each process of context parallelism."""
        local = [self.local[place] for place in self.used]
        rehearsal = LayerRehearsal(
            self.sample, local, self.cut.results, self._learnt_arguments(), self.n, self.n_context,
            self.along_sequence,
        )  # fmt: skip
        steps = [*self.cut.steps, *self.cut.syncs] if self.n > 1 else of_experts(self.cut.steps)
        self.cut.context = ContextSplitter(self.flow, rehearsal, steps).find()

    def _learnt_arguments(self) -> frozenset[int | str]:
        """Return the arguments of the layer that have a gradient in training, by position or name."""
        learnt, origins = set[int | str](), iter(self.handed.origins)
        named: list[tuple[int | str, Any]] = [*enumerate(self.handed.args), *self.handed.kwargs.items()]
        for place, value in named:
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            are_learnt = [next(origins).is_learnt for _ in leaves]
            if any(are_learnt):
                learnt.add(place)
        return frozenset(learnt)

    # --- Columns and rows ---

    def _region(self, row: str) -> _Region | None:
        """Return the columns of a row, None if its input does not come from linear layers."""
        taken = {*self.cut.rows, *self.cut.local, *(part.path for part in self.cut.parts)}
        sources = frozenset().union(*(call.origin.sources for call in self.calls[row]))
        columns, between, blocked = self._resolved(sources)
        columns = columns if not blocked or len(sources) > 1 else set()
        if blocked and len(sources) > 1:  # a row that reads one norm alone begins a part
            self.reasons |= dict.fromkeys((*columns, row), blocked)
            return None
        if not any(column in self.linears for column in columns) or taken & {*columns, row}:
            return None
        ordered = tuple(path for path in self.calls if path in columns)
        read = frozenset().union(*(call.origin.parameters for call in self.calls[row]))
        weights = tuple(
            sorted(one for one in read if all(call.input is None for call in self.calls.get(one[0], ())))
        )
        return self._as_attention(_Region(ordered, row, between, weights=weights))

    def _resolved(self, sources: Iterable[str]) -> tuple[set[str], frozenset[str], str]:
        """Follow sources through norms of heads to linear layers and tables."""
        columns, between, waiting = set[str](), set[str](), sorted(sources)
        blocked = ""
        while waiting:
            path = waiting.pop()
            module = self.modules.get(path)
            if module is None or path in columns or path in between:
                continue
            if path in self.linears or is_table(module, self.calls[path][0]):
                columns.add(path)
                continue
            if own_matrices(module):
                continue  # a module of another kind, such as experts
            below = frozenset().union(*(call.origin.sources for call in self.calls[path]))
            inner, _, _ = self._resolved(below - {path})
            width = max((self.linears[one].n_out for one in inner if one in self.linears), default=0)
            size = max(parameter.numel() for parameter in module.parameters(recurse=False))
            if not inner or size > width:
                continue
            if size == width:
                blocked = min(
                    filter(None, (blocked, f"{path!r} normalises over all features of {min(inner)!r}"))
                )
                columns |= inner
                continue
            between.add(path)
            waiting += sorted(below)
        return columns, frozenset(between), blocked

    def _as_attention(self, region: _Region) -> _Region:
        """Add heads and roles if a product of attention lies between columns and row."""
        columns = set(region.columns)
        for product in self.flow.products:
            queries, keys, values, scores = (
                self._resolved(sources)[0] & columns & self.linears.keys()
                for sources in (product.queries, product.keys, product.values, product.scores)
            )
            if not (queries and values and product.head_size):
                continue
            size = product.head_size
            heads = self.linears[region.row].n_in // size
            gates = (columns & self.linears.keys()) - scores  # they scale what the attention returns
            roles = {path: "gate" if path in gates else "positions of heads" for path in columns}
            width = self.linears[min(values)].n_out // size
            kv_heads = width
            cross = self._is_cross(queries, keys)
            if queries & values:
                roles |= dict.fromkeys(queries & values, "queries, keys, values")
                kv_heads = (width - heads) // 2
            elif keys & values:
                roles |= dict.fromkeys(keys & values, "keys, values") | dict.fromkeys(queries, "queries")
                kv_heads = width // 2
            else:
                queries -= keys
                for found, name in ((queries, "queries"), (keys, "keys"), (values, "values")):
                    roles |= dict.fromkeys(found, name)
            where = "cross-attention" if cross else "attention"
            roles = {path: f"{where}: {name}" for path, name in roles.items()}
            roles[region.row] = f"{where}: output"
            return replace(region, head_size=size, heads=heads, kv_heads=max(kv_heads, 1), roles=roles)
        roles = dict.fromkeys(region.columns, "feed-forward: in") | {region.row: "feed-forward: out"}
        return replace(region, roles=roles)

    def _is_cross(self, queries: set[str], keys: set[str]) -> bool:
        seen = [
            frozenset().union(*(call.origin.through for path in paths for call in self.calls[path]))
            for paths in (queries, keys - queries)
        ]
        return bool(keys - queries) and seen[0] != seen[1]

    def _try(self, regions: Sequence[_Region]) -> bool:
        """Try the layouts and changes of regions together, and keep the first that passes."""
        for region in regions:
            reason = self._why_indivisible(region)
            if reason:
                break
        else:
            found = self._first_that_passes(regions)
            if isinstance(found, _Choice):
                self._keep(regions, found)
                return True
            reason = found
        for region in regions:
            for path in region.modules:
                self.reasons.setdefault(path, reason)
        return False

    def _why_indivisible(self, region: _Region) -> str:
        heads, kv_heads, n = region.heads, region.kv_heads, self.n
        if region.head_size is None:
            n_in = self.linears[region.row].n_in
            return "" if n_in % n == 0 else f"{n_in} features do not divide among {n} processes"
        for number, what in ((heads, "heads"), (kv_heads, "heads of keys and values")):
            if number % n:
                verb = "does" if number == 1 else "do"
                what = what.replace("heads", "head", 1) if number == 1 else what
                return f"{number} {what} {verb} not divide among {n} processes"
        return ""

    def _first_that_passes(self, regions: Sequence[_Region]) -> "_Choice | str":
        top = common_owner([path for region in regions for path in region.modules])
        sizes = set[int]()
        for region in regions:
            sizes |= {region.heads, region.kv_heads, self.linears[region.row].n_in}
            sizes |= {self.linears[path].n_out for path in region.columns if path in self.linears}
            sizes |= {region.heads * (region.head_size or 0), region.kv_heads * (region.head_size or 0)}
        attributes = [
            one
            for one in _whole_numbers_read(self.sample, top)
            if one.value in sizes and one.value > 1 and one.value % self.n == 0
        ][:_MOST_ATTRIBUTES]
        changes = [
            changed
            for size in range(len(attributes) + 1)
            for changed in itertools.combinations(attributes, size)
        ]
        layouts = [
            {path: how for part in parts for path, how in part.items()}
            for parts in itertools.product(*map(self._layouts, regions))
        ]
        weights = list(itertools.islice(self._cuts_of_weights(regions), _MOST_CUTS_OF_WEIGHTS))
        without: list[Place | None] = [None]
        reason, count = "", 0
        for place in itertools.chain(without, self._arguments_with_heads(regions[0], top)):
            for changed, layout, local, cut in itertools.product(
                changes, layouts, self._local_choices(), weights
            ):
                count += 1
                if count > _MOST_TRIALS:
                    return reason
                choice = _Choice(layout, changed, place, top, local, {}, cut)
                failed = self._failure(regions, choice)
                if not failed:
                    return choice
                reason = reason or failed
        return reason

    def _local_choices(self) -> list[frozenset[int | str]]:
        """Return choices of the arguments that are parts already and are read by what is cut."""
        rest = self.local.keys() - self.used
        every = [self.used | rest, *(self.used | {place} for place in rest), self.used]
        return list(dict.fromkeys(map(frozenset, every)))

    def _failure(self, regions: Sequence[_Region], choice: "_Choice") -> str:
        steps = [*self.cut.steps, *self._steps(regions, choice)]
        rows = self.cut.rows | {region.row: 0 for region in regions}
        parts = self.cut.local.union(*(region.between for region in regions))
        local = [self.local[place] for place in choice.local]
        return why_not(self.sample, steps, rows, frozenset(parts), self.n, local, choice.results)

    def _layouts(self, region: _Region) -> Iterator[Mapping[str, tuple[Blocks, int | None]]]:
        """Iterate over the blocks and the unit of each column."""
        n_in = self.linears[region.row].n_in
        choices: list[list[tuple[Blocks, int | None]]] = []
        for path in region.columns:
            if path not in self.linears:  # a table by heads
                choices.append([(1, None)])
                continue
            width, size = self.linears[path].n_out, region.head_size
            role = region.roles.get(path, "")
            own: list[tuple[Blocks, int | None]] = []
            if size is not None and role.endswith("queries, keys, values"):
                kv_width = region.kv_heads * size
                blocks: Blocks = 3 if kv_width == n_in else (n_in, kv_width, kv_width)
                if n_in + 2 * kv_width == width:
                    own.append((blocks, size))
                own.append((1, width // region.kv_heads))
            elif size is not None and role.endswith("keys, values"):
                own += [(2, size), (1, width // region.kv_heads)]
            elif width > n_in and width % n_in == 0:
                own += [(width // n_in, size), (1, None)]
            else:
                own.append((1, None if width == region.heads else size))
            choices.append(own)
        for chosen in itertools.islice(itertools.product(*choices), 8):
            yield dict(zip(region.columns, chosen, strict=True))

    def _steps(self, regions: Sequence[_Region], choice: "_Choice") -> list[Step]:
        steps = []
        for path, (groups, unit) in choice.layout.items():
            more = {} if groups == 1 else {"groups": list(groups) if isinstance(groups, tuple) else groups}
            if unit is not None and unit > 1:
                more["unit"] = unit
            if path not in self.linears:
                name = own_matrices(self.modules[path])[0]
                steps.append(Step("shard", path, {"tensor_name": name, "axis": 1}))
                continue
            linear = self.linears[path]
            names = [name for name in (linear.weight, linear.bias) if name is not None]
            if linear.out_axis == 0:
                steps.append(Step("shard", path, {"tensor_name": names, "axis": 0, **more}))
            else:
                for name, axis in zip(names, (1, 0), strict=False):
                    steps.append(Step("shard", path, {"tensor_name": name, "axis": axis, **more}))
        steps += _attribute_steps(choice.attributes, self.n)
        if choice.place is not None:
            steps.append(Step("take_heads", choice.top, {"places": [list(choice.place)]}))
        for region in regions:
            for owner, name in region.weights:
                along = choice.weights[owner, name]
                if along is not None:
                    steps.append(Step("shard", owner, {"tensor_name": name, "axis": along}))
            row = self.linears[region.row]
            steps.append(Step("shard", region.row, {"tensor_name": row.weight, "axis": 1 - row.out_axis}))
        return steps

    def _cuts_of_weights(self, regions: Sequence[_Region]) -> Iterator[Mapping[tuple[str, str], int | None]]:
        """Iterate over the axes of heads or features of parameters that functions read; None if whole."""
        ways: dict[tuple[str, str], list[int | None]] = {}
        for region in regions:
            size = self.linears[region.row].n_in if region.head_size is None else region.heads
            for owner, name in region.weights:
                shape = self.sample.layer.get_submodule(owner).get_parameter(name).shape
                ways[owner, name] = [*(axis for axis, length in enumerate(shape) if length == size), None]
        for axes in itertools.product(*ways.values()):
            yield dict(zip(ways, axes, strict=True))

    def _keep(self, regions: Sequence[_Region], choice: "_Choice") -> None:
        cut, synced = self.cut, {"sync_op_or_fn": "all_reduce"}
        cut.steps += self._steps(regions, choice)
        cut.results, self.used = choice.results, choice.local
        for region in regions:
            columns = [path for path in region.columns if path in self.linears]
            cut.rows[region.row] = 0
            cut.local |= region.between | (set(region.columns) - set(columns))
            syncs = [Step("sync", region.row, {"mode": "fwd_post", **synced})]
            for path in self._where_gradients_are_summed(columns):
                syncs.append(Step("sync", path, {"mode": "bwd_post", **synced}))
            summed = {"mode": "bwd_post", **synced, "on": "parameters"}
            syncs += [Step("sync", path, summed) for path in sorted(region.between)]
            whole = [one for one in region.weights if choice.weights[one] is None]
            for owner, names in by_called_owner(self.flow, whole).items():
                syncs.append(Step("sync", owner, {**summed, "inputs": names}))
            cut.syncs += syncs
            self.exchanged.append(Exchanged(region.columns, region.row, tuple(syncs)))
            cut.parts += [self._part(path, region.roles[path], "columns") for path in region.columns]
            cut.parts.append(self._part(region.row, region.roles[region.row], "rows"))
            for owner in dict.fromkeys(path for path, _ in region.weights):
                is_cut = any(choice.weights[one] is not None for one in region.weights if one[0] == owner)
                what = "numbers of heads" if is_cut and region.head_size is not None else "other weights"
                role = f"{region.roles[region.row].partition(':')[0]}: {what}"
                cut.parts.append(self._part(owner, role, "columns" if is_cut else "whole"))
            for path in region.modules:
                self.reasons.pop(path, None)
        if not self.along_sequence:
            self._draw_apart(regions)

    def _part(self, path: str, role: str, how: How, reason: str = "") -> StructurePart:
        return StructurePart(role, path, type(self.modules[path]).__name__, how, reason)

    def _where_gradients_are_summed(self, columns: Sequence[str]) -> list[str]:
        """Return the columns, or the owner of several in place of those that alone read what it is given."""
        owner = common_owner(columns)
        if len(columns) < 2 or owner in ("", *columns):
            return list(columns)
        given = self.flow.given.get(owner, [])
        readers = {
            reader
            for identity in given
            for reader, inside in self.flow.reads.get(identity, [])
            if owner in inside
        }
        if not given or not readers <= set(columns):
            return list(columns)
        return [owner, *(column for column in columns if column not in readers)]

    def _draw_apart(self, regions: Sequence[_Region]) -> None:
        """Make dropout of parts draw other numbers in each process, and say where it cannot."""
        inside = [region.between.union(region.columns) for region in regions]
        mine = [
            drop
            for drop in self.flow.drops
            if drop.sources and any(drop.sources <= inner for inner in inside)
        ]
        known = {step.path for step in self.cut.syncs if step.op == "fork_rng"}
        for drop in mine:
            place = drop.inside[-1] if drop.inside else ""
            others = [one for one in self.flow.drops if place in one.inside and one not in mine]
            if place in known:
                continue
            if place and not others:
                known.add(place)
                self.cut.syncs.append(Step("fork_rng", place, {}))
            else:
                note = f"dropout before {regions[0].row!r} draws the same numbers in all processes"
                if note not in self.cut.notes:
                    self.cut.notes.append(note)

    # --- Arguments by heads ---

    def _local_arguments(self, parts: Mapping[int, tuple[int, int]]) -> dict[int | str, Place]:
        """Return the arguments that are parts already, since an earlier layer returns them so."""
        places: dict[int | str, Place] = {}
        identities = iter(self.handed.ids)
        named: list[tuple[int | str, Any]] = [*enumerate(self.handed.args), *self.handed.kwargs.items()]
        for place, value in named:
            ids = [next(identities) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            if isinstance(value, Tensor) and ids[0] in parts:
                places[place] = place, *parts[ids[0]]
        return places

    def _arguments_with_heads(self, region: _Region, top: str) -> Iterator[Place]:
        """Iterate over the arguments of the attention that may have an axis for heads."""
        if region.head_size is None or self.n == 1:
            return
        given = self._arguments_of(top)
        batch = first_tensor(given)
        count = 1 if batch is None else batch.shape[0]
        for place, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                for axis, size in enumerate(value.shape[:-1]):
                    if size in (region.heads, count * region.heads):
                        yield place, axis, region.heads

    def _arguments_of(self, path: str) -> dict[int | str, Any]:
        """Return the arguments of the first call of a module in the sample, by position or name."""
        taken: list[dict[int | str, Any]] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            taken.append({**dict(enumerate(args)), **kwargs})

        handle = self.sample.layer.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.sample.call(self.sample.layer)
        finally:
            handle.remove()
        return taken[0] if taken else {}

    # --- Modules that hold columns and rows themselves ---

    def _deal_experts(self, path: str, module: nn.Module) -> None:
        """Give each process some of the experts that a module holds in tensors with an axis for them."""
        what = f"experts of {path!r} cannot be dealt out"
        tensors = dict(module.named_parameters(recurse=False))
        counts = {one.shape[0] for one in tensors.values() if one.dim()}
        n_experts = min(counts, default=0)
        n_tensor = self.n if self.deal_experts else 1
        n_here = n_tensor * (self.n_context if "context" in self.senders else 1)
        n = n_here * self.n_data
        if len(counts) != 1 or n_experts % n:
            why = (
                f"{n_experts} experts do not divide among {n} processes"
                if len(counts) == 1
                else f"its tensors have {' and '.join(map(str, sorted(counts)))} rows, not one per expert"
            )
            raise RefusedError(why, what, EXPERTS[1])
        places = self._places_of_tokens(path)
        if places is None:
            why = "it is not called with a row per token, the chosen experts and their weights"
            raise RefusedError(why, what, EXPERTS[1])
        shards = [Step("shard", path, {"tensor_name": name, "axis": 0}) for name in tensors]
        taken = Step("take_experts", path, {"n_experts": n_experts, **places})
        counted = [
            name for name, value in vars(module).items()
            if type(value) is int and value == n_experts and not name.startswith("_")
        ]  # fmt: skip
        reason = ""
        for size in range(len(counted), -1, -1):  # numbers of experts that its forward reads
            for names in itertools.combinations(counted, size):
                values = dict.fromkeys(names, n_experts // n)
                steps = [*shards, *([Step("set_attr", path, values)] if values else []), taken]
                if self.senders:  # tried by themselves, on as many processes as hold them
                    failed = why_not(self.sample, steps, {path: 1}, frozenset(), n, [], {})
                else:
                    failed = self._why_not_inside(path, steps)
                if not failed and self.senders:
                    numbers = [n_experts // size for size in (n_tensor, n_here, n)]
                    self._keep_sent(path, list(tensors), taken, list(values), numbers)
                elif not failed:
                    if self.has_own_samples:
                        taken = Step("take_experts", path, {**taken.arguments, "has_own_tokens": True})
                    self._keep_inside(path, [*steps[:-1], taken], "experts", "experts")
                if not failed:
                    return
                reason = reason or failed
        raise RefusedError(reason, what, EXPERTS[1])

    def _keep_sent(
        self, path: str, tensors: Sequence[str], taken: Step, counted: Sequence[str], numbers: Sequence[int]
    ) -> None:
        """Deal experts out to processes with tokens of their own, and to those that share layers, or not.

        In rehearsals, one process of data parallelism has the experts of all that share them, and one of
        context parallelism, too, until sequences are shared. ``numbers`` are those of the experts that a
        process has in the first rehearsals, in that of context parallelism, and when the model runs.
        """
        kinds = ["tensor"] * self.deal_experts + self.senders
        over = kinds if len(kinds) > 1 else kinds[0]
        shards = [Step("shard", path, {"tensor_name": name, "axis": 0, "over": over}) for name in tensors]
        shares = not self.deal_experts and not self.along_sequence and self.n > 1
        more = {"over": over, "shares_tokens": True} if shares else {"over": over}
        steps = [*shards, Step("take_experts", path, {**taken.arguments, **more})]
        if counted:
            self.counts.append([Step("set_attr", path, dict.fromkeys(counted, one)) for one in numbers])
            steps.insert(-1, self.counts[-1][0])
        if self.deal_experts or shares:
            self._keep_inside(path, steps, "experts", "experts")
        else:  # each process has tokens of its own
            self.cut.steps += steps
            self.cut.parts.append(self._part(path, "experts", "experts"))
            self.reasons.pop(path, None)
        if shares:
            summed = {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "on": "parameters"}
            self.cut.syncs.append(Step("sync", path, summed))

    def _places_of_tokens(self, path: str) -> dict[str, int | str] | None:
        """Return the arguments of experts: tokens, the chosen experts, and their weights."""
        arguments = self._arguments_of(path).items()
        given = {place: one for place, one in arguments if isinstance(one, Tensor) and one.dim() == 2}
        numbers = [place for place, one in given.items() if not one.is_floating_point()]
        for chosen in numbers[:1]:
            floats = [place for place, one in given.items() if one.is_floating_point()]
            weights = [place for place in floats if given[place].shape == given[chosen].shape]
            tokens = [place for place in floats if place not in weights[-1:]]
            if weights and tokens and len(given[tokens[0]]) == len(given[chosen]):
                return {"tokens": tokens[0], "chosen": chosen, "weights": weights[-1]}
        return None

    def _why_not_inside(self, path: str, steps: Sequence[Step]) -> str:
        return why_not(
            self.sample, [*self.cut.steps, *steps], self.cut.rows | {path: 1}, frozenset(self.cut.local),
            self.n, [self.local[place] for place in self.used], {},
        )  # fmt: skip

    def _keep_inside(self, path: str, steps: Sequence[Step], role: str, how: How) -> None:
        self.cut.steps += steps
        self.cut.rows[path] = 1
        self.cut.parts.append(self._part(path, role, how))
        self.reasons.pop(path, None)
        if self.has_own_samples:
            return
        synced = {"sync_op_or_fn": "all_reduce"}
        syncs = [Step("sync", path, {"mode": mode, **synced}) for mode in ("fwd_post", "bwd_post")]
        self.cut.syncs += syncs
        self.exchanged.append(Exchanged((path,), path, tuple(syncs)))

    def _try_inside(self, path: str, module: nn.Module) -> None:
        """Cut matrices that a module holds itself, as experts do: what it returns is then summed."""
        if path not in self.sample.returned:
            return
        names = own_matrices(module)
        shapes = {name: tuple(getattr(module, name).shape) for name in names}
        reason = ""
        ways = []
        for row, turned in itertools.product(names[::-1], (False, True)):
            axes = (-1, -2) if not turned else (-2, -1)  # of a row's inputs and a column's outputs
            width = shapes[row][axes[0]]
            columns = [name for name in names if name != row]
            if any(
                shapes[name][axes[1]] % width or len(shapes[name]) != len(shapes[row]) for name in columns
            ):
                continue
            most = max(shapes[name][axes[1]] // width for name in columns)
            ways += [(row, axes, columns, groups) for groups in sorted({most, 1}, reverse=True)]
        for row, axes, columns, groups in ways:
            if shapes[row][axes[0]] % self.n:
                reason = reason or f"{shapes[row][axes[0]]} features do not divide among {self.n} processes"
                continue
            steps = [self._matrix_step(path, name, shapes[name], axes[1], groups) for name in columns]
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 1 and parameter.shape[0] == shapes[columns[0]][axes[1]]:
                    steps.append(Step("shard", path, {"tensor_name": name, "axis": 0, "groups": groups}))
            steps.append(self._matrix_step(path, row, shapes[row], axes[0], 1))
            failed = self._why_not_inside(path, steps)
            if failed:
                reason = reason or failed
                continue
            role = "experts" if len(shapes[row]) > 2 else "feed-forward: in and out"
            self._keep_inside(path, steps, role, "columns and rows")
            return
        self.reasons[path] = reason or "no two of its matrices fit as columns and rows"

    def _matrix_step(self, path: str, name: str, shape: tuple[int, ...], axis: int, groups: int) -> Step:
        values: dict[str, Any] = {"tensor_name": name, "axis": len(shape) + axis}
        width = shape[axis]
        return Step(
            "shard", path, values | ({"groups": groups} if groups > 1 and width % groups == 0 else {})
        )

    # --- What is left ---

    def _follow_siblings(self) -> None:
        """Cut experts that no token of the example reached like those that some did."""
        called = {owner for path in self.calls for owner in upwards(path)}
        for path, module in self.modules.items():
            name = path.rpartition(".")[2]
            if not name.isdigit() or path in called or not any(True for _ in module.parameters()):
                continue
            twin = next(
                (one for one in self._siblings(path) if one in called and self._is_like(path, one)), None
            )
            if twin is None:
                continue
            for steps in (self.cut.steps, self.cut.syncs):
                steps += [replace(step, path=_moved(step.path, twin, path)) for step in _within(steps, twin)]
            for row, how in list(self.cut.rows.items()):
                if is_within(row, twin):
                    self.cut.rows[_moved(row, twin, path)] = how
            self.cut.parts += [
                replace(part, path=_moved(part.path, twin, path)) for part in _within(self.cut.parts, twin)
            ]

    def _siblings(self, path: str) -> list[str]:
        """Return the other elements of the list that a module is in."""
        owner = path.rpartition(".")[0]
        return [one for one in self.modules if one != path and one.rpartition(".")[0] == owner]

    def _is_like(self, path: str, other: str) -> bool:
        one, two = ({n: p.shape for n, p in self.modules[at].named_parameters()} for at in (path, other))
        return one == two

    def _describe_whole(self) -> None:
        known = {part.path for part in self.cut.parts}
        for path in self.modules:
            module = self.modules[path]
            if path in known or not is_source(module):
                continue
            if path in self.linears or own_matrices(module):
                reason = self.reasons.get(path, "")
                if self.has_own_samples:
                    reason = OWN_SAMPLES
                elif path not in self.calls:
                    reason = "not called with the example inputs"
                elif not reason:
                    reason = "no linear layer reads its output alone"
                self.cut.parts.append(self._part(path, "other weights", "whole", reason))
            else:
                how = "norm of heads" if path in self.cut.local else "norm"
                self.cut.parts.append(self._part(path, how, "whole"))
        order = list(self.modules)
        self.cut.parts.sort(key=lambda part: order.index(part.path))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A way to cut a region.

    Parameters
    ----------
    layout
        Blocks and unit of each column.
    attributes
        Attributes to divide by the number of processes.
    place, top
        Argument that is cut by heads, and the module that gets it.
    local
        Arguments of the layer that are parts already.
    results
        Tensors of the result that are parts then, and their axis.
    weights
        Axis of each parameter that functions read, None if it stays whole.
    """

    layout: Mapping[str, tuple[Blocks, int | None]]
    attributes: tuple["Attribute", ...]
    place: Place | None
    top: str
    local: frozenset[int | str]
    results: dict[int, int]
    weights: Mapping[tuple[str, str], int | None]


def _attribute_steps(attributes: Iterable["Attribute"], n: int) -> list[Step]:
    """Return the steps that divide attributes of modules, and of objects that modules hold."""
    values: dict[str, dict[str, int]] = {}
    for one in attributes:
        for path in one.paths if one.holder else one.paths[:1]:
            name = f"{one.holder}.{one.name}" if one.holder else one.name
            values.setdefault(path, {})[name] = one.value // n
    return [Step("set_attr", path, of_path) for path, of_path in values.items()]


def of_experts(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that deal experts out."""
    paths = {step.path for step in steps if step.op == "take_experts"}
    return [step for step in steps if step.path in paths and step.op != "sync"]


_Placed = TypeVar("_Placed", Step, StructurePart)


def _within(values: Iterable[_Placed], owner: str) -> list[_Placed]:
    return [value for value in values if is_within(value.path, owner)]


def _moved(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A whole number that modules read from themselves, or from an object that they hold (``holder``)."""

    paths: tuple[str, ...]
    holder: str
    name: str
    value: int


def _whole_numbers_read(sample: Sample, top: str) -> list[Attribute]:
    """Return the whole numbers that modules below a path read in a call."""
    copied = copy.deepcopy(sample.layer)
    found: dict[tuple[int, str], int] = {}
    modules = {
        path: module
        for path, module in copied.named_modules()
        if not is_source(module) and (path == top or not top or path.startswith(f"{top}."))
    }
    holders: dict[int, tuple[str, list[str], Any]] = {}
    for path, module in modules.items():
        theirs = vars(sample.layer.get_submodule(path))
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and is_object(value) and value is not theirs.get(name):
                holders.setdefault(id(value), (name, [], value))[1].append(path)
    for value in (*modules.values(), *(holder[2] for holder in holders.values())):
        _log_reads(value, found)
    sample.call(copied)
    own = {id(module): path for path, module in modules.items()}
    result = []
    for (identity, name), number in found.items():
        if identity in own:
            result.append(Attribute((own[identity],), "", name, number))
        else:
            holder, paths, _ = holders[identity]
            result.append(Attribute(tuple(paths), holder, name, number))
    return sorted(result, key=lambda one: bool(one.holder))


def _log_reads(value: Any, found: dict[tuple[int, str], int]) -> None:
    """Let an object note each whole number that is read from it."""
    kind: Any = type(value)
    getattribute = kind.__getattribute__

    def read(self: Any, name: str) -> Any:
        number = getattribute(self, name)
        if type(number) is int and not name.startswith("_"):
            found[id(value), name] = number
        return number

    with suppress(TypeError):  # an object of a class with slots, or of another layout
        value.__class__ = type(
            kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__}
        )
