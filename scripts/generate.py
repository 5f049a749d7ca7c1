"""Write the files that are made from the code: configuration schema, reference pages, list of layers.

A test compares them with what is committed, so run this after a change of an option, a table or a layer.
"""

import re
import tomllib
from importlib import import_module
from pathlib import Path

from makespan.cli import cli_page
from makespan.config import configuration_page, json_schema, load_settings
from makespan.papers import PAPERS
from makespan.tables import tables_page, write_text

ROOT = Path(__file__).resolve().parents[1]
LAYERS = re.compile(r"(?<=<!-- layers -->\n).*?(?=<!-- end of layers -->)", re.DOTALL)
API_HEAD = """# API

The layers of the package, lowest first; a layer imports only from those before it. What a package shows here
may be relied on, its modules with an underscore may not.
"""


def generated_files() -> dict[str, str]:
    """Return path below the root and text of every generated file."""
    schemas = {name: import_module(f"makespan.papers.{name}").SCHEMAS for name in PAPERS}
    page = configuration_page(load_settings(root=ROOT))
    return {
        "config/README.md": page,
        "config/schemas/config.schema.json": json_schema(),
        "CONTRIBUTING.md": LAYERS.sub(lambda _: _layer_list(), (ROOT / "CONTRIBUTING.md").read_text("utf-8")),
        "docs/reference/api.md": "\n".join([API_HEAD, *map(_api_entry, _modules())]),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/configuration.md": page,
        "docs/reference/tables.md": tables_page(schemas),
    }


def _layers() -> list[list[str]]:
    """Return the layers of the import contract, lowest first, each with its modules."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    (contract,) = (one for one in tools["importlinter"]["contracts"] if one["id"] == "layers")
    return [re.split(r" [:|] ", layer) for layer in reversed(contract["layers"])]


def _layer_list() -> str:
    """Return every module with the first line of its docstring."""
    lines = []
    for number, layer in enumerate(_layers(), start=1):
        for name in layer:
            (summary, *_) = (import_module(f"makespan.{name}").__doc__ or "").splitlines()
            lines.append(f"| {number} | `{name}` | {summary} |\n")
    return "".join(["\n| layer | module | what it holds |\n| --- | --- | --- |\n", *lines, "\n"])


def _modules() -> list[str]:
    """Return the modules that users import, lowest layer first."""
    names = [f"makespan.{name}" for layer in _layers() for name in layer]
    return ["makespan", *names, *(f"makespan.papers.{name}" for name in PAPERS)]


def _api_entry(module: str) -> str:
    return f"::: {module}\n"


def main() -> None:
    """Write every generated file."""
    for name, text in generated_files().items():
        write_text(text, ROOT / name)


if __name__ == "__main__":
    main()
