"""Limits of size and shape that every module keeps, and names that every package shows."""

import ast
import importlib
import pkgutil
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import makespan

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
MODULES = sorted(SRC.rglob("*.py"))
SCRIPTS = sorted((ROOT / "workflow" / "scripts").glob("*.py"))
PACKAGES = sorted(
    {
        "makespan",
        *(name for _, name, is_pkg in pkgutil.walk_packages(makespan.__path__, "makespan.") if is_pkg),
    }
)
PUBLIC_MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(makespan.__path__, "makespan.")
    if not any(part.startswith("_") for part in name.split("."))
)


def relative(path):
    return str(path.relative_to(ROOT))


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node):
    return node.end_lineno - node.lineno + 1


def test_layers_import_only_what_is_below_them():
    # In a process of its own: the linter switches off all loggers that exist when it starts.
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_median_module_is_short():
    lengths = [len(path.read_text().splitlines()) for path in MODULES]
    assert statistics.median(lengths) <= 150


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_function_is_longer_than_60_lines(path):
    too_long = {node.name: length(node) for node in functions(path) if length(node) > 60}
    assert not too_long


def test_most_functions_are_short():
    body_lengths = sorted(
        node.end_lineno - node.body[0].lineno + 1 for path in MODULES for node in functions(path)
    )
    assert statistics.median(body_lengths) <= 10
    assert body_lengths[int(0.9 * len(body_lengths))] <= 40


@pytest.mark.parametrize("path", SCRIPTS, ids=relative)
def test_no_script_is_longer_than_40_lines(path):
    assert len(path.read_text().splitlines()) <= 40


def test_scripts_and_rules_have_the_same_names():
    rules = set()
    for path in [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]:
        rules |= set(re.findall(r"scripts/(\w+)\.py", path.read_text()))
    assert rules == {path.stem for path in SCRIPTS}


def exported(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_lists_what_it_exports(path):
    names = exported(path)
    assert names is not None, "no __all__"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_exported_name_exists_and_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for item in module.__all__:
        value = getattr(module, item)
        if callable(value) and getattr(value, "__module__", "").startswith("makespan"):
            assert (value.__doc__ or "").strip(), f"{name}.{item}"


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "makespan"])
def test_a_package_shows_only_names_that_its_modules_export(name):
    package = importlib.import_module(name)
    offered = set()
    for path in Path(package.__file__).parent.glob("*.py"):
        if path.name != "__init__.py":
            offered |= set(exported(path) or ())
    own = {item for item in package.__all__ if not hasattr(getattr(package, item), "__path__")}
    assert own <= offered, sorted(own - offered)


def test_the_package_itself_imports_nothing():
    tree = ast.parse((SRC / "makespan" / "__init__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_prints_or_asserts(path):
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


# Written in pieces, so that this file does not contain them.
FORBIDDEN = [
    r"/(home|root|tmp|work|mnt|opt|Users)/" + r"[\w.-]+",
    "py" + r"pi\.org",
    "files" + r"\.pythonhosted\.org",
    "anaconda" + r"\.(com|org)",
    "down" + r"load\.pytorch\.org",
    r"(assist|sub)" + "agent",
]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_file_names_a_machine_or_a_package_index(pattern):
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{relative(path)}: {match.group()}" for match in re.finditer(pattern, text)]
    assert not found


def test_nothing_that_the_workflow_makes_is_tracked():
    made = [
        relative(path)
        for path in tracked_files()
        if relative(path).startswith(("results/", "data/", "logs/"))
    ]
    assert set(made) <= {"results/README.md", "data/README.md"}
