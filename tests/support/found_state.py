"""Models that keep a sum in every place where Python lets a model keep one."""

import functools
import random
import threading
import weakref
from array import array
from collections import ChainMap, UserDict
from contextvars import ContextVar
from queue import Queue, SimpleQueue

import torch
from torch import nn


class Summing(nn.Module):
    """Scales its output by what `add` returns for the mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.ones_(self.linear.weight)
        self.set_up()

    def set_up(self):
        """Make what keeps the sum."""

    def add(self, value):
        return 0.0

    def forward(self, inputs):
        return self.linear(inputs) * (1 + self.add(float(inputs.mean())))

    def turn(self, inputs):
        """Return the output and the gradient of a pass."""
        self.zero_grad()
        outputs = self(inputs).sum()
        outputs.backward()
        outputs = outputs.detach()
        return float(outputs), self.linear.weight.grad.tolist()


class InDefault(Summing):
    def add(self, value, kept=[0.0]):  # noqa: B006
        kept[0] += value
        return kept[0]


class InDefaultOfStatic(Summing):
    @staticmethod
    def grown(value, *, kept={"sum": 0.0}):  # noqa: B006
        kept["sum"] += value
        return kept["sum"]

    def add(self, value):
        return self.grown(value)


class InDefaultOfProperty(Summing):
    def add(self, value):
        self.latest = value
        return self.grown

    @property
    def grown(self, kept=[0.0]):  # noqa: B006
        kept[0] += self.latest
        return kept[0]


def local():
    class InLocalClass(Summing):
        total = 0.0

        def add(self, value, kept=[0.0]):  # noqa: B006
            InLocalClass.total, kept[0] = InLocalClass.total + value, kept[0] + value
            return InLocalClass.total + kept[0]

    return InLocalClass()


def scaling():
    kept = {"sum": 0.0}

    def scaled(gradient):
        kept["sum"] += 1.0
        return gradient * kept["sum"]

    return scaled


class InHook(Summing):
    def set_up(self):
        self.linear.weight.register_hook(scaling())


class InPartialHook(Summing):
    def set_up(self):
        self.linear.weight.register_hook(
            functools.partial(lambda scaled, gradient: scaled(gradient), scaling())
        )


class Scaler:
    def __init__(self):
        self.kept = 0.0

    def __call__(self, gradient):
        self.kept += 1.0
        return gradient * self.kept


class InHookObject(Summing):
    def set_up(self):
        self.linear.weight.register_hook(Scaler())


class InLateHook(Summing):
    def set_up(self):
        scaled = scaling()

        def scale(one):
            one.grad = scaled(one.grad)

        self.linear.weight.register_post_accumulate_grad_hook(scale)


class InParameter(Summing):
    def set_up(self):
        self.linear.weight.total = 0.0

    def add(self, value):
        self.linear.weight.total += value
        return self.linear.weight.total


class InBuffer(InParameter):
    def set_up(self):
        self.register_buffer("kept", torch.zeros(1))

    def add(self, value):
        self.kept.total = getattr(self.kept, "total", 0.0) + value
        return self.kept.total


class List(list):
    pass


class Dict(dict):
    pass


class InOwnList(Summing):
    def set_up(self):
        self.kept = List()
        self.kept.total = 0.0

    def add(self, value):
        self.kept.total += value
        self.kept.append(value)
        return self.kept.total + len(self.kept)


class InNewDict(Summing):
    """A dictionary of its own class that a pass makes."""

    kept = None

    def add(self, value):
        if self.kept is None:
            self.kept = Dict(sum=0.0)
            self.kept.count = 0
        self.kept["sum"] += value
        self.kept.count += 1
        return self.kept["sum"] + self.kept.count


class InArray(Summing):
    def set_up(self):
        self.kept = array("d", [0.0])

    def add(self, value):
        self.kept[0] += value
        return self.kept[0]


class InBytes(Summing):
    def set_up(self):
        self.kept = bytearray(1)

    def add(self, value):
        self.kept[0] += int(value)
        return self.kept[0]


class InUserDict(InArray):
    def set_up(self):
        self.kept = UserDict({0: 0.0})


class InChain(InArray):
    def set_up(self):
        self.kept = ChainMap({0: 0.0}, {1: 1.0})


class InNewUserDict(InArray):
    kept = None

    def add(self, value):
        self.kept = self.kept or UserDict({0: 0.0})
        return super().add(value)


class InLocal(Summing):
    def set_up(self):
        self.kept = threading.local()
        self.kept.total = 0.0

    def add(self, value):
        self.kept.total += value
        return self.kept.total


class InContextVariable(Summing):
    def set_up(self):
        self.kept = ContextVar("kept", default=0.0)

    def add(self, value):
        self.kept.set(self.kept.get() + value)
        return self.kept.get()


class InLateImport(Summing):
    def add(self, value):
        import late_import

        late_import.total += value
        return late_import.total


KEPT = [
    kind
    for name, kind in list(globals().items())
    if name.startswith("In") and isinstance(kind, type) and issubclass(kind, Summing)
] + [local]


# --- what no checkpoint can hold ---


class InQueue(Summing):
    def set_up(self):
        self.kept = Queue()

    def add(self, value):
        self.kept.put(value)
        return 0.0


class InSimpleQueue(InQueue):
    def set_up(self):
        self.kept = SimpleQueue()


class InNestedQueue(InQueue):
    def set_up(self):
        self.nested = {"queue": Queue()}

    def add(self, value):
        self.nested["queue"].put(value)
        return 0.0


class InWeakDictionary(Summing):
    def set_up(self):
        self.kept = weakref.WeakKeyDictionary({self.linear: 0.0})

    def add(self, value):
        self.kept[self.linear] += value
        return self.kept[self.linear]


@functools.cache
def one():
    return [0.0]


class InResult(Summing):
    def add(self, value):
        one()[0] += value
        return one()[0]


def drawn():
    return random.random()


class InMethod(Summing):
    @functools.lru_cache  # noqa: B019
    def drawn(self, value):
        return drawn()

    def add(self, value):
        return self.drawn(value)


class InTensor(Summing):
    @staticmethod
    @functools.lru_cache
    def zero():
        return torch.zeros(1)

    def add(self, value):
        return float(self.zero().add_(value))


class Pure(Summing):
    """Caches what is the same for all."""

    @functools.lru_cache  # noqa: B019
    def mask(self, n):
        return torch.ones(n, n).triu_()

    @functools.lru_cache  # noqa: B019
    def shifts(self, n):
        return [n]

    def add(self, value):
        return self.shifts(int(value))[0] * float(self.mask(2).sum())
