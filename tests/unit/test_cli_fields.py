"""Options that are made from the fields of a dataclass."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from makespan.cli.fields import field_options
from makespan.easyscale.job import ElasticJob, RunOptions
from makespan.oobleck.job import ChainJob
from makespan.oobleck.trainer import LiveOptions


@dataclass(frozen=True)
class Sizes:
    """Sizes of a thing.

    Parameters
    ----------
    n_parts
        Number of ``parts``. Never seen.
    limit_s
        Longest time [s]; 0 for none, over
        two lines.
    mode
        How to cut.
    packed
        Pack the parts.
    label
        Text on the thing.
    hidden
        Set by programs alone.

    Notes
    -----
    label
        Not the entry.
    """

    n_parts: int
    limit_s: float = 1.5
    mode: Literal["even", "greedy"] = "even"
    packed: bool = True
    label: str | None = None
    hidden: object = None


def answer(*arguments: str) -> tuple[str, dict[str, Any]]:
    """Return the output of a command with the options of `Sizes`, and what it received."""
    received: dict[str, Any] = {}

    @click.command()
    @field_options(Sizes, without={"hidden"}, names={"n_parts": "parts"})
    def command(**values: Any) -> None:
        received.update(values)

    return CliRunner().invoke(command, arguments).output, received


def test_values_have_the_types_and_defaults_of_the_fields() -> None:
    defaults = {"limit_s": 1.5, "mode": "even", "packed": True, "label": None}
    assert answer("--parts", "3")[1] == {"n_parts": 3} | defaults
    given = ("--limit-s", "2", "--mode", "greedy", "--no-packed", "--label", "a")
    changed = {"limit_s": 2.0, "mode": "greedy", "packed": False, "label": "a"}
    assert answer("--parts", "3", *given)[1] == {"n_parts": 3} | changed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--parts'"),
        (("--parts", "x"), "'x' is not a valid integer"),
        (("--parts", "1", "--mode", "odd"), "'odd' is not one of 'even', 'greedy'"),
    ],
)
def test_a_field_without_a_default_is_required_and_values_are_checked(
    arguments: tuple[str, ...], message: str
) -> None:
    output, received = answer(*arguments)
    assert message in output
    assert not received


def test_help_is_the_first_sentence_of_the_entry() -> None:
    words = " ".join(answer("--help")[0].split())
    assert "--parts NUMBER Number of parts. [required]" in words
    assert "--limit-s NUMBER Longest time [s]; 0 for none, over two lines. [default: 1.5]" in words
    assert "--mode [even|greedy] How to cut. [default: even]" in words
    assert "--packed / --no-packed Pack the parts. [default: packed]" in words
    assert "--label NAME Text on the thing. --help" in words
    assert "hidden" not in words


@pytest.mark.parametrize("options", [ElasticJob, RunOptions, ChainJob, LiveOptions])
def test_every_field_of_the_options_of_training_is_documented(options: type[Any]) -> None:
    documented = (options.__doc__ or "").splitlines()
    assert {field.name for field in fields(options)} <= {line.strip() for line in documented}
