"""Let torch trace code whose lines are counted.

SlipCover counts lines by calls in the code of Python 3.11, one per line until the line has run fifty times.
Torch cannot trace these calls, so what it compiles would depend on the tests that this process ran before.
"""

import sys
from functools import cache
from importlib.util import find_spec


def hide_counters_from_torch():
    """Have torch read code without the counters from now on, where there are both; loads its compiler."""
    # Newer versions of Python tell the counter instead.
    if "slipcover" not in sys.modules or sys.version_info >= (3, 12) or find_spec("torch") is None:
        return
    from slipcover import bytecode, probe
    from torch._dynamo import bytecode_transformation

    instructions = bytecode_transformation._cached_cleaned_instructions

    @cache
    def instructions_without_counters(code, safe=False):
        editor = bytecode.Editor(code)
        for offset in range(0, len(code.co_code), 2):
            called = editor.get_inserted_function(offset)
            if called and code.co_consts[called[0]] is probe.signal:
                editor.disable_inserted_function(offset)
        return instructions(editor.finish(), safe)

    bytecode_transformation._cached_cleaned_instructions = instructions_without_counters
