"""What a run that loses nodes shows: a line for each change, and a table on a terminal."""

import io

import pytest

pytest.importorskip("torch")

from makespan.cli.oobleck import LiveView
from makespan.oobleck.plan import Pipeline, PipelineTemplate, Stage
from makespan.oobleck.requests import WORK, Work
from makespan.runtime.coordinator import Event

TEMPLATE = PipelineTemplate(2, 1, (Stage(0, 2, 1, 0.1), Stage(2, 5, 1, 0.1)), 0.4)
PLAN = (Pipeline((0, 1), TEMPLATE, 6),)
PLANNED = WORK.dump_python(
    Work(PLAN, copies=((1, 0, 1),), copies_bytes=8, origin=None, is_start=False, kinds=("borrow",), f=1),
    mode="json",
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(stream):
    """Let a run begin, commit an iteration and lose a node."""
    view = LiveView(7, stream)
    for number in (0, 1):
        view(Event("ready", 10.0 + number, number, {"pid": 40 + number, "host": "here"}))
    view(Event("plan", 12.0, None, {"work": PLANNED}))
    view(Event("resume", 12.5, None, {"generation": 1, "step": 0}))
    view(Event("announce", 13.0, 1, {"phase": "backward", "iteration": 0}))
    view(Event("commit", 14.0, None, {"iteration": 0, "reports": {0: {"loss": 2.5}, 1: None}}))
    view(Event("lost", 15.0, 1, {}))
    view.close()
    return stream.getvalue()


def test_a_rerouted_plan_names_what_peers_run_and_why_pipelines_regroup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    view = LiveView(7, stream)
    pipelines = (*PLAN, Pipeline((2, 3), TEMPLATE, 4))
    work = Work(pipelines, (), 0, None, is_start=False, kinds=("reroute",), f=0, lost=(1,))
    for each in (
        work,
        Work(PLAN, (), 0, None, is_start=False, kinds=("drop",), f=0, fallback="node(s) 4 join"),
        Work(PLAN, (), 0, None, is_start=False, kinds=("merge",), f=0, pieces=(("1 state 0", 0, 1),)),
    ):
        view(Event("plan", 12.0, None, {"work": WORK.dump_python(each, mode="json")}))
        view.close()
    text = stream.getvalue()
    assert "reroute: pipelines 0/- with 6, 2/3 with 4 microbatches; 0 layer(s) to copy; of lost" in text
    assert "; of lost nodes node 3 runs 6\n" in text
    assert "0 layer(s) to copy; not re-routed: node(s) 4 join" in text
    assert "merge: pipelines 0/1 with 6 microbatches; 1 piece(s) of layers to copy" in text
    first = text.partition("drop:")[0]
    assert [f"node {node}" in first for node in (0, 2, 3)] == [True] * 3 and "pipeline 0  node 1" not in first


def test_requests_to_leave_are_told_as_requests():
    view = LiveView(7, io.StringIO())
    view(Event("drain", 1.0, None, {"nodes": [77]}))
    view(Event("drain", 2.0, None, {"nodes": []}))
    first, second = view.stream.getvalue().splitlines()
    assert "asked to drain nodes [77]" in first and "asked to end the run after this iteration" in second


def test_progress_is_a_line_every_ten_seconds_with_the_time_left():
    stream = io.StringIO()
    view = LiveView(40, stream)
    for step in range(30):
        view(Event("commit", 100.0 + step, None, {"iteration": step, "reports": {0: {"loss": 2.0}}}))
    assert stream.getvalue().splitlines() == [
        "   10.00 s  11/40 iterations, loss 2.0000, about 0:00:29 left",
        "   20.00 s  21/40 iterations, loss 2.0000, about 0:00:19 left",
    ]


def test_each_change_is_a_line_with_its_time():
    lines = told(io.StringIO()).splitlines()
    assert lines == [
        "    0.00 s  node 0 is ready, process 40 on here",
        "    1.00 s  node 1 is ready, process 41 on here",
        "    2.00 s  borrow: pipelines 0/1 with 6 microbatches; 1 layer(s) to copy",
        "    2.50 s  generation 1 resumes with iteration 0",
        "    5.00 s  node 1 is lost in phase backward",
    ]


def test_a_terminal_shows_where_every_node_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = told(Terminal())
    table = text[text.rindex("1/7 iterations, loss 2.5000") :]
    assert "layers 0-1" in table and "layers 2-4" in table
    assert "\x1b[" in text and "node 1 is lost" in text


def test_a_node_with_interleaved_stages_shows_the_layers_of_each(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(7, Terminal())
    stages = tuple(Stage(first, end, 1, 0.1) for first, end in ((0, 1), (1, 3), (3, 5), (5, 6)))
    pipelines = (Pipeline((0, 1), PipelineTemplate(2, 1, stages, 0.4, 2), 6),)
    work = Work(pipelines, (), 0, None, is_start=True, kinds=("join",), f=0)
    view(Event("plan", 12.0, None, {"work": WORK.dump_python(work, mode="json")}))
    view.close()
    text = view.stream.getvalue()
    assert "layers 0-0,3-4" in text and "layers 1-2,5-5" in text
