"""Parts of a job's own training loop: models, optimizers and data as its function gives them, checked.

Everything that can be seen before the first mini-batch is rejected here, in one line.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from makespan.easyscale.job import ElasticJob
from makespan.easyscale.user_state import ABSENT, StateComparison, same_value
from makespan.errors import InputError

# --- Models, optimizers, and what else a checkpoint holds ---


class LoopState(dict[str, Any]):
    """Plain values that a loop keeps over restarts."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy."""
        return dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all values."""
        self.clear()
        self.update(state)


def _named(what: str, kind: type, given: Any) -> dict[str, Any]:
    """Return objects by name: one object, several in order, or those of a mapping."""
    if isinstance(given, Mapping):
        named = {str(name): each for name, each in given.items()}
    elif isinstance(given, list | tuple):
        named = {str(number): each for number, each in enumerate(given)}
    else:
        named = {} if given is None else {"": given}
    for name, each in named.items():
        if not isinstance(each, kind):
            where = f"{what} {name}".rstrip()
            raise InputError(f"{where} is a {type(each).__name__}; expected a torch {kind.__name__}")
    return named


def _joined(models: Mapping[str, nn.Module]) -> nn.Module:
    """Return the only model, or a module with all models under their names."""
    if list(models) == [""]:
        return models[""]
    joined = nn.Module()
    for name, model in models.items():
        if not name.replace("_", "a").isalnum() or hasattr(joined, name):
            raise InputError(
                f"model {name!r} cannot have this name; expected another one, for example 'critic'"
            )
        joined.add_module(name, model)
    return joined


class LoopParts:
    """Objects that the function of a job gives to its loop, by name.

    Parameters
    ----------
    models, optimizers, schedulers, scaler, shared
        See `LoopRun.loop`.
    device
        Device that all parameters and buffers have to be on.
    """

    def __init__(
        self, models: Any, optimizers: Any, schedulers: Any, scaler: Any, shared: Any, device: torch.device
    ) -> None:
        self.models = _named("model", nn.Module, models)
        self.optimizers = _named("optimizer", torch.optim.Optimizer, optimizers)
        self.schedulers = _named("scheduler", torch.optim.lr_scheduler.LRScheduler, schedulers)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler")
        self.scaler: torch.amp.GradScaler | None = scaler
        self.shared = dict(shared or {})
        self.model = _joined(self.models)
        self.state, self.last = LoopState(), LoopState(losses=[])
        for what, named in (("model", self.models), ("optimizer", self.optimizers)):
            if not named:
                raise InputError(f"run.loop got no {what}; expected one at least")
        self._check_models(device)
        self._trained: dict[str, tuple[int, list[str]]] = {}
        for name in self.optimizers:
            self.models_of(name)
        self._check_schedulers()
        for name, each in self.shared.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise InputError(
                    f"shared {name!r} is a {type(each).__name__}; expected an object with state_dict and "
                    "load_state_dict; loop.state keeps plain values"
                )

    def _check_models(self, device: torch.device) -> None:
        seen: dict[int, str] = {}
        for name, model in self.models.items():
            if isinstance(model, DistributedDataParallel | nn.DataParallel):
                raise InputError(
                    f"model {name}".rstrip()
                    + f" is a {type(model).__name__}; expected the module inside it, "
                    "because the loop sums gradients itself"
                )
            for label, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if is_lazy(tensor):
                    raise InputError(
                        f"model: {label} belongs to a lazy module and has no size yet; expected a forward "
                        "pass before run.loop"
                    )
                if tensor.device.type != device.type:
                    raise InputError(
                        f"model: {label} is on {tensor.device}; expected {device}: call model.to(run.device) "
                        "before the optimizer is built"
                    )
            for label, parameter in model.named_parameters():
                if other := seen.get(id(parameter)):
                    raise InputError(
                        f"parameter {label} of model {name} is also one of model {other}; expected models "
                        "without common parameters, or one model with both"
                    )
            seen |= dict.fromkeys(map(id, model.parameters()), name or "model")

    def models_of(self, name: str) -> list[str]:
        """Return the names of the models that an optimizer trains, also by groups that it gets later."""
        n_groups = len(self.optimizers[name].param_groups)
        known, models = self._trained.get(name, (0, []))
        if known != n_groups:
            models = self._models_of(name)
            self._trained[name] = n_groups, models
        return models

    def _models_of(self, name: str) -> list[str]:
        label, optimizer, found = f"optimizer {name}".rstrip(), self.optimizers[name], set[str]()
        if type(optimizer).__module__.startswith("torch.distributed."):
            raise InputError(
                f"{label} is a {type(optimizer).__name__}, which communicates; expected an optimizer that "
                "steps without other processes"
            )
        try:
            inspect.signature(type(optimizer).step).bind(optimizer)
        except TypeError as error:
            raise InputError(
                f"{label} is a {type(optimizer).__name__}, whose step needs an argument ({error}); expected "
                "a step without arguments"
            ) from None
        homes = {id(each): home for home, model in self.models.items() for each in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in homes:  # no process would add up its gradients
                    raise InputError(
                        f"group {number} of {label} has a parameter of shape {tuple(parameter.shape)} that "
                        "no model of the loop has; expected parameters of the models; register a loss with "
                        "parameters as a module"
                    )
                found.add(homes[id(parameter)])
        return [home for home in self.models if home in found]

    def _check_schedulers(self) -> None:
        known = {id(optimizer) for optimizer in self.optimizers.values()}
        for name, scheduler in self.schedulers.items():
            if id(scheduler.optimizer) not in known:
                raise InputError(
                    f"scheduler {name}".rstrip()
                    + f" is a {type(scheduler).__name__} of an optimizer that the "
                    "loop does not have; expected one of its optimizers"
                )
        scheduled = {id(scheduler.optimizer) for scheduler in self.schedulers.values()}
        for name, optimizer in self.optimizers.items():
            # A scheduler wraps the step of its optimizer when it is built.
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
                raise InputError(
                    f"optimizer {name}".rstrip()
                    + " has a scheduler that the loop does not know; expected it "
                    "in schedulers, because checkpoints hold it"
                )

    @property
    def states(self) -> dict[str, Any]:
        """All objects that a checkpoint holds besides the model, by their names there."""
        states: dict[str, Any] = {}
        for kind, named in (
            ("optimizer", self.optimizers), ("scheduler", self.schedulers), ("shared", self.shared),
        ):  # fmt: skip
            states |= {f"{kind} {name}".rstrip(): each for name, each in named.items()}
        return states | {"scaler": self.scaler, "loop.state": self.state, "loop.losses": self.last}

    @property
    def compared(self) -> list[str]:
        """Names of the states that are compared between processes, besides the optimizers."""
        return [*(f"shared {name}" for name in self.shared), "loop.state"]

    def known_ids(self) -> set[int]:
        """Return the ids of all objects that a checkpoint holds, and of what they consist of."""
        known = {id(each) for each in self.states.values()}
        modules = [
            *self.models.values(),
            *(each for each in self.shared.values() if isinstance(each, nn.Module)),
        ]
        for module in modules:
            known |= {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
        return known


# --- Data ---


_STREAM = (
    "a function of rank and number of logical workers that returns an iterable with state_dict and "
    "load_state_dict"
)


def map_style(data: Any, collate: Any, job: ElasticJob) -> tuple[Any, Any]:
    """Return a map-style data set and its collate function; other data raise an `InputError`."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            raise InputError(
                f"data is a DataLoader of an IterableDataset, which cannot resume; expected {_STREAM}"
            )
        data, own = _fields_of_loader(data, job)
        collate = collate or own
    if isinstance(data, type):
        raise InputError(f"data is the class {data.__name__}; expected an object of it")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InputError(
            f"data is a {type(data).__name__} without length; expected a map-style data set, or {_STREAM}"
        )
    return data, collate


def _fields_of_loader(loader: "DataLoader[Any]", job: ElasticJob) -> tuple[Any, Any]:
    """Return data set and collate function of a data loader whose other options are those of the job."""
    sampler: Any = loader.sampler
    iterating = next(each for each in type(loader).__mro__ if "__iter__" in vars(each))
    if iterating.__module__.partition(".")[0] not in ("torch", "torchdata"):
        raise InputError(
            f"data is a {type(loader).__name__}, a DataLoader with an __iter__ of its own; expected a plain "
            f"DataLoader, whose data set and collate_fn the loop takes, or {_STREAM}"
        )
    shuffles = {RandomSampler: True, SequentialSampler: False}.get(type(sampler))
    if shuffles is None:
        raise InputError(
            f"data is a DataLoader with a {type(sampler).__name__}; expected shuffle=True or False, because "
            f"the loop deals out samples as DistributedSampler does, or {_STREAM}"
        )
    if loader.worker_init_fn is not None or loader.generator is not None:
        name = "generator" if loader.worker_init_fn is None else "worker_init_fn"
        raise InputError(
            f"data is a DataLoader with a {name}; expected none: the job's seed decides all draws"
        )
    n_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    odd = {
        "replacement=True": getattr(sampler, "replacement", False),
        "a generator": getattr(sampler, "generator", None) is not None,
        "another number of samples": n_samples is not None and len(sampler) != n_samples,
    }
    for name in (name for name, is_set in odd.items() if is_set):
        raise InputError(
            f"data is a DataLoader with a {type(sampler).__name__} with {name}; expected shuffle=True or "
            f"False, because the loop deals out samples as DistributedSampler does, or {_STREAM}"
        )
    if loader.batch_size is None:
        what = "without batch_size" if loader.batch_sampler is None else "with a batch_sampler"
        raise InputError(
            f"data is a DataLoader {what}; expected batch_size, because the loop deals out samples as "
            f"DistributedSampler does, or {_STREAM}"
        )
    pairs = {
        "micro_batch_size": (loader.batch_size, job.micro_batch_size),
        "n_loaders": (loader.num_workers, job.n_loaders),
        "shuffle": (shuffles, job.shuffle),
        "drop_last_batch": (loader.drop_last, job.drop_last_batch),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise InputError(
                f"data is a DataLoader, which sets {name} to {found!r}, and the job has {expected!r}; "
                f"expected the same: give the trainer {name}={found!r}"
            )
    return loader.dataset, loader.collate_fn


def unused_options(data: Any) -> set[str]:
    """Return notices of options of a data loader without effect: the run loads its data set itself."""
    if not isinstance(data, DataLoader):
        return set()
    context = data.multiprocessing_context
    is_forked = context is None or context.get_start_method() == "fork"
    found = {
        "persistent_workers=True": (data.persistent_workers, "loaders begin anew with each epoch"),
        f"timeout={data.timeout:g}": (data.timeout > 0, "batches are waited for without a limit"),
        "a multiprocessing_context": (not is_forked, "loader processes are forked"),
    }
    return {
        f"data is a DataLoader with {option}, which has no effect: {instead}"
        for option, (is_set, instead) in found.items()
        if is_set
    }


# --- Variables of user code ---


class Variables:
    """Variables of user code around the loop that change in it, and that a restart would lose."""

    def __init__(self, modules: Sequence[ModuleType], known: set[int]) -> None:
        self._comparison = StateComparison(modules, known)
        self._before: dict[str, Any] = {}
        self._at_turn: dict[str, Any] = {}
        self._of_turns = set[str]()  # that turns have changed

    def _values(self, frame: FrameType | None, names: Collection[str] | None = None) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("makespan."):
            function = frame.f_code.co_name
            for name, value in frame.f_locals.items():
                label = f"variable {name} of {function}"
                if names is None or label in names:
                    values[label] = self._comparison.take(value)
            frame = frame.f_back
        return values

    def record(self, frame: FrameType) -> None:
        """Record all variables before the first mini-batch."""
        self._before = self._values(frame)

    def before_turn(self, frame: FrameType) -> None:
        """Record the variables that there were before the first mini-batch."""
        self._at_turn = self._values(frame, self._before)

    def after_turn(self, frame: FrameType) -> set[str]:
        """Return notices of plain values that a turn changed; objects with tensors raise an `InputError`."""
        notices = set[str]()
        for label, now in self._values(frame, self._at_turn).items():
            before = self._at_turn[label]
            if before is ABSENT or self._before[label] is ABSENT or same_value(before, now):
                continue
            problem = f"{label} changes in turns, and all logical workers of a process share it"
            if self._comparison.differs_in_tensors(before, now):
                raise InputError(
                    f"{problem}; expected a buffer or an attribute of the model, of which each has its own"
                )
            self._of_turns.add(label)
            notices.add(f"{problem}; an attribute of the model belongs to each of them")
        return notices

    def changes(self, frame: FrameType) -> set[str]:
        """Return notices of plain values that changed; objects with tensors raise an `InputError`."""
        notices = set[str]()
        for label, now in self._values(frame, self._before).items():
            before = self._before[label]
            if same_value(before, now) or before is ABSENT or label in self._of_turns:
                continue
            problem = f"{label} changes in the loop, and no checkpoint holds it"
            if self._comparison.differs_in_tensors(before, now):
                raise InputError(f"{problem}; expected it in shared, or in loop.state")
            notices.add(f"{problem}; loop.state keeps plain values over restarts")
        return notices
