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


def test_a_search_judges_the_shipped_parameters_and_those_on_record_before_it_changes_any(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    search = import_module("search_policies")

    def judged(judge: object, n_seeds: int, pool: object) -> dict[str, float]:
        values = search.parameters(judge)
        return dict.fromkeys(search.MEASURES, sum(values.values()) + n_seeds)

    monkeypatch.setattr(search, "judged", judged)
    variant = search.VARIANTS["morphling-work"]
    shipped = search.parameters(variant)
    other = shipped | {"start_horizon_s": 2 * shipped["start_horizon_s"]}
    runs = [list(search.search(variant, 3, 1, 7, None, [shipped, other])) for _ in range(2)]
    assert [len(table) for table in runs[0]] == [1, 2, 3, 4, 5]
    assert runs[0][-1].equals(runs[1][-1])
    found = runs[0][-1][list(shipped)].to_dict("records")
    assert found[:2] == [shipped, other]
    assert all(one not in (shipped, other) for one in found[2:])
    ratio = (sum(other.values()) + 1) / (sum(shipped.values()) + 1)
    assert runs[0][-1]["jct"].iloc[1] == pytest.approx(ratio)
