"""What processes find in models of the transformers package, and whether what they make of it is right."""

import json
import warnings
from functools import partial
from pathlib import Path

import hf_zoo
import small_models
import torch
import torch.distributed as dist
from sequence_cases import gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from makespan.slapo import (
    ScheduleError,
    StructureError,
    VerificationError,
    Verify,
    apply_plan,
    build,
    create_schedule,
)

SHARED = "recompute=full:0.5 mb1"


def rows_of(names, path):
    """Split and recompute each model on all processes, cut it in two in one of them, and write the rows."""
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([other]) for other in range(n)][rank]
    mine = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        for place, name in enumerate(names):
            row = _shared(name, n)
            if n == 2:
                row["context"] = _context(name, n)
                if place % n == rank:
                    row["cut in two"] = _cut(name, alone)
                mine[name] = row
            else:
                mine[name] = {"split by 4": row["split by 2"], "sequences": row["sequences"]}
    gathered = [None] * n
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        rows = {name: {k: v for part in gathered for k, v in part[name].items()} for name in names}
        Path(path).write_text(json.dumps(rows), encoding="utf-8")


def _verified(sch, name, apply, **options):
    """Verify what a function applies; return the report, or the reason why there is none."""
    floats = [key for key, value in hf_zoo.inputs(name).items() if value.is_floating_point()]
    if floats:  # pictures and sounds are no output of another model
        options["input_grads"] = []
    check = Verify(sch, hf_zoo.inputs(name), **options)
    with check:
        apply()
    return check.report


def _shared(name, n):
    model, sequences = hf_zoo.model(name), "verified"
    n_whole = sum(one.numel() for one in model.parameters())
    sch = create_schedule(model)
    try:
        report = _verified(sch, name, lambda: apply_plan(sch, f"tp{n} {SHARED}", hf_zoo.inputs(name)))
    except StructureError as error:
        sequences = "no: " + str(error).partition(": ")[2].removesuffix("; expected a plan without it (nosp)")
        report = _verified(sch, name, lambda: apply_plan(sch, f"tp{n} nosp {SHARED}", hf_zoo.inputs(name)))
    assert report.count("parameter gradient") and report.is_equal
    assert not any("not compared" in note for note in report.notes), report.notes
    build(sch)
    found = sch.metadata.structure
    roles = {}
    for part in found.parts:
        roles.setdefault(part.role, set()).add(part.how)
    n_recomputed = sum(entry.op == "checkpoint" for entry in sch.metadata.journal)
    share = sum(one.numel() for one in sch.mod.parameters()) / n_whole
    return {
        "layers": " + ".join(str(len(paths)) for paths in found.layers),
        "attention": _attention(roles),
        "feed-forward": _feed_forward(found),
        "vocabulary": _vocabulary(roles),
        "split by 2": f"verified, {100 * share:.0f} %",
        "sequences": sequences,
        "recomputed": f"{n_recomputed} of {sum(map(len, found.layers))}",
        "whole": "; ".join(dict.fromkeys(part.reason for part in _important(found.kept_whole))),
    }


def _context(name, n):
    """Return how far processes that hold parts of sequences throughout the layers compute the same."""
    model = hf_zoo.model(name)
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        config.use_cache = False  # what a process keeps of keys and values is that of its tokens
    sch = create_schedule(model)
    try:
        report = _verified(sch, name, lambda: apply_plan(sch, f"cp{n} {SHARED}", hf_zoo.inputs(name)))
    except StructureError as error:
        assert "context parallelism cannot be placed in" in str(error), error
        return "no: " + str(error).split(": ", 2)[2].removesuffix("; expected a plan without cp")
    assert report.count("parameter gradient") and report.is_equal
    assert not any("not compared" in note for note in report.notes), report.notes
    build(sch)
    return "verified"


def experts():
    """Experts that are dealt out to the processes compute the same, whole sequences or parts of them."""
    n = dist.get_world_size()
    for name in ("Mixtral", "Qwen3Moe", "DeepseekV3"):
        plans = f"tp{n} ep{n} mb1 nosp", f"tp{n} ep{n} mb1 recompute=full"
        for plan in (*plans, f"dp{n} ep{n} mb1", f"cp{n} ep{n} mb1"):
            model = hf_zoo.model(name)
            model.config.use_cache = False  # that of a process has its tokens only
            sch = create_schedule(model)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "apply_plan of")
                inputs = hf_zoo.inputs(name)
                report = _verified(sch, name, partial(apply_plan, sch, plan, inputs))
            assert report.is_equal and report.count("parameter gradient in training")
            assert not any("not compared" in note for note in report.notes), report.notes
            dealt = [part.path for part in sch.metadata.structure.parts if part.how == "experts"]
            assert dealt and all(sch.get_module(path).num_experts == 4 // n for path in dealt)
            build(sch)


def experts_of_own_samples():
    """So they are to processes with samples of their own, beside those that share all else."""
    for name, plan in (
        ("Mixtral", "tp2 ep2"), ("Mixtral", "tp2 ep4 nosp"), ("Qwen3Moe", "tp2 ep4 recompute=full"),
        ("DeepseekV3", "tp2 ep2 nosp"), ("DeepseekV3", "tp2 ep4"), ("Mixtral", "cp2 ep4"),
        ("Qwen3Moe", "cp2 ep4 recompute=full"),
    ):  # fmt: skip
        beside, kind = plan[:2], {"tp": "group", "cp": "context_group"}[plan[:2]]
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("ep", beside))
        groups = {kind: mesh.get_group(beside), "expert_group": mesh.get_group("ep")}
        own, count = mesh.get_local_rank("ep"), mesh.size(0)
        whole, model = (hf_zoo.model(name).train() for _ in range(2))
        given = hf_zoo.inputs(name) | {"use_cache": False}
        tokens = given["input_ids"]
        tokens = torch.cat([tokens, tokens.flip(1) + 1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "apply_plan of")
            sch = apply_plan(model, f"dp{count} {plan} mb1", hf_zoo.inputs(name), **groups)
        assert any(part.how == "experts" for part in sch.metadata.structure.parts)
        build(sch, mesh=mesh)
        expected = whole(**given | {"input_ids": tokens}).logits
        made = model(**given | {"input_ids": tokens.chunk(count)[own]}).logits
        torch.testing.assert_close(made, expected.chunk(count)[own], rtol=1e-4, atol=1e-5)
        for logits in (made, expected):
            logits.square().mean().backward()
        size = max(one.grad.abs().max() for one in whole.parameters() if one.grad is not None)
        for key, wanted, found in gradients(model, whole):
            said = f"{name} {plan}: {key}"
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * size, msg=said)


def _important(parts):
    """Leave out what no schedule would cut, such as the choice of an expert."""
    return [part for part in parts if "no linear layer reads" not in part.reason]


def _attention(roles):
    kinds = [
        ("fused" if any(role == f"{where}: queries, keys, values" for role in roles) else "separate")
        + (" cross" if where == "cross-attention" else "")
        for where in ("attention", "cross-attention")
        if "rows" in roles.get(f"{where}: output", ())
    ]
    return ", ".join(kinds) or "whole"


def _feed_forward(found):
    parts = found.parts
    columns = [part for part in parts if part.role == "feed-forward: in"]
    rows = [part for part in parts if part.role == "feed-forward: out"]
    paths = {part.path for part in columns}
    is_fused = any(step.path in paths and "groups" in step.arguments for step in found.steps)
    kinds = ["gated" if len(columns) > len(rows) else "fused" if is_fused else "plain"] if rows else []
    kinds += ["experts"] * any(part.role == "experts" for part in parts)
    return ", ".join(kinds) or "whole"


def _vocabulary(roles):
    if "table of tokens" not in roles:
        return "none"
    if roles["table of tokens"] == {"whole"}:
        return "whole"
    head = next((role for role in roles if role.startswith("head")), "")
    return "tied" if "tied" in head else "table and head" if head else "table"


def _cut(name, alone):
    """Return how far a model in two stages computes the same."""
    sch = create_schedule(hf_zoo.model(name), group=alone)
    try:
        _verified(sch, name, lambda: apply_plan(sch, "pp2 mb1", hf_zoo.inputs(name)))
    except VerificationError as error:
        if "at training: traced with an example" not in str(error):
            return "no: " + str(error).splitlines()[1].strip()
    except ScheduleError as error:
        return "no: " + str(error).split(" (/")[0]
    else:
        return "verified"
    sch = create_schedule(hf_zoo.model(name).eval(), group=alone)
    _verified(sch, name, lambda: apply_plan(sch, "pp2 mb1", hf_zoo.inputs(name)), eval_mode=False)
    return "verified, one mode"


def every_type(kinds):
    """Split a small model of each type and verify it with all gradients; nothing is refused."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        for kind in kinds:
            _verified_in_parts(kind, _model_of(kind))


def in_double(kinds):
    """Verify types whose own gradients are rounded too much in double precision, where parts are exact."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        for kind in kinds:
            single, double = _model_of(kind), _model_of(kind).double()
            for model in (single, double):
                model.set_experts_implementation("eager")  # their kernel has no double precision
            wanted = dict(single.named_parameters())
            single(input_ids=TOKENS).logits.square().mean().backward()
            with _Double():
                double(input_ids=TOKENS).logits.square().mean().backward()
                off = {
                    name: float((wanted[name].grad - one.grad).abs().max() / one.grad.abs().max())
                    for name, one in double.named_parameters()
                }
                # The whole model alone is off by more than parts may differ (1e-4): the gradients of decays.
                assert max(off.values()) > 2e-4 and "linear_attn" in max(off, key=off.get), (kind, off)
                report = _verified_in_parts(kind, double)
            for place in ("parameter gradient", "parameter gradient in training"):
                assert report.largest(place)[1] < 1e-12, (kind, str(report))


TOKENS = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))


class _Double(TorchFunctionMode):
    """Compute in double precision what a model computes in single precision, whatever its own is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.double if value is torch.float else value for value in args]
        kwargs = {
            key: torch.double if value is torch.float else value for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def _model_of(kind):
    torch.manual_seed(0)
    return small_models.class_of(kind, small_models.LANGUAGE)(small_models.config_of(kind)).eval()


def _verified_in_parts(kind, model):
    sch = create_schedule(model)
    with Verify(sch, {"input_ids": TOKENS}) as check:
        apply_plan(sch, f"tp{dist.get_world_size()} nosp mb1", {"input_ids": TOKENS})
    assert check.report.is_equal, kind
    parts = sch.metadata.structure.parts
    assert sum(part.how != "whole" for part in parts) >= 2, kind
    return check.report
