"""Files of the user and the modules that they import."""

import json
import sys

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError
from makespan.profiling.own import process_number
from makespan.user_code import load_file

FILE = """
from helper import NAME

def later():
    from lazily import NAME
    return NAME
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Write a file and two modules that it imports to each of two folders, and work in a third."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for folder in ("with space", "ü"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(FILE)
        (tmp_path / folder / "helper.py").write_text(f"NAME = {folder!r}\n")
        (tmp_path / folder / "lazily.py").write_text(f"NAME = {folder!r}\n")
    yield tmp_path / "with space", tmp_path / "ü"
    for name in ("helper", "lazily"):
        sys.modules.pop(name, None)


def test_a_file_imports_what_lies_beside_it_then_and_later(folders):
    mine = load_file("../with space/mine.py")
    assert mine.NAME == mine.later() == "with space"


def test_files_of_two_folders_import_their_own_modules_of_one_name(folders):
    for folder in (*folders, *folders):
        mine = load_file(folder / "mine.py")
        assert mine.NAME == mine.later() == folder.name


def test_a_module_that_no_other_folder_replaces_keeps_its_values(folders):
    first, other = folders
    load_file(first / "mine.py")
    helper = sys.modules["helper"]
    (other / "helper.py").unlink()
    (other / "mine.py").write_text("import helper")
    assert load_file(other / "mine.py").helper is helper
    assert load_file(first / "mine.py").NAME is helper.NAME


def test_files_never_replace_modules_of_python_or_of_packages(folders, monkeypatch):
    first, _ = folders
    monkeypatch.delitem(sys.modules, "pyclbr", raising=False)
    for name in ("json", "pyclbr", "pytest", "makespan"):
        (first / f"{name}.py").write_text("raise RuntimeError")
    (first / "mine.py").write_text("import json, pyclbr, pytest, makespan.errors")
    mine = load_file(first / "mine.py")
    assert (mine.json, mine.pytest, mine.makespan.errors.InputError) == (json, pytest, InputError)


def test_a_module_that_is_nowhere_is_named(folders):
    first, _ = folders
    (first / "helper.py").unlink()
    with pytest.raises(InputError, match=r"mine\.py, line 2: ModuleNotFoundError: No module named 'helper'"):
        load_file(first / "mine.py")


def test_a_training_step_may_be_built_by_a_module_beside_its_file(folders, monkeypatch):
    monkeypatch.chdir(folders[0])
    (folders[0] / "steps.py").write_text(
        "import helper\n\ndef make(layout, seq, batch):\n    return helper.NAME.upper\n"
    )
    done = CliRunner().invoke(main, ["profile", "steps.py:make", "--seq", "8", "--batch", "1"])
    assert done.exit_code == 0, done.output
    assert (folders[0] / "profile" / "measured.csv").exists()


def test_numbers_of_processes_that_are_none_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE is 'two' in the environment; expected a number"):
        process_number("WORLD_SIZE", unset=1)
