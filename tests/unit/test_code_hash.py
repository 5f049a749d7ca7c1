"""The code that a rule hashes is the code that its script uses."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from makespan.config import check_settings, code_hash, used_code
from makespan.papers import PAPERS, paper_named
from makespan.papers.slapo.tuning import Tuning

pytestmark = pytest.mark.xdist_group("hashes of code")

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in sorted((ROOT / "workflow" / "scripts").glob("*.py"))}
CODE = ROOT / "src" / "makespan" / "config" / "code.py"

TOY = {
    "__init__.py": "",
    "face/__init__.py": "from toy.face._one import ONE, f\nfrom toy.face._two import TWO\n",
    "face/_one.py": "from toy.low import LEAF, OTHER\n\nONE = LEAF\nSPARE = OTHER\n\ndef f(): return 1\n",
    "face/_two.py": "TWO = 2\n",
    "low.py": "LEAF = 1\nOTHER = 2\n",
    "worker.py": "from toy.face import TWO\n\nprint(TWO)\n",
    "launch.py": 'def start():\n    return ["python", "-m", "toy.worker"]\n',
    "lazy.py": "def late():\n    from toy.face import TWO\n    return TWO\n",
    "registry.py": 'MODULES = {"one": "toy.face._one", "two": "toy.face._two"}\n\ndef find(n): MODULES[n]\n',
    "data/__init__.py": "",
    "data/presets/a.toml": "a = 1\n",
    "data/_read.py": '_PACKAGE = "toy.data"\n\ndef read():\n    return _PACKAGE\n',
}


@pytest.fixture
def toy(tmp_path):
    """Return a function that writes a toy package and a script, and lists what the script uses."""
    for name, text in {**TOY, "config/code.py": CODE.read_text()}.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def used(script, *more, edit=None, **options):
        if edit:
            name, old, new = edit
            path = tmp_path / "toy" / name
            path.write_text(path.read_text().replace(old, new) if old else path.read_text() + new)
        (tmp_path / "script.py").write_text(script)
        code = fresh(tmp_path / "toy" / "config" / "code.py")
        return code.used_code(tmp_path / "script.py", *more, **options)

    return used


def fresh(path):
    """Return the module at a path, imported anew."""
    spec = importlib.util.spec_from_file_location("code_of_a_copy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(lines):
    return {line.split()[0] for line in lines} - {"script.py"}


ALL = {"face/_one.py", "face/_two.py", "low.py"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("from toy.face import TWO\nprint(TWO)\n", {"face/_two.py"}),
        ("from toy.face import ONE\nprint(ONE)\n", {"face/_one.py", "low.py"}),
        ("from toy.face import f\nf()\n", {"face/_one.py"}),
        ("from toy import face\nprint(face.TWO)\n", {"face/_two.py"}),
        ("from toy import face\nprint(face)\n", {"face/__init__.py", *ALL}),
        ("from toy.launch import start\nstart()\n", {"launch.py", "worker.py", "face/_two.py"}),
        ("from toy.lazy import late\nlate()\n", {"lazy.py", "face/_two.py"}),
        ("from toy.data._read import read\nread()\n", {"data/_read.py", "data/presets/a.toml"}),
        ("from toy.registry import find\nfind('one')\n", {"registry.py", *ALL}),
        ("import json\nprint(json)\n", set()),
    ],
)
def test_imports_are_followed_to_what_defines_a_name_and_to_what_strings_name(toy, script, expected):
    assert files(toy(script)) == expected


def test_what_a_rule_names_is_followed_and_a_registry_gives_the_chosen_entries(toy):
    assert files(toy("", "toy.face:TWO")) == {"face/_two.py"}
    found = files(toy("from toy.registry import find\nfind('two')\n", chosen=["two"]))
    assert found == {"registry.py", "face/_two.py"}


USES_ONE = "from toy.face import ONE\nprint(ONE)\n"


@pytest.mark.parametrize(
    ("edit", "counts"),
    [
        (("low.py", "LEAF = 1", "LEAF = 3"), True),
        (("low.py", "OTHER = 2", "OTHER = 3"), False),
        (("low.py", "", 'MORE = 4\n"""Four."""\n'), False),
        (("low.py", "", "# why\n"), True),
        (("low.py", "", "print(OTHER)\n"), True),
        (("face/_one.py", "return 1", "return 2"), False),
        (("face/_one.py", "def f", "@register\ndef f"), True),
        (("face/_one.py", "LEAF, OTHER", "OTHER as LEAF, LEAF as OTHER"), True),
        (("face/_two.py", "2", "3"), False),
        (("face/__init__.py", "", "from toy.low import OTHER\n"), False),
    ],
)
def test_an_edit_counts_where_it_is_reached_and_a_new_constant_beside_others_does_not(toy, edit, counts):
    assert (toy(USES_ONE) != toy(USES_ONE, edit=edit)) is counts


def test_touching_a_file_changes_no_hash_and_what_was_read_is_remembered(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".snakemake").mkdir()
    before = toy(USES_ONE)
    memory = tmp_path / ".snakemake" / "makespan-code.json"
    known = json.loads(memory.read_text())
    assert str(tmp_path / "toy" / "low.py") in known
    (tmp_path / "toy" / "low.py").touch()
    assert toy(USES_ONE) == before
    memory.write_text("not JSON")
    assert toy(USES_ONE) == before


def test_hashes_of_earlier_runs_count_while_every_file_is_as_it_was(toy, tmp_path):
    toy(USES_ONE)
    (tmp_path / ".snakemake").mkdir()
    memory = tmp_path / ".snakemake" / "makespan-hashes.json"
    ask = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('code_of_a_copy', 'toy/config/code.py')\n"
        "code = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(code)\n"
        "print(code.code_hash('script.py', *sys.argv[1:]))\n"
    )

    def hashed(*more):
        command = [sys.executable, "-c", ask, *more]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    first, more = hashed(), hashed("toy.worker")
    assert first != more
    assert sorted(json.loads(memory.read_text())["hashes"].values()) == sorted([first, more])
    memory.write_text(memory.read_text().replace(first, "kept"))
    assert (hashed(), hashed("toy.worker")) == ("kept", more)
    (tmp_path / "toy" / "low.py").write_text("LEAF = 3\nOTHER = 2\n")
    edited = hashed()
    assert edited not in ("kept", first)
    (tmp_path / "script.py").write_text("\n" + USES_ONE.replace("ONE", "TWO"))
    other = hashed()
    assert other not in ("kept", first, edited)
    memory.write_text("not JSON")
    assert hashed() == other


# --- the scripts of the workflow ------------------------------------------------------------


def test_every_rule_but_the_download_hashes_the_script_that_it_runs():
    rules = {}
    for path in sorted((ROOT / "rules").glob("*.smk")):
        for name, body in re.findall(r"^ *rule (\w+):\n(.*?)(?=^ *rule |\Z)", path.read_text(), re.S | re.M):
            script = re.search(r"scripts/(\w+)\.py", body)
            hashed = re.search(r'code=(?:lambda wildcards: )?code_hash\(\s*"(\w+)"', body)
            rules[name] = (script and script.group(1), hashed and hashed.group(1))
    assert len(rules) > 10
    assert {name for name, (script, hashed) in rules.items() if script != hashed} == {"fetch_published"}


def experiment_code():
    """Return what the rules of all experiments and figures hash, by the name of the rule."""
    settings = check_settings({})
    found = {}
    for paper, options in settings.papers().items():
        for name, one in options.experiments(settings).items():
            kind = f"{type(one).__module__}:{type(one).__name__}"
            found[f"{paper}_{name}"] = ("run_experiment", kind), {"chosen": one.policies_run()}
        for name, figure in paper_named(paper).figures().items():
            found[f"{paper}/{name}"] = ("draw_figure", figure.function(paper)), {}
    return found | {name: ((name,), {}) for name in SCRIPTS if name not in ("run_experiment", "draw_figure")}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function that edits a copy of the package and names the rules whose hash changes."""
    copy = tmp_path_factory.mktemp("src") / "makespan"
    shutil.copytree(CODE.parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / ".snakemake").mkdir()  # where what was read of a file is remembered until it changes
    rules = experiment_code()

    def hashes():
        code = fresh(copy / "config" / "code.py")
        with chdir(copy.parent):
            return {
                name: code.code_hash(SCRIPTS[script], *more, **options)
                for name, ((script, *more), options) in rules.items()
            }

    before = hashes()

    def change(name, old, new):
        path = copy / name
        text = path.read_text() if path.exists() else ""
        assert old in text
        path.write_text(text.replace(old, new, 1) if old else text + new)
        after = hashes()
        path.write_text(text)
        return {rule for rule in rules if before[rule] != after[rule]}

    return change


MEASURED = {f"{paper}_{one.name}" for paper in PAPERS for one in paper_named(paper).EXPERIMENTS if one.trains}


def test_editing_the_pipeline_concerns_the_rules_that_train_and_no_other(changed):
    found = changed("training/engine.py", "", "\n# changed\n")
    assert {"morphling_fig9", "profile_points"} <= found
    assert all(name in MEASURED or name.startswith(("run_live", "profile_")) for name in found)


def test_a_schema_or_a_policy_that_nobody_uses_concerns_nobody(changed):
    assert (
        changed("tables/catalogue.py", "", '\nNEW = table_schema("new", ("a", "int", "1", "a"))\n') == set()
    )
    entry = '_MODULES = {\n    "mine": "makespan.policies.queues",'
    assert changed("policies/base.py", "_MODULES = {", entry) <= {"run_live"}
    found = changed("policies/gavel.py", "", "\n# changed\n")
    assert "morphling_table4" in found and "easyscale_simulate" not in found


def test_editing_one_experiment_concerns_its_own_rule(changed):
    found = changed("papers/oobleck/planning.py", "self.random_seeds", "self.random_seeds + 0")
    assert found == {"oobleck_templates"}


def test_editing_the_performance_model_concerns_fits_and_no_emulation(changed):
    found = changed("perf/forms.py", "", "\n# changed\n")
    assert "morphling_fit_models" in found
    assert not found & {"emulate_throughput", "morphling_fig8", "morphling_generate_workloads"}


def test_editing_a_preset_concerns_what_reads_it(changed):
    found = changed("emulator/presets/L1.toml", "", "\n# changed\n")
    assert "emulate_throughput" in found
    assert not found & {"morphling_fit_models", "morphling/fig7", "oobleck_spot"}


USED = """
import ast, sys
from pathlib import Path
from types import SimpleNamespace
import makespan, makespan.papers.slapo
seen, home = set(), str(Path(makespan.__file__).parent)
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(home) and not code.co_name.startswith("<"):
        seen.add(str(Path(code.co_filename).relative_to(home)))
class Inputs(dict):
    __getattr__ = dict.get
class Outputs(list):
    tables = property(list)
tree = ast.parse(Path(sys.argv[1]).read_text())
imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
body = [node for node in tree.body if node not in imports]
names = {"snakemake": SimpleNamespace(log=["job.log"], threads=1, {arguments})}
exec(compile(ast.Module(imports, []), "imports", "exec"), names)
sys.setprofile(note)
exec(compile(ast.Module(body, []), "body", "exec"), names)
sys.setprofile(None)
print("\\n".join(sorted(seen)))
"""
FIG10 = str(ROOT / "config/published/slapo_fig10.csv")
RUNS = {
    ("emulate_throughput",): (
        'output=Outputs(["t.csv"]), params=SimpleNamespace(workloads=["roberta"], cluster="a800-64", '
        'options={"calibration": "L1", "seed": 0, "noise": 1.0})'
    ),
    ("run_experiment", "makespan.papers.slapo.tuning:Tuning"): (
        f'input=Inputs(times=[], published_fig10={FIG10!r}), wildcards=SimpleNamespace(source="published"), '
        f"output=Outputs({[f'{name}.csv' for name in Tuning.tables]}), "
        'params=SimpleNamespace(paper="slapo", experiment="makespan.papers.slapo.tuning:Tuning", '
        f"options=OPTIONS, workloads=[], tables={[*Tuning.tables]}, published=None)"
    ),
}


def test_every_function_that_a_script_calls_is_in_a_file_that_counts(tmp_path):
    settings = check_settings({"slapo": {"fig10_grids": {"grids": 1}, "fig10": {"starts": 1}}})
    options = settings.slapo.experiments(settings)["tuning"].to_json()
    for (script, *more), arguments in RUNS.items():
        code = USED.replace("{arguments}", arguments.replace("OPTIONS", repr(options)))
        done = subprocess.run(
            [sys.executable, "-c", code, SCRIPTS[script]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        called = set(done.stdout.split())
        assert len(called) > 5
        assert called <= files(used_code(SCRIPTS[script], *more)), script


def test_the_hash_is_the_same_in_every_process():
    command = "from makespan.config import code_hash; import sys; print(code_hash(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", command, SCRIPTS["emulate_throughput"]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == code_hash(SCRIPTS["emulate_throughput"])
