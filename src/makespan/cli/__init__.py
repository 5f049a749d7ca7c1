"""The command line.

One module for each group of verbs; a module is imported when one of its verbs is called.
"""

from makespan.cli._main import main
from makespan.cli._page import cli_page

__all__ = ["cli_page", "main"]
