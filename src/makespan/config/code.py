"""The code that a workflow script uses, found by following its imports, as one hash.

What counts, starting from the script and from what its rule names:

- the module that defines an imported name, behind package faces too, wherever the import stands;
- a module that a string constant names in full, as in ``python -m makespan.training.worker``, and
  ``module:name`` likewise; a string that names a package in full stands for its data files;
- of a module that is reached, everything but top-level constants, functions and classes that nothing reached
  mentions: a new function beside others concerns only its users. A decorator that may register what it
  decorates makes a definition count always;
- of a registry, a constant that maps keys to modules, the entries that the rule chooses, else all.

Modules imported under names that are put together at run time are the one thing that cannot be seen; the rule
names them.
"""

import ast
import atexit
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from makespan.errors import InputError
from makespan.files import read_json, write_json
from makespan.lazy import parse_source

_PACKAGE = Path(__file__).parents[1]
_NAMED = re.compile(rf"{_PACKAGE.name}(\.\w+)+(:\w+)?")
_CACHE = Path(".snakemake", "makespan-code.json")
_HASHES = _CACHE.with_name("makespan-hashes.json")


def code_hash(script: str | Path, *more: str, chosen: Collection[str] | None = None) -> str:
    """Return the sha256 over the code that a script uses.

    As a parameter of a rule it makes jobs run again when that code changes, and only then: modification
    times do not count.

    Parameters
    ----------
    more
        What the script finds by name at run time, as ``module`` or ``module:name``.
    chosen
        Keys of the registry entries that the script may look up; None: all.
    """
    known = _known_hashes()
    asked = json.dumps([*_state(Path(script)), *more, None if chosen is None else sorted(chosen)])
    if asked not in known["hashes"]:
        digest = hashlib.sha256()
        for part in used_code(script, *more, chosen=chosen):
            digest.update(f"{part}\n".encode())
        if not known["is_new"]:
            known["is_new"] = True
            atexit.register(_keep, known, _HASHES.absolute())
        known["hashes"][asked] = digest.hexdigest()
    return str(known["hashes"][asked])


def used_code(script: str | Path, *more: str, chosen: Collection[str] | None = None) -> list[str]:
    """Return what `code_hash` covers: sorted lines of file, part of it and sha256; parameters as there."""
    reached, links = set[_Part](), set[str]()
    waiting = [*_whole(str(Path(script))), *(part for named in more for part in _in_full(named))]
    while waiting:
        part = waiting.pop()
        if part in reached:
            continue
        reached.add(part)
        parts, said, named = _followed(*part)
        links |= said
        waiting += parts - reached
        for key, text in named:
            if key is None or chosen is None or key in chosen:
                waiting += _in_full(text)
    _remember()
    return sorted([*links, *(_line(path, name) for path, name in reached)])


_Part = tuple[str, str]
"""Path of a module and a constant in it, "" for the rest of it; or path of a data file, and ""."""


@cache
def _line(path: str, name: str) -> str:
    if path.endswith(".py"):
        return f"{_shown(path)} {name} {_index(path)['parts'][name]['sha256']}"
    return f"{_shown(path)} {_index(path)['sha256']}"


@cache
def _followed(path: str, name: str) -> tuple[set[_Part], set[str], list[tuple[str | None, str]]]:
    """Parts that a part mentions, the imports by which it does, and what its strings name."""
    parts, links = set[_Part](), set[str]()
    index = _index(path)
    part = index["parts"][name] if path.endswith(".py") else {"mentions": [], "named": []}
    for mention in part["mentions"]:
        first, _, attribute = mention.partition(".")
        if first in index["parts"]:
            parts.add((path, first))
        for module, original in index["imports"].get(first, []):
            links.add(f"{_shown(path)} {first} from {module} {original}")
            whole = f"{module}.{original}" if original else module
            if attribute and _file(whole) is not None:
                parts.update(_defined(whole, attribute))
            else:
                parts.update(_imported_as(module, original))
    return parts, links, part["named"]


def _whole(path: str) -> list[_Part]:
    return [(path, name) for name in _index(path)["parts"]]


@cache
def _in_full(text: str) -> list[_Part]:
    """Parts that a text stands for: ``module``, ``module:name``, or a package, that is, its data files."""
    module, _, name = text.partition(":")
    path = _file(module)
    if path is None:
        return []
    if name:
        return _defined(module, name)
    if path.endswith("__init__.py"):
        return [(str(file), "") for file in _data_files(Path(path).parent)]
    return _whole(path)


@cache
def _defined(module: str, name: str) -> list[_Part]:
    """Parts behind a name of a module, where they are defined."""
    submodule, path = _file(f"{module}.{name}"), _file(module)
    if submodule is not None:
        return _whole(submodule)
    if path is None:
        return []
    sources = _index(path)["imports"].get(name, [])
    if sources:
        return [part for source, original in sources for part in _imported_as(source, original)]
    return [(path, part) for part in dict.fromkeys(("", name)) if part in _index(path)["parts"]]


def _imported_as(module: str, name: str) -> list[_Part]:
    if name:
        return _defined(module, name)
    path = _file(module)
    return [] if path is None else _whole(path)


@cache
def _file(module: str) -> str | None:
    """File of a module of the package; None for a name in a module, and for other packages."""
    base = _PACKAGE.parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path)
    return None


def _data_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if not (path / "__init__.py").is_file() and path.name != "__pycache__":
                yield from _data_files(path)
        elif path.suffix != ".py":
            yield path


@cache
def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_PACKAGE)) if path.is_relative_to(_PACKAGE) else path.name


# --- what stands in a file, remembered between runs -----------------------------------------


@cache
def _index(file: str) -> dict[str, Any]:
    """Hash of a file and, of a module, its imports and its parts by name, the nameless one first."""
    path = Path(file)
    state, known = _state(path)[1:], _remembered()
    entry: dict[str, Any] = known.get(file, {})
    if entry.get("state") != state:
        content = path.read_bytes()
        entry = {"state": state, "sha256": hashlib.sha256(content).hexdigest()}
        if path.suffix == ".py":
            entry |= _parsed(content.decode("utf-8"))
        known[file] = entry
        _NEW.append(file)
    return entry


def _state(path: Path) -> list[Any]:
    """Path, modification time and size of a file: while they stay, so does what was read of it."""
    stat = path.stat()
    return [str(path), stat.st_mtime_ns, stat.st_size]


_NEW: list[str] = []


@cache
def _remembered() -> dict[str, Any]:
    return _read(_CACHE)


def _remember() -> None:
    if _NEW:
        _keep(_remembered(), _CACHE)
        _NEW.clear()


@cache
def _known_hashes() -> dict[str, Any]:
    """Hashes by what was asked for; those of earlier runs only if every file of the package is as it was."""
    files = (path for path in sorted(_PACKAGE.rglob("*")) if path.suffix != ".pyc" and path.is_file())
    package = hashlib.sha256(json.dumps([_state(path) for path in files]).encode()).hexdigest()
    found = _read(_HASHES)
    return {
        "package": package,
        "hashes": {},
        **(found if found.get("package") == package else {}),
        "is_new": False,
    }


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, InputError):  # without it, files are read again
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def _keep(content: dict[str, Any], path: Path) -> None:
    """Write what was found for the next run, below the directory of Snakemake if there is one."""
    if path.parent.is_dir() and os.access(path.parent, os.W_OK):
        with suppress(OSError, InputError):  # no space, a quota: the next run reads the files again
            write_json(content, path)


def _parsed(text: str) -> dict[str, Any]:
    tree = parse_source(text)
    imports: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(tree):
        for bound, module, name in _imported(node):
            imports.setdefault(bound, []).append((module, name))
    parts: dict[str, dict[str, Any]] = {
        name: {
            "sha256": hashlib.sha256(source.encode()).hexdigest(),
            "mentions": sorted({mention for node in nodes for mention in _mentions(node)}),
            "named": [named for node in nodes for named in _named(node)],
        }
        for name, (source, nodes) in _divided(tree, text.splitlines()).items()
    }
    known = {mention.partition(".")[0] for part in parts.values() for mention in part["mentions"]}
    silent = set(imports) - known
    exported = silent & {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname  # ``from module import name as name``: for those who import it from here
    }
    parts[""]["mentions"] += sorted(silent - exported)
    if exported:
        parts["*"] = {"sha256": "", "mentions": sorted(exported), "named": []}
    return {"imports": imports, "parts": parts}


def _divided(tree: ast.Module, lines: list[str]) -> dict[str, tuple[str, list[ast.stmt]]]:
    """Source and statements of each top-level definition, and under "" those of the rest."""
    constants: dict[str, list[ast.stmt]] = {}
    rest: list[ast.stmt] = []
    left_out: set[int] = set()
    current: list[ast.stmt] | None = None
    for statement in tree.body:
        name = _constant(statement) or _function_or_class(statement)
        if name and name not in constants:
            current = constants[name] = [statement]
        elif (
            current is not None
            and isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
        ):  # a docstring of the constant above
            current.append(statement)
        elif any(_imported(statement)):
            current = None
            left_out.update(_span(statement))
        else:
            current = None
            rest.append(statement)
    found: dict[str, tuple[str, list[ast.stmt]]] = {}
    for name, statements in constants.items():
        numbers = [number for statement in statements for number in _span(statement)]
        left_out.update(numbers)
        source = "" if _registry(statements[0]) else "\n".join(lines[number] for number in numbers)
        found[name] = (source, statements)
    kept = (line for number, line in enumerate(lines) if number not in left_out and line.strip())
    return {"": ("\n".join(kept), rest), **found}


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Name bound, module and name in it of what a statement imports from the package."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE.name:
        for alias in node.names:
            yield alias.asname or alias.name, str(node.module), alias.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == _PACKAGE.name:
                yield alias.asname or _PACKAGE.name, alias.name, ""


def _mentions(node: ast.AST) -> Iterator[str]:
    """Names that code uses, those used for one attribute alone with it."""
    owners = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            owners.add(inner.value)
            yield f"{inner.value.id}.{inner.attr}"
        elif isinstance(inner, ast.Name) and inner not in owners and isinstance(inner.ctx, ast.Load):
            yield inner.id


def _named(statement: ast.stmt) -> Iterator[tuple[str | None, str]]:
    """Modules that string constants name, in a registry with their keys."""
    registry = _registry(statement)
    if registry:
        yield from registry.items()
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            yield None, node.value


def _registry(statement: ast.stmt) -> dict[str, str]:
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Dict) or not _constant(statement):
        return {}
    found = {
        key.value: item.value
        for key, item in zip(value.keys, value.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(item, ast.Constant)
        if isinstance(key.value, str) and isinstance(item.value, str) and _NAMED.fullmatch(item.value)
    }
    return found if len(found) == len(value.keys) else {}


def _constant(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


# Decorators that leave no trace of what they decorate anywhere else.
_PURE = {
    "cache",
    "contextmanager",
    "dataclass",
    "lru_cache",
    "overload",
    "runtime_checkable",
    "styled",
    "typed",
}


def _function_or_class(statement: ast.stmt) -> str:
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return ""
    decorators = [ast.unparse(one).partition("(")[0] for one in statement.decorator_list]
    return statement.name if {name.rpartition(".")[2] for name in decorators} <= _PURE else ""


def _span(statement: ast.stmt) -> range:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(one.lineno for one in decorators)])
    return range(first - 1, statement.end_lineno or statement.lineno)
