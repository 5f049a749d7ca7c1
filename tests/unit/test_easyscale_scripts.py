"""What training scripts keep, return and call: kept under every mapping, or refused by name at once."""

import io
import json
import signal
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict
from importlib.machinery import ModuleSpec
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import found_state
import kept_state
import torch.distributed as dist
from elastic_job import HashingTrainer, bits
from kept_state import Pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from makespan.easyscale import ElasticTrainer
from makespan.easyscale.context import (
    Contexts,
    _groups,
    patch_distributed,
    register_state,
    registered_state,
    virtual_rank,
)
from makespan.easyscale.data import LoaderPool, Order, Shards, make
from makespan.easyscale.hosting import HostedESTs
from makespan.easyscale.job import ElasticJob, RankMapping, RunOptions
from makespan.easyscale.kernels import DeterminismLevel
from makespan.easyscale.parts import TrainedParts, build_parts
from makespan.easyscale.reduction import Reduction, in_memory
from makespan.easyscale.user_state import UserState, _Capture, is_filled_cache
from makespan.easyscale.worker import TrainingProcess
from makespan.errors import CheckpointError, InputError, TrainingError
from makespan.user_code import load_file

pytestmark = pytest.mark.xdist_group("training")
KEPT = Path(__file__).parents[1] / "support" / "kept_state.py"
FOUND = KEPT.with_name("found_state.py")
CPU, D1, STEPS = torch.device("cpu"), DeterminismLevel.named("D1"), 6


def trainer(run_dir, **changes):
    job = {
        "model": f"{KEPT}:keeper", "optimizer": f"{KEPT}:optimizer", "data": f"{KEPT}:Rows",
        "loss": f"{KEPT}:loss", "n_logical_workers": 3, "micro_batch_size": 4, "seed": 3,
    }  # fmt: skip
    return HashingTrainer(run_dir=run_dir, **(job | changes))


# --- state ----------------------------------------------------------------------------------------------


def test_state_of_scripts_is_kept_under_every_mapping_and_over_restarts(tmp_path):
    """A counter, a generator, hidden state, variables, buffers that come late or grow; and what all share."""
    whole = trainer(tmp_path / "whole", after_reduce=f"{KEPT}:follow").run(STEPS, "0/1/2")
    ours = trainer(tmp_path / "changed", after_reduce=f"{KEPT}:follow")
    ours.run(2, "2,0/1", hash_every=0)
    ours.run(4, "1,2,0")
    changed = ours.run(STEPS, "0/2,1")
    late = changed.steps["step"] > 2
    assert bits(changed)[late.sum() - len(late) :] == bits(whole)[late.sum() - len(late) :]
    states = [torch.load(one.checkpoint / "model.pt", weights_only=True) for one in (whole, changed)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert {name: float(states[1][name]) for name in ("updates", "variable", "registered", "counted")} == {
        "updates": STEPS, "variable": STEPS, "registered": STEPS, "counted": STEPS,
    }  # fmt: skip
    assert states[1]["cache"].shape == (4,)
    assert "centre" in states[1]


def test_state_of_optimizers_averages_and_data_sets_is_kept_too(tmp_path):
    """An average of weights, optimizers in optimizers and variables, and a data set that counts and draws."""
    changes = {
        "model": f"{KEPT}:taught", "optimizer": f"{KEPT}:lookahead", "lr_scheduler": f"{KEPT}:falling",
        "after_reduce": f"{KEPT}:teach", "data": f"{KEPT}:Fading", "n_loaders": 0,
    }  # fmt: skip
    whole = trainer(tmp_path / "whole", **changes).run(5, "0/1/2")
    ours = trainer(tmp_path / "changed", **changes)
    ours.run(3, "2,0/1")
    assert bits(ours.run(5, "1,2,0")) == bits(whole)


def found(name, ranks):
    """Load the code of a model anew, as a process does; return the model and the contexts of some ranks."""
    sys.modules.pop("late_import", None)
    module = load_file(FOUND)
    torch.manual_seed(0)
    model = getattr(module, name)()
    return model, Contexts(model, CPU, ranks, 0, UserState(model, [module]))


def turns(model, contexts, ranks, n_turns, watched=2):
    """Return what passes compute, by rank."""
    outputs = {rank: [] for rank in ranks}
    for number in range(n_turns):
        if number < watched:
            contexts.begin_watching()
        for rank in ranks:
            with contexts.live(rank, watches=number < watched):
                outputs[rank].append(model.turn(torch.ones(3, 2) * (rank + 1)))
    return outputs


@pytest.mark.parametrize("name", [kind.__name__ for kind in found_state.KEPT])
def test_sums_belong_to_each_logical_worker_wherever_a_model_keeps_them(name):
    alone = {rank: turns(*found(name, [rank]), [rank], 5)[rank] for rank in (0, 1)}
    model, contexts = found(name, [0, 1])
    ours, written = turns(model, contexts, (0, 1), 3), io.BytesIO()
    assert contexts.notices == []
    torch.save({rank: contexts.values(rank) for rank in (0, 1)}, written)
    written.seek(0)
    saved = torch.load(written, weights_only=True)
    model, contexts = found(name, [1, 0])  # in a new process
    for rank, values in saved.items():
        contexts.install(rank, values)
    later = turns(model, contexts, (1, 0), 2, watched=0)
    assert {rank: ours[rank] + later[rank] for rank in (0, 1)} == alone


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("InQueue", "model.kept, a Queue"),
        ("InSimpleQueue", "model.kept, a SimpleQueue"),
        ("InNestedQueue", "model.nested, a Queue"),
        ("InWeakDictionary", "model.kept, a WeakKeyDictionary"),
        ("InResult", "found_state.py:one, a cache of functools.lru_cache"),
        ("InMethod", "found_state.py:InMethod.drawn, a cache of functools.lru_cache"),
        ("InTensor", "found_state.py:InTensor.zero, a cache of functools.lru_cache"),
        ("Pure", None),
    ],
)
def test_what_no_checkpoint_can_hold_is_named_when_a_pass_changes_it(name, told):
    model, contexts = found(name, [0, 1])
    turns(model, contexts, (0, 1), 2)
    begins = [notice.partition(", which")[0].partition(", of")[0] for notice in contexts.notices]
    assert set(begins) == (set() if told is None else {f"a forward pass changes {told}"})


def test_a_cache_of_samples_is_no_state():
    old, grown = {1: torch.ones(2)}, {1: torch.ones(2), 2: torch.zeros(2)}
    taken = [_Capture({}, set(), is_whole=False).take(one) for one in (old, grown, {1: 3.0, 2: 4.0}, 5)]
    assert is_filled_cache(taken[0], taken[1])
    assert not any(is_filled_cache(taken[0], one) for one in (taken[0], taken[2], taken[3]))


def test_what_makes_processes_differ_is_named_in_the_first_mini_batch(tmp_path):
    ours = trainer(tmp_path, model=f"{KEPT}:linear", after_reduce=f"{KEPT}:part_from_others")
    with pytest.raises(TrainingError, match="mini-batch 1: parameters differ between processes"):
        ours.run(50, "0,1/2")


def test_replicas_that_part_where_nothing_is_hashed_are_named_by_mini_batch_and_rank(tmp_path):
    ours = trainer(tmp_path, model=f"{KEPT}:linear", after_reduce=f"{KEPT}:part_late")
    with pytest.raises(TrainingError, match=r"mini-batch 6: parameters differ between processes \(ranks 2\)"):
        ElasticTrainer.run(ours, 50, "0/1/2")


def test_what_no_checkpoint_holds_is_named_before_the_first_mini_batch(tmp_path):
    ours = trainer(tmp_path, model=f"{KEPT}:linear", lr_scheduler=f"{KEPT}:WithLambda")
    with pytest.raises(InputError, match=r"shared\['scheduler'\]\['rule'\] is a function; expected tensors"):
        ours.run(50, "0,1,2")
    assert not list((tmp_path / "records").glob("*"))


def test_there_are_checkpoints_by_the_clock_without_being_asked_for(tmp_path):
    assert RunOptions().checkpoint_every_s > 0
    trainer(tmp_path, model=f"{KEPT}:linear").run(2, "0,1,2", checkpoint_every_s=1e-6)
    steps = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert steps == ["step-00000001.json", "step-00000002.json"]
    with pytest.raises(InputError, match="checkpoint_every_s is -1; expected a number >= 0"):
        RunOptions(checkpoint_every_s=-1)


def test_code_that_calls_other_processes_is_refused_in_one_line(tmp_path):
    ours = trainer(tmp_path, model=f"{KEPT}:linear", after_reduce=f"{KEPT}:call_others")
    with pytest.raises(InputError, match=r"calls torch.distributed.all_reduce; expected no comm") as error:
        ours.run(2, "0,1/2")
    assert "\n" not in str(error.value)


# --- one process ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    registered_state().clear()


def hosted(model, loss=nn.functional.mse_loss, optimizer=None):
    optimizer = optimizer or torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    parts = TrainedParts(model, optimizer, loss)
    return HostedESTs(parts, CPU, RankMapping.parse("0,1"), 0, Reduction(2), D1, seed=0)


def trained(model, batch, loss=nn.functional.mse_loss, **options):
    worker = hosted(model, loss, **options)
    (found,) = in_memory([worker.mini_batch(lambda rank: batch, watches=True)])
    return found.losses, worker.notices


class Taking(nn.Module):
    """Takes what a test says, and adds it up."""

    def __init__(self, take):
        super().__init__()
        self.linear, self.take = nn.Linear(2, 1), take

    def forward(self, *values, **named):
        return self.linear(self.take(*values, **named))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, scale=None):
        return self.linear(x * scale)


X, Y = torch.ones(3, 2), torch.zeros(3, 1)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda: Taking(lambda pair: pair.values + pair.weights), (Pair(X, X), Y)),
        (lambda: Taking(lambda both: both["a"] + both["b"]), (OrderedDict(a=X, b=X), Y)),
        (lambda: Taking(lambda both: both["a"] + both["b"]), (UserDict(a=X, b=X), Y)),
        (lambda: Taking(lambda both: both[0] + both[1]), [[X, X], Y]),
        (Named, ({"x": X, "scale": X}, Y)),
    ],
    ids=["named tuple", "ordered dictionary", "mapping", "list", "names of arguments"],
)
def test_inputs_of_every_kind_reach_the_model_as_they_are(model, batch):
    losses, notices = trained(model(), batch)
    assert losses[0] == losses[1] > 0
    assert notices == []


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda: Taking(lambda batch: batch[0] * batch[2]), (X, Y, X)),
        (lambda: Taking(lambda batch: batch["x"]), {"x": X, "labels": Y}),
        (Named, {"x": X, "scale": X}),
    ],
    ids=["triple", "dictionary", "names of arguments"],
)
def test_a_batch_that_is_no_pair_goes_whole_to_model_and_loss(model, batch):
    def loss(outputs, targets):
        assert type(targets) is type(batch) and len(targets) == len(batch)
        return outputs.square().mean()

    assert trained(model(), batch, loss)[0][0] > 0


def test_a_batch_that_a_model_does_not_take_is_described():
    found = "model Linear does not accept a batch that is dict with 'inputs', 'labels' .TypeError: .*"
    with pytest.raises(InputError, match=f"{found}expected a pair of inputs and targets"):
        trained(nn.Linear(2, 1), {"inputs": X, "labels": Y})


@pytest.mark.parametrize(
    "wrap", [lambda one: (one, {"a": 1}), lambda one: {"loss": one, "a": 1}], ids=["tuple", "dictionary"]
)
def test_a_loss_with_logs_trains_and_says_that_logs_are_not_kept(wrap):
    plain, _ = trained(_seeded(), (X, Y))
    losses, notices = trained(_seeded(), (X, Y), lambda *both: wrap(nn.functional.mse_loss(*both)))
    assert losses == plain
    assert "which is ignored" in notices[0]


def _seeded():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda o, t: float(o.sum()), "loss returned a float; expected a scalar tensor"),
        (lambda o, t: (o - t).square(), r"loss returned a tensor of shape \(3, 1\)"),
        (lambda o, t: (o - t).square().mean().detach(), "loss returned a tensor that requires no gradient"),
        (lambda o, t: {"total": o.sum()}, "loss returned a dict with 'total'"),
    ],
)
def test_what_cannot_be_trained_is_refused(loss, told):
    with pytest.raises(InputError, match=told):
        trained(nn.Linear(2, 1), (X, Y), loss)


class Iterating(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scales = nn.Linear(2, 1), cycle([1.0, 0.5])


def test_an_iterator_of_the_model_is_refused_before_it_is_used():
    model = Iterating()
    with pytest.raises(InputError, match=r"model.scales is an iterator \(cycle\), whose position"):
        Contexts(model, CPU, [0], 0, UserState(model, []))


def test_an_object_that_no_restart_could_make_is_refused_when_it_appears():
    model = nn.Linear(2, 1)
    contexts = Contexts(model, CPU, [0], 0, UserState(model, [SCRIPT]))
    contexts.begin_watching()
    SCRIPT.average = None
    told = r"script:average became a torch.nn.*Linear, which a checkpoint cannot rebuild"
    with pytest.raises(InputError, match=told), contexts.active_for_all(watches=True):
        SCRIPT.average = nn.Linear(2, 1)


SCRIPT = ModuleType("script")
SCRIPT.__spec__ = ModuleSpec("script", None)


def test_the_loader_of_a_batch_is_told_to_who_asks():
    order = Order(seed=1, n_logical_workers=2, rank=0, epoch=0, batch=5, stream=1, indices=(0,), n_loaders=2)
    made = make([0], lambda samples: torch.utils.data.get_worker_info(), order)
    assert (made.batch.id, made.batch.num_workers, made.batch.dataset) == (1, 2, [0])
    assert torch.utils.data.get_worker_info() is None


class Late(nn.Module):
    """Does something in a pass that a checkpoint or a sum of gradients would miss."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear, self.frozen = how, nn.Linear(2, 1), nn.Linear(1, 1).requires_grad_(False)

    def forward(self, values):
        if self.how == "parameter" and not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.ones(1))
        if self.how == "weights":
            self.linear.weight.data.mul_(0.5)
        if self.how == "thaw":
            self.frozen.requires_grad_(True)
        if self.how == "hook":
            self.linear.register_forward_hook(lambda *_: None)
        if self.how == "register" and "late" not in registered_state():
            register_state("late", lambda: 1, print)
        return self.frozen(self.linear(values))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("parameter", "a forward pass added or removed parameter extra"),
        ("weights", "a forward pass changes parameter linear.weight, and the next pass changes it again"),
        ("thaw", "parameter frozen.weight got a gradient but required none when the run began"),
        ("hook", "a forward pass added or removed a hook of module linear"),
        ("register", "state 'late' is registered by a forward pass"),
    ],
)
def test_what_a_pass_may_not_do_is_refused_in_the_first_one(how, told):
    with pytest.raises(InputError, match=told):
        trained(Late(how), (X, Y))


def test_an_optimizer_of_parameters_that_the_model_lacks_is_refused():
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(InputError, match=r"has a parameter of shape \(1,\) that the model lacks"):
        hosted(model, optimizer=optimizer)


FILE = """
import torch
from torch import nn

def lazy():
    return nn.LazyLinear(3)

def plain():
    return nn.Linear(2, 1)

def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())

def loader():
    return torch.utils.data.DataLoader([(0, 0)] * 8)


def splits():
    data = torch.utils.data.TensorDataset(torch.zeros(8))
    return data, data


def sharded(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def several(model):
    return [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())]
"""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "lazy"}, "model: weight belongs to a lazy module and has no size yet"),
        ({"lr_scheduler": "plateau"}, "returned ReduceLROnPlateau, whose step needs an argument .*'metrics'"),
        ({"optimizer": "lbfgs"}, "returned LBFGS, whose step needs an argument .*'closure'"),
        ({"data": "loader"}, "loader returned a DataLoader; expected one map-style data set"),
        ({"data": "splits"}, "splits returned a tuple of 2 data sets; expected one map-style data set"),
        ({"optimizer": "several"}, "several returned list; expected a torch.optim"),
    ],
)
def test_parts_that_need_what_a_mini_batch_does_not_have_are_refused(tmp_path, changes, told):
    (tmp_path / "mine.py").write_text(FILE)
    parts = {"model": "plain", "data": "plain", "loss": "plain"} | changes
    job = ElasticJob(**{part: f"{tmp_path}/mine.py:{name}" for part, name in parts.items()})
    with pytest.raises(InputError, match=told):
        build_parts(job, CPU)


class Drawing:
    """Samples that draw from a generator of their file, or count how many were read."""

    def __init__(self, module):
        self.module = module

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if hasattr(self.module, "GENERATOR"):
            return torch.tensor(self.module.GENERATOR.random())
        self.module.CACHE[index], self.module.COUNT["n"] = index, self.module.COUNT["n"] + 1
        return torch.tensor(self.module.COUNT["n"])


@pytest.mark.parametrize(
    "values", [{"GENERATOR": np.random.default_rng(0)}, {"COUNT": {"n": 0}, "CACHE": {}}]
)
def test_state_that_loader_processes_change_is_rejected_or_told(values):
    module, shards = ModuleType("mine"), Shards(1, 2, 0, n_loaders=1)
    module.__file__ = "/somewhere/mine.py"
    vars(module).update(values)
    watch = UserState(nn.Linear(1, 1), [module])
    with LoaderPool(Drawing(module), shards, {0: shards.start()}, n_processes=1, user_state=watch) as pool:
        if "GENERATOR" in values:
            with pytest.raises(InputError, match=r"mine.py:GENERATOR changes while a loader reads samples"):
                pool.next(0)
        else:
            pool.next(0)
            (notice,) = pool.notices
            assert notice.startswith("mine.py:COUNT changes while a loader reads samples, and each loader")


@pytest.mark.parametrize(
    "value",
    [
        frozenset({1, 2}),
        {frozenset({1}): 2},
        Pair(1, [2.0]),
        Counter({"a": 2}),
        OrderedDict(b=1, a=2),
        (1, {2}),
    ],
    ids=["frozen set", "frozen set as key", "named tuple", "counter", "ordered dictionary", "plain"],
)
def test_containers_that_appear_while_training_keep_their_type(value):
    before, after = nn.Linear(1, 1), nn.Linear(1, 1)
    before.history, after.history = [value], []
    taken = UserState(before, [kept_state]).take(["model.history"])
    UserState(after, [kept_state]).give(taken)
    (found,) = after.history
    assert found == value and type(found) is type(value)
    assert list(map(type, found)) == list(map(type, value))


SOURCE = """
import enum
class Model:
    def method(self): pass
    @staticmethod
    def shared(): pass
def chosen(): pass
class Mode(enum.Enum):
    FAST = 1
"""


@pytest.fixture
def code(monkeypatch):
    """A function that makes the module ``mine`` anew, as another process has it."""

    def made():
        module = ModuleType("mine")
        module.__file__ = "/somewhere/mine.py"
        exec(SOURCE, vars(module))
        monkeypatch.setitem(sys.modules, "mine", module)
        return module

    return made


def test_attributes_that_methods_get_while_training_are_restored(code):
    before = code()
    before.Model.method.calls, before.Model.shared.calls, before.Model.late = 3, 4, 5
    names = [f"mine.py:Model.{name}" for name in ("method.calls", "shared.calls", "late")]
    user = UserState(nn.Linear(1, 1), [before])
    user.places()
    taken = user.take(names)
    after = code()
    user = UserState(nn.Linear(1, 1), [after])
    user.places()
    user.give(taken)
    assert (after.Model.method.calls, after.Model.shared.calls, after.Model.late) == (3, 4, 5)


@pytest.mark.parametrize("kept", ["chosen", "Mode.FAST"])
def test_a_kept_function_or_member_that_is_gone_is_an_error(code, monkeypatch, kept):
    before = code()
    before.kept = attrgetter(kept)(before)
    taken = UserState(nn.Linear(1, 1), [before]).take(["mine.py:kept"])
    edited = SOURCE.replace("chosen", "other").replace("FAST", "OFF")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", edited)
    said = f"mine.py:kept is mine.py:{kept.replace('.', ':')}, which cannot be found; expected it"
    with pytest.raises(CheckpointError, match=said):
        UserState(nn.Linear(1, 1), [code()]).give(taken)


# --- what code of the user sees of processes ------------------------------------------------------------


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patch_distributed(3)
    yield dist.group.WORLD
    dist.destroy_process_group()
    _groups.clear()


CALLS = {
    "all_reduce": lambda: dist.all_reduce(X), "barrier": lambda: dist.barrier(),
    "new_group": lambda: dist.new_group([0]), "broadcast": lambda: dist.broadcast(X, 0),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "send": lambda: dist.send(X, 1), "destroy_process_group": lambda: dist.destroy_process_group(),
    "init_process_group": lambda: dist.init_process_group("gloo"),
    "_get_default_store": lambda: dist.distributed_c10d._get_default_store(),
    "allreduce": lambda: dist.group.WORLD.allreduce([X]),
    r"ProcessGroup\.group_name": lambda: init_device_mesh("cpu", (3,)),
    "allgather": lambda: nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),
}  # fmt: skip


def test_rank_number_and_group_are_those_of_the_logical_worker(group):
    with virtual_rank(2, 3):
        assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (2, 3, True)
        assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (2, 3)
        assert dist.distributed_c10d.get_rank() == 2
        assert dist.get_process_group_ranks(None) == [0, 1, 2]
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) == (0, 1, group)


def test_an_optimizer_that_communicates_is_refused(group, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    parts = {"model": "plain", "optimizer": "sharded", "data": "plain", "loss": "plain"}
    job = ElasticJob(**{part: f"{tmp_path}/mine.py:{name}" for part, name in parts.items()})
    with virtual_rank(0, 3), pytest.raises(InputError, match="ZeroRedundancyOptimizer, which communicates"):
        build_parts(job, CPU)


@pytest.mark.parametrize("name", CALLS)
def test_communication_is_refused_by_name_at_the_first_call(group, name):
    with (
        virtual_rank(0, 3),
        pytest.raises(InputError, match=rf"calls torch.distributed\.{name}; expected no comm"),
    ):
        CALLS[name]()
    found = torch.ones(1)
    dist.all_reduce(found)
    assert found == 1


# --- a disk that is full --------------------------------------------------------------------------------

WRITER = """
import json, resource, sys
from pathlib import Path

import torch

from makespan.easyscale.saved import _write

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    _write({"a": torch.zeros(100_000)}, Path(sys.argv[1], "worker-0.pt"))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_handler_of_the_script_does_not_keep_a_notice_from_the_run():
    before = signal.getsignal(signal.SIGTERM)
    process = object.__new__(TrainingProcess)
    process.is_signalled, process.handlers = False, {signal.SIGTERM: process._on_signal}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
        (told,) = process.set_handlers()
        assert "sets a handler of SIGTERM, which is not called" in told
        signal.raise_signal(signal.SIGTERM)
        assert process.is_signalled
        assert not process.set_handlers()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_full_disk_is_named_with_the_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], capture_output=True, check=True)
    kind, told = json.loads(done.stdout)
    assert kind == "CheckpointError"
    assert told.startswith(f"{tmp_path}/worker-0.pt: cannot be written: File too large; ")
    assert told.endswith("are free on the disk; earlier checkpoints are intact")


# --- notices --------------------------------------------------------------------------------------------


def test_by_default_a_notice_saves_and_says_so(tmp_path, caplog):
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ours = trainer(tmp_path, model=f"{KEPT}:linear")
    told = []

    def stop(step, loss):
        if not told:
            told.append(step)
            signal.raise_signal(signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt):
            ours.run(100_000, "0,1,2", on_progress=stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    step = ours.folder.checkpoint().step
    assert step >= told[0]
    assert "SIGTERM: ending after this mini-batch, with a checkpoint" in caplog.text
    assert f"{step} mini-batches are saved; the same call resumes the run" in caplog.text
