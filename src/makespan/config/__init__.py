"""Typed models of the YAML files under ``config/``, assembled from the options of all papers.

`load_settings` merges and checks files; `check_settings` checks values that are merged already.
Inner layers never see these models, only plain values and domain objects. `code_hash` is beside them because
it is what the workflow needs on every start, too.
"""

from makespan.config._code import code_hash, used_code
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
    settings_model,
)

__all__ = [
    "DEFAULT_FILES",
    "PUBLISHED_VARIABLE",
    "Settings",
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
    "settings_model",
    "used_code",
]
