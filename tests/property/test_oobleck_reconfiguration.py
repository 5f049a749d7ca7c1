"""Random losses, drains and joins: what holds whatever happens, told by a model of its own."""

import math

from hypothesis import given, settings, strategies as st
from oobleck_templates import even_templates, layers_by_node

from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost, reconfigure

N_LAYERS = 9
LAYER_BYTES = [90, 40, 40, 40, 10, 40, 40, 40, 60]
MOST_NODES = 12
TEMPLATES = even_templates(N_LAYERS, range(1, N_LAYERS + 1))

KINDS = "llljjdcc"  # loss, join, drain, loss while the copies for another are under way
EVENT = st.integers(0, len(KINDS) * 4 * 100 * 100 - 1)  # one number, since drawing takes longer than the rest


class Model:
    """Who holds what, kept by hand; `held` is the truth that copies and losses change."""

    def __init__(self, n0, f, n_nodes, policy, is_minimal):
        self.n0, self.f, self.policy = n0, f, policy
        # So few sizes that just no number of nodes is left without a plan, or all.
        n_sizes = 1 + math.ceil((n0 - 1) / (f + 1 if policy == "stop" else 1))
        end = n0 + n_sizes if is_minimal else N_LAYERS + 1
        self.templates = {size: TEMPLATES[size] for size in range(n0, end)}
        self.n_microbatches = 24
        self.next_node = n_nodes
        found = self.call([], [], range(n_nodes))
        self.pipelines = found.plan.pipelines
        self.held = layers_by_node(self.pipelines)
        assert set(self.held) == set(range(n_nodes))

    def call(self, pipelines, lost, joined, drained=(), held=None):
        return reconfigure(
            pipelines, lost, joined, self.templates, self.f, self.n0, self.n_microbatches,
            layer_bytes=LAYER_BYTES, drained=drained, held=held, policy=self.policy,
        )  # fmt: skip

    def chosen(self, n, share):
        """Pick nodes in a way that takes whole pipelines and single ones of several."""
        nodes = sorted(self.held, key=lambda node: (node * (2 * share + 1)) % 101)
        return frozenset(nodes[:n])

    def change(self, lost=frozenset(), joined=(), drained=frozenset(), copied=100):
        """Apply a change; say False where training ends, and check that it ends exactly when it must."""
        left = {node: layers for node, layers in self.held.items() if node not in lost}
        gone_layers = set(range(N_LAYERS)) - set().union(*left.values())
        n_nodes = len(left) - len(drained) + len(joined)
        least = (self.f + 1) * self.n0 if self.policy == "stop" else self.n0
        try:
            found = self.call(self.pipelines, lost, joined, drained, self.held)
        except StateLost as error:
            assert set(error.layers) == gone_layers != set()
            return False
        except InsufficientNodes as error:
            assert not gone_layers
            assert (error.n_nodes, error.n_needed) == (n_nodes, least)
            assert n_nodes < least
            return False
        assert not gone_layers
        assert n_nodes >= least
        self.check(found, (set(left) - drained) | set(joined), drained)
        self.copy(found, left, lost, drained, joined, copied)
        return True

    def check(self, found, expected, drained):
        nodes = found.plan.nodes
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) == expected
        assert found.waiting == ()
        shares = [one.n_microbatches for one in found.plan.pipelines]
        assert sum(shares) == self.n_microbatches
        assert min(shares) >= 1
        assert found.f == min(self.f, len(nodes) // self.n0 - 1)
        assert len(shares) >= found.f + 1
        for one in found.plan.pipelines:
            assert one.template == self.templates[len(one.nodes)]
        assert ("drain" in found.kinds) == bool(drained)

    def copy(self, found, left, lost, drained, joined, copied):
        """Carry out some of the copies; only the first of them where a further loss comes in between."""
        for one in found.copies:
            assert one.layer in left[one.src.node], "a sender does not have what it sends"
            assert one.layer not in left.get(one.dst.node, ()), "a receiver has it already"
            assert one.n_bytes == LAYER_BYTES[one.layer]
        after = {node: set(left.get(node, ())) for node in found.plan.nodes}
        n_copied = len(found.copies) * copied // 100
        for one in found.copies[:n_copied]:
            after[one.dst.node].add(one.layer)
        self.pipelines = found.plan.pipelines
        self.held = after
        if n_copied == len(found.copies):
            owned = layers_by_node(self.pipelines)
            assert all(owned[node] <= after[node] for node in owned), "a node lacks a layer that it trains"
            self.held = owned

    def play(self, event):
        """Turn drawn numbers into a change of this job; say whether training goes on."""
        event, copied = divmod(event, 100)
        event, share = divmod(event, 100)
        kind, n = KINDS[event // 4], min(1 + event % 4, len(self.held))
        joined = tuple(range(self.next_node, self.next_node + n))
        if kind == "l":
            return self.change(lost=self.chosen(n, share))
        if kind == "d":
            return self.change(drained=self.chosen(min(n, 2), share))
        if kind == "j" and len(self.held) + n <= MOST_NODES:
            self.next_node += n
            return self.change(joined=joined, lost=self.chosen(share % 3, share))
        if kind == "c" and self.change(lost=self.chosen(1, share), copied=copied):
            return self.change(lost=self.chosen(1, copied))
        return kind == "j"


@given(
    st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), st.sampled_from(["stop", "stop", "degrade"]),
    st.booleans(),
    st.lists(EVENT, min_size=1, max_size=6),
)  # fmt: skip
@settings(max_examples=2000, derandomize=True)
def test_no_layer_is_without_a_copy_no_node_used_twice_and_the_batch_whole_or_the_right_error_comes(
    n0, f, extra, policy, is_minimal, events
):
    """2,000 schedules; a loss may also come while the copies of the one before are under way."""
    model = Model(n0, f, min((f + 1) * n0 + extra, MOST_NODES), policy, is_minimal)
    for event in events:
        if not model.play(event):
            break
