"""Models as a chain of layers, with loss and samples: the built-in small models and user-defined chains.

Everything that decides the bits of a layer or a microbatch is seeded from the job and the position (layer,
iteration, microbatch), never from the plan, so that a model may be cut anywhere without changing a result.
"""

import copy
import hashlib
import inspect
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from makespan.errors import InputError
from makespan.oobleck.job import ChainJob, small_model
from makespan.training.bits import has_equal_bits
from makespan.training.zoo import build_link, global_batch, link_loss, n_links
from makespan.user_code import explained, load_file, user_file

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_COMPARED = (Tensor, np.ndarray, np.generic, bool, int, float, str)
_PROBED_GRADIENT = 1e-3
Microbatch = tuple[Any, Any]
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
                    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # fmt: skip


class Samples(Protocol):
    """A map-style data set: pairs of inputs and targets."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return a sample; it may draw from the random states of Python, NumPy and torch."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Model that can be cut between any two layers; a user-defined model function returns one.

    Parameters
    ----------
    layers
        One function without arguments per layer, in order; it builds the layer. It may draw the weights from
        torch, NumPy or Python: their random states are seeded from the seed and the layer, and in a pass also
        from iteration and microbatch. A layer takes what the layer before it returns (a tensor, or a tuple of
        tensors as separate arguments); the first takes the inputs of a microbatch. A pass must depend on
        nothing else: a layer with its own generator or counter is rejected in the first iteration.
    loss
        Mean loss of a microbatch, from the output of the last layer and the targets.
    samples
        Map-style data set of at least one global batch; each sample is a pair of inputs and targets.
    tied
        Weights that are kept equal, by layer and name: with ``((0, "weight"), (7, "weight"))`` the weight of
        layer 7 starts equal to that of layer 0, and both get the sum of their gradients.
    optimizer
        Function from parameters to an optimizer that updates each parameter independently; None for the
        optimizer of the job.
    rate
        Learning rate as a function of the iteration alone; None for the rate of the job.
    """

    layers: Sequence[Callable[[], nn.Module]]
    loss: Callable[[Any, Any], Tensor]
    samples: Samples | None
    tied: Sequence[tuple[tuple[int, str], tuple[int, str]]] = ()
    optimizer: Optimizers | None = None
    rate: Callable[[int], float] | None = None

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


def load_chain(job: ChainJob) -> Chain:
    """Return the chain that a job names; raise `InputError` if a user-defined one cannot be used."""
    if ":" not in job.model:
        spec = small_model(job)
        links = [partial(build_link, spec, job.seed, index) for index in range(n_links(spec))]
        return Chain(links, link_loss, None)
    file, _, name = job.model.rpartition(":")
    path = user_file(file, "a file of Python with a function that returns a Chain, as file.py:function")
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise InputError(f"{job.model}: {name} is {function!r} there; expected a function")
    try:
        inspect.signature(function).bind(**job.model_options)
    except TypeError as error:
        raise InputError(f"{job.model}: {error}; given: {dict(job.model_options)}") from None
    with explained(str(path.resolve())):
        chain = function(**job.model_options)
    if not isinstance(chain, Chain):
        raise InputError(f"{job.model} returned {type(chain).__name__}; expected a Chain")
    _check(chain, job)
    return chain


def _check(chain: Chain, job: ChainJob) -> None:
    """Reject a user-defined chain that cannot be trained as the job asks."""
    layers: object = chain.layers
    if not isinstance(layers, Sequence) or not layers:
        raise InputError(f"{job.model}: a chain without layers; expected one or more")
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module) or not callable(layer):
            problem = f"{job.model}: layer {index} is a {type(layer).__name__}"
            raise InputError(f"{problem}; expected a function without arguments that builds the layer")
    for name in ("loss", "optimizer", "rate"):
        value = getattr(chain, name)
        if not callable(value) and (value is not None or name == "loss"):
            raise InputError(f"{job.model}: {name} is {value!r}; expected a function")
    if chain.samples is not None and not hasattr(chain.samples, "__len__"):
        problem = f"{job.model}: samples is a {type(chain.samples).__name__} without a length"
        raise InputError(f"{problem}; expected a map-style data set")
    n_samples = 0 if chain.samples is None else len(chain.samples)
    if n_samples < job.global_batch_size:
        raise InputError(
            f"{job.model}: {n_samples} samples; expected those of a global batch or more, "
            f"{job.n_microbatches} microbatches of {job.microbatch_size}"
        )
    if isinstance(chain.loss, nn.Module):
        trained = [name for name, weight in chain.loss.named_parameters() if weight.requires_grad]
        if trained:
            problem = f"{job.model}: the loss has a parameter {trained[0]!r}, which no layer holds"
            raise InputError(f"{problem}, so nothing would train it; expected parameters of layers only")
    first, again = (0.0 if chain.rate is None else chain.rate(0) for _ in range(2))
    rate: object = first
    if not isinstance(rate, numbers.Real | Tensor):
        raise InputError(f"{job.model}: the learning rate of iteration 0 is {rate!r}; expected a number")
    if first != again:
        rates = f"the learning rate of iteration 0 is {first!r} in one call and {again!r} in the next"
        raise InputError(f"{job.model}: {rates}; expected one that depends on the iteration alone")
    for pair in chain.tied:
        for layer, name in pair:
            if not 0 <= layer < chain.n_layers:
                weight = f"tied weight {name!r} of layer {layer}"
                raise InputError(f"{job.model}: {weight}; expected layers 0 to {chain.n_layers - 1}")
        if pair[0][0] >= pair[1][0]:
            raise InputError(f"{job.model}: tied weights {pair}; expected an earlier layer, then a later")


def _seed(*words: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_layer(job: ChainJob, device: torch.device, *position: int | str) -> None:
    """Seed torch, NumPy and Python for a layer by iteration, microbatch and layer, independent of the cut.

    A backward pass appends the word ``backward`` to the position.
    """
    number = _seed(job.seed, "layer", *position)
    random.seed(number)
    mtrand.seed(number & 0xFFFF_FFFF)  # NumPy accepts 32 bits only
    # torch.manual_seed would also seed devices that the layer does not use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


@contextmanager
def draws_kept(device: torch.device) -> Iterator[None]:
    """Leave the global random states of Python, NumPy and torch as they were before the block."""
    python, numpy_state = random.getstate(), mtrand.get_state(legacy=False)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            mtrand.set_state(numpy_state)


def build_layer(chain: Chain, job: ChainJob, index: int) -> nn.Module:
    """Build a layer with its initial weights; reject one whose state cannot be copied between nodes."""
    number = _seed(job.seed, "build", index)
    random.seed(number)
    mtrand.seed(number & 0xFFFF_FFFF)
    torch.manual_seed(number)
    layer, kinds = chain.layers[index](), {torch.float32, getattr(torch, job.dtype)}
    if not isinstance(layer, nn.Module):
        raise InputError(f"layer {index} is {type(layer).__name__}; expected a torch.nn.Module")
    for name, module in layer.named_modules():
        where = f"layer {index}, {name or 'itself'}: {type(module).__name__}"
        lazy = [key for key, value in module.named_parameters(recurse=False) if is_lazy(value)]
        if lazy:
            problem = f"{where} has no shape yet for its parameter {lazy[0]!r}"
            raise InputError(
                f"{problem}; expected layers with all sizes given, such as Linear for LazyLinear"
            )
        for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not (value.is_floating_point() or value.is_complex()) or value.dtype in kinds:
                continue
            found, expected = (
                " or ".join(sorted({str(one)[6:] for one in each})) for each in ([value.dtype], kinds)
            )
            raise InputError(
                f"{where} has {key} in {found}; expected {expected}: a job has one floating-point type "
                "(dtype), to which its layers are converted"
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            problem = f"{where} keeps extra state (get_extra_state), which is not copied between nodes"
            raise InputError(f"{problem}; expected parameters and buffers")
        if isinstance(module, _WITH_STATISTICS) and module.track_running_stats:
            problem = f"layer {index}, {name or 'itself'}: {type(module).__name__} keeps running statistics"
            raise InputError(
                f"{problem} of its samples, and each pipeline sees others; expected layers without "
                "(track_running_stats=False, or LayerNorm, GroupNorm)"
            )
    with torch.no_grad():
        for (earlier, source), (later, name) in chain.tied:
            if later == index:
                tied_weight(layer, later, name).copy_(
                    tied_weight(build_layer(chain, job, earlier), earlier, source)
                )
    return layer.to(getattr(torch, job.dtype)).train()


def build_optimizer(
    chain: Chain, job: ChainJob, parameters: list[nn.Parameter], *, is_divided: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of some weights: that of the chain if it has one, else that of the job.

    With ``is_divided`` it will step some of the weights alone, which must change no bit of them.
    """
    if chain.optimizer is not None:
        _check_optimizer(chain.optimizer, parameters)
        if is_divided:
            _check_divided(chain.optimizer, parameters)
        return chain.optimizer(parameters)
    try:
        optimizer: torch.optim.Optimizer = _OPTIMIZERS[job.optimizer](
            parameters, lr=job.learning_rate, **job.optimizer_options
        )
    except (TypeError, ValueError) as error:
        options = dict(job.optimizer_options)
        raise InputError(f"optimizer_options of {job.optimizer} are {options}: {error}") from None
    return optimizer


def _check_optimizer(build: Optimizers, parameters: list[nn.Parameter]) -> None:
    """Reject an optimizer with state other than tensors per weight, because only such state is copied.

    The check takes a step on copies of the weights, before training starts.
    """
    copies = [nn.Parameter(weight.detach().clone()) for weight in parameters]
    with draws_kept(copies[0].device):
        probe = build(copies)
        if not isinstance(probe, torch.optim.Optimizer):
            raise InputError(
                f"optimizer of the chain returned {type(probe).__name__}; expected a torch.optim.Optimizer"
            )
        subject = f"optimizer {type(probe).__name__} of the chain"
        try:
            inspect.signature(probe.step).bind()
        except TypeError as error:
            problem = f"{subject} has a step that needs an argument ({error})"
            raise InputError(f"{problem}; expected one whose step takes no argument") from None
        for weight in copies:
            weight.grad = torch.full_like(weight, _PROBED_GRADIENT)
        before = copy.deepcopy(_beside_weights(probe))
        probe.step()
    accepted = "state per weight that consists of tensors (optimizer.state[weight])"
    now = _beside_weights(probe)
    for name in sorted(now.keys() | before.keys()):
        if name not in before or name not in now or not _is_equal(before[name], now[name]):
            problem = f"{subject} changes its {name} in a step, which is not copied between nodes"
            raise InputError(f"{problem}; expected {accepted}")
    for state in probe.state.values():
        for key, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                raise InputError(f"{subject} keeps {key} = {value!r}; expected {accepted}")


def _check_divided(build: Optimizers, parameters: list[nn.Parameter]) -> None:
    """Reject an optimizer that steps a weight otherwise where other weights of its layer have no gradient."""
    first, *steps = [_stepped(build, parameters, part) for part in (None, 0, 1)]
    for part, (kind, problem, weights, states) in enumerate(steps):
        for number, (weight, before) in enumerate(zip(weights, parameters, strict=True)):
            is_stepped = number % 2 == part
            wanted = first[2][number] if is_stepped else before.detach()
            is_same = has_equal_bits(weight, wanted) and (
                not is_stepped
                or (
                    states[number].keys() == first[3][number].keys()
                    and _is_equal(list(states[number].values()), list(first[3][number].values()))
                )
            )
            if problem or not is_same:
                reason = problem or "steps a weight otherwise where others of its layer have no gradient"
                accepted = "expected one that steps each weight by itself, or zero_stage=0"
                raise InputError(f"optimizer {kind} of the chain: {reason}; {accepted}")


def _stepped(
    build: Optimizers, parameters: list[nn.Parameter], part: int | None
) -> tuple[str, str, list[Tensor], list[dict[str, Any]]]:
    """Take two steps of copies of weights, all of them or every second one.

    Returns the name of the optimizer, the error of a step, the weights, and the state of each.
    """
    copies = [nn.Parameter(weight.detach().clone()) for weight in parameters]
    problem = ""
    with draws_kept(copies[0].device):
        optimizer = build(copies)
        for step in (1, 2):
            for number, weight in enumerate(copies):
                is_left_out = part is not None and number % 2 != part
                slope = _PROBED_GRADIENT * step * (number + 1)
                weight.grad = None if is_left_out else torch.full_like(weight, slope)
            try:
                optimizer.step()
            except Exception as error:  # noqa: BLE001 - it is code of a user, and what it raises is told
                what = f"{type(error).__name__}: {error}"
                problem = f"a step without the gradients of some weights fails ({what})"
                break
    states = [dict(optimizer.state.get(weight, {})) for weight in copies]
    return type(optimizer).__name__, problem, [weight.detach() for weight in copies], states


def _beside_weights(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the values of an optimizer besides the state of its weights, and the rate, which is set anew."""
    # What torch itself keeps in every optimizer; a scheduler may have replaced the method `step`.
    internal = {*vars(torch.optim.SGD([torch.zeros(1)])), "step"}
    values = {f"attribute {name!r}": value for name, value in vars(optimizer).items() if name not in internal}
    for number, group in enumerate(optimizer.param_groups):
        values |= {
            f"value {name!r} of group {number}": value
            for name, value in group.items()
            if name not in ("params", "lr")
        }
    # A wrapped optimizer counts by its state, unless the wrapper exposes the same state as its own.
    inner = {name: value for name, value in values.items() if isinstance(value, torch.optim.Optimizer)}
    for name, value in inner.items():
        values[name] = [] if value.state is optimizer.state else list(value.state.values())
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {
        name: [leaf for leaf in tree_leaves(value) if isinstance(leaf, _COMPARED) and id(leaf) not in trained]
        for name, value in values.items()
    }


def _is_equal(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Compare leaves of values bit by bit."""
    return len(before) == len(now) and all(map(_same_leaf, before, now))


def _same_leaf(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return has_equal_bits(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    # The last test is for NaN, which differs from itself.
    return type(left) is type(right) and (bool(left == right) or bool(left != left and right != right))


def check_repeated(subject: str, first: Any, second: Any) -> None:
    """Reject a value that differs when it is computed again from the same position and random states."""
    leaves = [
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, _COMPARED)] for value in (first, second)
    ]
    if not _is_equal(*leaves):
        accepted = "draws from torch, NumPy's or Python's global generator, and no state from call to call"
        raise InputError(f"{subject} differ when they are computed again; expected {accepted}")


def tied_weight(layer: nn.Module, index: int, name: str) -> nn.Parameter:
    """Return a weight that a chain ties; raise `InputError` if the layer has no such weight."""
    parameters = dict(layer.named_parameters())
    if name not in parameters:
        raise InputError(f"tied weight {name!r} of layer {index}; expected {', '.join(parameters) or 'none'}")
    return parameters[name]


@lru_cache(maxsize=2)
def _permutation(n_samples: int, seed: int) -> Any:
    return np.random.default_rng(seed).permutation(n_samples)


@lru_cache(maxsize=1)
def _drawn(job_model: Any, batch_size: int, seed: int, iteration: int) -> Any:
    return global_batch(job_model, batch_size, seed, iteration)


def load_microbatch(
    chain: Chain, job: ChainJob, iteration: int, microbatch: int, device: torch.device
) -> Microbatch:
    """Return inputs and targets of a microbatch, the same under every plan.

    An iteration takes the next window of the permutation of its epoch. Samples at the end of an epoch that
    do not fill a global batch are dropped.
    """
    size, batch = job.microbatch_size, job.global_batch_size
    rows = slice(microbatch * size, (microbatch + 1) * size)
    if chain.samples is None:
        drawn = _drawn(small_model(job), batch, job.data_seed, iteration)
        parts = torch.from_numpy(drawn.inputs[rows]), torch.from_numpy(drawn.targets[rows])
    else:
        n_samples = len(chain.samples)
        epoch, window = divmod(iteration, n_samples // batch)
        chosen = _permutation(n_samples, job.data_seed + epoch)[window * batch : (window + 1) * batch][rows]
        # Samples may be augmented at random: their draws depend on the position alone, too.
        number = _seed(job.data_seed, "samples", iteration, microbatch)
        random.seed(number)
        mtrand.seed(number & 0xFFFF_FFFF)
        torch.manual_seed(number)
        pairs = []
        for index in map(int, chosen):
            sample: Any = chain.samples[index]  # of the user, whatever its declared type
            if not (isinstance(sample, tuple | list) and len(sample) == 2):
                described = f"a {type(sample).__name__}"
                if isinstance(sample, tuple | list | Mapping):
                    described += f" of {len(sample)}"
                accepted = (
                    "a pair of inputs and targets, each a tensor, a number, a tuple or a dictionary of them"
                )
                raise InputError(f"sample {index} of the data set is {described}; expected {accepted}")
            pairs.append(sample)
        parts = default_collate(pairs)
    inputs, targets = (_placed(part, getattr(torch, job.dtype), device) for part in parts)
    return inputs, targets


def _placed(part: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Move all tensors to a device, and convert floating-point ones to the type of the weights."""
    if isinstance(part, Tensor):
        return part.to(device, dtype if part.is_floating_point() else part.dtype)
    if isinstance(part, Mapping):
        return {name: _placed(value, dtype, device) for name, value in part.items()}
    return tuple(_placed(value, dtype, device) for value in part) if isinstance(part, list | tuple) else part
