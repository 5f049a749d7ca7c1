"""The pool gives every logical worker the bits of stock data loaders, whatever pool, host, stop or kill."""

import os
import random
import signal
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from numpy.random import mtrand
from stand_in_bits import flat
from torch.utils.data import DataLoader, DistributedSampler

from makespan.easyscale.data import LoaderPool, LoaderState, Shards, Streams
from makespan.easyscale.randomness import (
    capture_random_states,
    preserved_random_states,
    restore_random_states,
    seed_everything,
    seed_stream,
)
from makespan.easyscale.user_state import UserState
from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError
from makespan.training.zoo import StandIn, stand_in_data

pytestmark = pytest.mark.xdist_group("loaders")

N, W, EPOCHS = 3, 2, 2
SHARDS = Shards(N, micro_batch_size=3, seed=7, n_loaders=W)
DATA = stand_in_data(StandIn("resnet50", width=8), 38, 0)  # 13 samples a rank: batches of 3, 3, 3, 3, 1
PER_EPOCH = 5


def bits(batch):
    return [tensor.numpy().tobytes() for tensor in flat(batch)]


def init_loader(rank, epoch, worker):
    seed_stream(SHARDS.seed, rank, epoch, worker)


@pytest.fixture(scope="module")
def stock():
    """Batches of stock data loaders, by virtual rank."""
    found = {}
    for rank in range(N):
        sampler = DistributedSampler(DATA, N, rank, seed=SHARDS.seed)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            loader = DataLoader(
                DATA,
                3,
                sampler=sampler,
                num_workers=W,
                worker_init_fn=partial(init_loader, rank, epoch),
                generator=torch.Generator(),
            )
            found.setdefault(rank, []).extend(map(bits, loader))
    assert {len(batches) for batches in found.values()} == {EPOCHS * PER_EPOCH}
    return found


def states_at_start(ranks=range(N), shards=SHARDS):
    return {rank: shards.start() for rank in ranks}


def pool_of(states, **options):
    return LoaderPool(DATA, SHARDS, states, **options)


def through_a_file(state):
    return LoaderState.from_values(state.values())


# --- the same bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "n_processes", "prefetch"),
    [
        ([[0, 1, 2]], 0, 1),
        ([[0, 1, 2]], 2, 2),
        ([[2, 0], [1]], 1, 7),
        ([[0], [1], [2]], 3, 3),
    ],
)
def test_batches_are_those_of_stock_data_loaders(stock, mapping, n_processes, prefetch):
    for ranks in mapping:
        with pool_of(states_at_start(ranks), n_processes=n_processes, prefetch=prefetch) as pool:
            for step in range(EPOCHS * PER_EPOCH):
                for rank in ranks:
                    assert bits(pool.next(rank)) == stock[rank][step], (rank, step)


@pytest.mark.parametrize("seed", [0, 1])
def test_stops_at_any_batch_and_kills_at_any_moment_change_nothing(stock, seed):
    chance, states, step = random.Random(seed), states_at_start(), 0
    while step < EPOCHS * PER_EPOCH:
        stop = min(step + chance.randint(1, 3), EPOCHS * PER_EPOCH)
        ranks = chance.sample(range(N), N)
        cut = chance.randint(0, N)
        for hosted in (ranks[:cut], ranks[cut:]):
            options = {"n_processes": chance.randint(0, 3), "prefetch": chance.randint(1, 6)}
            with pool_of({rank: states[rank] for rank in hosted}, **options) as pool:
                for now in range(step, stop):
                    if pool.process_ids and chance.random() < 0.4:
                        os.kill(chance.choice(pool.process_ids), signal.SIGKILL)
                    for rank in hosted:
                        assert bits(pool.next(rank)) == stock[rank][now], (rank, now)
                states |= {rank: through_a_file(pool.state(rank)) for rank in hosted}
        step = stop


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pool_that_moves_to_other_positions_keeps_its_processes_and_drops_what_it_has_asked_for(
    stock, seed
):
    chance, states = random.Random(seed), states_at_start()
    reached = dict.fromkeys(range(N), 0)
    with pool_of({}, n_processes=2, prefetch=3) as pool:
        known = pool.process_ids
        for _ in range(4):
            hosted = chance.sample(range(N), chance.randint(1, N))
            pool.move({rank: states[rank] for rank in hosted})  # at once, while batches are being made
            for _ in range(chance.randint(0, 2)):
                for rank in hosted:
                    assert bits(pool.next(rank)) == stock[rank][reached[rank]]
                    reached[rank] += 1
            states |= {rank: through_a_file(pool.state(rank)) for rank in hosted}
            assert pool.process_ids == known
        for pid in known:
            os.kill(pid, signal.SIGKILL)
        pool.move(states)
        assert bits(pool.next(0)) == stock[0][reached[0]]
        assert pool.process_ids != known


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads how Linux maps memory")
def test_memory_that_is_private_is_left_out_of_loader_processes_alone():
    """Else the training process would copy each of its pages with the next write."""

    def flags(pid, address):
        inside, found = False, None
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            head, *words = line.split()
            if not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                inside = begin <= address < end
            elif inside and head == "VmFlags:":
                found = words
        return found

    tensors = [torch.ones(1 << 20), torch.ones(1 << 20), torch.ones(3)]
    middle = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in tensors]
    with pool_of(states_at_start(), private=lambda: [tensors[0], tensors[2]]) as pool:
        for pid in pool.process_ids:
            assert flags(pid, middle[0]) is None
            assert flags(pid, middle[1]) is not None
        assert len(bits(pool.next(0))) > 0
    assert "dc" not in flags("self", middle[0])  # no longer left out of forks


def test_a_state_does_not_tell_how_far_the_pool_was_ahead():
    seen = []
    for n_processes, prefetch in ((0, 1), (1, 1), (2, 8)):
        with pool_of(states_at_start(), n_processes=n_processes, prefetch=prefetch) as pool:
            found = [[pool.state(rank) for rank in range(N)]]
            for _ in range(PER_EPOCH + 2):
                for rank in range(N):
                    pool.next(rank)
                found.append([pool.state(rank) for rank in range(N)])
            seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    assert [state.batch for state, *_ in seen[0]] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert seen[0][0][0] == SHARDS.start()
    assert seen[0][PER_EPOCH][1] == LoaderState(1, 0, (None, None))


def test_epochs_of_less_than_one_batch_a_rank_are_read_ahead_too():
    data = stand_in_data(StandIn("bert", width=8), 4, 0)  # two samples a rank, some of them twice
    seen = []
    for n_processes, prefetch in ((0, 1), (2, 5)):
        states = states_at_start()
        with LoaderPool(data, SHARDS, states, n_processes=n_processes, prefetch=prefetch) as pool:
            seen.append([bits(pool.next(rank)) for _ in range(6) for rank in range(N)])
            assert pool.state(2) == LoaderState(6, 0, (None, None))
    assert seen[0] == seen[1]
    assert len(set(map(str, seen[0]))) == 6 * N


def made_ahead(pool):
    """Wait until all that was asked for is made."""
    while any(request.answer is None for feed in pool._cursors.values() for request in feed.ahead):
        pool._collect(None)


def test_without_going_back_to_what_nobody_took_other_batches_follow(stock):
    with pool_of(states_at_start([0]), n_processes=1, prefetch=3) as pool:
        pool.next(0)
        made_ahead(pool)
        rewound = pool.state(0)
        not_rewound = LoaderState(0, 1, tuple(pool._streams[0, 0, stream].state for stream in range(W)))
    for state, is_equal in ((rewound, True), (not_rewound, False), (LoaderState(0, 1, (None, None)), False)):
        with pool_of({0: state}, n_processes=0) as pool:
            pool.next(0)  # the first one of the second loader may be equal
            assert (bits(pool.next(0)) == stock[0][2]) == is_equal


def test_loading_leaves_the_random_states_of_the_training_process_alone():
    for n_processes in (0, 2):
        before = capture_random_states()
        with pool_of(states_at_start(), n_processes=n_processes) as pool:
            for rank in range(N):
                pool.next(rank)
        assert capture_random_states() == before


def test_without_loaders_samples_are_read_with_the_random_states_that_are_there():
    shards = Shards(N, 3, 7, n_loaders=0)
    sampler = DistributedSampler(DATA, N, 1, seed=7)
    seed_everything("rank", 1)
    expected = [bits(batch) for batch in DataLoader(DATA, 3, sampler=sampler, generator=torch.Generator())]
    after = capture_random_states()
    seed_everything("rank", 1)
    with LoaderPool(DATA, shards, {1: shards.start()}) as pool:
        assert pool.process_ids == []
        assert [bits(pool.next(1)) for _ in range(PER_EPOCH)] == expected
        assert pool.state(1) == LoaderState(1, 0, ())
    assert capture_random_states() == after


# --- processes that die -----------------------------------------------------------------------------


class Deadly:
    """Numbers and draws; the process that reads one of them is killed, as often as told."""

    def __init__(self, folder, deadly, times):
        self.folder, self.deadly, self.times = folder, deadly, times

    def __len__(self):
        return 12

    def __getitem__(self, index):
        drawn = [index, torch.rand(()).item(), random.random()]
        deaths = len(list(self.folder.iterdir()))
        if index == self.deadly and deaths < self.times:
            (self.folder / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(drawn, dtype=torch.float64)


@pytest.mark.parametrize("n_processes", [1, 2])
def test_a_batch_whose_maker_was_killed_is_made_again_with_the_same_bits(tmp_path, n_processes, caplog):
    shards = Shards(2, 2, 0, shuffle=False)
    (tmp_path / "calm").mkdir()
    (tmp_path / "deadly").mkdir()
    taken = {}
    for name, times in (("calm", 0), ("deadly", 2)):
        data = Deadly(tmp_path / name, 5, times)
        with LoaderPool(data, shards, states_at_start(range(2), shards), n_processes=n_processes) as pool:
            first = pool.process_ids
            taken[name] = [bits(pool.next(rank)) for _ in range(5) for rank in range(2)]
            assert (pool.process_ids == first) == (times == 0)
    assert taken["deadly"] == taken["calm"]
    assert len(list((tmp_path / "deadly").iterdir())) == 2
    assert "batch 1 of epoch 0 for logical worker 1 died; the batch is made again" in caplog.text


class Scaled:
    """Indices times an attribute, plus another one if there is any."""

    scale = 1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * self.scale + getattr(self, "shift", 0)


@pytest.mark.parametrize("n_processes", [0, 1, 2])
def test_loaders_see_changed_values_with_the_next_epoch_also_those_that_begin_late(n_processes):
    data, shards, model = Scaled(), Shards(1, 2, 0, shuffle=False), torch.nn.Linear(1, 1)

    def pool_from(state):
        user = UserState(model, [], {"data": data})
        return LoaderPool(data, shards, {0: state}, n_processes=n_processes, prefetch=3, user_state=user)

    with pool_from(shards.start()) as pool:
        taken = [pool.next(0).tolist()]
        data.scale, data.shift = 10, 100
        for process in pool.process_ids:
            os.kill(process, signal.SIGKILL)
        taken += [pool.next(0).tolist() for _ in range(4)]
        data.scale, inside = 1000, through_a_file(pool.state(0))
        assert set(inside.python) == {"data.scale", "data.shift"}
        taken.append(pool.next(0).tolist())
        del data.scale
        taken += [pool.next(0).tolist() for _ in range(3)]
        assert data.__dict__ == {"shift": 100}  # what the training process itself sees
    assert taken == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [100, 110],
        [120, 130],
        [140, 150],
        [160, 170],
        [100, 101],
    ]

    data = Scaled()
    with pool_from(inside) as pool:
        data.scale = 1000
        assert [pool.next(0).tolist() for _ in range(4)] == [*taken[5:8], [0, 1000]]


@pytest.mark.parametrize("n_loaders", [0, 2])
def test_samples_are_dealt_out_anew_where_the_data_set_has_another_length(n_loaders):
    class Growing(Scaled):
        size = 8

        def __len__(self):
            return self.size

    data, shards = Growing(), Shards(1, 2, 0, n_loaders=n_loaders, shuffle=False)

    def pool_from(state):
        user = UserState(torch.nn.Linear(1, 1), [], {"data": data})
        return LoaderPool(data, shards, {0: state}, n_processes=1, prefetch=6, user_state=user)

    with pool_from(shards.start()) as pool:
        taken = [pool.next(0).tolist() for _ in range(2)]
        data.size, inside = 12, through_a_file(pool.state(0))  # an epoch keeps its samples
        taken += [pool.next(0).tolist() for _ in range(8)]
        data.size = 4
        taken += [pool.next(0).tolist() for _ in range(3)]
    assert taken[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert taken[4:10] == [*taken[:4], [8, 9], [10, 11]]
    assert taken[10:] == [*taken[:2], taken[0]]
    data.size = 12
    with pool_from(inside) as pool:
        assert [pool.next(0).tolist() for _ in range(8)] == taken[2:10]


@pytest.mark.parametrize("n_processes", [0, 2])
def test_loaders_begin_anew_where_objects_that_cannot_be_sent_have_changed(n_processes):
    class Changing(Scaled):
        def __getitem__(self, index):
            return self.change(index) * self.scale

    data, shards = Changing(), Shards(1, 2, 0, shuffle=False)
    data.change = (1).__add__  # a method of a number, which nobody can rebuild
    user = UserState(torch.nn.Linear(1, 1), [], {"data": data})
    with LoaderPool(data, shards, {0: shards.start()}, n_processes=n_processes, user_state=user) as pool:
        first, taken = pool.process_ids, [pool.next(0).tolist() for _ in range(4)]
        data.change, data.scale = (3).__add__, 2
        taken += [pool.next(0).tolist() for _ in range(4)]
        assert len(pool.process_ids) == n_processes and not set(first) & set(pool.process_ids)
        data.scale = 1
        taken.append(pool.next(0).tolist())
        assert not pool.notices
        if n_processes:
            data.change = (5).__add__
            killed = pool.process_ids  # all, since only one of them gets the next order
            for process in killed:
                os.kill(process, signal.SIGKILL)
            while any(map(is_running, killed)):
                time.sleep(0.01)
            pool.next(0)
            assert "an object changed within an epoch" in "".join(pool.notices)
    assert taken[:4] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert taken[4:] == [[6, 8], [10, 12], [14, 16], [18, 20], [3, 4]]


def test_a_batch_that_kills_every_process_is_given_up(tmp_path):
    shards = Shards(1, 4, 0, shuffle=False)
    with LoaderPool(Deadly(tmp_path, 5, 99), shards, {0: shards.start()}) as pool:
        with pytest.raises(WorkerError, match="3 processes were killed while they made batch 1 of epoch 0"):
            for _ in range(2):
                pool.next(0)
        ids = pool.process_ids
    assert not any(map(is_running, ids))


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        n_threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Whether its end was noticed is not the question. Files stay open until the last thread has ended.
    return status.rpartition(")")[2].split()[0] != "Z" or n_threads > 1


def _own_a_pool(connection):
    pool = pool_of(states_at_start(), n_processes=2)
    pool.next(0)
    connection.send(pool.process_ids)
    time.sleep(3600)


def test_the_processes_end_when_the_one_that_trains_is_killed():
    context = get_context("fork")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own_a_pool, args=(theirs,))
    owner.start()
    ids = ours.recv()
    assert all(map(is_running, ids))
    owner.kill()
    owner.join()
    while any(map(is_running, ids)):  # for ever, if they do not end
        time.sleep(0.02)


class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError(f"sample {index} is spoiled")
        return torch.tensor(index)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_what_the_data_set_raises_is_told_where_its_batch_is_used(n_processes):
    shards = Shards(1, 2, 0, shuffle=False)
    with LoaderPool(Broken(), shards, {0: shards.start()}, n_processes=n_processes) as pool:
        assert [pool.next(0).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        for _ in range(2):  # it is not skipped either
            with pytest.raises(TrainingError, match=r"batch 2 of epoch 0 for logical worker 0 .*\n") as found:
                pool.next(0)
            assert "ValueError: sample 5 is spoiled" in str(found.value)


class Bundles:
    """Read in one call, as some data sets offer."""

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        return [
            {"name": f"sample {one}", "half": torch.full((2,), one, dtype=torch.bfloat16)} for one in indices
        ]


def test_batches_of_any_structure_and_type_come_through():
    shards = Shards(1, 2, 0, shuffle=False)
    with LoaderPool(Bundles(), shards, {0: shards.start()}, n_processes=1) as pool:
        batch = pool.next(0)
    assert batch["name"] == ["sample 0", "sample 1"]
    assert batch["half"].dtype == torch.bfloat16
    assert batch["half"].tolist() == [[0, 0], [1, 1]]
    batch["half"].add_(1)  # the batch belongs to the caller


# --- who gets which sample --------------------------------------------------------------------------


def dealt(n_samples, n_workers, seed, epoch, drop):
    """The rule, written down once more: permutation, round it off, deal in turn."""
    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    if drop:
        order = order[: n_samples // n_workers * n_workers]
    else:
        padded = -(-n_samples // n_workers) * n_workers
        order = [order[place % n_samples] for place in range(padded)]
    return [order[rank::n_workers] for rank in range(n_workers)]


@pytest.mark.parametrize("drop_samples", [False, True])
@pytest.mark.parametrize("drop_batch", [False, True])
def test_samples_are_dealt_by_the_rule(drop_samples, drop_batch):
    for n_samples in range(1, 20):
        for n_workers in range(1, 6):
            shards = Shards(n_workers, 2, 3, drop_last_samples=drop_samples, drop_last_batch=drop_batch)
            for epoch in (0, 4):
                expected = [
                    [
                        tuple(own[at : at + 2])
                        for at in range(0, len(own), 2)
                        if not drop_batch or at + 2 <= len(own)
                    ]
                    for own in dealt(n_samples, n_workers, 3, epoch, drop_samples)
                ]
                if not expected[0]:
                    with pytest.raises(
                        InputError, match=f"data set has {n_samples} samples; expected at least"
                    ):
                        shards.batches(range(n_samples), 0, epoch)
                else:
                    found = [shards.batches(range(n_samples), rank, epoch) for rank in range(n_workers)]
                    assert found == expected


def test_the_least_number_of_samples_in_a_refusal_is_enough():
    for options in ({}, {"drop_last_samples": True}, {"drop_last_batch": True}):
        shards = Shards(3, 4, 0, **options)
        with pytest.raises(InputError) as refused:
            shards.batches([], 0, 0)
        least = int(str(refused.value).split("at least ")[1].split(",")[0])
        assert len(shards.batches(range(least), 2, 0)) == 1
        with pytest.raises(InputError):
            shards.batches(range(least - 1), 2, 0)
    both = Shards(3, 4, 0, drop_last_samples=True, drop_last_batch=True)
    assert both.batches(range(12), 0, 0)
    with pytest.raises(InputError, match="11 samples; expected at least 12, for one batch of 4 to each of 3"):
        both.batches(range(11), 0, 0)


def test_order_of_samples_and_draws_change_with_the_epoch(stock):
    assert SHARDS.batches(DATA, 0, 0) != SHARDS.batches(DATA, 0, 1)
    plain = Shards(N, 3, 7, shuffle=False)
    assert plain.batches(DATA, 1, 0) == plain.batches(DATA, 1, 1)
    assert plain.batches(DATA, 1, 0)[0] == (1, 4, 7)
    with LoaderPool(DATA, plain, {1: plain.start()}, n_processes=0) as pool:
        taken = [bits(pool.next(1)) for _ in range(2 * PER_EPOCH)]
    assert taken[0] != taken[PER_EPOCH]


# --- streams ----------------------------------------------------------------------------------------


class Rows:
    """Iterator that draws a seed when it begins, and in each batch."""

    def __init__(self, batch):
        self.batch, self.seed = batch, None if batch else torch.rand(()).item()
        torch.rand(())

    def __iter__(self):
        return self

    def __next__(self):
        if self.batch == 3:
            raise StopIteration
        self.batch += 1
        return self.seed, self.batch, torch.rand(()).item()


class Stateful:
    """Makes its iterator for the first question about its state, as StatefulDataLoader of torchdata does."""

    def __init__(self):
        self.rows, self.is_new, self.start = None, False, 0

    def state_dict(self):
        if self.rows is None:
            self.rows, self.is_new = Rows(self.start), True
        return {"batch": self.rows.batch}

    def load_state_dict(self, state):
        self.rows, self.start = None, state["batch"]

    def __iter__(self):
        if not self.is_new:
            self.rows, self.start = Rows(self.start), 0
        self.is_new = False
        return self.rows


class Lazy(Stateful):
    def __iter__(self):
        yield from super().__iter__()


class Quiet(Lazy):
    def __iter__(self):
        for number in range(self.start, 3):
            self.start = number + 1
            yield number
        self.start = 0

    def state_dict(self):
        return {"batch": self.start}


def read(kind, ranks, n_batches, asks, resumes_after=()):
    """Return what streams yield, each in random states of its own."""

    def make():
        return Streams(lambda rank, n: kind(), ranks, 2, positions, 5)

    positions, found, own, notices = None, {rank: [] for rank in ranks}, {}, set()
    for rank in ranks:
        seed_everything(rank)
        own[rank] = capture_random_states()
    seed_everything(9)
    streams = make()
    for number in range(n_batches):
        if asks:
            before = capture_random_states()
            positions = {rank: streams.state(rank).values() for rank in ranks}
            assert capture_random_states() == before
        if number in resumes_after:
            streams = make()
            again = {rank: streams.state(rank).values() for rank in ranks}
            assert again == positions
        for rank in ranks:
            with preserved_random_states():
                restore_random_states(own[rank])
                found[rank].append(streams.next(rank)[1:] if kind is not Quiet else streams.next(rank))
                own[rank] = capture_random_states()
        notices |= streams.notices
    return found, own, notices


@pytest.mark.parametrize("resumes_after", [(), (0, 1, 2, 5), (3,), (6, 7)])
def test_a_stream_is_asked_for_its_state_only_after_it_has_begun(resumes_after):
    """Asking another one makes an iterator, whose seed comes from the random states of that moment."""
    plain = read(Stateful, (0, 1), 8, asks=False)
    assert read(Stateful, (0, 1), 8, asks=True, resumes_after=resumes_after) == plain
    assert read(Stateful, (1,), 8, asks=True)[0][1] == plain[0][1]


def test_a_stream_whose_generator_may_draw_again_where_it_resumes_is_named():
    assert read(Lazy, (0,), 5, asks=True)[2] == set()
    (notice,) = read(Lazy, (0,), 5, asks=True, resumes_after=(1,))[2]
    assert notice.startswith(
        "the stream Lazy draws in its first batch after a restart, and its __iter__ is a gen"
    )
    assert read(Quiet, (0,), 5, asks=True, resumes_after=(1, 4))[2] == set()


# --- what is refused --------------------------------------------------------------------------------


class Transform:
    def __init__(self, generator):
        self.steps = [{"crop": 3}, {"flip": generator}]


class Transformed(Broken):
    def __init__(self, generator):
        self.samples, self.transform = torch.zeros(8), Transform(generator)
        self.transform.owner = self  # things may hold each other


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(0), mtrand.RandomState(0), random.Random(0), torch.Generator()]
)
def test_generators_that_would_stay_behind_in_a_process_are_refused(generator):
    data, named = (
        Transformed(generator),
        r"Transformed draws from \.transform\.steps\[1\]\['flip'\]; expected",
    )
    with pytest.raises(InputError, match=named):
        LoaderPool(data, SHARDS, states_at_start())
    with LoaderPool(data, Shards(1, 2, 0, n_loaders=0), {0: LoaderState(0, 0, ())}):
        pass  # read in the training process, whose logical workers may have states of their own


@pytest.mark.parametrize(
    "shared", [np.random.Generator(mtrand.get_bit_generator()), mtrand._rand, torch.default_generator]
)
def test_the_global_states_are_no_generators_of_its_own(shared):
    with LoaderPool(Transformed(shared), SHARDS, states_at_start(), n_processes=0):
        pass


def test_odd_numbers_states_and_data_sets_are_refused():
    with pytest.raises(InputError, match="micro_batch_size is 0; expected a whole number >= 1"):
        Shards(1, 0, 0)
    with pytest.raises(
        InputError, match="n_processes 1 and prefetch 0; expected whole numbers >= 0 and >= 1"
    ):
        pool_of(states_at_start(), n_processes=1, prefetch=0)
    with pytest.raises(InputError, match="data set generator has no length; expected a map-style data set"):
        LoaderPool((one for one in range(3)), SHARDS, states_at_start())
    with pytest.raises(CheckpointError, match="logical worker 1 has 3 loaders; expected 2"):
        pool_of({1: LoaderState(0, 0, (None,) * 3)})
    with pytest.raises(CheckpointError, match="logical worker 1 is at batch 5 of an epoch; expected 0 to 4"):
        pool_of({1: LoaderState(0, PER_EPOCH, (None, None))})


# --- random states ----------------------------------------------------------------------------------


def draws():
    values = [random.random(), random.gauss(0, 1), mtrand.random(), mtrand.normal()]
    return [*values, torch.rand(()).item(), torch.randn(()).item()]


def test_random_states_are_taken_whole_also_between_the_two_of_a_pair_of_normal_variates():
    seed_everything(1)
    draws()
    state = capture_random_states()
    first = draws()
    other = capture_random_states()
    assert draws() != first
    restore_random_states(state)
    assert capture_random_states() == state
    assert draws() == first
    assert capture_random_states() == other
    restore_random_states(state)
    with preserved_random_states():
        draws()
    assert capture_random_states() == state


def test_random_states_of_numpy_are_those_that_numpy_tells():
    """Words are read and written where they lie; seeds and second normal variates must not go unnoticed."""
    rng, kept = np.random.default_rng(5), {}

    def told():
        state = mtrand.get_state(legacy=False)
        return [state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"], state["gauss"]]

    draws = [
        lambda: mtrand.random(int(rng.integers(700))), mtrand.standard_normal,
        lambda: mtrand.seed(int(rng.integers(3))), lambda: mtrand.set_state(mtrand.get_state()),
    ]  # fmt: skip
    with preserved_random_states():
        for _ in range(600):
            draws[rng.integers(len(draws))]()
            place = int(rng.integers(4))
            if place in kept and rng.random() < 0.5:
                state, expected = kept[place]
                restore_random_states(state)
                assert told() == expected
            kept[place] = capture_random_states(), told()


def test_words_decide_a_seed():
    seen = set()
    for words in ((0, "loader", 0, 0, 0), (0, "loader", 0, 0, 1), (0, "loader", 0, 1, 0), (0,), (1,)):
        seed_everything(*words)
        first = draws()
        seed_everything(*words)
        assert draws() == first
        seen.add(tuple(first))
    assert len(seen) == 5
    seed_stream(0, 0, 1, 0)
    assert tuple(draws()) in seen


def test_a_random_state_that_is_none_is_refused(monkeypatch):
    with pytest.raises(CheckpointError, match="a random state has 3 bytes; expected "):
        restore_random_states(b"abc")
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(InputError, match="global random state of NumPy is PCG64; expected MT19937"):
            capture_random_states()
    finally:
        mtrand.set_bit_generator(before)
