"""Trials: what each process would compute of a layer is computed in one process, before anything is cut.

A layer is copied with random weights. The copy runs once whole, and then once for each process with the parts
of that process. Wherever parts are summed over the processes, what a part reads must be the right part of
what the whole reads; the whole result then takes the place of the sum, so that the rest of the layer can run.
Whatever else the layer computes must be as before. A cut through a head, in the wrong blocks, or with a
number of heads that was not changed, does not pass.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ScheduleError
from makespan.slapo.flow import first_tensor, fresh, is_source, own_matrices
from makespan.slapo.layouts import PARTIAL, Ranks, cut, sharding_of
from makespan.slapo.schedule import Schedule, create_schedule
from makespan.slapo.syncing import HeadsPart, Place

_TOLERANCE = 1e-4  # of the largest value: about a thousand roundings in float32
_SHOWN = 120  # characters of what a layer raises
_SEED = 20_240_427  # of the weights of copies; any other would do


@dataclass(frozen=True, slots=True)
class Step:
    """A primitive at a path, with its arguments by name."""

    op: str
    path: str
    arguments: Mapping[str, Any]

    def is_over(self, kind: str) -> bool:
        """Return True if it deals something out to the processes of a kind of parallelism."""
        over = self.arguments.get("over", "tensor")
        return kind in ((over,) if isinstance(over, str) else over)

    def apply(self, sch: Schedule, prefix: str = "") -> None:
        """Apply the primitive below a node."""
        node = sch[".".join(filter(None, (prefix, self.path)))]
        getattr(node, self.op)(**self.arguments)


@dataclass(slots=True)
class Sample:
    """A layer with random weights, the arguments of a call, and what its modules read and returned then.

    Parameters
    ----------
    layer
        The copy.
    args, kwargs
        Arguments in single precision.
    read, returned
        First tensors by the path of each module with parameters, one per call.
    result
        Result of the layer.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: dict[str, list[Tensor]] = field(default_factory=dict)
    returned: dict[str, list[Any]] = field(default_factory=dict)
    result: Any = None

    def call(self, layer: nn.Module, args: Any = None, kwargs: Any = None) -> Any:
        """Run a layer on copies of the arguments."""
        given = (self.args if args is None else args, self.kwargs if kwargs is None else kwargs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            positional, named = fresh(given)
            return layer(*positional, **named)


def sample_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
    """Copy a layer with random weights and run it."""
    generator = torch.Generator().manual_seed(_SEED)
    copied = copy.deepcopy(layer).eval().float()
    with torch.no_grad():
        for parameter in copied.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            size = parameter.shape[-1] if parameter.dim() else 1
            # Weights keep the size of activations; norms and biases are neither zero nor equal.
            values = drawn * size**-0.5 if parameter.dim() > 1 else 0.75 + 0.25 * drawn
            parameter.copy_(values)
    wide = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, (args, kwargs)
    )
    sample = Sample(copied, *wide)
    with _observed(copied, sample):
        sample.result = sample.call(copied)
    return sample


@contextmanager
def _observed(layer: nn.Module, sample: Sample) -> Iterator[None]:
    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensor = first_tensor((args, kwargs))
            if tensor is not None:
                sample.read.setdefault(path, []).append(tensor.clone())

        return hook

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            sample.returned.setdefault(path, []).append(pytree.tree_map_only(Tensor, Tensor.clone, output))

        return hook

    with ExitStack() as stack:
        for path, module in layer.named_modules():
            if is_source(module) or len(own_matrices(module)) > 1:
                for handle in (
                    module.register_forward_pre_hook(enter(path), with_kwargs=True),
                    module.register_forward_hook(leave(path), with_kwargs=True),
                ):
                    stack.callback(handle.remove)
        yield


class _FailedError(Exception):
    """What a process computes is not its part."""


def why_not(
    sample: Sample,
    steps: Sequence[Step],
    rows: Mapping[str, int],
    parts: frozenset[str],
    n_processes: int,
    local: Sequence[Place],
    results: dict[int, int],
) -> str:
    """Return why a cut of a layer does not compute its parts, empty if it does.

    Parameters
    ----------
    sample
        The layer whole.
    steps
        Primitives that cut parameters and change attributes.
    rows
        Modules whose output is summed over the processes, and 1 if they hold all that is summed in
        themselves, so that outputs are summed here, or 0 if they read a part.
    parts
        Modules that read and return a part.
    n_processes
        Number of processes.
    local
        Arguments of which a process gets its part already, as those of ``take_heads``.
    results
        Gets the tensors of the result, counted from zero, of which a process returns its part, and the axis.
    """
    results.clear()
    result = first_tensor(sample.result)
    if result is not None and not result.isfinite().any():
        return "with random weights the layer returns no finite number, so that nothing can be compared"
    sums: dict[str, list[Any]] = {}
    for rank in range(n_processes):
        try:
            part = copy.deepcopy(sample.layer)
            sch = create_schedule(part)
            for _, node in sch.named_schedules():
                node.world_size, node.rank = n_processes, rank
            for step in steps:
                step.apply(sch)
            _check_rows(sch, rows)
            args, kwargs = HeadsPart(local, Ranks(rank, n_processes, None))(part, sample.args, sample.kwargs)
            with _compared(part, sample, rows, parts, (rank, n_processes), sums):
                result = sample.call(part, args, kwargs)
            _check_result(result, sample.result, rank, n_processes, results)
        except _FailedError as failure:
            return str(failure)
        except ScheduleError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever a layer raises with parts that do not fit
            said = " ".join(str(error).split())
            shown = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
            return f"with its part, a process raises {type(error).__name__}: {shown}"
    for path, summed in sums.items():
        for total, expected in zip(summed, sample.returned[path], strict=True):
            if not _agree(total, first_tensor(expected)):
                return f"the results of {path!r} do not add up"
    return ""


def _check_rows(sch: Schedule, rows: Mapping[str, int]) -> None:
    """Reject a module that would add its bias in each process."""
    for path, is_summed in rows.items():
        module = sch[path].mod
        has_bias = getattr(module, "bias", None) is not None
        if has_bias and not is_summed and sharding_of(module).returns != PARTIAL:
            raise _FailedError(
                f"each process would add the bias of {path!r}: {type(module).__name__} has no shard rule"
            )


@contextmanager
def _compared(
    layer: nn.Module,
    sample: Sample,
    rows: Mapping[str, int],
    parts: frozenset[str],
    who: tuple[int, int],
    sums: dict[str, list[Any]],
) -> Iterator[None]:
    """Compare what modules read, and return the sums of the whole where parts are summed."""
    rank, n_processes = who
    counts: dict[str, int] = {}

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            count = counts[path] = counts.get(path, -1) + 1
            actual, known = first_tensor((args, kwargs)), sample.read.get(path, [])
            if actual is None or path in parts:
                return
            if count >= len(known):
                raise _FailedError(f"{path!r} is called more often than in the whole layer")
            expected = known[count]
            if path in rows and not rows[path]:
                if expected.shape[-1] % n_processes:
                    raise _FailedError(f"{path!r} reads {expected.shape[-1]} features")
                expected = cut(expected, -1, n_processes)[rank]
            if not _agree(actual, expected):
                raise _FailedError(f"what {path!r} reads is not what it should read")

        return hook

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            count = counts[path]
            if rows[path]:
                summed = sums.setdefault(path, [])
                value = first_tensor(output)
                if value is None:
                    raise _FailedError(f"{path!r} returns no tensor")
                if rank == 0:
                    summed.append(value.clone())
                else:
                    summed[count] += value
            return pytree.tree_map_only(Tensor, Tensor.clone, sample.returned[path][count])

        return hook

    with ExitStack() as stack:
        for path, module in layer.named_modules():
            if is_source(module) or len(own_matrices(module)) > 1:
                stack.callback(module.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
                if path in rows:
                    stack.callback(module.register_forward_hook(leave(path), with_kwargs=True).remove)
        yield


def _check_result(actual: Any, expected: Any, rank: int, n_processes: int, results: dict[int, int]) -> None:
    """Compare results; those after the first may be parts, which later layers read."""
    wholes = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, Tensor)]
    founds = [leaf for leaf in pytree.tree_leaves(actual) if isinstance(leaf, Tensor)]
    if len(wholes) != len(founds):
        raise _FailedError(f"the layer returns {len(founds)} tensors instead of {len(wholes)}")
    for place, (found, whole) in enumerate(zip(founds, wholes, strict=True)):
        if _agree(found, whole):
            continue
        axes = [
            axis
            for axis in range(whole.dim())
            if whole.shape[axis] % n_processes == 0 and _agree(found, cut(whole, axis, n_processes)[rank])
        ]
        if not place or not axes:
            raise _FailedError("the result of the layer is not as before")
        results[place] = axes[0]


def _agree(actual: Any, expected: Any) -> bool:
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor) or actual.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return bool(torch.equal(actual, expected))
    scale = float(expected.abs().nan_to_num(posinf=0.0, neginf=0.0).max()) if expected.numel() else 0.0
    return torch.allclose(actual.float(), expected.float(), rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)
