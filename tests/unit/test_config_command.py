"""The command that checks and prints a configuration."""

import pytest
import yaml
from click.testing import CliRunner

from makespan.cli import main
from makespan.config import check_settings, load_settings


@pytest.fixture
def run(root):
    return lambda *arguments: CliRunner().invoke(main, ["config", "--root", str(root), *map(str, arguments)])


def test_what_is_printed_is_the_merged_configuration(run, root, tmp_path):
    override = tmp_path / "mine.yaml"
    override.write_text("throughput: {emulated: {seed: 7}}\n")
    done = run(override)
    assert done.exit_code == 0
    printed = check_settings(yaml.safe_load(done.output))
    assert printed == load_settings([override], root=root)
    assert printed.throughput.emulated.seed == 7


def test_a_wrong_option_ends_with_its_message(run, tmp_path):
    override = tmp_path / "mine.yaml"
    override.write_text("thruput: 1\n")
    done = run(override)
    assert done.exit_code == 2
    assert "thruput: unknown key" in done.output


def test_the_command_works_in_every_folder_of_a_checkout(root, run, monkeypatch):
    monkeypatch.chdir(root / "docs" / "guides")
    done = CliRunner().invoke(main, ["config"])
    assert done.exit_code == 0
    assert done.output == run().output


def test_outside_a_checkout_the_command_says_where_to_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["config"])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1
    assert f"{tmp_path} is not in a checkout of makespan" in done.output and "--root" in done.output


def test_a_place_without_defaults_is_named(tmp_path):
    done = CliRunner().invoke(main, ["config", "--root", str(tmp_path)])
    assert done.exit_code == 2
    assert "config.yaml: no such file; expected a configuration" in done.output
