"""Typed models of the YAML files under ``config/``, assembled from the options of all papers.

`load_settings` merges and checks files; `check_settings` checks values that are merged already.
Inner layers never see these models, only plain values and domain objects. `code_hash` is beside them because
it is what the workflow needs on every start, too.
"""

from makespan.config._code import code_hash, used_code
from makespan.config._reference import configuration_page, json_schema
from makespan.config._settings import (
    DEFAULT_FILES,
    Settings,
    check_settings,
    load_settings,
    merge,
    provenance,
    published_directory,
    settings_hash,
    settings_model,
)
from makespan.config._targets import unknown_target

__all__ = [
    "DEFAULT_FILES",
    "Settings",
    "check_settings",
    "code_hash",
    "configuration_page",
    "json_schema",
    "load_settings",
    "merge",
    "provenance",
    "published_directory",
    "settings_hash",
    "settings_model",
    "unknown_target",
    "used_code",
]
