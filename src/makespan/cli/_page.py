"""The reference page of the command line, made from the help texts."""

import click

from makespan.cli._main import VERBS, main

__all__ = ["cli_page"]

_WIDTH = 96
_HEAD = """# Command line

Every verb answers `--help`; this page is generated from the answers. A mistake gives one message on the
error stream, exit status 2, and leaves no file behind. Exit status 1 means that the work was done and
the answer is no: a schedule is impossible, a bound is missed.
"""


def cli_page() -> str:
    """Return the page as Markdown."""
    root = click.Context(main, info_name="makespan", terminal_width=_WIDTH, **main.context_settings)
    parts = [_HEAD, _block(main.get_help(root))]
    for verb in VERBS:
        command = main.get_command(root, verb)
        if command is not None:
            context = click.Context(command, root, verb, terminal_width=_WIDTH)
            parts.append(f"## `{verb}`\n\n{_block(command.get_help(context))}")
    return "\n".join(parts)


def _block(text: str) -> str:
    lines = (line.rstrip() for line in text.splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"
