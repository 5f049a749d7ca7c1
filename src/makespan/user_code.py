"""Code that a user names by file or module: find it, run it, and explain why it cannot be run."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from makespan.errors import InputError, failed_at, short_path


def user_file(path: str | Path, what: str, error: type[Exception] = InputError) -> Path:
    """Return the path of a Python file, called ``what`` in messages; raise an ``error`` if there is none."""
    path = Path(path)
    if not path.is_file():
        problem = "is no regular file" if path.exists() else "no such file"
        raise error(f"{path}: {problem}; expected {what} with the ending .py")
    return path


def load_file(path: str | Path, error: type[Exception] = InputError) -> ModuleType:
    """Run a file as a module, without writing compiled code; an ``error`` says where it failed.

    Imports look into the folder of the file before installed packages, then and later, as if Python ran it as
    a script. They find modules of Python itself first, as code of this package needs them, too.
    """
    file = str(Path(path).resolve())
    name = f"{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    module = ModuleType(name)
    module.__file__ = file
    _search_first(Path(file).parent)
    with explained(file, error):
        code = compile(Path(file).read_bytes(), file, "exec")
        sys.modules[name] = module  # dataclasses and messages look for it there
        exec(code, module.__dict__)
    return module


_FOLDERS = set[str]()
"""Folders of files that were run, which are in the search path of imports."""


def _search_first(folder: Path) -> None:
    """Let imports look into a folder before packages, also for names that files of other folders imported."""
    if str(folder) in _FOLDERS.intersection(sys.path):
        sys.path.remove(str(folder))
    if str(folder) not in sys.path:
        _FOLDERS.add(str(folder))
        packages = ("site-packages", "dist-packages")
        later = (n for n, path in enumerate(sys.path) if path in _FOLDERS or Path(path).name in packages)
        sys.path.insert(next(later, len(sys.path)), str(folder))
    namesakes = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or "." in name or name in sys.stdlib_module_names or "site-packages" in file:
            continue
        beside = [folder / f"{name}.py", folder / name / "__init__.py"]
        if Path(file).resolve() not in beside and any(one.is_file() for one in beside):
            namesakes.add(name)
    for name in list(sys.modules):  # with their submodules
        if name.partition(".")[0] in namesakes - {"__main__", "makespan"}:
            del sys.modules[name]


def load_module(name: str, error: type[Exception] = InputError) -> tuple[ModuleType, str]:
    """Import a module by its dotted name; return it with its file, or with its name if it has no file."""
    with explained(name, error):
        spec = importlib.util.find_spec(name)
    file = (spec and spec.origin) or name
    with explained(file, error):
        return importlib.import_module(name), file


@contextmanager
def explained(file: str, error: type[Exception] = InputError) -> Iterator[None]:
    """Turn a failed import into an ``error`` that names file, line and reason."""
    try:
        yield
    except (Exception, SystemExit) as failure:
        line, problem = failed_at(failure.__traceback__, file), str(failure)
        if isinstance(failure, SyntaxError):
            line, problem = (failure.lineno if failure.filename == file else line), failure.msg
        where = short_path(file) + (f", line {line}" if line else "")
        raise error(f"{where}: {type(failure).__name__}: {problem}") from failure
