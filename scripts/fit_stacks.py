"""Fit the factors of stacks and devices to tables of published rows, and judge predictions by the protocol.

``python scripts/fit_stacks.py public-rows/`` reads every CSV of the folder, and writes the presets that ship
and the pages that show their numbers. It names the errors that became larger; weigh them before a commit.
"""

import subprocess
import sys
from pathlib import Path

from makespan.files import write_text
from makespan.planning import (
    fit_knowledge,
    growth,
    judge,
    knowledge_text,
    read_rows,
    recorded_errors,
    recorded_text,
)

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "src/makespan/planning/presets"


def main() -> None:
    """Read, fit, write."""
    rows, refused = read_rows(sorted(Path(sys.argv[1]).glob("*.csv")))
    sources = sorted({row.source for row in rows})
    comment = (
        f"Factors fitted to {len(rows)} published rows of {len(sources)} sources by scripts/fit_stacks.py.\n"
        "A factor of a stack is over the shared one, that of a device over those of its terms of computation."
    )
    write_text(knowledge_text(fit_knowledge(rows), comment), PRESETS / "knowledge.toml")
    judged = judge(rows)
    for line in growth(judged, recorded_errors()):
        sys.stdout.write(f"larger: {line}\n")
    write_text(recorded_text(judged), PRESETS / "judged.csv")
    sys.stdout.write(f"{len(rows)} rows, {len(refused)} refused\n")
    # In a process of its own, since this one has read the former presets.
    subprocess.run([sys.executable, ROOT / "scripts/generate.py"], check=True)


if __name__ == "__main__":
    main()
