"""Plan pipelines from the command line: templates from layer times, and a plan from templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from makespan.cli._output import say
from makespan.errors import InputError
from makespan.files import check_target, is_stream, write_text
from makespan.oobleck.planning import (
    Instantiation,
    MemoryLimit,
    ModelProfile,
    PlanChoice,
    cached_templates,
    check_guarantee,
    choose_plan,
    event_time_s,
    make_templates,
    microbatches,
    read_profile,
    read_templates,
    smallest_node_count,
    template_rows,
    template_sizes,
)
from makespan.units import MS

__all__ = ["INSTANTIATE", "PLAN", "output_option", "print_json"]

_FILE = click.Path(path_type=Path)
_MOST_NODES = 10_000  # more take longer than anybody waits
_COUNT = click.IntRange(1, _MOST_NODES)
_LOST = click.IntRange(0, _MOST_NODES)
_BATCH = click.IntRange(1, 1_000_000)

output_option = click.option("--output", type=_FILE, help="File to write instead of the standard output.")


def print_json(values: Any, output: Path | None) -> None:
    """Print plain values as JSON, or write them to a file."""
    text = json.dumps(values, indent=1) + "\n"
    if output is None or is_stream(output):
        say(text.removesuffix("\n"))
    else:
        write_text(text, output)


def _range(text: str) -> range:
    """Read LO:HI or one number."""
    low, colon, high = text.partition(":")
    try:
        sizes = range(int(low), int(high if colon else low) + 1)
    except ValueError:
        sizes = range(0)
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_NODES:
        raise InputError(
            f"--nodes {text!r}; accepted: LO:HI or a number, from 1 to {_MOST_NODES}, for example 3:12"
        )
    return sizes


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_mode = click.option(
    "--mode", default="exact", show_default=True, type=click.Choice(["exact", "dc"]),
    help="The least cost, or the published divide and conquer.",
)  # fmt: skip
_gpus = click.option(
    "--gpus", default=1, show_default=True, metavar="N", type=click.IntRange(1, 64), help="GPUs of each node."
)
_nodes = click.option("--nodes", metavar="LO:HI", help="Nodes of the templates; else --cluster.")
_cluster = _options(
    click.option("--cluster", metavar="N", type=_COUNT, help="Templates for a job that starts on N nodes."),
    click.option("--f", default=1, show_default=True, metavar="N", type=_LOST, help="Nodes lost at once."),
    click.option("--n0", metavar="N", type=_COUNT, help="Least nodes of a pipeline; by memory if not given."),
    click.option(
        "--template-set", default="full", show_default=True, type=click.Choice(["full", "minimal"]),
        help="All sizes that a pipeline may have, or as few as use every number of nodes.",
    ),
)  # fmt: skip
_memory = _options(
    click.option("--device-memory", metavar="BYTES", type=float, help="Of a GPU; no limit if not given."),
    click.option(
        "--state-factor", default=6.0, show_default=True, metavar="X", type=float,
        help="Bytes held for each byte of parameters.",
    ),
)  # fmt: skip


@click.command("plan")
@click.option(
    "--latencies", required=True, type=_FILE, metavar="FILE",
    help="Layer profile, or a list of forward and backward pass together, in ms (JSON).",
)  # fmt: skip
@_nodes
@_cluster
@_gpus
@_mode
@_memory
@click.option("--cache", type=_FILE, metavar="DIR", help="Where templates are kept for the next time.")
@output_option
def PLAN(
    latencies: Path,
    nodes: str | None,
    cluster: int | None,
    f: int,
    n0: int | None,
    template_set: Any,
    gpus: int,
    mode: Any,
    device_memory: float | None,
    state_factor: float,
    cache: Path | None,
    output: Path | None,
) -> None:
    """Find a pipeline template for each number of nodes; prints a list, times in ms.

    Numbers of nodes on which nothing fits are left out, or an error where a job could not use its nodes.
    """
    if output is not None:
        check_target(output)
    if (nodes is None) == (cluster is None):
        raise InputError("accepted: either --nodes LO:HI or --cluster N, one of them")
    profile = read_profile(latencies)
    memory = None if device_memory is None else MemoryLimit(device_memory, state_factor)
    if nodes is not None:
        sizes = _range(nodes)
    else:
        total = cluster or 0
        least = smallest_node_count(profile, memory, total, gpus) if n0 is None else n0
        sizes = template_sizes(
            least, f, total, template_set, most_possible=profile.n_layers // max(gpus.bit_count(), 1)
        )
    if cache is None:
        found = make_templates(profile, sizes, gpus, mode, memory)
    else:
        found = cached_templates(cache, profile, sizes, gpus, mode, memory)
    if cluster is not None and (hole := check_guarantee(found, sizes.start, f, cluster)) is not None:
        raise InputError(f"templates exist for {list(found)} nodes, which cannot use {hole}; see --n0")
    print_json(template_rows(found.values()), output)


@click.command("instantiate")
@click.option(
    "--templates", required=True, type=_FILE, metavar="FILE",
    help="List of templates (JSON); n, S and T alone count as S equal stages.",
)  # fmt: skip
@click.option("--nodes", required=True, metavar="N", type=_COUNT, help="Nodes to use.")
@click.option(
    "--f",
    default=1,
    show_default=True,
    metavar="N",
    type=_LOST,
    help="Nodes lost at once.",
)
@click.option("--microbatches", "count", metavar="N", type=_BATCH, help="Of an iteration; else the next two.")
@click.option("--global-batch-size", metavar="N", type=_BATCH, help="Samples of an iteration.")
@click.option("--micro-batch-size", metavar="N", type=_BATCH, help="Samples of a microbatch.")
@click.option(
    "--batch-mode", default="per_pipeline", show_default=True,
    type=click.Choice(["per_pipeline", "per_template"]),
    help="Whether pipelines of one template have equal numbers of microbatches, as published.",
)  # fmt: skip
@click.option(
    "--estimator", default="1f1b", show_default=True, type=click.Choice(["1f1b", "compat"]),
    help="Time of a pipeline: of its schedule, or as published.",
)  # fmt: skip
@click.option(
    "--profile", type=_FILE, metavar="FILE",
    help="Layer profile of the templates: adds the wait for gradients, and times by a simulated schedule.",
)  # fmt: skip
@click.option(
    "--runners-up",
    default=10,
    show_default=True,
    metavar="N",
    type=click.IntRange(0, 1000),
    help="Further plans.",
)
@output_option
def INSTANTIATE(
    templates: Path,
    nodes: int,
    f: int,
    count: int | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    batch_mode: Any,
    estimator: Any,
    profile: Path | None,
    runners_up: int,
    output: Path | None,
) -> None:
    """Choose the pipelines that use all nodes and take the least time; times in ms."""
    if output is not None:
        check_target(output)
    sizes = global_batch_size, micro_batch_size
    if (count is None) == (sizes == (None, None)) or (None in sizes and count is None):
        raise InputError("accepted: --microbatches, or --global-batch-size and --micro-batch-size")
    n_microbatches = microbatches(sizes[0] or 0, sizes[1] or 0) if count is None else count
    times = None if profile is None else read_profile(profile)
    found = read_templates(templates)
    choice = choose_plan(found, nodes, f, n_microbatches, batch_mode, estimator, times, runners_up)
    print_json(_shown_choice(choice, times), output)


def _shown_choice(choice: PlanChoice, profile: ModelProfile | None) -> dict[str, Any]:
    return {
        "plan": _shown(choice.best, profile),
        "alternatives": [_shown(one, profile) for one in choice.runners_up],
        "counts": {"plans": choice.n_plans, "infeasible": choice.n_infeasible},
    }


def _shown(plan: Instantiation, profile: ModelProfile | None) -> dict[str, Any]:
    pipelines = [
        {
            "n": template.n_nodes,
            "S": template.n_stages,
            "microbatches": count,
            "shown_ms": template.time_s / template.n_stages * count / MS,
        }
        for template, count in zip(plan.templates, plan.n_microbatches, strict=True)
    ]
    shown = {
        "counts": {str(size): count for size, count in plan.counts.items()},
        "n_pipelines": len(pipelines),
        "microbatches": list(plan.n_microbatches),
        "iter_time_ms": plan.iter_time_s / MS,
        "pipelines": pipelines,
    }
    if profile is not None:
        shown["event_time_ms"] = event_time_s(plan.templates, plan.n_microbatches, profile) / MS
    return shown
