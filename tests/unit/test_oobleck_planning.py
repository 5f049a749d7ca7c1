"""Templates, their files, and the choice of pipelines: worked examples, edge cases and messages.

Edge cases of planning, and the test of each:

- f = 0, n0 = 1, exactly (f + 1) n0 nodes, one template: ``test_the_smallest_guarantees``
- one layer, fewer layers than nodes: ``test_nothing_is_returned_for_what_does_not_fit``
- no, negative, unknown or missing latencies: ``test_a_profile_that_cannot_be_is_one_message``
- GPUs a node that are no power of two: ``test_three_gpus_a_node_are_two_stages_or_three``
- equal costs: ``test_equal_costs_have_one_answer_in_every_process``
- fewer microbatches than pipelines, or numbers that do not divide: ``test_batches_that_cannot_be``
- a batch that microbatches do not divide: ``test_a_batch_is_cut_evenly_or_not_at_all``
- no exchange time for a number of replicas or GPUs: ``test_a_missing_exchange_time_names_layer_and_key``
- memory that is too small for any number of nodes: ``test_a_model_that_fits_nowhere_says_what_it_needs``
"""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.cli.oobleck import INSTANTIATE, PLAN, RECONFIGURE
from makespan.errors import InfeasiblePlanError, InputError, UnknownNameError
from makespan.oobleck.instantiation import (
    choose_plan,
    count_plans,
    distribute,
    enumerate_plans,
    event_time_s,
    microbatches,
)
from makespan.oobleck.plan import PipelineTemplate, Stage
from makespan.oobleck.profile import (
    LayerProfile,
    ModelProfile,
    random32,
    read_profile,
    uniform24,
    write_profile,
)
from makespan.oobleck.templates import (
    CostRule,
    GuaranteeUnsatisfiable,
    MemoryLimit,
    cached_templates,
    check_guarantee,
    covering_templates,
    least_template_count,
    make_templates,
    pipeline_cost,
    read_templates,
    smallest_node_count,
    template_rows,
    template_sizes,
    write_templates,
)

UNIFORM24_MS = [14.40, 16.20, 15.60, 15.30, 15.45, 15.00, 16.20, 14.85, 15.75, 16.65, 17.55, 14.70]
UNIFORM24_SLOWEST = [24, 12, 8, 6, 5, 4, 4, 3, 3, 3, 3, 2]
PRINTED_MS = {3: 3639.08 / 594, 4: 3634.72 / 758, 5: 3635.89 / 962}  # shown time over microbatches


def printed_templates():
    """Templates of which only the time over stages is printed."""
    return {
        size: PipelineTemplate(
            size, 1, tuple(Stage(i, i + 1, 1, time / 1000) for i in range(size)), time * size / 1000
        )
        for size, time in PRINTED_MS.items()
    }


def simple(*times_ms, **more):
    return ModelProfile("simple", tuple(LayerProfile(t / 3000, t / 1500, **more) for t in times_ms))


# --- worked examples --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "dc"])
def test_uniform_layers_cost_what_is_worked_out_by_hand(mode):
    templates = make_templates(uniform24(), range(1, 13), mode=mode)
    assert [round(templates[n].time_s * 1e12) for n in range(1, 13)] == [
        round(time * 1e9) for time in UNIFORM24_MS
    ]
    if mode == "exact":
        slowest = [max(len(stage.layers) for stage in templates[n].stages) for n in range(1, 13)]
        assert slowest == UNIFORM24_SLOWEST


@pytest.mark.parametrize("seed", range(10))
def test_the_published_search_is_never_better_and_random_layers_are_balanced(seed):
    profile = random32(seed)
    exact, published = (make_templates(profile, range(1, 13), mode=mode) for mode in ("exact", "dc"))
    for n_nodes, template in exact.items():
        assert template.n_stages == n_nodes
        assert published[n_nodes].time_s >= template.time_s
        latencies = [stage.latency_s for stage in template.stages]
        if n_nodes <= 4:
            assert max(latencies) / (sum(latencies) / n_nodes) <= 1.25


def test_the_cost_is_fill_steady_phase_and_drain():
    assert pipeline_cost([7]) == 28
    # 2 S + 1 + k = 6 times the slowest, of which the last counts, beside all and those from it on.
    assert pipeline_cost([5, 5]) == 10 + 6 * 5 + 5
    assert pipeline_cost([5, 3]) == 8 + 5 * 5 + 8
    assert pipeline_cost([3, 5, 1]) == 9 + 8 * 5 + 6
    assert pipeline_cost([3, 5, 1], CostRule(10)) == 9 + 8 * 5 + 6  # 3 S + 1
    assert pipeline_cost([3, 5, 1], CostRule(4)) == 9 + 2 * 5 + 6


def test_the_printed_plan_comes_out_of_the_printed_times():
    templates = printed_templates()
    choice = choose_plan(templates, 21, 3, 4096, "per_template", "compat", n_runners_up=9)
    assert choice.best.counts == {3: 4, 4: 1, 5: 1}
    assert choice.best.n_microbatches == (594, 594, 594, 594, 758, 962)
    assert (choice.n_plans, choice.n_infeasible) == (6, 2)  # 7 and 3 do not divide 4096
    others = [one.counts for one in choice.runners_up]
    assert all(other in others for other in ({4: 4, 5: 1}, {3: 1, 4: 2, 5: 2}, {3: 2, 5: 3}))
    times = [PRINTED_MS[3] * 594, PRINTED_MS[4] * 758, PRINTED_MS[5] * 962]
    assert times == pytest.approx([3639.08, 3634.72, 3635.89], abs=0.005)
    mean = sum(times) / 3
    assert sum((time - mean) ** 2 for time in times) == pytest.approx(10.185, abs=5e-4)
    assert (max(times) - min(times)) / max(times) == pytest.approx(0.0012, abs=5e-5)
    # Real-valued times of the plans, which the batch would need if it could be cut at will.
    weights = {(4, 1, 1): 3637, (0, 4, 1): 3727, (1, 2, 2): 3692, (2, 0, 3): 3656}
    for counts, expected in weights.items():
        rate = sum(x / time for x, time in zip(counts, PRINTED_MS.values(), strict=True))
        assert 4096 / rate == pytest.approx(expected, abs=1.0)


def test_pipelines_with_batches_of_their_own_beat_the_printed_plan():
    seven = [printed_templates()[3]] * 7
    counts = distribute(seven, 4096, "per_pipeline", "compat")
    assert sorted(counts) == [585] * 6 + [586]
    assert max(counts) * PRINTED_MS[3] == pytest.approx(3590, abs=0.5)
    assert max(counts) * PRINTED_MS[3] / 3639.08 == pytest.approx(1 - 0.013, abs=1e-3)
    assert distribute(seven, 4096, "per_template") is None


def test_plans_of_five_sizes_on_twenty_one_nodes():
    sizes = range(3, 8)
    assert count_plans(sizes, 21) == len(list(enumerate_plans(sizes, 21))) == 20
    assert count_plans(sizes, 21, f=3) == len(list(enumerate_plans(sizes, 21, f=3))) == 19
    assert list(enumerate_plans(range(3, 10), 13, f=3)) == [(3, 1, 0, 0, 0, 0, 0)]


def test_ten_templates_cover_the_printed_range():
    """The artifact makes sizes up to N - f, where N - f n0 are enough."""
    assert list(template_sizes(3, 1, 13, largest=12)) == list(range(3, 13))
    assert list(template_sizes(3, 1, 13)) == list(range(3, 11))
    assert list(template_sizes(3, 1, 13, "minimal")) == [3, 4]
    assert check_guarantee([3, 4], 3, 1, 1000) is None


# --- coverage ---------------------------------------------------------------------------------------


def test_the_least_number_of_templates_is_that_of_the_formula_and_tight():
    for n0, f in itertools.product(range(1, 9), range(5)):
        needed = least_template_count(n0, f)
        assert needed == 1 + math.ceil((n0 - 1) / (f + 1))
        assert check_guarantee(range(n0, n0 + needed), n0, f, 64) is None
        if needed > 1 and (f + 1) * n0 < 64:
            assert check_guarantee(range(n0, n0 + needed - 1), n0, f, 64) is not None


def test_the_smallest_guarantees():
    assert list(template_sizes(1, 0, 1)) == [1]
    assert list(template_sizes(4, 2, 12)) == [4]
    assert list(template_sizes(4, 2, 12, "minimal")) == [4]
    assert list(template_sizes(1, 3, 9, "minimal")) == [1]
    assert covering_templates(simple(1.0), 1, 0, n0=1).keys() == {1}


def test_a_hole_is_named():
    with pytest.raises(
        GuaranteeUnsatisfiable, match="templates of 3 to 3 nodes cannot use 7 nodes with 2 pip"
    ):
        template_sizes(3, 1, 13, most_possible=3)
    with pytest.raises(GuaranteeUnsatisfiable, match="cannot use 7 nodes"):
        covering_templates(simple(1, 1, 1), 13, 1, n0=3)
    with pytest.raises(InputError, match=r"5 nodes; expected at least \(f \+ 1\) n0 = 6"):
        template_sizes(3, 1, 5)
    with pytest.raises(InputError, match="n0 = 0"):
        template_sizes(0, 1, 5)
    with pytest.raises(UnknownNameError, match="minimal"):
        template_sizes(1, 1, 5, "least")


# --- what fits --------------------------------------------------------------------------------------


def test_nothing_is_returned_for_what_does_not_fit():
    assert make_templates(simple(1.0), [1, 2, 3]).keys() == {1}
    assert make_templates(simple(1, 2, 3), range(1, 9), mode="dc").keys() == {1, 2, 3}
    assert make_templates(simple(1, 2, 3), [3], rule=CostRule(2)) == {}
    with pytest.raises(InputError, match="for 0 nodes"):
        make_templates(simple(1.0), [0])
    with pytest.raises(UnknownNameError, match="exact"):
        make_templates(simple(1.0), [1], mode="best")


def test_three_gpus_a_node_are_two_stages_or_three():
    profile = simple(1, 1, 1, allreduce_in_node_s={2: 1.0})
    for mode in ("exact", "dc"):
        found = make_templates(profile, [1], gpus_per_node=3, mode=mode)[1]
        assert [stage.n_gpus for stage in found.stages] == [1, 1, 1]
        assert make_templates(simple(1.0, allreduce_in_node_s={2: 0}), [1], 3, mode) == {}
        two = make_templates(simple(1, 1, allreduce_in_node_s={2: 0}), [1], 3, mode)[1]
        assert sorted(stage.n_gpus for stage in two.stages) == [1, 2]


def test_memory_makes_the_least_number_of_nodes():
    layer = LayerProfile(1e-3, 2e-3, parameter_bytes=10, activation_bytes=5)
    profile = ModelProfile("equal", (layer,) * 8)
    # A layer holds 60 bytes of state; the first of S stages keeps S microbatches of 5 bytes a layer.
    assert smallest_node_count(profile, None, 10) == 1
    assert smallest_node_count(profile, MemoryLimit(8 * 65), 10) == 1
    assert smallest_node_count(profile, MemoryLimit(4 * 60 + 2 * 4 * 5), 10) == 2
    assert smallest_node_count(profile, MemoryLimit(4 * 60 + 2 * 4 * 5 - 1), 10) == 3
    assert smallest_node_count(profile, MemoryLimit(4 * 65, counts_in_flight=False), 10) == 2
    assert smallest_node_count(profile, MemoryLimit(8 * 15, state_factor=1), 10) == 1


def test_a_model_that_fits_nowhere_says_what_it_needs():
    layers = [LayerProfile(1e-3, 1e-3, parameter_bytes=size) for size in (1e6, 3e6, 2e6)]
    with pytest.raises(InfeasiblePlanError, match=r"hold 36.0 MB or more, the largest, layer 1, 18.0 MB"):
        smallest_node_count(ModelProfile("large", tuple(layers)), MemoryLimit(1e6), 9)
    with pytest.raises(InputError, match="memory of 0"):
        MemoryLimit(0)


# --- profiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"layers": [{"forward_ms": 0, "backward_ms": 1}]}',
            "layer 0: forward_s is 0.0; expected a finite",
        ),
        ("[1, -3]", "layer 1: forward_s is -0.001"),
        ('[{"forward_ms": NaN, "backward_ms": 1}]', "layer 0: forward_s is nan"),
        ('[{"forward_ms": 1, "backward_ms": Infinity}]', "layer 0: backward_s is inf"),
        ('[{"forward_ms": 1}]', "layer 0: 'backward_ms' is missing"),
        ('[{"forward_ms": 1, "backward_ms": 1, "fwd": 2}]', "layer 0: 'fwd' is unknown"),
        ('[{"forward_ms": "1", "backward_ms": 1}]', "forward_ms is '1'; expected a number"),
        ("[null]", "layer 0: is None"),
        ("[]", "0 layers, 1 samples"),
        ("{}", "has no list of layers"),
        ("[1, 2", "cannot be read as a layer profile"),
        (f"[1{'0' * 400}]", "layer 0 is larger than any"),
        ("[" * 100_000, "cannot be read as a layer profile"),
        ("[1e9]", "its layers take 1000000 s; expected at most 1000 s"),
        ('{"layers": [1], "micro_batch_size": 1.5}', "micro_batch_size is 1.5"),
        ('[{"forward_ms": 1, "backward_ms": 1, "mem_required": [1]}]', "mem_required is [1]"),
        ('[{"forward_ms": 1, "backward_ms": 1, "mem_required": [-1, 0]}]', "parameter_bytes is -1.0"),
        ('[{"forward_ms": 1, "backward_ms": 1, "allreduce_in_node_ms": {"a": 1}}]', "exchange times are"),
        ('[{"forward_ms": 1, "backward_ms": 1, "allreduce_in_node_ms": {"2": -1}}]', "has -0.001 for 2"),
    ],
)
def test_a_profile_that_cannot_be_is_one_message(tmp_path, content, message):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_profile(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_profiles_come_back_as_they_were_written(tmp_path):
    for profile in (uniform24(), random32(3)):
        write_profile(profile, tmp_path / "profile.json")
        found = read_profile(tmp_path / "profile.json")
        assert (found.name, found.n_layers) == (profile.name, profile.n_layers)
        assert make_templates(found, range(1, 9)) == make_templates(profile, range(1, 9))
    assert json.loads((tmp_path / "profile.json").read_text())["layers"][0].keys() == {
        "forward_ms", "backward_ms", "allreduce_in_node_ms", "allreduce_across_nodes_ms", "mem_required",
    }  # fmt: skip


def test_the_random_profile_follows_from_its_seed():
    assert random32(4) == random32(4)
    assert random32(4) != random32(5)
    for layer in random32(0).layers:
        assert 0.03e-3 <= layer.forward_s < 0.05e-3
        assert 0.08e-3 <= layer.backward_s < 0.10e-3
    assert max(random32(0).layers[0].allreduce_across_nodes_s) == 64


def test_a_missing_exchange_time_names_layer_and_key():
    with pytest.raises(
        InputError, match="layer 0 has no allreduce_across_nodes_ms for 17 replicas; it has: 1, 2"
    ):
        uniform24().sync_time_s(17)
    with pytest.raises(
        InputError, match="layer 0 has no allreduce_in_node_ms for 8 GPUs; it has: 1, 2, 3, 4"
    ):
        make_templates(uniform24(), [1], gpus_per_node=8)
    assert simple(1.0).sync_time_s(1) == 0.0
    with pytest.raises(InputError, match="17 replicas"):
        choose_plan(make_templates(uniform24(), [1]), 17, 1, 64, profile=uniform24())


# --- batches and plans ------------------------------------------------------------------------------


def test_batches_that_cannot_be():
    templates = make_templates(simple(1, 1), [1, 2])
    assert distribute([templates[1]] * 3, 2) is None
    assert distribute([templates[1]] * 3, 4, "per_template") is None
    with pytest.raises(InfeasiblePlanError, match="none takes 1 microbatches per_pipeline"):
        choose_plan({1: templates[1]}, 2, 1, 1)
    with pytest.raises(
        InfeasiblePlanError, match=r"0 plans of templates for \[2\] nodes use 3 with 1 pipelines"
    ):
        choose_plan({2: templates[2]}, 3, 0, 8)
    # One of two plans has no equal batches; the other is taken, and the batch stays what it is.
    choice = choose_plan(templates, 3, 0, 4, "per_template", "compat")
    assert (choice.best.counts, sum(choice.best.n_microbatches), choice.n_infeasible) == ({1: 1, 2: 1}, 4, 1)
    with pytest.raises(InputError, match="no pipeline"):
        distribute([], 3)
    with pytest.raises(UnknownNameError, match="per_template"):
        distribute([templates[1]], 3, "each")
    with pytest.raises(InputError, match="plans of templates"):
        choose_plan(make_templates(uniform24(), range(1, 25)), 100, 0, 1000, "per_template", "compat")


@pytest.mark.parametrize(("f", "n_microbatches", "counts"), [(1, 4096, {1: 1024}), (3, 512, {2: 512})])
def test_plans_for_a_thousand_nodes_are_found_without_listing_them(f, n_microbatches, counts):
    """Pipelines of one node have no bubbles; where microbatches are few, so are the pipelines."""
    templates = covering_templates(uniform24(), 1024, f, 1)
    choice = choose_plan(templates, 1024, f, n_microbatches)
    assert choice.n_plans > 10**20 and choice.best.counts == counts
    assert sum(choice.best.n_microbatches) == n_microbatches
    assert (choice.n_infeasible > 0) is (n_microbatches < 1024)


def test_a_batch_is_cut_evenly_or_not_at_all():
    assert microbatches(8192, 32) == 256
    with pytest.raises(InputError, match="global batch of 819 in microbatches of 2; expected"):
        microbatches(819, 2)


def test_ties_prefer_fewer_templates_then_more_pipelines():
    stage = (Stage(0, 1, 1, 1.0),)
    equal = {size: PipelineTemplate(size, 1, stage, 4.0) for size in (1, 2, 3)}
    choice = choose_plan(equal, 4, 1, 4, "per_pipeline", "1f1b", n_runners_up=9)
    assert choice.best.counts == {1: 4}  # one microbatch each
    times = [one.iter_time_s for one in choice.runners_up]
    assert times == sorted(times)
    tied = choose_plan(equal, 4, 1, 3, n_runners_up=9)  # four pipelines are one too many
    assert [one.counts for one in (tied.best, *tied.runners_up)] == [{1: 2, 2: 1}, {2: 2}, {1: 1, 3: 1}]


def test_a_plan_takes_its_nodes_in_order():
    choice = choose_plan(make_templates(uniform24(), [2, 3]), 7, 1, 30, profile=uniform24())
    plan = choice.best.on([9, 8, 7, 6, 5, 4, 3])
    assert plan.nodes == (9, 8, 7, 6, 5, 4, 3)
    assert [len(one.nodes) for one in plan.pipelines] == [2, 2, 3]
    assert sum(one.n_microbatches for one in plan.pipelines) == 30
    for wrong in ([1, 2], [1] * 7):
        with pytest.raises(InputError, match="7 different ones"):
            choice.best.on(wrong)


def test_ranks_hold_the_layers_of_their_stage():
    stages = (Stage(0, 2, 1, 1.0), Stage(2, 3, 1, 1.0), Stage(3, 5, 2, 1.0))
    template = PipelineTemplate(2, 2, stages, 9.0)
    assert template.rank_grid([7, 5, 3, 1]) == {0: (7,), 1: (7,), 2: (5,), 3: (3, 1), 4: (3, 1)}
    slots = template.rank_grid([7, 5, 3, 1], n_slots=4)
    assert (slots[0], slots[2], slots[4]) == ((7,) * 4, (5,) * 4, (3, 3, 1, 1))
    with pytest.raises(InputError, match="3 ranks for a template of 4 GPUs"):
        template.rank_grid([1, 2, 3])
    with pytest.raises(InputError, match="3 slots for stages of up to 2 GPUs"):
        template.rank_grid([1, 2, 3, 4], n_slots=3)


# --- files ------------------------------------------------------------------------------------------


def test_templates_come_back_as_they_were_written(tmp_path):
    templates = make_templates(random32(1), range(1, 9))
    write_templates(templates, tmp_path / "templates.json")
    assert read_templates(tmp_path / "templates.json") == templates


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no list of templates"),
        ("[3]", "template 0: is 3"),
        ('[{"n": 0, "S": 1, "T": 1}]', "template 0: n is 0"),
        ('[{"n": 1, "S": 1000000000, "T": 1}]', "template 0: S is 1000000000"),
        ('[{"n": 1, "S": 1, "T": NaN}]', "template 0: T is nan"),
        ('[{"n": 1, "S": 1, "T": 1}, {"n": 1, "S": 1, "T": 1}]', "template 1: is the second for 1 nodes"),
        ('[{"n": 1, "S": 2, "T": 1, "latencies": [1]}]', "layers_per_stage is None; expected a list of 2"),
        (
            '[{"n": 2, "S": 1, "T": 1, "latencies": [1], "layers_per_stage": [1], "gpus_per_stage": [1]}]',
            "1 GPUs on 2 nodes",
        ),
        ("[", "cannot be read as templates"),
    ],
)
def test_templates_that_cannot_be_are_one_message(tmp_path, content, message):
    path = tmp_path / "templates.json"
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_templates(path)
    assert message in str(raised.value)


def test_templates_are_kept_and_found_again(tmp_path, monkeypatch):
    profile, searched = random32(2), []
    from makespan.oobleck import templates as _files

    def counted(profile, sizes, *rest):
        searched.extend(sizes)
        return make_templates(profile, sizes, *rest)

    monkeypatch.setattr(_files, "make_templates", counted)
    first = cached_templates(tmp_path, profile, [2, 3, 40])
    assert first == make_templates(profile, [2, 3])
    assert cached_templates(tmp_path, profile, [3, 4]).keys() == {3, 4}
    assert searched == [2, 3, 40, 4]  # also what does not exist is known
    cached_templates(tmp_path, profile, [3], mode="dc")
    cached_templates(tmp_path, profile, [3], memory=MemoryLimit(1e9))
    cached_templates(tmp_path, random32(3), [3])
    assert len(list(tmp_path.iterdir())) == 4
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:100])
    assert cached_templates(tmp_path, profile, [2, 3]) == first


def test_equal_costs_have_one_answer_in_every_process():
    command = (
        "import json; from makespan.oobleck.profile import uniform24; "
        "from makespan.oobleck.templates import make_templates, template_rows; "
        "from makespan.oobleck.instantiation import choose_plan; p = uniform24(); "
        "t = make_templates(p, range(2, 9)); c = choose_plan(t, 17, 2, 64, profile=p, n_runners_up=50); "
        "print(json.dumps([template_rows(t.values()), [[x.counts, x.n_microbatches] for x in c.runners_up]]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, check=True, env=environment(seed)
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert json.loads(found.pop())[0] == template_rows(make_templates(uniform24(), range(2, 9)).values())


def environment(seed):
    return os.environ | {"PYTHONHASHSEED": seed}


# --- the command line -------------------------------------------------------------------------------


def call(command, *arguments):
    return CliRunner().invoke(command, [str(one) for one in arguments], **main.context_settings)


def test_templates_from_the_command_line(tmp_path):
    path = tmp_path / "sums.json"
    path.write_text(json.dumps([0.15] * 24))
    rows = json.loads(call(PLAN, "--latencies", path, "--nodes", "1:12").output)
    assert [row["T"] for row in rows] == UNIFORM24_MS
    assert all(sum(row["layers_per_stage"]) == 24 and row["S"] == row["n"] for row in rows)
    assert (
        call(
            PLAN, "--latencies", path, "--nodes", 3, "--mode", "dc", "--output", tmp_path / "t.json"
        ).exit_code
        == 0
    )
    assert [row["n"] for row in json.loads((tmp_path / "t.json").read_text())] == [3]
    covering = call(PLAN, "--latencies", path, "--cluster", 13, "--n0", 3, "--template-set", "minimal")
    assert [row["n"] for row in json.loads(covering.output)] == [3, 4]
    cached = ["--latencies", path, "--nodes", "2:4", "--cache", tmp_path / "cache"]
    assert call(PLAN, *cached).output == call(PLAN, *cached).output
    several = call(PLAN, "--latencies", path, "--nodes", 1, "--gpus", 2).exception
    assert "layer 0 has no allreduce_in_node_ms for 2 GPUs; it has: none" in str(several)
    for wrong in (
        ["--nodes", "4:3"],
        ["--nodes", "x"],
        [],
        ["--nodes", "1:2", "--cluster", "3"],
        ["--nodes", "0:2"],
    ):
        assert isinstance(call(PLAN, "--latencies", path, *wrong).exception, InputError)


def test_a_plan_from_the_command_line(tmp_path):
    rows = [{"n": size, "S": size, "T": time * size} for size, time in PRINTED_MS.items()]
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(rows))
    given = ["--templates", path, "--nodes", 21, "--f", 3, "--microbatches", 4096]
    done = json.loads(
        call(INSTANTIATE, *given, "--batch-mode", "per_template", "--estimator", "compat").output
    )
    assert done["plan"]["counts"] == {"3": 4, "4": 1, "5": 1}
    assert done["plan"]["microbatches"] == [594] * 4 + [758, 962]
    shown = [one["shown_ms"] for one in done["plan"]["pipelines"]]
    assert shown == pytest.approx([3639.08] * 4 + [3634.72, 3635.89], abs=0.005)
    assert done["counts"] == {"plans": 6, "infeasible": 2}
    assert len(done["alternatives"]) == 3
    ours = json.loads(call(INSTANTIATE, *given, "--estimator", "compat").output)
    assert ours["counts"]["infeasible"] == 0
    cut = ["--templates", path, "--nodes", 21, "--global-batch-size", 8192, "--micro-batch-size", 2]
    assert sum(json.loads(call(INSTANTIATE, *cut).output)["plan"]["microbatches"]) == 4096
    for wrong in ([*cut, "--microbatches", 3], cut[:4], cut[:6]):
        assert isinstance(call(INSTANTIATE, *wrong).exception, InputError)
    for wrong in (["--microbatches", 0], ["--microbatches", 10**9], ["--nodes", 10**9], ["--f", -1]):
        done = call(INSTANTIATE, *given, *wrong)
        assert (done.exit_code, "is not in the range" in done.output) == (2, True)


def test_a_plan_with_its_profile_is_priced_by_the_schedule(tmp_path):
    write_profile(uniform24(), tmp_path / "profile.json")
    write_templates(make_templates(uniform24(), range(3, 9)), tmp_path / "templates.json")
    given = ["--templates", tmp_path / "templates.json", "--profile", tmp_path / "profile.json"]
    found = json.loads(call(INSTANTIATE, *given, "--nodes", 13, "--microbatches", 64).output)
    for one in (found["plan"], *found["alternatives"]):
        assert one["event_time_ms"] == pytest.approx(one["iter_time_ms"], rel=0.05)


def test_a_profile_of_other_layers_or_times_than_the_templates_is_refused(tmp_path):
    def of(n_layers, forward_s):
        layer = LayerProfile(forward_s, 2 * forward_s, {}, dict.fromkeys(range(1, 10), 0.0))
        return ModelProfile("own", (layer,) * n_layers)

    mine, nearly = of(8, 0.010), of(8, 0.01002)
    templates = make_templates(mine, [1, 2, 3])
    write_templates(templates, tmp_path / "templates.json")
    assert choose_plan(templates, 4, 1, 8, profile=nearly).best.n_microbatches
    for other, message in (
        (of(3, 0.010), "profile 'own' has 3 layers; expected those of the template for 1 node.s., 8"),
        (of(8, 1.0), "layers 0 to 7 take 24000 ms; expected 240 ms as in the template for 1 node"),
        (of(8, 0.0102), "made from another profile"),
    ):
        with pytest.raises(InputError, match=message):
            choose_plan(templates, 4, 1, 8, profile=other)
        with pytest.raises(InputError, match=message):
            event_time_s([templates[1], templates[2]], [4, 4], other)
        write_profile(other, tmp_path / "other.json")
        given = ["--templates", tmp_path / "templates.json", "--nodes", 4, "--microbatches", 8]
        done = call(INSTANTIATE, *given, "--profile", tmp_path / "other.json")
        assert isinstance(done.exception, InputError) and not done.stdout
    wide = PipelineTemplate(1, 2, (Stage(0, 8, 2, 0.12),), 0.48)
    with pytest.raises(InputError, match="layer 0 has no allreduce_in_node_ms for 2 GPUs; it has: none"):
        event_time_s([wide], [4], mine)


def test_options_of_plan_and_reconfigure_without_effect_are_refused(tmp_path):
    path, sized = tmp_path / "sums.json", tmp_path / "sized.json"
    path.write_text(json.dumps([0.15] * 4))
    layer = {"forward_ms": 0.05, "backward_ms": 0.1}
    sized.write_text(json.dumps([layer | {"mem_required": [8, 8]}] * 4))
    for options, message in (
        (["--nodes", "2:4", "--f", 1], "--f is an option for --cluster; it does not go with --nodes"),
        (["--nodes", "2:4", "--n0", 2], "--n0 is an option"),
        (["--nodes", "2:4", "--template-set", "full"], "--template-set is an option"),
        (["--nodes", "2:4", "--state-factor", 4], "--state-factor is an option for --device-memory"),
        (["--nodes", "2:4", "--device-memory", 1], "no layer has bytes; expected mem_required"),
    ):
        assert message in str(call(PLAN, "--latencies", path, *options).exception)
    limited = ["--latencies", sized, "--nodes", "2:4", "--state-factor", 4, "--device-memory"]
    assert json.loads(call(PLAN, *limited, 1000).output) and not json.loads(call(PLAN, *limited, 1).output)
    (tmp_path / "part.json").write_text(json.dumps([layer | {"mem_required": [8, 8]}, layer]))
    part = call(PLAN, "--latencies", tmp_path / "part.json", "--nodes", 1).exception
    assert "layer 1: 'mem_required' is missing; expected in all layers or in none" in str(part)

    write_templates(make_templates(read_profile(sized), [1, 2]), tmp_path / "templates.json")
    given = ["--templates", tmp_path / "templates.json", "--pipelines", "[[0,1],[2]]", "--lost", "[0]"]
    given += ["--n0", 1]
    done = call(RECONFIGURE, *given, "--state-factor", 2)
    assert "--state-factor is an option for --profile" in str(done.exception)
    unsized = call(RECONFIGURE, *given, "--profile", path)
    assert json.loads(unsized.stdout) == json.loads(call(RECONFIGURE, *given).stdout)
    assert json.loads(unsized.stdout)["copied_bytes"] is None and "count as equal in size" in unsized.stderr
    known = json.loads(call(RECONFIGURE, *given, "--profile", sized).stdout)
    assert known["copied_bytes"] == sum(copy["bytes"] for copy in known["copies"]) > 0
