"""The command ``makespan config``; apart from the models, which are imported on every start."""

from pathlib import Path

import click
import yaml

from makespan.config._settings import load_settings

__all__ = ["config_command"]


@click.command("config")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--root",
    default=Path(),
    show_default="here",
    type=click.Path(path_type=Path, file_okay=False),
    help="Checkout with the default files.",
)
def config_command(files: tuple[Path, ...], root: Path) -> None:
    """Check a configuration and print it whole.

    FILES change some of the defaults; later ones win.
    """
    settings = load_settings(files, root).model_dump(mode="json")
    click.echo(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100), nl=False)
