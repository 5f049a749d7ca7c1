"""A small job whose nodes are lost in tests, and the same job in one process."""

import os
import signal
import threading
import time

import torch

from makespan.oobleck.job import ChainJob
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.trainer import Fault, Faults, LiveOptions, drain_nodes, join_run, train_resilient

SIZES = {"n_layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "seq": 16, "vocab": 64}
JOB = ChainJob(model_options=SIZES, n_microbatches=12)
N_LAYERS = 6
WATCHDOG_S = 3600  # against runs that hang
HANG_S = 600.0  # processes that are well may be silent for long on a busy machine


def profile(exchange_s=()):
    """Times by which stages are cut: the ends of the model are cheaper than its middle."""
    exchange = {1: 0.0, **dict(enumerate(exchange_s, 2))} if exchange_s else {}
    weights = [1, 3, 3, 3, 3, 2]
    return ModelProfile(
        "test",
        tuple(LayerProfile(1e-3 * one, 2e-3 * one, {}, exchange, parameter_bytes=5e4) for one in weights),
    )


def run(path, iterations, faults=(), *, exchange_s=(), waits_for=None, watch=None, job=JOB, **options):
    """Train with faults; the result, and what became of the faults."""
    killer, pids, launcher = Faults(faults, waits_for), [], options.pop("launcher", None)

    def take(event):
        if event.kind == "hello":
            pids.append(event.values["pid"])
        if watch is not None:
            watch(event)

    guard = threading.Timer(WATCHDOG_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids if alive(pid)])
    guard.start()
    try:
        result = train_resilient(
            job,
            profile(exchange_s),
            iterations,
            path,
            LiveOptions(**{"hang_s": HANG_S, **options}),
            launcher=launcher,
            faults=killer,
            watch=take,
        )
    finally:
        guard.cancel()
    return result, killer.done


def alive(pid):
    """Whether a process of the run is there."""
    return os.path.exists(f"/proc/{pid}")


def replayed(plans, iterations, job=JOB, oracle=None, start=0):
    """Repeat iterations in one process under a log of plans; losses, and the process."""
    from makespan.oobleck.oracle import ReferenceTrainer

    oracle = oracle or ReferenceTrainer(job)
    losses = []
    for iteration in range(start, iterations):
        plan = [one for first, one in plans if first <= iteration][-1]
        losses.append(oracle.iterate(iteration, plan))
    return losses, oracle


def states(checkpoint):
    """State of each layer in a checkpoint."""
    files = sorted(checkpoint.glob("layer-*.pt"))
    return [torch.load(path, weights_only=True) for path in files]


def assert_equal_bits(result, iterations, job=JOB):
    """Losses, parameters and optimizer state are those of one process that repeats the log of plans."""
    losses, oracle = replayed(result.plans, iterations, job)
    assert result.iterations["loss"].tolist() == losses
    assert_states(result.checkpoint, oracle)


def assert_states(checkpoint, oracle):
    """A checkpoint has the parameters and the optimizer state of one process."""
    found = [(own, oracle.state(layer)) for layer, own in enumerate(states(checkpoint))]
    assert len(found) == oracle.n_layers and any("optimizer/" in name for own, _ in found for name in own)
    for layer, (own, wanted) in enumerate(found):
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[name], wanted[name]) for name in own), layer


class JoinsAndLeaves:
    """Listener of a run: a process joins after two iterations, then node 1 leaves, and then the run ends."""

    def __init__(self, path):
        self.path, self.pids, self.ended = path, {}, []

    def __call__(self, event):
        if event.kind == "hello":
            self.pids[event.node] = event.values["pid"]
        if event.kind == "commit" and event.values["iteration"] == 1:
            threading.Thread(target=lambda: self.ended.append(join_run(self.path)), daemon=True).start()
        if event.kind == "resume" and event.values["generation"] == 2:
            os.kill(self.pids[1], signal.SIGTERM)
        if event.kind == "resume" and event.values["generation"] == 3:
            drain_nodes(self.path)

    def how_it_ended(self):
        """Return how the process ended that had joined."""
        deadline = time.monotonic() + WATCHDOG_S
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.ended


__all__ = [
    "JOB", "N_LAYERS", "Fault", "JoinsAndLeaves", "assert_equal_bits", "assert_states", "profile", "replayed",
    "run", "states",
]  # fmt: skip
