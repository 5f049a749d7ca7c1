"""Own training loops against stock scripts, bit for bit: losses, parameters, optimizers, contexts."""

import os
import random
import shutil
import signal

import pytest

torch = pytest.importorskip("torch")

import loop_scripts
from forked import SUPPORT, forking_servers

from makespan.easyscale import ElasticTrainer, run_together
from makespan.easyscale.job import ElasticJob
from makespan.easyscale.kernels import process_options
from makespan.easyscale.randomness import value_sha
from makespan.runtime import Launch, LocalLauncher, RunDirectory

pytestmark = pytest.mark.xdist_group("training")

FILE = SUPPORT / "loop_scripts.py"
N, STEPS = 4, 6
JOB = {
    "n_logical_workers": N, "micro_batch_size": 4, "n_loaders": 0, "seed": 3, "bucket_cap_bytes": 1 << 9,
    "fold": "ring",
}  # fmt: skip
SCRIPTS = (
    "ema", "two_players", "accumulation", "frozen", "mixture", "low_rank", "streamed", "half", "scaled",
    "stopped", "tied", "scheduled", "views", "given", "distilled", "plateau", "mixed", "masked",
    "variational", "penalised", "sharpness", "skipped", "weighed", "diffusion", "rewarded", "queued",
)  # fmt: skip
CHANGED = (
    "ema", "two_players", "accumulation", "streamed", "scheduled", "scaled", "given", "stopped",
    "plateau", "penalised", "sharpness", "skipped", "diffusion", "rewarded", "queued",
)  # fmt: skip
LOSING = ("ema", "accumulation", "streamed", "scaled", "stopped", "plateau", "queued", "rewarded", "given")
BITS = ["step", "rank", "loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]


@pytest.fixture(scope="module", autouse=True)
def servers():
    """Let the processes of stock scripts be forked, too."""
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options of scripts, by name."""
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.manual_seed(99)
    torch.save(loop_scripts.Net().state_dict(), path)
    return {"given": {"path": str(path)}}


@pytest.fixture(scope="module")
def stock(tmp_path_factory, options):
    """What stock scripts train: rows by mini-batch and rank, and hashes of what is kept."""
    path, job = tmp_path_factory.mktemp("stock"), JOB | {"loop": f"{FILE}:ema"}
    scripts = {name: options.get(name, {}) for name in SCRIPTS}
    request = {"job": job, "steps": STEPS, "scripts": scripts}
    kernels = [process_options("A", ElasticJob(**job).level)] * N
    LocalLauncher().run(Launch("stock_scripts", request, N, path, options=kernels))
    found = {}
    for number, name in enumerate(SCRIPTS):
        result = RunDirectory(path).result(number)
        by_step = list(zip(*result["rows"], strict=True))
        rows = [
            [step + 1, rank, *row] for step, ranks in enumerate(by_step) for rank, row in enumerate(ranks)
        ]
        found[name] = rows, result["kept"]
    return found


def trainer(name, folder, options, **changes):
    values = options.get(name, {})
    changes |= {"find_unused_parameters": name == "skipped"}
    job = JOB | ({"options": {"loop": values}} if values else {}) | changes
    return ElasticTrainer(loop=f"{FILE}:{name}", run_dir=folder / name, **job)


def outcome(result, kept):
    """Return what must be equal: rows, and hashes of shared state in the checkpoint."""
    shared = torch.load(result.checkpoint / "shared.pt", weights_only=True)
    rows = result.steps.sort_values(["step", "rank"])[BITS].to_numpy().tolist()
    return rows, {name: value_sha(shared[name]) for name in kept}


@pytest.fixture(scope="module", params=["0,1,2,3", "2,0/1,3"])
def elastic(request, tmp_path_factory, options):
    """What all scripts train under a mapping."""
    folder = tmp_path_factory.mktemp("elastic")
    trainers = [trainer(name, folder, options) for name in SCRIPTS]
    results = run_together(trainers, STEPS, request.param, hash_every=1)
    return dict(zip(SCRIPTS, results, strict=True))


@pytest.fixture(scope="module")
def changed(tmp_path_factory, options):
    """What some scripts train while processes come and go; weights are there for the first ones only."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copyfile(options["given"]["path"], folder / "weights.pt")
    own = {"given": {"path": str(folder / "weights.pt")}}
    trainers = [trainer(name, folder, own) for name in CHANGED]
    for steps, mapping in ((2, "0/1/2/3"), (4, "3,1,0,2"), (STEPS, "1/0,2,3")):
        results = run_together(trainers, steps, mapping, hash_every=1)
        (folder / "weights.pt").unlink(missing_ok=True)
    return dict(zip(CHANGED, results, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_trains_with_the_bits_of_its_stock_script(stock, elastic, name):
    rows, kept = stock[name]
    assert outcome(elastic[name], kept) == (rows, kept)
    assert len(rows) == N * (elastic[name].step if name == "stopped" else STEPS)
    assert elastic[name].state == "finished"


@pytest.mark.parametrize("name", CHANGED)
def test_changes_of_the_mapping_change_no_bit(stock, changed, name):
    """From a process for each logical worker to one process, and to two."""
    rows, kept = stock[name]
    assert outcome(changed[name], kept) == (rows, kept)


@pytest.mark.parametrize("name", LOSING)
def test_a_loss_at_random_changes_no_bit(stock, options, tmp_path, name):
    """One of three processes is killed, and the others continue from memory."""
    rng, pids, killed = random.Random(name), {}, []
    phase = rng.choice(("forward", "sum", "contexts"))
    n_steps = len(stock[name][0]) // N  # one stops by itself
    step, victim = rng.randint(1, n_steps - 2), rng.randrange(3)

    def kill(event):
        if event.kind == "hello":
            pids[event.node] = event.values["pid"]
        place = {"phase": phase, "iteration": step}
        if event.kind == "announce" and event.node == victim and event.values == place and not killed:
            killed.append(os.kill(pids[victim], signal.SIGKILL))

    result = trainer(name, tmp_path, options).run(STEPS, "0/1,2/3", survives=1, on_event=kill, hash_every=1)
    assert list(result.reconfigurations["cause"]) == ["start", "recovery"]
    rows, kept = stock[name]
    found, found_kept = outcome(result, kept)
    # Hashes of contexts that only the lost process knew are missing.
    assert [row[:-1] for row in found] == [row[:-1] for row in rows] and found_kept == kept
    pairs = [(ours[-1], theirs[-1]) for ours, theirs in zip(found, rows, strict=True)]
    assert all(ours == theirs for ours, theirs in pairs if ours)
    assert all(ours for ours, _ in pairs[-N:])


def test_the_guide_counts_the_scripts(root):
    guide = " ".join((root / "docs/guides/train-elastically.md").read_text(encoding="utf-8").split())
    assert f"{len(SCRIPTS)} scripts of the kinds above" in guide
    assert f"on two, {len(CHANGED)} of them also while four processes become one and then two" in guide


# --- what must make a difference ------------------------------------------------------------------------


def test_stock_scripts_differ_where_elastic_ones_must_follow_them(stock):
    """Otherwise nothing would tell whether the bits of all scripts are followed."""
    last = {name: tuple(rows[-1][2:]) for name, (rows, _) in stock.items()}
    assert len(set(last.values())) == len(SCRIPTS)
    rows, _ = stock["stopped"]
    assert len(rows) < N * STEPS
    scaled, _ = stock["scaled"]
    assert scaled[2 * N][3] == scaled[N][3] != scaled[0][3]  # the third step overflows and is skipped
