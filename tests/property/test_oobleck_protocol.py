"""The transaction of an iteration under every order of messages, and losses at every step, simulated."""

import random
from collections import deque

from hypothesis import given, settings, strategies as st

from makespan.runtime import messages as said, protocol as acts, protocol as tasks

LAYERS = ("a", "b", "c")
F = 1


class Node:
    """A node with its inbox, its outbox, and what it has applied to the layers that it holds."""

    def __init__(self):
        self.part, self.inbox, self.outbox, self.todo = tasks.WorkerProtocol(), deque(), deque(), deque()
        self.state, self.owned, self.has_left = {}, (), False

    def can_act(self):
        return not self.has_left and bool(self.todo or self.inbox)

    def act(self, world, rng):
        """Do one task, or take one message."""
        if not self.todo:
            self.todo.extend(self.part.receive(self.inbox.popleft()))
            return
        task = self.todo.popleft()
        is_superseded = any(isinstance(one, said.Freeze) for one in self.inbox)
        match task:
            case tasks.Drop():
                self.outbox.append(said.Frozen(task.generation, task.step, tuple(self.state)))
            case tasks.Join():
                if task.forgets:
                    self.state.clear()
                if is_superseded:
                    return
                if rng.random() < 0.05:
                    self.todo.extend(self.part.failed("broken"))
                    return
                self.owned = task.form.work.get(self, ())
                for layer in self.owned:
                    self.state.setdefault(layer, world.history[: task.form.step])
                self.state = {layer: self.state[layer] for layer in self.owned}
                sums = {layer: str(self.state[layer]) for layer in self.owned}
                self.todo.extend(self.part.formed(sums))
            case tasks.Compute() if not is_superseded:
                self.todo.extend(self.part.computed(task.iteration))
            case tasks.Apply():
                for layer in self.state:
                    self.state[layer] = (*self.state[layer], task.iteration)
            case tasks.Write():
                self.todo.extendleft(self.part.saved(task.save))
            case tasks.Answer():
                self.outbox.append(task.message)
            case tasks.Depart():
                self.has_left = True


class World:
    """All nodes, the coordinator, and what lies between them, in order for each connection."""

    def __init__(self, n_nodes, end, rng, save_every):
        self.rng, self.end, self.history = rng, end, tuple(range(end))
        self.nodes, self.dead, self.error, self.is_over = {}, set(), None, False
        self.stores, self.commits, self.before, self.planned = [], [], (0, 0, 0), set()
        self.coordination = acts.CoordinatorProtocol(self.decide, range(n_nodes), end, save_every=save_every)
        for number in range(n_nodes):
            self.join(number)

    def join(self, number):
        self.nodes[number] = Node()
        self.nodes[number].inbox.append(said.Welcome(number, {}))

    def decide(self, situation):
        for node in situation.members:  # what is held of this step is exactly what was committed
            for layer in situation.holdings[node]:
                assert self.nodes[node].state[layer] == self.history[: situation.step]
        nodes = [one for one in situation.members if one not in situation.leaving]
        held = {layer for layers in situation.holdings.values() for layer in layers}
        if situation.plan is not None and held != set(LAYERS):
            return acts.Abort(LookupError("lost"), saves=False)
        if len(nodes) < F + 1:
            return acts.Abort(ValueError("too few"), saves=held == set(LAYERS))
        work = {}
        for part in (nodes[::2], nodes[1::2]):
            for index, layer in enumerate(LAYERS):
                node = self.nodes[part[index * len(part) // len(LAYERS)]]
                work[node] = (*work.get(node, ()), layer)
        return acts.Decision(tuple(nodes), work)

    def check_invariants(self, wanted):
        """Compare the coordinator after an event with its state before, and with what its module promises."""
        own = self.coordination
        groups = [own.members, own.waiting, own.spare]
        assert sum(map(len, groups)) == len(set().union(*groups)), "a node in two groups"
        before, now = self.before, (own.step, own.generation, own.saved)
        assert before[0] <= now[0] <= before[0] + 1 and before[1] <= now[1]
        assert now[2] <= now[0], "a checkpoint of a step that is not committed"
        planned = [
            one.values["generation"]
            for one in wanted
            if isinstance(one, acts.LogEvent) and one.kind == "plan"
        ]
        assert not set(planned) & self.planned, "two plans in one generation"
        assert own.phase is acts.Phase.ENDED or not self.is_over, "an event led out of the end"
        self.before, self.planned = now, self.planned | set(planned)

    def do(self, wanted):
        self.check_invariants(wanted)
        for action in wanted:
            match action:
                case acts.Send(number, message) if number in self.nodes:
                    self.nodes[number].inbox.append(message)
                case acts.Store(step):
                    self.stores.append(step)
                case acts.LogEvent("commit", values):
                    self.commits.append(values["iteration"])
                case acts.End(error):
                    self.is_over, self.error = True, error

    def deliver(self, number):
        message = self.nodes[number].outbox.popleft()
        if isinstance(message, said.Ready):
            self.do(self.coordination.ready(number))
        else:
            self.do(self.coordination.receive(number, message))

    def kill(self, number):
        """What the node has sent still arrives, or not; its end comes after that."""
        while self.nodes[number].outbox and self.rng.random() < 0.7:
            self.deliver(number)
        del self.nodes[number]
        self.dead.add(number)
        self.do(self.coordination.lost(number))

    def step(self):
        """Let something happen; False if nothing can."""
        moves = [(self.deliver, number) for number, node in self.nodes.items() if node.outbox]
        moves += [
            (lambda one: self.nodes[one].act(self, self.rng), number)
            for number, node in self.nodes.items()
            if node.can_act()
        ]
        if not moves or self.is_over:
            return False
        act, number = self.rng.choice(moves)
        act(number)
        return True


def run(seed, n_nodes, end, n_kills, n_joins, n_drains, save_every):
    rng = random.Random(seed)
    world = World(n_nodes, end, rng, save_every)
    length = 20 * n_nodes * end
    happenings = sorted(
        [
            (rng.randrange(length), kind)
            for kind, n in (("kill", n_kills), ("join", n_joins), ("drain", n_drains))
            for _ in range(n)
        ]
    )
    for tick in range(100 * length):
        while happenings and happenings[0][0] <= tick and not world.is_over:
            _, kind = happenings.pop(0)
            if kind == "join":
                world.join(len(world.nodes) + len(world.dead) + 100 * tick)
            elif world.nodes:
                number = rng.choice(sorted(world.nodes))
                world.kill(number) if kind == "kill" else world.do(world.coordination.drain([number]))
        if not world.step():
            break
    assert world.is_over, (world.coordination.phase, world.coordination.generation)
    return world


def check(world, end):
    assert world.commits == list(range(len(world.commits)))
    if world.error is None:
        assert len(world.commits) == end and world.stores[-1] == end
    elif isinstance(world.error, ValueError):
        assert not world.commits or world.stores[-1] == len(world.commits)
    else:
        assert isinstance(world.error, LookupError | RuntimeError)
    for node in map(
        world.nodes.get, world.coordination.members
    ):  # a commit that was sent is applied, whatever comes after it
        while node.can_act():
            node.act(world, random.Random(0))
        n_applied = len(world.commits)
        for layer in node.state:
            assert node.state[layer] == world.history[:n_applied]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 6), st.integers(0, 4), st.integers(0, 3),
    st.integers(0, 2), st.integers(0, 3),
)  # fmt: skip
def test_no_order_of_messages_and_losses_lets_some_step_and_others_not(
    seed, n_nodes, end, n_kills, n_joins, n_drains, save_every
):
    check(run(seed, n_nodes, end, n_kills, n_joins, n_drains, save_every), end)


def test_all_kinds_of_endings_and_regroups_occur():
    worlds = [run(seed, 4, 4, seed % 4, seed % 3, seed % 2, seed % 3) for seed in range(150)]
    assert {type(one.error) for one in worlds} >= {type(None), ValueError, LookupError}
    assert max(one.coordination.generation for one in worlds) >= 4
