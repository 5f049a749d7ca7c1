"""Requests from launching processes to the processes of EasyScale runs, and their form as JSON.

The launching process dumps a request with a `TypeAdapter`, and a process of the run validates it with the
same one, which builds and checks the dataclasses anew. Both sides import this module, so it does not load
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from makespan.easyscale.job import ElasticJob, Placing
from makespan.training.zoo import StandIn


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A row of the table ``reconfigurations`` without its restart time, which the processes measure.

    ``save_s`` is the time in which the checkpoint was written from which they start [s].
    """

    step: int
    cause: str
    old_mapping: str
    new_mapping: str
    old_devices: str
    new_devices: str
    save_s: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to train one job in one generation of processes: from a checkpoint to the next mapping.

    Parameters
    ----------
    job, placing
        The job, and the mapping of its logical workers (ESTs) to processes and devices.
    generation, is_first
        Number of the generation in the run, from 0; whether the job is the first one of these processes,
        which then bears the time of their start.
    change, manifest
        Reconfiguration that the generation begins with; values for the manifests of its checkpoints.
    run_dir, gloo_order_dir, change_request_path
        Directory of the run; directory that keeps the detected order of gloo's sums; file whose existence
        requests the end of the generation.
    checkpoint, fold
        Checkpoint to start from, and its order of the sum of gradients; None at the start of a job.
    first_step, steps
        Mini-batches done in that checkpoint, and mini-batches of the run in total.
    checkpoint_every, checkpoint_every_s, hash_every, loader_processes, prefetch
        See `makespan.easyscale.RunOptions`.
    progress_s
        Seconds between reports of progress.
    device
        ``cpu`` or ``cuda``, on which all processes train.
    survives, announces, zero_stage
        Processes whose simultaneous loss the run survives without a checkpoint; whether processes announce
        the phases of each mini-batch to the coordinator; see `makespan.easyscale.RunOptions`.
    """

    job: ElasticJob
    placing: Placing
    generation: int
    is_first: bool
    change: Reconfiguration
    manifest: Mapping[str, Any]
    run_dir: Path
    gloo_order_dir: Path
    change_request_path: Path
    checkpoint: Path | None
    fold: str | None
    first_step: int
    steps: int
    checkpoint_every: int
    checkpoint_every_s: float
    hash_every: int | None
    loader_processes: int
    prefetch: int
    progress_s: float = 0.5
    device: str = "cpu"
    survives: int = 0
    announces: bool = False
    zero_stage: int = 0


@dataclass(frozen=True, slots=True)
class StockRequest:
    """Request to train jobs one after the other with stock DistributedDataParallel, one process per rank.

    Parameters
    ----------
    jobs, steps
        Jobs, and mini-batches of each.
    device
        Kernel set of all processes, unless the level of a job pins one.
    hash_every
        Mini-batches from one set of hashes to the next; 0 for none.
    models
        File for the trained model of each job, None to save none.
    """

    jobs: tuple[ElasticJob, ...]
    steps: int
    device: str
    hash_every: int
    models: tuple[Path | None, ...]


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Request to count the held-out samples that trained stand-ins classify correctly.

    Parameters
    ----------
    model, seed
        The stand-in, and the seed of its task.
    n_samples, noise
        Number of held-out samples, and their noise.
    paths
        Files of the trained models, as plain state dictionaries.
    """

    model: StandIn
    seed: int
    n_samples: int
    noise: float
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class TimedVariant:
    """A way to train the model of a timing series.

    Parameters
    ----------
    name, level
        Name in the results; determinism level.
    is_stock
        True for stock DistributedDataParallel over all processes, False for ESTs in the first process.
    n
        Micro-batches of each process per step, or number of ESTs.
    swaps_contexts
        Whether each EST has its own random states and buffers.
    """

    name: str
    level: str
    is_stock: bool
    n: int
    swaps_contexts: bool = True


@dataclass(frozen=True, slots=True)
class TimingSeries:
    """A model, and the variants of its training that take turns step by step.

    Parameters
    ----------
    spec, micro_batch_size, seed
        The stand-in, samples per micro-batch, and seed of weights and samples.
    device
        Kernel set of the processes.
    variants
        Variants in the order of their first step.
    warmup_steps, steps
        Mini-batches that are not timed, and those that are.
    budget_bytes
        Memory of the device, which all processes together must not exceed [B]; None to measure no memory.
    """

    spec: StandIn
    micro_batch_size: int
    seed: int
    device: str
    variants: tuple[TimedVariant, ...]
    warmup_steps: int
    steps: int
    budget_bytes: int | None = None


GENERATIONS = TypeAdapter(list[GenerationRequest])
"""Codec of the request to `makespan.easyscale.worker`: one entry per job."""
STOCK = TypeAdapter(StockRequest)
"""Codec of the request to `makespan.easyscale.reference_worker`."""
SCORING = TypeAdapter(ScoringRequest)
"""Codec of the request to `makespan.easyscale.scoring_worker`."""
TIMING = TypeAdapter(list[TimingSeries])
"""Codec of the request to `makespan.easyscale.timing_worker`."""
