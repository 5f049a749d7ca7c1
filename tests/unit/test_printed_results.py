"""What users read, as files under ``tests/golden``: tables, help texts, a simulation, an explanation."""

import pytest
from click.testing import CliRunner
from golden_files import agree
from toy_cluster import simulate, toy_catalogue, toy_job, toy_nodes

from makespan.cli import main
from makespan.policies import policy

JOBS = [
    toy_job("a", 0.0, n_gpus=2, steps=400),
    toy_job("b", 10.0, workload="gpt2", n_gpus=4, steps=60, is_guaranteed=True),
    toy_job("c", 20.0, workload="t5", n_gpus=8, steps=90, tenant="other"),
    toy_job("d", 20.0, steps=30),
]


@pytest.mark.parametrize("name", ["fifo", "morphling-work"])
def test_events_and_outcomes(name, golden):
    found = simulate(JOBS, toy_nodes(1, 8), toy_catalogue(), policy(name), restart_delay_s=5.0)
    golden(found.events, "events")
    golden(found.outcomes, "outcomes")


def test_explanation_of_a_point(golden):
    done = CliRunner().invoke(main, ["explain", "llama7", "244", "8888"])
    assert done.exit_code == 0, done.output
    golden(done.output)


RECORDED = "# tolerance 1e-03\na 1.0 2\nb\n"


def test_golden_files_allow_for_last_digits_and_for_nothing_else():
    agree("a 1.0005 2\nb\n", RECORDED, "x")
    for text in ("a 1.01 2\nb\n", "a 1.0 3\nb\n", "c 1.0 2\nb\n", "a 1.0 2\n", "a 1.0 2\nb\nc\n"):
        with pytest.raises(AssertionError, match="x"):
            agree(text, RECORDED, "x")
