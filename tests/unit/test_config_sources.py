"""Which files of the register a configuration asks for."""

import hashlib

import pytest

from makespan.config import check_settings, load_settings, merge
from makespan.config.sources import (
    paper_datasets,
    paper_files,
    published_datasets,
    published_files,
)
from makespan.errors import InputError, MissingDataError

HEADER = "name,path,version,licence,size_bytes,sha256,repository,commit,upstream_path,url,note\n"
KEYS = ("roberta", "t5_3B")


def line(folder, path="morphling/throughput"):
    digest = hashlib.sha256(folder.encode()).hexdigest()
    full = f"{path}/{folder}/placements.csv"
    return f"{folder},{full},v1,MIT,1,{digest},some/one,abc,upstream/{folder}/placements.csv,,\n"


@pytest.fixture
def settings(root, tmp_path):
    """Return a function that builds settings on a register with the folders given."""

    def build(folders=("roberta", "t5_3B", "resnet"), **published):
        register = tmp_path / "register.csv"
        register.write_text(HEADER + "".join(line(folder) for folder in folders) + line("a", "oobleck/b"))
        changes = {
            "morphling": {
                "workloads": list(KEYS),
                "sampling": {"workloads": ["roberta"]},
                "sensitivity": {"workloads": []},
                "simulation": {"workloads": ["roberta"]},
            },
            "throughput": {"published": {"register_file": str(register), **published}},
        }
        return check_settings(merge(load_settings(root=root).model_dump(mode="json"), changes))

    return build


def test_each_workload_has_its_entry_in_the_order_of_the_configuration(settings):
    assert list(published_datasets(settings())) == list(KEYS)


def test_a_workload_without_an_entry_is_named_with_those_that_have_one(settings):
    with pytest.raises(MissingDataError, match=r"no published trace of roberta; it has: t5_3B"):
        published_datasets(settings(folders=("t5_3B",)))


@pytest.mark.parametrize("layout", ["morphling/throughput", "upstream"])
def test_files_are_found_in_either_layout(settings, tmp_path, layout):
    for key in KEYS:
        folder = tmp_path / "files" / layout / key
        folder.mkdir(parents=True)
        (folder / "placements.csv").touch()
    found = published_files(settings(directory=str(tmp_path / "files")))
    assert found == [str(tmp_path / "files" / layout / key / "placements.csv") for key in KEYS]


def test_a_file_that_is_not_there_is_an_error(settings, tmp_path):
    (tmp_path / "files").mkdir()
    with pytest.raises(MissingDataError, match="data set 'roberta' is not in"):
        published_files(settings(directory=str(tmp_path / "files")))


def test_published_times_do_not_pass_for_those_of_another_device(root):
    values = load_settings(root=root).model_dump(mode="json") | {"cluster": "p3dn-64"}
    with pytest.raises(InputError, match="its times are of a800-80, cluster 'p3dn-64' has v100-32"):
        published_files(check_settings(values))


def test_files_to_be_fetched_need_not_exist(settings, monkeypatch):
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR", raising=False)
    found = published_files(settings(fetch=True, fetched_directory="data/x"))
    assert found == [f"data/x/morphling/throughput/{key}/placements.csv" for key in KEYS]


def test_the_committed_register_has_every_configured_workload(root):
    settings = load_settings(root=root)
    assert list(published_datasets(settings, root)) == list(settings.morphling.workloads)


def test_the_job_lists_are_found_like_the_traces(root, published_dir):
    values = load_settings(root=root).model_dump(mode="json")
    settings = check_settings(merge(values, {"throughput": {"published": {"directory": str(published_dir)}}}))
    names = ["naive", "workload-base", "workload-bp", "workload-mt"]
    assert [entry.name for entry in paper_datasets(settings, "morphling", root)] == [
        f"morphling-workloads-{name}" for name in names
    ]
    assert paper_files(settings, "morphling", root) == [
        str(published_dir / "morphling" / "workloads" / f"{name}.csv") for name in names
    ]


def test_a_profile_of_small_workloads_decides_no_statement_about_iteration_times(root):
    settings = load_settings(root=root)
    for paper in settings.papers().values():
        built = set(paper.tables_of(settings, "measured"))
        judged = set(paper.judged_tables(settings, "measured"))
        assert judged == built - paper.unjudged() - paper.timed_tables()
    morphling = settings.papers()["morphling"]
    assert {"table2", "fig7"} <= morphling.timed_tables()
    assert {"table2", "fig7"} <= set(morphling.judged_tables(settings, "emulated"))
    given = check_settings({"throughput": {"measured": {"directory": "own"}}})
    assert {"table2", "fig7"} <= set(morphling.judged_tables(given, "measured"))


def test_the_code_that_decides_statements_is_the_module_of_checks_of_a_paper(root):
    for name, paper in load_settings(root=root).papers().items():
        assert paper.checks_code() == f"makespan.papers.{name}.checks"
