"""The registry of benchmarks and the files it names agree."""

import re
import tomllib
from pathlib import Path


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
