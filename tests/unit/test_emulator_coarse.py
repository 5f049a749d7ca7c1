"""Coarse workloads describe steps on devices of different types."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from makespan.emulator._coarse import (
    coarse_names,
    coarse_step_time_s,
    coarse_workload,
    colocated_memory_bytes,
    colocated_step_time_s,
    fit_coarse,
)
from makespan.errors import FitError, UnknownNameError
from makespan.hardware import gpu

DEVICES = [gpu("v100-32"), gpu("p100-16-pcie"), gpu("t4-16")]
ARTIFACT_NAMES = {
    "ShuffleNetv2": "shufflenetv2",
    "ResNet50": "resnet50",
    "VGG19": "vgg19",
    "YOLOv3": "yolov3",
    "NeuMF": "neumf",
    "Bert": "bert-base",
    "Electra": "electra-base",
    "SwinTransformer": "swin",
}


@pytest.mark.parametrize("name", coarse_names())
def test_every_preset_names_its_source_and_has_non_negative_constants(name: str) -> None:
    workload = coarse_workload(name)
    assert len(workload.source) > 10
    assert min(workload.fixed_s, workload.flop, workload.memory_traffic_bytes) >= 0
    assert workload.modes == ("baseline", "deterministic", "hetero-deterministic")


def test_the_fit_recovers_known_constants() -> None:
    known = replace(coarse_workload("yolov3"), mode_factor={})
    times = [coarse_step_time_s(known, device) for device in DEVICES]
    found = fit_coarse(DEVICES, times)
    assert found.worst_error == pytest.approx(0.0, abs=1e-9)
    assert [coarse_step_time_s(found, device) for device in DEVICES] == pytest.approx(times)


def test_the_fit_minimises_the_largest_error() -> None:
    slow_on_the_fastest = [3.0, 1.0, 1.0]
    found = fit_coarse(DEVICES, slow_on_the_fastest)
    errors = [coarse_step_time_s(found, d) / t - 1 for d, t in zip(DEVICES, slow_on_the_fastest, strict=True)]
    assert np.max(np.abs(errors)) == pytest.approx(found.worst_error)
    assert found.worst_error == pytest.approx(0.5)


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]])
def test_the_fit_refuses_times_that_are_not_positive(times: list[float]) -> None:
    with pytest.raises(FitError, match="one positive time for each of 3"):
        fit_coarse(DEVICES, times)


def test_determinism_modes_multiply_the_step() -> None:
    vgg = coarse_workload("vgg19")
    baseline = coarse_step_time_s(vgg, DEVICES[0])
    strict = coarse_step_time_s(vgg, DEVICES[0], "hetero-deterministic")
    assert strict / baseline == pytest.approx(4.38)


def test_unknown_names_modes_and_devices_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"accepted: .*resnet50"):
        coarse_workload("resnet5")
    with pytest.raises(UnknownNameError, match="accepted: baseline, deterministic"):
        coarse_step_time_s(coarse_workload("swin"), DEVICES[0], "strict")
    with pytest.raises(UnknownNameError, match="a40-48"):
        coarse_step_time_s(coarse_workload("swin"), gpu("a40-48"), "deterministic")


def test_workers_that_take_turns_pay_for_switches_but_not_for_memory() -> None:
    assert colocated_step_time_s(1.0, 1) == 1.0
    assert 4.04 <= colocated_step_time_s(1.0, 4) <= 4.12
    assert colocated_memory_bytes(5e9, 8, is_time_sliced=True) == 5e9
    assert colocated_memory_bytes(5e9, 8, is_time_sliced=False) == 40e9


def test_the_presets_describe_the_published_steps(published_dir: Path) -> None:
    path = published_dir / "easyscale" / "overhead.csv"
    if not path.exists():
        pytest.skip("the published directory has no easyscale/overhead.csv")
    rows = pd.read_csv(path)
    devices = dict(zip(["v100", "p100", "t4"], DEVICES, strict=True))
    worst = {}
    for model, group in rows.groupby("model"):
        workload = coarse_workload(ARTIFACT_NAMES[str(model)])
        predicted = np.array([coarse_step_time_s(workload, devices[g]) for g in group["gpu"]])
        worst[workload.name] = float(np.abs(predicted / group["ddp_nondeterminism"] - 1).max())
    assert sum(error <= 0.042 for error in worst.values()) == 7
    assert worst["neumf"] <= 0.12
