"""A group of commands that imports a command when it is called, and turns errors into messages."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

from makespan.errors import MakespanError

__all__ = ["Failure", "LazyGroup"]


class Failure(click.ClickException):
    """One line on the error stream and exit status 2."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group whose commands are imported on demand and whose expected errors become one message.

    Parameters
    ----------
    verbs
        For each verb where it is defined, as ``module:attribute``, and its short help.
    **options
        Of `click.Group`.
    """

    def __init__(self, verbs: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self.verbs = dict(verbs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order in which they were given."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if there is no such verb."""
        if cmd_name not in self.verbs:
            return None
        module, attribute = self.verbs[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in self.verbs.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that the package raises on purpose has no traceback."""
        try:
            return super().invoke(ctx)
        except MakespanError as error:
            raise Failure(str(error)) from None
        except BrokenPipeError:  # whoever reads has seen enough; click ends quietly
            raise
        except OSError as error:
            raise Failure(f"{error.filename or 'file'}: {error.strerror or error}") from None
