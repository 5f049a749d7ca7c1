"""What all commands share: `--quiet`, `--json`, the suggestions without arguments, completion."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from public_rows import write_rows

from makespan.cli import main, progress
from makespan.emulator import emulate, trace_points
from makespan.hardware import cluster
from makespan.tables import THROUGHPUT, write_csv
from makespan.workloads import workload

ROOT = Path(__file__).parents[2]
NO_RESULT = {"completion"}  # prints a script
BASE = "--workload naive --policies fifo,sjf"


def leaves(group: click.Group = main, before: str = "") -> dict[str, click.Command]:
    """Return every command that is no group, by its words."""
    context, found = click.Context(group), {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= leaves(command, f"{before}{name} ")
        else:
            found[before + name] = command
    return found


LEAVES = leaves()
# A small run of each command that needs no measured files and trains nothing; {0} is a folder.
QUICK = {
    "simulate": "simulate --policy fifo",
    "compare": f"compare {BASE}",
    "jobs": "jobs --workload naive",
    "policies": "policies",
    "clusters": "clusters",
    "workloads": "workloads",
    "claims": "claims --ledger {0}/claims.csv",
    "report": "report --results {0}/results",
    "plan": "plan llama3-8b 8xh100-80",
    "size": "size llama3-8b --tokens 1e10 --most 8",
    "validate-public": "validate-public {0}/public.csv",
    "emulate": "emulate --workload bert --plans ga --placements 8 --output {0}/emulated",
    "explain": "explain llama7 244 8888",
    "calibrate": "calibrate {0}/measured",
    "validate": "validate {0}/measured",
    "config": f"config --root {ROOT}",
    "oobleck plan": "oobleck plan --latencies {0}/layers.json --nodes 1:3",
    "oobleck instantiate": "oobleck instantiate --templates {0}/templates.json --nodes 3 --microbatches 8",
    "oobleck reconfigure": "oobleck reconfigure --pipelines [[0,1],[2]] --lost [0] --n0 1 "
    "--templates {0}/templates.json",
    "oobleck simulate": "oobleck simulate --trace 6h --system oobleck --model BERT-Large "
    f"--throughput {ROOT}/config/published/oobleck_throughput.csv",
    "slapo show": "slapo show bert",
    "slapo tune": f"slapo tune --grid {ROOT}/config/published/slapo_fig10.csv",
}
# Those that train, or act on a run that trains: their results are tested with the run itself.
TRAINING = {
    "profile", "live", "easyscale run", "easyscale request", "easyscale join", "easyscale drain",
    "easyscale export", "oobleck profile", "oobleck run", "oobleck join", "oobleck drain", "oobleck export",
    "slapo verify",
}  # fmt: skip


def options_of(command: click.Command, name: str) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and name in one.opts]


@pytest.mark.parametrize("name", LEAVES)
def test_quiet_and_json_are_the_same_option_everywhere(name: str) -> None:
    (quiet,) = options_of(LEAVES[name], "--quiet")
    assert quiet.is_flag and quiet.help == "Show no progress, only the result."
    if name in NO_RESULT:
        assert not options_of(LEAVES[name], "--json")
        return
    (as_json,) = options_of(LEAVES[name], "--json")
    assert as_json.is_flag and as_json.help == "Print the result as JSON."
    assert (as_json.name, as_json.flag_value, as_json.default) == ("form", "json", None)


def test_every_command_is_run_here_or_trains() -> None:
    assert set(LEAVES) == {*QUICK, *TRAINING, *NO_RESULT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the commands read."""
    made = tmp_path_factory.mktemp("read")
    (made / "layers.json").write_text("[3, 3, 6, 3]")
    (made / "templates.json").write_text(
        say(f"oobleck plan --latencies {made}/layers.json --nodes 1:3").stdout
    )
    (made / "claims.csv").write_text(
        "paper,artifact,statement,published,reproduced_emulated,tolerance,verdict_emulated,verdict,note\n"
        "Morphling,Table 4,one is faster,1.5,1.6,above 1,holds,holds,\n"
    )
    (made / "results").mkdir()
    write_rows(made / "public.csv")
    where = cluster("a800-64")
    for key in ("vit", "bert", "llama7"):
        spec = workload(key)
        table = emulate(spec, trace_points(spec, where), where, noise=1.0).assign(provenance="measured")
        write_csv(table, made / "measured" / f"{key}.csv", THROUGHPUT)
    return made


def say(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command), catch_exceptions=False)


@pytest.mark.parametrize("name", QUICK)
def test_json_is_alone_on_the_standard_output(name: str, folder: Path) -> None:
    if name == "slapo show":
        pytest.importorskip("torch")
    done = say(f"{QUICK[name].format(folder)} --json --quiet")
    assert done.exit_code == (1 if name == "validate" else 0), done.stderr  # noise misses a bound
    assert json.loads(done.stdout)


# What long commands say of their progress.
TELLING = {
    "calibrate {0}/measured --output {0}/constants.toml": r"\d/\d fits, the fit without llama2-7b",
    "validate {0}/measured": r"\d/\d groups of fits, fits without each model",
    "oobleck profile gpt --output {0}/profile.json": r"\d+/\d+ measurements, timing all layers",
    "slapo verify bert": r"\d/3 parts, bert: comparing outputs and gradients",
}


@pytest.mark.xdist_group("training")
@pytest.mark.parametrize("command", TELLING)
def test_long_commands_tell_their_progress_unless_they_are_quiet(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith(("oobleck", "slapo")):
        pytest.importorskip("torch")
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    told, words = say(command.format(folder)).stderr, TELLING[command]
    assert re.search(rf"^ *[:\d]+  {words}", told, re.MULTILINE), told
    quiet = say(f"{command.format(folder)} --quiet").stderr
    assert not re.search(words.partition(",")[0], quiet), quiet


def test_without_arguments_five_commands_are_suggested_and_each_is_accepted() -> None:
    done = say("")
    assert done.exit_code == 0
    suggested = re.findall(r"^  makespan (.+?)(?:   .*)?$", done.stdout, re.MULTILINE)
    assert len(suggested) == 5
    assert all(len(line) <= 105 for line in done.stdout.splitlines())
    for text in suggested:
        words = shlex.split(text)
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, text
            command = found
        # Rejects arguments that the command does not take.
        command.make_context(text, words, **main.context_settings)


@pytest.mark.parametrize("number", range(3))
def test_suggested_commands_that_need_no_torch_run(number: int) -> None:
    suggested = re.findall(r"^  makespan (.+?)(?:   .*)?$", say("").stdout, re.MULTILINE)
    assert say(suggested[number]).exit_code == 0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program `makespan`, which a shell finds by its path."""
    path = tmp_path / "makespan"
    code = "from makespan.cli import main; main(prog_name='makespan')"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("makespan comp", {"compare", "completion"}),
        ("makespan oobleck dr", {"drain"}),
        ("makespan simulate --policy morphling-l", {"morphling-lookahead"}),
        ("makespan completion ''", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_by_the_printed_script(program: Path, line: str, offered: set[str]) -> None:
    # The function that the script defines is called as bash calls it.
    ask = (
        f'eval "$({program} completion bash)"; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
        f'_makespan_completion {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert offered <= found, done.stderr
    if "''" not in line:
        assert all(name.startswith(line.split()[-1]) for name in found)


@pytest.mark.parametrize(("shell", "registered"), [("zsh", "compdef"), ("fish", "complete")])
def test_scripts_for_other_shells_register_the_command(shell: str, registered: str, tmp_path: Path) -> None:
    script = say(f"completion {shell}").stdout
    assert re.search(rf"^ *{registered} .*makespan", script, re.MULTILINE)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_an_unknown_shell_is_one_message() -> None:
    done = say("completion tcsh")
    assert done.exit_code == 2 and "'bash', 'zsh', 'fish'" in done.stderr


@pytest.mark.xdist_group("cli_training")
def test_commands_that_train_print_json_alone_and_no_progress_when_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    elastic = "--n-logical-workers 1 --micro-batch-size 2 --set data.n_samples=8 --run-dir elastic"
    chain = "gpt --microbatches 2 --set model.n_layers=2"
    commands = {
        f"easyscale run neumf --steps 2 {elastic}": ("steps", 2),
        "easyscale export --run-dir elastic --output elastic.pt": ("output", "elastic.pt"),
        f"oobleck run {chain} --iterations 2 --nodes 1 --f 0 --run-dir chain": ("iterations", 2),
        "oobleck export --run-dir chain --output chain.pt": ("output", "chain.pt"),
        f"oobleck profile {chain} --replicas 1 --repeats 5 --warm-ups 0 --output times.json": (
            "output",
            "times.json",
        ),
        "slapo verify bert": ("is_equal", True),
    }
    for command, (name, value) in commands.items():
        done = say(f"{command} --json --quiet")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)[name] == value
        assert done.stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        "explain llama7 1-1-{0} 8888",
        "explain llama7 244+ga{0} 8888",
        "explain llama7 244 8-{0}",
        "plan llama3-8b {0}xh100-80",
        "plan llama3-8b 8xh100-80 --layout tp{0}",
        "simulate --workload naive --cluster {0}xh100-80",
        "easyscale run bert --steps 1 --mapping 0/{0}",
    ],
)
def test_numbers_of_thousands_of_digits_are_refused_in_a_line(command: str) -> None:
    """Python itself reads no more than 4300 digits."""
    done = CliRunner().invoke(main, command.format("9" * 5000).split())
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        "plan {0} 8xh100-80",
        "oobleck run bert --nodes 2 --n0 2 --f 0 --iterations 1 --run-dir run --set model.hidden={0}",
        "oobleck reconfigure --pipelines {0} --n0 2 --templates templates.json",
        "slapo show bert --set ckpt_ratio={0}",
    ],
)
def test_json_in_a_hundred_thousand_brackets_is_refused_in_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's reader gives up after about a thousand."""
    monkeypatch.chdir(tmp_path)
    Path("templates.json").write_text("[]")
    done = CliRunner().invoke(main, command.format(100_000 * "[").split())
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("Error: ")
