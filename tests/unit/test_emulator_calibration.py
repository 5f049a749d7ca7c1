"""Calibration: recovery of known constants, priors, bounds, shipped sets and their files."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from makespan.emulator import (
    CalibrationSet,
    Observations,
    calibrate,
    calibration_names,
    calibration_set,
    calibration_text,
    emulate,
    load_calibration,
    observe,
    refined_set,
    trace_points,
)
from makespan.emulator.constants import CONSTANT_NAMES, prior_theta, theta_array, theta_mapping
from makespan.emulator.model import predict, preset_digests
from makespan.emulator.validation import (
    agreement,
    anchor_rows,
    anchor_scale,
    anchored,
    data_digest,
    few_shot,
    five_fold,
    leave_out,
    public_constants,
)
from makespan.errors import FitError, InputError, MissingDataError, TraceError, UnknownNameError
from makespan.hardware import cluster
from makespan.workloads import model_keys, workload

WHERE = cluster("a800-64")
TRUTH = theta_array(load_calibration("L1").constants)
NAMES = ("vit", "bert", "gpt2", "llama7")


def truth() -> CalibrationSet:
    return CalibrationSet("truth", "L3", "test", "", 0, theta_mapping(TRUTH))


def tables(names: tuple[str, ...] = NAMES, noise: float = 0.0) -> dict[str, pd.DataFrame]:
    return {
        name: emulate(workload(name), trace_points(workload(name), WHERE), WHERE, truth(), noise=noise)
        for name in names
    }


@pytest.fixture(scope="module")
def exact() -> Observations:
    return observe(tables(), WHERE)


@pytest.fixture(scope="module")
def noisy() -> Observations:
    return observe(tables(noise=1.0), WHERE)


def test_exact_rows_give_back_their_constants(exact: Observations) -> None:
    fit = calibrate(exact, sd_log=np.full(len(CONSTANT_NAMES), 5.0), max_evaluations=300)
    predicted = predict(fit.theta, exact.features)
    assert np.max(np.abs(predicted / exact.iter_time_s - 1)) < 2e-3
    for name in ("e_net", "k_bwd", "bpp_fused", "r_slow"):
        index = CONSTANT_NAMES.index(name)
        assert fit.theta[index] == pytest.approx(TRUTH[index], rel=0.05), name


def test_noisy_rows_are_predicted_within_the_noise(noisy: Observations) -> None:
    found = agreement(noisy, predict(calibrate(noisy).theta, noisy.features), noisy.clean)
    assert found.mape_pct < 2.5


def test_a_few_wild_rows_do_not_move_the_fit(noisy: Observations) -> None:
    wild = noisy.iter_time_s.copy()
    wild[::40] *= 3.0
    spoiled = calibrate(replace(noisy, iter_time_s=wild))
    found = agreement(noisy, predict(spoiled.theta, noisy.features), noisy.clean)
    assert found.mape_pct < 4.0


def test_constants_without_data_stay_at_their_priors(exact: Observations) -> None:
    image_rows = exact.subset(exact.model == "vit-base")
    fit = calibrate(image_rows)
    for name in ("e_p2p", "t_stage", "r_slow", "a_coll", "bpp_fused"):
        index = CONSTANT_NAMES.index(name)
        assert fit.theta[index] == pytest.approx(prior_theta()[index], rel=1e-3), name
        assert fit.std_err_log[index] > 0.3


def test_active_bounds_are_reported(exact: Observations) -> None:
    faster = np.where(exact.plan_class == "3d", exact.iter_time_s * 0.6, exact.iter_time_s)
    fit = calibrate(replace(exact, iter_time_s=faster))
    assert "e_nv" in fit.active_bounds or "e_net" in fit.active_bounds
    assert np.all(fit.theta[[CONSTANT_NAMES.index(name) for name in fit.active_bounds]] <= 1.0)


def test_the_correlation_matrix_is_one(exact: Observations) -> None:
    correlation = calibrate(exact).correlation
    np.testing.assert_allclose(np.diag(correlation), 1.0)
    assert np.max(np.abs(correlation)) <= 1.0 + 1e-9
    np.testing.assert_allclose(correlation, correlation.T)


def test_nothing_to_fit_is_an_error(exact: Observations) -> None:
    with pytest.raises(FitError, match="no measured row"):
        calibrate(exact.subset(np.zeros(len(exact), dtype=bool)))
    with pytest.raises(FitError, match="not finite"):
        calibrate(replace(exact, iter_time_s=np.full(len(exact), np.nan)))
    with pytest.raises(InputError, match="no feasible row"):
        observe({}, WHERE)


@pytest.mark.parametrize(("factor", "ratio"), [(1e3, "1.5e+03"), (1e-3, "0.0015")])
def test_times_in_another_unit_are_refused(factor: float, ratio: str) -> None:
    frames = tables(("vit", "llama7"))
    frames["llama7"]["iter_time_s"] *= factor
    with pytest.raises(TraceError, match="trace of llama7: the median of iter_time_s is") as caught:
        observe(frames, WHERE)
    assert f"{ratio} times that of the public constants; expected 1/100 to 100 times, and seconds" in str(
        caught.value
    )


def test_protocols_hold_out_what_they_say(noisy: Observations) -> None:
    base = leave_out(noisy, noisy.model)
    assert set(base.thetas) == set(noisy.model)
    assert base.held_out.all() and np.all(np.isfinite(base.predicted_s))
    few = few_shot(noisy, base)
    for name in NAMES:
        for plan_class in ("dp", "gc", "zero", "offload", "3d"):
            seen = ~few.held_out & (noisy.workload == name) & (noisy.plan_class == plan_class)
            assert seen.sum() <= 3
    folds = five_fold(noisy, base)
    assert folds.held_out.all()
    errors = [
        agreement(noisy, p.predicted_s, p.held_out).mape_pct
        for p in (public_constants(noisy), base, few, folds)
    ]
    assert errors[0] > errors[1] > errors[3]
    assert errors[2] < errors[1]


def test_an_anchor_repairs_a_uniform_change_of_speed(exact: Observations) -> None:
    slower = replace(exact, iter_time_s=exact.iter_time_s.copy())
    base = leave_out(slower, slower.model)
    rows = anchor_rows(slower, slower.workload)
    assert set(rows) == set(NAMES)
    assert slower.exec_plan[rows["bert"]] == "ga" and slower.placement[rows["bert"]] == "4"
    improved = anchored(slower, base, slower.model)
    assert not improved.held_out[rows["bert"]]
    assert set(improved.anchors) == set(NAMES)
    assert anchor_scale(TRUTH, exact, rows["bert"]) == pytest.approx(1.0, abs=1e-6)


def test_the_clear_workloads_only_are_observed() -> None:
    data = observe(tables(("bert", "t5_3B")), WHERE)
    assert set(data.workload) == {"bert"}


def test_phases_count_only_where_a_stack_reports_them(exact: Observations) -> None:
    by_name = {name: exact.subset(exact.workload == name) for name in NAMES}
    assert np.isnan(by_name["vit"].forward_s).all()
    assert np.isfinite(by_name["bert"].forward_s).all()
    parallel = by_name["llama7"].plan_class == "3d"
    assert np.isnan(by_name["llama7"].forward_s).all()
    assert np.isfinite(by_name["llama7"].optimize_s[parallel]).all()
    assert np.isnan(by_name["llama7"].optimize_s[~parallel]).all()


def test_a_set_round_trips_through_its_file(noisy: Observations, tmp_path: object) -> None:
    made = calibration_set("mine", noisy, "a test")
    text = calibration_text(made)
    path = tmp_path / "mine.toml"  # type: ignore[operator]
    path.write_text(text, encoding="utf-8")
    read = load_calibration(str(path))
    assert read.level == "L1" and read.n_rows == len(noisy)
    assert read.data_digest == data_digest(noisy)
    assert set(read.without) == set(noisy.model)
    assert dict(read.constants) == pytest.approx(dict(made.constants), rel=1e-5)
    assert calibration_text(replace(read, name="mine")) == text


@pytest.mark.parametrize("level", ["L1a", "L2", "L3"])
def test_refining_helps_and_round_trips(level: str, noisy: Observations, tmp_path: object) -> None:
    slow = np.where(noisy.model == "gpt2-1.5b", 1.15, 1.0)
    rows = replace(noisy, iter_time_s=noisy.iter_time_s * slow)
    shipped = load_calibration("L1")
    made = refined_set("mine", rows, "a test", level, shipped)
    path = tmp_path / "mine.toml"  # type: ignore[operator]
    path.write_text(calibration_text(made), encoding="utf-8")
    read = load_calibration(str(path))
    spec = workload("gpt2")
    mask = rows.workload == "gpt2"
    errors = []
    for constants in (shipped, read):
        used = constants.for_workload(spec)
        predicted = predict(used.vector, rows.subset(mask).features, used.compute_scale)
        errors.append(np.abs(predicted / rows.iter_time_s[mask] - 1).mean())
    assert errors[1] < errors[0]
    assert read.for_workload(spec).level == level
    assert made.n_rows == {"L1a": 4, "L2": 45, "L3": len(noisy)}.get(level)


def test_an_unknown_level_of_refinement_is_refused(noisy: Observations) -> None:
    with pytest.raises(UnknownNameError, match="'L1'"):
        refined_set("mine", noisy, "a test", "L1", load_calibration("L1"))


def test_the_digest_ignores_the_order_of_rows(noisy: Observations) -> None:
    backwards = Observations(
        **{
            name: getattr(noisy, name)[::-1]
            for name in Observations.__dataclass_fields__
            if name != "features"
        },
        features=noisy.features,
    )
    assert data_digest(backwards) == data_digest(noisy)
    assert data_digest(noisy.subset(noisy.n_gpus > 1)) != data_digest(noisy)


def test_the_shipped_set_excludes_the_model_it_is_used_for() -> None:
    shipped = load_calibration("L1")
    calibrated = [key for key in model_keys() if key != "t5-3b"]
    assert sorted(shipped.without) == sorted(calibrated)
    assert shipped.n_rows == 449 and len(shipped.data_digest) == 32
    used = shipped.for_workload(workload("llama7_b16"))
    assert used.excluded_models == ("llama2-7b",) and used.level == "L1"
    assert shipped.for_workload(workload("t5_3B")).identifier == "L1/all"


def test_the_public_constants_are_level_zero() -> None:
    assert load_calibration("L0").for_workload(workload("bert")).level == "L0"
    assert calibration_names() == ("L0", "L1")


def test_what_is_no_calibration_is_refused(tmp_path: object) -> None:
    path = tmp_path / "bad.toml"  # type: ignore[operator]
    path.write_text("level = 'L1'\n", encoding="utf-8")
    with pytest.raises(InputError, match="not a calibration"):
        load_calibration(str(path))
    with pytest.raises(UnknownNameError, match="calibration 'L9'"):
        load_calibration("L9")
    with pytest.raises(MissingDataError, match=r"absent\.toml"):
        load_calibration("absent.toml")
    with pytest.raises(UnknownNameError, match="calibration level"):
        replace(truth(), level="L7")
    with pytest.raises(UnknownNameError, match="model 'gpt9'"):
        replace(truth(), without={"gpt9": theta_mapping(TRUTH)})


def test_every_preset_has_a_digest() -> None:
    digests = preset_digests()
    assert {"hardware/devices.toml", "workloads/models.toml", "emulator/L1.toml"} <= set(digests)
