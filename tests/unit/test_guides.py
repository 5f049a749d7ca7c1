"""The policy of the guide keeps the laws and is found by its name; commands do what code beside them does."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from pages import blocks, commands
from toy_cluster import simulate, toy_catalogue, toy_nodes, traces

from makespan.cli import main
from makespan.policies import base as _registry
from makespan.sim import validate_schedule

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def smallest(root):
    """Return the policy of the guide."""
    first = BLOCK.findall((root / "docs" / "guides" / "write-a-policy.md").read_text(encoding="utf-8"))[0]
    module = ModuleType("_smallest")
    sys.modules["_smallest"] = module
    exec(compile(first, "smallest.py", "exec"), module.__dict__)
    yield module.POLICIES[0]
    del sys.modules["_smallest"]


@given(traces(8))
@settings(max_examples=15, derandomize=True)
def test_the_policy_of_the_guide_keeps_the_laws(smallest, jobs):
    spec, options = toy_nodes(3, 4), {"restart_delay_s": 5.0}
    result = simulate(jobs, spec, toy_catalogue(), smallest, **options)
    assert validate_schedule(result.events, jobs, spec, toy_catalogue(), **options) == []


def test_a_line_in_the_registry_is_enough_for_a_policy_to_be_found(root, tmp_path, monkeypatch):
    text = BLOCK.findall((root / "docs" / "guides" / "write-a-policy.md").read_text(encoding="utf-8"))[0]
    (tmp_path / "smallest_first.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(_registry._MODULES, "smallest", "smallest_first")
        assert _registry.policy("smallest").title == "Smallest first"
        assert "smallest" in _registry.policy_names()
    assert "smallest" not in _registry.REGISTRY


def test_commands_of_the_guide_to_pipelines_find_what_its_code_finds(root, tmp_path, monkeypatch):
    """Templates are the same, file by file, and so is the plan made of them."""
    monkeypatch.chdir(tmp_path)
    code = [
        one for one in blocks(root / "docs/guides/plan-pipelines.md") if one.kind in ("python", "console")
    ]
    names, said, made = {"__name__": "guide"}, [], []
    for block in code[: [one.kind for one in code].index("console", 3) + 1]:
        if block.kind == "python":
            exec(compile(block.text, "plan-pipelines.md", "exec"), names)
            continue
        made.append(Path("templates.json").read_text())
        for _, *arguments in commands(block):
            done = CliRunner().invoke(main, arguments, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            said.append(done.stdout)
    by_code, by_command = made[0], Path("templates.json").read_text()
    assert json.loads(by_code) == json.loads(by_command) and len(said) == 2
    best = json.loads(said[1])["plan"]
    assert best["iter_time_ms"] == pytest.approx(1e3 * names["choice"].best.iter_time_s, rel=1e-9)
    assert best["microbatches"] == list(names["choice"].best.n_microbatches)
