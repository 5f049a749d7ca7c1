"""Primitive ``compile``: modules that torch compiles one by one, equal ones once.

Repeated layers are best compiled by themselves: the compiler then sees one layer instead of the whole model,
and code of the first layer serves all that are built alike.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from makespan.slapo.errors import ArgumentError, ConflictError, close_names
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrapped_forward,
)
from makespan.slapo.tracing import check_is_called

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Compilers ---


def why_no_inductor(device: torch.device) -> str:
    """Return why inductor cannot compile for a device, empty if it can."""
    if device.type != "cpu":
        return "" if importlib.util.find_spec("triton") else f"triton is not installed, for {device.type}"
    tried = (os.environ.get("CXX", "g++"), "clang++", "cl")
    compilers = [path for name in tried if (path := shutil.which(name)) is not None]
    return "" if any(map(_compiles, compilers)) else "there is no C++ compiler that works"


@functools.cache
def _compiles(compiler: str) -> bool:
    """Return True if a C++ compiler translates a file with a header of the standard library."""
    if Path(compiler).stem == "cl":  # it reads no standard input
        return True
    command = [compiler, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=b"#include <cmath>\n", capture_output=True, check=False)
    return done.returncode == 0


def check_compiler(where: str, backend: str, module: nn.Module) -> None:
    """Reject a compiler that torch does not know, or that cannot work for the device of a module."""
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        known = close_names(backend, [*torch.compiler.list_backends(), "aot_eager", "eager"])
        raise ArgumentError(f"{where}: torch has no compiler {backend!r}; {known}")
    if backend == "inductor" and (reason := why_no_inductor(device_of(module))):
        raise ArgumentError(
            f"{where}: inductor cannot compile here, {reason}; expected another backend, such as 'aot_eager'"
        )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the parameters of a module; that of a CPU, if they have no values yet."""
    devices = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


# --- Primitive ---

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Compiled(ForwardWrapper):
    """A forward that is compiled when it first runs; copies of the module are compiled again.

    Parameters
    ----------
    module
        The module.
    options
        Options of `torch.compile`.
    """

    op = "compile"

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module)
        self.kind, self.options = type(module), options
        self.run: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: compiled code belongs to the module that it was compiled for."""
        return vars(self) | {"run": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code."""
        if torch.compiler.is_compiling():  # as part of a larger module
            return self.inner(*args, **kwargs)
        if self.run is None:
            self.run = torch.compile(_function_of(self.kind, self.inner), **self.options)
        return self.run(*args, **kwargs)


def _function_of(kind: type[nn.Module], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a forward; functions of one class share their code.

    Torch keeps what it has compiled, with its conditions, by the code of a function, and gives up after a few
    of them. So modules of a class reuse what fits them, and those of other classes do not count.
    """
    function: Callable[..., Any] = _caller_of(repr(kind))(inner)
    return function


@functools.cache
def _caller_of(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that makes callers of a forward, with code of their own for each class."""
    # Compiled here and not with the file: tools that count lines put calls of their own into the code of
    # files, and torch cannot trace these.
    text = "lambda inner: lambda *args, **kwargs: inner(*args, **kwargs)"
    made: Any = eval(compile(text, f"<forward of {kind}>", "eval"))
    return made  # type: ignore[no-any-return]


@register_primitive()
class Compile(Primitive):
    """Compile a module by itself; modules of one class that are built alike are compiled once."""

    @classmethod
    def name(cls) -> str:
        """Return ``compile``."""
        return "compile"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        backend: str | Callable[..., Any] = "inductor",
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        mode: str | None = None,
    ) -> None:
        """Compile the forward of this module when it first runs, with hooks of the modules below it.

        Later steps may still change modules below this one before it runs; recomputation of the same module
        comes first.

        Parameters
        ----------
        backend
            Compiler by its name in `torch.compiler.list_backends`, also ``eager`` and ``aot_eager``, which
            translate nothing, or a function.
        fullgraph
            Raise an error if a part of the forward cannot be compiled, rather than run this part eagerly.
        dynamic
            Compile for any shapes if true, for one set of shapes if false; None to generalise over shapes
            that have changed.
        mode
            Mode of inductor, such as ``max-autotune``; None for the default.
        """
        where = f"compile of {sch.path!r}"
        check_is_called(sch, cls.name())
        if isinstance(backend, str):
            check_compiler(where, backend, sch.mod)
        if mode is not None and (mode not in _MODES or backend != "inductor"):
            raise ArgumentError(
                f"{where}: mode is {mode!r}; expected one of {', '.join(_MODES)}, with inductor"
            )
        if wrapped_forward(sch.mod, Compiled):
            raise ConflictError(f"{where}: it is already compiled, {sch.conflict('compile')}")
        options = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic, "mode": mode}
        wrap_forward(sch.mod, Compiled(sch.mod, options))
