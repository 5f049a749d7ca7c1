"""Factors that convert to SI units, and text of quantities and of foreign input for people.

Inside the package all quantities are in seconds, bytes, FLOP and bytes per second. Readers and plots convert
them with the names defined here.
"""

KB = 1e3
MB = 1e6
GB = 1e9
GIB = float(2**30)

US = 1e-6
MS = 1e-3
MINUTE = 60.0
HOUR = 3600.0
DAY = 24 * HOUR


_DIGITS = 15  # numbers of so many are exact as floats, and Python reads no more than 4300


def whole(text: str) -> int | None:
    """Return the number that a text states in up to 15 digits, None if it states anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def format_bytes(value_bytes: float) -> str:
    """Format a byte count with a decimal prefix, for example ``'80.0 GB'``."""
    for size, suffix in ((1e12, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB")):
        if abs(value_bytes) >= size:
            return f"{value_bytes / size:.1f} {suffix}"
    return f"{value_bytes:.0f} B"


def format_seconds(value_s: float) -> str:
    """Format a duration with the unit that keeps it readable, for example ``'12.5 ms'``."""
    if abs(value_s) >= HOUR:
        return f"{value_s / HOUR:.2f} h"
    if abs(value_s) >= MINUTE:
        return f"{value_s / MINUTE:.1f} min"
    if abs(value_s) >= 1.0:
        return f"{value_s:.2f} s"
    if abs(value_s) >= MS:
        return f"{value_s / MS:.1f} ms"
    return f"{value_s / US:.1f} us"


def printable(text: str) -> str:
    r"""Replace control and formatting characters, which could control a terminal, by escapes as ``\x1b``.

    Line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
