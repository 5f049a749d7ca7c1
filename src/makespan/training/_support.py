"""Which plans can train which models here, decided before a process starts."""

from collections.abc import Iterator

from makespan.errors import InfeasiblePlanError
from makespan.plans import ExecutionPlan
from makespan.training._model_spec import SmallModel

__all__ = ["check_supported", "unsupported_reasons"]


def unsupported_reasons(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> list[str]:
    """Return every reason why a plan cannot train a model; empty if it can.

    Parameters
    ----------
    plan, model
        The combination.
    n_devices
        Devices at hand; None if there is no limit.
    """
    return list(_reasons(plan, model, n_devices))


def check_supported(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> None:
    """Check that a plan can train a model.

    Raises
    ------
    InfeasiblePlanError
        It cannot; the message gives all reasons.
    """
    reasons = unsupported_reasons(plan, model, n_devices)
    if reasons:
        raise InfeasiblePlanError(f"the plan cannot train this {model.family} model: " + "; ".join(reasons))


def _reasons(plan: ExecutionPlan, model: SmallModel, n_devices: int | None) -> Iterator[str]:
    if n_devices is not None and plan.n_gpus > n_devices:
        yield (f"dp={plan.dp} x tp={plan.tp} x pp={plan.pp} needs {plan.n_gpus} devices, {n_devices} at hand")
    if plan.tp > 1:
        yield from _tensor_reasons(plan, model)
    yield from _pipeline_reasons(plan, model)


def _tensor_reasons(plan: ExecutionPlan, model: SmallModel) -> Iterator[str]:
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(model, name) % plan.tp:
            yield f"tp={plan.tp} does not divide {name}={getattr(model, name)}"
    if plan.sequence_parallel and model.family == "vit":
        yield "sequence parallelism needs a result at every position, and vit averages over them"
    if plan.sequence_parallel and model.seq % plan.tp:
        yield f"sequence parallelism with tp={plan.tp} does not divide seq={model.seq}"


def _pipeline_reasons(plan: ExecutionPlan, model: SmallModel) -> Iterator[str]:
    chunks = plan.pp * plan.interleave
    if chunks > model.n_layers:
        yield f"{chunks} pipeline stages need at least one layer each, the model has {model.n_layers}"
    if plan.partition is not None and sum(plan.partition) != model.n_layers:
        yield f"partition {plan.partition} covers {sum(plan.partition)} of {model.n_layers} layers"
    if plan.pp > 1 and plan.grad_accum_steps < plan.pp:
        yield (
            f"a pipeline of {plan.pp} stages needs at least as many micro-batches in flight, "
            f"found {plan.grad_accum_steps}"
        )
    if plan.interleave > 1 and plan.grad_accum_steps % plan.pp:
        yield f"the interleaved schedule needs micro-batches in multiples of {plan.pp}"
