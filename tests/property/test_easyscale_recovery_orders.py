"""Elastic runs whose processes are lost, leave and join, under every order of messages, simulated.

A simulated process has the number of mini-batches that it has done and the contexts that it holds, each the
number of mini-batches that its logical worker has done. Whoever continues from another number is found. Jobs
with a training loop of their own have the same protocol, and code behind the loop at its end. With shards, a
process has the number of mini-batches done of each parameter, and of those that it holds with their state.
"""

import random
from collections import deque

from hypothesis import example, given, settings, strategies as st

from makespan.easyscale.job import RankMapping
from makespan.easyscale.recovery import (
    ASSEMBLY,
    HeldShards,
    RecoveryPlanner,
    RecoveryProtocol,
    backups,
    boundary_key,
    holdings,
)
from makespan.runtime import messages as said, protocol as acts, protocol as tasks

N_WORKERS = 4
N_PARAMETERS = 5


class Process:
    """A process, whose work is a generator that yields where it waits for others or for its turn."""

    def __init__(self, number, world):
        self.number, self.world, self.part = number, world, tasks.WorkerProtocol()
        self.inbox, self.outbox, self.todo = deque(), deque(), deque()
        self.work, self.has_left = None, False
        self.done, self.contexts, self.ranks, self.saved, self.keys = None, {}, (), 0, set()
        self.held, self.ready = dict[int, int](), None  # mini-batches done by parameter, of those it holds
        self.parameters = dict.fromkeys(range(N_PARAMETERS))  # mini-batches done of all

    def can_act(self):
        return not self.has_left and (self.work is not None or self.todo or self.inbox)

    def is_superseded(self):
        return any(isinstance(message, said.Freeze) for message in self.inbox)

    def act(self):
        if self.work is not None:
            if self.is_superseded():
                self.work = None
                return
            try:
                next(self.work)
            except StopIteration:
                self.work = None
        elif self.todo:
            self.begin(self.todo.popleft())
        else:
            message = self.inbox.popleft()
            if isinstance(message, said.Shared):
                self.keys |= {(message.generation, key) for key in message.values}
            else:
                self.todo.extend(self.part.receive(message))

    def begin(self, task):
        match task:
            case tasks.Drop():
                held = holdings(self.done, self.contexts, self.shards())
                self.outbox.append(said.Frozen(task.generation, task.step, held))
            case tasks.Join():
                self.work = self.form(task.form)
            case tasks.Compute():
                self.work = self.train(task.iteration)
            case tasks.Apply():
                self.saved = self.done
            case tasks.Write():
                self.world.written.setdefault(self.done, set()).update(self.ranks)
                self.todo.extendleft(self.part.saved(task.save))
            case tasks.Answer():
                self.outbox.append(task.message)
            case tasks.Depart():
                self.has_left = True

    def shards(self):
        if not self.world.is_sharded:
            return None
        steps = {step for step in (*self.held.values(), self.ready) if step is not None}
        lacks = any(step != self.done for step in self.parameters.values())
        return HeldShards(N_PARAMETERS, {step: tuple(self.held) for step in steps}, lacks)

    def holds(self, parameter):
        """Whether this process holds a parameter under its mapping."""
        place, owner = self.nodes.index(self.number), parameter % len(self.nodes)
        return place == owner or place in backups(owner, self.hosts, self.world.survives)

    def step_shard(self, step):
        assert set(self.held.values()) <= {step - 1}
        self.held = dict.fromkeys(self.held, step)
        self.parameters |= self.held
        self.ready = None

    def form(self, form):
        assembly, world = ASSEMBLY.validate_python(form.work), self.world
        posted, replicated = world.posted[form.generation], world.replicated[form.generation]
        self.mapping, self.nodes = RankMapping.parse(assembly.mapping), assembly.nodes
        self.hosts = assembly.hosts
        posted[self.number] = self.done, {step: dict(held) for step, held in self.contexts.items()}
        yield
        supplied = world.supplied[form.generation]
        if self.number not in assembly.nodes:
            if self.number in assembly.behind:
                while assembly.source not in posted:
                    yield
                if self.ready == assembly.step:
                    self.step_shard(assembly.step)
                self.done = assembly.step
            supplied[self.number] = dict(self.held)
            self.todo.extend(self.part.formed({}))
            return
        ranks = self.mapping.hosted[assembly.nodes.index(self.number)]
        if assembly.is_start:
            own = dict.fromkeys(ranks, 0)
        else:
            needed = {assembly.holders[rank] for rank in ranks}
            while not needed <= posted.keys():
                yield
            own = {rank: posted[assembly.holders[rank]][1][assembly.step][rank] for rank in ranks}
            if self.number in assembly.behind:
                while assembly.source not in posted:
                    yield
                assert posted[assembly.source][0] == assembly.step
            else:
                assert self.done == assembly.step
        assert set(own.values()) == {assembly.step}
        if world.is_sharded and not assembly.is_start:
            if self.ready == assembly.step:
                self.step_shard(assembly.step)
            if set(self.held.values()) != {assembly.step}:
                self.held = {}
            self.ready = None
        self.ranks, self.done = ranks, assembly.step
        if self.number in assembly.behind:
            self.saved = world.processes_saved
        if world.is_sharded and assembly.is_start:
            self.parameters = dict.fromkeys(range(N_PARAMETERS), 0)
            self.held = {number: 0 for number in self.parameters if self.holds(number)}
        elif world.is_sharded:
            supplied[self.number] = dict(self.held)
            received = {}
            for number, having in enumerate(assembly.shards):
                holds, lacks = self.holds(number), self.number in assembly.lacking
                if self.number not in having and (holds or lacks):
                    while having[0] not in supplied:
                        yield
                    assert supplied[having[0]][number] == assembly.step
                    received[number] = holds
            self.held |= {number: self.done for number, holds in received.items() if holds}
            self.parameters |= dict.fromkeys(received, self.done) | self.held
            assert set(self.parameters.values()) == {self.done}
        self.contexts = {self.done: self.contexts.get(self.done, {}) | own}
        replicated[self.number] = own
        yield
        for other in self.kept_for():
            while other not in replicated:
                yield
            self.contexts[self.done] |= replicated[other]
        world.kept[form.generation].add(self.number)
        while not world.kept[form.generation] >= set(assembly.nodes):
            yield
        self.held = {number: step for number, step in self.held.items() if self.holds(number)}
        assert not world.is_sharded or len(self.held) == sum(map(self.holds, range(N_PARAMETERS)))
        self.contexts[self.done] = own | {
            rank: step for other in self.kept_for() for rank, step in replicated[other].items()
        }
        self.todo.extend(self.part.formed({f"worker-{rank}": "" for rank in ranks}))

    def kept_for(self):
        number = self.nodes.index(self.number)
        return [
            node
            for other, node in enumerate(self.nodes)
            if number in backups(other, self.hosts, self.world.survives)
        ]

    def train(self, transaction):
        world, generation = self.world, self.part.generation
        if world.has_loop and self.saved == world.end:
            for _ in range(world.rng.randint(0, 9)):
                yield
            world.behind.add(self.number)
            self.todo.extend(self.part.computed({"saves": False, "then": "end"}))
            return
        ending = 0
        while not ending and self.done < world.end:
            step = self.done + 1
            self.contexts[step] = dict.fromkeys(self.ranks, step)
            asked = (generation, boundary_key(transaction)) in self.keys
            requested = 2 if world.is_suspended and self.nodes[0] == self.number else int(asked)
            sent = world.sent.setdefault((generation, step), {})
            sent[self.number] = dict(self.contexts[step])
            yield
            while not sent.keys() >= set(self.kept_for()):
                yield
            for other in self.kept_for():
                self.contexts[step] |= sent[other]
            # The results, which go to all, are those of processes that have what they keep for others.
            self.ready = step if world.is_sharded else None
            results = world.results.setdefault((generation, step), {})
            results[self.number] = requested
            yield
            while not results.keys() >= set(self.nodes):
                yield
            if world.is_sharded:
                self.step_shard(step)
            ending, self.done = max(results.values()), step
            world.trained.setdefault(step, set()).add(generation)  # its row is there before shards are sent
            self.contexts = {kept: held for kept, held in self.contexts.items() if kept >= step}
            if world.is_sharded:
                stepped = world.stepped.setdefault((generation, step), {})
                stepped[self.number] = set(self.held)
                for number in set(self.parameters) - set(self.held):
                    while self.nodes[number % len(self.nodes)] not in stepped:
                        yield
                    assert number in stepped[self.nodes[number % len(self.nodes)]]
                    self.parameters[number] = step
            ending = max(ending, 2 * (step % world.save_every == 0))
            yield
        is_over = self.done == world.end
        is_left = (world.is_suspended and ending == 2) or (is_over and not world.has_loop)
        then = "end" if is_left else "behind" if is_over else "train"
        report = {"saves": ending == 2 or is_over, "step": self.done, "then": then}
        self.todo.extend(self.part.computed(report if self.number == self.nodes[0] else None))


class World:
    """All processes, the coordinator, and what lies between them, in order for each connection."""

    def __init__(self, mapping, end, survives, save_every, has_loop, is_sharded, rng):
        self.rng, self.end, self.survives, self.save_every = rng, end, survives, save_every
        self.has_loop, self.behind = has_loop, set()
        self.is_sharded, self.supplied, self.stepped = is_sharded and not has_loop, {}, {}
        self.processes, self.error, self.is_over, self.is_suspended = {}, None, False, False
        self.posted, self.replicated, self.kept, self.sent, self.results = {}, {}, {}, {}, {}
        self.written, self.trained, self.stored, self.plans = {}, {}, [], []
        self.may_lose, self.drained, self.n_made, self.last = 0, set(), 0, None
        mapping = RankMapping.parse(mapping)
        hosts = {number: rng.choice("ab") for number in range(100)}
        self.protocol = RecoveryProtocol(
            RecoveryPlanner(mapping, hosts=hosts), range(mapping.n_processes), 1 << 62, suspend=self.suspend
        )
        for _ in range(mapping.n_processes):
            self.join()

    def suspend(self):
        self.is_suspended = True

    @property
    def processes_saved(self):
        return self.last["step"] if self.last else 0

    def join(self):
        process = self.processes[self.n_made] = Process(self.n_made, self)
        process.inbox.append(said.Welcome(self.n_made, {}))
        self.n_made += 1

    def do(self, wanted):
        for action in wanted:
            match action:
                case acts.Send(number, message) if number in self.processes:
                    if isinstance(message, said.Form):
                        for table in (self.posted, self.replicated, self.supplied):
                            table.setdefault(message.generation, {})
                        self.kept.setdefault(message.generation, set())
                    if message == said.Leave("drained"):
                        self.drained.add(number)
                    self.processes[number].inbox.append(message)
                case acts.LogEvent("plan", values):
                    self.plans.append(ASSEMBLY.validate_python(values["work"]))
                case acts.LogEvent("resume"):
                    self.may_lose = min(self.survives, len(self.plans[-1].nodes) - 1)
                case acts.LogEvent("commit", values):
                    for report in values["reports"].values():
                        if report and "step" in report:
                            self.last = report
                case acts.Store():
                    self.stored.append(self.last["step"])
                    assert self.written[self.last["step"]] == set(range(N_WORKERS))
                case acts.End(error):
                    self.is_over, self.error = True, error

    def deliver(self, number):
        message = self.processes[number].outbox.popleft()
        if isinstance(message, said.Ready):
            self.do(self.protocol.ready(number))
        else:
            self.do(self.protocol.receive(number, message))

    def part_with(self, number):
        del self.processes[number]
        self.do(self.protocol.lost(number))

    def lose(self, number):
        """Lose a process, if that can be survived; what it has sent still arrives, or not."""
        while self.processes[number].outbox and self.rng.random() < 0.7:
            self.deliver(number)
        if self.may_lose and len(self.protocol.members) > 1:
            self.may_lose -= 1  # also for one without contexts
            self.part_with(number)

    def step(self):
        """Let something happen; False if nothing can."""
        moves = []
        for number, process in self.processes.items():
            moves += [lambda number=number: self.deliver(number)] if process.outbox else []
            moves += [process.act] if process.can_act() else []
        if not moves or self.is_over:
            return False
        self.rng.choice(moves)()
        for number in [number for number, process in self.processes.items() if process.has_left]:
            if not self.processes[number].outbox:
                self.part_with(number)  # its connection closes
        return True


@settings(max_examples=150, deadline=None)
@example(
    mapping="0/1,2/3", survives=1, save_every=5, has_loop=False, is_sharded=True, seed=109699, rate=0.002
)  # lost before shards are sent
@given(
    mapping=st.sampled_from(["0/1/2/3", "0,1/2,3", "0/1,2/3", "3,1/0,2", "0,1,2,3"]),
    survives=st.integers(1, 3),
    save_every=st.sampled_from([3, 5, 100]),
    has_loop=st.booleans(),
    is_sharded=st.booleans(),
    seed=st.integers(0, 1 << 32),
    rate=st.sampled_from([0.0, 0.002, 0.01]),
)
def test_whoever_comes_and_goes_no_mini_batch_is_trained_from_another_state(
    mapping, survives, save_every, has_loop, is_sharded, seed, rate
):
    rng = random.Random(seed)
    world = World(mapping, 12, survives, save_every, has_loop, is_sharded, rng)
    n_joins, asked = 4, set()
    for _ in range(200_000):
        if not world.step():
            break
        if rng.random() >= rate:
            continue
        here = sorted(world.processes)
        match rng.choice(["lose", "drain", "join"]):
            case "lose":
                world.lose(rng.choice(here))
            case "drain":
                chosen = rng.sample(here, rng.randint(1, len(here)))
                asked |= set(chosen)
                world.do(world.protocol.drain(chosen))
            case "join" if n_joins:
                n_joins -= 1
                world.join()
    assert world.is_over and world.error is None
    assert world.drained <= asked
    if not world.is_suspended:
        assert world.last["step"] == world.end and world.stored[-1] == world.end
        assert set(world.trained) == set(range(1, world.end + 1))
        assert bool(world.behind) == has_loop
    elif world.stored:
        assert world.stored[-1] == world.last["step"]
