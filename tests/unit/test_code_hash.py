"""The code that a rule hashes is the code that its script uses, found by following imports."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "makespan"
RULE_FILES = sorted((ROOT / "rules").glob("*.smk"))
RULE = re.compile(r"^ *rule (\w+):\n(.*?)(?=^ *rule |\Z)", re.DOTALL | re.MULTILINE)


def pattern_lists():
    """Return the named lists of patterns in ``rules/common.smk``."""
    text = (ROOT / "rules" / "common.smk").read_text()
    block = re.search(r"^DOMAIN = .*?(?=^#)", text, re.DOTALL | re.MULTILINE).group()
    lists = {}
    exec(block, lists)
    return lists


def hashed():
    """Return rule name to script and the patterns of its ``code_hash``."""
    lists, found = pattern_lists(), {}
    for path in RULE_FILES:
        for name, body in RULE.findall(path.read_text()):
            script = re.search(r"scripts/(\w+\.py)", body).group(1)
            arguments = re.search(r"code=code_hash\((.*?)\),\n", body, re.DOTALL)
            hashed_script, *patterns = eval(f"[{arguments.group(1)}]", lists) if arguments else [None]
            assert hashed_script in (None, script.removesuffix(".py")), name
            found[name] = (script, patterns or None)
    return found


def module_file(name):
    """Return the file of a module of the package, or None."""
    base = SRC.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def imports(path):
    """Return the (module, name) pairs of the package that a file imports; no name for whole modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "makespan":
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] == "makespan"]
    return tuple(found)


def defining_file(module, name):
    """Follow re-exports to the file that defines a name."""
    submodule = module_file(f"{module}.{name}") if name else None
    if submodule is not None:
        return submodule
    path = module_file(module)
    if path.name == "__init__.py":
        for source, exported in imports(path):
            if exported == name:
                return defining_file(source, name)
    return path


def used_files(script):
    """Return every file of the package that a script needs, however indirectly."""
    waiting, seen = [script], set()
    while waiting:
        for module, name in imports(waiting.pop()):
            path = defining_file(module, name)
            if path not in seen:
                seen.add(path)
                waiting.append(path)
    return seen


HASHED = hashed()


def test_every_rule_but_the_download_hashes_its_code():
    assert {name for name, (_, patterns) in HASHED.items() if patterns is None} == {"fetch_published"}


@pytest.mark.parametrize("name", sorted(name for name, (_, patterns) in HASHED.items() if patterns))
def test_a_rule_hashes_all_code_that_its_script_uses(name):
    script, patterns = HASHED[name]
    covered = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    missing = used_files(ROOT / "workflow" / "scripts" / script) - covered
    assert not sorted(str(path.relative_to(PACKAGE)) for path in missing)


@pytest.mark.parametrize("name", sorted(name for name, (_, patterns) in HASHED.items() if patterns))
def test_every_pattern_matches_something(name):
    for pattern in HASHED[name][1]:
        assert list(PACKAGE.glob(pattern)), pattern
