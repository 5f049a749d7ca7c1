"""Stand-ins with samples from loader processes: logical workers against stock training, bit for bit."""

from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from forked import forking_servers  # noqa: E402
from loaded_stock import BATCH, CAP_BYTES, LOADERS, SEED, STEPS, N, data_of, trained_of  # noqa: E402

from makespan.files import read_json  # noqa: E402
from makespan.papers.easyscale.runtime import (  # noqa: E402
    LEVELS,
    HostedWorkers,
    LoaderPool,
    LoaderState,
    RankMapping,
    Reduction,
    Shards,
    TrainedParts,
    in_memory,
    optimizer_sha,
    parameter_sha,
)
from makespan.runtime import Launch, LocalLauncher  # noqa: E402

pytestmark = pytest.mark.xdist_group("training")
TRAINED = ("resnet50", "vgg19", "swintransformer")  # BatchNorm, dropout, stochastic depth
SHARDS = Shards(N, BATCH, SEED, LOADERS)
# four batches an epoch: both changes come in its middle, with batches made ahead, and one stage has its end
STAGES = [("0/1/2", 2, 2), ("2,0/1", 3, 1), ("1,2,0", 2, 2)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return what every rank of stock training had, by stand-in, step and rank."""
    run_dir = tmp_path_factory.mktemp("stock")
    with forking_servers():
        LocalLauncher().run(Launch("loaded_stock", list(TRAINED), N, run_dir))
    by_rank = [read_json(run_dir / f"found-{rank}.json") for rank in range(N)]
    return {name: [[found[name][step] for found in by_rank] for step in range(STEPS)] for name in TRAINED}


class Job:
    """Logical workers whose processes live in this one; a file is all that passes from stage to stage."""

    def __init__(self, name, path):
        self.name, self.path, self.data = name, path, data_of(name)

    def stage(self, mapping, n_steps, n_processes):
        mapping = RankMapping.parse(mapping)
        with ExitStack() as stack:
            hosts = [self.host(mapping, number) for number in range(mapping.n_processes)]
            pools = [stack.enter_context(self.pool(ranks, n_processes)) for ranks in mapping.hosted]
            found = [self.mini_batch(mapping, hosts, pools) for _ in range(n_steps)]
            torch.save(self.values(mapping, hosts, pools), self.path)
        return found

    def saved(self):
        return torch.load(self.path, weights_only=True) if self.path.exists() else None

    def host(self, mapping, process):
        (model, optimizer, loss), saved = trained_of(self.name), self.saved()
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        hosted = HostedWorkers(
            TrainedParts(model, optimizer, loss),
            torch.device("cpu"),
            mapping,
            process,
            Reduction(N, bucket_cap_bytes=CAP_BYTES),
            LEVELS["D1"],
            seed=SEED,
            bucket_map=saved and tuple(map(tuple, saved["bucket_map"])),
        )
        for rank in mapping.hosted[process] if saved is not None else ():
            hosted.contexts.install(rank, saved["contexts"][rank])
        return model, optimizer, hosted

    def pool(self, ranks, n_processes):
        saved = self.saved()
        states = {
            rank: SHARDS.start() if saved is None else LoaderState.from_values(saved["loaders"][rank])
            for rank in ranks
        }
        return LoaderPool(self.data, SHARDS, states, n_processes=n_processes, prefetch=3)

    def mini_batch(self, mapping, hosts, pools):
        batches = in_memory(
            [hosted.mini_batch(pool.next) for (*_, hosted), pool in zip(hosts, pools, strict=True)]
        )
        rows = {}
        for (model, optimizer, hosted), ranks, batch in zip(hosts, mapping.hosted, batches, strict=True):
            hashes = parameter_sha(model), optimizer_sha(optimizer)
            for rank in ranks:
                rows[rank] = [batch.losses[rank].hex(), *hashes, hosted.contexts.sha(rank)]
        return [rows[rank] for rank in range(N)]

    def values(self, mapping, hosts, pools):
        model, optimizer, hosted = hosts[0]
        values = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        values |= {"bucket_map": hosted.bucket_map, "contexts": {}, "loaders": {}}
        for (*_, hosted), pool, ranks in zip(hosts, pools, mapping.hosted, strict=True):
            values["contexts"] |= {rank: hosted.contexts.values(rank) for rank in ranks}
            values["loaders"] |= {rank: pool.state(rank).values() for rank in ranks}
        return values


@pytest.mark.parametrize("name", TRAINED)
def test_changes_of_the_mapping_amid_an_epoch_change_no_bit(stock, name, tmp_path):
    job, found = Job(name, tmp_path / "saved.pt"), []
    for stage in STAGES:
        found += job.stage(*stage)
    assert len(found) == STEPS
    assert found == stock[name]


def test_batches_made_ahead_must_be_forgotten(stock, tmp_path, monkeypatch):
    def ahead(self, feed, key):
        while any(request.answer is None for request in feed.ahead):
            self._collect(None)
        return self._streams[key].state

    monkeypatch.setattr(LoaderPool, "_before_next", ahead)
    job = Job("resnet50", tmp_path / "saved.pt")
    assert job.stage(*STAGES[0]) == stock["resnet50"][:2]
    assert job.stage(*STAGES[1])[0][0] != stock["resnet50"][2][0]
