"""Import directions, the shape of every module, and the names that every package exports."""

import ast
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


def assignments(path):
    """Return the top-level constants of a module with their values."""
    nodes = [node for node in syntax(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    pairs = [(node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value) for node in nodes]
    return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}


def exported(path):
    names = assignments(path).get("__all__")
    if names is not None and any(isinstance(node, ast.Starred) for node in ast.walk(names)):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        return list(importlib.import_module(module).__all__)
    return None if names is None else ast.literal_eval(names)


def test_every_module_lists_what_it_exports_once():
    def wrong(path):
        names = exported(path)
        return "no __all__" if names is None else sorted({name for name in names if names.count(name) > 1})

    assert not offenders(MODULES, wrong)


def test_every_exported_name_exists_and_is_documented():
    def wrong(name):
        module = importlib.import_module(name)
        missing = [item for item in module.__all__ if undocumented(module, item)]
        return missing if module.__doc__ else ["the module itself", *missing]

    assert not offenders(PUBLIC_MODULES, wrong)


def undocumented(module, item):
    value = getattr(module, item, None)
    if value is None:
        return True
    ours = callable(value) and getattr(value, "__module__", "").startswith("makespan")
    return ours and not (value.__doc__ or "").strip()


def test_a_package_shows_only_names_that_it_or_its_modules_export():
    def wrong(name):
        package = importlib.import_module(name)
        face = Path(package.__file__)
        modules = [*face.parent.glob("*.py"), *face.parent.glob("*/__init__.py")]
        others = [path for path in modules if path != face]
        offered = {item for path in others for item in exported(path) or ()} | set(assignments(face))
        imports = [node for node in ast.walk(syntax(face)) if isinstance(node, ast.ImportFrom)]
        renamed = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
        own = {item for item in package.__all__ if not hasattr(getattr(package, item), "__path__")}
        return sorted(item for item in own if renamed.get(item, item) not in offered)

    assert not offenders([name for name in PACKAGES if name != "makespan"], wrong)


def test_importing_the_package_itself_loads_no_module_of_it_and_no_library():
    command = "import sys; import makespan; print(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "scipy", "matplotlib", "pydantic", "torch"} & set(done.stdout.split())
    assert done.stdout.split().count("makespan") == 1


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
