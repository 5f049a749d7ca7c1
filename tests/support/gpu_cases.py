"""Plans that share models of this folder among devices; every function runs in each process."""

import warnings

import sequence_models
import torch
import torch.distributed as dist
from parallel_cases import labelled
from sequence_cases import gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from makespan.slapo import apply_plan, build, create_schedule

GROUPS = {"tp": "group", "cp": "context_group", "ep": "expert_group"}
PLANS = {
    2: [
        ("Layer", "tp2", ("tp",)), ("Layer", "cp2 recompute=full", ("cp",)),
        ("ChoiceLayer", "tp2 ep2 nosp", ("tp",)), ("ChoiceLayer", "dp2 ep2", ("ep",)),
        ("ChoiceLayer", "cp2 ep2", ("cp",)), ("Layer", "pp2 recompute=full:0.5", ("pp",)),
        ("Layer", "pp2 vp2 zero-bubble recompute=full:0.5", ("pp",)),
    ],
    4: [
        ("SharedLayer", "cp2 tp2 ep4", ("cp", "tp")), ("SharedLayer", "dp2 tp2 ep4", ("ep", "tp")),
        ("Layer", "pp2 tp2 zero-bubble", ("pp", "tp")), ("ChoiceLayer", "pp2 cp2 ep2", ("pp", "cp")),
    ],
}  # fmt: skip
"""Models, their plans, and dimensions of the mesh with two processes each, by the number of processes."""


def planned(device):
    """Compare results and gradients on devices with those of whole models on the CPU."""
    words = torch.cat([sequence_models.words(seed=seed) for seed in range(2)])
    shape = (len(words), sequence_models.SEQ, sequence_models.WORDS)
    target = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for kind, plan, names in PLANS[dist.get_world_size()]:
        mesh = init_device_mesh(device, (2,) * len(names), mesh_dim_names=names)
        groups = {GROUPS[name]: mesh.get_group(name) for name in names if name != "pp"}
        whole, model = (sequence_models.seeded(kind, depth=4).eval() for _ in range(2))
        model = model.to(where)
        model = model if groups else create_schedule(model, group=alone)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "apply_plan of")
            sch = apply_plan(model, f"{plan} mb1", words[:2].to(where), **groups)
        place = mesh.get_local_rank("ep") if "ep" in names else 0
        given, wanted = ((one.chunk(2)[place] if "ep" in names else one).to(where) for one in (words, target))
        expected = whole(words)
        F.mse_loss(expected, target).backward()
        if "pp" in names:
            options = {"n_microbatches": 2, "loss_fn": F.mse_loss}
            stage, pipeline = build(sch, "pipeline", mesh=mesh, device=where, **options)
            pipeline.step(given, target=wanted)
        else:
            stage, _ = build(sch, mesh=mesh, device=where)
            made = stage(given)
            F.mse_loss(made, wanted).backward()
            of_whole = expected.chunk(2)[place] if "ep" in names else expected
            torch.testing.assert_close(made.cpu(), of_whole, rtol=1e-3, atol=1e-4)
        for one in stage if isinstance(stage, nn.ModuleList) else [stage]:
            for name, gradient, found in gradients(one, whole):
                said = labelled(f"{plan}: {name}")
                assert found.device == where
                torch.testing.assert_close(found.cpu(), gradient, rtol=1e-3, atol=1e-5, msg=said)
