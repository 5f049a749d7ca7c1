"""Presets are read once, copied to callers, and refuse unknown entries."""

import pytest

from makespan.errors import UnknownNameError
from makespan.files import preset_entry, read_preset

PRESETS = {
    "hardware": ("devices", "nodes", "clusters"),
    "workloads": ("models", "stacks", "workloads", "small", "families"),
}


def test_entries_are_copies_so_that_a_caller_cannot_change_the_preset():
    preset_entry("makespan.hardware", "devices", "device", "t4-16")["source"] = "changed"
    assert read_preset("makespan.hardware", "devices")["t4-16"]["source"] != "changed"


def test_unknown_entries_are_refused_with_the_accepted_ones():
    with pytest.raises(UnknownNameError, match=r"unknown device 't4'; expected .*t4-16"):
        preset_entry("makespan.hardware", "devices", "device", "t4")


def with_source():
    """Records that must say where they come from: entries, constants, targets, and the constants of a fit."""
    for package, names in PRESETS.items():
        for name in names:
            for key, entry in read_preset(f"makespan.{package}", name).items():
                yield f"{package}/{name}/{key}", entry
    for family, sizes in read_preset("makespan.training.zoo", "families").items():
        yield from ((f"families/{family}/{size}", entry) for size, entry in sizes.items())
    for name, entry in read_preset("makespan.perf", "environments").items():
        yield from ((f"environments/{name}/{key}", value) for key, value in entry["constants"].items())
    yield from enumerate(read_preset("makespan.emulator", "targets")["target"])
    yield "L1", read_preset("makespan.emulator", "L1")


def test_every_preset_names_its_source():
    records = list(with_source())
    assert len(records) > 90
    assert [key for key, entry in records if len(entry.get("source", "").strip()) <= 10] == []
