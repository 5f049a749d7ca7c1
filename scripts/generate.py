"""Write the files that are made from the code: configuration schema and reference pages.

A test compares them with what is committed, so run this after a change of an option or a table.
"""

from pathlib import Path

from makespan.cli import cli_page
from makespan.config import configuration_page, json_schema, load_settings
from makespan.tables import tables_page, write_text

ROOT = Path(__file__).resolve().parents[1]


def generated_files() -> dict[str, str]:
    """Return path below the root and text of every generated file."""
    page = configuration_page(load_settings(root=ROOT))
    return {
        "config/README.md": page,
        "config/schemas/config.schema.json": json_schema(),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/configuration.md": page,
        "docs/reference/tables.md": tables_page(),
    }


def main() -> None:
    """Write every generated file."""
    for name, text in generated_files().items():
        write_text(text, ROOT / name)


if __name__ == "__main__":
    main()
