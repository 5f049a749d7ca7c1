"""The configuration described: JSON schema and reference table, both made from the models."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from makespan.config.settings import Settings, settings_model

_PAGE = """# Configuration

Every option has a default. To change some of them, write those alone into a file of your own and give it to
the workflow, or into `config/config.yaml`, which is always read. Save
this as `mine.yaml`, for example:

```yaml
throughput:
  emulated:
    seed: 1
```

```console
$ snakemake --cores all --configfile mine.yaml
```

Targets come before `--configfile`, which takes every name that follows it for a file. Later files win;
groups are merged, lists are replaced, and no list has an entry twice. A changed file that an option names,
such as constants, changes what rests on it. Options are checked before any job starts: an unknown key or
a value that is not accepted stops the run with one line that names the key, what was found and what is
accepted. `makespan config --schema` prints a JSON schema for editors. The merged result is
written to `results/<source>/provenance.json`. Snakemake reads files before this project does, and answers one
that is not UTF-8 with a traceback; `makespan config mine.yaml` says in one line what is wrong. A small run of
every experiment is described by `config/test/morphling.yaml`.

The column *changes* names the tables and figures that depend on an option.
This page is generated from `makespan.config`.

"""
_HEADER = ("option", "type", "default", "unit", "meaning", "source", "changes")


def json_schema() -> str:
    """Return the JSON schema (draft 2020-12) of the whole configuration, as text."""
    found = settings_model().model_json_schema()
    for block in found["$defs"].values():
        own = block.get("properties", {})
        block["properties"] = {name: one for name, one in own.items() if "shared" not in one}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def configuration_page(settings: Settings) -> str:
    """Return the Markdown page that explains how to configure and lists every option with its default."""
    rows = [_HEADER, ("---",) * len(_HEADER), *_rows(settings_model(), settings.model_dump(mode="json"), "")]
    return _PAGE + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _rows(block: type[BaseModel], values: Any, prefix: str) -> Iterator[tuple[str, ...]]:
    own = ((name, field) for name, field in block.model_fields.items() if not field.exclude)
    for name, field in own:
        key = f"{prefix}{name}"
        inner, is_list = _inner_block(field)
        value = values[name] if isinstance(values, Mapping) else None
        if inner is None or is_list:
            yield _row(key, field, None if inner else value, inner)
        if inner is not None:
            yield from _rows(inner, value, f"{key}[]." if is_list else f"{key}.")


def _inner_block(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    first = next(iter(getattr(annotation, "__args__", ())), None)
    if isinstance(first, type) and issubclass(first, BaseModel):
        return first, True
    return None, False


def _row(key: str, field: FieldInfo, value: Any, inner: type[BaseModel] | None) -> tuple[str, ...]:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    is_entry = "[]" in key
    default = "see the file" if inner is not None or is_entry else f"`{json.dumps(value)}`"
    unit, *rest = (str(extra.get(name, "")) for name in ("unit", "source", "changes"))
    return f"`{key}`", _type(field.annotation), default, unit, field.description or "", *rest


_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def _type(annotation: Any) -> str:
    arguments = getattr(annotation, "__args__", ())
    if annotation in _NAMES:
        return _NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    if arguments and getattr(annotation, "__origin__", None) is tuple:
        return f"list of {_type(arguments[0])}"
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return ", ".join(f"`{argument}`" for argument in arguments)
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    return " or ".join(_type(argument) for argument in arguments)
