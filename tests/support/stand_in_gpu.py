"""A stand-in for a GPU: a device of torch whose tensors lie in host memory, and look as those of a GPU do.

As in CUDA, ``tensor.numpy()`` fails, operators of tensors on two devices fail, and the device has random
states of its own. Kernels are those of the CPU. `StandInLauncher` starts processes that have such a device
instead of a GPU; it needs fork servers that have loaded no worker (`own_servers` of `forked`).
"""

import contextlib
import ctypes
import functools
import os
import runpy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch.utils import _pytree, backend_registration

from makespan.runtime import LocalLauncher

NAME = "standin"
PRELOAD = ("makespan.easyscale.loop", "torch._dynamo")
"""Modules that a fork server loads before it forks the first process."""


# --- Processes ---


@dataclass(frozen=True, slots=True)
class StandInLauncher(LocalLauncher):
    """Launcher for a machine with four stand-ins for GPUs; the number of one is its name."""

    device: str = "cuda"

    @property
    def n_devices(self):
        """Number of GPUs that a process sees."""
        return 4 if self.gpus is None else len(self.gpus)

    def start(self, launch, rank):
        """Start one process, which runs this module and in it the worker of the launch."""
        options = [
            replace(each, environment={**each.environment, "STAND_IN_WORKER": launch.worker})
            for each in launch.options
        ]
        launch = replace(launch, worker="stand_in_gpu", options=options)
        return LocalLauncher(gpus=self.gpus).start(launch, rank)


def _work():
    """Run the worker of a launch where the only GPU is a stand-in."""
    import makespan.runtime
    from makespan.runtime import rendezvous

    library = install()
    form = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **options: form("gloo", **options)
    makespan.runtime.choose_device = rendezvous.choose_device = lambda who: torch.device(NAME, 0)
    runpy.run_module(os.environ["STAND_IN_WORKER"], run_name="__main__", alter_sys=True)
    library._destroy()


# --- Tensors: DLPack passes memory on with the name of its device, which is all that changes here ---


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Content(ctypes.Structure):
    """First fields of ``DLManagedTensor``."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_HOST, _EXTENSION = 1, 12  # kinds of devices in DLPack
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as_on(kind, tensor):
    capsule = torch._C._to_dlpack(tensor.detach())
    _Content.from_address(_address(capsule, b"dltensor")).device = _Device(kind, 0)
    return torch._C._from_dlpack(capsule)


def _on_host(value):
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        return _as_on(_HOST, value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _check_devices(name, values):
    """Reject what a GPU rejects: operands on two devices, unless one is a number."""
    tensors = [each for each in _pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    if any(each.device.type != NAME and each.ndim for each in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def _run(generator, operator, *args, **kwargs):
    """Run an operator of the device with the kernel of the CPU, and draw from a generator."""
    schema = operator._schema
    if "STAND_IN_BROKEN" in os.environ:
        raise RuntimeError("the stand-in for a GPU is broken, from now on")
    if schema.name == "aten::record_stream":
        return None
    if schema.name == "aten::set_":  # torch.save reads whole storages
        changed, storage, *where = args
        memory = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), torch.device("cpu"), storage.nbytes()
        )
        host = torch.empty(0, dtype=changed.dtype).set_(memory, *where)
        changed.data = _as_on(_EXTENSION, host)
        return changed
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    inside = {name: _pytree.tree_map(_on_host, value) for name, value in given.items()}
    if schema.name == "aten::_copy_from":
        inside["dst"].copy_(inside["self"])
        return given["dst"]
    if schema.name == "aten::_local_scalar_dense":
        return inside["self"].item()
    _check_devices(schema.name, given)
    if any(each.name == "generator" for each in schema.arguments) and inside.get("generator") is None:
        inside["generator"] = generator
    named = [each for each in schema.arguments if each.name in inside]
    found = operator(
        *(inside[each.name] for each in named if not each.kwarg_only),
        **{each.name: inside[each.name] for each in named if each.kwarg_only},
    )
    changed = [given[each.name] for each in named if each.alias_info and each.alias_info.is_write]
    if changed and schema.returns:
        return changed[0] if len(schema.returns) == 1 else tuple(changed)
    return _pytree.tree_map(
        lambda value: _as_on(_EXTENSION, value) if isinstance(value, torch.Tensor) else value, found
    )


# --- Module of the device, as far as makespan uses ``torch.cuda`` ---


class Stream(torch.Stream):
    """A stream, whose work is done when it is called."""

    def __new__(cls, device=None):
        return super().__new__(cls, stream_id=0, device_index=0, device_type=_TYPE)

    def wait_stream(self, stream):
        """Wait for nothing."""

    def synchronize(self):
        """Wait for nothing."""


class Event:
    """An event of a stream."""

    def record(self, stream):
        """Record nothing."""

    def synchronize(self):
        """Wait for nothing."""


_TYPE = 20  # of PrivateUse1


def _module(generator):
    return SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        manual_seed_all=generator.manual_seed,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        get_rng_state=lambda device=None: generator.get_state(),
        set_rng_state=lambda state, device=None: generator.set_state(state),
        get_device_properties=lambda device: SimpleNamespace(
            name="stand-in GPU", uuid=os.environ.get("CUDA_VISIBLE_DEVICES", "0"), total_memory=1e9
        ),
        Stream=Stream,
        Event=Event,
        current_stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
    )


def install():
    """Add the device to torch in this process, as ``standin``."""
    # Not a variable of this module, where a run would find it and take it for a state of the user.
    generator = torch.Generator()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module(generator))
    library = torch.library.Library("_", "IMPL")
    library.fallback(functools.partial(_run, generator), "PrivateUse1")
    return library  # it ends with its operators


if __name__ == "__main__":
    del __file__  # runs take modules beside that of a job for the user's
    _work()
