"""Templates as files that people read, and a folder of those that were made before."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from makespan.errors import InputError
from makespan.files import read_json, read_text, write_json
from makespan.oobleck.planning._cost import REFERENCE, CostRule, MemoryLimit, pipeline_cost
from makespan.oobleck.planning._profile import PICOSECONDS, ModelProfile, as_plain
from makespan.oobleck.planning._search import SearchMode, make_templates
from makespan.oobleck.planning._template import PipelineTemplate, Stage

__all__ = ["cached_templates", "read_templates", "template_rows", "write_templates"]

_VERSION = 1  # of what a search finds and how it is written; another one makes all cached files stale
_MS = PICOSECONDS // 1000
_LARGEST = 100_000  # nodes, stages, layers or GPUs of a template
_EXPECTED = "templates (JSON), as 'makespan oobleck plan' writes them"
_Plain = dict[str, Any]


def template_rows(templates: Iterable[PipelineTemplate]) -> list[_Plain]:
    """Return templates as plain values, times in milliseconds: ``n`` nodes, ``S`` stages, cost ``T``."""
    return [
        {
            "n": one.n_nodes,
            "S": one.n_stages,
            "T": round(one.time_s * PICOSECONDS) / _MS,
            "layers_per_stage": [len(stage.layers) for stage in one.stages],
            "gpus_per_stage": [stage.n_gpus for stage in one.stages],
            "latencies": [round(stage.latency_s * PICOSECONDS) / _MS for stage in one.stages],
        }
        for one in templates
    ]


def write_templates(templates: Mapping[int, PipelineTemplate], path: str | Path) -> None:
    """Write templates as a list with one entry each, by number of nodes, times in milliseconds."""
    rows = template_rows(templates[size] for size in sorted(templates))
    write_json(rows, path, indent=1)


def read_templates(path: str | Path) -> dict[int, PipelineTemplate]:
    """Read templates of `write_templates`, or such with ``n``, ``S`` and ``T`` alone.

    The stages of these are taken to be equal, with a layer each. Raises `InputError`, which names file,
    entry and what is accepted.
    """
    try:
        found = json.loads(read_text(path, _EXPECTED))
    except (ValueError, RecursionError) as wrong:
        raise InputError(f"{path}: cannot be read as {_EXPECTED}: {wrong}") from None
    if not isinstance(found, list) or not found:
        raise InputError(f"{path}: has no list of templates; accepted: {_EXPECTED}")
    return _from_rows(found, str(path))


def _from_rows(rows: list[Any], where: str) -> dict[int, PipelineTemplate]:
    templates: dict[int, PipelineTemplate] = {}
    for index, row in enumerate(rows):
        place = f"{where}: template {index}"
        if not isinstance(row, dict):
            raise InputError(f"{place}: is {row!r}; accepted: an object with n, S and T")
        template = _template(row, place)
        if template.n_nodes in templates:
            raise InputError(f"{place}: is the second for {template.n_nodes} nodes; accepted: one")
        templates[template.n_nodes] = template
    if len({one.n_layers for one in templates.values()}) > 1 and all("latencies" in row for row in rows):
        counts = ", ".join(f"{one.n_layers} on {size} nodes" for size, one in templates.items())
        raise InputError(f"{where}: templates of different models: layers {counts}; accepted: one model")
    return dict(sorted(templates.items()))


def _template(row: _Plain, where: str) -> PipelineTemplate:
    n_nodes, n_stages = (_count(row.get(key), f"{where}: {key}") for key in ("n", "S"))
    cost = _time(row.get("T"), f"{where}: T")
    if "latencies" not in row:
        # The cost of equal stages is a multiple of the latency of one.
        each = round(cost / pipeline_cost([1] * n_stages))
        return _assembled(n_nodes, cost, [1] * n_stages, [1] * n_stages, [each] * n_stages)
    lists = {key: row.get(key) for key in ("layers_per_stage", "gpus_per_stage", "latencies")}
    for key, values in lists.items():
        if not isinstance(values, list) or len(values) != n_stages:
            raise InputError(f"{where}: {key} is {values!r}; accepted: a list of {n_stages} numbers")
    layers, gpus = (
        [_count(value, f"{where}: {key}") for value in row[key]]
        for key in ("layers_per_stage", "gpus_per_stage")
    )
    if sum(gpus) % n_nodes:
        raise InputError(f"{where}: {sum(gpus)} GPUs on {n_nodes} nodes; accepted: as many on each")
    latencies = [_time(value, f"{where}: latencies") for value in row["latencies"]]
    return _assembled(n_nodes, cost, layers, gpus, latencies)


def _assembled(
    n_nodes: int, cost: int, layers: list[int], gpus: list[int], latencies: list[int]
) -> PipelineTemplate:
    bounds = pairwise(accumulate(layers, initial=0))
    stages = (
        Stage(first, end, width, latency / PICOSECONDS)
        for (first, end), width, latency in zip(bounds, gpus, latencies, strict=True)
    )
    return PipelineTemplate(n_nodes, sum(gpus) // n_nodes or 1, tuple(stages), cost / PICOSECONDS)


def _count(found: Any, where: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= _LARGEST:
        raise InputError(f"{where} is {found!r}; accepted: a whole number, 1 to {_LARGEST}")
    return found


def _time(found: Any, where: str) -> int:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        raise InputError(f"{where} is {found!r}; accepted: milliseconds, above 0")
    return round(found * _MS)


def cached_templates(
    folder: str | Path,
    profile: ModelProfile,
    sizes: Iterable[int],
    gpus_per_node: int = 1,
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
    rule: CostRule = REFERENCE,
) -> dict[int, PipelineTemplate]:
    """Return what `make_templates` does, from a folder where it was found before.

    Parameters
    ----------
    folder
        Of the files, one for each profile and way to search, named by a checksum of these.
    profile, sizes, gpus_per_node, mode, memory, rule
        See `make_templates`.
    """
    made_of = {
        "version": _VERSION,
        "profile": as_plain(profile),
        "gpus_per_node": gpus_per_node,
        "mode": mode,
        "memory": None if memory is None else asdict(memory),
        "rule": asdict(rule),
    }
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    path = Path(folder, f"{key[:16]}.json")
    known, tried = _known(path, key)
    wanted = sorted(set(sizes))
    missing = [size for size in wanted if size not in tried]
    if missing:
        known |= make_templates(profile, missing, gpus_per_node, mode, memory, rule)
        rows = template_rows(known[size] for size in sorted(known))
        content = {"key": key, "tried": sorted({*tried, *missing}), "templates": rows, "made_of": made_of}
        write_json(content, path, indent=1)
    return {size: known[size] for size in wanted if size in known}


def _known(path: Path, key: str) -> tuple[dict[int, PipelineTemplate], set[int]]:
    """Return templates of a file and the sizes that were tried; nothing if it is not whole."""
    with suppress(InputError, OSError, KeyError, TypeError):
        found = read_json(path)
        if found is not None and found["key"] == key:
            return _from_rows(found["templates"], str(path)), set(found["tried"])
    return {}, set()
