"""Layouts, steps, memory and plans of own models on own clusters."""

import dataclasses
import io
import itertools
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from golden_files import agree
from hypothesis import given, settings, strategies as st
from public_rows import write_rows

from makespan.cli import main
from makespan.errors import InfeasiblePlanError, InputError, NotationError, PlanError, TraceError
from makespan.hardware import cluster_of, gpu, gpu_names, homogeneous
from makespan.planning import (
    COMPONENTS,
    TERMS,
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Grid,
    Latent,
    Layers,
    Layout,
    Pricer,
    Training,
    calibrated_by,
    columns,
    describe,
    ideal_terms,
    judge,
    judge_memory,
    judged_table,
    judged_text,
    knowledge,
    memory_table,
    parse_layout,
    plan,
    read_machines,
    read_measured,
    read_model,
    read_rows,
    size_clusters,
    software,
    stack_names,
)
from makespan.planning.factors import slopes_of
from makespan.planning.pricing import layouts, misfit

NAMES = list(TERMS)
GIB = 2.0**30


def dense(n_layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, head_dim=128):
    attention = Attention(heads, kv_heads, head_dim, head_dim)
    return Architecture(
        "dense", "llama", hidden, (Layers(n_layers, attention, FeedForward(ffn, True)),), vocab,
        extra_parameters=hidden,
    )  # fmt: skip


def mixture(n_layers=32, experts=8, per_token=2):
    attention = Attention(32, 8, 128, 128)
    ffn = Experts(experts, per_token, 14336)
    return Architecture("mixture", "mixtral", 4096, (Layers(n_layers, attention, ffn),), 32000)


def terms(training, layout, machines, stack="megatron-bridge"):
    """Return the ideal terms of one layout by name."""
    return dict(
        zip(NAMES, ideal_terms(training, Grid.of([layout]), machines, software(stack))[0], strict=True)
    )


def memory(training, layout, stack="torchtitan"):
    found = memory_table(training, Grid.of([layout]), software(stack))[0]
    return dict(zip(COMPONENTS, found, strict=True))


# --- Architectures ---


@pytest.mark.parametrize(
    ("model", "printed"),
    [
        (dense(), 8_030_261_248),  # Llama-3-8B
        (dense(80, 8192, 64, 8, 28672), 70_553_706_496),  # Llama-3-70B
        (dense(126, 16384, 128, 8, 53248), 405_853_388_800),  # Llama-3.1-405B
    ],
)
def test_parameters_are_those_of_the_published_models(model, printed):
    assert model.parameters == printed
    assert model.active_parameters == printed


def test_a_mixture_has_all_experts_and_computes_with_the_chosen_ones():
    model = mixture()
    assert model.is_mixture
    idle = 32 * 6 * 3 * 4096 * 14336
    assert model.parameters - model.active_parameters == idle


def test_flop_of_a_sample_are_six_a_parameter_and_token_for_short_sequences():
    model = dense()
    weights = model.parameters - model.embedding_parameters
    assert model.flop_per_sample(16) == pytest.approx(6 * 16 * weights, rel=2e-3)


def test_a_window_and_a_mask_bound_what_a_token_sees():
    causal = Attention(8, 8, 64, 64)
    assert causal.seen_tokens(4096) == pytest.approx(2048, rel=1e-3)
    windowed = dataclasses.replace(causal, window=128)
    exact = np.minimum(np.arange(1, 4097), 128).mean()
    assert windowed.seen_tokens(4096) == pytest.approx(exact)
    assert dataclasses.replace(causal, is_causal=False).seen_tokens(4096) == 4096
    position = np.arange(1000)
    is_seen = position[:, None] // 300 == position // 300  # three chunks and a shorter one
    chunked = dataclasses.replace(causal, chunk=300)
    assert chunked.seen_tokens(1000) == pytest.approx(np.tril(is_seen).sum() / 1000)
    both_sides = dataclasses.replace(chunked, is_causal=False)
    assert both_sides.seen_tokens(1000) == pytest.approx(is_seen.sum() / 1000)
    assert chunked.seen_tokens(300) == causal.seen_tokens(300)
    with pytest.raises(InputError, match="window is 8, chunk is 16; expected one of them"):
        Attention(8, 8, 64, 64, window=8, chunk=16)


def test_stated_parameters_that_contradict_the_layers_are_refused():
    with pytest.raises(InputError, match=r"8,000,000 parameters are stated, but its layers"):
        dataclasses.replace(dense(), stated_parameters=8_000_000)


# --- Layouts ---

DEGREES = st.sampled_from([1, 2, 4, 8])


@given(
    dp=DEGREES, tp=DEGREES, pp=DEGREES, cp=DEGREES, ep=DEGREES, interleave=DEGREES, micro_batch=DEGREES,
    zero=st.integers(0, 3), shard=st.sampled_from([0, 2, 4]), share=st.sampled_from([1.0, 0.5, 0.25]),
    recompute=st.sampled_from(["none", "selective", "operators", "full"]), sequence_parallel=st.booleans(),
    pipeline=st.sampled_from(["1f1b", "zero-bubble"]), ends_as_layers=st.booleans(),
)  # fmt: skip
@settings(max_examples=300)
def test_what_a_layout_writes_is_what_is_read(share, **fields):
    try:
        layout = Layout(recompute_share=share if fields["recompute"] != "none" else 1.0, **fields)
    except PlanError:
        return
    expected = layout if layout.tp > 1 else dataclasses.replace(layout, sequence_parallel=True)
    assert parse_layout(layout.text, layout.n_gpus) == expected


@pytest.mark.parametrize(
    ("text", "n_gpus", "words"),
    [
        (" ", 8, "the layout is empty; expected words such as 'tp4 pp4 mb1'"),
        ("tp3x", 8, "'tp3x' is not understood; expected words such as tp2"),
        ("tp2 tp4", 8, "'tp4' says again"),
        ("fsdp zero1", 8, "'zero1' says again"),
        ("tp3", 8, "8 GPUs are not a multiple of tp x pp x cp = 3"),
        ("tp0", 8, "a degree is 0"),
        ("dp4 tp4", 8, "= 16, not 8 GPUs"),
        ("hsdp3", 8, "shards over 3 of the 8"),
        ("ep3", 8, "experts over 3 devices"),
        ("vp2", 8, "2 chunks per stage, but there is one stage"),
        ("recompute=some", 8, "recompute is 'some'"),
        ("recompute=full:0", 8, "recompute_share is 0.0"),
        ("recompute=full:1.2.3", 8, "is not a number"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_in_one_line(text, n_gpus, words):
    with pytest.raises((NotationError, PlanError)) as error:
        parse_layout(text, n_gpus)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# --- Clusters and stacks ---


def test_every_device_and_stack_of_the_catalogue_can_be_used():
    training = Training(dense(n_layers=8), 2048, 64)
    for name, stack in itertools.product(gpu_names(sustained=True), stack_names()):
        step_s = Pricer(training, read_machines(f"8x{name}"), software(stack)).price(Layout(dp=8)).step_s
        assert 0 < step_s < 1e4, (name, stack)
        assert gpu(name).sustained.evidence and software(stack).source


def test_a_cluster_file_changes_what_it_names(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('device = "h100-80"\nn_gpus = 64\nnetwork_gb_per_s = 12.5\nusd_per_gpu_hour = 2\n')
    found = read_machines(path)
    assert (found.name, found.n_gpus, found.usd_per_gpu_hour) == ("ours", 64, 2)
    assert found.node.nic_bandwidth_bytes_per_s == 12.5e9
    usual = read_machines("64xh100-80").node
    assert found.node.intra_bandwidth_bytes_per_s == usual.intra_bandwidth_bytes_per_s == 450e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_gpus = 8\n", "device is missing"),
        ('device = "h100-80"\n', "n_gpus is missing"),
        ('device = "h1000"\nn_gpus = 8\n', "unknown device 'h1000'"),
        ('device = "h100-80"\nn_gpu = 8\n', "unknown field 'n_gpu'"),
        ('device = "h100-80"\nn_gpus = "8"\n', "n_gpus is '8'; expected a number"),
        ('device = "h100-80"\nn_gpus = 8.5\n', "n_gpus is 8.5; expected a whole number"),
        ('device = "h100-80"\nn_gpus = 0\n', "n_gpus is 0"),
        ('device = "h100-80"\nn_gpus = 8\nmemory_gib = -1\n', "memory_gib is -1"),
        ('device = "h100-80"\nn_gpus = 8\nnetwork_gb_per_s = nan\n', "network_gb_per_s is nan"),
        ('device = "h100-80"\nn_gpus = 8\nusd_per_gpu_hour = inf\n', "usd_per_gpu_hour is inf"),
        ('device = "h100-80"\nn_gpus = 8\nproducts = { bf16 = [1.5, 10] }\n', "products of bf16 are 1.5"),
        ("device = [\n", "ours.toml"),
    ],
)
def test_a_broken_cluster_file_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_machines(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_node_of_a_device_is_that_in_which_it_is_sold(tmp_path):
    assert read_machines("144xgb200").gpus_per_node == 72
    assert read_machines("64xh100-80").gpus_per_node == 8
    path = tmp_path / "racks.toml"
    path.write_text('device = "gb200"\nn_gpus = 144\n')
    assert read_machines(path).gpus_per_node == 72
    path.write_text('device = "gb200"\nn_gpus = 144\ngpus_per_node = 36\n')
    assert read_machines(path).gpus_per_node == 36
    # Of a part of a node, more devices are whole nodes.
    path.write_text('device = "gb200"\nn_gpus = 4\n')
    assert [node.n_gpus for node in read_machines(path).with_gpus(101).nodes] == [72, 29]


def test_a_job_has_equal_parts_of_racks_and_full_nodes():
    def sizes(text):
        return [node.n_gpus for node in read_machines(text).nodes]

    assert sizes("256xgb200") == [64] * 4
    assert sizes("144xgb200") == [72, 72]
    assert sizes("73xgb200") == [72, 1]
    assert sizes("12xh100-80") == [8, 4]
    assert [node.n_gpus for node in read_machines("64xgb200").with_gpus(256).nodes] == [64] * 4


def test_a_text_that_is_no_cluster_names_the_devices():
    with pytest.raises(InputError, match=r"8h100: no such file; expected a TOML file .* b200"):
        read_machines("8h100")
    with pytest.raises(InputError, match=r"unknown device 'h10'"):
        read_machines("8xh10")


# --- Steps ---


def test_a_grid_has_the_terms_of_its_layouts():
    training, machines = Training(mixture(), 4096, 256), read_machines("64xh100-80")
    found = list(layouts(training, machines))[::37]
    grid = ideal_terms(training, Grid.of(found), machines, software("megatron-bridge"))
    for row, one in zip(grid, found, strict=True):
        assert row.tolist() == list(terms(training, one, machines).values())
        assert np.isfinite(row).all()
        assert (row >= 0).all()


def _odd_models():
    attention = Attention(32, 8, 128, 128, window=1024, n_norms=2)
    latent = Attention(32, 32, 192, 128, latent=Latent(1536, 512, 64))
    groups = Experts(64, 6, 1408, 2048, has_bias=True, capacity=1.25, n_groups=8, groups_per_token=3)
    runs = tuple(Layers(1, dataclasses.replace(attention, window=i % 2 * 128), groups) for i in range(16))
    yield Architecture("alternating", "gpt_oss", 4096, runs, 50257)
    encoder = Layers(16, latent, FeedForward(8192, True), seq=197)
    cross = Layers(16, Attention(32, 32, 100, 100), FeedForward(4096, False), cross_attention=attention)
    yield Architecture("both", "t5", 4096, (encoder, cross), 1000)
    yield dataclasses.replace(dense(), family="gpt2", activation="gelu_new", head="masked-lm")
    yield mixture()


def test_small_heads_are_slower_but_with_the_first_fused_kernels():
    machines, layout = read_machines("8xa100-80"), parse_layout("fsdp mb1", 8)

    def attention_s(head_dim, stack):
        model = dense(heads=4096 // head_dim, kv_heads=4096 // head_dim, head_dim=head_dim)
        return terms(Training(model, 8192, 8), layout, machines, stack)["attention"]

    assert attention_s(64, "llm-foundry") == pytest.approx(attention_s(128, "llm-foundry"))
    assert attention_s(64, "fsdp") == pytest.approx(attention_s(128, "fsdp") / 0.8)


def test_megatron_gathers_the_inputs_of_products_once_more_with_sequence_parallelism():
    training, machines = Training(dense(), 8192, 64), read_machines("8xa100-80")
    cut, whole = (parse_layout(f"tp8 mb1{words}", 8) for words in ("", " nosp"))
    plain = terms(training, cut, machines, "megatron-2021")
    again, before = terms(training, cut, machines, "megatron"), terms(training, whole, machines, "megatron")
    assert before["tensor_beside"] == plain["tensor_beside"] == 0
    assert again["tensor"] == pytest.approx(plain["tensor"])
    # Two gathers and two scatters of a layer forward and as many backward; two gathers more beside products.
    assert again["tensor_beside"] == pytest.approx(again["tensor"] / 4, rel=0.05)


@pytest.mark.parametrize("stack", stack_names())
@pytest.mark.parametrize("model", list(_odd_models()), ids=lambda model: model.name)
def test_a_layout_alone_has_the_bits_that_it_has_in_a_grid(model, stack):
    training, machines = Training(model, 32768, 256, computed_share=0.7), read_machines("64xh100-80")
    found = list(layouts(training, machines))[::29]
    odd = [Layout(dp=8, tp=8, zero=z, recompute="operators", recompute_share=0.3) for z in range(4)]
    odd += [Layout(dp=4, tp=2, pp=4, cp=2, pipeline="zero-bubble", sequence_parallel=False)]
    found += [dataclasses.replace(one, ep=8 if model.is_mixture else 1) for one in odd]
    grid, used = Grid.of(found), software(stack)
    terms_s = ideal_terms(training, grid, machines, used)
    needed = memory_table(training, grid, used)
    for i, one in enumerate(found):
        alone = Grid.of([one])
        assert ideal_terms(training, alone, machines, used).tobytes() == terms_s[i].tobytes()
        assert memory_table(training, alone, used).tobytes() == needed[i].tobytes()


def test_a_grid_of_several_blocks_keeps_order_and_bits():
    pricer = Pricer(Training(dense(), 8192, 256), read_machines("64xh100-80"), software("megatron-bridge"))
    few = list(layouts(pricer.training, pricer.cluster))
    grid = Grid.of((few * 100)[:9001])
    assert [len(block) for block in grid.blocks()] == [4096, 4096, 809]
    rows = pricer.parts_s(grid)
    assert rows.tobytes() == pricer.parts_s(Grid.of(few))[np.arange(9001) % len(few)].tobytes()


@given(value=st.floats(0, 1), exponent=st.integers(1, 16))
@settings(max_examples=1000)
def test_powers_of_a_number_have_the_bits_of_those_of_an_array(value, exponent):
    assert columns.power(value, exponent) == columns.power(np.full(7, value), exponent)[3]


@pytest.mark.parametrize("head", ["classes", "none"])
def test_a_model_without_logits_of_tokens_has_a_step_without_a_head(head):
    model = dataclasses.replace(dense(), head=head, vocab=1000)
    pricer = Pricer(Training(model, 1024, 256), read_machines("16xh100-80"), software("megatron-bridge"))
    best = plan(pricer).best[0]
    assert best.terms_s["head"] == 0
    assert 0 < best.low_s < best.step_s < best.high_s
    assert all(value >= 0 for value in best.terms_s.values())  # not so for NaN


def test_terms_appear_with_what_causes_them():
    training, machines = Training(dense(), 8192, 512), read_machines("512xh100-80")
    plain = terms(training, Layout(dp=512, micro_batch=1), machines)
    for name in (
        "tensor",
        "tensor_beside",
        "context",
        "stages",
        "dispatch",
        "experts",
        "shards",
        "scores",
        "casts",
    ):
        assert plain[name] == 0, name
    for layout, name in [
        (Layout(dp=64, tp=8), "tensor_beside"),
        (Layout(dp=256, cp=2), "context"),
        (Layout(dp=64, pp=8), "stages"),
        (Layout(dp=512, zero=3), "shards"),
    ]:
        assert terms(training, layout, machines)[name] > 0
    assert terms(training, Layout(dp=64, tp=8), machines, "torchtitan")["tensor"] > 0
    assert terms(dataclasses.replace(training, precision="fp8"), Layout(dp=512), machines)["casts"] > 0
    assert terms(Training(mixture(), 4096, 512), Layout(dp=512, ep=8), machines)["dispatch"] > 0


def test_the_bubble_is_that_of_the_schedule():
    # Stages are equal, so that a step takes m + (p - 1) / v times as long as one micro-batch on one stage.
    # Fewer micro-batches than stages wait for their own last stage: a single one takes p.
    machines = read_machines("64xh100-80")
    for pp, interleave, batch in [
        (4, 1, 64), (4, 2, 64), (8, 4, 128), (8, 1, 512), (8, 4, 32), (4, 2, 16), (4, 1, 16), (8, 4, 8),
        (8, 1, 8),
    ]:  # fmt: skip
        layout = Layout(dp=64 // pp, pp=pp, interleave=interleave)
        count = batch // layout.dp
        found = terms(Training(dense(64), 2048, batch), layout, machines)["products"]
        one = terms(Training(dense(64), 2048, layout.dp), Layout(dp=64), machines)["products"]
        assert found == pytest.approx(one / pp * (max(count, pp) + (min(count, pp) - 1) / interleave))
        # Where the gradients of weights fill it: as long as `interleaved_order` says, in thirds.
        filled = dataclasses.replace(layout, pipeline="zero-bubble")
        found = terms(Training(dense(64), 2048, batch), filled, machines)["products"]
        late = 2 * count + max(count, pp) + (pp - 1) / interleave
        crossing = 2 * pp + (2 * count - 1) / interleave
        assert found == pytest.approx(one / pp * max(late, crossing) / 3)


def test_full_recomputation_costs_one_more_forward_pass():
    training, machines = Training(dense(), 4096, 64), read_machines("8xh100-80")
    plain, again = (
        terms(training, Layout(dp=8, recompute=how), machines)["products"] for how in ("none", "full")
    )
    assert again == pytest.approx(4 / 3 * plain, rel=1e-3)  # the gradients sum over other lengths


def test_gradients_are_added_up_for_every_micro_batch():
    training, machines = Training(dense(), 4096, 64), read_machines("8xh100-80")
    many, few = (
        terms(training, Layout(dp=8, micro_batch=micro), machines, "megatron-bridge") for micro in (1, 4)
    )
    assert many["accumulation"] == pytest.approx(4 * few["accumulation"])
    # Each product sums over the tokens of a micro-batch, too.
    assert few["products"] < many["products"] < 1.05 * few["products"]


def test_graphs_take_gaps_between_kernels_away_and_overlap_takes_its_share_of_collectives():
    training, machines = Training(mixture(experts=64), 4096, 64), read_machines("8xgb200")
    layout = Layout(dp=4, tp=2, ep=8)
    plain, graphs = (
        terms(training, layout, machines, name) for name in ("megatron-bridge", "megatron-bridge-graphs")
    )
    for name in ("launches", "expert_launches"):
        assert graphs[name] == pytest.approx(0.05 * plain[name])
    alone, beside = (terms(training, layout, machines, name) for name in ("torchtitan", "torchtitan-async"))
    assert beside["tensor"] == beside["tensor_beside"] == pytest.approx(alone["tensor"] / 2)


def test_keys_that_are_repeated_for_every_head_take_longer_around_the_ring():
    training, machines = Training(dense(), 65536, 8), faster(read_machines("8xh100-80"), "intra_latency_s", 0)
    once, repeated = (
        terms(training, Layout(dp=2, cp=4), machines, name)["context"] for name in ("nemo", "torchtitan")
    )
    assert repeated == pytest.approx(dense().layers[0].attention.heads / 8 * once)


def test_causal_attention_grows_with_the_square_and_gains_on_the_way():
    machines = read_machines("8xh100-80")
    short, long = (
        terms(Training(dense(), seq, 64), Layout(dp=8), machines)["attention"] for seq in (4096, 65536)
    )
    assert 150 < long / short < 256  # sixteen times the length, at a better share of the peak


def test_fully_sharded_parameters_are_gathered_for_every_micro_batch():
    machines = read_machines("64xa100-80")
    exchanged = [
        terms(Training(dense(), 2048, 64 * count), Layout(dp=64, zero=3), machines, "fsdp")["shards"]
        for count in (1, 2, 4)
    ]
    assert exchanged[1] == pytest.approx(2 * exchanged[0])
    assert exchanged[2] == pytest.approx(4 * exchanged[0])


def test_sharding_inside_nodes_keeps_gathers_off_the_network():
    training, machines = Training(dense(), 4096, 128), read_machines("64xa100-80")
    whole, inside = (
        terms(training, Layout(dp=64, zero=3, shard=shard), machines, "fsdp")["shards"] for shard in (0, 8)
    )
    assert inside < whole


def test_a_head_size_that_is_no_multiple_of_eight_is_slow_in_separate_kernels():
    training = Training(dense(8, 4800, 32, 32, 19200, 50304, head_dim=150), 2048, 8)
    assert terms(training, Layout(dp=8), read_machines("8xa100-80"), "deepspeed")["odd_heads"] > 0
    even = Training(dense(8, 4096, 32, 32, 16384, 50304), 2048, 8)
    assert terms(even, Layout(dp=8), read_machines("8xa100-80"), "deepspeed")["odd_heads"] == 0


def faster(cluster, field, factor=2):
    """Return a cluster with another rate of its nodes or of their devices."""
    node = cluster.node
    changed = {field: factor * getattr(node.gpu if field.startswith("memory") else node, field)}
    if field.startswith("memory"):
        changed = {"gpu": dataclasses.replace(node.gpu, **changed)}
    return homogeneous(dataclasses.replace(node, **changed), cluster.n_nodes, cluster.network)


@pytest.mark.parametrize(
    "field", ["memory_bandwidth_bytes_per_s", "intra_bandwidth_bytes_per_s", "nic_bandwidth_bytes_per_s"]
)
def test_a_faster_device_is_never_slower(field):
    training, base = Training(mixture(experts=64), 4096, 512), read_machines("64xh100-80")
    better = faster(base, field)
    for layout in (Layout(dp=8, tp=4, pp=2, ep=8), Layout(dp=64, zero=3, ep=64), Layout(dp=32, cp=2)):
        pricers = (Pricer(training, machines, software("megatron-bridge")) for machines in (base, better))
        slow, fast = (pricer.price(layout).step_s for pricer in pricers)
        assert fast <= slow


def translator(seq=0):
    """Return an encoder, of fixed length if ``seq`` is given, and a decoder that attends to it."""
    own, other = Attention(16, 16, 64, 64), Attention(16, 16, 64, 64, is_causal=False)
    ffn = FeedForward(4096, False)
    encoder = Layers(12, other, ffn, seq=seq)
    return Architecture(
        "translator", "t5", 1024, (encoder, Layers(12, own, ffn, cross_attention=other)), 32000
    )


def test_cross_attention_sees_the_tokens_of_the_encoder():
    machines = read_machines("8xa100-80")
    short, long = (
        terms(Training(translator(seq), 512, 64), Layout(dp=8), machines)["attention"] for seq in (1500, 3000)
    )
    assert long > short
    assert translator(3000).flop_per_sample(512) > translator(1500).flop_per_sample(512)


def test_what_of_a_run_is_not_as_one_may_think_is_said():
    long = dataclasses.replace(dense(), max_seq=8192)
    assert Training(long, 8192, 8).remarks == ()
    assert Training(long, 16384, 8).remarks == (
        "16384 tokens are more than the 8192 of the configuration of dense",
    )
    (said,) = Training(translator(1500), 448, 8).remarks
    assert "translator has 1500 tokens in some layers" in said


# --- Memory ---


def test_states_have_sixteen_bytes_a_parameter_and_are_divided_as_the_stage_says():
    model = dense()
    training = Training(model, 1024, 8)
    for zero, expected in [
        (0, 2 + 2 + 12),
        (1, 2 + 2 + 12 / 8),
        (2, 2 + (2 + 12) / 8),
        (3, (2 + 2 + 12) / 8),
    ]:
        found = memory(training, Layout(dp=8, zero=zero))
        states = found["parameters"] + found["gradients"] + found["optimizer"]
        assert states == pytest.approx(expected * model.parameters)


@pytest.mark.parametrize(
    ("n_gpus", "seq", "layout", "printed_gib"),
    [
        # torchtitan, benchmarks/llama3_h100_202412: reserved memory of Llama 3 8B, compiled.
        (8, 8192, "fsdp mb2 recompute=operators", 77.0),
        (128, 8192, "fsdp mb2 recompute=operators", 62.0),
        (8, 32768, "fsdp mb1 recompute=full", 83.9),
        (8, 65536, "cp2 fsdp mb1 recompute=full", 84.2),
    ],
)
def test_memory_is_near_what_was_printed(n_gpus, seq, layout, printed_gib):
    one = parse_layout(layout, n_gpus)
    found = memory(Training(dense(), seq, one.dp * one.micro_batch), one)
    assert sum(found.values()) / GIB == pytest.approx(printed_gib, rel=0.06)


def test_recomputation_and_pipelines_change_what_is_kept():
    training = Training(dense(), 8192, 64)
    kept = [
        memory(training, Layout(dp=8, recompute=how))["activations"]
        for how in ("none", "selective", "operators", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    # The first of p stages keeps p micro-batches of its p-th part.
    flat = memory(training, Layout(dp=8))["activations"]
    assert memory(training, Layout(dp=2, pp=4))["activations"] == pytest.approx(flat, rel=0.01)


@pytest.mark.parametrize("recompute", ["selective", "operators", "full"])
def test_half_of_the_layers_save_half_of_what_all_do(recompute):
    training = Training(dense(), 8192, 64)
    none, half, all_ = (
        memory(training, Layout(dp=8, recompute=how, recompute_share=share))["activations"]
        for how, share in (("none", 1.0), (recompute, 0.5), (recompute, 1.0))
    )
    # A layer that is computed again is there as a whole while it is.
    working = half - (none + all_) / 2
    assert working == pytest.approx(
        0 if recompute != "full" else (half - all_ + none - half) / 62, rel=0.2, abs=1
    )


def test_states_of_experts_are_divided_between_the_devices_that_hold_the_same():
    model = mixture()
    training = Training(model, 1024, 16)
    experts = 32 * model.layers[0].ffn.expert_parameters(4096)
    for layout, n_held, n_same in [
        (Layout(dp=16, ep=8, zero=1), experts / 8, 2),
        (Layout(dp=8, tp=2, ep=8, zero=1), experts / 8, 2),
        (Layout(dp=16, ep=1, zero=1), experts, 16),
        (Layout(dp=8, tp=2, ep=1, zero=1), experts / 2, 8),
    ]:
        whole = memory(training, layout)["optimizer"]
        rest = memory(training, layout)["parameters"] / 2 - n_held
        assert whole == pytest.approx(12 * (n_held / n_same + rest / layout.dp))


def test_experts_that_are_dealt_out_are_neither_gathered_nor_exchanged():
    machines, layers = read_machines("16xh100-80"), 32
    model = mixture(layers, experts=16)
    experts = model.layers[0].ffn.expert_parameters(4096)
    other = model.layers[0].parameters(4096) - experts
    training = Training(model, 4096, 64)
    ends = 32000 * 4096
    # Fully sharded: two layers at once without a pipeline, or one and the head; the whole stage and its
    # gradients with one.
    for ep, n_experts in [(1, 16), (8, 2), (16, 0)]:
        gathered = memory(training, Layout(dp=16, ep=ep, zero=3))["gathered"]
        layer = other + experts / 16 * n_experts
        assert gathered == pytest.approx(2 * (layer + max(layer, ends)), rel=1e-3)
    for ep, n_experts in [(1, 16), (4, 4), (8, 0)]:
        gathered = memory(training, Layout(dp=8, pp=2, ep=ep, zero=3))["gathered"]
        assert gathered == pytest.approx(
            6 * (layers / 2 * (other + experts / 16 * n_experts) + ends), rel=1e-3
        )
    for name, zero in [("gradients", 0), ("gradients", 1), ("shards", 3)]:
        whole, half, none = (
            terms(training, Layout(dp=16, ep=ep, zero=zero), machines)[name] for ep in (1, 8, 16)
        )
        assert whole > half > none > 0
        without = Training(dataclasses.replace(model, layers=mixture(layers, 1, 1).layers), 4096, 64)
        # What is left is as much as that of a model with all but the experts, of which it has one.
        assert none < terms(without, Layout(dp=16, zero=zero), machines)[name]


@pytest.mark.parametrize(
    ("n_groups", "groups_per_token", "ep", "nodes"),
    [
        (1, 1, 64, 8),  # 64 devices are eight nodes
        (8, 4, 64, 4),  # a group a node
        (16, 4, 64, 8 * (1 - (7 / 8) ** 4)),  # two groups a node: those that four groups meet by chance
        (4, 2, 64, 4),  # two nodes a group
        (8, 1, 64, 1),
        (8, 4, 8, 1),
    ],
)
def test_tokens_go_to_the_nodes_of_their_groups_of_experts(n_groups, groups_per_token, ep, nodes):
    machines = faster(read_machines("64xh100-80"), "intra_latency_s", 0)
    machines = dataclasses.replace(machines, network=dataclasses.replace(machines.network, latency_s=0.0))
    model = mixture(experts=64, per_token=8)
    ffn = dataclasses.replace(model.layers[0].ffn, n_groups=n_groups, groups_per_token=groups_per_token)
    model = dataclasses.replace(model, layers=(dataclasses.replace(model.layers[0], ffn=ffn),))
    training = Training(model, 4096, 64)
    found_s, faster_s = (
        terms(
            training,
            Layout(dp=64, ep=ep, zero=1),
            faster(machines, "nic_bandwidth_bytes_per_s", factor),
        )["dispatch"]
        for factor in (1, 2)
    )
    across_s = 2 * (found_s - faster_s)
    sent = 32 * 2 * 2 * 2 * 4096 * 4096  # bytes per layer and copy, there and back, forward and backward
    share = 0 if ep == 8 else 7 / 8  # of the nodes, all but one's own
    visited = nodes * (1 - (1 - 1 / nodes) ** 8)
    network = 0.8 * machines.node.nic_bandwidth_bytes_per_s
    assert across_s == pytest.approx(sent * visited * share / network, rel=1e-6, abs=1e-9)
    devices = min(8, max(1, ep * groups_per_token / n_groups))
    link = 0.6 * machines.node.intra_bandwidth_bytes_per_s
    assert found_s - across_s == pytest.approx(sent * devices * 7 / 8 / link, rel=1e-6)


def test_experts_that_nothing_deals_out_are_cut_like_dense_layers():
    training, machines = Training(mixture(), 4096, 16), read_machines("16xh100-80")
    whole, cut = (terms(training, Layout(dp=16 // tp, tp=tp, zero=0), machines) for tp in (1, 2))
    # As many operations on twice the devices for half of the samples each, and one more exchange per layer.
    assert cut["experts"] == pytest.approx(whole["experts"], rel=0.1)
    dense_cut = terms(Training(dense(), 4096, 16), Layout(dp=8, tp=2, zero=0), machines)
    assert cut["tensor"] + cut["tensor_beside"] == pytest.approx(
        dense_cut["tensor"] + dense_cut["tensor_beside"], rel=0.01
    )
    dealt = terms(training, Layout(dp=8, tp=2, ep=8, zero=0), machines)
    assert dealt["tensor"] + dealt["tensor_beside"] < cut["tensor"] + cut["tensor_beside"]
    assert (cut["dispatch"], dealt["dispatch"] > 0) == (0, True)


def test_what_python_runs_operator_by_operator_takes_time_and_memory(tmp_path):
    machines = read_machines("8xh100-80")

    def cost(model, precision="bf16", **layout):
        training, at = (
            Training(model, 2048, 8, precision),
            Layout(dp=8 // layout.get("tp", 1), zero=0, **layout),
        )
        return (
            terms(training, at, machines, "transformers")["elements"],
            memory(training, at, "transformers")["activations"],
        )

    gpt = {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 4,
        "n_head": 16,
        "n_positions": 2048,
        "vocab_size": 50257,
    }
    costs = {}
    for activation in ("gelu_new", "gelu"):
        (tmp_path / "config.json").write_text(json.dumps(gpt | {"activation_function": activation}))
        costs[activation] = cost(read_model(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps(gpt))
    assert cost(read_model(tmp_path / "config.json")) == costs["gelu_new"]  # what transformers takes then
    assert all(many > 1.5 * one for many, one in zip(costs["gelu_new"], costs["gelu"], strict=True))
    # Norms are in 32 bits in any case; without autocast nothing is cast, and all else is twice as large.
    wide, mixed = (cost(dense(), precision)[1] for precision in ("fp32", "bf16"))
    assert mixed < wide < 2 * mixed
    # Without sequence parallelism, every device of a tensor group has all norms.
    alike, parted = (cost(dense(), tp=8, sequence_parallel=one)[0] for one in (False, True))
    assert parted == pytest.approx(cost(dense())[0], rel=0.01)
    assert alike > 2 * parted


# --- Plans ---


def test_the_best_plan_is_the_fastest_of_all_that_fit():
    pricer = Pricer(Training(dense(), 8192, 128), read_machines("16xa100-80"), software("megatron-bridge"))
    found, whole = plan(pricer, 5), plan(pricer, 1000)
    every = [pricer.price(one) for one in layouts(pricer.training, pricer.cluster)]
    every = [one for one in every if one.layout.recompute != "selective"]  # fused kernels keep no scores
    feasible = sorted(one.step_s for one in every if one.is_feasible)
    assert sorted(one.step_s for one in whole.best) == pytest.approx(feasible)
    assert (found.n_tried, found.n_feasible) == (len(every), len(feasible))
    n_ties = len(found.ties)
    assert [one.layout for one in found.best] == [one.layout for one in whole.best[:5]]
    assert found.regrets == whole.regrets[:5]
    assert np.isnan(whole.regrets[n_ties:]).all()
    assert [one.layout for one in whole.best[:n_ties]] == list(found.ties) == list(whole.ties)
    assert list(whole.regrets[:n_ties]) == sorted(whole.regrets[:n_ties])
    assert feasible[0] == pytest.approx(min(one.step_s for one in whole.best[:n_ties]))
    assert [one.step_s for one in whole.best[n_ties:]] == sorted(one.step_s for one in whole.best[n_ties:])
    assert found.chances[0] == 0.5
    assert all(0 < chance <= 0.5 for chance in found.chances)
    assert all(chance < 0.11 for chance in whole.chances[n_ties:])
    for one in found.best:
        assert sum(one.terms_s.values()) == pytest.approx(one.step_s)
        assert one.total_memory_bytes <= pricer.cluster.gpu.sustained.memory_bytes
        assert one.low_s < one.step_s < one.high_s


def test_every_layout_that_is_tried_goes_with_model_and_cluster():
    training, machines = Training(mixture(experts=12), 16384, 48), read_machines("48xh100-80")
    found = list(layouts(training, machines))
    assert len({one.text + str(one.dp) for one in found}) == len(found)
    for one in found:
        assert one.n_gpus == 48
        assert misfit(training.model, one) == ""
        assert one.microbatches(48) >= (one.pp if one.interleave > 1 else 1)


@pytest.mark.parametrize(("seq", "degrees"), [(32768, {1, 2, 4}), (32769, {1, 3}), (32770, {1, 2})])
def test_context_parallelism_divides_samples(seq, degrees):
    training, machines = Training(dense(4), seq, 48), read_machines("48xh100-80")
    assert {one.cp for one in layouts(training, machines)} == degrees
    if seq % 16:
        pricer = Pricer(training, machines, software("megatron-bridge"))
        with pytest.raises(InputError, match=f"parallelism over 16 does not divide samples of {seq} tokens"):
            pricer.price(parse_layout("cp16 mb1", 48))


@pytest.mark.parametrize(("seq", "degrees"), [(4096, {2, 4, 8}), (4098, {2}), (4097, set())])
def test_norms_are_divided_where_devices_have_equally_many_tokens(seq, degrees):
    found = list(layouts(Training(dense(4), seq, 48), read_machines("48xh100-80")))
    assert {one.tp for one in found} == {1, 2, 4, 8}
    assert {one.tp for one in found if one.sequence_parallel} == degrees


def test_a_model_that_fits_nowhere_is_refused_with_what_it_needs():
    pricer = Pricer(
        Training(dense(126, 16384, 128, 8, 53248), 8192, 8), read_machines("8xl4"), software("fsdp")
    )
    with pytest.raises(InfeasiblePlanError, match=r"none of .* layouts fits: the smallest, .* GiB"):
        plan(pricer)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp=1, tp=16), "for 16 GPUs; the cluster has 8"),
        (Layout(dp=1, pp=8, interleave=8), "8 stages of 8 chunks for 32 layers"),
        (Layout(dp=8, ep=8), "but the model has none"),
        (Layout(dp=8, micro_batch=3), "not a multiple of 24"),
    ],
)
def test_a_layout_that_does_not_go_with_the_run_is_refused(layout, words):
    pricer = Pricer(Training(dense(), 2048, 64), read_machines("8xh100-80"), software("fsdp"))
    with pytest.raises(InputError, match=words):
        pricer.price(layout)


def test_a_layout_as_plain_values_has_what_it_is_made_of():
    pricer = Pricer(
        Training(dense(), 8192, 64),
        dataclasses.replace(read_machines("8xh100-80"), usd_per_gpu_hour=3.6),
        software("torchtitan"),
    )
    one = pricer.price(Layout(dp=8, zero=3))
    found = describe(one)
    assert found["usd_per_million_tokens"] == pytest.approx(3.6 / 3600 / one.tokens_per_s_per_gpu * 1e6)
    assert sum(found["terms_s"].values()) == pytest.approx(found["step_s"])


def test_measured_rows_tell_layouts_apart():
    pricer = Pricer(Training(dense(), 8192, 256), read_machines("64xh100-80"), software("megatron-bridge"))
    texts = ("tp2 mb1", "tp8 mb1", "tp4 pp2 mb1", "fsdp mb1", "tp2 pp4 mb1", "pp4 mb1 recompute=full")
    rows = [
        (pricer.training, one, pricer.cluster, pricer.price(one).step_s)
        for one in (parse_layout(text, 64) for text in texts)
    ]
    refined = calibrated_by(pricer, rows * 5)
    pair = Grid.of([parse_layout(text, 64) for text in ("tp2 mb1", "tp8 mb1")])
    known = [one.calibrated.covariance for one in (pricer, refined)]
    apart = np.diff(slopes_of(pricer.parts_s(pair)), axis=0)[0]
    assert apart @ known[1] @ apart < apart @ known[0] @ apart


def test_more_devices_take_less_time():
    table = size_clusters(
        Training(dense(), 8192, 512), "h100-80", software("megatron-bridge"), tokens=1e12, most_gpus=512,
        usd_per_gpu_hour=2.0,
    )  # fmt: skip
    assert table["days"].is_monotonic_decreasing
    assert (table["low_days"] < table["days"]).all()
    assert table["usd"].tolist() == pytest.approx((table["days"] * 24 * table["n_gpus"] * 2.0).tolist())


# --- Measured rows ---


def test_rows_of_ones_own_take_the_error_away_and_narrow_the_interval(tmp_path):
    pricer = Pricer(Training(dense(), 8192, 256), read_machines("64xh100-80"), software("megatron-bridge"))
    truth = {
        text: 1.4 * pricer.price(parse_layout(text, 64)).step_s
        for text in ("tp4 mb1", "tp2 pp4 mb1", "fsdp mb1")
    }
    path = tmp_path / "rows.csv"
    rows = [f"64,{text},{step_s}" for text, step_s in list(truth.items())[:2]]
    path.write_text("n_gpus,layout,step_s\n" + "\n".join(rows) + "\n")
    refined = calibrated_by(pricer, read_measured(path, pricer.training, pricer.cluster))
    before, after = (one.price(parse_layout("fsdp mb1", 64)) for one in (pricer, refined))
    assert abs(after.step_s / truth["fsdp mb1"] - 1) < 0.1 < abs(before.step_s / truth["fsdp mb1"] - 1)
    assert after.high_s / after.low_s < before.high_s / before.low_s


TEN = (
    "tp2 mb1", "tp4 mb1", "tp8 mb1", "fsdp mb1", "tp2 pp2 mb1", "tp4 pp2 mb1", "tp2 pp4 mb1", "tp8 pp2 mb1",
    "pp4 mb1 recompute=full", "tp4 pp4 mb1",
)  # fmt: skip


def scattered(factors):
    """Return a pricer, and the same one refined by steps of ten layouts that are off by factors."""
    pricer = Pricer(Training(dense(), 8192, 256), read_machines("64xh100-80"), software("megatron-bridge"))
    tried = [parse_layout(text, 64) for text in TEN]
    rows = [
        (pricer.training, one, pricer.cluster, factor * pricer.price(one).step_s)
        for one, factor in zip(tried, factors, strict=True)
    ]
    return pricer, calibrated_by(pricer, rows)


def test_rows_that_scatter_widen_intervals_as_far_as_they_do_and_one_odd_row_hardly_does():
    _, even = scattered(np.full(10, 1.2))
    assert even.calibrated.scatter == 1.0
    signs = np.resize([1, -1, -1, 1, 1], 10)
    _, wide = scattered(np.exp(0.3 * signs))
    assert wide.calibrated.scatter > 2
    near, far = (refined.price(parse_layout("tp2 pp4 mb2", 64)) for refined in (even, wide))
    assert far.high_s / far.low_s > 1.3 * near.high_s / near.low_s
    _, odd = scattered(1.2 * np.where(np.arange(10) == 3, 2.0, 1.0))
    assert odd.calibrated.scatter < 1.2


@pytest.mark.parametrize("spread", [0.07, 0.25])
def test_intervals_hold_rows_to_come_however_far_rows_scatter(spread):
    # The layout that is left out is one that scatters as the others do.
    inside = []
    for seed in range(60):
        off = np.exp(spread * np.random.default_rng(seed).standard_normal(10))
        pricer, refined = scattered(off)
        others = calibrated_by(pricer, refined.measured[1:])
        _, layout, _, step_s = refined.measured[0]
        inside.append(others.price(layout).low_s <= step_s <= others.price(layout).high_s)
    assert np.mean(inside) >= 0.8


def test_rows_of_one_model_leave_open_what_the_host_takes_with_another():
    small, other = (
        dense(n_layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048),
        dense(n_layers=6, hidden=512, heads=8, kv_heads=8, ffn=2048),
    )
    machines, stack, layout = read_machines("1xh100-80"), software("transformers"), parse_layout("mb1", 1)
    pricer = Pricer(Training(small, 1024, 1), machines, stack)
    row = (pricer.training, layout, machines, 1.3 * pricer.price(layout).step_s)
    same = calibrated_by(pricer, [row])
    another = dataclasses.replace(same, training=dataclasses.replace(same.training, model=other))
    assert same.has_rows(same.training) and not another.has_rows(another.training)
    # Of such a step most is the host: the same layout is known for one model, and open for the other.
    one, two = (
        np.log(priced.high_s / priced.low_s) for priced in (same.price(layout), another.price(layout))
    )
    assert two > 3 * one
    # Layouts of one model share it, so that they can be told apart nonetheless.
    tried = [layout, parse_layout("mb1 recompute=full", 1)]
    known, opened = same.joint(tried), another.joint(tried)
    assert opened.covariance[0, 0] > 9 * known.covariance[1, 1]
    assert opened.comparison_variance < 0.1 * opened.covariance[0, 0]
    # Large steps, in which the host hardly matters, are as before.
    large = dataclasses.replace(
        another, training=dataclasses.replace(another.training, model=dense(), global_batch=64)
    )
    parts_s = large.parts_s(Grid.of([layout]))
    assert large.spread(parts_s) == pytest.approx(large.calibrated.spread(parts_s, has_rows=True), rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layout,step_s\nmb1,2\n", "column 'n_gpus' is missing"),
        ("n_gpus,layout,step_s,colour\n8,mb1,2,red\n", "unknown column 'colour'"),
        ("n_gpus,layout,step_s\n8,mb1,-2\n", "row 1, column 'step_s': found '-2'"),
        ("n_gpus,layout,step_s\n8,mb1,nan\n", "row 1, column 'step_s': found 'nan'"),
        ("n_gpus,layout,step_s\neight,mb1,2\n", "row 1, column 'n_gpus': found 'eight'"),
        ("n_gpus,layout,step_s\n8,tp3,2\n", "row 1: layout 'tp3': 8 GPUs are not a multiple"),
        (
            "n_gpus,layout,step_s\n8,ep8,2\n",
            "row 1: layout 'ep8 zero1 mb1': experts over 8 devices, but the model",
        ),
        ("n_gpus,layout,step_s\n8.5,mb1,2\n", "row 1, column 'n_gpus': found '8.5'"),
        ("n_gpus,layout,step_s,precision\n8,mb1,2,bf17\n", "row 1: unknown precision 'bf17'"),
        ("n_gpus,layout,step_s,batch\n8,mb1,2,9\n", "row 1: layout 'zero1 mb1': a batch of 9"),
        ("", "rows.csv"),
    ],
)
def test_broken_rows_are_refused_with_their_place(tmp_path, text, words):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    pricer = Pricer(Training(dense(), 2048, 64), read_machines("8xh100-80"), software("fsdp"))
    with pytest.raises(TraceError) as error:
        read_measured(path, pricer.training, pricer.cluster)
    assert words in str(error.value)


@pytest.fixture(scope="module")
def public(published_dir):
    """Return the published rows that can be used, and the others."""
    folder = published_dir / "public-rows"
    if not folder.is_dir():
        pytest.skip("there are no public rows")
    return read_rows(sorted(folder.glob("*.csv")))


def test_every_published_row_is_used_or_refused_with_a_reason(public):
    rows, refused = public
    assert len(rows) + len(refused) == 1303
    assert all(one.reason for one in refused)
    assert len(rows) >= 430
    assert all(0 < row.mfu <= 0.8 and row.step_s > 0 for row in rows)


def test_the_flop_of_a_source_are_counted_as_it_counts_them(tmp_path):
    # At a million tokens nearly all is attention, of which causal masks leave half.
    cells = {"seq": 1048576, "iteration_time_s": "", "tflops_per_gpu": 500, "gpu": "H100-SXM-80"}
    steps = {}
    for source in ("torchtitan", "nemo-longseq"):
        write_rows(tmp_path / "rows.csv", **cells, source=source)
        used, refused = read_rows([tmp_path / "rows.csv"])
        assert not refused
        steps[source] = used[0].step_s
    assert 1.9 < steps["nemo-longseq"] / steps["torchtitan"] < 2


def test_a_table_without_the_columns_of_rows_is_no_table_of_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("source,model\na,b\n")
    with pytest.raises(TraceError, match=r"rows\.csv: lacks the columns address"):
        read_rows([tmp_path / "rows.csv"])


def test_what_a_document_beside_a_table_states_is_not_assumed(public):
    rows, _ = public
    found = {row.training.model.name: row for row in rows if row.source == "megatron-sc21"}
    assert not any("a micro-batch of 1" in row.assumed for row in found.values())
    layouts = {name: (row.layout.micro_batch, row.layout.interleave) for name, row in found.items()}
    assert layouts["gpt-24x2304"] == (16, 1)  # cells of examples/sc21/run_table_1.sh
    assert layouts["gpt-40x6144"] == (8, 1)
    assert layouts["gpt-60x10240"] == (2, 3)  # 15 layers per stage in chunks of 5
    assert layouts["gpt-105x20480"] == (1, 3)
    assert layouts["gpt-128x25600"] == (1, 1)


def test_the_page_on_scaling_has_the_layouts_that_documents_state(root):
    presets = root / "src/makespan/planning/presets/register.toml"
    stated = tomllib.loads(presets.read_text(encoding="utf-8"))["beside"]["megatron-sc21"]
    runs = pd.read_csv(root / "docs/background/scaling.csv").query("table == 'sc21'")
    assert len(runs) == len(stated)
    for run in runs.to_dict("records"):
        known = stated[f"gpt-{run['layers']:.0f}x{run['hidden']:.0f}"]
        layout = parse_layout(run["layout"], run["n_gpus"])
        assert (layout.micro_batch, layout.interleave) == (known["micro_batch"], known.get("vpp", 1))


def test_what_rows_do_not_say_is_assumed_in_words(tmp_path):
    write_rows(tmp_path / "rows.csv", recompute="recipe", micro_batch="", zero_stage="")
    rows, refused = read_rows([tmp_path / "rows.csv"])
    assert not refused
    assert {row.assumed for row in rows} == {("a micro-batch of 1", "no recomputation", "no sharded states")}
    code, text = ran("validate-public", str(tmp_path))
    assert code == 0
    assert re.search(r"Assumed, where rows do not say:\n +6 +fms-fsdp: a micro-batch of 1\n", text)


def test_steps_are_predicted_better_than_by_one_utilisation_and_one_scale(public):
    rows, _ = public
    mean = judge(rows, seeds=(1, 2)).groupby("drawn").mean(numeric_only=True)
    assert mean.loc[0, "error"] <= 0.16
    assert 0.9 <= mean.loc[0, "bias"] <= 1.1
    for drawn in (1, 3, 5):
        assert (
            mean.loc[drawn, "error"] < mean.loc[drawn, "scale_error"] < mean.loc[drawn, "utilisation_error"]
        )
    assert mean.loc[3, "error"] < 0.11
    assert (mean["covered"] > 0.75).all()


def test_runs_whose_memory_is_stated_in_full_are_called_possible(public):
    rows, _ = public
    judged = (
        "llm-foundry",
        "fms-fsdp",
        "dle-bert",
        "bigscience",
        "megatron-sc21",
        "megatron-seqsel",
        "torchtitan",
    )
    for row in rows:
        if row.source in judged:
            used = memory_table(row.training, Grid.of([row.layout]), row.stack).sum()
            assert used <= row.cluster.gpu.sustained.memory_bytes, (row.address, row.layout.text)


def test_memory_is_judged_by_what_sources_state(public):
    table = judge_memory(public[0]).set_index("source")
    # Only runs that do not say what they compute again are called impossible.
    assert (table["impossible"] == table["impossible_unsaid"]).all()
    stated = table[table["stated"] > 0]
    assert stated["kind"].to_dict() == {"torchtitan": "reserved"}
    assert abs(stated.loc["torchtitan", "signed_error"]) < 0.06
    assert stated.loc["torchtitan", "error"] < 0.09


def test_memory_that_is_stated_is_compared_with_what_is_predicted(tmp_path):
    write_rows(tmp_path / "rows.csv", peak_mem_gib=40, source="fms-fsdp")
    rows, _ = read_rows([tmp_path / "rows.csv"])
    (judged,) = judge_memory(rows).to_dict("records")
    used = [memory_table(row.training, Grid.of([row.layout]), row.stack).sum() / GIB for row in rows]
    assert (judged["rows"], judged["stated"], judged["kind"]) == (len(rows), len(rows), "allocated")
    assert judged["signed_error"] == pytest.approx(sum(used) / len(used) / 40 - 1)
    text = judged_text(judge(rows), rows, [])
    assert f"fms-fsdp: 0 of {len(rows)} called impossible; {len(rows)} state allocated memory" in text


def test_frozen_weights_have_no_gradients():
    whole, machines = Training(dense(), 4096, 64), read_machines("8xh100-80")
    frozen = dataclasses.replace(whole, is_adapter=True)
    layout = Layout(dp=8)
    before, after = (terms(one, layout, machines) for one in (whole, frozen))
    for name in ("gradients", "accumulation", "optimizer"):
        assert before[name] > 0
        assert after[name] == 0
    assert after["products"] == pytest.approx(2 / 3 * before["products"], rel=0.01)
    assert after["attention"] == before["attention"]
    held = memory(frozen, layout)
    assert held["gradients"] == held["optimizer"] == 0 < held["parameters"]


def test_fine_tuning_is_read_with_its_sequences_and_frozen_weights(tmp_path):
    write_rows(tmp_path / "rows.csv", source="nemo-24.07", note="LoRA", gpu="H100-SXM-80")
    rows, _ = read_rows([tmp_path / "rows.csv"])
    assert all(row.training.is_adapter for row in rows)
    assert {run.attention.window for run in rows[0].training.model.layers} == {64}
    assert "packed sequences of 128 tokens" in rows[0].assumed


def test_the_shipped_factors_are_those_of_published_rows_and_our_own(public):
    from makespan.planning import fit_knowledge

    rows, _ = public
    own, _ = read_rows([Path(__file__).parents[2] / "examples/one_gpu/measured.csv"])
    fitted, shipped = fit_knowledge([*rows, *own]), knowledge()
    assert np.abs(fitted.shared - shipped.shared).max() < 0.01
    assert fitted.stacks.keys() == shipped.stacks.keys()
    for name, values in fitted.stacks.items():
        assert np.abs(values - shipped.stacks[name]).max() < 0.01
    assert fitted.devices.keys() == shipped.devices.keys()


def test_machines_need_whole_numbers():
    with pytest.raises(InputError, match="n_gpus is True"):
        cluster_of("h100-80", True)


# --- The command line ---


def ran(*words):
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


def test_the_commands_print_plans_sizes_and_one_layout():
    code, text = ran("plan", "llama3-8b", "8xh100-80", "--seq", "8192", "--batch", "128", "--top", "2")
    assert code == 0
    assert "layouts fit; the best to choose:" in text and "Where the time goes:" in text
    code, text = ran("plan", "llama3-8b", "8xh100-80", "--seq", "8192", "--batch", "128", "--csv")
    assert code == 0
    table = pd.read_csv(io.StringIO(text))
    assert len(table) == 5
    assert table["expected_regret"].is_monotonic_increasing
    code, text = ran("plan", "llama3-8b", "8xh100-80", "--layout", "tp8 mb1", "--json")
    assert code == 0
    assert json.loads(text)["layout"] == "tp8 zero1 mb1"
    code, text = ran("size", "llama3-8b", "--tokens", "1e11", "--deadline", "10", "--most", "64", "--json")
    assert code == 0
    assert {row["enough"] for row in json.loads(text)} == {True, False}


SMALL = ("size", "llama3-8b", "--device", "a100-40", "--tokens", "1e11", "--batch", "510")


@pytest.mark.parametrize(
    ("words", "numbers", "said"),
    [
        (("--most", "6"), [4, 6], ""),
        (("--most", "64", "--deadline", "200"), [4, 8, 16, 32, 64], "4 GPUs are enough (*).\n"),
        (
            ("--most", "6", "--deadline", "60"),
            [4, 5, 6],
            "6 GPUs are enough (*).\nBut the interval goes up to 66.3 days.\n",
        ),
        (
            ("--most", "16", "--deadline", "60"),
            [4, 5, 6, 7, 8, 16],
            "6 GPUs are enough (*).\nBut the interval goes up to 66.3 days. 8 GPUs are enough even then.\n",
        ),
        (
            ("--most", "5", "--deadline", "60"),
            [4, 5],
            "No number of GPUs that was tried is enough (powers of two, 5, and numbers in between around "
            "the\ndeadline): allow more days",
        ),
        (
            ("--most", "4", "--budget", "25000", "--price", "2"),
            [4],
            "4 GPUs are enough (*).\n",
        ),
        (
            ("--most", "4", "--budget", "20000", "--price", "2"),
            [4],
            "4 GPUs are enough (*).\nBut the interval goes up to $",
        ),
    ],
)
def test_numbers_of_gpus_between_powers_of_two_may_be_enough(words, numbers, said):
    code, text = ran(*SMALL, *words)
    assert code == 0, text
    assert [row["n_gpus"] for row in json.loads(ran(*SMALL, *words, "--json")[1])] == numbers
    assert said in text
    assert ("But the interval" in text) is ("But the interval" in said)


def test_whole_nodes_are_tried_in_eighths_of_a_power_of_two():
    training = Training(read_model("llama3-8b"), 8192, 1024)
    table = size_clusters(
        training, "h100-80", software("megatron-bridge"), tokens=1e12, most_gpus=64, most_days=30.0
    )
    assert table["n_gpus"].tolist() == [2, 4, 8, 16, 32, 40, 48, 56, 64]
    assert table["days"][table["n_gpus"] == 48].item() < 30 < table["days"][table["n_gpus"] == 40].item()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "no-model", "8xh100-80"), "no-model: no such file or folder; expected config.json"),
        (("plan", "llama3-8b", "8xh1"), "unknown device 'h1'"),
        (
            ("plan", "llama3-8b", "8xa100-80", "--precision", "fp8"),
            "unknown precision of device 'a100-80' 'fp8'",
        ),
        (("plan", "llama3-8b", "8xh100-80", "--layout", "tp5"), "8 GPUs are not a multiple"),
        (("plan", "llama3-8b", "8xh100-80", "--layout", "ep2"), "but the model has none"),
        (
            ("plan", "llama3-8b", "67xh100-80", "--batch", "3"),
            "no layout divides a batch of 3 samples over 67",
        ),
        (("plan", "llama3.1-405b", "8xh100-80"), "layouts fits: the smallest"),
        (("plan", "llama3-8b", "8xh100-80", "--measured", "no.csv"), "no.csv"),
        (("size", "llama3-8b", "--tokens", "1e9", "--budget", "5"), "--budget needs --price"),
        (("size", "llama3.1-405b", "--tokens", "1e9", "--most", "8"), "fits on no number of h100-80 up to 8"),
        (("size", "llama3-8b", "--tokens", "-1"), "--tokens"),
        (
            ("size", "llama3-8b", "--tokens", "1e9", "--device", "a100-80", "--precision", "fp8"),
            "unknown precision of device 'a100-80' 'fp8'",
        ),
        (("validate-public", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(words, said):
    code, text = ran(*words)
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1


def test_public_rows_are_judged_from_files(tmp_path):
    write_rows(tmp_path / "rows.csv", precisions=("bf16", "int3"))
    code, text = ran("validate-public", str(tmp_path), "-o", str(tmp_path / "judged.csv"))
    assert code == 0, text
    assert "12 rows are used, 12 are not" in text
    assert "Assumed" not in text
    assert "precision 'int3' is not one precision" in text
    judged = pd.read_csv(tmp_path / "judged.csv")
    assert set(judged["drawn"]) == {-1, 0, 1, 3, 5}
    assert (judged[judged.drawn == 5]["error"] < 0.05).all()


def test_the_page_shows_what_the_protocol_gives(public, root):
    rows, _ = public
    page = (root / "docs/background/planning.md").read_text()
    shown = page.split("<!-- judged -->\n")[1].split("<!-- end of judged -->")[0]
    agree(judged_table(judge(rows)), "# tolerance 2e-02\n" + shown, "docs/background/planning.md")


def test_samples_of_a_fixed_length_have_it_everywhere(tmp_path):
    config = {"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    config |= {"intermediate_size": 4096, "id2label": {str(label): "x" for label in range(1000)}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = (str(path), "8xh100-80", "--batch", "256")

    short, long = (ran("plan", *words, "--seq", str(seq)) for seq in (197, 131072))
    assert short == long and short[0] == 0
    assert "256 samples of 197 tokens a step" in short[1]
    assert f"{tmp_path.name} has samples of 197 tokens, whatever is asked for" in short[1]
    assert "batch 256 x 197:" in ran("size", words[0], "--tokens", "1e12", "--batch", "256", "--most", "2")[1]
    training = Training(read_model(path), 131072, 256)
    assert (training.seq, training.tokens_per_step) == (197, 256 * 197)
    assert {layout.cp for layout in layouts(training, read_machines("8xh100-80"))} == {1}
    assert dataclasses.replace(training, seq=4096) == training


@pytest.mark.parametrize(
    "words", [("plan", "llama3-8b", "8xh100-80"), ("size", "llama3-8b", "--tokens", "1e9")]
)
def test_sequences_longer_than_the_model_knows_are_reported(words):
    done = CliRunner().invoke(main, [*words, "--seq", "16384", "--batch", "8", "--json"])
    assert done.exit_code == 0
    json.loads(done.stdout)
    assert "16384 tokens are more than the 8192 of the configuration of llama3-8b" in done.stderr


@pytest.mark.parametrize(("n_gpus", "batch", "said"), [
    (56, 512, "512 samples is not a multiple of 56: data parallelism is over at most 8 of the 56 GPUs; 504 "),
    (12, 8, "8 samples is not a multiple of 12: data parallelism is over at most 4 of the 12 GPUs; 12 "),
    (16, 8, ""), (40, 500, ""), (56, 504, ""),
])  # fmt: skip
def test_a_batch_that_limits_data_parallelism_is_named(n_gpus, batch, said):
    code, text = ran("plan", "qwen3-0.6b", f"{n_gpus}xh100-80", "--batch", str(batch), "--top", "1")
    assert code == 0
    assert said in text and ("data parallelism is over at most" in text) == bool(said)


@pytest.mark.parametrize(("device", "precision", "used"), [
    ("v100-32", "bf16", "fp16"), ("v100-16", "tf32", "fp32"), ("v100-32", "fp16", ""),
    ("a100-40", "bf16", ""),
])  # fmt: skip
def test_a_precision_that_a_device_lacks_is_named_with_the_one_used_instead(device, precision, used):
    options = ["--batch", "64", "--precision", precision]
    for words in (
        ["plan", "qwen3-0.6b", f"8x{device}", *options],
        ["size", "qwen3-0.6b", "--tokens", "1e9", "--device", device, "--most", "8", *options],
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0
        said = f"{device} has no {precision}: steps are those of {used}, which programs use instead\n"
        assert done.stderr == (said if used else "")
