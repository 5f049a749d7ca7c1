"""One training step of a model of transformers, from its config.json, as plain users train it.

PyTorch alone: weights in fp32, autocast to bf16, attention by scaled_dot_product_attention, AdamW (fused).
"""
import json, os
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM


def make_model(path, recompute):
    given = json.loads(open(path).read())
    kind = given.pop("model_type")
    config = AutoConfig.for_model(kind, **given)
    config.use_cache = False
    maker = AutoModelForMaskedLM if "ForMaskedLM" in given["architectures"][0] else AutoModelForCausalLM
    with torch.device("cuda"):
        model = maker.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_step(layout, seq, batch):
    torch.manual_seed(0)
    model = make_model(os.environ["STEP_MODEL"], layout.recompute == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (batch, seq), device="cuda")
    parts = tokens.split(layout.micro_batch)

    def step():
        for part in parts:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.parameters = sum(p.numel() for p in model.parameters())
    return step
