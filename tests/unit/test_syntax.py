"""Trees of Python source: the same for any number of threads."""

import ast
import sys
import threading
from types import SimpleNamespace

import pytest

from makespan import lazy as syntax
from makespan.lazy import parse_source


class Busy:
    """What the collector of garbage calls in the middle of anything, so that another thread goes on."""

    def __init__(self):
        self.own = self

    def __del__(self):
        for _ in range(20):
            pass


def test_threads_may_parse_at_the_same_time():
    errors, interval = [], sys.getswitchinterval()
    source = "\n".join(
        f"def f{number}(a, b=(1, [2, {{3: 4}}])):\n    return a + b[{number}]" for number in range(200)
    )

    def parse():
        try:
            for _ in range(15):
                del [Busy() for _ in range(300)][:]
                parse_source(source)
        except SystemError as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=parse) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_a_thread_that_parses_otherwise_does_no_harm(monkeypatch):
    calls = []

    def disturbed(source, name):
        calls.append(source)
        if len(calls) < 4:
            raise SystemError("AST constructor recursion depth mismatch (before=45, after=41)")
        return ast.parse(source, name)

    monkeypatch.setattr(syntax, "ast", SimpleNamespace(parse=disturbed))
    assert ast.unparse(parse_source("a = 1", "here.py")) == "a = 1"
    assert len(calls) == 4


def test_what_is_no_python_is_refused_with_its_name():
    with pytest.raises(SyntaxError) as caught:
        parse_source("a b", "here.py")
    assert caught.value.filename == "here.py"
