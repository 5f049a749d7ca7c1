"""Fit the factors of stacks and devices to tables of published rows, and judge predictions by the protocol.

``python scripts/fit_stacks.py public-rows/`` reads every CSV of the folder, and the rows that were measured
for this project in ``examples/one_gpu``. It writes the presets that ship and the pages that show their
numbers, and names the errors that became larger; weigh them before a commit. The protocol judges published
rows alone; rows of the project are predicted with each model left out in turn.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from makespan.files import write_text
from makespan.planning import (
    Measured,
    fit_knowledge,
    growth,
    judge,
    knowledge_text,
    predictions,
    read_rows,
    recorded_errors,
    recorded_text,
)

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "src/makespan/planning/presets"
OWN = ROOT / "examples/one_gpu"


def main() -> None:
    """Read, fit, write."""
    files = sorted(Path(sys.argv[1]).glob("*.csv")) if len(sys.argv) == 2 else []
    if not files:
        sys.exit("expected a folder with CSV files of published rows as the only argument")
    rows, refused = read_rows(files)
    own, _ = read_rows([OWN / "measured.csv"])
    sources = sorted({row.source for row in rows})
    comment = (
        f"Factors fitted to {len(rows)} published rows of {len(sources)} sources and {len(own)} of "
        "this project\nby scripts/fit_stacks.py. "
        "A factor of a stack is over the shared one, that of a device over those of its terms of computation."
    )
    write_text(knowledge_text(fit_knowledge([*rows, *own]), comment), PRESETS / "knowledge.toml")
    write_text(left_out(rows, own).to_csv(index=False, lineterminator="\n"), OWN / "left_out.csv")
    judged = judge(rows)
    for line in growth(judged, recorded_errors()):
        sys.stdout.write(f"larger: {line}\n")
    write_text(recorded_text(judged), PRESETS / "judged.csv")
    sys.stdout.write(f"{len(rows)} rows, {len(refused)} refused\n")
    # In a process of its own, since this one has read the former presets.
    subprocess.run([sys.executable, ROOT / "scripts/generate.py"], check=True)


def left_out(rows: list[Measured], own: list[Measured]) -> pd.DataFrame:
    """Predict rows of the project from published rows and those of its other models."""
    # The protocol leaves sources out, so that each model is one.
    named = [replace(row, source=row.training.model.name) for row in own]
    found = predictions([*rows, *named]).tail(len(own))
    table = pd.DataFrame(
        {
            "model": [row.training.model.name for row in own],
            "seq": [row.training.seq for row in own],
            "batch": [row.training.global_batch for row in own],
            "layout": [row.layout.text for row in own],
        }
    )
    for name in ("predicted", "low", "high"):
        table[f"{name}_s"] = found[f"{name}_step_s"].round(4).to_numpy()
    return table


if __name__ == "__main__":
    main()
