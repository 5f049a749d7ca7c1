"""Import directions, and the names that every package exports."""

import ast
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
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


@cache
def syntax(path):
    return ast.parse(path.read_text())


def offenders(items, wrong):
    """Return everything that breaks a rule, with what is wrong with it."""
    found = ((item, wrong(item)) for item in items)
    return {relative(item) if isinstance(item, Path) else item: what for item, what in found if what}


def test_layers_import_only_what_is_below_them():
    # In a process of its own: the linter switches off all loggers that exist when it starts.
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_scripts_and_rules_have_the_same_names():
    rules = set()
    for path in [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]:
        rules |= set(re.findall(r"scripts/(\w+)\.py", path.read_text()))
    assert rules == {path.stem for path in SCRIPTS}


def public_names(module):
    """Return the names that a package lists, or that a module defines without an underscore."""
    face = Path(module.__file__)
    if face.name == "__init__.py":
        imports = [node for node in ast.walk(syntax(face)) if isinstance(node, ast.ImportFrom)]
        return [alias.asname for node in imports for alias in node.names if alias.asname]
    defined = [node for node in syntax(face).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node.name for node in defined if not node.name.startswith("_")]


def test_every_public_name_exists_and_is_documented():
    def wrong(name):
        module = importlib.import_module(name)
        missing = [item for item in public_names(module) if undocumented(module, item)]
        return missing if module.__doc__ else ["the module itself", *missing]

    assert not offenders(PUBLIC_MODULES, wrong)


def test_a_package_lists_its_public_names_once():
    def wrong(name):
        names = public_names(importlib.import_module(name))
        return sorted({item for item in names if names.count(item) > 1})

    assert not offenders(PACKAGES, wrong)


def imported_modules(path):
    """Return the modules of the package that a module imports when it is itself imported."""
    found = set()
    for node in syntax(path).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("makespan"):
            for alias in node.names:
                whole = SRC.joinpath(*node.module.split("."), f"{alias.name}.py")
                package = SRC.joinpath(*node.module.split("."), alias.name, "__init__.py")
                module = SRC.joinpath(*node.module.split(".")).with_suffix(".py")
                face = SRC.joinpath(*node.module.split("."), "__init__.py")
                found.add(next(file for file in (whole, package, module, face) if file.exists()))
    return found


def test_no_modules_import_each_other_in_a_circle():
    order = graphlib.TopologicalSorter({path: imported_modules(path) for path in MODULES})
    order.prepare()  # raises CycleError with the circle


def undocumented(module, item):
    value = getattr(module, item, None)
    if value is None:
        return True
    ours = callable(value) and getattr(value, "__module__", "").startswith("makespan")
    return ours and not (value.__doc__ or "").strip()


def test_importing_the_package_itself_loads_no_room_of_it_and_no_library():
    command = "import sys; import makespan; print(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "scipy", "matplotlib", "pydantic", "torch"} & set(done.stdout.split())
    loaded = [name for name in done.stdout.split() if name == "makespan"]
    assert len(loaded) == 2  # the package, and what makes its names lazy


def test_no_module_prints_or_asserts():
    def wrong(path):
        nodes = list(ast.walk(syntax(path)))
        prints = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]
        return [node.lineno for node in nodes if isinstance(node, ast.Assert) or node in prints]

    assert not offenders(MODULES, wrong)


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


# Written in pieces, so that this file does not contain them.
FORBIDDEN = [
    r"/(?:home|root|tmp|work|mnt|opt|Users)/" + r"[\w.-]+",
    "py" + r"pi\.org",
    "files" + r"\.pythonhosted\.org",
    "anaconda" + r"\.(?:com|org)",
    "down" + r"load\.pytorch\.org",
    r"(?:assist|sub)" + "agent",
]


def test_no_file_names_a_machine_or_a_package_index():
    pattern = re.compile("|".join(FORBIDDEN))
    assert not offenders(
        tracked_files(),
        lambda path: pattern.findall(path.read_bytes().decode("utf-8", errors="replace")),
    )


def test_nothing_that_the_workflow_makes_is_tracked():
    made = [
        relative(path)
        for path in tracked_files()
        if relative(path).startswith(("results/", "data/", "logs/"))
    ]
    assert set(made) <= {"results/README.md", "data/README.md"}


def test_every_name_that_a_workflow_script_imports_is_there() -> None:
    lost = []
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("makespan"):
                found = importlib.import_module(str(node.module))
                lost += [
                    f"{path.name}: {alias.name}" for alias in node.names if not hasattr(found, alias.name)
                ]
    assert not lost
