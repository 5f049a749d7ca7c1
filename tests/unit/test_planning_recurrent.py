"""Models with recurrent layers: counts against algorithms that run, terms, memory, intervals and commands."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError, UnknownNameError
from makespan.hardware import homogeneous, read_machines
from makespan.planning import (
    COMPONENTS,
    TERMS,
    Architecture,
    Attention,
    FeedForward,
    Grid,
    Layers,
    Layout,
    Pricer,
    Recurrent,
    Training,
    calibrated_by,
    components_of,
    ideal_terms,
    knowledge,
    layouts,
    memory_table,
    names_of,
    parse_layout,
    plan,
    read_model,
    scaling,
    software,
    stack_names,
    validate_rows,
)
from makespan.throughput import planned_workload
from makespan.throughput.planned import fitted_workload

SCAN = Recurrent("state-space", heads=64, head_dim=64, state_dim=128, groups=8, norm_size=4096)
DELTA = Recurrent("delta", heads=32, head_dim=128, state_dim=128, groups=16, chunk=64, norm_size=128)
SELECTIVE = Recurrent("selective", heads=4096, state_dim=16, rank=128)
CONVOLUTION = Recurrent("convolution", heads=2048, kernel=3)
ATTENTION = Attention(32, 8, 64, 64)


def model(recurrent, attention=ATTENTION, n_attention=4, n_recurrent=12, ffn=8192):
    """Return a hybrid of two kinds of layers, or a model of recurrent layers alone."""
    part = FeedForward(ffn, is_gated=True) if ffn else None
    runs = [Layers(n_recurrent, None, part, recurrent=recurrent)]
    if n_attention:
        runs.append(Layers(n_attention, attention, part))
    return Architecture("hybrid", "hybrid", 2048, tuple(runs), 32000)


def terms(training, layout, machines, stack="megatron-bridge"):
    names = names_of(training.model)
    found = ideal_terms(training, Grid.of([layout]), machines, software(stack))[0]
    return dict(zip(names, found.tolist(), strict=True))


def memory(training, layout, stack="megatron-bridge"):
    names = components_of(training.model)
    found = memory_table(training, Grid.of([layout]), software(stack))[0]
    return dict(zip(names, found.tolist(), strict=True))


# --- Counts, against algorithms that compute a recurrence by chunks ---


class Counted:
    """Matrix products that count the operations on pairs that a mask leaves."""

    def __init__(self):
        self.flop = 0

    def product(self, left, right, mask=None):
        whole = left @ right
        kept = whole.size if mask is None else int(mask.sum())
        self.flop += 2 * kept * left.shape[1]
        return whole if mask is None else whole * mask

    def masked(self, left, right):
        """Multiply by a lower triangle, whose entries above the diagonal are left out."""
        n = len(left)
        self.flop += n * (n + 1) * right.shape[1]
        return np.tril(left) @ right


def test_chunks_of_a_state_space_compute_the_recurrence_with_the_counted_products():
    rng = np.random.default_rng(1)
    seq, chunk, heads, head_dim, state_dim = 24, 8, 4, 3, 5
    decay = rng.uniform(0.5, 1, (heads, seq))
    x = rng.normal(size=(heads, seq, head_dim))
    keys, queries = rng.normal(size=(2, 2, seq, state_dim))  # of two groups
    expected, found, counted = np.zeros_like(x), np.zeros_like(x), Counted()
    for head in range(heads):
        state = np.zeros((state_dim, head_dim))
        for t in range(seq):
            state = decay[head, t] * state + np.outer(keys[head // 2, t], x[head, t])
            expected[head, t] = queries[head // 2, t] @ state
    mask = np.tril(np.ones((chunk, chunk)))
    states = np.zeros((heads, state_dim, head_dim))
    for start in range(0, seq, chunk):
        at = slice(start, start + chunk)
        for group in range(2):
            scores = counted.product(queries[group, at], keys[group, at].T, mask)
            for head in (2 * group, 2 * group + 1):
                sums = np.cumsum(np.log(decay[head, at]))
                fall = np.exp(sums[:, None] - sums)
                inside = counted.masked(scores * fall, x[head, at])
                before = counted.product(queries[group, at] * np.exp(sums)[:, None], states[head])
                found[head, at] = inside + before
                left = keys[group, at] * np.exp(sums[-1] - sums)[:, None]
                states[head] = np.exp(sums[-1]) * states[head] + counted.product(left.T, x[head, at])
    np.testing.assert_allclose(found, expected)
    part = Recurrent("state-space", heads, head_dim, state_dim, groups=2, chunk=chunk)
    assert part.core_flop(seq) == counted.flop


def test_chunks_of_the_delta_rule_compute_the_recurrence_with_the_counted_products():
    rng = np.random.default_rng(2)
    seq, chunk, head_dim, state_dim = 48, 16, 6, 8
    decay, beta = rng.uniform(0.8, 1, seq), rng.uniform(0.2, 1, seq)
    keys, queries = rng.normal(size=(2, seq, state_dim))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    values = rng.normal(size=(seq, head_dim))
    expected, found, counted = np.zeros_like(values), np.zeros_like(values), Counted()
    state = np.zeros((state_dim, head_dim))
    for t in range(seq):
        state = decay[t] * state
        state = state + beta[t] * np.outer(keys[t], values[t] - keys[t] @ state)
        expected[t] = queries[t] @ state
    mask = np.tril(np.ones((chunk, chunk)))
    state = np.zeros((state_dim, head_dim))
    for start in range(0, seq, chunk):
        at = slice(start, start + chunk)
        k, q, v, sums = keys[at], queries[at], values[at], np.cumsum(np.log(decay[at]))
        fall = np.exp(sums[:, None] - sums)
        pairs = np.tril(counted.product(k, k.T, mask) * fall * beta[at, None], -1)
        inverse = np.linalg.inv(np.eye(chunk) + pairs)
        counted.flop += 2 * chunk**3 // 6  # forward substitution
        inner = counted.masked(inverse, beta[at, None] * v)
        outer = counted.masked(inverse, beta[at, None] * k * np.exp(sums)[:, None])
        new = inner - counted.product(outer, state)
        scores = counted.product(q, k.T, mask) * fall
        found[at] = counted.masked(scores, new) + counted.product(q * np.exp(sums)[:, None], state)
        left = k * np.exp(sums[-1] - sums)[:, None]
        state = np.exp(sums[-1]) * state + counted.product(left.T, new)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    part = Recurrent("delta", 1, head_dim, state_dim, chunk=chunk)
    assert part.core_flop(seq) == pytest.approx(counted.flop, rel=1e-3)


@pytest.mark.parametrize("part", [SCAN, DELTA])
def test_scans_are_linear_in_the_sequence_and_shorter_ones_have_shorter_chunks(part):
    assert part.core_flop(16384) == pytest.approx(4 * part.core_flop(4096))
    assert part.core_flop(16) < part.core_flop(4096) * 16 / 4096


def test_only_scans_of_chunks_are_matrix_products():
    assert SELECTIVE.core_flop(4096) == CONVOLUTION.core_flop(4096) == 0
    assert SELECTIVE.vector_flop(4096) > 0 == CONVOLUTION.vector_flop(4096) == SCAN.vector_flop(4096)
    one = Architecture("one", "x", 2048, (Layers(1, recurrent=SELECTIVE),), 1, head="none")
    products = sum(out * size for out, size, _ in SELECTIVE.products(2048))
    assert one.flop_per_sample(1000) == 3 * 2 * 1000 * products


def test_gates_widen_the_projection_of_queries():
    gated = dataclasses.replace(ATTENTION, has_gate=True, n_biases=4)
    plain = dataclasses.replace(ATTENTION, n_biases=4)
    assert gated.parameters(2048) - plain.parameters(2048) == 2048 * 2049
    assert gated.core_flop(100) == plain.core_flop(100)
    hybrids = [Training(model(SCAN, attention), 4096, 64) for attention in (plain, gated)]
    machines = read_machines("8xh100-80")
    for name in ("products", "elements"):
        less, more = (terms(run, Layout(dp=8), machines)[name] for run in hybrids)
        assert less < more
    less, more = (memory(run, Layout(dp=8))["activations"] for run in hybrids)
    assert more - less == 4 * 4096 * 2 * 2 * 2048  # layers, tokens, bytes, gates and gated outputs


# --- Time ---


def test_only_models_with_recurrent_layers_have_their_terms_and_components():
    dense = Architecture("dense", "llama", 2048, (Layers(2, ATTENTION, FeedForward(512, True)),), 100)
    assert names_of(dense) == tuple(TERMS) and components_of(dense) == COMPONENTS
    hybrid = model(SCAN)
    assert names_of(hybrid) == (*TERMS, "scan") and components_of(hybrid) == (*COMPONENTS, "scan")


@pytest.mark.parametrize("part", [SCAN, DELTA, SELECTIVE])
def test_scans_take_time_by_tokens_and_tensor_parallelism_divides_them(part):
    machines, layout = read_machines("8xh100-80"), Layout(dp=8)
    short = terms(Training(model(part), 4096, 64), layout, machines)["scan"]
    assert short > 0
    twice = terms(Training(model(part), 8192, 64), layout, machines)["scan"]
    assert twice == pytest.approx(2 * short)
    cut = terms(Training(model(part), 4096, 64), Layout(dp=4, tp=2), machines)["scan"]
    assert cut == pytest.approx(short)  # half of twice as many samples
    again = terms(Training(model(part), 4096, 64), Layout(dp=8, recompute="full"), machines)["scan"]
    assert again == pytest.approx(1.25 * short)


def test_a_short_convolution_streams_and_has_no_scan():
    machines, run = read_machines("8xh100-80"), Training(model(CONVOLUTION), 4096, 64)
    found = terms(run, Layout(dp=8), machines)
    assert found["scan"] == 0 < found["elements"]
    bare = Training(model(CONVOLUTION, n_recurrent=1), 4096, 64)
    assert found["elements"] > terms(bare, Layout(dp=8), machines)["elements"]


def test_parallel_parts_of_a_layer_are_reduced_once_and_selective_scans_once_more():
    ffn, machines, layout = FeedForward(8192, True), read_machines("8xh100-80"), Layout(dp=1, tp=8)

    def collectives(*runs):
        one = Architecture("one", "x", 2048, runs, 32000)
        found = terms(Training(one, 4096, 8), layout, machines)
        return found["tensor"] + found["tensor_beside"]

    alone = collectives(Layers(4, ATTENTION, ffn))
    assert collectives(Layers(4, ATTENTION, ffn, recurrent=SCAN)) == pytest.approx(alone)
    assert collectives(Layers(4, None, ffn, recurrent=SCAN)) == pytest.approx(alone)
    halves = Layers(4, ATTENTION, norm_vectors=1), Layers(4, None, ffn, norm_vectors=1)
    assert collectives(*halves) == pytest.approx(alone)
    assert collectives(Layers(4, None, ffn, recurrent=SELECTIVE)) > alone


def test_a_layer_is_as_long_as_its_parts_in_layers_of_their_own():
    ffn, machines = FeedForward(8192, True), read_machines("8xh100-80")
    machines = homogeneous(dataclasses.replace(machines.node, intra_latency_s=0.0), 1, machines.network)
    whole = Architecture("whole", "x", 2048, (Layers(4, None, ffn, recurrent=SCAN),), 32000)
    runs = (Layers(4, norm_vectors=1, recurrent=SCAN), Layers(4, None, ffn, norm_vectors=1))
    parts = Architecture("parts", "x", 2048, runs, 32000)
    assert whole.parameters == parts.parameters
    assert whole.flop_per_sample(4096) == parts.flop_per_sample(4096)
    for stack in ("megatron-bridge", "transformers"):
        one, other = (
            terms(Training(m, 4096, 64, "fp8"), Layout(dp=8), machines, stack) for m in (whole, parts)
        )
        assert one == pytest.approx(other)


@pytest.mark.parametrize("part", [SCAN, DELTA, SELECTIVE, CONVOLUTION])
@pytest.mark.parametrize("stack", ["megatron-bridge", "transformers", "deepspeed"])
def test_a_grid_has_the_bits_of_its_layouts(part, stack):
    training, machines = Training(model(part), 4096, 64), read_machines("16xa100-80")
    found = list(layouts(training, machines))[::17]
    assert any(one.tp > 1 for one in found) and any(one.pp > 1 for one in found)
    used = software(stack)

    def tables(grid):
        return ideal_terms(training, grid, machines, used), memory_table(training, grid, used)

    for whole, *alone in zip(tables(Grid.of(found)), *(tables(Grid.of([one])) for one in found), strict=True):
        assert np.isfinite(whole).all() and (whole >= 0).all()
        for row, one in zip(whole, alone, strict=True):
            assert one.tobytes() == row.tobytes()


# --- Memory ---


def test_recurrent_parts_keep_activations_that_recomputation_frees():
    training = Training(model(SCAN, n_attention=0), 4096, 64)
    kept = memory(training, Layout(dp=8))
    assert kept["scan"] == 12 * 4096 * 2 * SCAN.kept
    assert memory(training, Layout(dp=4, tp=2))["scan"] == kept["scan"] / 2
    again = memory(training, Layout(dp=8, recompute="full"))
    assert again["scan"] == 0
    assert again["activations"] < kept["activations"] + kept["scan"]
    half = memory(training, Layout(dp=8, recompute="full", recompute_share=0.5))
    assert half["scan"] == kept["scan"] / 2
    staged = memory(training, Layout(dp=4, pp=2))
    assert staged["scan"] == kept["scan"]  # half of the layers, for two micro-batches


def test_states_of_chunks_take_memory_while_a_layer_runs():
    found = [
        memory(Training(model(dataclasses.replace(SCAN, chunk=chunk)), 4096, 64), Layout(dp=8))
        for chunk in (256, 64)
    ]
    states = 4096 * 64 * 64 * 128 * 8
    assert found[1]["activations"] - found[0]["activations"] == states / 64 - states / 256


# --- What is known of them ---


def test_no_row_stands_behind_scans_and_their_spread_widens_intervals():
    pricer = Pricer(
        Training(model(SCAN, n_attention=0, ffn=0), 8192, 64), read_machines("8xh100-80"),
        software("megatron-bridge"),
    )  # fmt: skip
    assert np.exp(knowledge().shared[-1]) == pytest.approx(2.3)
    grid = Grid.of([Layout(dp=8)])
    parts_s = pricer.parts_s(grid)
    share = parts_s[0, -1] / parts_s.sum()
    assert 0.2 < share < 0.9
    known = dataclasses.replace(
        pricer.calibrated, covariance=np.diag(np.diag(pricer.calibrated.covariance) * (np.arange(25) < 24))
    )
    narrow = known.spread(parts_s)[0]
    assert pricer.spread(parts_s)[0] == pytest.approx(np.hypot(narrow, 0.5 * share))


def test_measured_steps_teach_the_scan():
    training, machines = Training(model(SCAN), 8192, 64), read_machines("8xh100-80")
    pricer = Pricer(training, machines, software("megatron-bridge"))
    texts = ("zero1 mb1", "tp2 zero1 mb1", "tp4 zero1 mb2", "fsdp mb2", "tp8 zero1 mb4", "pp2 zero1 mb1")
    tried = [parse_layout(text, 8) for text in texts]
    parts_s = pricer.parts_s(Grid.of(tried))
    steps = parts_s.sum(axis=1) + parts_s[:, -1]  # scans take twice as long
    rows = [(training, one, machines, float(step)) for one, step in zip(tried, steps, strict=True)]
    refined = calibrated_by(pricer, rows)
    grid = Grid.of([Layout(dp=8, micro_batch=2)])
    before, after = pricer.parts_s(grid)[0], refined.parts_s(grid)[0]
    assert after.sum() == pytest.approx(before.sum() + before[-1], rel=0.02)
    assert after[-1] / before[-1] > 1.1
    assert refined.spread(after[None]) < pricer.spread(before[None])


def test_rows_of_models_with_and_without_recurrent_layers_refine_each_other():
    machines, used = read_machines("8xh100-80"), software("megatron-bridge")
    dense = Architecture("dense", "llama", 2048, (Layers(16, ATTENTION, FeedForward(8192, True)),), 32000)
    hybrid = Training(model(SCAN), 4096, 64)
    plain, layout = Training(dense, 4096, 64), Layout(dp=8)
    for own, other in ((plain, hybrid), (hybrid, plain)):
        pricer = Pricer(own, machines, used)
        rows = [
            (run, layout, machines, 1.3 * Pricer(run, machines, used).price(layout).step_s)
            for run in (other, own)
        ]
        refined = calibrated_by(pricer, rows)
        assert refined.price(layout).step_s == pytest.approx(rows[1][3], rel=0.03)
        only_other = calibrated_by(pricer, rows[:1]).price(layout)
        assert only_other.step_s > 1.1 * pricer.price(layout).step_s
        assert sum(only_other.terms_s.values()) == pytest.approx(only_other.step_s)
        assert plan(refined, 2).best[0].step_s > 0


def test_what_rows_taught_goes_with_the_pricer_to_models_with_other_terms():
    machines, used, layout = read_machines("8xh100-80"), software("megatron-bridge"), Layout(dp=8)
    dense = Architecture("dense", "llama", 2048, (Layers(16, ATTENTION, FeedForward(8192, True)),), 32000)
    hybrid, plain = Training(model(SCAN), 4096, 64), Training(dense, 4096, 64)
    for own, other in ((plain, hybrid), (hybrid, plain)):
        pricer, fresh = Pricer(own, machines, used), Pricer(other, machines, used)
        rows = [
            (own, one, machines, 1.4 * pricer.price(one).step_s)
            for one in (layout, Layout(dp=4, tp=2), Layout(dp=4, pp=2))
        ]
        moved = dataclasses.replace(calibrated_by(pricer, rows), training=other, measured=())
        before, after = fresh.price(layout), moved.price(layout)
        assert after.terms_s.keys() == before.terms_s.keys()
        assert after.step_s > 1.1 * before.step_s
        assert after.high_s / after.low_s < before.high_s / before.low_s
        table = validate_rows(pricer, [rows[0], (other, layout, machines, 1.4 * before.step_s)])
        assert table["before_error"].to_numpy() == pytest.approx(1 / 1.4 - 1)
        assert (table["left_out_error"].abs() < 0.25).all()


# --- Plans ---


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        (SCAN, "cp2 mb1", "context parallelism over 2 is not modelled for scans of recurrent layers"),
        (
            dataclasses.replace(SCAN, groups=1),
            "tp2 mb1",
            "over 2 does not divide 1 group of recurrent layers",
        ),
        (DELTA, "tp32 mb1", "over 32 does not divide 16 groups of recurrent layers"),
        (dataclasses.replace(SELECTIVE, heads=4097), "tp2 mb1", "does not divide 4097 channels of recurrent"),
        (SCAN, "mb1 recompute=selective", "computes attention again, but the model has none"),
    ],
)
def test_layouts_that_do_not_exist_for_recurrent_layers_are_refused_by_name(part, text, expected):
    training, machines = Training(model(part, n_attention=0), 65536, 64), read_machines("32xh100-80")
    pricer = Pricer(training, machines, software("megatron-bridge"))
    with pytest.raises(InputError, match=expected):
        pricer.price(parse_layout(text, 32))
    words = text.split()
    assert not any({*words} <= {*one.text.split(), "mb1"} for one in layouts(training, machines))


def test_every_stack_plans_a_model_without_attention():
    training, machines = Training(model(SCAN, n_attention=0, ffn=0), 4096, 64), read_machines("8xh100-80")
    for name in stack_names():
        best = plan(Pricer(training, machines, software(name)), 1).best[0]
        assert best.terms_s["attention"] == 0 < best.terms_s["scan"]
        assert sum(best.terms_s.values()) == pytest.approx(best.step_s)
        assert 0 < best.mfu < 1


def test_scans_count_as_kernels_where_scaling_is_judged():
    run = Training(model(SCAN), 4096, 64)
    table = scaling(lambda _n: run, "h100-80", software("megatron-bridge"), [8])
    best = plan(Pricer(run, read_machines("8xh100-80"), software("megatron-bridge")), 1).best[0]
    kernels = sum(best.terms_s[name] for name in ("products", "attention", "head", "scan"))
    assert table["of_limit"][0] == pytest.approx(kernels / best.step_s, rel=0.1)


def test_a_run_says_that_no_row_stands_behind_its_scans():
    (remark,) = Training(model(SCAN), 4096, 64).remarks
    assert "hybrid has 12 recurrent layers: no published row stands behind the time of their scans" in remark
    assert "no layout has context parallelism" in remark


# --- Our own format and the commands ---

OWN = """\
name = "small-hybrid"
family = "hybrid"
hidden = 512
vocab = 1000
extra_parameters = 512

[[layers]]
n_layers = 6
[layers.recurrent]
kind = "state-space"
heads = 16
head_dim = 64
state_dim = 64
groups = 2
chunk = 128
norm_size = 1024
has_conv_bias = true
[layers.ffn]
size = 2048
is_gated = true

[[layers]]
n_layers = 2
norm_vectors = 1
[layers.attention]
heads = 8
kv_heads = 2
head_dim = 64
value_dim = 64
has_gate = true
"""


def test_our_own_format_has_recurrent_parts_and_layers_of_one_part(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(OWN)
    found = read_model(path)
    expected = Recurrent("state-space", 16, 64, 64, groups=2, chunk=128, norm_size=1024, has_conv_bias=True)
    assert found.layers[0] == Layers(6, None, FeedForward(2048, True), recurrent=expected)
    assert found.layers[1] == Layers(2, Attention(8, 2, 64, 64, has_gate=True), norm_vectors=1)
    columns = 1024 + 2 * 2 * 64
    scan = 512 * (columns + 1024 + 16) + columns * 5 + 3 * 16 + 1024 + 1024 * 512
    attention = 512 * (512 + 512 + 2 * 128) + 512 * 512
    ffn = 3 * 512 * 2048
    assert found.parameters == 2 * 512_000 + 512 + 6 * (scan + ffn + 1024) + 2 * (attention + 512)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('"state-space"', '"lstm"', "recurrent.kind: found 'lstm'; expected state-space, selective, "),
        ("state_dim = 64", "", "state_dim is 0 in a state-space part; expected a whole number >= 1"),
        ("groups = 2", "groups = 3", "Recurrent: 16 heads are not a multiple of 3 groups"),
        ("groups = 2", "rank = 3", "Recurrent: rank is 3 in a state-space part; expected 0"),
        ("chunk = 128", "chunk = 0", "Recurrent: chunk is 0; expected a whole number >= 1"),
        ("chunk = 128", "chunks = 128", "layers[1].recurrent: unknown field 'chunks'; expected "),
        ('"state-space"', '"selective"', "head_dim 64 and groups 2 of a selective part; expected 1, as its"),
        ("has_gate = true", "has_gate = 1", "layers[2].attention.has_gate: found 1; expected true or false"),
    ],
)  # fmt: skip
def test_errors_in_our_own_format_name_the_field(tmp_path, before, after, expected):
    path = tmp_path / "small.toml"
    path.write_text(OWN.replace(before, after))
    with pytest.raises(InputError) as caught:
        read_model(path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_parts_that_do_not_go_together_are_rejected():
    with pytest.raises(UnknownNameError, match="unknown kind of a recurrent part 'lstm'"):
        Recurrent("lstm", 4)
    with pytest.raises(InputError, match="state_dim is 8 in a convolution part; expected 0"):
        Recurrent("convolution", 4, state_dim=8)
    with pytest.raises(InputError, match="rank is 0 in a selective part; expected a whole number >= 1"):
        Recurrent("selective", 4, state_dim=8)
    with pytest.raises(InputError, match="Layers: have no part; expected attention, recurrent or ffn"):
        Layers(2)
    latent = read_model("deepseek-v3").layers[0].attention
    with pytest.raises(InputError, match="has a gate and latent projections"):
        dataclasses.replace(latent, has_gate=True)


def ran(*words):
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.output


def test_the_commands_say_what_is_not_known_of_recurrent_layers(tmp_path):
    path, steps = tmp_path / "small.toml", tmp_path / "steps"
    path.write_text(OWN)
    run = ("--seq", "4096", "--batch", "64")
    said = "small-hybrid has 6 recurrent layers: no published row stands behind the time of their scans"
    code, text = ran("plan", path, "8xh100-80", *run)
    assert code == 0 and said in text
    assert "none of them of a model with recurrent layers" in text
    assert "scans of recurrent layers, whose projections are matrix products" in text
    assert "GiB  scan" in text
    code, text = ran("explain", path, "8xh100-80", "tp2 mb1", *run, "--json")
    assert code == 0 and said in text
    found = json.loads(text[text.index("{") :])
    assert found["terms_s"]["scan"] > 0 < found["memory_bytes"]["scan"]
    code, text = ran("explain", path, "8xh100-80", "cp2 mb1", *run)
    assert code != 0 and "context parallelism over 2 is not modelled for scans" in text
    code, text = ran("emulate", path, "8xh100-80", *run, "--output", steps)
    assert code == 0 and "layouts that fit, predicted" in text
    code, text = ran("size", path, "--tokens", "1e10", "--most", "8", *run)
    assert code == 0 and said in text


def test_jobs_of_a_simulation_may_train_them(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(OWN)
    planned = planned_workload(str(path))
    (block,) = fitted_workload(planned).model.blocks
    assert (block.heads, block.kv_heads, block.kv_channels) == (8, 2, 64)
    path.write_text(OWN.split("[[layers]]\nn_layers = 2")[0])
    (block,) = fitted_workload(planned_workload(str(path))).model.blocks
    assert (block.heads, block.kv_heads, block.kv_channels) == (16, 2, 64)
