"""The registry of benchmarks and the files it names agree."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest


def test_every_benchmark_is_registered_and_exists(root: Path) -> None:
    folder = root / "benchmarks"
    registry = tomllib.loads((folder / "registry.toml").read_text(encoding="utf-8"))
    registered = {(entry["file"], entry["test"]) for entry in registry.values()}
    written = {
        (path.name, name)
        for path in folder.glob("bench_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert registered == written
    assert all(entry["quantity"] and entry["target"] for entry in registry.values())


def test_the_page_of_the_policies_shows_the_points_that_were_searched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    search = import_module("search_policies")
    points = {name: pd.read_csv(search.FOLDER / f"{name}.csv") for name in search.VARIANTS}
    assert search.front_table(points) in search.PAGE.read_text(encoding="utf-8")
    for name, variant in search.VARIANTS.items():
        shipped = search.parameters(variant)
        assert points[name].iloc[0][list(shipped)].to_dict() == shipped
