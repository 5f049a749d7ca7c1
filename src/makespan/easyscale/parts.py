"""Build the parts of a job (model, optimizer, loss, data), and set the kernels of a process.

Reference runs use this module too: parts depend only on the job and its seed.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, default_collate

from makespan.easyscale.job import ElasticJob, split_name
from makespan.easyscale.kernels import DeterminismLevel, KernelSet, SumOrder
from makespan.easyscale.randomness import seed_everything
from makespan.easyscale.user_state import user_modules
from makespan.errors import InputError, WorkerError
from makespan.training.zoo import StandIn, build_stand_in, stand_in_data, stand_in_loss
from makespan.user_code import load_file, load_module

# --- Explicit sums: two orders that round differently on every machine ---

_BLOCK = 64  # rows
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_LOSSES = (
    F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


def ordered_sum(rows: Tensor, order: SumOrder) -> Tensor:
    """Sum over the first axis by adding whole rows, which rounds the same on every machine."""
    if order == "tree":
        while len(rows) > 1:
            half = (len(rows) + 1) // 2
            upper = len(rows) - half
            rows = torch.cat([rows[:upper] + rows[half:], rows[upper:half]])
        return rows[0].clone()
    blocks = list(torch.split(rows, _BLOCK))
    total = blocks[0].clone()
    for block in blocks[1:]:
        total[: len(block)] += block
    result = total[0].clone()
    for row in total[1:]:
        result += row
    return result


class _AddBias(torch.autograd.Function):
    """Addition of a bias along an axis; the gradient of the bias is an explicit sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, bias: Tensor, axis: int, order: SumOrder) -> Tensor:
        ctx.axis, ctx.order = axis, order
        shape = [1] * values.dim()
        shape[axis] = -1
        return values + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        rows = gradient.movedim(ctx.axis, -1).reshape(-1, gradient.shape[ctx.axis])
        return gradient, ordered_sum(rows, ctx.order), None, None


class _Mean(torch.autograd.Function):
    """Mean of all elements by an explicit sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: SumOrder) -> Tensor:
        ctx.shape = values.shape
        return ordered_sum(values.reshape(-1, 1), order)[0] / values.numel()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient / ctx.shape.numel()).expand(ctx.shape), None


class ExplicitSums(TorchFunctionMode):
    """Context in which gradients of biases and means in losses are explicit sums."""

    def __init__(self, order: SumOrder) -> None:
        super().__init__()
        self._order: SumOrder = order

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function; biases and means of losses are computed with explicit sums."""
        named = dict(kwargs or {})
        if func is F.linear:
            return self._with_bias(func, args, named, lambda output: output.dim() - 1)
        if func in _CONVOLUTIONS:
            return self._with_bias(func, args, named, lambda output: output.dim() - args[1].dim() + 1)
        if func in _LOSSES and _is_plain_mean(args, named):
            losses = func(*args, **(named | {"reduction": "none"}))
            return _Mean.apply(losses, self._order)  # type: ignore[no-untyped-call]
        return func(*args, **named)

    def _with_bias(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        axis: Callable[[Tensor], int],
    ) -> Any:
        bias = args[2] if len(args) > 2 else named.pop("bias", None)
        output = func(*args[:2], None, *args[3:], **named)
        if bias is None:
            return output
        return _AddBias.apply(output, bias, axis(output), self._order)  # type: ignore[no-untyped-call]


def _is_plain_mean(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return True for a loss that is a mean over all elements, without weights or ignored targets."""
    target: Any = args[1] if len(args) > 1 else named.get("target")
    skips = not target.is_floating_point() and bool((target == named.get("ignore_index", -100)).any())
    plain = named.get("reduction", "mean") == "mean" and named.get("weight") is None and not skips
    return plain and len(args) <= 2 and not named.get("label_smoothing")


# --- Kernels and algorithms of a process, set before it computes anything ---

_CAPABILITIES = {"default": ("DEFAULT", "NO AVX"), "avx2": ("AVX2", "DEFAULT", "NO AVX")}
"""Kernels that torch may report, by the limit in the variable; a processor may support fewer."""
_TUNED = (nn.modules.conv._ConvNd, nn.RNNBase)


def use_kernels(kernels: KernelSet, level: DeterminismLevel) -> AbstractContextManager[object]:
    """Set up this process for a kernel set and a level.

    Returns
    -------
    contextlib.AbstractContextManager
        Context for forward passes and losses; it may be entered repeatedly.

    Raises
    ------
    makespan.errors.WorkerError
        Torch was loaded without the variables of the kernel set, so it uses other kernels.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    for name, value in kernels.environment.items():
        allowed = _CAPABILITIES.get(value, (capability,)) if name == "ATEN_CPU_CAPABILITY" else (capability,)
        if os.environ.get(name) != value or capability not in allowed:
            raise WorkerError(
                f"kernel set {kernels.name} needs {name}={value} before torch is loaded; "
                f"found {os.environ.get(name)!r} and kernels for {capability}"
            )
    torch.backends.mkldnn.set_flags(_enabled=kernels.onednn)  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    # torch.use_deterministic_algorithms has the same effect but loads a compiler that is not used.
    torch.set_deterministic_debug_mode("error" if level.pins_algorithms else "default")
    # Deterministic mode also fills memory before it is written, which takes 1 to 7 % of a step (measured for
    # each stand-in). Operators that read only what was written do not depend on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not level.pins_algorithms
    return nullcontext() if kernels.sums is None else ExplicitSums(kernels.sums)


def scan_module(model: nn.Module) -> dict[str, bool | list[str]]:
    """Find the operators that are slow under level D2: vendors tune their fast kernels for each device.

    Returns
    -------
    dict
        ``operators``, the modules as ``name: class``, and ``d2_cheap``, True if there are none. Run a job
        whose model is not cheap under D2 on one type of device.
    """
    operators = [
        f"{name}: {type(module).__name__}"
        for name, module in model.named_modules()
        if isinstance(module, _TUNED)
    ]
    return {"d2_cheap": not operators, "operators": operators}


# --- Parts of a job ---

T = TypeVar("T")
_N_SAMPLES = 1024
_imported = set[str]()  # modules that a job was the first to import in this process
_BUILT_IN: dict[str, Callable[..., Any]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "step": torch.optim.lr_scheduler.StepLR,
    "grad": torch.amp.GradScaler,
}


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """Objects that all ESTs share.

    Parameters
    ----------
    model, optimizer, scheduler
        Equal bits in every process; the scheduler of the learning rate may be None.
    loss
        Scalar loss of the outputs and the targets of a batch.
    after_reduce
        Called with the model between the sum of gradients and the optimizer step; None for no call.
    scaler
        Scales losses so that small gradients stay in range; None for no scaling. It decides after the sum
        whether to take the step, so all processes take the same decision.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    after_reduce: Callable[[nn.Module], object] | None = None
    scaler: torch.amp.GradScaler | None = None


@dataclass(frozen=True, slots=True)
class JobParts:
    """Trained objects, data set, function that joins samples into a batch, and modules of the user."""

    trained: TrainedParts
    data: Any
    collate: Callable[[list[Any]], Any]
    modules: list[ModuleType]


def build_parts(job: ElasticJob, device: torch.device) -> JobParts:
    """Build the parts of a job, with equal bits in every process.

    Parameters
    ----------
    job, device
        The job, and the device of its model.

    Raises
    ------
    makespan.errors.InputError
        A function cannot be loaded, does not accept its options, or returns a value of another type.
    """
    modules: dict[str, Any] = {}

    def function_of(part: str) -> Callable[..., Any] | None:
        return _function(job, part, modules)

    named = str(job.model)
    spec = None if ":" in named else _called(job, "model", partial(StandIn, named))
    seed_everything(job.seed)
    if spec is None:
        model = _checked(job, "model", _called(job, "model", function_of("model")), nn.Module)
    else:
        model = build_stand_in(spec, job.seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(
                f"model: {name} belongs to a lazy module and has no size yet; expected a forward pass in "
                "the function that builds the model"
            )
    model.train().to(device)
    trained_by = model if ":" in job.optimizer else model.parameters()
    returned = _called(job, "optimizer", function_of("optimizer"), trained_by)
    optimizer = _checked(job, "optimizer", returned, torch.optim.Optimizer)
    if type(optimizer).__module__.startswith("torch.distributed."):
        raise InputError(
            f"optimizer: {job.optimizer} returned {type(optimizer).__name__}, which communicates; expected "
            "an optimizer that steps without other processes"
        )
    _check_step(job, "optimizer", optimizer)
    scheduler = None
    if job.lr_scheduler is not None:
        returned = _called(job, "lr_scheduler", function_of("lr_scheduler"), optimizer)
        scheduler = _checked(job, "lr_scheduler", returned, torch.optim.lr_scheduler.LRScheduler)
        _check_step(job, "lr_scheduler", scheduler)
    loss = function_of("loss") or partial(stand_in_loss, _needed(spec, "loss"))
    scaler = None
    if job.scaler is not None:
        kind = (device.type,) if ":" not in job.scaler else ()
        scaler = _checked(
            job, "scaler", _called(job, "scaler", function_of("scaler"), *kind), torch.amp.GradScaler
        )
    trained = TrainedParts(model, optimizer, loss, scheduler, function_of("after_reduce"), scaler)
    seed_everything(job.seed)  # again, so that the data do not depend on the draws of the model
    if job.data is not None:
        data = _called(job, "data", function_of("data"))
    else:
        make = partial(stand_in_data, _needed(spec, "data"), seed=job.seed)
        options = {"n_samples": _N_SAMPLES} | dict(job.options.get("data", {}))
        data = _built("data", make, (), options)
    problem = ""
    if isinstance(data, DataLoader):
        problem = "a DataLoader"
    elif isinstance(data, list | tuple) and any(isinstance(item, Dataset | DataLoader) for item in data):
        problem = f"a {type(data).__name__} of {len(data)} data sets"
    if problem:
        raise InputError(
            f"data: {job.data} returned {problem}; expected one map-style data set, from which the run "
            "makes batches (micro_batch_size, n_loaders, collate)"
        )
    collate = function_of("collate") or default_collate
    return JobParts(trained, data, collate, _user_modules(modules))


def loop_function(job: ElasticJob) -> tuple[Callable[..., Any], list[ModuleType]]:
    """Return the loop of a job, a function of the run with its options bound, and the modules of the user."""
    modules: dict[str, Any] = {}
    found = _function(job, "loop", modules)
    if found is None:
        raise InputError("loop is None; expected a function")
    function, options = found, dict(job.options.get("loop", {}))

    def train(run: Any) -> None:
        _bound("loop", function, (run,), options)()

    return train, _user_modules(modules)


def _user_modules(sources: Mapping[str, Any]) -> list[ModuleType]:
    """Return the imported modules of the user, from the files and modules that functions come from."""
    files = [source for source in sources if source.endswith(".py")]
    return user_modules(files, [source for source in sources if not source.endswith(".py")])


def _function(job: ElasticJob, part: str, modules: dict[str, Any]) -> Callable[..., Any] | None:
    """Find the function of a part; a file is run once for all functions that the job takes from it."""
    text = getattr(job, part)
    if text is None:
        return None
    if ":" not in text:
        return _BUILT_IN[text]
    source, name = split_name(text)
    if source not in modules:
        if source.endswith(".py"):
            modules[source] = load_file(source)
        else:
            # Import a module anew if an earlier job of this process did, because it may hold state of that
            # job.
            if source in _imported:
                sys.modules.pop(source, None)
            elif source not in sys.modules:
                _imported.add(source)
            modules[source] = load_module(source)[0]
    function: Callable[..., Any] | None = getattr(modules[source], name, None)
    if not callable(function):
        raise InputError(f"{part} is {text!r}, and {name} is {function!r} there; expected a function")
    if part in ("loss", "after_reduce", "collate") and (options := job.options.get(part)):
        return partial(function, **options)
    return function


def _called(job: ElasticJob, part: str, function: Callable[..., Any] | None, *arguments: Any) -> Any:
    if function is None:
        raise InputError(f"{part} is None; expected a function")
    options = dict(job.options.get(part, {}))
    if ":" in str(getattr(job, part)):
        return _bound(part, function, arguments, options)()
    return _built(part, function, arguments, options)


def _built(
    part: str, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call a function that is not the user's: what it rejects is a value of theirs."""
    bound = _bound(part, function, arguments, options)
    for name, parameter in inspect.signature(function).parameters.items():
        # Some of these fail only after some mini-batches.
        if isinstance(options.get(name), str) and "str" not in str(parameter.annotation):
            raise InputError(f"options of {part} have {name} {options[name]!r}; expected a number")
    try:
        return bound()
    except (TypeError, ValueError) as error:
        raise InputError(f"options of {part} are {options}: {error}") from None


def _bound(
    part: str, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Callable[[], Any]:
    """Bind arguments to a function; if it has a signature, check first that it accepts them."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise InputError(f"options of {part} are {options}: {error}") from None
    except ValueError:  # without a signature
        pass
    return partial(function, *arguments, **options)


def _checked(job: ElasticJob, part: str, returned: Any, kind: type[T]) -> T:
    if not isinstance(returned, kind):
        raise InputError(
            f"{part}: {getattr(job, part)} returned {type(returned).__name__}; expected a "
            f"{kind.__module__}.{kind.__name__}"
        )
    return returned


def _check_step(job: ElasticJob, part: str, stepper: Any) -> None:
    """Check that a step needs no argument, such as a metric or a closure."""
    try:
        inspect.signature(stepper.step).bind()
    except TypeError as error:
        raise InputError(
            f"{part}: {getattr(job, part)} returned {type(stepper).__name__}, whose step needs an argument "
            f"({error}); expected a step without arguments"
        ) from None


def _needed(spec: StandIn | None, part: str) -> StandIn:
    if spec is None:
        raise InputError(f"{part} is None; expected a function, because the model is no stand-in")
    return spec
