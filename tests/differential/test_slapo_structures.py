"""The structure of models of the transformers package is found, and what a plan makes of them is right."""

import csv
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers package is missing; make hf-test installs it")

import hf_models
import hf_zoo
import small_models
from forked import forking_servers
from group_worker import on_processes

from makespan.planning import model_types
from makespan.slapo import Verify, apply_plan, create_schedule, saved_tensors

pytestmark = [pytest.mark.hf, pytest.mark.xdist_group("schedules")]

BY_FOUR = ("Qwen3Moe", "GPT2", "T5")
"""Models that four processes share too: experts, a fused and transposed weight, biases of heads."""
IN_DOUBLE = ["qwen3_5_moe_text"]
"""Types whose whole models are off by more in single precision than parts may differ: the gradients of decays
in linear attention, which differences of sums over a whole chunk make up."""


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def _rows(n_processes, names, tmp_path):
    path = tmp_path / f"rows-{n_processes}.json"
    on_processes(n_processes, "hf_structure_cases", ("rows_of", {"names": list(names), "path": str(path)}))
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_table_of_models_is_what_processes_find_and_verify(root, tmp_path, request):
    rows = _rows(2, hf_zoo.CONFIGS, tmp_path)
    for name, more in _rows(4, BY_FOUR, tmp_path).items():
        assert more["sequences"] == rows[name]["sequences"] == "verified"
        rows[name] |= {"split by 4": more["split by 4"]}
    columns = (
        "layers", "attention", "feed-forward", "vocabulary", "split by 2", "sequences", "split by 4",
        "context", "recomputed", "cut in two", "whole",
    )  # fmt: skip
    table = [
        {"model": name} | {column: row.get(column, "") for column in columns} for name, row in rows.items()
    ]
    path = root / "docs" / "guides" / "transformers.csv"
    if request.config.getoption("--update-golden"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ("model", *columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    with path.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == table
    assert len(table) >= 32 and all(row["split by 2"].startswith("verified") for row in table)
    refused = {row["model"] for row in table if row["context"] != "verified"}
    assert refused == {"Gemma2", "Bloom", "Mpt", "T5", "Swin", "SamVision", "Wav2Vec2Conformer"}


def test_language_models_of_every_type_that_plans_are_made_for_are_split_and_right():
    kinds = [
        kind
        for kind in model_types()
        if small_models.class_of(kind, small_models.LANGUAGE) and kind not in IN_DOUBLE
    ]
    assert len(kinds) > 60
    on_processes(
        2, "hf_structure_cases", ("every_type", {"kinds": kinds}), ("in_double", {"kinds": IN_DOUBLE})
    )


@pytest.mark.parametrize("n_processes", [2, 4])
def test_experts_that_are_dealt_out_compute_what_whole_models_do(n_processes):
    on_processes(n_processes, "hf_structure_cases", "experts")


def test_experts_are_shared_by_data_parallelism_beside_tensor_parallelism():
    on_processes(4, "hf_structure_cases", "experts_of_own_samples")


@pytest.mark.parametrize("name", hf_zoo.CONFIGS)
def test_what_a_model_keeps_of_its_layers_is_less_and_its_gradients_are_the_same(name):
    inputs, sizes = hf_zoo.inputs(name), {}
    for word in ("", "recompute=selective", "recompute=operators", "recompute=full"):
        sch = create_schedule(hf_zoo.model(name))
        with Verify(sch, inputs, input_grads=[]) as check:
            apply_plan(sch, f"mb1 {word}", inputs)
        assert check.report.is_equal and check.report.count("parameter gradient")
        assert not any("keep their products alone" in note for note in sch.metadata.structure.notes)
        with saved_tensors(sch.mod.eval()) as kept:
            sch.mod(**inputs)
        sizes[word] = kept.n_bytes
    least, *between, most = sorted(sizes, key=sizes.get)
    assert (least, most) == ("recompute=full", ""), sizes
    assert sizes[least] < min(map(sizes.get, between)) and max(map(sizes.get, between)) < sizes[most]


def test_a_model_is_scheduled_in_one_line_and_verified_by_layers():
    sch = create_schedule(hf_models.llama())
    with Verify(sch, {"input_ids": hf_models.tokens()}, by_layers=True) as check:
        apply_plan(sch, "tp2 mb1 recompute=full", {"input_ids": hf_models.tokens()})
    assert check.report.layers
