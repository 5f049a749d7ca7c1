"""Targets, messages and sources: what can be asked for, and what is said when it cannot be had."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from pages import PAGES, blocks, commands

from makespan.config import load_settings
from makespan.papers import PAPERS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.targets


@pytest.mark.parametrize("target", ["all", "emulated", "morphling", "claims"])
def test_a_named_target_can_be_planned_from_nothing(project, target):
    planned = project.planned(target)
    assert planned["emulate_throughput"] == 1
    assert planned[target] == 1


def test_every_live_run_can_be_planned_and_none_is_made_by_default(project):
    planned = project.planned("live", small=False)
    assert planned == {"run_live": 2 * 5, "join_live": 1, "live": 1}
    assert not {"run_live", "join_live"} & set(project.planned(small=False))


@pytest.mark.parametrize("path", sorted(path.name for path in (ROOT / "config").glob("*-full.yaml")))
def test_a_full_configuration_can_be_planned_as_its_first_lines_say(project, path):
    command = next(line for line in (ROOT / "config" / path).read_text().splitlines() if "snakemake " in line)
    words = command.partition("snakemake ")[2].split()
    assert words[:2] == ["--cores", "all"] and words[-2:] == ["--configfile", f"config/{path}"]
    (project.root / "fetch.yaml").write_text("throughput: {published: {fetch: true}}\n")
    planned = project.planned(*words[2:], "fetch.yaml", small=False)
    assert any(name.startswith(path.removesuffix("full.yaml").replace("-", "_")) for name in planned)


def test_the_default_target_is_all(project):
    assert project.planned()["all"] == 1


def test_any_artifact_can_be_asked_for_by_its_path_and_needs_nothing_else(project):
    planned = project.planned("results/emulated/morphling/figures/fig8.png")
    assert set(planned) == {"emulate_throughput", "morphling_fig8", "draw_figure"}


def test_the_whole_workflow_is_a_small_number_of_jobs(project):
    assert sum(project.planned(small=False).values()) <= 40 * len(PAPERS)


def test_snakemake_looks_for_jobs_when_one_has_ended_and_not_in_between(project):
    names = ("templates", "reconfiguration", "layer_throughput")
    tables = [f"results/emulated/oobleck/{name}.csv" for name in names]
    done = project.built("--cores", "1", "--verbose", *tables)
    assert done.stdout.count("Ready jobs:") == len(tables)


def test_the_published_source_can_be_planned_and_needs_no_emulation(project, published_dir):
    planned = project.planned("published", published=published_dir, small=False)
    assert planned["import_published"] == planned["morphling_import_workloads"] == 1
    assert not {"emulate_throughput", "morphling_generate_workloads"} & set(planned)


def test_the_published_source_is_built_from_the_authors_files(project, published_dir):
    figure = "results/published/morphling/figures/prediction.png"
    project.built("results/published/morphling/claims.csv", figure, published=published_dir)
    assert (project.root / figure).is_file()
    assert set(pd.read_csv(project.root / "results/published/morphling/fig7.csv")["gpus"]) == {32, 16, 4, 1}


def test_without_the_authors_files_the_message_says_what_to_do(project):
    done = project.snakemake("-n", "published")
    assert done.returncode == 1
    assert "the source published needs the authors' files: set throughput.published.directory" in done.stdout
    assert "MAKESPAN_PUBLISHED_DIR" in done.stdout


def test_a_directory_without_the_files_is_named(project, tmp_path):
    done = project.snakemake("-n", "published", published=tmp_path)
    assert done.returncode == 1
    assert f"is not in {tmp_path}" in done.stdout


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("results/emulated/slapo/figures/fig99.pdf", "results/emulated/slapo/figures/fig9.pdf"),
        ("results/emulated/slapo/fig9.pdf", "results/emulated/slapo/figures/fig9.pdf"),
        ("emulated/slapo/figures/fig9.pdf", "results/emulated/slapo/figures/fig9.pdf"),
        ("results/emulated/easyscale/figures/table4.pdf", "results/emulated/morphling/figures/table4.pdf"),
        ("morphlin", "morphling"),
    ],
)
def test_a_target_that_nothing_makes_is_refused_with_near_names(project, target, near):
    done = project.snakemake("-n", target)
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if "unknown target" in line)
    assert line.startswith(f"ConfigError: unknown target {target}; expected ")
    assert near in line.partition("Did you mean ")[2].rstrip("?").split(" or ")
    assert "No rule to produce" not in done.stdout and "Traceback" not in done.stdout


def test_a_published_directory_that_is_not_there_is_one_line(project, tmp_path):
    done = project.snakemake("-n", "published", published=tmp_path / "gone")
    assert done.returncode == 1
    assert (
        f"MissingDataError: {tmp_path / 'gone'}: no such directory; throughput.published.directory or"
        in done.stdout
    )
    assert "InputFunctionException" not in done.stdout and "Traceback" not in done.stdout


def test_a_cache_that_cannot_be_written_ends_no_run(project):
    memory = project.root / ".snakemake" / "makespan-code.json"
    memory.unlink()
    memory.mkdir()
    assert project.planned("results/emulated/slapo/fig9.csv")


@pytest.mark.parametrize("lacking", ["home", "name"])
def test_a_user_without_a_home_or_a_name_plans_as_documented(project, lacking):
    page = (ROOT / "docs/guides/one-artifact.md").read_text()
    (text,) = re.findall(r"^\$ export (.+)$", page, re.MULTILINE)
    given = dict(word.split("=", 1) for word in text.replace("$PWD", str(project.root)).split())
    assert set(given) == {"USER", "XDG_CACHE_HOME"}
    hidden = ("USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME")
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    environment |= {"HOME": "/proc/none", "PYTHONPATH": str(project.root / "src")} | given
    nameless = ["unshare", "--user", "--map-user=12345", "--map-group=12345"] if lacking == "name" else []
    if nameless and subprocess.run([*nameless, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody take another user id")
    command = [*nameless, sys.executable, "-m", "snakemake", "-n", "results/emulated/slapo/fig9.csv"]
    done = subprocess.run(
        command, cwd=project.root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_changed_file_stops_the_import_and_leaves_nothing_behind(project, published_dir, tmp_path):
    copy = tmp_path / "published"
    shutil.copytree(published_dir / "morphling" / "throughput", copy / "morphling" / "throughput")
    trace = copy / "morphling" / "throughput" / "t5_3B" / "placements.csv"
    trace.chmod(0o644)
    trace.write_text(trace.read_text() + "\n")
    done = project.snakemake("--cores", "2", "results/published/morphling/fig8.csv", published=copy)
    assert done.returncode == 1
    assert "ChecksumError" in done.stdout
    assert "sha256" in done.stdout
    assert not list((project.root / "results").rglob("*.csv"))


@pytest.fixture
def fetching(project):
    """Return a copy of the project and the arguments with which it fetches."""
    (project.root / "fetch.yaml").write_text("throughput: {published: {fetch: true}}\n")
    return project, ["--configfile", "config/test/morphling.yaml", "fetch.yaml"]


@pytest.fixture
def traces(root):
    """Return how many traces of nodes the default configuration names, each a file."""
    return len(load_settings([], root).oobleck.published_datasets())


def test_fetching_can_be_planned_where_no_directory_is_given(fetching, traces):
    project, files = fetching
    assert project.planned("published", *files, small=False)["fetch_published"] == 9 + traces


def test_a_file_that_lies_in_place_is_not_fetched_again(fetching, traces, published_dir):
    project, files = fetching
    for folder in ("roberta", "t5_3B"):
        target = project.root / "data/published/morphling/throughput" / folder
        target.mkdir(parents=True)
        shutil.copy2(published_dir / "morphling/throughput" / folder / "placements.csv", target)
    assert project.planned("published", *files, small=False)["fetch_published"] == 7 + traces


def test_without_a_network_fetching_stops_with_what_to_do_and_leaves_nothing(fetching):
    project, files = fetching
    done = project.snakemake("--cores", "1", "published", *files, small=False, proxy="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "OfflineError: data set '" in done.stdout
    assert "set MAKESPAN_PUBLISHED_DIR to a directory that has it" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list((project.root / "data").rglob("*.csv"))


def test_own_measurements_take_the_place_of_the_emulator(small_run, project):
    own = project.root / "own"
    shutil.copytree(small_run.root / "results/emulated/throughput", own)
    (project.root / "own.yaml").write_text("throughput: {sources: [measured], measured: {directory: own}}\n")
    project.built(
        "results/measured/morphling/figures/fig8.png",
        "results/measured/provenance.json",
        "--configfile",
        "config/test/morphling.yaml",
        "own.yaml",
        small=False,
    )
    ours = (project.root / "results/measured/morphling/fig8.csv").read_text()
    assert ours == (small_run.root / "results/emulated/morphling/fig8.csv").read_text()
    record = json.loads((project.root / "results/measured/provenance.json").read_text())
    assert record["iteration_times"] == "emulated, given as measured"


def test_a_file_that_an_option_names_is_an_input(project):
    constants = project.root / "constants.toml"
    shutil.copy(project.root / "src/makespan/emulator/presets/L1.toml", constants)
    (project.root / "own.yaml").write_text("throughput: {emulated: {calibration: constants.toml}}\n")
    asked = [
        "results/emulated/throughput/llama7.csv",
        "--configfile",
        "config/test/morphling.yaml",
        "own.yaml",
    ]
    project.built(*asked, small=False)
    table = (project.root / asked[0]).read_text()
    assert project.planned(*asked, small=False) == {}

    constants.write_text(re.sub("(?m)^t_const = .*", "t_const = 5.0", constants.read_text()))
    project.built(*asked, small=False)
    assert (project.root / asked[0]).read_text() != table

    constants.unlink()
    done = project.snakemake("--cores", "1", *asked, small=False)
    assert done.returncode == 1
    assert "Missing input files" in done.stdout
    assert "constants.toml" in done.stdout


def test_a_model_and_machines_of_a_study_are_inputs(project):
    (project.root / "mine").mkdir()
    for name in ("machines.toml", "mine/config.json"):
        (project.root / name).touch()
    today = "{machines: machines.toml, models: [{workload: llama7, model: mine}]}"
    (project.root / "own.yaml").write_text(f"morphling: {{simulation: {{today: {today}}}}}\n")
    files = ["--configfile", "config/test/morphling.yaml", "own.yaml"]
    done = project.snakemake("-n", "results/emulated/morphling/today.csv", *files, small=False)
    assert "machines.toml, mine/config.json" in done.stdout


def test_without_own_measurements_small_workloads_are_profiled(project):
    planned = project.planned("measured")
    once = ("profile_environment", "morphling_fit_models_measured", "morphling_fig7")
    assert [planned[name] for name in once] == [1, 1, 1]
    assert planned["profile_points"] == 4
    assert not {"import_measured", "emulate_throughput", "morphling_fit_models"} & set(planned)


def test_own_measurements_leave_nothing_to_profile(project):
    (project.root / "own.yaml").write_text("throughput: {measured: {directory: own}}\n")
    own = project.root / "own"
    own.mkdir()
    for name in ("roberta", "llama7", "llama7_b16", "t5_3B"):
        (own / f"{name}.csv").touch()
    files = ["--configfile", "config/test/morphling.yaml", "own.yaml"]
    planned = project.planned("results/measured/morphling/table2.csv", *files, small=False)
    assert set(planned) == {"import_measured", "morphling_fit_models"}


def profile_resources(project, text, target):
    """Return what a dry run says of the resources of a profiling job."""
    (project.root / "profile.yaml").write_text(text)
    done = project.snakemake("-n", target, "--configfile", "profile.yaml", small=False)
    assert done.returncode == 0, done.stdout
    block = (
        done.stdout.partition("rule profile_")[2].partition("rule profile_")[2].partition("Shell command")[0]
    )
    return block.partition("resources: ")[2].splitlines()[0].split(", ")


@pytest.mark.parametrize(
    ("placement", "job", "asked"),
    [
        ("4", "4.0", {"gpu=4", "gpu_model=a800", "mem_mb=8000"}),
        ("44", "44.0", {"gres=gpu:a800:4", "nodes=2"}),
    ],
)
def test_a_point_asks_for_the_gpus_that_it_uses(project, placement, job, asked):
    text = f'throughput: {{measured: {{profile: {{gpu_model: a800, placements: ["{placement}"]}}}}}}\n'
    found = profile_resources(project, text, f"results/measured/profile/tiny-gpt/{job}.json")
    assert asked <= set(found)


@pytest.mark.parametrize("paper", ["easyscale", "morphling"])
def test_training_of_four_processes_asks_for_a_gpu_each(project, paper):
    (project.root / "profile.yaml").write_text("throughput: {measured: {profile: {gpu_model: a800}}}\n")
    target = f"results/measured/{paper}/fig9.csv"
    done = project.snakemake("-n", target, "--configfile", "profile.yaml", small=False)
    assert "gpu=4, gpu_model=a800" in done.stdout, done.stdout
    assert "gpu=" not in project.snakemake("-n", target, small=False).stdout


@pytest.mark.parametrize("paper", PAPERS)
def test_the_target_of_a_paper_builds_no_other(project, paper):
    planned = project.planned(paper)
    own, others = (tuple(f"{one}_" for one in PAPERS if (one == paper) == is_own) for is_own in (True, False))
    assert [rule for rule in planned if rule.startswith(own)]
    assert not [rule for rule in planned if rule.startswith(others)]


def test_without_gpus_a_profiling_job_has_all_cores_to_itself(project):
    done = project.snakemake("-n", "--cores", "5", "results/measured/profile/tiny-gpt/1.0.json")
    assert done.stdout.count("threads: 5") == 2, done.stdout
    assert "gpu=" not in done.stdout


def test_points_can_have_jobs_of_their_own(project):
    (project.root / "profile.yaml").write_text("throughput: {measured: {profile: {points_per_job: 1}}}\n")
    planned = project.planned("measured", "--configfile", "profile.yaml", small=False)
    assert planned["profile_points"] == 28


def test_the_slurm_profile_is_found_from_the_root(project):
    assert project.planned("--profile", "slurm", "results/emulated/morphling/fig8.csv")["morphling_fig8"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thruput: {}\n", "thruput: unknown key; expected cluster, throughput"),
        (
            "throughput: {sources: [emulatd]}\n",
            "throughput.sources[0]: found 'emulatd'; expected 'emulated'",
        ),
        ("cluster: h300-8\n", "cluster: found 'h300-8'; expected one of"),
        ("cluster: a800-8\ncluster: a800-64\n", "wrong.yaml: cannot be read as YAML: line 2: key 'cluster'"),
    ],
)
def test_a_wrong_configuration_stops_the_run_before_any_job(project, text, message):
    (project.root / "wrong.yaml").write_text(text)
    done = project.snakemake("--cores", "1", "--configfile", "wrong.yaml", small=False)
    assert done.returncode == 1
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert not (project.root / "results").exists()


def test_the_linter_of_snakemake_finds_nothing(project):
    done = project.snakemake("--lint", small=False)
    assert done.returncode == 0, done.stdout
    assert "Congratulations" in done.stdout


def test_the_rule_files_have_the_house_layout():
    done = subprocess.run(
        [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "rules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def documented():
    """Return every Snakemake command of the documentation, those that name targets alone as one."""
    console = [one for page in PAGES for one in blocks(page) if one.kind == "console" and one.reason is None]
    found = [words[1:] for block in console for words in commands(block) if words[0] == "snakemake"]
    plain = [words[2:] for words in found if words[:2] == ["--cores", "all"] and "--configfile" not in words]
    targets = sorted({target for words in plain for target in words})
    others = sorted({tuple(words) for words in found if words[2:] not in plain})
    return [("--cores", "all", *targets), *others]


@pytest.mark.parametrize("arguments", documented(), ids=" ".join)
def test_a_command_of_the_documentation_can_be_planned(project, tmp_path, arguments):
    """Files that a page says to save are there; empty ones stand for those of the authors."""
    for block in (block for page in PAGES for block in blocks(page)):
        if block.kind == "yaml" and block.file is not None:
            (project.root / block.file).write_text(block.text)
    for path in pd.read_csv(project.root / "src/makespan/throughput/presets/datasets.csv")["path"]:
        file = tmp_path / "published" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    project.planned(*arguments, published=tmp_path / "published", small=False)
