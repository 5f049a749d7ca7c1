"""What an elastic job is: everything that decides its bits, and no word of where it runs."""

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from makespan.easyscale.runtime._levels import LEVELS, DeterminismLevel
from makespan.errors import InputError, unknown_name
from makespan.syntax import parsed
from makespan.training.zoo import STAND_INS
from makespan.user_code import user_file

__all__ = ["AUTO", "BUILT_IN", "PARTS", "TRAINING_LOCK", "ElasticJob", "job_from", "split_name"]

TRAINING_LOCK = "training.lock"
"""File in the directory of a run on which processes that train there have a shared lock."""

AUTO = "auto"
"""Determinism of a job that leaves the level to a scan of its model."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    "model": STAND_INS,
    "optimizer": ("adam", "adamw", "sgd"),
    "lr_scheduler": ("step",),
    "scaler": ("grad",),
}
PARTS = ("model", "optimizer", "data", "loss", "lr_scheduler", "after_reduce", "scaler", "collate")
_CHOICES = {
    "buffers": ("per_rank", "rank0"),
    "scaling": ("pre", "post"),
    "fold": ("auto", "ring", "rank"),
}
_LEAST = {"n_logical_workers": 1, "micro_batch_size": 1, "seed": 0, "n_loaders": 0}


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A job for a fixed number of logical workers; checkpoints of another one are refused.

    Functions are given by name, ``file.py:name`` or ``package.module:name``, because every process has to
    find them. They are called with the options that the job has for them.

    Parameters
    ----------
    model
        One of `makespan.training.zoo.STAND_INS`, or a function that returns a model; random states are
        seeded before it is called.
    optimizer
        ``sgd``, ``adam``, ``adamw``, or a function of the model.
    data
        A function that returns a map-style data set of pairs of inputs and targets; None for that of a
        stand-in.
    loss
        A function of outputs and targets; None for that of a stand-in.
    lr_scheduler
        ``step``, or a function of the optimizer; called once a mini-batch. None for none.
    after_reduce
        A function of the model, called between sum and step, for example to clip gradients; None for none.
    scaler
        ``grad``, torch's scaling of losses, or a function that returns such an object; None for none.
    collate
        A function that joins a list of samples to a batch; None for torch's own.
    options
        Further arguments, by part and by name, for example ``{"optimizer": {"lr": 0.1}}``. A stand-in's are
        the fields of `makespan.training.zoo.StandIn` (``model``) and arguments of
        `makespan.training.zoo.stand_in_data` (``data``), of which ``n_samples`` is 1024 if it is not given.
    n_logical_workers, micro_batch_size
        N, and samples of a batch of each logical worker.
    determinism
        Name of a `DeterminismLevel`, or ``auto``: D1+D2 if `scan_module` finds the model cheap under D2, else
        D1, which a run settles when it starts.
    seed
        Of model, order of samples, loaders and logical workers.
    n_loaders
        Loaders of each logical worker; with 0 samples are read in the training process.
    buffers
        ``per_rank``: every logical worker keeps buffers of its own; ``rank0``: all start a mini-batch from
        those of the first, as DistributedDataParallel does by default.
    bucket_cap_bytes
        Size at which a bucket of gradients is full [B]; None for DistributedDataParallel's default.
    scaling, fold
        How gradients are added up, see `Reduction`; the fold ``auto`` is that of stock training on the
        machine on which the job starts.
    shuffle, drop_last_samples, drop_last_batch
        How samples are dealt, see `Shards`.

    Raises
    ------
    InputError
        A field is not accepted; the message has its name, what was found and what is expected.
    """

    model: str
    optimizer: str = "sgd"
    data: str | None = None
    loss: str | None = None
    lr_scheduler: str | None = None
    after_reduce: str | None = None
    scaler: str | None = None
    collate: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    n_logical_workers: int = 4
    micro_batch_size: int = 32
    determinism: str = "D1"
    seed: int = 0
    n_loaders: int = 2
    buffers: Literal["per_rank", "rank0"] = "per_rank"
    bucket_cap_bytes: int | None = None
    scaling: Literal["pre", "post"] = "pre"
    fold: Literal["auto", "ring", "rank"] = "auto"
    shuffle: bool = True
    drop_last_samples: bool = False
    drop_last_batch: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for part in PARTS:
            _check_part(part, getattr(self, part), is_own=":" in str(self.model))
        if self.determinism not in (*LEVELS, AUTO):
            raise unknown_name("determinism level", self.determinism, [*LEVELS, AUTO])
        for name, least in _LEAST.items():
            _check_number(name, getattr(self, name), least)
        if self.bucket_cap_bytes is not None:
            _check_number("bucket_cap_bytes", self.bucket_cap_bytes, 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(choices)}")
        for name in ("shuffle", "drop_last_samples", "drop_last_batch"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}; accepted: True, False")
        _check_options(self.options, {part for part in PARTS if getattr(self, part) is not None} | {"data"})

    @property
    def level(self) -> DeterminismLevel:
        """Its determinism level."""
        return DeterminismLevel.named(self.determinism)

    def values(self) -> dict[str, Any]:
        """Return it as plain values, of which `job_from` makes it again."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def code(self) -> dict[str, str]:
        """SHA-256 of each file from which functions come."""
        places = {split_name(text)[0] for part in PARTS if (text := getattr(self, part)) is not None}
        files = sorted(place for place in places if place.endswith(".py"))
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Say which fields differ from those of another job, given by its `values`; the fold may be open."""
        own, found = self.values(), []
        for name in sorted(own.keys() | other.keys()):
            mine, theirs = own.get(name), other.get(name)
            if mine != theirs and not (name == "fold" and mine == "auto"):
                found.append(f"{name}: found {theirs!r}, expected {mine!r}")
        return found


def job_from(values: Mapping[str, Any]) -> ElasticJob:
    """Return the job of which these are the `ElasticJob.values`."""
    known = {one.name for one in fields(ElasticJob)}
    for name in values:
        if name not in known:
            raise unknown_name("field of an elastic job", name, known)
    return ElasticJob(**values)


def split_name(text: str) -> tuple[str, str]:
    """File or module of a function, and its name there."""
    place, _, name = text.rpartition(":")
    return place, name


def _check_part(part: str, found: object, *, is_own: bool) -> None:
    """Check the name of a function, and where it is in a file that it is there."""
    wanted = "the name of a function that every process can import, file.py:name or package.module:name"
    built_in = BUILT_IN.get(part, ())
    if found is None and (part not in ("model", "optimizer", "data", "loss") or _is_given(part, is_own)):
        return
    if not isinstance(found, str):
        what = f"the function {found.__name__!r}" if hasattr(found, "__name__") else repr(found)
        raise InputError(f"{part} is {what}; accepted: {wanted}")
    if ":" not in found:
        if built_in:
            _check_known(part, found, built_in)
            return
        raise InputError(f"{part} is {found!r}; accepted: {wanted}")
    place, name = split_name(found)
    if not name.isidentifier() or not place:
        raise InputError(f"{part} is {found!r}; accepted: {wanted}")
    if place.endswith(".py"):
        _check_defined(part, Path(place), name)


def _is_given(part: str, is_own: bool) -> bool:
    """Whether a stand-in brings a part along."""
    return part in ("data", "loss") and not is_own


def _check_known(part: str, found: str, built_in: tuple[str, ...]) -> None:
    """Refuse a name without a colon that is not built in."""
    if found not in built_in:
        raise unknown_name(part, found, [*built_in, "file.py:name"])


def _check_defined(part: str, path: Path, name: str) -> None:
    """Check that a file has a name at its top level, without running it."""
    user_file(path, f"{part}, a file of Python")
    try:
        body = parsed(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{part}: {path}: cannot be read as Python: {error}") from None
    names = {each for node in body for each in _bound(node)}
    if name not in names and "*" not in names:
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        raise unknown_name(f"name in {path} ({part})", name, functions)


def _bound(node: ast.stmt) -> list[str]:
    """Names that a statement at the top level may bind, with all that conditions and loops have in them."""
    found = []
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            found.append(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.append(one.id)
        elif isinstance(one, ast.alias):
            found.append(one.asname or one.name.partition(".")[0])
    return found


def _check_number(name: str, found: object, least: int) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise InputError(f"{name} is {found!r}; accepted: a whole number >= {least}")


def _check_options(options: object, known: set[str]) -> None:
    """Check that options are plain values for parts that there are."""
    wanted = 'names and plain values by part, for example {"optimizer": {"lr": 0.1}}'
    if not isinstance(options, Mapping) or not all(isinstance(one, Mapping) for one in options.values()):
        raise InputError(f"options is {options!r}; accepted: {wanted}")
    for part, values in options.items():
        if part not in known:
            raise unknown_name("part in options", part, known)
        try:
            json.dumps(dict(values))
        except (TypeError, ValueError):
            raise InputError(f"options of {part} are {dict(values)!r}; accepted: {wanted}") from None
