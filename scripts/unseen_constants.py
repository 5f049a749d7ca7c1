"""Fit the constants that models share without each model in turn, from the published traces.

    python scripts/unseen_constants.py PUBLISHED_DIR

writes ``src/makespan/perf/presets/unseen.toml``; a test fits one of its tables again. Takes some ten seconds.
"""

import argparse
from pathlib import Path

from makespan.files import write_text
from makespan.perf import Environment, TableFit, fit_shared, fit_table, load_environment
from makespan.throughput import PublishedSource
from makespan.workloads import workload

PRESET = Path(__file__).resolve().parents[1] / "src" / "makespan" / "perf" / "presets" / "unseen.toml"
ENVIRONMENT, FORM, THREADS = "a800-64", "extended", 12
HEAD = """# What `neutral` of the environments leaves open, fitted to the clean rows of all models of the
# published Morphling traces (Apache-2.0) but one. Written by `python scripts/unseen_constants.py`; units
# are those of the environments.
"""


def model_of(key: str) -> str:
    """Return the model that a workload trains; workloads of one model leave together."""
    return workload(key).model.key


def fits_of(directory: Path, environment: Environment) -> dict[str, TableFit]:
    """Fit every published workload whose configuration is clear to its sampled rows."""
    source = PublishedSource(directory, default_cpu_threads=THREADS)
    keys = [key for key in source.workload_keys() if workload(key).used_for_calibration]
    return {key: fit_table(source.load(key), key, FORM, environment) for key in keys}


def without(model: str, fits: dict[str, TableFit], environment: Environment) -> dict[str, float]:
    """Return what the rows of the other models give."""
    return fit_shared([fit for key, fit in fits.items() if model_of(key) != model], environment)


def main(directory: Path) -> None:
    """Write the preset."""
    environment = load_environment(ENVIRONMENT)
    fits, lines = fits_of(directory, environment), [HEAD]
    for model in dict.fromkeys(map(model_of, fits)):
        lines.append(f'["{ENVIRONMENT}"."{model}"]')
        found = without(model, fits, environment)
        lines += [f"{name} = {float(f'{value:.4g}')!r}" for name, value in found.items()] + [""]
    write_text("\n".join(lines), PRESET)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("published_dir", type=Path, help="directory with the published files")
    main(parser.parse_args().published_dir)
