"""Command line: what it writes and prints, and one clear message for every mistake."""

from pathlib import Path

import click
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from makespan.cli import main
from makespan.cli.group import VERBS
from makespan.emulator import emulate, load_calibration, trace_points
from makespan.errors import InputError
from makespan.hardware import cluster
from makespan.tables import THROUGHPUT, read_csv, write_csv
from makespan.units import printable
from makespan.workloads import workload


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of canonical tables of two models and two stacks."""
    directory = tmp_path_factory.mktemp("measured")
    where = cluster("a800-64")
    for name in ("vit", "bert", "llama7"):
        spec = workload(name)
        frame = emulate(spec, trace_points(spec, where), where, noise=1.0)
        write_csv(frame.assign(provenance="measured"), directory / f"{name}.csv", THROUGHPUT)
    return directory


def test_help_names_every_verb() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for verb in ("emulate", "explain", "calibrate", "validate"):
        assert verb in result.output
        assert run(verb, "--help").exit_code == 0


def test_emulate_writes_a_canonical_table(tmp_path: Path) -> None:
    result = run("emulate", "--workload", "bert", "--output", str(tmp_path), "--noise", "1", "--seed", "3")
    assert result.exit_code == 0, result.output
    frame = read_csv(tmp_path / "bert.csv", THROUGHPUT)
    assert len(frame) == 132
    assert "emulated, not measured" in result.output


def test_emulate_is_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("emulate", "--workload", "vit", "--output", str(tmp_path / name), "--noise", "1", "--seed", "3")
    assert (tmp_path / "a/vit.csv").read_bytes() == (tmp_path / "b/vit.csv").read_bytes()


def test_emulate_selects_plans_and_placements(tmp_path: Path) -> None:
    run("emulate", "--workload", "bert", "--plans", "ga, zero-dp", "--output", str(tmp_path))
    frame = read_csv(tmp_path / "bert.csv", THROUGHPUT)
    assert set(frame["exec_plan"]) == {"ga", "zero-dp"}
    run("emulate", "--workload", "bert", "--placements", "44,2222", "--output", str(tmp_path))
    assert set(read_csv(tmp_path / "bert.csv", THROUGHPUT)["placement"]) == {"44", "2222"}
    run(
        *("emulate", "--workload", "bert", "--plans", "ga", "--placements", "8888"),
        *("--cpu-threads", "3", "--output", str(tmp_path)),
    )
    frame = read_csv(tmp_path / "bert.csv", THROUGHPUT)
    assert frame[["exec_plan", "placement", "cpu_threads"]].values.tolist() == [["ga", "8888", 3]]


def test_emulate_with_other_threads_changes_offload_only(tmp_path: Path) -> None:
    for threads in ("8", "1"):
        run(
            *("emulate", "--workload", "bert", "--plans", "ga,zero-offload", "--placements", "all"),
            *("--cpu-threads", threads, "--output", str(tmp_path / threads)),
        )
    many, few = (read_csv(tmp_path / threads / "bert.csv", THROUGHPUT) for threads in ("8", "1"))
    changed = few["iter_time_s"] > many["iter_time_s"]
    assert set(many["exec_plan"][changed]) == {"zero-offload"}


def test_emulate_writes_the_published_layout(tmp_path: Path) -> None:
    result = run("emulate", "--workload", "t5_3B", "--layout", "trace", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "t5_3B/placements.csv")
    assert {"exec_plan", "placement", "iter_time", "forward"} <= set(table.columns)
    assert (tmp_path / "t5_3B/placements.meta.json").exists()


def test_explain_prints_terms_that_add_up() -> None:
    result = run("explain", "llama7", "244", "8888", "--exact")
    assert result.exit_code == 0, result.output
    for word in ("forward", "gradient_exchange", "iteration", "states", "event schedule", "L1/without"):
        assert word in result.output


def test_explain_says_why_a_plan_cannot_run() -> None:
    result = run("explain", "llama7", "ga", "8")
    assert result.exit_code == 0
    assert "cannot run: needs 131.2 GB on a device of 80.0 GB" in result.output


def test_explain_warns_about_heads() -> None:
    assert "warning: tp=4 does not divide 25" in run("explain", "gpt2", "141", "4").output


def test_calibrate_prints_and_writes_constants(measured: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.toml"
    result = run("calibrate", str(measured), "--output", str(output), "--source", 'my "own" rows')
    assert result.exit_code == 0, result.output
    for word in ("e_gemm", "at their bound:", "strongly correlated:", "rows behind it"):
        assert word in result.output
    read = load_calibration(str(output))
    assert read.source == "my 'own' rows"
    assert set(read.without) == {"vit-base", "bert-large", "llama2-7b"}
    emulated = run(
        "emulate", "--workload", "vit", "--calibration", str(output), "--output", str(tmp_path / "x")
    )
    assert emulated.exit_code == 0, emulated.output


@pytest.mark.parametrize("level", ["L1a", "L2", "L3"])
def test_calibrate_refines_the_shipped_constants(level: str, measured: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.toml"
    result = run("calibrate", str(measured), "--level", level, "--output", str(output))
    assert result.exit_code == 0, result.output
    assert f"level {level}" in result.output
    explained = run("explain", "vit", "ga", "8", "--calibration", str(output))
    assert f"({level})" in explained.output


def test_calibrate_leaves_a_model_out(measured: Path) -> None:
    everything, without = (
        run("calibrate", str(measured)),
        run("calibrate", str(measured), "--holdout", "vit-base"),
    )
    assert everything.output.split(" rows")[0] != without.output.split(" rows")[0]


def test_validate_prints_the_protocol_table(measured: Path, tmp_path: Path) -> None:
    result = run("validate", str(measured), "--output", str(tmp_path / "table.csv"))
    assert result.exit_code in (0, 1), result.output
    for word in ("LOMO", "LOSO", "L1a", "L2", "5-fold", "LOPO", "must", "aim", "reached"):
        assert word in result.output
    table = pd.read_csv(tmp_path / "table.csv")
    assert result.exit_code == int((table["verdict"] == "missed").any())


def test_rows_that_are_not_measured_are_not_called_so(measured: Path, tmp_path: Path) -> None:
    for path in measured.glob("*.csv"):
        write_csv(read_csv(path, THROUGHPUT).assign(provenance="emulated"), tmp_path / path.name, THROUGHPUT)
    result = run("validate", str(tmp_path))
    assert " emulated, given as measured rows, " in result.output
    result = run("calibrate", str(tmp_path), "--output", str(tmp_path / "own.toml"))
    assert result.exit_code == 0, result.output
    assert "clean rows (emulated, given as measured) of" in (tmp_path / "own.toml").read_text()


def test_a_missed_bound_sets_the_exit_status(measured: Path, tmp_path: Path) -> None:
    for path in measured.glob("*.csv"):
        frame = read_csv(path, THROUGHPUT)
        slower = frame["placement"].str.len() > 1
        frame.loc[slower, "iter_time_s"] *= 3.0
        write_csv(frame, tmp_path / path.name, THROUGHPUT)
    assert run("validate", str(tmp_path)).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "llama8", "ga", "8"), "unknown model or workload 'llama8'"),
        (("explain", "bert", "zero", "8"), "execution plan 'zero' cannot be read"),
        (("explain", "bert", "ga", "8x"), "placement '8x' cannot be read"),
        (("explain", "bert", "244", "8"), "needs PP 2 x TP 4 x DP 4 = 32 GPUs"),
        (("explain", "bert", "ga", "8", "--cluster", "dgx"), "unknown cluster 'dgx'"),
        (("explain", "bert", "ga", "8", "--calibration", "L7"), "unknown calibration 'L7'"),
        (("emulate", "--workload", "bart", "--output", "x"), "Did you mean 'bert'?"),
        (("emulate", "--workload", "bert", "--plans", "244", "--output", "x"), "no point of the trace grid"),
        (("validate", "nowhere"), "nowhere: no such directory"),
        (("calibrate", "."), "neither the published files nor"),
        (
            ("validate", "config.json"),
            "config.json: no such directory; expected one with measured traces, or MODEL",
        ),
        (("emulate", "--noise", "-1", "--output", "x"), "Invalid value for '--noise'"),
        (("emulate", "--noise", "1e9", "--output", "x"), "to 50 (equal points then differ by a factor"),
        (
            ("profile", "--placement", "1000000000000-"),
            "expected a whole number from 1 to 1024 (all of them run",
        ),
        (("profile", "--placement", "nan"), "placement 'nan' cannot be read"),
        (("simulate", "--nodes", "100000"), "100000 nodes; expected 1 to 10000, as policies look at"),
        (("simulate", "--gpus-per-node", "5000"), "5000 GPUs per node; expected 1 to 1024"),
        (("compare", "--jobs", "500000"), "n_jobs is 500000; expected 1 to 100000, as more take hours"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_mistakes_give_one_message_and_status_two(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_holdout_names_the_models(measured: Path) -> None:
    result = run("calibrate", str(measured), "--holdout", "gpt9")
    assert result.exit_code == 2
    assert "the traces have: vit-base, bert-large, llama2-7b" in result.output


def test_a_target_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    result = run("emulate", "--workload", "bert", "--output", str(blocked))
    assert result.exit_code == 2
    assert "file" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("jobs --workload own.csv --output ./own.csv", "own.csv"),
        ("compare --workload own.csv --policies fifo --output own.csv", "own.csv"),
        ("simulate --workload out/events.csv --policy fifo --output out", "out/events.csv"),
        ("live --failures out/live.csv --output out", "out/live.csv"),
        ("validate llama3-8b 64xh100-80 --measured steps.csv --output steps.csv", "steps.csv"),
        ("emulate llama3-8b 64xh100-80 --measured out/llama3-8b.csv --output out", "out/llama3-8b.csv"),
        ("validate measured --output measured/vit.csv", "measured/vit.csv"),
        ("emulate --workload bert --workload vit --output measured", "measured/vit.csv"),
        ("emulate --workload vit --layout trace --output published", "published/vit/placements.csv"),
        ("validate-public rows --output rows/one.csv", "rows/one.csv"),
        ("validate-public rows/one.csv --predictions rows/one.csv", "rows/one.csv"),
        ("validate-public rows --output new.csv --predictions new.csv", "rows/one.csv"),
        ("oobleck plan --latencies layers.json --nodes 1:3 --output layers.json", "layers.json"),
    ],
)
def test_a_result_replaces_no_input(
    command: str, kept: str, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = "n_gpus,layout,step_s\n64,tp4 pp2 mb1,5.5\n"
    content = {
        "measured/vit.csv": (measured / "vit.csv").read_text(encoding="utf-8"),
        "out/live.csv": "time_s,node_id,kind\n1,0,failed\n",
        "out/llama3-8b.csv": steps,
        "steps.csv": steps,
    }
    jobs = run("jobs").stdout
    before = content.get(kept, jobs)
    Path(kept).parent.mkdir(exist_ok=True, parents=True)
    Path(kept).write_text(before, encoding="utf-8")
    result = run(*command.split())
    assert result.exit_code == 2, result.output
    assert "would replace" in result.output
    assert Path(kept).read_text(encoding="utf-8") == before
    assert [path for path in Path().rglob("*") if path.is_file()] == [Path(kept)]


def test_emulated_tables_are_written_again(tmp_path: Path) -> None:
    for layout, name in (("table", "bert.csv"), ("trace", "bert/placements.csv")):
        asked = (
            "emulate",
            "--workload",
            "bert",
            "--plans",
            "ga",
            "--layout",
            layout,
            "--output",
            str(tmp_path),
        )
        run(*asked)
        first = (tmp_path / name).read_bytes()
        assert run(*asked, "--noise", "1").exit_code == 0
        assert (tmp_path / name).read_bytes() != first


ABSURD = ("nan", "inf", "-inf", "-1", "0", "1e400", str(10**12), "9" * 5000, "text", "", "1e9999", "0x10")


def numeric_options() -> list[tuple[str, click.Option]]:
    """Every option of every verb that takes a number."""
    context = click.Context(main)
    commands = {verb: main.get_command(context, verb) for verb in VERBS}
    return [
        (verb, option)
        for verb, command in commands.items()
        for option in (command.params if command else ())
        if isinstance(option, click.Option) and option.type.name.split()[0] in ("integer", "float")
    ]


def test_every_number_has_bounds_with_a_reason() -> None:
    options = numeric_options()
    assert {verb for verb, _ in options} >= {"simulate", "compare", "emulate", "explain", "profile", "live"}
    bare = [(verb, option.opts[0]) for verb, option in options if "expected" not in refusal(option, "text")]
    assert bare == []


def refusal(option: click.Option, value: str) -> str:
    try:
        option.type.convert(value, option, None)
    except click.UsageError as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize(
    ("verb", "option"), numeric_options(), ids=[f"{verb}{one.opts[0]}" for verb, one in numeric_options()]
)
def test_absurd_numbers_are_one_line_before_anything_runs(
    verb: str, option: click.Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = [value for value in ABSURD if refusal(option, value)]
    assert {"nan", "inf", "-inf", "-1", "1e400", "text", "9" * 5000} <= set(refused)
    # Seeds, tokens of a training run and dollars may be as large.
    assert str(10**12) in refused or option.name in ("seed", "tokens", "usd")
    for value in refused:
        result = run(verb, option.opts[-1], value)
        assert result.exit_code == 2, result.output
        assert len(result.output.splitlines()) == 1 and len(result.output) < 200
        assert f"Invalid value for '{option.opts[0]}'" in result.output
    assert list(tmp_path.iterdir()) == []


HEAD = "job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,is_guaranteed,tenant,duration_s\n"
LONG = "a" * 200_000


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        (LONG + "\n", "lacks column(s) job_id"),
        (",".join(f"column{number}" for number in range(20_000)) + "\n", "lacks column(s) job_id"),
        ("[" * 100_000 + "]" * 100_000, "lacks column(s) job_id"),
        (HEAD + f"a,0,{LONG},2,16,ga,2000,true,v,\n", "column 'workload'"),
        (HEAD + f"a,0,roberta,2,16,{LONG},2000,true,v,\n", "column 'plan'"),
        (HEAD + f"a,{'9' * 200_000},roberta,2,16,ga,2000,true,v,\n", "column 'submit_time_s'"),
    ],
    ids=["header", "columns", "brackets", "workload", "plan", "number"],
)
def test_a_message_about_endless_cells_can_be_read(tmp_path: Path, content: str, quoted: str) -> None:
    (tmp_path / "jobs.csv").write_text(content)
    result = run("simulate", "--policy", "fifo", "--workload", str(tmp_path / "jobs.csv"))
    assert result.exit_code == 2 and len(result.output) < 1_500
    assert quoted in result.output and "letters left out" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--policy", LONG), ("simulate", "--workload", LONG), ("simulate", "--delay", LONG),
        ("explain", LONG, "244", "8888"), ("explain", "llama7", LONG, "8888"), ("simulate", f"--{LONG}"),
        ("simulate", "--cluster", LONG), (LONG,),
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)  # fmt: skip
def test_a_message_about_an_endless_argument_can_be_read(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and 20 < len(result.output) < 1_500


def test_many_wrong_options_are_not_all_listed(tmp_path: Path) -> None:
    names = ", ".join(f"policy{number}" for number in range(3_000))
    (tmp_path / "own.yaml").write_text(f"morphling: {{simulation: {{policies: [{names}]}}}}\n")
    result = run("config", "--root", str(Path(__file__).parents[2]), str(tmp_path / "own.yaml"))
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 22 and "and 2,980 more" in result.output


def test_an_endless_name_of_a_job_does_not_fill_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(HEAD + f"{LONG},0,roberta,2,16,ga,2000,true,v,\n")
    result = run("simulate", "--policy", "fifo", "--workload", str(tmp_path / "jobs.csv"))
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 1_000


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -1.0, 1e9])
def test_the_library_refuses_absurd_noise(noise: float) -> None:
    where, spec = cluster("a800-64"), workload("bert")
    with pytest.raises(InputError, match="expected a scale from 0 to 50"):
        emulate(spec, trace_points(spec, where)[:1], where, noise=noise)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 試", "plain é 試"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\r\u202eb\x9b", "a\\r\\u202eb\\x9b"),
        ("two\nlines\t", "two\nlines\\t"),
    ],
)
def test_what_could_steer_a_terminal_is_written_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_verbs_print_in_one_place_only() -> None:
    """Names from files reach a terminal through ``say`` and the views, which escape them."""
    folder = Path(str(main.callback.__code__.co_filename)).parent
    others = [
        path.name
        for path in folder.glob("*.py")
        if path.name != "options.py" and "click.echo" in path.read_text(encoding="utf-8")
    ]
    assert others == []
