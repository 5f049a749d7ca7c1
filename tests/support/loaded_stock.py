"""Stand-ins under stock training: DistributedDataParallel, and a stock data loader with processes a rank.

``python loaded_stock.py <run directory>``; the request lists names of stand-ins. Shared with elastic training
are model, data and the rule of seeds, and nothing else.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from makespan.files import write_json
from makespan.papers.easyscale.runtime import implicit_sha, optimizer_sha, parameter_sha, seed_everything
from makespan.papers.easyscale.runtime._seeding import seed_stream
from makespan.runtime import end_worker, join, run_worker
from makespan.training.zoo import StandIn, build_stand_in, stand_in_data, stand_in_loss

N, SEED, BATCH, LOADERS, STEPS, CAP_BYTES = 3, 5, 4, 2, 7, 1 << 14
SAMPLES = 38  # 13 a rank: batches of 4, 4, 4 and 1


def spec_of(name):
    return StandIn(name, width=8)


def data_of(name):
    return stand_in_data(spec_of(name), SAMPLES, SEED)


def trained_of(name):
    """Return model, optimizer and loss."""
    model = build_stand_in(spec_of(name), SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, partial(stand_in_loss, spec_of(name))


def seed_loader(rank, epoch, loader):
    seed_stream(SEED, rank, epoch, loader)


def batches_of(name, rank):
    """Batches of a rank, epoch after epoch, from a stock data loader."""
    data, epoch = data_of(name), 0
    sampler = DistributedSampler(data, N, rank, seed=SEED)
    while True:
        sampler.set_epoch(epoch)
        yield from DataLoader(
            data,
            BATCH,
            sampler=sampler,
            num_workers=LOADERS,
            worker_init_fn=partial(seed_loader, rank, epoch),
            generator=torch.Generator(),
        )
        epoch += 1


def train(name, rank):
    """Train and return what the rank has after each mini-batch."""
    model, optimizer, loss_of = trained_of(name)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=CAP_BYTES / (1 << 20))
    seed_everything(SEED, "rank", rank)
    found = []
    for _, (inputs, targets) in zip(range(STEPS), batches_of(name, rank), strict=False):
        loss = loss_of(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes = parameter_sha(model), optimizer_sha(optimizer), implicit_sha(model, torch.device("cpu"))
        found.append([loss.item().hex(), *hashes])
    return found


def work(directory, who):
    join(directory, who)
    found = {name: train(name, who.rank) for name in directory.request()}
    dist.barrier()
    write_json(found, directory.path / f"found-{who.rank}.json")


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
