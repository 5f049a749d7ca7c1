"""Steps and memory of the planner against bounds derived apart: wires, stages, and what layers keep."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from makespan.hardware import read_machines
from makespan.planning import (
    COMPONENTS,
    TERMS,
    Architecture,
    Attention,
    FeedForward,
    Grid,
    Layers,
    Layout,
    Training,
    ideal_terms,
    memory_table,
    parse_layout,
    software,
)
from makespan.planning.pricing import layouts, misfit
from makespan.planning.steptime import Rates, collective

LINK, NETWORK = 0.75, 0.8  # shares of the bandwidths that collectives reach


def rates_of(n_gpus, per_node):
    sizes = [per_node] * (n_gpus // per_node) + [n_gpus % per_node] * (n_gpus % per_node > 0)
    return Rates(400e9 / LINK, 10e9 / NETWORK, 2e12, 4e-6, 10e-6, n_gpus, max(sizes), min(sizes))


def slowest_node_s(size, inner, n_gpus, per_node):
    """Return the time per byte that the card of a device is busy, in the worst node of all groups."""
    worst = 0.0
    for block, first in itertools.product(range(n_gpus // (size * inner)), range(inner)):
        ranks = [block * size * inner + first + number * inner for number in range(size)]
        here = Counter(rank // per_node for rank in ranks)
        if len(here) > 1:
            worst = max(worst, *((1 - count / size) / count / 10e9 for count in here.values()))
    return worst


CLUSTERS = [
    *((2, 1), (4, 2), (6, 3), (12, 6), (16, 8), (20, 4), (24, 8), (64, 8)),
    *((9, 8), (10, 8), (12, 8), (18, 8), (20, 8), (28, 12), (30, 8), (36, 8)),  # whose last node is smaller
]
GROUPS = [
    (size, inner, n_gpus, per_node)
    for n_gpus, per_node in CLUSTERS
    for size in range(2, n_gpus + 1)
    for inner in range(1, n_gpus + 1)
    if n_gpus % (size * inner) == 0
]


@pytest.mark.parametrize(("size", "inner", "n_gpus", "per_node"), GROUPS)
def test_no_group_is_faster_than_its_slowest_card(size, inner, n_gpus, per_node):
    found = collective(size, inner, rates_of(n_gpus, per_node))
    needed = slowest_node_s(size, inner, n_gpus, per_node)
    if not needed:
        assert found.byte_s == pytest.approx((size - 1) / size / 400e9)
        assert found.start_s == 4e-6
        return
    local = max(per_node // inner, 1)
    around_s = (local - 1) / local / 400e9  # the parts that came in go round in the node
    is_exact = (size, n_gpus) not in [(5, 10), (7, 28)]  # else by devices of a group that lie alone at most
    assert found.byte_s == pytest.approx(needed + around_s, rel=1e-6 if is_exact else 2)
    assert found.byte_s >= needed
    assert found.start_s >= 10e-6


# --- Steps ---

ATTENTION, FFN = Attention(24, 8, 128, 128), FeedForward(8192, True)


def model_of(n_layers=28, attention=ATTENTION, ffn=FFN, **fields):
    return Architecture("dense", "llama", 3072, (Layers(n_layers, attention, ffn, **fields),), 128256)


def terms(training, layout, cluster, stack="megatron-bridge"):
    return dict(
        zip(TERMS, ideal_terms(training, Grid.of([layout]), cluster, software(stack))[0], strict=True)
    )


def memory(training, layout, stack="megatron-bridge"):
    return dict(zip(COMPONENTS, memory_table(training, Grid.of([layout]), software(stack))[0], strict=True))


@pytest.fixture
def slow(tmp_path):
    """Return a function that makes clusters of A100 with slow cards."""

    def make(n_gpus, per_node, **fields):
        path = tmp_path / "slow.toml"
        fields = {"n_gpus": n_gpus, "gpus_per_node": per_node, "network_gb_per_s": 1.25, **fields}
        lines = ['device = "a100-80"', *(f"{key} = {value}" for key, value in fields.items())]
        path.write_text("\n".join(lines))
        return read_machines(path)

    return make


@pytest.mark.parametrize(("n_gpus", "per_node", "lone"), [(2, 1, 1), (9, 8, 1), (12, 8, 4), (16, 8, 8)])
def test_shards_travel_no_faster_than_the_cards_of_the_smallest_node(slow, n_gpus, per_node, lone):
    model = model_of()
    found = terms(Training(model, 4096, n_gpus), Layout(dp=n_gpus, zero=3), slow(n_gpus, per_node))["shards"]
    wire_s = 3 * 2 * model.parameters * (1 - lone / n_gpus) / lone / 1.25e9  # two gathers and a scatter
    assert wire_s < found < 1.4 * wire_s


def test_tensor_parallelism_over_two_nodes_is_as_slow_as_the_wire_and_never_proposed(slow):
    model = model_of(attention=Attention(24, 24, 128, 128), ffn=FeedForward(9216, True))
    training, cluster = Training(model, 4096, 240), slow(6, 3)
    layout = Layout(dp=3, tp=2)
    found = terms(training, layout, cluster)
    wire_s = 28 * 4 * 4096 * 3072 * 2 * 80 / 1.25e9  # four all-reduces a layer and micro-batch
    assert found["tensor"] + found["tensor_beside"] > wire_s
    assert {one.tp for one in layouts(training, cluster)} == {1, 3}
    assert {one.tp for one in layouts(training, slow(6, 6))} == {1, 2, 3, 6}


def test_sharded_gradients_are_scattered_in_every_micro_batch(slow):
    training, cluster = Training(model_of(), 4096, 512), slow(16, 8)
    whole, sharded, often = (
        terms(training, parse_layout(text, 16), cluster, "deepspeed")["gradients"]
        for text in ("zero1 mb32", "zero2 mb32", "zero2 mb1")
    )
    assert whole == pytest.approx(sharded)
    # A scatter of gradients, which have 2 bytes there, for each of 32 micro-batches, and a gather.
    assert often == pytest.approx((32 + 1) / 2 * whole, rel=0.01)


@pytest.mark.parametrize("text", ["tp4 pp2 mb1", "pp4 mb1", "fsdp mb1", "zero1 mb1", "cp16 mb1", "tp3 mb1"])
def test_the_latency_of_the_network_takes_its_time(slow, text):
    training = Training(model_of(), 4096, 48)
    at_once, later = (
        terms(training, parse_layout(text, 48), slow(48, 8, network_latency_s=latency_s))
        for latency_s in (0, 1e-3)
    )
    assert sum(later.values()) > sum(at_once.values()) + 1e-3


@pytest.mark.parametrize(
    ("model", "tp", "problem"),
    [
        (model_of(), 3, "3 does not divide 8 heads of keys and values"),
        (model_of(), 5, "5 does not divide 24 heads"),
        (
            model_of(ffn=FeedForward(8190, True)),
            8,
            "8 does not divide 8190 channels of the feed",
        ),
        (model_of(cross_attention=Attention(24, 4, 128, 128)), 8, "8 does not divide 4 heads of keys"),
    ],
)
def test_tensor_parallelism_divides_all_that_it_shares_out(model, tp, problem):
    assert problem in misfit(model, Layout(dp=1, tp=tp))
    assert not misfit(model, Layout(dp=1, tp=2))


# --- Memory ---


def test_the_fullest_stage_of_an_uneven_pipeline_counts():
    training, model = Training(model_of(32), 8192, 480), model_of(32)
    kept = {pp: memory(training, Layout(dp=1, pp=pp))["activations"] for pp in (16, 24, 32)}
    # Two layers on the fullest of 24 stages as of 16, one of 32, each with as many micro-batches as stages.
    assert kept[24] == pytest.approx(1.5 * kept[16])
    assert kept[32] == pytest.approx(kept[16])
    held = memory(training, Layout(dp=1, pp=24))["parameters"]
    ends = 128256 * 3072
    assert held == pytest.approx(2 * (2 * (model.parameters - 2 * ends) / 32 + ends), rel=1e-3)
    # With embedding and head as layers, 34 of them on 17 stages: the second has two layers, the first one.
    of_ends = Layout(dp=1, pp=17, ends_as_layers=True)
    found = memory(Training(model_of(32), 8192, 480), of_ends)["activations"]
    assert found == pytest.approx(2 * 16 / 32 * kept[32])


def test_separate_kernels_compute_the_scores_that_windows_and_chunks_mask():
    cluster, layout = read_machines("8xa100-80"), Layout(dp=8, micro_batch=1)
    whole, *local = (
        Training(model_of(attention=replace(ATTENTION, **bound)), 4096, 8)
        for bound in ({}, {"window": 256}, {"chunk": 256})
    )
    scores = terms(whole, layout, cluster, "megatron-2021")["scores"]
    assert [terms(one, layout, cluster, "megatron-2021")["scores"] for one in local] == [scores, scores]
    fused = terms(whole, layout, cluster)["attention"]
    for one in local:
        seen = one.model.layers[0].attention.seen_tokens(4096) / ATTENTION.seen_tokens(4096)
        assert terms(one, layout, cluster)["attention"] == pytest.approx(seen * fused)


def test_selective_recomputation_keeps_what_attention_starts_from():
    training = Training(model_of(), 2048, 4)
    keeping, again = Layout(dp=8, micro_batch=1), Layout(dp=8, micro_batch=1, recompute="selective")
    fused = [memory(training, one)["activations"] for one in (keeping, again)]
    assert fused[0] == fused[1]
    unfused = [memory(training, one, "megatron-2021")["activations"] for one in (keeping, again)]
    assert unfused[1] == fused[0]
    assert unfused[0] - unfused[1] == pytest.approx(28 * 2048 * 2 * 2.5 * 24 * 2048)


def test_layers_keep_the_output_of_their_heads_whatever_the_hidden_size():
    narrow, wide = (
        memory(Training(model_of(attention=Attention(24, 24, dim, dim)), 4096, 8), Layout(dp=8))
        for dim in (64, 128)
    )
    more = wide["activations"] - narrow["activations"]
    assert more == pytest.approx(28 * 4096 * 2 * 4 * 24 * 64)  # queries, keys, values and output


def test_cross_attention_keeps_moves_and_launches_what_attention_does():
    cross = Attention(24, 8, 128, 128, is_causal=False)
    cluster, layout = read_machines("8xa100-80"), Layout(dp=8)
    without, with_it = (Training(model_of(cross_attention=part), 4096, 8) for part in (None, cross))
    more = memory(with_it, layout)["activations"] - memory(without, layout)["activations"]
    # Two copies of the residual stream, queries and output, keys and values.
    assert more == pytest.approx(28 * 4096 * 2 * (2 * 3072 + 2 * 3072 + 2 * 1024))
    before, after = terms(without, layout, cluster), terms(with_it, layout, cluster)
    assert after["elements"] > 1.2 * before["elements"]
    assert after["launches"] == pytest.approx(1.5 * before["launches"])


def test_keys_of_cross_attention_are_those_of_the_encoder():
    """The decoder of Whisper large: 448 tokens see 1,500 frames."""
    part = Attention(20, 20, 64, 64, is_causal=False)
    encoder = Layers(32, part, FeedForward(5120, False), seq=1500)
    decoder = Layers(32, Attention(20, 20, 64, 64), FeedForward(5120, False), cross_attention=part)
    model = Architecture("whisper", "whisper", 1280, (encoder, decoder), 51866, is_tied=True)
    h, frames, seq = 1280, 1500, 448
    encode = 32 * (2 * frames * 12 * h * h + 4 * frames * frames * h)
    own = 2 * seq * (4 + 8) * h * h + 4 * seq * (seq + 1) / 2 * h
    cross = 2 * seq * 2 * h * h + 2 * frames * 2 * h * h + 4 * seq * frames * h
    forward = encode + 32 * (own + cross) + 2 * seq * h * 51866
    assert model.flop_per_sample(seq) == pytest.approx(3 * forward)
    training, cluster = Training(model, seq, 8), read_machines("1xa100-80")
    short = terms(training, Layout(dp=1, micro_batch=8), cluster)["products"]
    halved = terms(Training(model, seq // 2, 8), Layout(dp=1, micro_batch=8), cluster)["products"]
    assert halved > 0.75 * short  # frames are most of it


def test_the_head_is_gathered_beside_the_last_layer():
    training = Training(model_of(), 4096, 8)
    gathered = memory(training, Layout(dp=8, zero=3), "torchtitan")["gathered"]
    layer = model_of().layers[0].parameters(3072)
    assert gathered == pytest.approx(2 * (layer + max(layer, 128256 * 3072)))
