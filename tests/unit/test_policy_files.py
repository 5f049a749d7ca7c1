"""Policies in files of the user: finding them, and what is said of broken ones."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from toy_cluster import one_gpu_catalogue, simulate, toy_job, toy_nodes

import makespan
from makespan.cli import main
from makespan.errors import InputError
from makespan.policies import base as _registry, policy
from makespan.sim import DECISION_LIMIT_S, PolicyError, check_policy
from makespan.sim.engine import DecisionTimeout, Watch
from makespan.studies import RunError, Scenario, SimulationSpec, run_all

TEXT = """
from dataclasses import dataclass

from makespan.policies import FreeResources
from makespan.sim import Allocation, Decision


@dataclass(frozen=True)
class Mine:
    name: str = "mine"
    title: str = "Mine"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()

    def initial_state(self, cluster, catalogue):
        return None

    def decide(self, view, state):
        free, changes = FreeResources.of(view, is_tight=True), {}
        for job in view.pending:
            found = free.first_fit(view.catalogue.as_requested(job.spec))
            if found is not None:
                free.take(*found)
                changes[job.spec.job_id] = found[0].on(found[1])
        first = next(iter(changes.values()), None)
        return Decision(changes), state


POLICIES = (Mine(),)
"""
RETURN = "return Decision(changes), state"
LINE = TEXT.splitlines().index(f"        {RETURN}") + 1
ENDLESS = "while True: pass"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a function that writes a policy file with one text replaced, and work beside it."""
    monkeypatch.chdir(tmp_path)

    def write(old="", new="", name="mine.py"):
        assert old in TEXT
        Path(name).write_text(TEXT.replace(old, new, 1) if old else TEXT)
        return f"./{name}"

    return write


@pytest.fixture
def toys():
    jobs = tuple(toy_job(name, float(k), steps=20) for k, name in enumerate("abc"))
    return Scenario("toys", jobs, toy_nodes(1, 2), one_gpu_catalogue(), restart_delay_s=1.0)


def message(*arguments):
    """Return the one message that a command ends with."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in result.output
    return lines[0].removeprefix("Error: ")


# --- finding them -------------------------------------------------------------------------------


def test_a_policy_may_be_a_file_on_the_command_line_and_in_the_library(file):
    path = file()
    few = ["--quiet", "--predictions", "exact", "--jobs", "4"]
    one = CliRunner().invoke(main, ["simulate", "--policy", path, *few])
    assert one.exit_code == 0 and "Mine on naive" in one.output, one.output
    for workers in ("1", "2"):
        options = [
            "--policies",
            f"fifo,{path},mine.py",
            "--workers",
            workers,
            "--quiet",
            "--baseline",
            "mine",
        ]
        both = CliRunner().invoke(main, ["compare", *options])
        assert both.exit_code == 0, both.output
        rows = [line.split()[0] for line in both.output.splitlines() if line.startswith(("fifo", "mine"))]
        assert rows == ["fifo", "mine"]
    scenario = makespan.scenario("naive", n_jobs=4, predictions="exact")
    found = makespan.simulate(scenario, path)
    assert found.policy == "mine" and found.violations == ()
    assert repr(makespan.simulate(scenario, Path("mine.py")).metrics) == repr(found.metrics)
    assert makespan.compare(scenario, [path, "fifo"])["policy"].tolist() == ["mine", "fifo"]
    assert [entry.name for entry in Path().iterdir()] == ["mine.py"]  # no compiled code beside it


def test_a_file_is_read_again_when_it_has_changed(file):
    assert policy(file()).title == "Mine"
    assert policy(file('"Mine"', '"Mine, as changed"')).title == "Mine, as changed"


def test_one_of_several_policies_of_a_file_is_named_behind_a_colon(file):
    path = file("(Mine(),)", '(Mine(), Mine(name="other"))')
    assert policy(f"{path}:other").name == "other"
    with pytest.raises(PolicyError, match=r"has 2 policies; expected .*mine.py:mine or .*mine.py:other"):
        policy(path)
    with pytest.raises(PolicyError, match=r"no policy in POLICIES has the name 'third'; found: mine, other"):
        policy(f"{path}:third")


def test_policies_of_one_name_are_told_apart_before_anything_runs(file):
    first, second = file(), file(name="again.py")
    found = message("compare", "--policies", f"{first},{second}")
    assert found.startswith("--policies: ./mine.py and ./again.py are both named 'mine'; expected")
    assert message("simulate", "--policy", file('"mine"', '"fifo"')).startswith(
        "./mine.py: name 'fifo' is that of a built-in policy"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (RETURN, "return (", f"mine.py, line {LINE}: SyntaxError: '(' was never closed"),
        ("from dataclasses import", "1 / 0\nimport", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("from dataclasses import", "raise SystemExit\nimport", "mine.py, line 2: SystemExit: "),
        (
            "import FreeResources",
            "import FreResources",
            "mine.py, line 4: ImportError: cannot import name 'FreResources'",
        ),
        ("POLICIES =", "policies =", "mine.py: no POLICIES; expected a tuple of policies"),
        ("(Mine(),)", "Mine()", "mine.py: POLICIES is Mine "),
        ("(Mine(),)", "(Mine,)", "mine.py: Mine is a class; expected an object of it, Mine()"),
        (
            "float | None = None",
            "float = float('nan')",
            "mine.py: Mine.interval_s is nan; expected a finite",
        ),
        ('"mine"', '"../mine"', "mine.py: Mine.name is '../mine'; expected letters"),
        ("def decide", "def decode", "mine.py: Mine is not a policy: it has no decide (AttributeError"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(file, old, new, expected):
    path = file(old, new)
    assert message("simulate", "--policy", path).startswith(expected)
    assert message("compare", "--policies", f"fifo,{path}").startswith(expected)
    assert message("live", "--policy", path, "--output", "new").startswith(expected)
    assert [entry.name for entry in Path().iterdir()] == ["mine.py"]


def test_what_is_no_regular_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.py").mkdir()
    for name, expected in (
        ("none.py", "none.py: no such file; expected a policy file with the ending .py"),
        ("folder.py", "folder.py: is no regular file; expected a policy file"),
        ("./mine", "./mine: not a policy file; expected a path that ends in .py, or in .py:NAME"),
    ):
        assert message("simulate", "--policy", name).startswith(expected)
    assert message("simulate", "--policy", "mine").startswith(
        "unknown policy 'mine'; expected FILE.py, antman,"
    )


def test_a_broken_policy_of_the_registry_concerns_only_those_who_ask_for_it(file, tmp_path, monkeypatch):
    file("from dataclasses", "from dataclass", name="broken_policy.py")
    monkeypatch.syspath_prepend(tmp_path)
    for name, module in (("broken", "broken_policy"), ("missing", "no_such_module"), ("fifa", "json")):
        monkeypatch.setitem(_registry._MODULES, name, module)
    listed = CliRunner().invoke(main, ["policies"])
    assert listed.exit_code == 0 and "FIFO: knows nothing" in listed.output
    wrong = {line.split()[0]: line for line in listed.output.splitlines() if "broken: " in line}
    expected = "broken_policy.py, line 2: ModuleNotFoundError: No module named 'dataclass'"
    assert wrong["broken"].endswith(f"broken: {expected}") and len(wrong) == 3
    assert "No module named 'no_such_module'" in wrong["missing"] and "no POLICIES" in wrong["fifa"]
    for arguments in (["simulate", "--policy", "fifo", "--quiet"], ["compare", "--policies", "fifo"]):
        assert CliRunner().invoke(main, arguments).exit_code == 0
    monkeypatch.undo()
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setitem(_registry._MODULES, "broken", "no_such_module")
    assert CliRunner().invoke(main, ["config"]).exit_code == 0
    assert message("simulate", "--policy", "broken").startswith("no_such_module: ModuleNotFoundError")
    assert message("compare", "--policies", "all").startswith("no_such_module: ModuleNotFoundError")


# --- what they return ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("None", "decide returned None; expected a pair of a Decision and what to remember"),
        ("Decision(changes)", "decide returned Decision(changes="),
        ("changes, state", "decide returned ({"),
        ("Decision(list(changes.items()) * 2), state", "changes are [("),
        ("Decision(None), state", "changes are None; expected a mapping from the name of a job to an"),
        (
            "Decision({'nobody': first}), state",
            "job 'nobody': is neither pending nor running; expected a job of",
        ),
        ("Decision({None: first}), state", "job None: is neither pending nor running"),
        ("Decision({'a': 3}), state", "job 'a': cannot have 3; expected an Allocation of a Configuration"),
        ("Decision({'a': Allocation(first.configuration, (9,))}), state", "there is no node 9; expected 0"),
        ("Decision({'a': Allocation(first.configuration, (-1,))}), state", "there is no node -1; expected"),
        (
            "Decision({'a': Allocation(first.configuration, (0.5,))}), state",
            "job 'a': cannot have Allocation(",
        ),
        ("Decision({'a': Allocation(first.configuration, [0])}), state", "job 'a': cannot have Allocation("),
        ("Decision({'a': Allocation(first.configuration, (0,), 'x')}), state", "job 'a': cannot have"),
        (
            "Decision(dict.fromkeys('abc', first)), state",
            "job 'c': cannot have 0:1: node 0 has 0 free GPU(s)",
        ),
        ("Decision(changes, float('nan')), state", "wake_up_s is nan; expected a time after"),
        ("Decision(changes, float('inf')), state", "wake_up_s is inf; expected a time after"),
        ("Decision(changes, 10**400), state", "wake_up_s is 1000"),
        ("Decision(changes, -1), state", "wake_up_s is -1; expected a time after"),
        ("Decision(changes, 'soon'), state", "wake_up_s is 'soon'; expected a time after"),
    ],
)
def test_an_answer_that_is_no_decision_is_reported_with_the_file(file, toys, answer, expected):
    path = file(RETURN, f"return {answer}")
    together = replace(toys, jobs=tuple(toy_job(name) for name in "abc"))
    with pytest.raises(PolicyError) as caught:
        makespan.simulate(together, path)
    assert str(caught.value).startswith("mine.py: policy 'mine' at 0.0 s: ")
    assert expected in str(caught.value) and len(str(caught.value)) < 400


def test_a_configuration_of_the_policys_own_making_is_refused(file, toys):
    path = file(
        RETURN,
        "from dataclasses import replace\n"
        "        own = replace(first.configuration, iter_time_s=float('nan'), predicted_iter_time_s=-1.0)\n"
        "        return Decision({'a': Allocation(own, (0,))}), state",
    )
    with pytest.raises(PolicyError, match=r"job 'a': plan 'ga' on 1 .* is not in the catalogue"):
        makespan.simulate(toys, path)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("return 1 / 0", "decide raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "decide raised SystemExit: 0"),
        ("view.time_s = 3", "decide raised MakespanError: ClusterView.time_s is read-only"),
        ("return FreeResources.of(view)", "decide raised TypeError: "),
    ],
)
def test_what_a_policy_raises_is_reported_with_file_and_line(file, toys, processes, problem, expected):
    path = file(RETURN, problem)
    with pytest.raises(RunError) as caught:
        run_all([SimulationSpec(toys, path), SimulationSpec(toys, "fifo")], processes)
    begin = f"policy 'mine' on 'toys': mine.py, line {LINE}: policy 'mine' at 0.0 s: "
    assert str(caught.value).startswith(begin + expected)
    beginning = file("return None", problem.replace("view", "cluster"))
    with pytest.raises(PolicyError, match=r"^mine.py, line 18: policy 'mine': initial_state raised "):
        makespan.simulate(toys, beginning)


def test_an_object_that_is_no_policy_is_refused_before_anything_runs(toys):
    for wrong, expected in (
        ("fifo", "str is not a policy: it has no name"),
        (None, "NoneType is not a policy"),
    ):
        with pytest.raises(PolicyError, match=expected):
            simulate(toys.jobs, toys.cluster, toys.catalogue, wrong, restart_delay_s=1.0)
    with pytest.raises(PolicyError, match=r"/queues.py: Fifo is a class; expected an object of it, Fifo\(\)"):
        check_policy(type(policy("fifo")))


# --- the decision limit -------------------------------------------------------------------------


@pytest.fixture(params=["this thread", "another thread"])
def in_thread(request):
    """Return a function that calls another one in this thread or in one of its own."""

    def call(function):
        if request.param == "this thread":
            return function()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(function()))
        thread.start()
        thread.join()
        return answers[0]

    return call


def test_a_policy_that_never_returns_is_interrupted_wherever_it_runs(file, toys, in_thread):
    path = file(RETURN, ENDLESS)

    def failure(processes):
        cases = [SimulationSpec(limited, path), SimulationSpec(toys, "fifo")]
        with pytest.raises(RunError) as caught:
            run_all(cases, processes)
        return str(caught.value)

    limited = replace(toys, decision_limit_s=0.1)
    for processes in (1, 2):
        found = in_thread(lambda processes=processes: failure(processes))
        assert (
            f"mine.py, line {LINE}: policy 'mine' at 0.0 s: interrupted by the decision limit, 0.1 s" in found
        )
    assert not [thread for thread in threading.enumerate() if thread.name == "makespan-watch"]


def test_a_loop_that_swallows_errors_or_begins_before_the_first_decision_is_interrupted(file, toys):
    swallows = "while True:\n            try: pass\n            except Exception: pass"
    for path in (file(RETURN, swallows), file("return None", ENDLESS, "begins.py")):
        found = message("simulate", "--policy", path, "--decision-limit", "0.1", "--quiet")
        assert (
            "interrupted by the decision limit, 0.1 s for one call; expected a policy that decides" in found
        )


def test_the_result_does_not_depend_on_the_limit(toys):
    options = {"restart_delay_s": 1.0}
    found = [
        simulate(toys.jobs, toys.cluster, toys.catalogue, policy("fifo"), decision_limit_s=limit, **options)
        for limit in (None, 0, DECISION_LIMIT_S, 1e9)
    ]
    assert len({result.events.to_csv() + result.outcomes.to_csv() for result in found}) == 1
    for limit in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"decision_limit_s is .*; expected a time in s, 0 or None"):
            Watch(limit)


def test_no_interruption_arrives_after_the_call_that_it_was_meant_for():
    n_interrupted = 0
    with Watch(0.001) as watch:
        for turns in range(0, 60_000, 200):
            try:
                watch.call(lambda turns=turns: sum(1 for _ in range(turns)))
            except DecisionTimeout:
                n_interrupted += 1
            for _ in range(2_000):  # here it would be fatal
                pass
    assert n_interrupted < 300
