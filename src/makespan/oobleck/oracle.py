"""Bitwise reference of a resilient run: repeat its plans in one process, in the same order of sums.

Only the division of microbatches among pipelines decides bits, and only through the order of sums. So one
process that holds all layers reproduces a run with ordered sums bit by bit from the log of its plans.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from makespan.lazy import renamed_names
from makespan.oobleck.chain import load_chain, load_microbatch
from makespan.oobleck.job import ChainJob
from makespan.oobleck.plan import HybridPlan, check_plan
from makespan.oobleck.stage import HeldLayers, State, classes
from makespan.oobleck.worker import layer_file

_CPU = torch.device("cpu")
Gradients = dict[tuple[int, str], Tensor]


class ReferenceTrainer:
    """One process that holds all layers, and adds up the gradients of the pipelines in their order.

    Of a plan it uses only the number of microbatches of each pipeline. After the same iterations under the
    same plans, `checksum` equals that of a run with ordered sums, layer by layer.
    """

    def __init__(self, job: ChainJob) -> None:
        self._job, self._chain = job, load_chain(job)
        self._held = HeldLayers(job, self._chain, _CPU)
        self._held.hold(range(self._chain.n_layers))
        self._weights = {
            (layer, name): weight
            for layer in range(self._chain.n_layers)
            for name, weight in self._held.parameters(layer).items()
        }

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return self._chain.n_layers

    def iterate(self, iteration: int, plan: HybridPlan) -> float:
        """Train one iteration under a plan and return its mean loss, before the step."""
        job, layers = self._job, range(self.n_layers)
        check_plan(plan, self.n_layers, job.n_microbatches)
        losses, partial, start = [], list[Gradients](), 0
        for pipeline in plan.pipelines:
            self._held.clear_gradients()
            numbers = range(start, start + pipeline.n_microbatches)
            losses.append(math.fsum(self._pass(iteration, number) for number in numbers))
            partial.append(
                {
                    key: torch.zeros_like(weight) if weight.grad is None else weight.grad
                    for key, weight in self._weights.items()
                }
            )
            start = numbers.stop
        for key, total in self._sums(partial).items():
            self._weights[key].grad = total / job.n_microbatches
        if job.clip_norm is not None:
            # Tied weights share one gradient, which counts once.
            again = {key for tied in classes(self._chain.tied) for key in tied[1:]}
            norm = math.sqrt(math.fsum(self._held.squared_norm(layer, again) for layer in layers))
            self._held.scale_gradients(layers, min(1.0, job.clip_norm / (norm + 1e-6)))
        self._held.step(layers, iteration)
        return math.fsum(losses) / job.n_microbatches

    def _pass(self, iteration: int, number: int) -> float:
        """Run a microbatch forward and back through all layers, and return its loss."""
        state, targets = load_microbatch(self._chain, self._job, iteration, number, _CPU)
        for layer in range(self.n_layers):
            arguments = state if isinstance(state, tuple) else (state,)
            state = self._held.apply_layer(layer, arguments, iteration, number)
        loss = self._chain.loss(state, targets)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _sums(self, partial: list[Gradients]) -> Gradients:
        """Add up the pipelines in order, and within a pipeline the layers of a tied weight in order."""
        sums: Gradients = {}
        together = {key: tied for tied in classes(self._chain.tied) for key in tied}
        for key in self._weights:
            summands = [gradients[part] for gradients in partial for part in together.get(key, (key,))]
            total = summands[0].clone()
            for summand in summands[1:]:
                total += summand
            sums[key] = total
        return sums

    def state(self, layer: int) -> State:
        """Return the state of a layer, in the form of a process that holds it."""
        return self._held.state(layer)

    def load(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Begin with these states, like a job that resumes from a checkpoint."""
        for layer, state in states.items():
            self._held.load(layer, state)

    def checksum(self, layer: int) -> str:
        """Return the SHA-256 of the state of a layer."""
        return self._held.checksum(layer)


def replay(
    job: ChainJob, plans: Sequence[tuple[int, HybridPlan]], iterations: int, checkpoint: Path
) -> tuple[list[float], bool]:
    """Repeat iterations from the start under a log of plans, and compare with a checkpoint.

    Parameters
    ----------
    job, plans, iterations
        The job, each plan with the first iteration under it, and the number of iterations.
    checkpoint
        Checkpoint of the run after these iterations.

    Returns
    -------
    tuple
        Loss of each iteration, and whether parameters, buffers and optimizer state of all layers have the
        same bits.
    """
    torch.set_num_threads(1)
    trainer = ReferenceTrainer(job)
    losses = [
        trainer.iterate(iteration, [plan for first, plan in plans if first <= iteration][-1])
        for iteration in range(iterations)
    ]
    is_equal = True
    for layer in range(trainer.n_layers):
        saved = torch.load(checkpoint / layer_file(layer), weights_only=True)
        state = trainer.state(layer)
        is_equal &= saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in saved)
    return losses, is_equal


__getattr__ = renamed_names(__name__, {"Oracle": "ReferenceTrainer"})
