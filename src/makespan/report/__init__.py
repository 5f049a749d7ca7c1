"""Report: one self-contained page over the results of a run, for readers without this project.

`write_report` reads what is under ``results/``, whatever part of it was built, and writes one HTML file that
opens offline. `contents` collects what the page shows, `charts` turns tables into interactive charts, and
`page` renders the template.
"""

from makespan.report.contents import (
    Report as Report,
    collect as collect,
)
from makespan.report.page import (
    render as render,
    write_report as write_report,
)
