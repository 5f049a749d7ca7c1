"""Print the goals in benchmarks/targets.csv beside what lies under results/."""

import sys
from pathlib import Path

from makespan.claims import measured_targets, read_targets

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print one line a goal."""
    found = measured_targets(read_targets(ROOT / "benchmarks" / "targets.csv"), ROOT / "results")
    sys.stdout.write(found.to_string(index=False, float_format="{:.4g}".format, na_rep="-") + "\n")


if __name__ == "__main__":
    main()
