"""An end to the tracing of coverage for a while: traced, Python takes up to three times as long."""

import sys
from contextlib import contextmanager


@contextmanager
def untraced():
    """Trace nothing that is called in this block.

    A pause of pytest-cov leaves a second tracer at work in the processes of xdist.
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
