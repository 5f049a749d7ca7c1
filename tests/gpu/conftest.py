"""Where paths of GPUs are tried, and the table of what became of each.

Without a GPU the same tests run on the CPU with gloo: a rehearsal that shows that the tests themselves work.
"""

import csv
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[2] / "results" / "gpu-test.csv"
ROWS = pytest.StashKey[dict[str, dict[str, object]]]()


def devices():
    """Return the kind of device here, its name, and how many processes can have one each."""
    import torch

    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name(), torch.cuda.device_count()
    return "cpu", "CPU in place of a GPU", 2


@pytest.fixture(scope="session")
def device():
    """Return ``cuda``, or ``cpu`` where there is no GPU."""
    return devices()[0]


@pytest.fixture
def launcher(device):
    """Return a launcher whose processes have a device each."""
    from makespan.runtime import LocalLauncher

    return LocalLauncher(device)


def pytest_collection_modifyitems(items):
    kind, name, count = devices()
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker("gpu")
        needed = item.get_closest_marker("devices")
        if needed is not None and needed.args[0] > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} GPUs, found {count}"))
        if item.get_closest_marker("cuda_only") and kind != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        item.user_properties += [("device", name), ("devices", needed.args[0] if needed else 1)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    rows = item.config.stash.setdefault(ROWS, {})
    row = rows.setdefault(item.nodeid, {"path": item.name, **dict(item.user_properties), "wall_s": 0.0})
    row["wall_s"] += call.duration
    if report.skipped:
        row |= {"outcome": "not run", "reason": report.longrepr[2].removeprefix("Skipped: ")}
    elif report.failed:
        row |= {"outcome": "failed", "reason": str(call.excinfo.value).partition("\n")[0]}
    else:
        row.setdefault("outcome", "passed")
    return report


def pytest_terminal_summary(terminalreporter, config):
    rows = [{**row, "wall_s": round(row["wall_s"], 1)} for row in config.stash.get(ROWS, {}).values()]
    if not rows:
        return
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    columns = ("path", "device", "devices", "outcome", "wall_s", "reason")
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(rows)
    terminalreporter.section(f"{TABLE.relative_to(TABLE.parents[1])}: {rows[0]['device']}")
    for row in rows:
        reason = f" ({row['reason']})" if row.get("reason") else ""
        terminalreporter.write_line(f"{row['outcome']:8} {row['wall_s']:6.1f} s  {row['path']}{reason}")
