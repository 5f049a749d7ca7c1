"""The command line.

One module for each group of verbs; a module is imported when one of its verbs is called.
"""

from makespan.cli.group import (
    cli_page as cli_page,
    main as main,
)
