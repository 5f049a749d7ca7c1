"""Structure of a transformer, found by its data flow: layers, attention, feed-forward parts, vocabulary.

The model runs once on example inputs. Repeated layers are the elements of the outermost lists that map a
tensor to one of the same shape and follow each other; `regions` finds what can be cut in them. The table of
tokens and the head are found outside the layers. Names of classes and attributes do not matter, except that
the shard rules decide which layers can be cut.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.contexts import REFUSED
from makespan.slapo.errors import ArgumentError, StructureError, short_repr
from makespan.slapo.flow import (
    Flow,
    Handed,
    LeafCall,
    by_called_owner,
    first_tensor,
    fresh,
    is_within,
    own_matrices,
    watched,
)
from makespan.slapo.passes import Call, call_from
from makespan.slapo.regions import (
    EXPERTS,
    OWN_SAMPLES,
    Cut,
    How,
    LayerFinder,
    Linear,
    StructurePart,
    is_table,
    linear_of,
    of_experts,
)
from makespan.slapo.rehearsals import RefusedError
from makespan.slapo.trials import Step

OUTSIDE = "outside the layers"
"""Reason of what is whole because only layers and vocabulary are cut."""


# --- Result ---


@dataclass(frozen=True, slots=True)
class Core:
    """The core of an attention: scores, shares and weighted values.

    Parameters
    ----------
    layer, path
        Path of the layer, and of the innermost module that computes the core: the layer itself, an attention
        module, or a module without weights.
    projections
        Paths of the modules with matrices that run before the core within that module.
    """

    layer: str
    path: str
    projections: tuple[str, ...]


@dataclass(slots=True)
class Structure:
    """Structure of a model, see `find_structure`.

    Parameters
    ----------
    model
        Class of the model.
    layers
        Paths of its repeated layers, in order, one sequence per list.
    parts
        What was found, in the order of execution.
    steps
        Primitives that cut the model for this number of processes.
    n_processes, n_context, n_data
        Numbers of processes that share the model, that share its sequences throughout the layers, and that
        share its experts with samples of their own.
    notes
        What a user should know beside the table.
    cores
        Cores of attention in the layers, in the order of execution.
    """

    model: str
    layers: list[list[str]]
    parts: list[StructurePart]
    steps: list[Step]
    n_processes: int
    notes: list[str] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    n_context: int = 1
    n_data: int = 1

    @property
    def kept_whole(self) -> list[StructurePart]:
        """Parts of the layers and of the vocabulary that are not cut, with reasons."""
        intended = ("", OUTSIDE, OWN_SAMPLES)
        return [part for part in self.parts if part.how == "whole" and part.reason not in intended]

    def __str__(self) -> str:
        """Return a table; equal parts of the layers of a list are one row."""
        lines = [f"{self.model}, cut among {self.n_processes} processes"]
        if self.n_context > 1:
            lines[0] += f", its sequences among {self.n_context}"
        if self.n_data > 1:
            lines[0] += f", its experts among {self.n_data} with samples of their own"
        for paths in self.layers:
            lines.append(f"{len(paths)} layers: {_span(paths)}")
        rows: dict[tuple[str, ...], None] = {}
        for part in self.parts:
            row: tuple[str, ...] = (
                self.general(part.path),
                part.kind,
                part.role,
                part.how,
                self.general(part.reason),
            )
            rows[row] = None
        head: tuple[str, ...] = ("path", "class", "role", "cut", "reason")
        table = [head, *rows]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def general(self, text: str) -> str:
        """Replace the index of a layer by a star."""
        for paths in self.layers:
            for path in paths:
                owner, _, index = path.rpartition(".")
                if f"{path}." in f"{text}." or f"{path}'" in text:
                    return text.replace(path, f"{owner}.*" if index.isdigit() else path)
        return text


def _span(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"


# --- The whole model ---


def find_structure(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    n_processes: int = 2,
    seed: int = 0,
    along_sequence: bool = False,
    deal_experts: bool = False,
    n_context: int = 1,
    has_own_samples: bool = False,
    n_data: int = 1,
    deal_to_context: bool = False,
) -> Structure:
    """Find layers, attention, feed-forward parts and vocabulary of a transformer, and how they can be cut.

    Parameters
    ----------
    model
        Any transformer with values in its parameters; it is run, and not changed.
    example_inputs
        A tensor, positional arguments, arguments by name, or a function of a `torch.Generator` that draws
        any of these; small inputs are enough. None to draw two samples of eight token ids.
    n_processes
        Number of processes that share layers; with one, roles are found and nothing is cut.
    seed
        Seed of drawn inputs.
    along_sequence
        True if the processes also share each sequence between attention and feed-forward parts, so that
        norms, dropout and residuals of layers work on parts of it.
    deal_experts
        True if each process holds some experts whole, instead of a part of every expert.
    n_context
        Number of processes of context parallelism, each of which holds a part of every sequence throughout
        the layers; with one, sequences are whole.
    has_own_samples
        True if each process has samples of its own, as in data parallelism: it holds some experts, all else
        whole, and gradients are means over the processes.
    n_data
        Number of processes of data parallelism, beside those that share layers, to which experts are dealt
        out: to these alone, or with ``deal_experts`` to both.
    deal_to_context
        True if experts are dealt out to the processes of context parallelism, as well as to those.

    Returns
    -------
    What was found; printed, it is a table.

    Raises
    ------
    ArgumentError
        A number of processes is less than one; also a `ValueError`.
    StructureError
        No structure is found, the model cannot be run, or its sequences or experts cannot be shared; the
        message names the model and the reason. Also a `ValueError`.
    """
    name = type(model).__name__
    if n_processes < 1:
        raise ArgumentError(f"find_structure: n_processes is {n_processes}; expected a number >= 1")
    if n_context < 1:
        raise ArgumentError(f"find_structure: n_context is {n_context}; expected a number >= 1")
    if n_data < 1 or (n_data > 1 and (n_processes * n_context == 1 or has_own_samples)):
        raise ArgumentError(
            f"find_structure: n_data is {n_data}; expected 1, or more with n_processes or n_context > 1;"
            " use has_own_samples where nothing but experts is shared"
        )
    if (deal_to_context and n_context == 1) or (has_own_samples and n_context > 1):
        said = "deal_to_context" if deal_to_context else "has_own_samples"
        raise ArgumentError(f"find_structure: {said} is True and n_context {n_context}; expected one of both")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise StructureError(
            f"{name}: its parameters have no values; a run finds the structure, so build the model first"
        )
    call = call_of(model, example_inputs, seed)
    layers = _layers(model, call, name)
    flat = [path for paths in layers for path in paths]
    flow = _run(model, call, name, repeated=flat, kept=flat)
    structure = Structure(
        name, layers, [], [], n_processes, cores=_cores(model, flow, flat), n_context=n_context, n_data=n_data
    )
    handed: dict[str, Handed] = {}
    for one in flow.handed:
        handed.setdefault(one.path, one)
    known: dict[Any, tuple[str, Cut]] = {}
    parts: dict[int, tuple[int, int]] = {}
    syncs: list[Step] = []
    context: list[Step] = []
    for path in flat:
        layer, one = model.get_submodule(path), handed[path]
        key = _signature(layer, one, parts)
        if key not in known:
            try:
                finder = LayerFinder(
                    layer, one, n_processes, parts, along_sequence, deal_experts, n_context, has_own_samples,
                    n_data, deal_to_context,
                )  # fmt: skip
                known[key] = path, finder.find()
            except RefusedError as error:
                raise _refused(name, f"in {path!r} ({type(layer).__name__})", error) from error
        first, cut = known[key]
        for place, axis in cut.results.items():
            parts[one.ids_out[place]] = axis, one.sizes_out[place][axis]
        structure.steps += _below(path, cut.steps)
        syncs += _below(path, cut.syncs)
        context += _below(path, cut.context)
        structure.parts += [
            StructurePart(part.role, f"{path}.{part.path}".rstrip("."), part.kind, part.how, part.reason)
            for part in cut.parts
        ]
        structure.notes += [f"{note} (layers like {first!r})" for note in cut.notes if path == first]
    structure.steps += syncs
    is_dealt = (deal_experts and n_processes > 1) or n_data > 1 or deal_to_context
    if is_dealt and not any(part.how == "experts" for part in structure.parts):
        why = RefusedError("no layer has experts in tensors that they share", *EXPERTS)
        raise _refused(name, f"of {_span(flat)}", why)
    if along_sequence and n_processes > 1:
        for paths in layers:
            structure.steps += _ends_of_sequence(name, paths, handed, flow)
        spans = ", ".join(map(_span, layers))
        structure.notes.append(f"each process holds a part of every sequence between the parts of {spans}")
    _find_vocabulary(structure, model, flow, flat, has_own_samples)
    if (has_own_samples and n_processes > 1) or n_data > 1:
        structure.steps += _means(model, flow, structure.steps, "experts" if n_data > 1 else "tensor")
        structure.notes.append("gradients are means over processes with samples of their own")
    if n_processes == 1:
        # What all processes hold alike has no steps, but for the means over those with other samples.
        means = [step for step in structure.steps if step.op == "sync" and step.is_over("experts")]
        structure.steps = [*of_experts(structure.steps), *means] if is_dealt else []
        structure.parts = [
            part if is_dealt and part.how == "experts" else replace(part, how="whole", reason="")
            for part in structure.parts
        ]
    if n_context > 1:
        _share_context(structure, model, context, handed, flow)
    if deal_to_context:
        structure.notes.append("each process of context parallelism holds some experts")
    return structure


def _share_context(
    structure: Structure, model: nn.Module, steps: list[Step], handed: Mapping[str, Handed], flow: Flow
) -> None:
    """Add the steps of context parallelism around those of tensor parallelism."""
    flat = [path for paths in structure.layers for path in paths]
    within = {id(one): path for path in flat for one in model.get_submodule(path).parameters()}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in within and not any(is_within(path, layer) for layer in flat):
                # Its gradient is a summand within the layers, and whole outside of them.
                why = RefusedError(f"its parameter {name!r} is that of {path!r}, too", *REFUSED)
                raise _refused(structure.model, f"in {within[id(parameter)]!r}", why)
    before, after = list[Step](), list[Step]()
    for paths in structure.layers:
        enter, leave = _ends_of_sequence(structure.model, paths, handed, flow, "context")
        before.append(enter)
        after.append(leave)
    # Sequences are cut for context parallelism first, and joined last.
    structure.steps = [*before, *structure.steps, *after, *steps]
    spans = ", ".join(map(_span, structure.layers))
    structure.notes.append(f"each process of context parallelism holds a part of every sequence in {spans}")


def _means(model: nn.Module, flow: Flow, steps: Iterable[Step], over: str) -> list[Step]:
    """Return the steps that average the gradients of all parameters which processes of a kind hold alike."""
    shards = [step for step in steps if step.op == "shard" and step.is_over(over)]
    cut = {(step.path, step.arguments["tensor_name"]) for step in shards}
    every = (
        (path, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    )
    whole = by_called_owner(flow, (one for one in every if one not in cut))
    values = {"mode": "bwd_post", "sync_op_or_fn": "average", "on": "parameters"}
    values |= {"over": over} if over != "tensor" else {}
    return [Step("sync", owner, {**values, "inputs": names}) for owner, names in whole.items()]


def _refused(name: str, where: str, error: RefusedError) -> StructureError:
    return StructureError(f"{name}: {error.what} {where}: {error}; expected {error.expected}")


def _ends_of_sequence(
    name: str, paths: Sequence[str], handed: Mapping[str, Handed], flow: Flow, over: str = "tensor"
) -> list[Step]:
    """Return the steps that cut sequences before the first layer and join them after the last one."""
    refused = REFUSED if over == "context" else ()
    for before, after in itertools.pairwise(paths):
        # Between two layers, sequences are parts: nothing but the next layer may read them there.
        result = handed[before].id_out
        readers = [inside for _, inside in flow.reads.get(result, ())]
        if result != handed[after].id_in or not all(after in inside for inside in readers):
            why = "more than the next layer reads what one returns"
            raise _refused(name, f"between {before!r} and {after!r}", RefusedError(why, *refused))
    first, last = handed[paths[0]], handed[paths[-1]]
    given = [*enumerate(first.args), *first.kwargs.items()]
    hidden = first_tensor((first.args, first.kwargs))
    places = [place for place, value in given if value is hidden]
    if not places:
        why = "the sequence is inside of one of its arguments"
        raise _refused(name, f"before {paths[0]!r}", RefusedError(why, *refused))
    more = {"over": over} if over != "tensor" else {}
    values: dict[str, Any] = {"mode": "fwd_post", "sync_op_or_fn": "SR->RR", **more}
    if last.returns is not Tensor:
        values["output"] = 0
    return [
        Step("sync", paths[0], {"mode": "fwd_pre", "sync_op_or_fn": "RR->SR", "inputs": places, **more}),
        Step("sync", paths[-1], values),
    ]


def _below(path: str, steps: Iterable[Step]) -> list[Step]:
    return [Step(step.op, f"{path}.{step.path}".rstrip("."), step.arguments) for step in steps]


def call_of(model: nn.Module, example_inputs: Any, seed: int) -> Call:
    """Return the call of a model for a user's example inputs, or for drawn token ids without them."""
    if example_inputs is not None:
        return call_from(example_inputs, seed)
    rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not rows:
        raise StructureError(
            f"{type(model).__name__}: it has no embedding from which token ids could be drawn; "
            "expected example_inputs"
        )
    generator = torch.Generator().manual_seed(seed)
    return call_from((torch.randint(max(rows), (2, 8), generator=generator),), seed)


def _run(model: nn.Module, call: Call, name: str, **options: Any) -> Flow:
    """Run a model in evaluation mode and watch it; its modes and the random generators stay as they are."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watched(model, **options) as flow:
            args, kwargs = fresh((call.args, call.kwargs))
            model(*args, **kwargs)
    except Exception as error:
        raise StructureError(
            f"{name}: it cannot be run on the example inputs: {type(error).__name__}: {short_repr(error)}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    return flow


def _layers(model: nn.Module, call: Call, name: str) -> list[list[str]]:
    """Return the elements of the outermost lists whose elements keep a shape and follow each other."""
    lists = {
        path: [f"{path}.{key}".lstrip(".") for key, child in module.named_children()]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    elements = [element for paths in lists.values() for element in paths]
    flow = _run(model, call, name, repeated=elements)
    calls: dict[str, list[Handed]] = {}
    for one in flow.handed:
        calls.setdefault(one.path, []).append(one)
    reasons, found = [], list[list[str]]()
    for path, paths in lists.items():
        if any(path.startswith(f"{element}.") for known in found for element in known):
            continue
        reason = _why_no_layers(model, paths, calls)
        if reason:
            reasons.append(f"{path or 'the model'}: {reason}")
        else:
            found.append(paths)
    if not found:
        why = "; ".join(reasons[:4]) or "it has no list of modules"
        raise StructureError(f"{name}: no repeated layers are found: {why}")
    order = {path: place for place, path in reversed(list(enumerate(one.path for one in flow.handed)))}
    return sorted(found, key=lambda paths: order[paths[0]])


def _why_no_layers(model: nn.Module, paths: Sequence[str], calls: Mapping[str, list[Handed]]) -> str:
    if not paths:
        return "it is empty"
    uncalled = [path for path in paths if path not in calls]
    if uncalled:
        return f"{uncalled[0]!r} is not called"
    first = [calls[path][0] for path in paths]
    if len(paths) == 1 and not any(paths[0] in one.through for one in calls[paths[0]][1:]):
        return "it has one element, which is called once"
    for path, one in zip(paths, first, strict=True):
        if (
            len(one.shape_in) < 2
            or one.shape_in != one.shape_out
            or one.shape_in[-1] != first[0].shape_in[-1]
        ):
            return f"{path!r} maps {one.shape_in} to {one.shape_out}"
        if sum(len(own_matrices(module)) for module in model.get_submodule(path).modules()) < 2:
            return f"{path!r} has less than two matrices"
    for before, one in itertools.pairwise(first):
        if before.path not in one.through:
            return f"{one.path!r} does not follow {before.path!r}"
    return ""


def _cores(model: nn.Module, flow: Flow, layers: Sequence[str]) -> list[Core]:
    """Return the cores of attention in the layers, each module once."""
    cores: dict[str, Core] = {}
    for product in flow.products:
        layer = next((path for path in product.inside if path in layers), None)
        path = product.inside[-1] if product.inside else ""
        if layer is not None and path not in cores:
            before = dict.fromkeys(call.path for call in flow.calls[: product.n_calls])
            projections = [
                one for one in before if one.startswith(f"{path}.") and own_matrices(model.get_submodule(one))
            ]
            cores[path] = Core(layer, path, tuple(projections))
    return list(cores.values())


def _signature(layer: nn.Module, handed: Handed, parts: Mapping[int, tuple[int, int]]) -> Any:
    """Return a value that layers share if they are found alike."""
    modules = tuple(
        (
            path,
            type(module),
            tuple((name, tuple(one.shape)) for name, one in module.named_parameters(recurse=False)),
        )
        for path, module in layer.named_modules()
    )
    leaves = pytree.tree_leaves((handed.args, handed.kwargs))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
    learnt = tuple(one.is_learnt for one in handed.origins)
    return modules, shapes, learnt, tuple(parts.get(identity) for identity in handed.ids)


# --- Vocabulary ---


def _find_vocabulary(
    structure: Structure, model: nn.Module, flow: Flow, layers: Sequence[str], has_own_samples: bool
) -> None:
    """Add the table of tokens and the head that returns logits."""
    modules = dict(model.named_modules())
    inside = tuple(f"{path}." for path in layers)
    outer: dict[str, LeafCall] = {}
    for call in flow.calls:
        if not call.path.startswith(inside) and call.path not in layers:
            outer.setdefault(call.path, call)
    tables = [path for path, call in outer.items() if is_table(modules[path], call)]
    heads = {
        path: linear
        for path, call in outer.items()
        if call.origin.through and (linear := linear_of(modules[path], call)) is not None
    }
    sizes = {path: getattr(modules[path], own_matrices(modules[path])[0]).shape for path in tables}
    by_size = sorted(tables, key=lambda path: -sizes[path][0])
    head = next(
        (path for path in reversed(heads) for table in by_size if heads[path].n_out == sizes[table][0]), ""
    )
    fitting = [path for path in by_size if head and sizes[path][0] == heads[head].n_out]
    chosen = fitting[0] if fitting else by_size[0] if by_size else ""
    weight = getattr(modules[chosen], own_matrices(modules[chosen])[0]) if chosen else None
    tied = [
        path
        for path in outer
        if path not in (chosen, head)
        and any(one is weight for one in modules[path].parameters(recurse=False))
    ]
    for path in outer:
        kind = type(modules[path]).__name__
        if path in (chosen, head, *tied):
            continue
        role = "norm" if not own_matrices(modules[path]) else "table" if path in tables else "other weights"
        structure.parts.append(StructurePart(role, path, kind, "whole", OUTSIDE if role != "norm" else ""))
    order = list(outer)
    members = [path for path in (chosen, *tied, head) if path]
    reason = OWN_SAMPLES if has_own_samples else _why_whole_vocabulary(structure, model, flow, members, head)
    for path in members:
        role = "head" if path == head else "table of tokens"
        if path == head and any(one is weight for one in modules[head].parameters(recurse=False)):
            role = "head, tied to the table"
        how: How = "whole" if reason else "vocabulary"
        structure.parts.append(StructurePart(role, path, type(modules[path]).__name__, how, reason))
    structure.parts.sort(key=lambda part: order.index(part.path) if part.path in order else -1)
    if reason or not members:
        return
    structure.steps += _vocabulary_steps(model, chosen, head, heads)


def _vocabulary_steps(model: nn.Module, table: str, head: str, heads: Mapping[str, Linear]) -> list[Step]:
    """Return the steps that split table and head by tokens, and what is tied to them; logits are gathered."""
    synced = {"sync_op_or_fn": "all_reduce"}
    cut = [(table, own_matrices(model.get_submodule(table))[0])]
    steps = [
        Step("shard", table, {"tensor_name": cut[0][1], "axis": 0}),
        Step("sync", table, {"mode": "fwd_post", **synced}),
    ]
    if head:
        names = [name for name in (heads[head].weight, heads[head].bias) if name is not None]
        cut += [(head, name) for name in names]
        gathered = {"sync_op_or_fn": "all_gather", "axis": -1, "tensor_parallel_output_grad": False}
        steps += [
            Step("shard", head, {"tensor_name": names, "axis": 0}),
            Step("sync", head, {"mode": "bwd_post", **synced}),
            Step("sync", head, {"mode": "fwd_post", **gathered}),
        ]
    done = {(id(model.get_submodule(path)), name) for path, name in cut}
    parameters = {id(getattr(model.get_submodule(path), name)) for path, name in cut}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in parameters and (id(module), name) not in done:
                done.add((id(module), name))
                steps.append(Step("shard", path, {"tensor_name": name, "axis": 0}))
                if isinstance(module, nn.Embedding):  # a decoder looks up the same table by another module
                    steps.append(Step("sync", path, {"mode": "fwd_post", **synced}))
    return steps


def _why_whole_vocabulary(
    structure: Structure, model: nn.Module, flow: Flow, members: Sequence[str], head: str
) -> str:
    n, tables = structure.n_processes, [path for path in members if path != head]
    if not tables:
        return "no table of tokens is found"
    for table in tables:
        module = model.get_submodule(table)
        if not isinstance(module, nn.Embedding):
            return f"{table!r} is a {type(module).__name__}, no Embedding"
        if type(module).forward is not nn.Embedding.forward:
            return f"{type(module).__name__} overrides the forward of Embedding"
        if module.num_embeddings % n:
            return (
                f"{module.num_embeddings} rows do not divide among {n} processes; "
                f"pad_vocabulary(model, {list(members)}, {128 * n}) pads them"
            )
    if outside := sorted(set(members) & flow.outside):
        return f"a function reads the weights of {outside[0]!r}"
    if head and not isinstance(model.get_submodule(head), nn.Linear):
        return f"the head is a {type(model.get_submodule(head)).__name__}"
    return ""
