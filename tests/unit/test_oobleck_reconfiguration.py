"""Pipelines after losses, drains and joins: worked cases, edges, copies, hosts.

Where each edge case of reconfiguration is tested:

- f = 0, n0 = 1, N = (f + 1) n0, one template, a single layer: `test_the_smallest_jobs`
- several GPUs a node: `test_slots_of_a_layer_move_between_gpus`, `test_what_each_gpu_owns`
- ties, hash order: `test_the_order_of_arguments_changes_nothing`
- fewer microbatches than pipelines: `test_fewer_microbatches_than_pipelines_give_fewer_pipelines`
- loss of a first or last stage, of a whole pipeline: `test_any_single_loss_is_survived`
- loss of both copies of a stage: `test_the_loss_of_all_copies_of_a_layer_names_it`
- a loss while state is copied: `test_a_loss_during_a_copy_counts_what_has_arrived`, and
  ``tests/property/test_oobleck_reconfiguration.py``
- too few nodes: `test_too_few_nodes_end_training_or_degrade_it`
- more nodes than planned for: `test_joiners_beyond_the_templates_wait`
"""

from itertools import combinations, product

import pytest
from oobleck_templates import even_template, even_templates, layers_by_node, pipelines_of

from makespan.errors import InfeasiblePlanError, InputError
from makespan.oobleck.plan import Pipeline
from makespan.oobleck.reconfiguration import (
    Copy,
    Gpu,
    InsufficientNodes,
    StateLost,
    copy_plan,
    held_parts,
    node_layers,
    reconfigure,
    regroup,
)

START = [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]
TEMPLATES = even_templates(5, range(2, 6))
WORKED = [
    ([2], ("re-instantiate",), [[0, 1], [3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]),
    ([1, 3, 4], ("borrow",), [[0, 13], [2, 12], [9, 10, 11], [5, 6, 7, 8]]),
    ([2, 4, 6, 7, 8], ("borrow",), [[0, 1], [3, 13], [5, 12], [9, 10, 11]]),
    ([1, 2, 3, 5, 6, 7, 9, 10, 11], ("re-instantiate", "merge"), [[0, 4], [8, 12, 13]]),
]


def changed(groups, lost=(), joined=(), templates=TEMPLATES, f=1, n0=2, n_microbatches=24, **more):
    n_layers = next(iter(templates.values())).n_layers
    pipelines = pipelines_of(groups, templates)
    more = {"layer_bytes": [100] * n_layers} | more
    return reconfigure(pipelines, lost, joined, templates, f, n0, n_microbatches, **more)


def nodes_of(found):
    return [list(one.nodes) for one in found.plan.pipelines]


# --- regrouping -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "kinds", "expected"), WORKED)
def test_the_worked_cases(lost, kinds, expected):
    assert regroup(START, lost, 2).groups == tuple(map(tuple, expected))
    found = changed(START, lost)
    assert nodes_of(found) == expected
    assert found.kinds == kinds
    assert sum(one.n_microbatches for one in found.plan.pipelines) == 24


def test_a_whole_pipeline_is_dropped():
    found = regroup([[0, 1], [2, 3], [4, 5]], [2, 3], 2)
    assert found.groups == ((0, 1), (4, 5))
    assert found.kinds == ("drop",)


def test_regrouping_keeps_as_many_pipelines_as_the_nodes_allow():
    """All losses of three pipelines of two to five nodes, and four where merging alone would leave fewer."""
    starts = [(sizes, n0) for sizes in product((2, 3, 5), repeat=3) for n0 in (1, 2)]
    starts += [((4, 4, 4, 4), 4), ((3, 3, 4, 4), 3), ((5, 5, 5), 4)]
    for sizes, n0 in starts:
        groups, first = [], 0
        for size in sizes:
            groups.append(list(range(first, first + size)))
            first += size
        for n_lost in range(0, first - n0 + 1, 2):
            for lost in list(combinations(range(first), n_lost))[:: 1 + n_lost * 7]:
                left = [[node for node in group if node not in lost] for group in groups]
                n_left = [len(group) for group in left if group]
                found = regroup(groups, lost, n0)
                assert sorted(node for group in found.groups for node in group) == sorted(
                    set(range(first)) - set(lost)
                )
                assert len(found.groups) == min(len(n_left), sum(n_left) // n0), (sizes, lost)
                assert min(map(len, found.groups)) >= n0
                assert list(map(len, found.groups)) == sorted(map(len, found.groups))


def test_what_a_merged_pipeline_can_spare_is_lent_where_that_keeps_a_pipeline():
    groups = [[0, 1, 2], [3, 4, 5], [6], [7], [8, 9, 10, 11]]
    found = regroup(groups, [], 4)
    assert found.groups == ((8, 9, 10, 11), (0, 1, 2, 3), (6, 5, 4, 7))
    assert found.kinds == ("borrow", "merge")


def test_fewer_nodes_than_one_pipeline_needs_are_refused():
    with pytest.raises(InsufficientNodes, match=r"1 node\(s\) are left; expected 2 or more"):
        regroup([[0, 1], [2, 3]], [1, 2, 3], 2)


# --- what may come out ----------------------------------------------------------------------------


def test_the_smallest_jobs():
    """One node and layer; f = 0; exactly (f + 1) n0 nodes and one template."""
    alone = changed([[7]], templates=even_templates(1, [1]), f=0, n0=1, n_microbatches=1)
    assert nodes_of(alone) == [[7]]
    assert (alone.kinds, alone.copies, alone.action) == ((), (), "none")
    with pytest.raises(StateLost, match=r"layer\(s\) 0;"):
        changed([[7]], [7], templates=even_templates(1, [1]), f=0, n0=1, n_microbatches=1)
    tight = even_templates(4, [2])
    assert nodes_of(changed([[0, 1], [2, 3]], templates=tight)) == [[0, 1], [2, 3]]
    with pytest.raises(InsufficientNodes) as caught:
        changed([[0, 1], [2, 3]], [3], templates=tight)
    assert (caught.value.n_nodes, caught.value.n_needed) == (3, 4)


@pytest.mark.parametrize("lost", range(14))
def test_any_single_loss_is_survived(lost):
    found = changed(START, [lost], f=1)
    assert len(found.plan.pipelines) == 4
    assert lost not in found.plan.nodes


def test_a_whole_pipeline_may_be_lost():
    found = changed(START, [5, 6, 7, 8])
    assert nodes_of(found) == [[0, 1], [2, 3, 4], [9, 10, 11, 12, 13]]
    assert (found.kinds, found.copies) == (("drop",), ())


def test_the_loss_of_all_copies_of_a_layer_names_it():
    """Both last stages of two equal pipelines, more losses than f; the state counts before the nodes do."""
    with pytest.raises(StateLost) as caught:
        changed([[0, 1], [2, 3]], [1, 3])
    assert caught.value.layers == (3, 4)
    assert "layer(s) 3, 4; resume from the last checkpoint" in str(caught.value)


def test_more_losses_than_f_are_survived_where_a_copy_is_left():
    found = changed([[0, 1], [2, 3], [4, 5, 6, 7]], [0, 1, 2])
    assert nodes_of(found) == [[3, 7], [4, 5, 6]]
    assert found.f == 1


def test_too_few_nodes_end_training_or_degrade_it():
    with pytest.raises(InsufficientNodes, match=r"3 node\(s\) are left; expected 4 or more"):
        changed([[0, 1], [2, 3]], [3])
    found = changed([[0, 1], [2, 3]], [3], policy="degrade")
    assert nodes_of(found) == [[2, 0, 1]]
    assert found.f == 0
    with pytest.raises(InsufficientNodes, match=r"1 node\(s\) are left; expected 2 or more"):
        changed([[0, 1], [2, 3]], [1, 2, 3], policy="degrade", held={0: range(5)})


def test_what_exceeds_the_largest_template_is_split():
    """A pipeline of seven nodes, and templates for two to four only: three pipelines, as many as can be."""
    pipelines = pipelines_of([[0, 1], [2, 3, 4, 5, 6, 7, 8]], even_templates(9, range(2, 8)))
    templates = even_templates(9, range(2, 5))
    found = reconfigure(pipelines, [], [], templates, 1, 2, 24, layer_bytes=[1] * 9)
    assert nodes_of(found) == [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    assert found.kinds == ("split",)


def test_what_cannot_be_split_is_planned_anew():
    """Merging makes five nodes of what has templates for three and four."""
    templates = even_templates(6, [3, 4])
    assert regroup([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [3], 3).groups == ((6, 7, 8), (4, 5, 0, 1, 2))
    found = changed([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [3], templates=templates, n0=3, f=1)
    assert found.kinds == ("re-plan",)
    assert [len(one.nodes) for one in found.plan.pipelines] == [4, 4]


def test_fewer_microbatches_than_pipelines_give_fewer_pipelines():
    """Four microbatches for what would be five pipelines; too few for f + 1 are refused."""
    templates = even_templates(6, range(1, 7))
    groups = [[node] for node in range(5)]
    found = changed(groups, [], templates=templates, n0=1, n_microbatches=4)
    assert found.kinds == ("re-plan",)
    assert sum(one.n_microbatches for one in found.plan.pipelines) == 4
    assert 2 <= len(found.plan.pipelines) <= 4
    with pytest.raises(InfeasiblePlanError, match="1 micro"):
        changed(groups, [], templates=templates, n0=1, n_microbatches=1)


def test_too_few_pipelines_are_planned_anew():
    """Two of three whole pipelines are lost; the five nodes left hold the model twice."""
    templates = even_templates(6, range(2, 6))
    found = changed([[0, 1], [2, 3], [4, 5, 6, 7, 8]], [0, 1, 2, 3], templates=templates)
    assert found.kinds == ("re-plan",)
    assert sorted(len(one.nodes) for one in found.plan.pipelines) == [2, 3]


# --- who joins and who leaves ---------------------------------------------------------------------


def test_a_joiner_takes_the_place_of_a_victim_with_few_copies():
    groups = [[0, 1], [2, 3, 4]]
    found = changed(groups, [3], [9])
    assert sorted(found.plan.nodes) == [0, 1, 2, 4, 9]
    assert found.kinds == ("join",)
    assert {one.dst for one in found.copies} == {Gpu(9, 0)}
    assert found.copies_bytes == 200


def test_a_job_starts_with_nodes_that_join_and_copies_nothing():
    found = changed([], (), range(5))
    assert found.copies == ()
    assert sorted(found.plan.nodes) == [0, 1, 2, 3, 4]


def test_joiners_beyond_the_templates_wait():
    found = changed([[0, 1, 2], [3, 4, 5]], [], [6, 7], templates=even_templates(6, [3]), n0=3)
    assert found.waiting == (6, 7)
    assert nodes_of(found) == [[0, 1, 2], [3, 4, 5]]
    found = changed([[0, 1, 2], [3, 4, 5]], [], [6, 7, 8, 9], templates=even_templates(6, [3]), n0=3)
    assert found.waiting == (9,)


def test_a_node_that_leaves_sends_what_it_has():
    """Two of two copies leave with notice: nothing is lost."""
    found = changed([[0, 1], [2, 3, 4]], [], [], drained=[1], f=1)
    assert found.kinds == ("borrow", "drain")
    assert nodes_of(found) == [[0, 4], [2, 3]]
    both = changed([[0, 1], [2, 3], [4, 5, 6]], [], [], drained=[1, 3, 6])
    assert not {1, 3, 6} & set(both.plan.nodes)
    assert {one.src.node for one in both.copies} & {1, 3, 6}


def test_a_drain_that_leaves_too_few_is_refused():
    with pytest.raises(InsufficientNodes):
        changed([[0, 1], [2, 3]], drained=[1])


def test_a_loss_during_a_copy_counts_what_has_arrived():
    """A joiner that has got layer 4 saves it when both nodes that had it are lost before all is copied."""
    groups = [[0, 1], [2, 3], [9, 8]]
    held = {0: {0, 1, 2}, 1: {3, 4}, 2: {0, 1, 2}, 3: {3, 4}, 9: {4}, 8: set()}
    with pytest.raises(StateLost) as caught:
        changed(groups, [1, 3], held=held)
    assert caught.value.layers == (3,)
    found = changed(groups, [1, 3], held=held | {8: {3}})
    assert {(one.layer, one.src.node) for one in found.copies if one.layer > 2} == {(3, 8), (4, 9)}


# --- copies ---------------------------------------------------------------------------------------


def parts(*layers):
    return frozenset((layer, 0) for layer in layers)


def test_senders_need_not_keep_the_layer():
    held = {Gpu(0, 0): parts(0), Gpu(1, 0): parts(1)}
    needed = {Gpu(0, 0): parts(1), Gpu(1, 0): parts(0)}
    assert copy_plan(held, needed, [8, 8], 1) == (
        Copy(0, 0, Gpu(0, 0), Gpu(1, 0), 8),
        Copy(1, 0, Gpu(1, 0), Gpu(0, 0), 8),
    )


def test_the_load_of_senders_is_evened_out_and_large_layers_come_first():
    """Two that have all send 50, 30 and 20 to one that has nothing: 50 each."""
    held = {Gpu(0, 0): parts(0, 1, 2), Gpu(1, 0): parts(0, 1, 2), Gpu(2, 0): parts()}
    found = copy_plan(held, {Gpu(2, 0): parts(0, 1, 2)}, [20, 50, 30], 1)
    load = {node: sum(one.n_bytes for one in found if one.src.node == node) for node in (0, 1)}
    assert load == {0: 50, 1: 50}


def test_senders_are_as_even_as_the_bound_of_the_greedy_rule():
    """Against brute force over all senders, where everybody has everything: at most 4/3 of the least."""
    for sizes in product((1, 2, 3, 5, 9), repeat=5):
        if list(sizes) != sorted(sizes):
            continue
        held = {Gpu(node, 0): parts(*range(5)) for node in (0, 1)}
        found = copy_plan(held, {Gpu(5, 0): parts(*range(5))}, sizes, 1)
        most = max(sum(one.n_bytes for one in found if one.src.node == node) for node in (0, 1))
        least = min(
            max(sum(sizes[i] for i in range(5) if mask >> i & 1 == side) for side in (0, 1))
            for mask in range(32)
        )
        assert most <= least * 4 / 3


def test_a_sender_on_the_same_host_comes_before_one_with_less_to_send():
    held = {Gpu(node, 0): parts(0, 1) for node in (0, 1)}
    needed = {Gpu(2, 0): parts(0, 1)}
    assert {one.src.node for one in copy_plan(held, needed, [5, 5], 1)} == {0, 1}
    hosts = {0: "a", 1: "b", 2: "b"}
    assert {one.src.node for one in copy_plan(held, needed, [5, 5], 1, hosts)} == {1}


def test_what_each_gpu_owns():
    """Two GPUs a node: a stage on both halves each layer, two stages of one GPU each hold whole layers."""
    wide = even_template(2, 4, gpus_per_node=2, gpus_per_stage=2)
    narrow = even_template(1, 4, gpus_per_node=2)
    assert node_layers(wide) == (range(2), range(2, 4))
    assert node_layers(narrow) == (range(4),)
    owned = held_parts([Pipeline((3, 4), wide, 1), Pipeline((5,), narrow, 1)], 2)
    assert owned[Gpu(3, 1)] == {(0, 1), (1, 1)}
    assert owned[Gpu(5, 1)] == {(2, 0), (2, 1), (3, 0), (3, 1)}


def test_slots_of_a_layer_move_between_gpus():
    """One of two nodes with stages on two GPUs is lost; the other has its stages split over both."""
    wide, narrow = (
        even_template(2, 4, gpus_per_node=2, gpus_per_stage=2),
        even_template(1, 4, gpus_per_node=2),
    )
    pipelines = [Pipeline((5,), narrow, 1), Pipeline((3, 4), wide, 1)]
    found = reconfigure(pipelines, [4], [], {1: narrow, 2: wide}, 1, 1, 4, layer_bytes=[10, 10, 10, 11])
    assert nodes_of(found) == [[5], [3]]
    inside = [one for one in found.copies if one.src.node == one.dst.node]
    outside = [one for one in found.copies if one.src.node != one.dst.node]
    assert [(one.layer, one.slot, one.src.number, one.dst.number) for one in inside] == [
        (0, 1, 1, 0),
        (1, 1, 1, 0),
    ]
    assert [(one.layer, one.slot, one.dst.number, one.n_bytes) for one in outside] == [
        (2, 0, 1, 5), (2, 1, 1, 5), (3, 0, 1, 6), (3, 1, 1, 5),
    ]  # fmt: skip
    with pytest.raises(InputError, match="one GPU per node"):
        reconfigure(pipelines, [4], [], {1: narrow, 2: wide}, 1, 1, 4, layer_bytes=[1] * 4, held={3: [0]})


# --- hosts ----------------------------------------------------------------------------------------


def survives_any_host(found, hosts):
    owned = layers_by_node(found.plan.pipelines)
    n_layers = found.plan.pipelines[0].template.n_layers
    return all(
        set().union(*(owned[node] for node in owned if hosts[node] != host)) == set(range(n_layers))
        for host in set(hosts.values())
    )


HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
ONES = even_templates(6, range(1, 5))


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)])
def test_copies_of_a_layer_start_on_different_hosts(nodes):
    found = changed([], (), nodes, templates=ONES, n0=1, hosts=HOSTS)
    assert found.exposed == ()
    assert survives_any_host(found, HOSTS)


def test_a_task_is_lost_and_then_a_whole_host():
    """Four tasks on two hosts, f = 1, n0 = 1."""
    start = changed([], (), range(4), templates=ONES, n0=1, hosts=HOSTS).plan.pipelines
    for victim in range(4):
        first = reconfigure(start, [victim], [], ONES, 1, 1, 24, layer_bytes=[1] * 6, hosts=HOSTS)
        assert survives_any_host(first, HOSTS)
        host = HOSTS[victim]
        rest = [node for node in range(4) if HOSTS[node] == host and node != victim]
        second = reconfigure(first.plan.pipelines, rest, [], ONES, 1, 1, 24, layer_bytes=[1] * 6, hosts=HOSTS)
        assert nodes_of(second) == [[node] for node in sorted(second.plan.nodes)]


def test_nodes_change_places_where_regrouping_would_leave_a_layer_to_one_host():
    """Both pipelines would have their first stage on host a after the borrowing."""
    hosts = dict(zip(range(6), "abbaab", strict=True))
    found = changed([[0, 1], [2, 3, 4, 5]], [1], templates=even_templates(6, range(1, 7)), hosts=hosts)
    assert survives_any_host(found, hosts)
    assert found.exposed == ()


def test_a_layer_that_must_lie_on_one_host_is_named():
    hosts = {0: "a", 1: "a", 2: "a", 3: "b"}
    found = changed([[0, 1], [2, 3]], (), hosts=hosts)
    assert found.exposed
    assert not survives_any_host(found, hosts)


# --- arguments ------------------------------------------------------------------------------------


def test_the_order_of_arguments_changes_nothing():
    shuffled = {size: TEMPLATES[size] for size in (4, 2, 5, 3)}
    assert changed(START, [12, 3, 1], [20, 21]) == changed(START, {1, 3, 12}, [20, 21], templates=shuffled)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lost": [99]}, r"lost node\(s\) \[99\]; expected nodes of a pipeline"),
        ({"drained": [99]}, r"drained node\(s\) \[99\]"),
        ({"lost": [1], "drained": [1]}, r"node\(s\) \[1\] both lost and drained"),
        ({"joined": [1]}, r"node\(s\) \[1\] twice"),
        ({"joined": [30, 30]}, r"node\(s\) \[30\] twice"),
        ({"layer_bytes": [1] * 3}, r"state of 3 layer\(s\), templates of \[5\]; expected equal"),
    ],
)
def test_bad_input_gets_one_message(more, message):
    with pytest.raises(InputError, match=message):
        changed(START, **more)
