"""Time mini-batches of elastic runs with the optimizer in shards over those without, in pairs of runs.

    python scripts/measure_shards.py FILE [PAIRS]

Four processes train a perceptron of 17 MB with Adam on what should be two idle cores, with copies of contexts
for one loss (``survives`` 1) and without (0). The two runs of each of the PAIRS (6) follow each other, in
turned order in every second pair; both must end with the same bits. Writes one row per pair into FILE: the
median time of a mini-batch without shards and with them [s], after the first eight of 40.
"""

import argparse
import os
from itertools import pairwise
from pathlib import Path
from statistics import median

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale import ElasticTrainer
from makespan.files import write_text
from makespan.tables import write_csv

STEPS, WARMUP, PROCESSES = 40, 8, 4
TIMES = "SHARDS_TIMES"
JOB = f"""
import os
import time

import torch
from torch import nn


def model():
    layers = [nn.Linear(1024, 1024) for _ in range(4)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(1024, 10))


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(4096, 1024, generator=generator), torch.arange(4096) % 10
    )


def loss(outputs, targets):
    if os.environ["MAKESPAN_RANK"] == "0":
        with open(os.environ["{TIMES}"], "a") as file:
            file.write(f"{{time.perf_counter()}}\\n")
    return nn.functional.cross_entropy(outputs, targets)
"""


def step_of(folder: Path, name: str, zero_stage: int, survives: int) -> tuple[float, str]:
    """Train once; return the median time of a mini-batch [s], and the hash of all parameters at the end."""
    times = folder / f"{name}.txt"
    os.environ[TIMES] = str(times)
    parts = {part: f"{folder / 'job.py'}:{part}" for part in ("model", "data", "loss")}
    trainer = ElasticTrainer(
        run_dir=folder / name, n_logical_workers=PROCESSES, micro_batch_size=16, optimizer="adam", **parts
    )
    steps = trainer.run(STEPS, zero_stage=zero_stage, survives=survives).steps
    begun = list(map(float, times.read_text().split()))[WARMUP:]
    (sha,) = set(steps.loc[steps["step"] == STEPS, "parameter_sha"])  # the same in all processes
    return median(right - left for left, right in pairwise(begun)), sha


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("pairs", type=int, nargs="?", default=6, metavar="PAIRS")
    given = parser.parse_args()
    rows = []
    with temporary_directory("shards") as folder:
        write_text(JOB, folder / "job.py")
        for survives in (0, 1):
            for pair in range(given.pairs):
                found = {
                    zero_stage: step_of(folder, f"{survives}-{pair}-{zero_stage}", zero_stage, survives)
                    for zero_stage in ((0, 1) if pair % 2 == 0 else (1, 0))
                }
                if found[0][1] != found[1][1]:
                    raise RuntimeError(f"pair {pair} with survives={survives}: bits differ")
                plain_s, sharded_s = found[0][0], found[1][0]
                rows.append(
                    {"survives": survives, "pair": pair, "plain_step_s": plain_s, "sharded_step_s": sharded_s}
                )
                write_csv(pd.DataFrame(rows).round(6), given.file)


if __name__ == "__main__":
    main()
