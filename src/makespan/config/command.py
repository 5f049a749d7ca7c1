"""The command ``makespan config``; apart from the models, which are imported on every start."""

import json
from pathlib import Path

import click
import yaml

from makespan.config.settings import DEFAULT_FILES, load_settings
from makespan.errors import MissingDataError


def _checkout(here: Path) -> Path:
    """Return the nearest folder with the default files, at or above another one."""
    for folder in (here, *here.parents):
        if (folder / DEFAULT_FILES[0]).is_file():
            return folder
    raise MissingDataError(
        f"{here} is not in a checkout of makespan, whose {DEFAULT_FILES[0]} has the defaults; "
        "go to one, or name it with --root"
    )


@click.command("config")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--root",
    show_default="the current one",
    type=click.Path(path_type=Path, file_okay=False),
    help="Checkout with the default files.",
)
@click.option("--json", "form", flag_value="json", default=None, help="Print the result as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a configuration instead, for editors.")
def config_command(files: tuple[Path, ...], root: Path | None, form: str | None, schema: bool) -> None:
    """Check a configuration and print it with all defaults.

    FILES change some of the defaults; later ones win. The file config/config.yaml of a checkout is read
    first: run this in the checkout or a folder below it, or name the checkout with --root.
    """
    if schema:
        from makespan.config.reference import json_schema

        click.echo(json_schema(), nl=False)
        return
    settings = load_settings(files, root or _checkout(Path.cwd())).model_dump(mode="json")
    if form is not None:
        click.echo(json.dumps(settings, indent=1))
        return
    click.echo(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100), nl=False)
