"""``makespan oobleck reconfigure``: what becomes of pipelines when nodes are lost, leave or join."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from makespan.cli._oobleck_plan import output_option, print_json
from makespan.errors import InputError
from makespan.files import check_target
from makespan.oobleck.planning import (
    Pipeline,
    PipelineTemplate,
    estimated_time_s,
    read_profile,
    read_templates,
)
from makespan.oobleck.reconfiguration import (
    Copy,
    InsufficientNodes,
    Reconfiguration,
    StateLost,
    reconfigure,
    regroup,
)
from makespan.units import MS

__all__ = ["RECONFIGURE"]

_FILE = click.Path(path_type=Path)
_NODES = "[2,3]"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line says of nodes."""

    pipelines: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    drained: tuple[int, ...]
    hosts: dict[int, str] | None


def _json(option: str, text: str | None, example: str) -> Any:
    """Read JSON from an option, None where it is not given."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        raise InputError(f"{option} {text!r}; accepted: JSON, for example {example}") from None


def _nodes(option: str, found: Any, example: str = _NODES) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(node) is int for node in found):
        raise InputError(f"{option} {json.dumps(found)}; accepted: a list of node numbers, like {example}")
    return tuple(found)


def _asked(pipelines: str, lost: str, joined: str, drained: str, hosts: str | None) -> _Asked:
    example = "[[0,1],[2,3,4]]"
    groups = _json("--pipelines", pipelines, example)
    if not isinstance(groups, list):
        raise InputError(f"--pipelines {pipelines!r}; accepted: a list of lists of nodes, like {example}")
    by_node = _json("--hosts", hosts, '{"0":"a","1":"b"}')
    if by_node is not None and not (isinstance(by_node, dict) and all(node.isdecimal() for node in by_node)):
        raise InputError(f'--hosts {hosts!r}; accepted: host by node, like {{"0":"a","1":"b"}}')
    return _Asked(
        tuple(_nodes("--pipelines", group, example) for group in groups),
        _nodes("--lost", _json("--lost", lost, _NODES)),
        _nodes("--joined", _json("--joined", joined, _NODES)),
        _nodes("--drained", _json("--drained", drained, _NODES)),
        None if by_node is None else {int(node): str(host) for node, host in by_node.items()},
    )


def _started(asked: _Asked, templates: Mapping[int, PipelineTemplate]) -> list[Pipeline]:
    """Give every pipeline its template; microbatches before do not matter."""
    missing = sorted({len(nodes) for nodes in asked.pipelines} - set(templates))
    if missing:
        raise InputError(f"pipelines of {missing} nodes; accepted: there are templates for {list(templates)}")
    return [Pipeline(nodes, templates[len(nodes)], 1) for nodes in asked.pipelines]


def _layer_bytes(
    templates: Mapping[int, PipelineTemplate], profile: Path | None, state_factor: float
) -> list[int] | None:
    """Return the state of each layer; equal ones without a profile, None if templates have no layers."""
    counts = {one.n_layers for one in templates.values()}
    if profile is not None:
        return [round(layer.parameter_bytes * state_factor) for layer in read_profile(profile).layers]
    return [1] * counts.pop() if len(counts) == 1 else None


@click.command("reconfigure")
@click.option("--pipelines", required=True, metavar="JSON", help="Nodes of each pipeline: [[0,1],[2,3,4]].")
@click.option("--lost", default="[]", metavar="JSON", help="Nodes that are gone, with their state.")
@click.option("--joined", default="[]", metavar="JSON", help="Nodes that are new.")
@click.option("--drained", default="[]", metavar="JSON", help="Nodes that leave and can still send.")
@click.option(
    "--templates", required=True, type=_FILE, metavar="FILE", help="Templates (JSON), of the verb plan."
)
@click.option("--n0", required=True, metavar="N", type=click.IntRange(1), help="Least nodes of a pipeline.")
@click.option(
    "--f", default=1, show_default=True, metavar="N", type=click.IntRange(0), help="Nodes lost at once."
)
@click.option(
    "--microbatches",
    metavar="N",
    type=click.IntRange(1),
    help="Of an iteration; 4 for each node if not given.",
)
@click.option("--hosts", metavar="JSON", help='Machine of each node: {"0":"a","1":"b"}.')
@click.option(
    "--policy", default="stop", show_default=True, type=click.Choice(["stop", "degrade"]),
    help="Below (f + 1) n0 nodes: stop, or go on with a smaller f.",
)  # fmt: skip
@click.option(
    "--profile", type=_FILE, metavar="FILE", help="Layer profile; without it layers are of equal size."
)
@click.option(
    "--state-factor", default=3.0, show_default=True, metavar="X", type=click.FloatRange(0),
    help="Bytes sent for each byte of parameters.",
)  # fmt: skip
@output_option
def RECONFIGURE(
    pipelines: str,
    lost: str,
    joined: str,
    drained: str,
    templates: Path,
    n0: int,
    f: int,
    microbatches: int | None,
    hosts: str | None,
    policy: Any,
    profile: Path | None,
    state_factor: float,
    output: Path | None,
) -> None:
    """Find the pipelines that go on, and which state must be sent where; prints JSON, times in ms.

    Where no node has the state of a layer, "outcome" is "state-lost" and the pipelines are those that a
    checkpoint would be loaded into; below (f + 1) n0 nodes it is "insufficient-nodes".
    """
    if output is not None:
        check_target(output)
    asked = _asked(pipelines, lost, joined, drained, hosts)
    found = read_templates(templates)
    layer_bytes = _layer_bytes(found, profile, state_factor)
    n_nodes = sum(map(len, asked.pipelines)) + len(asked.joined)
    n_microbatches = 4 * n_nodes if microbatches is None else microbatches
    told: dict[str, Any]
    try:
        change = reconfigure(
            _started(asked, found), asked.lost, asked.joined, found, f, n0, n_microbatches,
            layer_bytes=layer_bytes, drained=asked.drained, hosts=asked.hosts, policy=policy,
        )  # fmt: skip
    except StateLost as error:
        told = {"outcome": "state-lost", "lost_layers": error.layers, **_regrouped(asked, n0)}
    except InsufficientNodes as error:
        told = {"outcome": "insufficient-nodes", "n_nodes": error.n_nodes, "n_needed": error.n_needed}
    else:
        copies = None if layer_bytes is None else change.copies
        told = _shown(change, copies, has_bytes=profile is not None)
    print_json(told, output)


def _regrouped(asked: _Asked, n0: int) -> dict[str, Any]:
    """Return who would train with whom, whatever they hold; nobody if too few are left."""
    try:
        found = regroup(asked.pipelines, {*asked.lost, *asked.drained}, n0)
    except InsufficientNodes:
        return {"pipelines": [], "kinds": []}
    return {"pipelines": found.groups, "kinds": found.kinds}


def _shown(change: Reconfiguration, copies: Sequence[Copy] | None, *, has_bytes: bool) -> dict[str, Any]:
    """Return plain values; bytes are null where nothing says how large layers are."""
    plan = change.plan.pipelines
    shares = [one.n_microbatches for one in plan]
    return {
        "outcome": "go-on",
        "action": change.action,
        "kinds": change.kinds,
        "pipelines": [one.nodes for one in plan],
        "microbatches": shares,
        "layers_per_stage": [[len(stage.layers) for stage in one.template.stages] for one in plan],
        "iter_time_ms": estimated_time_s([one.template for one in plan], shares, "1f1b") / MS,
        "f": change.f,
        "waiting": change.waiting,
        "layers_on_one_host": change.exposed,
        "copies": None if copies is None else [_copy(one, has_bytes=has_bytes) for one in copies],
        "copied_bytes": change.copies_bytes if has_bytes else None,
    }


def _copy(one: Copy, *, has_bytes: bool) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "slot": one.slot,
        "src": one.src.node,
        "dst": one.dst.node,
        "src_gpu": one.src.number,
        "dst_gpu": one.dst.number,
        "bytes": one.n_bytes if has_bytes else None,
    }
