"""The time model: from constants and features to named terms of one training iteration.

``T = T_pipe + T_p2p + T_sync + T_d2h + T_opt + T_data + T_const``, see the background page of
the emulator. Array operations only; every term is linear in something countable.
"""

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._calibration import CONSTANT_NAMES
from makespan.emulator._features import Features

__all__ = ["TERM_NAMES", "phases", "predict", "predict_terms"]

_Array = NDArray[np.float64]
_TERMS = """
forward backward recompute tensor_exchange stage_transfer gradient_exchange gradient_to_host
device_update host_update host_to_device offload_overhead parameter_gather data_loading node_wait fixed
"""
TERM_NAMES = tuple(_TERMS.split())
"""Names of the terms, in the order in which they are added."""
_OPTIMIZER = ("device_update", "host_update", "host_to_device", "offload_overhead", "parameter_gather")


def _named(theta: _Array) -> dict[str, _Array]:
    return {name: theta[..., index, np.newaxis] for index, name in enumerate(CONSTANT_NAMES)}


def _bandwidth(crosses: _Array, inter: _Array, intra: _Array, c: dict[str, _Array]) -> _Array:
    """Bandwidth of a ring: the cards, capped by the link inside the node."""
    inside = intra * c["e_nv"]
    return np.where(crosses > 0, np.minimum(inter * c["e_net"], inside), inside)


def _compute_terms(c: dict[str, _Array], x: Features, scale: _Array | float) -> dict[str, _Array]:
    stack = np.where(x["is_async"] > 0, c["s_async"], np.where(x["is_3d"] > 0, c["s_3d"], 1.0))
    scale = scale * stack
    forward = scale * (x["gemm_s"] / c["e_gemm"] + x["elementwise_s"] * c["kappa"])
    again = scale * (x["again_gemm_s"] / c["e_gemm"] + x["again_elementwise_s"] * c["kappa"])
    forward = forward + x["layer_passes"] * c["t_layer"]
    again = again + x["again_layer_passes"] * c["t_layer"]
    return {"forward": forward, "backward": c["k_bwd"] * forward, "recompute": again}


def _pipeline_terms(c: dict[str, _Array], x: Features) -> dict[str, _Array]:
    bandwidth = _bandwidth(
        x["tensor_crosses"], x["tensor_inter_bytes_per_s"], x["tensor_intra_bytes_per_s"], c
    )
    one_pass = x["tensor_bytes"] / bandwidth + x["tensor_reductions"] * c["a_coll"]
    transfer = x["transfer_inter_s"] / c["e_p2p"] + x["transfer_intra_s"] / c["e_nv"]
    return {
        "tensor_exchange": x["tensor_passes"] * one_pass,
        "stage_transfer": transfer + x["transfer_latency_s"] + x["hand_overs"] * c["t_stage"],
    }


def _exchange_time(c: dict[str, _Array], x: Features) -> _Array:
    """Plain exchange over a flat ring, or hierarchical where the stack allows it and it is faster."""
    bandwidth = _bandwidth(x["data_crosses"], x["data_inter_bytes_per_s"], x["data_intra_bytes_per_s"], c)
    step = c["a_net"] * x["network_hops"] + x["local_hops_s"]
    ring = x["ring_bytes"] / bandwidth + 2.0 * x["plain_buckets"] * step
    inside = x["hierarchical_intra_bytes"] / (x["data_intra_bytes_per_s"] * c["e_nv"])
    hierarchical = inside + x["hierarchical_card_s"] / c["e_net"] + 2.0 * x["plain_buckets"] * step
    return np.where(x["hierarchical"] > 0, np.minimum(ring, hierarchical), ring)


def _sync_terms(c: dict[str, _Array], x: Features, backward: _Array, forward: _Array) -> dict[str, _Array]:
    link = np.where(
        x["data_crosses"] > 0,
        np.minimum(x["data_inter_bytes_per_s"], x["data_intra_bytes_per_s"]),
        x["data_intra_bytes_per_s"],
    )
    step = x["partitioned_buckets"] * (c["a_zero"] * x["network_hops"] + x["local_hops_s"])
    plain = _exchange_time(c, x)
    hidden = np.minimum((1.0 - 1.0 / x["buckets"]) * plain, c["phi"] * backward / x["microbatches"])
    scatter = x["scatter_bytes"] / (link * c["e_rs"]) + np.where(x["scatter_bytes"] > 0, step, 0.0)
    fully = x["sharded_bytes"] / (link * c["e_rs"]) + np.where(x["sharded_bytes"] > 0, 3.0 * step, 0.0)
    sharded = np.maximum(fully - c["phi"] * (forward + backward), fully / x["buckets"])
    e_gather = np.where(x["on_host"] > 0, c["e_net"], c["e_ag"])
    gather = x["gather_bytes"] / (link * e_gather) + np.where(x["gather_bytes"] > 0, step, 0.0)
    return {
        "gradient_exchange": plain - x["overlaps"] * hidden + scatter + sharded,
        "parameter_gather": gather,
    }


def _optimizer_terms(c: dict[str, _Array], x: Features) -> dict[str, _Array]:
    link = x["host_link_s"] / c["e_pcie"]
    fast = np.minimum(x["host_thread_rate"], c["r_cpu"])
    slow = c["r_slow"] * x["host_threads"]
    rate = np.minimum(np.where(x["host_is_slow"] > 0, slow, fast), x["host_memory_rate"])
    return {
        "device_update": x["device_update_fused_s_per_b"] * c["bpp_fused"]
        + x["device_update_unfused_s_per_b"] * c["bpp_unfused"],
        "host_update": x["host_parameters"] / rate,
        "host_to_device": link,
        "offload_overhead": c["c_full"] * x["offloaded_parameters"],
        "gradient_to_host": link * x["microbatches"] + c["c_grad"] * x["offloaded_parameters"],
    }


def predict_terms(theta: _Array, x: Features, compute_scale: _Array | float = 1.0) -> dict[str, _Array]:
    """Compute every term of the iteration time."""
    c = _named(theta)
    terms = _compute_terms(c, x, compute_scale)
    terms |= _pipeline_terms(c, x)
    terms |= _sync_terms(c, x, terms["backward"], terms["forward"])
    terms |= _optimizer_terms(c, x)
    busy = terms["forward"] + terms["backward"] + terms["recompute"] + terms["gradient_exchange"]
    terms["data_loading"] = np.maximum(0.0, x["loader_s"] - busy)
    terms["node_wait"] = c["t_node"] * x["further_nodes"]
    terms["fixed"] = c["t_const"] * x["steps"]
    return {name: terms[name] for name in TERM_NAMES}


def predict(theta: _Array, x: Features, compute_scale: _Array | float = 1.0) -> _Array:
    """Compute the iteration time [s], (n_points,): the sum of the terms for a vector of constants."""
    return np.asarray(sum(predict_terms(theta, x, compute_scale).values()))


def _sum(terms: dict[str, _Array], *names: str) -> _Array:
    return np.asarray(sum(terms[name] for name in names))


def _zero(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    in_forward = terms["tensor_exchange"] / x["tensor_passes"]
    backward = _sum(terms, "backward", "recompute", "stage_transfer", "gradient_exchange")
    overlap = backward + terms["gradient_to_host"] + terms["tensor_exchange"] - in_forward
    return terms["forward"] + in_forward, overlap, _sum(terms, *_OPTIMIZER)


def _model_parallel(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    pipeline = _sum(terms, "forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    return 0.0 * pipeline, pipeline, _sum(terms, *_OPTIMIZER)


def _asynchronous(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    launch = np.minimum(x["launch_s"], terms["forward"])
    pipeline = ("forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    compute = _sum(terms, *pipeline, "gradient_to_host")
    return launch, compute - launch, terms["gradient_exchange"] + _sum(terms, *_OPTIMIZER)


_STYLES = {"zero": _zero, "3d": _model_parallel, "ddp": _asynchronous}


def phases(style: str, terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    """Return the columns forward, overlap_sync and optimize [s], each (n_points,).

    They need not add up to the iteration time: style ``3d`` reports the pipeline and the
    optimiser but not the gradient exchange, and no style reports the fixed time.
    """
    return _STYLES[style](terms, x)
