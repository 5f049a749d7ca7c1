"""``makespan oobleck simulate``: one system on one trace."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from makespan.cli._output import say
from makespan.errors import ConfigError, InputError, unknown_name
from makespan.files import read_yaml
from makespan.oobleck.simulators import (
    FAILURE_TRACES,
    MODES,
    SPOT_TRACES,
    SYSTEMS,
    ModelCosts,
    NodeTrace,
    Outcome,
    Systems,
    generate_failures,
    generate_spot,
    read_trace,
    repairs,
    simulate,
    switches,
    unused_nodes,
)
from makespan.papers.oobleck._settings_simulation import Simulation
from makespan.papers.oobleck._tables import read_published

__all__ = ["simulate_command"]

_CONFIG = Path("config/papers/oobleck.yaml")
_CELLS = Path("config/published/oobleck_throughput.csv")
_GENERATED = (*FAILURE_TRACES, *SPOT_TRACES)
_NUMBERS = {field.name: field.type for field in fields(ModelCosts) if field.type in (int, float)}


def _trace(text: str, seed: int) -> NodeTrace:
    if text in FAILURE_TRACES:
        return generate_failures(text, seed)
    if text in SPOT_TRACES:
        return generate_spot(text, seed)
    if not Path(text).exists():
        raise unknown_name("trace, neither a file nor", text, _GENERATED)
    return read_trace(text, Path(text).stem)


def _configured(path: Path) -> dict[str, Any]:
    """Return the options of simulations in a configuration file, checked."""
    block = read_yaml(path, "the configuration of the paper", ConfigError)
    try:
        return Simulation.model_validate_json(json.dumps(block["oobleck"]["simulation"])).systems()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("oobleck", "simulation", *first["loc"])))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: no block oobleck.simulation; accepted: a file that has it") from None


def _model(model: str, given: tuple[str, ...], configured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs of a model: those of the configuration, and what is given instead."""
    own: dict[str, Any] = {"name": model, "falls_back_on_spot": False}
    own |= next((one for one in configured if one["name"] == model), {})
    for text in given:
        name, _, value = text.partition("=")
        if name not in _NUMBERS:
            raise InputError(f"--cost {text!r}; accepted: NAME=NUMBER with a name of {', '.join(_NUMBERS)}")
        own[name] = _number(text, value, is_whole=_NUMBERS[name] is int)
    missing = sorted(set(_NUMBERS) - set(own))
    if missing:
        known = ", ".join(one["name"] for one in configured)
        raise InputError(
            f"model {model!r} is none of the configuration ({known}); its costs are needed: "
            + " ".join(f"--cost {name}=..." for name in missing)
        )
    return own


def _number(text: str, value: str, *, is_whole: bool) -> float | int:
    try:
        number = int(value) if is_whole else float(value)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf") or (is_whole and number < 1):
        accepted = "a whole number of 1 or more" if is_whole else "a number in s, 0 or more"
        raise InputError(f"--cost {text!r}; accepted: {accepted}")
    return number


def _as_json(found: Outcome, **given: object) -> str:
    times_s = {name: round(time_s, 3) for name, time_s in found.times_s.items()}
    series = [[round(start, 3), round(end, 3), samples] for start, end, samples in found.steps().tolist()]
    return json.dumps(
        given
        | {
            "feasible": found.is_feasible,
            "throughput_samples_per_s": found.throughput_samples_per_s,
            "n_steps": found.n_steps,
            "n_failures": found.n_failures,
            "times_s": times_s,
            "steps": series,
        }
    )


@click.command("simulate")
@click.option(
    "--trace", "trace_name", required=True, metavar="FILE|NAME",
    help=f"Lines of time in ms, add or remove, node; or generated ones: {', '.join(_GENERATED)}.",
)  # fmt: skip
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of a generated trace.")
@click.option("--system", required=True, type=click.Choice(SYSTEMS))
@click.option("--model", required=True, metavar="NAME", help="As in the table of throughput.")
@click.option("--mode", default="fixed", show_default=True, type=click.Choice(MODES))
@click.option(
    "--defects", default="", metavar="D1,D4,...", help="Repaired against compat, left in against fixed."
)
@click.option(
    "--fallback", default="on", show_default=True, type=click.Choice(["on", "off"]),
    help="Varuna: whether a restart loses the steps since the last checkpoint.",
)  # fmt: skip
@click.option("--no-ckpt", is_flag=True, help="Varuna: checkpoints take no time.")
@click.option("--k", type=click.IntRange(1), help="Varuna: steps between checkpoints.")
@click.option(
    "--throughput", "cells", default=_CELLS, show_default=True, type=click.Path(path_type=Path),
    help="Throughput by model, system and nodes; columns as in that file.",
)  # fmt: skip
@click.option(
    "--config", default=_CONFIG, show_default=True, type=click.Path(path_type=Path),
    help="Configuration with the costs of the models.",
)  # fmt: skip
@click.option(
    "--cost", "given", multiple=True, metavar="NAME=NUMBER",
    help=f"A cost of the model instead of the configured one: {', '.join(_NUMBERS)}. May be repeated.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print everything, every step included, as JSON.")
def simulate_command(
    trace_name: str,
    seed: int,
    system: str,
    model: str,
    mode: str,
    defects: str,
    fallback: str,
    no_ckpt: bool,
    k: int | None,
    cells: Path,
    config: Path,
    given: tuple[str, ...],
    is_json: bool,
) -> None:
    """Simulate one system on one trace of nodes; costs are those of the configuration in this directory."""
    configured = _configured(config)
    models = [_model(model, given, configured["models"])]
    systems = Systems(read_published("throughput", cells), models, configured["assumptions"])
    costs = systems.costs(
        system, model, falls_back=fallback == "on", checkpoint_every=k, charges_checkpoints=not no_ckpt
    )
    trace = _trace(trace_name, seed)
    found = simulate(system, trace, costs, repairs(mode, switches(defects)))
    if beyond := unused_nodes(trace, costs):
        say(f"{beyond} nodes idle at the most: throughput is known for no more than the others", err=True)
    if is_json:
        told = {"trace": trace_name, "system": system, "model": model, "mode": mode, "defects": defects}
        say(_as_json(found, **told))
        return
    if not found.is_feasible:
        say(f"{model} does not fit {system}: no throughput on any number of nodes")
        return
    say(
        f"{found.throughput_samples_per_s:.4g} samples/s, {found.n_steps} steps, "
        f"{found.n_failures} nodes lost"
    )
    for name, time_s in found.times_s.items():
        if time_s:
            say(f"  {name:<11}{time_s:>14.3f} s")
