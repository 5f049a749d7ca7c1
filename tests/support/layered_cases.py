"""Verification by layers beside that of the whole model; each process calls every function."""

import copy
import functools
from unittest import mock

import parallel_cases
import torch
import torch.distributed as dist
import verify_cases
from library_cases import EVERYTHING
from torch import nn
from verify_cases import HIDDEN, ids, model, shard, shard_vocabulary

from makespan.slapo import SCHEDULES, VerificationError, Verify, apply_schedule, create_schedule
from makespan.slapo.comparison import GRADIENT, OUTPUT, tolerance_for
from makespan.slapo.layered import LayerPasses, NoLayersError
from makespan.slapo.layouts import Ranks
from makespan.slapo.passes import Call, Passes, checked_call
from makespan.slapo.weights import same_weights
from makespan.training.zoo import build_family, family_batch, family_spec

CASES = (
    "part_by_part", "own_inputs", "errors_pass",
    "missing_backward_sync", "missing_forward_sync", "missing_sync_of_parameters", "wrong_axis",
    "wrong_axis_of_a_hook", "wrong_partition_of_qkv", "double_scaling", "other_steps", "one_process_alone",
)  # fmt: skip


def cases_of_the_whole_by_layers():
    """A verification by layers accepts and finds what that of whole models does, with its texts."""
    by_layers = functools.partial(Verify, by_layers=True)
    with mock.patch.object(verify_cases, "Verify", by_layers):
        for name in CASES:
            getattr(verify_cases, name)()


def both_ways(change, inputs=ids, build=model, **options):
    """Verify a change of two equal models, whole and by layers; return the second report and the verdict."""
    reports = []
    for by_layers in (False, True):
        check = Verify(create_schedule(build()), inputs, by_layers=by_layers, **options)
        try:
            with check:
                change(check._sch)
        except VerificationError:
            assert check.report is not None
        reports.append(check.report)
    whole, layered = reports
    assert whole.is_equal == layered.is_equal, f"{whole}\n\n{layered}"
    if not layered.layers:  # the text is that of the whole, with the reason
        notes = [note for note in layered.notes if "not by layers" in note]
        assert len(notes) == 1 and str(whole) == str(layered).replace(f"\n  note: {notes[0]}", "")
    return layered


def layers_agree():
    """A sharded model is compared by layers; equal ones are compared once."""

    def change(sch):
        shard(sch)
        shard_vocabulary(sch)

    report = both_ways(change, build=lambda: model(dist.get_rank()))
    assert report.is_equal and report.layers == {"layers.0": ["layers.0", "layers.1"]}, str(report)
    assert report.count("layer output") == 1 and report.count("layer input") == 2

    def half(sch):
        change(sch)
        sch["layers.1"].checkpoint()

    report = both_ways(half)
    assert [*report.layers] == ["layers.0", "layers.1"]


def families_agree():
    """Families of the zoo are compared by layers, with three exceptions.

    ALBERT has one layer, layers of T5 are handed parts of a table of positions, and batch norm of few samples
    magnifies rounding, which only a comparison of the whole model measures.
    """
    wholes = ("albert",) if dist.get_world_size() == 1 else ("albert", "t5", "wideresnet")
    for family in SCHEDULES:
        sch = create_schedule(build_family(family))
        with Verify(sch, family_batch(family_spec(family), 2, 0).inputs, by_layers=True) as check:
            apply_schedule(sch, family, **EVERYTHING)
        assert bool(check.report.layers) == (family not in wholes), f"{family}: {check.report}"


def mistakes_of_one_layer():
    """A mistake in the second layer alone is found, since that layer then has another structure."""
    for left_out in (
        "1 attention backward",
        "1 up backward",
        "1 down forward",
        "1 output forward",
        "1 heads",
    ):
        report = both_ways(lambda sch, left_out=left_out: shard(sch, left_out))
        assert not report.is_equal and "not by layers" in str(report), left_out


def wrong_place_of_an_exchange():
    """A sum after the activation rather than before it."""

    def change(sch):
        shard(sch, "0 down forward")
        sch["layers.0.mlp"].sync("fwd_post", "all_reduce")  # which adds the bias of every process

    assert not both_ways(change).is_equal


def parts_between_layers():
    """Layers that are handed parts of the sequence are not compared by layers."""
    inputs = (torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(0)),)
    build = functools.partial(_seeded, parallel_cases.Stack)
    report = both_ways(parallel_cases.shard_along_sequence, inputs=inputs, build=build)
    assert bool(report.layers) == (dist.get_world_size() == 1), str(report)


def _seeded(build):
    torch.manual_seed(0)
    return build()


class Twice(nn.Module):
    """Two copies of a module as layers between other operations."""

    def __init__(self, module):
        super().__init__()
        self.layers = nn.ModuleList([module, copy.deepcopy(module)])

    def forward(self, *inputs):
        results = [layer(*inputs) for layer in self.layers]
        return results[0] * torch.tanh(results[1])


def verdicts(original, scheduled, inputs):
    """Return the verdicts on two models, whole and by layers."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), None)
    tolerances = {
        kind: functools.partial(tolerance_for, kind=kind, rtol=None, atol=None) for kind in (OUTPUT, GRADIENT)
    }
    found = []
    for by_layers in (False, True):
        weights = same_weights(original, scheduled, [ranks], torch.device("cpu"), 0)
        call = checked_call(original, Call(tuple(inputs), {}), "", None)
        passes = Passes(
            weights, call, weights.scheduled, ranks, torch.device("cpu"), 0, tolerances, None, True
        )
        if by_layers:
            try:
                LayerPasses(passes).run("")
            except NoLayersError:
                found.append(False)
            else:
                found.append(True)
        else:
            found.append(passes.run(passes.reference()))
    return found


def parallel_cases_both_ways():
    """Every case of sharded modules, twice in a model, and without an exchange of the scheduled one."""
    seen = []

    def compared(reference, scheduled, *inputs, **named):
        if named:
            return
        pair = [Twice(copy.deepcopy(one)) for one in (reference, scheduled)]
        whole, layered = verdicts(*pair, inputs)
        assert whole and layered, type(reference).__name__
        broken = pair[1]
        hooked = [module for module in broken.modules() if module._forward_hooks or module._forward_pre_hooks]
        if hooked:
            hooked[-1]._forward_hooks.clear()
            hooked[-1]._forward_pre_hooks.clear()
            whole, layered = verdicts(*pair, inputs)
            assert whole == layered or not layered, type(reference).__name__
            seen.append((type(reference).__name__, whole, layered))

    with mock.patch.object(parallel_cases, "assert_same", compared):
        for case in (
            "mlp", "fused_attention", "vocabulary", "embedding_columns", "transposed_linear_layers",
            "tied_vocabulary",
        ):  # fmt: skip
            getattr(parallel_cases, case)()
    assert len(seen) >= 5
    if dist.get_world_size() > 1:
        assert sum(not whole for _, whole, _ in seen) >= 4, seen
