"""Typed models of the YAML files under ``config/``, assembled from the options of all papers.

`load_settings` merges and checks files; `check_settings` checks values that are merged already.
Inner layers never see these models, only plain values and domain objects. `code_hash` is beside them because
it is what the workflow needs on every start, too.
"""

from makespan.config.code import (
    code_hash as code_hash,
    used_code as used_code,
)
from makespan.config.reference import (
    configuration_page as configuration_page,
    json_schema as json_schema,
)
from makespan.config.settings import (
    DEFAULT_FILES as DEFAULT_FILES,
    Settings as Settings,
    check_settings as check_settings,
    load_settings as load_settings,
    merge as merge,
    provenance as provenance,
    published_directory as published_directory,
    settings_hash as settings_hash,
    settings_model as settings_model,
    unknown_target as unknown_target,
)
