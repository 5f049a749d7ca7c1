"""The registry of policies, and FIFO."""

import ast
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from toy_cluster import simulate, toy_catalogue, toy_job, toy_nodes

import makespan.policies
from makespan.errors import UnknownNameError
from makespan.hardware import ClusterSpec
from makespan.policies import REGISTRY, policy, policy_names
from makespan.sim import validate_schedule
from makespan.studies import TableCatalogue

FILES = sorted(Path(makespan.policies.__file__).parent.rglob("*.py"))


def test_a_policy_is_found_by_its_name():
    assert policy("fifo") is REGISTRY["fifo"]
    assert policy_names() == tuple(sorted(REGISTRY))
    with pytest.raises(UnknownNameError, match=r"unknown policy 'fifi'; expected .*Did you mean 'fifo'\?"):
        policy("fifi")


def test_every_policy_of_every_module_is_in_the_registry():
    folder = FILES[0].parent
    modules = [path for path in FILES if "POLICIES" in _assigned(path)]
    names = []
    for path in modules:
        dotted = ".".join(path.relative_to(folder).with_suffix("").parts)
        names += [entry.name for entry in importlib.import_module(f"makespan.policies.{dotted}").POLICIES]
    assert sorted(names) == list(REGISTRY)


def _assigned(path):
    body = ast.parse(path.read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_a_policy_says_what_it_is_and_needs():
    for name, entry in REGISTRY.items():
        _check_entry(name, entry)


def _check_entry(name, entry):
    assert entry.name == name and entry.title
    assert type(entry).__doc__
    assert entry.interval_s is None or entry.interval_s > 0
    assert isinstance(entry.references, tuple)
    for flag in ("is_clairvoyant", "honours_guarantees"):
        assert isinstance(getattr(entry, flag), bool)
    assert hash(entry) == hash(entry)  # an immutable object
    with pytest.raises(AttributeError):
        entry.name = "other"


def _peeks(source):
    """Return what a policy reads that it must not: true times, requested steps, private fields of others."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        # A task of Morphling has steps of its own, which come from `steps_left` or an estimate.
        is_requested_work = node.attr == "steps" and owner not in {"self", "task", "victim"}
        is_private = node.attr[0] == "_" != node.attr[-1] and owner not in {"self", "room", "other"}
        if node.attr in {"iter_time_s", "rate"} or is_requested_work or is_private:
            yield f"{owner}.{node.attr}"


def test_a_policy_decides_by_predictions_and_reads_nothing_private():
    assert {path.name: found for path in FILES if (found := list(_peeks(path.read_text())))} == {}
    for peek in ("item.iter_time_s", "item.rate", "job.spec.steps", "spec.steps", "job._steps_left"):
        assert list(_peeks(f"x = {peek} + task.steps + item.predicted_iter_time_s")) == [peek]


def test_every_policy_gives_jobs_devices_of_the_type_that_they_need():
    fast = toy_nodes(2, 8)
    slow_node = replace(fast.nodes[0], gpu=replace(fast.nodes[0].gpu, name="slow"))
    mixed = ClusterSpec("mixed", (slow_node, fast.nodes[0], slow_node, fast.nodes[0]), fast.network)
    catalogue = TableCatalogue(
        replace(item, gpu_types=(gpu.name,) * item.n_nodes, key=None)
        for scale, gpu in ((1.0, fast.nodes[0].gpu), (1.4, slow_node.gpu))
        for key in ("roberta", "gpt2")
        for item in toy_catalogue(scale).all(key)
    )
    sizes = (1, 8, 2, 4, 8, 1, 4, 2, 8, 1)
    jobs = [
        toy_job(
            f"job-{k}",
            7.0 * k,
            workload="gpt2" if size == 8 else "roberta",
            n_gpus=size,
            plan="ga",
            steps=40 + 90 * (k % 3),
            is_guaranteed=k % 4 == 0,
        )
        for k, size in enumerate(sizes * 3)
    ]
    for name, entry in REGISTRY.items():
        result = simulate(jobs, mixed, catalogue, entry, restart_delay_s=2.0)
        found = validate_schedule(result.events, jobs, mixed, catalogue, 2.0, outcomes=result.outcomes)
        assert found == [], name
        held = result.events[result.events["n_gpus"] > 0]["nodes"]
        is_fast = {int(share.split(":")[0]) % 2 for text in held for share in text.split()}
        assert is_fast == {0, 1} or name not in {"fifo", "sia", "morphling-lookahead", "morphling-work"}


# --- FIFO -------------------------------------------------------------------------------


def started(jobs, spec, **options):
    events = simulate(jobs, spec, toy_catalogue(), policy("fifo"), restart_delay_s=1.0, **options).events
    rows = events[events["kind"] == "started"]
    return {row.job_id: (row.time_s, row.nodes) for row in rows.itertuples()}


def test_the_head_of_the_queue_holds_back_those_behind_it():
    jobs = [
        toy_job("a", 0.0, n_gpus=2, steps=100),
        toy_job("b", 1.0, n_gpus=4, steps=1),
        toy_job("c", 2.0, n_gpus=1, steps=1),
    ]
    starts = started(jobs, toy_nodes(1, 4))
    assert starts["a"][0] == 0.0
    assert starts["b"][0] > 40.0 and starts["c"][0] > starts["b"][0]


def test_the_node_that_is_filled_best_is_taken():
    jobs = [toy_job("a", n_gpus=2, steps=9), toy_job("b", n_gpus=8, steps=9), toy_job("c", n_gpus=2, steps=9)]
    starts = started(jobs, toy_nodes(3, 8))
    assert [starts[name][1] for name in "abc"] == ["0:2", "1:8", "0:2"]


def test_a_job_is_spread_where_no_node_has_room_for_all_of_it():
    jobs = [toy_job("a", n_gpus=2, steps=99), toy_job("b", n_gpus=2, steps=99), toy_job("c", 1.0, n_gpus=4)]
    assert started(jobs, toy_nodes(2, 4))["c"] == (1.0, "1:4")
    jobs[2] = toy_job("c", 1.0, n_gpus=8)
    assert started(jobs, toy_nodes(3, 4))["c"] == (1.0, "1:4 2:4")


def test_cpu_threads_hold_a_job_back_as_devices_do():
    jobs = [toy_job("a", steps=9), toy_job("b", steps=9)]
    starts = started(jobs, toy_nodes(1, 4, cpu_threads=7))
    assert starts["b"][0] > 0.0


def test_nodes_of_two_kinds_are_both_used():
    large, small = toy_nodes(1, 8), toy_nodes(1, 2)
    mixed = ClusterSpec("mixed", (*large.nodes, *small.nodes), large.network)
    starts = started([toy_job("a", n_gpus=2, steps=9), toy_job("b", n_gpus=8, steps=9)], mixed)
    assert starts == {"a": (0.0, "1:2"), "b": (0.0, "0:8")}
