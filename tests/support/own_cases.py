"""What processes do with the models of a user: each is scheduled step by step and verified."""

import torch
from own_models import Mixer, Vit, images
from torch.nn import functional as F

from makespan.slapo import create_schedule
from makespan.slapo.verification import Verify


def split_mlp(node):
    """Split an MLP by its inner width."""
    node["wide"].shard(["weight", "bias"], axis=0)
    node["wide"].sync("bwd_post", "all_reduce")
    node["narrow"].shard("weight", axis=1)
    node["narrow"].sync("fwd_post", "all_reduce")


def split_attention(node):
    """Split heads; queries, keys and values are one layer, of which each third is cut."""
    node["qkv"].shard(["weight", "bias"], axis=0, groups=3)
    node["qkv"].sync("bwd_post", "all_reduce")
    node.set_attr(heads=node.mod.heads // node.world_size)
    node["project"].shard("weight", axis=1)
    node["project"].sync("fwd_post", "all_reduce")


def bias_gelu(product, bias):
    return F.gelu(product + bias)


def attention(query, key, value, scale):
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    return torch.matmul(F.dropout(torch.softmax(scores, dim=-1), 0.1), value)


def efficient(query, key, value, scale):
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def fuse_mlp(node):
    """Compile bias and activation together."""
    node["wide"].decompose()
    (match,) = node.find(bias_gelu)
    node.fuse(match, compiler="dynamo", name="BiasGelu")


def mixer():
    model = Mixer()
    sch = create_schedule(model)
    with Verify(sch, (images(),)):
        for layer in ("layers.0", "layers.1"):
            for part in ("over_tokens", "over_channels"):
                split_mlp(sch[layer][part])
                fuse_mlp(sch[layer][part])
        sch["layers.0"].checkpoint()


def vit():
    model = Vit()
    sch = create_schedule(model)
    with Verify(sch, (images(),)):
        for layer in ("layers.0", "layers.1"):
            split_mlp(sch[layer]["mlp"])
            split_attention(sch[layer]["attention"])
            fuse_mlp(sch[layer]["mlp"])
            (match,) = sch[layer]["attention"].find(attention)
            sch[layer]["attention"].replace(efficient, match)
        sch["layers.1"].checkpoint()
