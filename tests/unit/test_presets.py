"""Presets are read once, copied to callers, and refuse unknown entries."""

import pytest

from makespan.errors import UnknownNameError
from makespan.presets import preset_entry, read_preset, sources_of


def test_entries_are_copies_so_that_a_caller_cannot_change_the_preset():
    preset_entry("makespan.hardware", "gpus", "device", "t4-16")["source"] = "changed"
    assert read_preset("makespan.hardware", "gpus")["t4-16"]["source"] != "changed"


def test_unknown_entries_are_refused_with_the_accepted_ones():
    with pytest.raises(UnknownNameError, match=r"unknown device 't4'; accepted: .*t4-16"):
        preset_entry("makespan.hardware", "gpus", "device", "t4")


def test_sources_are_keyed_by_file_and_entry():
    assert "clusters/a800-64" in sources_of("makespan.hardware", "gpus", "clusters")
