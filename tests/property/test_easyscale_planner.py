"""The intra-job planner against brute force, and what holds for every plan."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from makespan.easyscale import IntraJobPlanner
from makespan.errors import InputError

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
RATES = st.lists(st.floats(0.05, 40.0), min_size=3, max_size=3)


@cache
def vectors(max_p, most=6):
    """All numbers of GPUs of three types with at most ``most`` of each and one to maxP in all."""
    every = itertools.product(range(most + 1), repeat=3)
    return [nums for nums in every if 1 <= sum(nums) <= max_p]


@cache
def slots(max_p):
    """All numbers of logical workers a GPU, one or more of each type."""
    return np.array(list(itertools.product(range(1, max_p + 1), repeat=3)))


def brute_force(rates, max_p, nums):
    """Shortest time of a mini-batch over all numbers of logical workers a GPU."""
    given, chosen = np.array(nums), slots(max_p)
    used = given > 0
    times = (chosen / np.array(rates))[:, used].max(axis=1)
    return times[chosen @ given >= max_p].min()


@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (4.61, 3.02, 2.49), (1.0, 0.997, 0.31)])
def test_every_plan_is_the_best_for_all_small_numbers_of_gpus(rates):
    for max_p in range(1, 9):
        planner = IntraJobPlanner(rates, max_p)
        for nums in vectors(max_p):
            expected_s = brute_force(rates, max_p, nums)
            assert planner.plan(nums).step_time_s == pytest.approx(expected_s, rel=1e-8), (max_p, nums)


@given(RATES, st.integers(1, 8))
@SETTINGS
def test_every_plan_is_the_best_whatever_the_rates(rates, max_p):
    planner = IntraJobPlanner(rates, max_p)
    for nums in vectors(max_p):
        assert planner.plan(nums).step_time_s == pytest.approx(brute_force(rates, max_p, nums), rel=1e-8)


@given(RATES, st.integers(1, 32), st.data())
@SETTINGS
def test_throughput_and_waste_are_what_the_equations_say(rates, max_p, data):
    """Equations (1a) to (1e) in full against the two identities that follow from them."""
    nums = data.draw(st.tuples(*[st.integers(0, 12)] * 3).filter(lambda it: 1 <= sum(it) <= max_p))
    plan = IntraJobPlanner(rates, max_p).plan(nums)
    used = [(n, rate, a) for n, rate, a in zip(nums, rates, plan.threads, strict=True) if n]
    capacity = sum(n * a for n, _, a in used)
    capability = sum(n * rate for n, rate, _ in used)
    overload_s = max(a / rate for _, rate, a in used)
    waste = sum(n * (rate - a / overload_s) for n, rate, a in used) + (capacity - max_p) / overload_s
    assert capacity >= max_p and all(a >= 1 for _, _, a in used)
    assert plan.step_time_s == pytest.approx(overload_s)
    assert plan.waste == pytest.approx(waste / capability, abs=1e-9) and 0 <= plan.waste < 1
    assert plan.throughput == pytest.approx(capability * (1 - waste / capability))
    assert plan.throughput == pytest.approx(max_p / overload_s)
    assert plan.waste == pytest.approx(1 - max_p / (overload_s * capability), abs=1e-9)


@given(RATES, st.integers(1, 32), st.data())
@SETTINGS
def test_every_logical_worker_has_one_gpu_and_no_gpu_takes_longer_than_planned(rates, max_p, data):
    nums = data.draw(st.tuples(*[st.integers(0, 12)] * 3).filter(lambda it: 1 <= sum(it) <= max_p))
    planner = IntraJobPlanner(rates, max_p)
    plan = planner.plan(nums)
    mapping = planner.mapping(plan)
    types = [number for number, count in enumerate(nums) for _ in range(count)]
    assert len(mapping) == sum(nums) and all(mapping)
    assert [rank for ranks in mapping for rank in ranks] == list(range(max_p))
    times = [len(ranks) / rates[kind] for ranks, kind in zip(mapping, types, strict=True)]
    assert all(len(ranks) <= plan.threads[kind] for ranks, kind in zip(mapping, types, strict=True))
    assert max(times) <= plan.step_time_s * (1 + 1e-9)


def test_uneven_numbers_of_equal_gpus_waste_and_surplus_leaves_the_last_gpu_first():
    """Three equal GPUs do the work of two where four logical workers share them."""
    planner = IntraJobPlanner((2.0,), 4)
    two, three = planner.plan((2,)), planner.plan((3,))
    assert two.throughput == three.throughput == 4.0
    assert (two.waste, three.waste) == (0.0, pytest.approx(1 / 3))
    assert planner.mapping(three) == ((0, 1), (2,), (3,))
    assert IntraJobPlanner((3.0, 1.0), 4).mapping(IntraJobPlanner((3.0, 1.0), 4).plan((1, 1))) == (
        (0, 1, 2),
        (3,),
    )


@pytest.mark.parametrize("max_waste", [0.1, 0.3])
def test_companions_are_all_plans_that_waste_little_and_every_single_gpu(max_waste):
    planner = IntraJobPlanner((3.1, 2.0, 0.0), 8)
    found = {plan.nums: plan for plan in planner.companions((4, 3, 9), max_waste)}
    expected = {
        nums
        for nums in itertools.product(range(5), range(4), [0])
        if 1 <= sum(nums) <= 8 and (sum(nums) == 1 or planner.plan(nums).waste <= max_waste)
    }
    assert set(found) == expected and all(plan == planner.plan(nums) for nums, plan in found.items())
    assert min(sum(plan.nums) for plan in planner.companions((4, 3, 9), max_waste, min_gpus=3)) == 3


@pytest.mark.parametrize(
    ("rates", "max_p", "nums", "message"),
    [
        ((1.0, 2.0), 4, (0, 0), "expected 2 numbers, in all from 1 to the 4"),
        ((1.0, 2.0), 4, (3, 2), "expected 2 numbers, in all from 1 to the 4"),
        ((1.0, 2.0), 4, (1,), "expected 2 numbers"),
        ((1.0, 0.0), 4, (1, 1), "none where the rate is 0"),
        ((0.0, 0.0), 4, (1, 0), "not all 0"),
        ((1.0, math.inf), 4, (1, 0), "expected finite"),
        ((1.0, 1.0), 0, (1, 0), "0 logical workers; expected 1 or more"),
    ],
)
def test_what_cannot_be_planned_is_refused(rates, max_p, nums, message):
    with pytest.raises(InputError, match=message):
        IntraJobPlanner(rates, max_p).plan(nums)
