"""The configuration: what is accepted, what each wrong key is told, where the defaults go."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from makespan.config import (
    check_settings,
    json_schema,
    load_settings,
    merge,
    provenance,
    published_directory,
    settings_hash,
    settings_model,
)
from makespan.config.settings import LiveRuns, shipped_calibrations, shipped_live_workloads
from makespan.emulator import calibration_names
from makespan.errors import ConfigError, MissingDataError
from makespan.live import live_workloads
from makespan.policies import base as _registry

ROOT = Path(__file__).parents[2]
TEST_FILES = sorted((ROOT / "config" / "test").glob("*.yaml"))


@pytest.fixture(scope="module")
def defaults():
    return load_settings(root=ROOT).model_dump(mode="json")


def changed(values, key, value):
    """Return values with one option, given by its dotted key, set."""
    nested = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return merge(values, nested)


def test_the_defaults_are_accepted_and_build_the_sources_that_need_no_files():
    assert load_settings(root=ROOT).throughput.sources == ("emulated", "measured")


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_the_small_configurations_are_accepted(path):
    paper = getattr(load_settings([path], root=ROOT), path.stem)
    assert paper != getattr(load_settings(root=ROOT), path.stem)


def test_later_files_win_group_by_group_and_lists_are_replaced(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("throughput: {sources: [published, measured], emulated: {seed: 3}}")
    two.write_text("throughput: {sources: [measured]}")
    settings = load_settings([one, two], root=ROOT)
    assert settings.throughput.sources == ("measured",)
    assert settings.throughput.emulated.seed == 3
    assert settings.throughput.emulated.noise == 1.0


WRONG = [
    (
        "throughput.emulated.sed",
        1,
        "throughput.emulated.sed: unknown key; expected ",
        "Did you mean 'seed'?",
    ),
    ("thruput", {}, "thruput: unknown key; expected cluster, throughput", "Did you mean 'throughput'?"),
    (
        "throughput.sources",
        ["emulatd"],
        "throughput.sources[0]: found 'emulatd'",
        "'emulated', 'published' or",
    ),
    ("throughput.sources", [], "throughput.sources: found []", "a list of at least 1"),
    ("throughput.sources", ["emulated"] * 2, "throughput.sources: found ['emulated', 'emulated']", "once"),
    ("throughput.sources", "emulated", "throughput.sources: found 'emulated'", "expected a list"),
    ("throughput.emulated.seed", -1, "throughput.emulated.seed: found -1", "at least 0"),
    ("throughput.emulated.seed", 1.5, "throughput.emulated.seed: found 1.5", "a whole number"),
    ("throughput.emulated.seed", "one", "throughput.emulated.seed: found 'one'", "a whole number"),
    ("throughput.emulated.seed", True, "throughput.emulated.seed: found True", "a whole number"),
    ("throughput.emulated.noise", float("nan"), "throughput.emulated.noise: found nan", "a finite number"),
    ("throughput.emulated.noise", "loud", "throughput.emulated.noise: found 'loud'", "a number"),
    ("throughput.emulated.calibration", "L9", "throughput.emulated.calibration: found 'L9'", "one of L0, L1"),
    ("throughput.published.fetch", "yes", "throughput.published.fetch: found 'yes'", "true or false"),
    ("throughput.published.register_file", "", "throughput.published.register_file: found ''", "not empty"),
    ("throughput", 3, "throughput: found 3", "a group of options"),
    ("cluster", "a801-64", "cluster: found 'a801-64'", "a800-64"),
    ("cluster", None, "cluster: found None", "a text"),
    (
        "performance_model.forms",
        ["published"],
        "performance_model: found",
        "experiment_form among the fitted",
    ),
    ("performance_model.forms", ["extended"] * 2, "performance_model.forms: found", "each entry once"),
    (
        "morphling.simulation.lists.seeds.generated",
        [1, 2, 1],
        "morphling.simulation.lists.seeds.generated: found [1, 2, 1]",
        "each entry once",
    ),
    (
        "morphling.simulation.restart_delays_s",
        [260, 260.0],
        "morphling.simulation.restart_delays_s: found [260, 260.0]",
        "each entry once",
    ),
    (
        "morphling.simulation.scale.sizes",
        [{"jobs": 1, "gpus": 1}] * 2,
        "morphling.simulation.scale.sizes: found [",
        "each entry once",
    ),
    (
        "morphling.simulation.failures.per_day",
        [1, -1],
        "morphling.simulation.failures.per_day[1]: found -1",
        "more than 0",
    ),
    (
        "morphling.simulation.threads.workloads",
        ["vit", "resnet"],
        "morphling.simulation.threads.workloads[1]: found 'resnet'",
        "one of vit, roberta",
    ),
    (
        "morphling.simulation.today.models",
        [{"workload": "vit", "model": "qwen3-0.6b"}, {"workload": "vit", "model": "qwen3-4b"}],
        "morphling.simulation.today: found",
        "models in place of different workloads",
    ),
    ("live.seeds", [-1], "live.seeds[0]: found -1", "at least 0"),
    (
        "morphling.workloads",
        ["vit", "resnet"],
        "morphling.workloads[1]: found 'resnet'",
        "one of vit, roberta",
    ),
    ("morphling.workloads", ["vit"], "morphling: found", "(not there: bert, gpt2, llama30"),
    ("morphling.sensitivity.max_gpus", 0, "morphling.sensitivity.max_gpus: found 0", "at least 1"),
    ("morphling.fig7.stage_duration_s", 0, "morphling.fig7.stage_duration_s: found 0", "more than 0"),
    (
        "morphling.fig7.stages",
        [{"name": "a", "cpu_threads": 1}],
        "morphling.fig7.stages[0].placement: found nothing",
        "no default",
    ),
    (
        "morphling.fig7.stages",
        [{"name": "a", "placement": "4x4", "cpu_threads": 1}],
        "morphling.fig7.stages[0].placement: found '4x4'",
        "GPUs on each node, for example 4444",
    ),
    (
        "morphling.fig7.stages",
        [{"name": "a", "placement": name, "cpu_threads": 1} for name in ("4", "8")],
        "morphling.fig7: found",
        "stages with different names",
    ),
    (
        "morphling.fig7.stages",
        [{"name": "a", "placement": "4", "cpu_threads": 1, "plcement": "4"}],
        "morphling.fig7.stages[0].plcement: unknown key; expected name, placement, cpu_threads.",
        "Did you mean 'placement'?",
    ),
    (
        "morphling.simulation.threads.cpu_threads",
        [2, 4],
        "morphling.simulation.threads: found",
        "cpu_threads with 8, which jobs request, among them",
    ),
    ("morphling.fig8.workloads", ["vit"], "morphling.fig8.workloads: found ['vit']", "a list of at least 2"),
]


@pytest.mark.parametrize(("key", "value", "found", "accepted"), WRONG)
def test_a_wrong_option_is_named_with_what_is_accepted(defaults, key, value, found, accepted):
    with pytest.raises(ConfigError) as caught:
        check_settings(changed(defaults, key, value))
    head, *lines = str(caught.value).splitlines()
    assert head == "the configuration is not accepted:"
    assert len(lines) == 1, lines
    assert lines[0].strip().startswith(found)
    assert accepted in lines[0]


def test_every_wrong_option_has_its_line(defaults):
    values = changed(changed(defaults, "cluster", "x"), "throughput.emulated.seed", -1)
    with pytest.raises(ConfigError) as caught:
        check_settings(values)
    assert len(str(caught.value).splitlines()) == 3


def test_what_a_configuration_leaves_out_has_its_default(defaults):
    values = {**defaults, "throughput": {**defaults["throughput"]}}
    del values["throughput"]["measured"]
    assert check_settings(values) == check_settings({})


def test_an_option_that_an_experiment_shares_is_set_where_it_stands():
    with pytest.raises(ConfigError, match=r"no option f, which is set as oobleck\.planning\.templates\.f"):
        check_settings({"oobleck": {"planning": {"studies": {"f": [1]}}}})
    settings = check_settings({"oobleck": {"planning": {"templates": {"f": [2]}}}})
    assert settings.oobleck.experiments(settings)["studies"].f == (2,)


def test_options_of_an_experiment_are_the_same_after_a_way_through_json():
    settings = check_settings({})
    for paper in settings.papers().values():
        for experiment in paper.experiments(settings).values():
            again = type(experiment).from_json(experiment.to_json())
            assert again.to_json() == experiment.to_json()


def test_the_configuration_knows_every_shipped_calibration_and_live_workload():
    assert shipped_calibrations() == list(calibration_names())
    assert shipped_live_workloads() == list(live_workloads())


def test_a_configuration_is_checked_without_what_takes_a_while_to_import():
    command = "import sys; from makespan.config import load_settings; load_settings(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"scipy", "torch", "matplotlib"} & set(done.stdout.split())


def test_a_long_value_is_cut_in_the_message(defaults):
    with pytest.raises(ConfigError) as caught:
        check_settings(changed(defaults, "cluster", "a" * 500))
    assert "aaa..." in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_is_missing_or_no_mapping_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"none\.yaml: no such file; expected a configuration"):
        load_settings([tmp_path / "none.yaml"], root=ROOT)
    for text, message in [
        ("- a\n- b\n", "found list; expected a mapping"),
        ("a: [", "cannot be read as YAML"),
    ]:
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_settings([path], root=ROOT)


def test_an_empty_file_changes_nothing(tmp_path, defaults):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_settings([path], root=ROOT).model_dump(mode="json") == defaults


def test_settings_cannot_be_changed():
    settings = load_settings(root=ROOT)
    with pytest.raises(ValueError, match="frozen"):
        settings.cluster = "other"


def test_every_option_is_described():
    def blocks(model):
        yield model
        for field in model.model_fields.values():
            for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if hasattr(candidate, "model_fields"):
                    yield from blocks(candidate)

    for block in blocks(settings_model()):
        assert block.__doc__
        own = ((name, field) for name, field in block.model_fields.items() if not field.exclude)
        for name, field in own:
            assert field.description, f"{block.__name__}.{name}"
            assert set(field.json_schema_extra) == {"unit", "source", "changes"}


def test_the_schema_accepts_the_defaults_and_rejects_what_the_models_reject(defaults):
    validator = jsonschema.Draft202012Validator(json.loads(json_schema()))
    assert not list(validator.iter_errors(defaults))
    for key, value in [("throughput.emulated.sed", 1), ("throughput.emulated.seed", -1), ("throughput", 3)]:
        assert list(validator.iter_errors(changed(defaults, key, value))), key


class TestPublishedDirectory:
    """Where the published files are looked for, and what is said when they are nowhere."""

    def settings(self, defaults, **options):
        return check_settings(changed(defaults, "throughput.published", options))

    def test_the_option_comes_before_the_environment(self, defaults, tmp_path):
        settings = self.settings(defaults, directory=str(tmp_path))
        assert published_directory(settings, {"MAKESPAN_PUBLISHED_DIR": "/elsewhere"}) == tmp_path

    def test_the_environment_comes_before_fetching(self, defaults, tmp_path):
        settings = self.settings(defaults, fetch=True)
        assert published_directory(settings, {"MAKESPAN_PUBLISHED_DIR": str(tmp_path)}) == tmp_path
        assert published_directory(settings, {}) == Path("data/published")

    def test_a_name_that_is_no_directory_is_an_error(self, defaults, tmp_path):
        with pytest.raises(MissingDataError, match="none: no such directory"):
            published_directory(self.settings(defaults, directory=str(tmp_path / "none")), {})

    def test_nothing_given_says_what_to_do(self, defaults):
        with pytest.raises(MissingDataError) as caught:
            published_directory(self.settings(defaults), {})
        for hint in ("throughput.published.directory", "MAKESPAN_PUBLISHED_DIR", "fetch"):
            assert hint in str(caught.value)


def test_provenance_holds_configuration_seed_version_and_pins(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==1\n")
    settings = load_settings(root=ROOT)
    record = json.loads(provenance(settings, "emulated", pins))
    assert check_settings(record["config"]) == settings
    assert record["config_sha256"] == settings_hash(settings)
    assert record["seed"] == 0
    assert json.loads(provenance(settings, "published", pins))["seed"] is None
    record = json.loads(provenance(settings, "measured", pins, ["measured", "emulated", "measured"]))
    assert record["iteration_times"] == "mixed emulated and measured, given as measured"
    assert record["iteration_time_rows"] == {"emulated": 1, "measured": 2}
    pins.write_text("numpy==2\n")
    assert json.loads(provenance(settings, "emulated", pins))["pins_sha256"] != record["pins_sha256"]


def test_the_hash_of_settings_depends_on_values_not_on_the_order_of_keys(defaults):
    backwards = dict(reversed(defaults.items()))
    assert settings_hash(check_settings(backwards)) == settings_hash(check_settings(defaults))
    other = check_settings(changed(defaults, "throughput.emulated.seed", 1))
    assert settings_hash(other) != settings_hash(check_settings(defaults))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("policies", ["sia2"], "policies[0]: found 'sia2'; expected one of antman"),
        ("shown", ["gavel", "fifo"], "expected shown among policies (not there: gavel)"),
        ("predictions", "oracle", "predictions: found 'oracle'; expected 'sampled', 'requests' or 'exact'"),
        ("restart_delays_s", [-1], "restart_delays_s[0]: found -1; expected at least 0"),
        ("traces", ["big"], "traces[0]: found 'big'"),
        ("workloads", ["bert", "t5_11B"], "simulation.workloads among workloads (not there: t5_11B)"),
    ],
)
def test_options_of_the_simulation_are_checked(defaults, key, value, message):
    values = changed(defaults, f"morphling.simulation.{key}", value)
    if key == "shown":
        values = changed(values, "morphling.simulation.policies", ["morphling-lookahead", "fifo"])
    with pytest.raises(ConfigError) as caught:
        check_settings(values)
    assert message in str(caught.value)


def test_a_policy_of_ones_own_is_found_in_the_registry(defaults, monkeypatch):
    monkeypatch.setitem(_registry._MODULES, "mine", "somewhere")
    settings = check_settings(changed(defaults, "morphling.simulation.rounds.policies", ["mine"]))
    assert settings.morphling.simulation.rounds.policies == ("mine",)


def test_statements_rest_on_ten_lists_that_no_search_has_seen():
    default = load_settings(root=ROOT).morphling.simulation
    full = load_settings([ROOT / "config/morphling-full.yaml"], ROOT).morphling.simulation
    for simulation in (default, full):
        seeds = simulation.lists.seeds
        assert min(len(seeds.shifted) + len(seeds.subsampled), len(seeds.generated)) >= 10
        for study in (simulation.load, simulation.large_models):
            assert len(set(study.seeds)) >= 10 and set(study.policies) >= set(default.lists.policies)
        drawn = {*seeds.shifted, *seeds.subsampled, *seeds.generated, *simulation.load.seeds}
        assert drawn | {*simulation.large_models.seeds, *simulation.rounds.seeds} <= set(range(201, 211))
    assert len(full.lists.seeds.shifted) + len(full.lists.seeds.subsampled) == 20
    assert set(full.lists.gpus) == {32, 64, 128} and set(full.lists.restart_delays_s) == {260.0, 78.0}
    # `tiresias-pollux` is no rival of its own: it repeats another simulator.
    apart = ("morphling", "easyscale", "fifo-", "tiresias-")
    others = {name for name in _registry.REGISTRY if not name.startswith(apart)}
    assert others <= set(full.lists.policies)


def test_live_runs_under_failures_are_asked_for_and_others_stay_as_they_were():
    (run,) = LiveRuns(policies=("fifo",), seeds=(3,)).runs().values()
    assert run == {"policy": "fifo", "seed": 3, "workload": "live-small", "slots": 2}
    (run,) = LiveRuns(policies=("fifo",), seeds=(3,), nodes=2, failures_per_hour=40).runs().values()
    assert (run["nodes"], run["failures_per_hour"]) == (2, 40) and "recovery" not in run
    (run,) = LiveRuns(policies=("fifo",), seeds=(3,), nodes=2, recovery="resilient").runs().values()
    assert run["recovery"] == "resilient"
    for wrong, message in (
        ({"slots": 3, "nodes": 2}, "as many slots on each node, not 3 on 2"),
        ({"in_all": True, "failures_per_hour": 1}, "the statement is about runs without failures"),
        ({"in_all": True, "recovery": "elastic"}, "the statement is about jobs that restart"),
        ({"recovery": "other"}, "'restart', 'elastic' or 'resilient'"),
        ({"failures_per_hour": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            LiveRuns(**wrong)
