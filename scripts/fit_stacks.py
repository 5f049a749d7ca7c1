"""Fit the factors of stacks and devices to tables of published rows, and judge predictions by the protocol.

``python scripts/fit_stacks.py public-rows/`` reads every CSV of the folder, and writes the preset that ships
and the table of errors in docs/background/planning.md.
"""

import sys
from pathlib import Path

from makespan.files import write_text
from makespan.planning import fit_knowledge, judge, judged_table, knowledge_text, read_rows

ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "src/makespan/planning/presets/knowledge.toml"
PAGE = ROOT / "docs/background/planning.md"


def main() -> None:
    """Read, fit, write."""
    rows, refused = read_rows(sorted(Path(sys.argv[1]).glob("*.csv")))
    sources = sorted({row.source for row in rows})
    comment = (
        f"Factors fitted to {len(rows)} published rows of {len(sources)} sources by scripts/fit_stacks.py.\n"
        "A factor of a stack is over the shared one, that of a device over those of its terms of computation."
    )
    write_text(knowledge_text(fit_knowledge(rows), comment), PRESET)
    start, end = "<!-- judged -->\n", "<!-- end of judged -->"
    before, rest = PAGE.read_text().split(start)
    write_text(f"{before}{start}{judged_table(judge(rows))}{end}{rest.split(end)[1]}", PAGE)
    sys.stdout.write(f"{PRESET.name}: {len(rows)} rows, {len(refused)} refused\n")


if __name__ == "__main__":
    main()
