"""Transformers that nobody has named like a transformer, and models that look like one and are none.

Their attributes have plain names here; `renamed` builds them again with names that mean nothing.
"""

import re
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, SEQ = 32, 16, 4, 6


class Turning(nn.Module):
    """Rotary attention with two heads of keys and values; one matrix holds both halves of a gated part."""

    def __init__(self, width=WIDTH, heads=HEADS, pairs=2):
        super().__init__()
        self.soil, self.rain = heads, pairs
        self.leaf, self.root = nn.RMSNorm(width), nn.RMSNorm(width)
        self.stem = nn.Linear(width, width + 2 * pairs * width // heads, bias=False)
        self.bark, self.seed = nn.Linear(width, width), nn.Linear(width, 6 * width)
        self.fruit, self.still = nn.Linear(3 * width, width), nn.Dropout(0.1)

    def forward(self, fog):
        size = fog.shape[-1] // HEADS
        mist = self.stem(self.leaf(fog))
        cut = [self.soil * size, self.rain * size, self.rain * size]
        kinds = mist.split(cut, dim=-1)
        ask, key, value = (one.unflatten(-1, (-1, size)).transpose(1, 2) for one in kinds)
        angle = torch.arange(fog.shape[1])[:, None] * 0.1
        ask, key = (one * angle.cos() + one.flip(-1) * angle.sin() for one in (ask, key))
        drawn = F.scaled_dot_product_attention(ask, key, value, is_causal=True, enable_gqa=True)
        fog = fog + self.bark(drawn.transpose(1, 2).flatten(2))
        gate, up = self.seed(self.root(fog)).chunk(2, -1)
        return fog + self.fruit(self.still(F.silu(gate) * up))


class Forest(nn.Module):
    """A decoder whose head is its table."""

    def __init__(self, depth=3):
        super().__init__()
        self.moss, self.last = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.trees = nn.ModuleList(Turning() for _ in range(depth))
        self.sky = nn.Linear(WIDTH, WORDS, bias=False)
        self.sky.weight = self.moss.weight

    def forward(self, words):
        fog = self.moss(words)
        for tree in self.trees:
            fog = tree(fog)
        return self.sky(self.last(fog))


class Crossing(nn.Module):
    """A layer with its norms last, and queries, keys and values head by head, that sees a second sequence."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.count, self.size = heads, width // heads
        self.braid, self.knot = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hook, self.net, self.rope = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.one, self.two, self.three = (nn.LayerNorm(width) for _ in range(3))
        self.lost = nn.Dropout(0.1)

    def look(self, ask, key, value):
        shares = torch.softmax(ask @ key.transpose(-1, -2) * self.size**-0.5, -1)
        return (self.lost(shares) @ value).transpose(1, 2).flatten(2)

    def forward(self, fog, shore):
        braid = self.braid(fog).view(*fog.shape[:2], self.count, 3, self.size).transpose(1, 2)
        fog = self.one(fog + self.knot(self.look(*braid.unbind(3))))
        ask = self.hook(fog).view(*fog.shape[:2], self.count, self.size).transpose(1, 2)
        net = self.net(shore).view(*shore.shape[:2], 2, self.count, self.size).permute(2, 0, 3, 1, 4)
        fog = self.two(fog + self.rope(self.look(ask, *net)))
        return self.three(fog + self.down(torch.tanh(self.up(fog))))


class Harbour(nn.Module):
    """A stack of layers that all look at one picture."""

    def __init__(self, depth=2):
        super().__init__()
        self.bricks = nn.Embedding(WORDS, WIDTH)
        self.boats, self.flag = nn.ModuleList(Crossing() for _ in range(depth)), nn.Linear(WIDTH, 5)
        self.quay = nn.Linear(8, WIDTH)

    def forward(self, words, picture):
        fog, shore = self.bricks(words), self.quay(picture)
        for boat in self.boats:
            fog = boat(fog, shore)
        return self.flag(fog.mean(1))


class Crowd(nn.Module):
    """Experts whose matrices are two tensors; a token takes one expert."""

    def __init__(self, width=WIDTH, experts=4):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.2)
        self.narrow = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.2)

    def forward(self, fog, which, weight):
        gate, up = torch.einsum("btw,ewf->btef", fog, self.wide).chunk(2, -1)
        every = torch.einsum("btef,efw->btew", torch.sigmoid(gate) * up, self.narrow)
        chosen = every.gather(2, which[..., None, None].expand(*which.shape, 1, fog.shape[-1]))
        return chosen.squeeze(2) * weight[..., None]


class Gathering(nn.Module):
    """A layer with a bias of scores that its owner hands over for all heads, and with a choice of experts."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.a, self.b, self.c, self.d = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.before, self.after, self.crowd = nn.LayerNorm(width), nn.LayerNorm(width), Crowd()
        self.way = nn.Linear(width, 4, bias=False)

    def forward(self, fog, slope):
        still = self.before(fog)
        ask, key, value = (
            one(still).view(*fog.shape[:2], self.heads, -1).transpose(1, 2)
            for one in (self.a, self.b, self.c)
        )
        shares = torch.softmax(ask @ key.transpose(-1, -2) + slope, -1)
        fog = fog + self.d((shares @ value).transpose(1, 2).flatten(2))
        still = self.after(fog)
        weight, which = torch.softmax(self.way(still), -1).max(-1)
        return fog + self.crowd(still, which, weight)


class Square(nn.Module):
    """A model of such layers; slopes are learnt once for all."""

    def __init__(self, depth=2):
        super().__init__()
        self.stones = nn.Embedding(WORDS, WIDTH)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, HEADS))
        self.people = nn.Sequential()
        for _ in range(depth):
            self.people.append(Gathering())
        self.voice = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        fog, steps = self.stones(words), torch.arange(words.shape[1])
        slope = -(steps[:, None] - steps).abs() * self.slopes[:, None, None]
        for person in self.people:
            fog = person(fog, slope[None])
        return self.voice(fog)


class Lock(nn.Module):
    """A layer that scales what its attention returns by a number for each head, and by a gate."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.tide, self.ebb, self.gauge = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.inlet, self.chamber, self.outlet = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.sluice, self.quay = nn.Linear(width, width), nn.Linear(width, width)
        self.valve = nn.Parameter(torch.linspace(0.5, 1.5, heads))
        self.pump, self.drain = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, water):
        level = self.ebb(water)
        parts = (self.inlet(level), self.chamber(level), self.outlet(level))
        heads = (one.unflatten(-1, (self.tide, -1)).transpose(1, 2) for one in parts)
        flow = F.scaled_dot_product_attention(*heads, is_causal=True) * self.valve[:, None, None]
        flow = flow.transpose(1, 2).flatten(2)
        water = water + self.quay(flow * self.sluice(level).sigmoid())
        return water + self.drain(F.relu(self.pump(self.gauge(water))))


class Canal(nn.Module):
    """A decoder of such layers."""

    def __init__(self, depth=2):
        super().__init__()
        self.source, self.locks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Lock() for _ in range(depth))
        self.mouth = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        water = self.source(words)
        for lock in self.locks:
            water = lock(water)
        return self.mouth(water)


class Stall(nn.Module):
    """One of many gated parts."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.in1, self.in2, self.out = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, fog):
        return self.out(F.silu(self.in1(fog)) * self.in2(fog))


class Street(nn.Module):
    """A layer whose tokens go to one of many gated parts each; a few tokens leave some without any."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.door, self.sign = nn.LayerNorm(width), nn.Linear(width, 24, bias=False)
        self.stalls = nn.ModuleList(Stall() for _ in range(24))

    def forward(self, fog):
        still = self.door(fog)
        weight, which = torch.softmax(self.sign(still), -1).max(-1)
        sold = torch.zeros_like(fog)
        for index, stall in enumerate(self.stalls):
            mine = which == index
            if mine.any():
                sold[mine] = stall(still[mine]) * weight[mine][:, None]
        return fog + sold


class Market(nn.Module):
    """A model of such layers."""

    def __init__(self):
        super().__init__()
        self.table, self.streets = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Street(), Street()])

    def forward(self, words):
        fog = self.table(words)
        for street in self.streets:
            fog = street(fog)
        return fog


class Blended(nn.Module):
    """A layer that cannot be cut: it shares out features, and norms all heads at once."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.size = width // heads
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.all, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, fog):
        ask, key, value = (
            one.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in (self.all(self.a(fog)), self.b(fog), self.c(fog))
        )
        seen = F.scaled_dot_product_attention(ask, key, value)
        fog = fog + self.d(seen.transpose(1, 2).flatten(2))
        return fog + self.down(torch.softmax(self.up(fog), -1))


class Blend(nn.Module):
    """A model of such layers."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(WORDS + 1, WIDTH), nn.ModuleList([Blended(), Blended()])

    def forward(self, words):
        fog = self.table(words)
        for layer in self.layers:
            fog = layer(fog)
        return fog


def words(seed=0):
    return torch.randint(WORDS, (2, SEQ), generator=torch.Generator().manual_seed(seed))


def picture(seed=0):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    "Canal": (words(),),
    "Forest": (words(),),
    "Harbour": (words(), picture()),
    "Square": (words(),),
    "Market": (words(),),
    "Blend": (words(),),
}


def seeded(kind, space=None):
    """Return a model of a class by its name, with the same values whatever its attributes are called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return (globals() if space is None else space)[kind]()


def renamed():
    """Return the classes of this file with other names, and the new names by the old ones."""
    text = Path(__file__).read_text(encoding="utf-8")
    text = text[: text.index("def words(")]
    kinds = re.findall(r"^class (\w+)", text, re.MULTILINE)
    attributes = sorted(set(re.findall(r"self\.(\w+)(?=[ ,.=\[(])", text)) - {"training"})
    new = {name: f"q{place}" for place, name in enumerate([*kinds, *attributes])}
    text = re.sub(r"(?<=self\.)\w+", lambda match: new.get(match[0], match[0]), text)
    text = re.sub(r"(?<=def )\w+", lambda match: new.get(match[0], match[0]), text)
    for kind in kinds:
        text = re.sub(rf"\b{kind}\b", new[kind], text)
    module = types.ModuleType("odd_transformers_renamed")
    exec(compile(text, "renamed", "exec"), vars(module))
    return vars(module), new
