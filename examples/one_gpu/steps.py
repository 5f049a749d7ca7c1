"""Training steps of models of transformers on one GPU, from their config.json.

PyTorch alone: weights in 32 bits, autocast to bf16, fused attention of PyTorch, fused AdamW.
``STEP_MODEL`` names the config.json; `make_step` is what ``makespan profile`` asks for.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from makespan.planning import Layout


def make_model(path: str, recomputes: bool) -> Any:
    """Return a model with new weights on the GPU."""
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config.use_cache = False
    kind = AutoModelForMaskedLM if "ForMaskedLM" in given["architectures"][0] else AutoModelForCausalLM
    with torch.device("cuda"):
        model = kind.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_step(layout: Layout, seq: int, batch: int) -> Callable[[], None]:
    """Return a function that trains on one batch, micro-batch by micro-batch."""
    torch.manual_seed(0)
    model = make_model(os.environ["STEP_MODEL"], layout.recompute == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (batch, seq), device="cuda")
    parts = tokens.split(layout.micro_batch)

    def step() -> None:
        for part in parts:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
