"""Facts that stand in several files agree: pins, environments, versions, generated pages."""

import ast
import csv
import itertools
import pydoc
import re
import tomllib
from difflib import unified_diff
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pages import generator

import makespan

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name):
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r")):
            package, version = line.split("==")
            assert canonicalize_name(package) == package, f"{name}: {package}"
            assert package not in found, f"{name}: {package} twice"
            found[package] = Version(version)
    return found


RUN = pins("requirements.txt")
DEV = pins("requirements-dev.txt")
TORCH = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)


def outside(texts, pinned):
    """Return the requirements that no pin meets."""
    wanted = [Requirement(text) for text in texts]
    return [str(one) for one in wanted if pinned.get(canonicalize_name(one.name), "0") not in one.specifier]


def test_every_dependency_and_tool_is_pinned_inside_its_range():
    assert not outside([*PROJECT["dependencies"], *EXTRAS["report"], *EXTRAS["workflow"]], RUN)
    assert not outside([*EXTRAS["dev"], *EXTRAS["docs"]], {**RUN, **DEV})


def test_run_set_and_tools_do_not_overlap_and_torch_is_in_neither():
    assert not set(RUN) & set(DEV)
    assert "torch" not in {**RUN, **DEV}
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


@pytest.mark.xdist_group("alone")
def test_tests_of_a_group_are_told_to_whoever_hands_them_out(request):
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("tests are not handed out in groups")
    assert request.node.nodeid.endswith("@alone")


def test_torch_is_pinned_inside_its_range_without_a_local_tag():
    (requirement,) = (Requirement(text) for text in EXTRAS["torch"])
    assert Version(TORCH) in requirement.specifier
    assert Version(TORCH).local is None


def test_no_set_up_file_adds_an_index():
    for name in ("requirements.txt", "requirements-dev.txt", "Makefile", "pyproject.toml"):
        text = (ROOT / name).read_text()
        assert "--extra-index-url" not in text, name
        assert "+cpu" not in text, name


CONDA_NAMES = {"matplotlib-base": "matplotlib"}


def conda_pins(name):
    environment = yaml.safe_load((ROOT / "envs" / name).read_text())
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    nested = [
        line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]
    ]
    pairs = [entry.split("=", 1) for entry in plain if "=" in entry] + [line.split("==") for line in nested]
    return {CONDA_NAMES.get(package, package): version for package, version in pairs}


def test_environments_hold_every_dependency_of_the_package_at_its_pin():
    texts = [*PROJECT["dependencies"], *EXTRAS["report"]]
    wanted = {canonicalize_name(Requirement(text).name) for text in texts}
    names = {path.name for path in (ROOT / "envs").glob("*.yaml")}
    assert "gpu.yaml" in names
    for name in sorted(names):
        environment = conda_pins(name)
        assert environment.pop("python") in PROJECT["requires-python"]
        assert environment.pop("torch", None) == (TORCH if name == "gpu.yaml" else None)
        found = {package: Version(version) for package, version in environment.items()}
        assert found == {package: RUN[package] for package in wanted}, name


def test_the_default_profile_leaves_the_keys_of_the_slurm_profile_alone():
    default = yaml.safe_load((ROOT / "profiles/default/config.yaml").read_text())
    slurm = yaml.safe_load((ROOT / "slurm/config.yaml").read_text())
    assert not set(default) & set(slurm)
    assert "cores" not in default


def test_every_option_of_the_slurm_profile_is_read_by_the_executor():
    """It declares options that it never looks at; those have no place here."""
    executor = pytest.importorskip("snakemake_executor_plugin_slurm")
    text = "".join(path.read_text() for path in Path(executor.__file__).parent.glob("*.py"))
    read = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    profile = (ROOT / "slurm/config.yaml").read_text()
    options = re.findall(r"^(?:# )?slurm-([a-z-]+):", profile, re.MULTILINE)
    options += re.findall(
        r"^\| `slurm-([a-z-]+)[:`]", (ROOT / "docs/guides/slurm.md").read_text(), re.MULTILINE
    )
    assert "status-command" in options
    assert not [option for option in options if option.replace("-", "_") not in read]
    assert "no_account" not in read, "the executor reads slurm-no-account now; offer it"


def test_min_version_of_snakemake_is_that_of_the_package():
    (text,) = (text for text in EXTRAS["workflow"] if Requirement(text).name == "snakemake")
    stated = re.search(r'min_version\("([\d.]+)"\)', (ROOT / "Snakefile").read_text()).group(1)
    assert f">={stated}" in text


def test_version_changelog_and_citation_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == makespan.__version__
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading.lower() != "unreleased"]
    assert released, "the changelog has no version"
    assert released[0] == makespan.__version__


def test_the_citation_names_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    titles = [reference["title"].split(":")[0] for reference in citation["references"]]
    assert titles == ["Rubick", "EasyScale", "Oobleck", "Slapo"]
    assert all(len(reference["authors"]) >= 5 for reference in citation["references"])
    assert all("doi" in reference or "identifiers" in reference for reference in citation["references"])
    assert citation["license"] == PROJECT["license"]


def test_generated_files_are_what_the_code_says():
    stale = {
        name: list(unified_diff((ROOT / name).read_text().splitlines(), text.splitlines(), n=0, lineterm=""))
        for name, text in generator().generated_files().items()
        if (ROOT / name).read_text() != text
    }
    assert not stale, f"run make generated; lines that differ: {stale}"


def test_the_last_set_of_live_runs_on_record_is_the_one_on_the_page():
    page = (ROOT / "docs" / "papers" / "history-morphling.md").read_text()
    between = page.partition("<!-- live runs -->")[2].partition("<!-- end of live runs -->")[0]
    lines = [line.strip("| ").split(" | ") for line in between.splitlines() if ", seed " in line]
    shown = [
        (
            *re.findall(r"`(.+)`, seed (\d+)", line[0])[0],
            *(float(line[column].split()[0]) for column in (4, 5)),
        )
        for line in lines
    ]
    with (ROOT / "docs" / "papers" / "morphling-live-runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    last = [one for one in runs if one["runs"] == runs[-1]["runs"]]
    errors = ("jct_difference_pct", "undisturbed_jct_difference_pct")
    assert shown == [(one["policy"], one["seed"], *(float(one[name]) for name in errors)) for one in last]


def test_the_changelog_is_one_page_and_the_date_is_that_of_the_citation():
    text = (ROOT / "CHANGELOG.md").read_text()
    released = text.partition(f"## [{makespan.__version__}]")[2]
    assert len(released.splitlines()) <= 100
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released.splitlines()[0].strip(" -") == str(citation["date-released"])


def test_every_new_name_in_the_changelog_exists():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    named = []
    for _, new in rows:
        for name, _, listed in re.findall(r"`(makespan(?:\.\w+)*)(\(.*?\))?`(:(?: `\w+`,?)+)?", new):
            named += [f"{name}.{member}" for member in re.findall(r"`(\w+)`", listed)] or [name]
    assert len(named) > 30
    assert not [name for name in named if pydoc.locate(name) is None]


def test_the_page_about_data_lists_every_data_file():
    page = (ROOT / "docs" / "reference" / "data.md").read_text()
    listed = [
        f"{folder}{name}"
        for folder, table in re.findall(r"^\| file below `(.+?)` .*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
        for cell in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", cell)
    ]
    code = {".py", ".pyc", ".md"}
    kept = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src/makespan", "config")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in code and path.name != "py.typed"
    }
    of_each = [[name for name in kept if fnmatch(name, pattern)] for pattern in listed]
    assert all(of_each), "a pattern without a file"
    assert sorted(itertools.chain(*of_each)) == sorted(kept), "a file that no pattern or several match"


def test_the_page_about_data_states_the_licences_of_the_register():
    page = (ROOT / "docs" / "reference" / "data.md").read_text()
    stated = dict(re.findall(r"^\| `(\w+/[\w-]+)` \| .* \| (.+) \|$", page, re.MULTILINE))
    with (ROOT / "src/makespan/throughput/presets/datasets.csv").open() as file:
        registered = {row["repository"]: row["licence"] for row in csv.DictReader(file)}
    assert stated == registered


def test_every_module_of_the_package_is_on_the_page_of_the_api_and_in_the_list_of_layers():
    modules = {path.stem for path in (ROOT / "src" / "makespan").iterdir() if path.suffix in ("", ".py")}
    public = {name for name in modules if not name.startswith("_")}
    assert public == set(re.findall(r"^\| \d+ \| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert public == set(re.findall(r"^::: makespan\.(\w+)$", page, re.M))


def test_every_page_of_the_documentation_is_in_its_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/.-]+\.md", text)) == pages


def test_the_make_targets_that_the_project_promises_exist():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"reproduce", "test", "lint", "report", "clean", "help"} <= targets
