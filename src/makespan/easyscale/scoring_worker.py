"""Process that scores trained stand-ins: ``python -m makespan.easyscale.scoring_worker <run directory>``.

Each process scores its share of the models.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from makespan.easyscale.randomness import parameter_sha
from makespan.easyscale.requests import SCORING, ScoringRequest
from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker
from makespan.training.zoo import build_stand_in, stand_in_data

_BATCH = 500


def count_right(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], n_classes: int
) -> list[int]:
    """Count the samples of each class that a model classifies correctly."""
    right = torch.zeros(n_classes, dtype=torch.int64)
    model.eval()
    with torch.inference_mode():
        for inputs, targets in batches:
            predicted = model(inputs).argmax(1)
            right += torch.bincount(targets[predicted == targets], minlength=n_classes)
    return [int(number) for number in right]


def _work(directory: RunDirectory, who: Identity) -> None:
    join(directory, who)
    request: ScoringRequest = SCORING.validate_python(directory.request())
    spec, seed = request.model, request.seed
    samples = stand_in_data(spec, request.n_samples, seed, held_out=True, augment=False, noise=request.noise)
    batches = list(DataLoader(samples, _BATCH))
    targets = torch.cat([labels for _, labels in batches])
    scored: dict[Path, Any] = {}
    for path in request.paths[who.rank :: who.size]:
        model = build_stand_in(spec, seed)
        model.load_state_dict(torch.load(path, weights_only=True))
        scored[path] = {
            "right": count_right(model, batches, spec.n_classes),
            "param_sha": parameter_sha(model),
        }
    gathered: list[Any] = [None] * who.size
    dist.all_gather_object(gathered, scored)
    if who.rank == 0:
        counted = torch.bincount(targets, minlength=spec.n_classes).tolist()
        scores = {path: score for part in gathered for path, score in part.items()}
        directory.write_result({"samples": counted, "scores": [scores[path] for path in request.paths]})


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
