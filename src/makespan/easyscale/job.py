"""Description of an elastic job, options of its runs, and mappings of its logical workers to processes.

`ElasticJob` holds everything that decides the bits of a run, and nothing about processes or devices. A
`Placing` holds those: a `RankMapping` and the device of each process. `RunOptions` change no bit.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from makespan.arguments import check_choices, check_fields, check_range
from makespan.easyscale.kernels import KERNEL_SETS, LEVELS, DeterminismLevel, process_options
from makespan.errors import InputError, unknown_name
from makespan.files import is_plain
from makespan.lazy import parse_source
from makespan.runtime import Launcher, ProcessOptions
from makespan.runtime.coordinator import Event
from makespan.training.zoo import STAND_INS
from makespan.user_code import user_file

TRAINING_LOCK = "training.lock"
"""File in the directory of a run; its training processes hold a shared lock on it."""
MODEL_FILE = "model.pt"
"""File in a checkpoint with the bare model, a plain ``state_dict``."""
AUTO = "auto"
"""Determinism level that a scan of the model chooses."""
BUILT_IN: dict[str, tuple[str, ...]] = {
    "model": STAND_INS,
    "optimizer": ("adam", "adamw", "sgd"),
    "lr_scheduler": ("step",),
    "scaler": ("grad",),
}
PARTS = ("model", "optimizer", "data", "loss", "lr_scheduler", "after_reduce", "scaler", "collate", "loop")
Buffers = Literal["per_rank", "rank0"]
Scaling = Literal["pre", "post"]
Fold = Literal["auto", "ring", "rank"]
_MOST_WORKERS, _MOST_SEED = 100_000, 2**63 - 1


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A training job for a fixed number of logical workers (the EasyScaleThreads, ESTs, of the paper).

    Functions are given by name, ``file.py:name`` or ``package.module:name``, because every process must be
    able to import them. Each is called with its options of the job.

    Parameters
    ----------
    model
        One of `makespan.training.zoo.STAND_INS`, or a function that returns a model; random states are
        seeded before it is called. None for a job with a ``loop``.
    optimizer
        ``sgd``, ``adam``, ``adamw``, or a function of the model.
    data
        Function that returns a map-style data set of pairs of inputs and targets; default for a stand-in: its
        own.
    loss
        Function of outputs and targets; default for a stand-in: its own.
    lr_scheduler
        ``step``, or a function of the optimizer; it steps once per mini-batch. None for no scheduler.
    after_reduce
        Function of the model, called between the sum of gradients and the optimizer step, for example to clip
        gradients. None for no function.
    scaler
        ``grad``, torch's scaling of losses, or a function that returns a loss scaler. None for no scaling.
    collate
        Function that joins a list of samples into a batch. None for torch's default.
    loop
        Function that builds everything and has the training loop, instead of all other functions; see
        `LoopRun`. None for a job whose functions are given one by one.
    options
        Further arguments, by part and by name, for example ``{"optimizer": {"lr": 0.1}}``. For a stand-in
        they are the fields of `makespan.training.zoo.StandIn` (``model``) and the arguments of
        `makespan.training.zoo.stand_in_data` (``data``; ``n_samples`` is 1024 by default).
    n_logical_workers
        Number of logical workers of the job, N.
    micro_batch_size
        Samples per batch of each logical worker.
    determinism
        ``none``, ``D0``, ``D1``, ``D0+D2``, ``D1+D2``, or ``auto`` to choose by a scan of the model. ``auto``
        chooses at the start of the run: D1+D2 if `scan_module` finds the model cheap under D2, else D1. See
        `DeterminismLevel`.
    seed
        Seed of the model, the order of samples, the loaders and the logical workers.
    n_loaders
        Loaders of each logical worker; with 0, samples are read in the training process.
    buffers
        ``per_rank``: each logical worker keeps its own buffers; ``rank0``: all start a mini-batch from those
        of the first one, as DistributedDataParallel does by default.
    bucket_cap_bytes
        Size at which a bucket of gradients is full [B]. None for DistributedDataParallel's default.
    find_unused_parameters
        Sum gradients as DistributedDataParallel does with this option, which stock training needs where a
        pass leaves parameters out, for example layers dropped at random.
    scaling
        Divide gradients before (``pre``) or after (``post``) the sum. See `Reduction`.
    fold
        Order of the sum of gradients; ``auto`` is that of stock training on the machine where the job starts.
        See `Reduction`.
    shuffle
        Deal samples in a new order each epoch. See `Shards`.
    drop_last_samples
        Drop samples that cannot be dealt evenly.
    drop_last_batch
        Drop a last batch of less than full size.

    Raises
    ------
    InputError
        A field is invalid; the message has its name, its value and the expected values.
    """

    model: str | None = None
    optimizer: str = "sgd"
    data: str | None = None
    loss: str | None = None
    lr_scheduler: str | None = None
    after_reduce: str | None = None
    scaler: str | None = None
    collate: str | None = None
    loop: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    n_logical_workers: int = 4
    micro_batch_size: int = 32
    determinism: str = "D1"
    seed: int = 0
    n_loaders: int = 2
    buffers: Buffers = "per_rank"
    bucket_cap_bytes: int | None = None
    find_unused_parameters: bool = False
    scaling: Scaling = "pre"
    fold: Fold = "auto"
    shuffle: bool = True
    drop_last_samples: bool = False
    drop_last_batch: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        if self.loop is None:
            for part in PARTS:
                _check_part(part, getattr(self, part), has_stand_in=":" not in str(self.model))
        else:
            self._check_loop()
        if self.determinism not in (*LEVELS, AUTO):
            raise unknown_name("determinism level", self.determinism, [*LEVELS, AUTO])
        options: object = self.options
        expected = 'names and plain values by part, for example {"optimizer": {"lr": 0.1}}'
        if not isinstance(options, Mapping) or not all(
            isinstance(values, Mapping) for values in options.values()
        ):
            raise InputError(f"options is {options!r}; expected {expected}")
        # Data has options even if it is None: those of the data set of a stand-in.
        known = {part for part in PARTS if getattr(self, part) is not None} | {"data"}
        known = known if self.loop is None else {"loop"}
        for part, values in options.items():
            if part not in known:
                raise unknown_name("part in options", part, known)
            if not is_plain(dict(values)):
                raise InputError(f"options of {part} are {dict(values)!r}; expected {expected}")
        check_choices(self)
        counts = ("n_logical_workers", "micro_batch_size", "bucket_cap_bytes")
        check_fields(self, "", positive=counts, not_negative=("seed", "n_loaders"))
        check_range("n_logical_workers", self.n_logical_workers, 1, _MOST_WORKERS)
        check_range("seed", self.seed, 0, _MOST_SEED)

    def _check_loop(self) -> None:
        """Check the loop, and that nothing is given that it builds itself."""
        _check_part("loop", self.loop, has_stand_in=False)
        defaults = {each.name: each.default for each in fields(self)}
        for part in PARTS:
            if part != "loop" and (found := getattr(self, part)) != defaults[part]:
                raise InputError(
                    f"{part} is {found!r} and loop is {self.loop!r}; expected only one of them, because a "
                    "loop builds everything itself"
                )
        if self.determinism == AUTO:
            raise InputError(
                f"determinism is {AUTO!r} and loop is {self.loop!r}; expected {', '.join(LEVELS)}, because "
                "only the model of a job without a loop is scanned"
            )
        if self.buffers != "per_rank":
            raise InputError(
                f"buffers is {self.buffers!r} and loop is {self.loop!r}; expected 'per_rank', because a loop "
                "may run several passes per mini-batch"
            )

    @property
    def level(self) -> DeterminismLevel:
        """Determinism level of the job."""
        return DeterminismLevel.named(self.determinism)

    def values(self) -> dict[str, Any]:
        """Return the job as plain values, from which `job_from` rebuilds it."""
        # Through JSON, so that values compare equal to those of a request or a checkpoint.
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def code(self) -> dict[str, str]:
        """Return the SHA-256 of each file that a function comes from."""
        sources = {split_name(text)[0] for part in PARTS if (text := getattr(self, part)) is not None}
        files = sorted(source for source in sources if source.endswith(".py"))
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """List the fields that differ from another job, given by its `values`; ``fold`` may be ``auto``.

        Fields that the other lacks, because an earlier version wrote it, have their defaults.
        """
        values, differences = self.values(), []
        other = {each.name: each.default for each in fields(self) if each.default is not MISSING} | {**other}
        for name in sorted(values.keys() | other.keys()):
            mine, theirs = values.get(name), other.get(name)
            if mine != theirs and not (name == "fold" and mine == "auto"):
                differences.append(f"{name}: found {theirs!r}, expected {mine!r}")
        return differences


_SHORTEST_HANG_S = 3.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run; none of them changes a bit of the result.

    Parameters
    ----------
    resume
        Resume the run in the directory; without it, a directory with a checkpoint is rejected.
    checkpoint_every
        Mini-batches between checkpoints; 0 to count none.
    checkpoint_every_s
        Seconds between checkpoints; 0 for no checkpoints by time. The time is at least twenty times that of
        writing one. A checkpoint is always written at the end and on request.
    hash_every
        Mini-batches between hashes of parameters, optimizer and contexts; 0 for none. By default, hashes are
        taken at checkpoints only. A sum of the words of all parameters is compared between processes in every
        mini-batch.
    loader_processes
        Loader processes per training process.
    prefetch
        Batches that loader processes make ahead.
    max_restarts
        Restarts in a row from the last checkpoint after a process was killed.
    survives
        Processes that may be lost at the same time without a return to the checkpoint: the contexts of the
        logical workers of each process are copied to so many others in every mini-batch, and the remaining
        processes continue from their memory; the function of a ``loop`` is called again in each of them. On
        GPUs, gradients are then summed in host memory. 0 to restart all processes from the last checkpoint.
    zero_stage
        Stage of ZeRO: with 1, the optimizer state of each parameter is on ``survives`` + 1 processes only,
        which take its step and send the parameter to the others; with 0, it is on all. 1 is for optimizers
        of torch whose step of one parameter depends on no other, and for jobs without a ``loop``.
    hang_s
        With ``survives``, time without a sign of life after which a process is killed [s].
    n_replacements
        With ``survives``, processes that may be started to replace lost ones; each joins between two
        mini-batches. Processes may also join from outside, see `makespan.easyscale.join_run`.
    mixes_devices
        Allow several types of device at the same time without D2, which changes the bits.
    ends_on_signals
        Whether SIGINT, SIGTERM and SIGHUP take effect only after the current mini-batch and a checkpoint; a
        second signal takes effect at once. Only the main thread can do this; None for True there and False in
        other threads. A signal that this process ignores is still ignored.
    launcher
        Launcher of the processes; None for this machine.
    progress_s
        Seconds between calls of ``on_progress`` at least; 0 to call it after every mini-batch if possible.
    on_progress
        Called at intervals with mini-batches done and the newest loss.
    on_regroup
        With ``survives``, called in the launching process at the start and after each change of the
        processes, once all that remain have stopped. They continue when it returns.
    on_event
        With ``survives``, called with each event of the coordinator; processes then announce the phases of
        every mini-batch. None to listen to nothing.
    """

    resume: bool = True
    checkpoint_every: int = 0
    checkpoint_every_s: float = 600.0
    hash_every: int | None = None
    loader_processes: int = 1
    prefetch: int = 2
    max_restarts: int = 2
    survives: int = 0
    zero_stage: int = 0
    hang_s: float = 10.0
    n_replacements: int = 0
    mixes_devices: bool = False
    ends_on_signals: bool | None = None
    launcher: Launcher | None = None
    progress_s: float = 0.5
    on_progress: Callable[[int, float], object] | None = None
    on_regroup: Callable[[], object] | None = None
    on_event: Callable[[Event], object] | None = None

    def __post_init__(self) -> None:
        stage: object = self.zero_stage
        if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1):
            raise InputError(
                f"zero_stage is {stage!r}; expected 0, or 1 for shards of the optimizer state; "
                "gradients (2) and parameters (3) are whole in every process"
            )
        counts = (
            "checkpoint_every", "hash_every", "loader_processes", "max_restarts", "survives", "n_replacements"
        )  # fmt: skip
        check_fields(self, "", positive=("prefetch",), not_negative=counts)
        for name in ("checkpoint_every_s", "progress_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)!r}; expected a number >= 0")
        for name in ("on_event", "on_regroup"):
            if getattr(self, name) is not None and not self.survives:
                raise InputError(f"{name} is given and survives is 0; expected survives >= 1, or no {name}")
        if self.n_replacements and not self.survives:
            raise InputError(
                f"n_replacements is {self.n_replacements} and survives is 0; expected survives >= 1, or none"
            )
        if not self.hang_s >= _SHORTEST_HANG_S:
            # Beats starve while user code holds the lock of the interpreter.
            raise InputError(f"hang_s is {self.hang_s!r}; expected a number >= {_SHORTEST_HANG_S:g}")


def job_from(values: Mapping[str, Any]) -> ElasticJob:
    """Rebuild a job from its `ElasticJob.values`."""
    known = {field.name for field in fields(ElasticJob)}
    for name in values:
        if name not in known:
            raise unknown_name("field of an elastic job", name, known)
    return ElasticJob(**values)


def split_name(text: str) -> tuple[str, str]:
    """Split the name of a function into its file or module and the name there."""
    source, _, name = text.rpartition(":")
    return source, name


def _check_part(part: str, function: object, *, has_stand_in: bool) -> None:
    """Check the name of a function, and that the file it names, if any, defines the function."""
    expected = "the name of a function that every process can import, file.py:name or package.module:name"
    built_in = BUILT_IN.get(part, ())
    if function is None and part not in ("model", "optimizer", "data", "loss"):
        return
    if function is None and part in ("data", "loss") and has_stand_in:  # a stand-in has its own
        return
    if not isinstance(function, str):
        shown = f"the function {function.__name__!r}" if hasattr(function, "__name__") else repr(function)
        raise InputError(f"{part} is {shown}; expected {expected}")
    if ":" not in function:
        if not built_in:
            raise InputError(f"{part} is {function!r}; expected {expected}")
        if function not in built_in:
            raise unknown_name(part, function, [*built_in, "file.py:name"])
        return
    source, name = split_name(function)
    if not name.isidentifier() or not source:
        raise InputError(f"{part} is {function!r}; expected {expected}")
    if source.endswith(".py"):
        _check_defined(part, Path(source), name)


def _check_defined(part: str, path: Path, name: str) -> None:
    """Check that a file defines a name at its top level, without running it."""
    user_file(path, f"{part}, a file of Python")
    try:
        body = parse_source(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{part}: {path}: cannot be read as Python: {error}") from None
    # All names that the top level may bind, also inside conditions and loops: a file that binds the name only
    # under some condition passes this check.
    names = set[str]()
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    if name not in names and "*" not in names:
        functions = [each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        raise unknown_name(f"name in {path} ({part})", name, functions)


# --- Mappings of logical workers to processes ---

_PATTERN = re.compile(r"\d{1,15}(,\d{1,15})*(/\d{1,15}(,\d{1,15})*)*")


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Virtual ranks that each process hosts, in the order in which it runs them.

    ``str()`` and `parse` use one notation; ``/`` separates processes: ``0,1/2/3``.

    Parameters
    ----------
    hosted
        Virtual ranks by process. An `InputError` is raised unless each of 0 to N - 1 occurs once and every
        process hosts at least one.
    """

    hosted: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check that every logical worker has one host and no process is empty."""
        ranks = [rank for ranks in self.hosted for rank in ranks]
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            last = max(len(ranks), 1) - 1
            raise InputError(
                f"mapping {self} has virtual ranks {sorted(ranks)}; expected each of 0 to {last} once"
            )
        if () in self.hosted:
            raise InputError(
                f"mapping {self}: process {self.hosted.index(())} hosts no logical worker; expected at most "
                f"{len(ranks)} processes, none empty"
            )

    def __str__(self) -> str:
        """Notation of the mapping."""
        return "/".join(",".join(map(str, ranks)) for ranks in self.hosted)

    @property
    def n_logical_workers(self) -> int:
        """Number of logical workers, N."""
        return sum(map(len, self.hosted))

    @property
    def n_processes(self) -> int:
        """Number of processes, M."""
        return len(self.hosted)

    def host(self, rank: int) -> int:
        """Return the process that hosts a virtual rank."""
        return next(number for number, ranks in enumerate(self.hosted) if rank in ranks)

    def by_position(self) -> "RankMapping":
        """Return the mapping with logical workers renumbered in the order of the mapping."""
        ends = accumulate(map(len, self.hosted), initial=0)
        return RankMapping(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))

    @classmethod
    def parse(cls, text: object) -> "RankMapping":
        """Read the notation; anything else raises an `InputError`."""
        if not isinstance(text, str) or not _PATTERN.fullmatch(text):
            raise InputError(f"mapping is {text!r}; expected ranks by process, for example 0,1/2/3")
        return cls(tuple(tuple(map(int, ranks.split(","))) for ranks in text.split("/")))

    @classmethod
    def even(cls, n_logical_workers: int, n_processes: int) -> "RankMapping":
        """Spread ranks in ascending order over processes; their numbers differ by at most one."""
        if not 1 <= n_processes <= n_logical_workers:
            raise InputError(
                f"{n_processes} processes for {n_logical_workers} logical workers; expected 1 to "
                f"{n_logical_workers} processes"
            )
        share, more = divmod(n_logical_workers, n_processes)
        ends = accumulate((share + (process < more) for process in range(n_processes)), initial=0)
        return cls(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))


# --- Placing: a mapping and the devices of its processes ---

_DEVICE = "A"


@dataclass(frozen=True, slots=True)
class Placing:
    """A mapping and the device of each of its processes."""

    mapping: RankMapping
    devices: tuple[str, ...]

    @classmethod
    def of(cls, job: ElasticJob, mapping: str | None, devices: str | Sequence[str] | None) -> "Placing":
        """Check a mapping and devices for a job.

        Without a mapping the logical workers are spread evenly over the devices, and without devices each
        process gets one of type A; without either there is one process per logical worker. An `InputError`
        has the field, its value and the expected values.
        """
        n_workers = job.n_logical_workers
        if isinstance(devices, str):  # an empty string means no device
            devices = [part.strip() for part in devices.split(",")] if devices.strip() else []
        if devices is not None and not isinstance(devices, Sequence):
            raise InputError(f"devices is {devices!r}; expected names of devices, for example A,A,B")
        names = None if devices is None else tuple(devices)
        if mapping is None and names is not None and not 1 <= len(names) <= n_workers:
            raise InputError(
                f"devices has {len(names)} names; expected 1 to {n_workers}, because each must host a "
                "logical worker"
            )
        if mapping is None:
            parsed = RankMapping.even(n_workers, n_workers if names is None else len(names))
        else:
            parsed = RankMapping.parse(mapping)
        if parsed.n_logical_workers != n_workers:
            raise InputError(
                f"mapping {parsed} has {parsed.n_logical_workers} logical workers; expected {n_workers}, as "
                "the job has"
            )
        names = (_DEVICE,) * parsed.n_processes if names is None else names
        if len(names) != parsed.n_processes:
            raise InputError(
                f"devices has {len(names)} names; expected {parsed.n_processes}, one for each process of "
                f"mapping {parsed}"
            )
        for name in names:
            if name not in tuple(KERNEL_SETS):
                raise unknown_name("device", name, KERNEL_SETS)
        return cls(parsed, names)

    def check_types(self, job: ElasticJob, mixes_devices: bool) -> None:
        """Reject devices of several types at a time where they change bits, unless the run allows them."""
        if len(set(self.devices)) > 1 and not (mixes_devices or job.level.pins_kernels):
            raise InputError(
                f"devices is {','.join(self.devices)}, several types under {job.determinism}; expected one "
                "type, a level with D2, or mixes_devices=True"
            )

    @classmethod
    def from_values(cls, job: ElasticJob, values: dict[str, Any]) -> "Placing":
        """Rebuild a placing from its `values`."""
        return cls.of(job, values["mapping"], values["devices"])

    def device(self, number: int) -> str:
        """Return the device of a process; one that joined has that of the first."""
        return self.devices[number if number < len(self.devices) else 0]

    def values(self) -> dict[str, Any]:
        """Return the placing as plain values."""
        return {"mapping": str(self.mapping), "devices": list(self.devices)}

    def options(self, job: ElasticJob) -> list[ProcessOptions]:
        """Return the options that each process is started with."""
        return [process_options(name, job.level) for name in self.devices]
