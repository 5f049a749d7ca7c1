"""Nodes of a resilient job as threads of one process: gloo between them is the same as between processes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist

from makespan.oobleck.job import ChainJob
from makespan.oobleck.plan import HybridPlan, Pipeline, PipelineTemplate, Stage
from makespan.oobleck.shards import read_piece
from makespan.oobleck.stage import LostPeerError, StageExecutor

torch.set_num_threads(1)
SMALL = {"n_layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "seq": 8, "vocab": 32}


def small_job(**changes):
    """Return a job of six layers and six microbatches."""
    return ChainJob(**({"model_options": SMALL, "n_microbatches": 6, "microbatch_size": 2} | changes))


def template(*ends):
    """Return a template whose stages end at these layers."""
    stages = tuple(Stage(start, end, 1, 1.0) for start, end in zip([0, *ends[:-1]], ends, strict=True))
    return PipelineTemplate(len(stages), 1, stages, 1.0)


def interleaved(n_nodes, *ends):
    """Return a template for so many nodes whose stages end at these layers, several for each."""
    return replace(template(*ends), n_nodes=n_nodes, interleave=len(ends) // n_nodes)


def plan_of(*pipelines):
    """Return a plan: nodes, ends of the stages and microbatches of each pipeline.

    More stages than nodes are interleaved.
    """
    return HybridPlan(
        tuple(
            Pipeline(
                nodes, interleaved(len(nodes), *ends) if len(ends) > len(nodes) else template(*ends), count
            )
            for nodes, ends, count in pipelines
        )
    )


RECEIVED = {"send_act": "recv_act", "send_grad": "recv_grad"}


def carry_out(streams, receiver):
    """Carry out instructions of nodes whose transfers block until both sides take part; fail if all wait.

    ``receiver`` returns the node that receives what an instruction of a node sends, and the chunk there.
    """
    while any(streams.values()):
        has_moved = False
        for node, stream in streams.items():
            while stream and not stream[0].kind.startswith(("send", "recv")):
                stream.pop(0)
                has_moved = True
            if stream and (first := stream[0]).kind in RECEIVED:
                there, chunk = receiver(node, first)
                awaited = RECEIVED[first.kind], first.microbatch, chunk
                if streams[there] and awaited == (
                    streams[there][0].kind, streams[there][0].microbatch, streams[there][0].chunk,
                ):  # fmt: skip
                    stream.pop(0)
                    streams[there].pop(0)
                    has_moved = True
        assert has_moved, {node: stream[:1] for node, stream in streams.items()}


class Nodes:
    """Executors by node; what several do together runs in a thread each."""

    def __init__(self, job, announce=lambda node: lambda phase: None, **options):
        self.job, self.announce, self.options, self.executors = job, announce, options, {}

    def each(self, nodes, call):
        """Call with node and executor in a thread each; results, or the errors, by node."""
        for node in nodes:
            if node not in self.executors:
                self.executors[node] = StageExecutor(
                    self.job, announce=self.announce(node), timeout_s=3600, **self.options
                )

        def begun(node):
            try:
                return call(node, self.executors[node])
            except BaseException:
                self.executors[node].disconnect()
                raise

        with ThreadPoolExecutor(len(nodes)) as pool:
            running = {node: pool.submit(begun, node) for node in nodes}
        return {node: one.exception() or one.result() for node, one in running.items()}

    def all_well(self, nodes, call):
        """Call as `each`, and raise an error if there was one, rather not that a peer was lost."""
        found = self.each(nodes, call)
        errors = [one for one in found.values() if isinstance(one, BaseException)]
        for one in sorted(errors, key=lambda one: isinstance(one, LostPeerError)):
            raise one
        return found

    def connect(self, plan, also=(), copies=(), pieces=(), n_copies=None, states=None):
        """Start a generation: copy layers, each as layer, source and target; hold what nobody sent.

        With ``n_copies`` optimizer state is divided; pieces are copied as layers are.
        """
        self.plan, store = plan, dist.HashStore()

        def begin(node, executor):
            executor.connect(plan, node, store, also)
            for layer, source, target in copies:
                if node == source:
                    executor.send_layer(layer, target)
                elif node == target:
                    executor.receive_layer(layer, source)
            for text, source, target in pieces:
                piece, _ = read_piece(text)
                if node == source:
                    executor.send_piece(piece, target)
                elif node == target:
                    executor.receive_piece(piece, source)
            executor.hold(executor.stage_layers)
            if n_copies is not None:
                executor.divide(n_copies, {}, states)
            executor.keep(executor.stage_layers)

        self.all_well([*plan.nodes, *also], begin)

    def iterate(self, first, count=1):
        """Do some iterations and return the facts of each by node."""

        def work(node, executor):
            found = []
            for iteration in range(first, first + count):
                executor.compute(iteration)
                found.append(executor.reduce())
                executor.apply()
            return found

        return self.all_well(self.plan.nodes, work)

    def checksums(self):
        """Return the checksums of each layer, of all nodes of the plan that hold it."""
        found = {}
        for node in self.plan.nodes:
            executor = self.executors[node]
            for layer in executor.layers:
                found.setdefault(layer, set()).add(executor.checksum(layer))
        return found
