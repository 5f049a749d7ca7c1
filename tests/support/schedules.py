"""Models to schedule, and what must hold of every schedule at any time."""

import torch
from torch import nn
from torch.nn import functional as F

from makespan.slapo import create_schedule


class Attention(nn.Module):
    """Attention of one head with dropout, written plainly."""

    def __init__(self, hidden, heads=2):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden, mask=None):
        scores = self.query(hidden) @ self.key(hidden).transpose(-1, -2) / hidden.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask
        return self.dropout(torch.softmax(scores, -1)) @ self.value(hidden)


class Block(nn.Module):
    """One residual block: attention, then a Sequential."""

    def __init__(self, hidden):
        super().__init__()
        self.attention = Attention(hidden)
        self.norm = nn.LayerNorm(hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, hidden, mask=None):
        hidden = self.norm(hidden + self.attention(hidden, mask=mask))
        return hidden + self.ffn(hidden)


class Stage(nn.Module):
    """Blocks in a list."""

    def __init__(self, hidden, n_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(n_blocks))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Toy(nn.Module):
    """Nested lists, a dictionary of modules, a Sequential, tied embeddings and a plain parameter."""

    def __init__(self, hidden=8, n_stages=2, n_blocks=2, vocab=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.scale = nn.Parameter(torch.ones(hidden))
        self.stages = nn.ModuleList(Stage(hidden, n_blocks) for _ in range(n_stages))
        self.heads = nn.ModuleDict(
            {"words": nn.Linear(hidden, vocab, bias=False), "pairs": nn.Linear(hidden, 2)}
        )
        self.heads["words"].weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens) * self.scale
        for stage in self.stages:
            hidden = stage(hidden)
        return self.heads["words"](hidden), self.heads["pairs"](F.relu(hidden[:, 0]))


def toy(seed=0, **sizes):
    """Return a `Toy` whose weights follow from a seed."""
    torch.manual_seed(seed)
    return Toy(**sizes)


def tokens(vocab=16, batch=2, seq=4, seed=0):
    """Return random tokens, int64, (batch, seq)."""
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def check_invariants(sch):
    """Check that nodes and modules agree, that parents know their children, and that none is missing."""
    root = sch.root
    assert root.parent is None and root.path == "" and root.metadata.depth == 0
    nodes = dict(root.named_schedules())
    assert sch in nodes.values()
    for path, node in nodes.items():
        assert node.path == path
        assert root.mod.get_submodule(path) is node.mod
        assert node.metadata is root.metadata
        assert (node.group, node.rank, node.world_size) == (root.group, root.rank, root.world_size)
        for name, child in node.child.items():
            assert child.parent is node and child.name == name
            assert child.path == (f"{path}.{name}" if path else name)
    assert list(nodes) == [path for path, _ in create_schedule(root.mod).named_schedules()]
    assert len({id(node.mod) for node in nodes.values()}) == len(nodes)


def state_of(sch):
    """Return everything that a failed primitive must leave as it was, by identity where that matters."""
    root = sch.root
    modules = {
        path: (
            id(module),
            type(module),
            {
                name: (
                    id(one),
                    {key: id(part) for key, part in one.items()} if isinstance(one, dict) else None,
                )
                for name, one in vars(module).items()
            },
        )
        for path, module in root.mod.named_modules(remove_duplicate=False)
    }
    parameters = {
        name: (id(one), dict(vars(one)), one.requires_grad, one.detach().clone())
        for name, one in root.mod.named_parameters(remove_duplicate=False)
    }
    nodes = {path: (id(node), id(node.mod), list(node.child)) for path, node in root.named_schedules()}
    metadata = root.metadata
    known = {name: repr(one) for name, one in metadata.slots.items() if one}
    notes = (list(metadata.ties), set(metadata.tags), known, list(metadata.journal), metadata.depth)
    values = {name: one[3] for name, one in parameters.items()}
    return (modules, {name: one[:3] for name, one in parameters.items()}, nodes, notes), values


def same_state(one, other):
    """Whether two results of `state_of` agree, values of parameters bit by bit."""
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())
