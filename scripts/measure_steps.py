"""Time mini-batches of elastic runs over stock steps: the cases of ``benchmarks/bench_easyscale.py``.

    python scripts/measure_steps.py FILE [REPEATS]

Each case runs REPEATS (3) times, one after the other, on what should be two idle cores. Writes one row per
run of a case into FILE: the case, the gradients [MB], and the ratios that the benchmark prints.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.tables import write_csv

ROOT = Path(__file__).resolve().parents[1]
RATIOS = ["wall_ratio", "cpu_ratio", "loop_ratio", "shards_ratio"]


def measured() -> pd.DataFrame:
    """Run the benchmark once; return a row per case."""
    with temporary_directory("steps") as folder:
        path = folder / "found.json"
        command = ["-m", "pytest", "benchmarks/bench_easyscale.py", "--benchmark-only", "-q"]
        subprocess.run([sys.executable, *command, f"--benchmark-json={path}"], cwd=ROOT, check=True)
        found = json.loads(path.read_text())["benchmarks"]
    rows = [{**each["params"], **each["extra_info"]} for each in found]
    return pd.DataFrame(rows)[["case", "megabytes", *RATIOS]].round(4)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("repeats", type=int, nargs="?", default=3, metavar="REPEATS")
    given = parser.parse_args()
    tables = [measured().assign(repeat=repeat) for repeat in range(given.repeats)]
    write_csv(pd.concat(tables, ignore_index=True), given.file)


if __name__ == "__main__":
    main()
