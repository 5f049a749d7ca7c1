"""Typed models of the YAML files under ``config/``.

`load_settings` merges and checks files; `check_settings` checks values that are merged already.
Inner layers never see these models, only plain values and domain objects.
"""

from makespan.config._code import code_hash, used_code
from makespan.config._fig9 import Fig9, Fig9Model, Fig9Plan, Fig9Switch
from makespan.config._morphling import Fig7, Fig7Stage, Fig8, Morphling, Sensitivity
from makespan.config._performance import PerformanceModel
from makespan.config._provenance import provenance, settings_hash
from makespan.config._reference import configuration_page, json_schema, reference_table
from makespan.config._settings import (
    DEFAULT_FILES,
    PUBLISHED_VARIABLE,
    Settings,
    check_settings,
    load_settings,
    merge,
    published_directory,
)
from makespan.config._simulation import (
    JobLists,
    LargeModels,
    Load,
    Perturbed,
    Rounds,
    Scale,
    ScaleSize,
    Simulation,
)
from makespan.config._throughput import Emulated, Measured, Published, Throughput

__all__ = [
    "DEFAULT_FILES",
    "PUBLISHED_VARIABLE",
    "Emulated",
    "Fig7",
    "Fig7Stage",
    "Fig8",
    "JobLists",
    "LargeModels",
    "Load",
    "Fig9",
    "Fig9Model",
    "Fig9Plan",
    "Fig9Switch",
    "Measured",
    "Morphling",
    "PerformanceModel",
    "Perturbed",
    "Published",
    "Rounds",
    "Scale",
    "ScaleSize",
    "Sensitivity",
    "Settings",
    "Simulation",
    "Throughput",
    "check_settings",
    "code_hash",
    "configuration_page",
    "json_schema",
    "load_settings",
    "merge",
    "provenance",
    "published_directory",
    "reference_table",
    "settings_hash",
    "used_code",
]
