"""Nodes of a resilient job as threads of one process: gloo between them is the same as between processes."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from makespan.papers.oobleck.planning import HybridPlan, Pipeline, PipelineTemplate, Stage
from makespan.papers.oobleck.runtime import StageExecutor


def template(*bounds):
    """Return a template whose stages end at these layers."""
    starts = [0, *bounds[:-1]]
    stages = tuple(Stage(start, end, 1, 1.0) for start, end in zip(starts, bounds, strict=True))
    return PipelineTemplate(len(stages), 1, stages, 1.0)


def plan(*pipelines):
    """Return a plan: nodes, ends of the stages and microbatches of each pipeline."""
    return HybridPlan(tuple(Pipeline(nodes, template(*bounds), count) for nodes, bounds, count in pipelines))


class Nodes:
    """Executors by node; what all of them do together runs in a thread each."""

    def __init__(self, job, announce=lambda node: lambda phase: None):
        self.job, self.announce, self.executors = job, announce, {}
        self.store = None

    def each(self, nodes, call):
        """Call with node and executor in a thread each; results, or the errors, by node."""
        for node in nodes:
            if node not in self.executors:
                self.executors[node] = StageExecutor(self.job, announce=self.announce(node))
        with ThreadPoolExecutor(len(nodes)) as pool:
            running = {node: pool.submit(call, node, self.executors[node]) for node in nodes}
        return {node: one.exception() or one.result() for node, one in running.items()}

    def connect(self, plan, also=()):
        """Start a generation; layers that are not held are built anew."""
        self.plan, self.store = plan, dist.HashStore()

        def begin(node, executor):
            executor.connect(plan, node, self.store, also)
            executor.hold(stage_layers(plan, node))

        raise_first(self.each([*plan.nodes, *also], begin))

    def iterate(self, iteration, n=1):
        """Do some iterations; the facts of each by node."""

        def work(node, executor):
            found = []
            for number in range(iteration, iteration + n):
                executor.compute(number)
                found.append(executor.reduce())
                executor.apply()
            return found

        return raise_first(self.each(self.plan.nodes, work))

    def parameters(self, node):
        """Return the weights that a node holds."""
        executor = self.executors[node]
        return {
            (layer, name): one.clone()
            for layer in executor.layers
            for name, one in executor.layer_state(layer).items()
        }


def stage_layers(plan, node):
    for one in plan.pipelines:
        if node in one.nodes:
            return one.template.stages[one.nodes.index(node)].layers
    return ()


def raise_first(found):
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return found


torch.set_num_threads(1)
