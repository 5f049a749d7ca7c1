"""The command line.

One module for each group of verbs; a module is imported when one of its verbs is called.
"""

from makespan.cli._main import cli_page, main

__all__ = ["cli_page", "main"]
