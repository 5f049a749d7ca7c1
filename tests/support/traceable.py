"""Let torch trace code of the package in tests whose lines are counted."""

from functools import cache

import odd_transformers
import torch

from makespan.slapo import create_schedule


@cache
def make_recomputation_traceable():
    """Run recomputed modules as a compiler sees them, until their lines are no longer counted.

    Lines are counted by calls in the code of Python 3.11, which torch cannot trace. They go away where a line
    has run fifty times.
    """
    for options in ({}, {"keep": "products"}):
        sch = create_schedule(odd_transformers.Harbour(1))
        sch["boats.0"].checkpoint(**options)
        with torch.no_grad():
            for _ in range(60):
                sch.mod(*odd_transformers.INPUTS["Harbour"])
