"""Laws of the instruction stream of a stage."""

import itertools

import pytest

from makespan.papers.oobleck.runtime._instructions import instructions, n_buffers

SIZES = list(itertools.product(range(1, 7), range(1, 13)))
PAIRS = {"send_act": ("recv_act", 1), "send_grad": ("recv_grad", -1)}


def streams(n_stages, n_microbatches):
    return [list(instructions(stage, n_stages, n_microbatches)) for stage in range(n_stages)]


def passes(stream, kind):
    return [one.microbatch for one in stream if one.kind == kind]


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_each_microbatch_passes_each_stage_once_forward_and_then_once_backward(n_stages, n_microbatches):
    everything = list(range(n_microbatches))
    for stage, stream in enumerate(streams(n_stages, n_microbatches)):
        assert passes(stream, "fwd") == passes(stream, "bwd") == everything
        order = [(one.kind, one.microbatch) for one in stream]
        assert len(set(order)) == len(order)
        assert all(order.index(("fwd", k)) < order.index(("bwd", k)) for k in everything)
        ends = stage in (0, n_stages - 1)
        assert passes(stream, "load") == (everything if ends else [])
        warm_up = min(n_microbatches, n_stages - 1 - stage)
        kinds = [one.kind for one in stream if one.kind in ("fwd", "bwd")]
        assert kinds[: warm_up + 1].count("fwd") == min(warm_up + 1, n_microbatches)


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_no_stage_keeps_more_microbatches_than_it_has_buffers(n_stages, n_microbatches):
    for stage, stream in enumerate(streams(n_stages, n_microbatches)):
        room, kept = n_buffers(stage, n_stages, n_microbatches), {}
        assert room == max(2, min(n_stages - stage, n_microbatches))
        for one in stream:
            assert kept.setdefault(one.buffer, one.microbatch) == one.microbatch, "a buffer in use is taken"
            last = "bwd" if stage == 0 else "send_grad"
            if one.kind == last:
                del kept[one.buffer]
            assert len(kept) <= room and one.buffer < room


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_neighbours_send_and_receive_in_the_same_order(n_stages, n_microbatches):
    found = streams(n_stages, n_microbatches)
    for stage, stream in enumerate(found):
        for kind, (other, step) in PAIRS.items():
            if 0 <= stage + step < n_stages:
                assert passes(stream, kind) == passes(found[stage + step], other)
            else:
                assert passes(stream, kind) == []


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_transfers_that_block_until_both_sides_are_there_never_wait_for_each_other(n_stages, n_microbatches):
    """Each transfer is done by both sides at once, the worst that a transport can ask for."""
    waiting = streams(n_stages, n_microbatches)
    while any(waiting):
        moved = False
        for stage, stream in enumerate(waiting):
            while stream and stream[0].kind in ("load", "fwd", "bwd"):
                stream.pop(0)
                moved = True
            if stream and stream[0].kind in PAIRS:
                other, step = PAIRS[stream[0].kind]
                there = waiting[stage + step]
                if there and (there[0].kind, there[0].microbatch) == (other, stream[0].microbatch):
                    stream.pop(0)
                    there.pop(0)
                    moved = True
        assert moved, [stream[:1] for stream in waiting]


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_an_iteration_takes_two_slots_a_microbatch_and_two_for_each_further_stage(n_stages, n_microbatches):
    """A pass takes one slot, transfers none."""
    waiting, arrived, clock = streams(n_stages, n_microbatches), {}, [0] * n_stages
    while any(waiting):
        for stage, stream in enumerate(waiting):
            while stream:
                one = stream[0]
                if one.kind.startswith("recv"):
                    sent = arrived.get((stage, one.kind, one.microbatch))
                    if sent is None:
                        break
                    clock[stage] = max(clock[stage], sent)
                elif one.kind in PAIRS:
                    other, step = PAIRS[one.kind]
                    arrived[stage + step, other, one.microbatch] = clock[stage]
                else:
                    clock[stage] += one.kind in ("fwd", "bwd")
                stream.pop(0)
    assert max(clock) == 2 * (n_microbatches + n_stages - 1)
