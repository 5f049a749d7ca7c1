"""A node that only counts, in a run whose coordinator is real: ``python counting_node.py <run directory>``.

What it holds are sums of the iterations that it applied, one a layer; it notes what it did in a file.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from makespan.errors import InputError
from makespan.runtime import RunDirectory, end_worker, run_worker
from makespan.runtime.node import take_part


class CountingEngine:
    def __init__(self, run_dir):
        self.run_dir, self.sums, self.owned = Path(run_dir), {}, ()

    is_waiting = False

    def check_device(self):
        pass

    def prepare(self, node, request, announce, board, serving):
        self.node, self.request, self.announce = node, request, announce
        if node in request.get("dies_at_start", ()):
            os._exit(1)

    @property
    def layers(self):
        return tuple(self.sums)

    def note(self, **values):
        with (self.run_dir / f"node-{self.node}.jsonl").open("a") as stream:
            stream.write(json.dumps(values) + "\n")

    def drop(self):
        pass

    def form(self, form, forgets):
        if forgets:
            self.sums.clear()
        self.announce("group build", form.step)
        self.announce("copy", form.step)
        time.sleep(self.request.get("copy_s", 0.0))
        self.owned = form.work["layers"].get(str(self.node), ())
        for layer in self.owned:
            if layer not in self.sums:
                found = form.work["sums"][layer] if form.work["sums"] else 0
                self.sums[layer] = found
        self.sums = {layer: self.sums[layer] for layer in self.owned}
        self.note(generation=form.generation, step=form.step, pid=os.getpid(), received=list(self.owned))
        return {layer: hashlib.sha256(str(self.sums[layer]).encode()).hexdigest() for layer in self.owned}

    def compute(self, iteration):
        self.announce("forward", iteration)
        self.is_waiting = self.node in self.request.get("waits", [])
        is_quick = iteration < self.request.get("computes_from", 0)
        time.sleep(0.01 if is_quick else self.request.get("compute_s", 0.01))
        self.is_waiting = False
        if [self.node, iteration] in self.request.get("sticks", []):
            self.is_waiting = True
            self.announce("transfer", iteration)
            time.sleep(120.0)
        if [self.node, iteration] in self.request.get("rejects", []):
            raise InputError("layer 3 is odd")
        if [self.node, iteration] in self.request.get("fails", []):
            raise RuntimeError("counted wrongly")
        self.announce("reduction", iteration)
        return {"sums": self.sums, "iteration": iteration}

    def apply(self, iteration):
        for layer in self.sums:
            self.sums[layer] += (iteration + 1) * (iteration + 1)
        self.note(applied=iteration)

    def write(self, save):
        for layer in save.layers:
            Path(self.run_dir, "partial", f"{layer}.json").write_text(json.dumps(self.sums[layer]))


def work(directory, who):
    node = who.rank if who.rank < 1000 else None
    self_ended = take_part(directory.path, CountingEngine(directory.path), node)
    RunDirectory(directory.path).write_result(self_ended, who.rank)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
