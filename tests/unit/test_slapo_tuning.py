"""Spaces, strategies, the database and the search that holds them together."""

import itertools
import json
import threading

import numpy as np
import pytest
from scipy import stats

from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.slapo.tuning import (
    STRATEGIES,
    CoordinateDescent,
    Database,
    Evaluation,
    Frontier,
    Polygon,
    Precision,
    Space,
    strategy_named,
    tune,
)

# The paper's illustration of a space that is no rectangle: corners (share of recomputed layers, batch size).
PUBLISHED_CORNERS = ((0.25, 104), (0.25, 176), (1.0, 176), (1.0, 120), (0.67, 120), (0.67, 104))


def grid(space):
    space.create_symbol("x", range(4))
    space.create_symbol("y", [0.5, 1.0, 1.5])


def peak(point):
    return "ok", -((point["x"] - 2) ** 2) - (point["y"] - 1.0) ** 2, {"seen": point["x"]}


def memory(point):
    """Throughput grows with the batch and falls with recomputation, until memory is full."""
    batch, ratio = point["global_batch_size"], point["ckpt_ratio"]
    if batch * (2 - ratio) > 12:
        return "oom", None, {}
    return "ok", batch / (1 + batch * (1 + ratio)), {}


def batches(space):
    space.create_symbol("global_batch_size", range(2, 15, 2))
    space.create_symbol("ckpt_ratio", [1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_grid_has_all_points_in_the_order_of_declaration():
    space = Space(grid)
    assert len(space) == 12
    assert space.enumerate()[:4] == [{"x": 0, "y": y} for y in (0.5, 1.0, 1.5)] + [{"x": 1, "y": 0.5}]


def test_symbols_can_be_created_without_a_declaration():
    space = Space()
    space.create_symbol("x", [1, 2])
    space.create_symbol("y", np.arange(2))
    space.constrain(lambda point: point["x"] != point["y"])
    assert [tuple(point.values()) for point in space.enumerate()] == [(1, 0), (2, 0), (2, 1)]


def test_candidates_depend_on_symbols_that_have_a_value_and_a_fixed_symbol_stays():
    seen = []

    def declare(space):
        batch = space.create_symbol("batch", [8, 16])
        ratios = [1.0]
        if batch <= 8:
            ratios.append(0.5)
        if batch.is_fixed:
            seen.append(space.create_symbol("batch", [99]).value)
        space.create_symbol("ratio", ratios)

    points = [tuple(point.values()) for point in Space(declare).enumerate()]
    assert points == [(8, 1.0), (8, 0.5), (16, 1.0)]
    assert set(seen) == {8, 16}


def test_a_symbol_without_a_value_compares_as_false_and_has_none():
    symbol = Space().create_symbol("batch", [1, 2])
    assert not any((symbol == 1, symbol != 1, symbol < 5, symbol <= 5, symbol > 0, symbol >= 0))
    with pytest.raises(ValueError, match="symbol 'batch' has no value yet"):
        repr(symbol.value)


@pytest.mark.parametrize("values", [[1, 1], [None], [[1]], [1, 1.0]])
def test_candidates_are_plain_values_each_once(values):
    with pytest.raises(InputError, match="symbol 'x': candidates are"):
        Space().create_symbol("x", values)


def test_a_declaration_may_not_take_a_symbol_back():
    def declare(space):
        if not space.create_symbol("x", [1]).is_fixed or not space.create_symbol("y", [2]).is_fixed:
            return
        space.create_symbol("z", [3])

    def forgets(space):
        calls.append(space)
        if len(calls) == 1:
            space.create_symbol("x", [1])

    calls = []
    assert Space(declare).enumerate() == [{"x": 1, "y": 2, "z": 3}]
    with pytest.raises(InputError, match="symbol 'x' is not declared"):
        Space(forgets).enumerate()


def test_the_published_polygon_includes_its_border():
    region = Polygon("ckpt_ratio", "global_batch_size", PUBLISHED_CORNERS)
    inside = {
        (ratio, batch): region({"ckpt_ratio": ratio, "global_batch_size": batch})
        for ratio in (0.25, 0.5, 0.67, 0.84, 1.0)
        for batch in (96, 104, 112, 120, 176, 184)
    }
    assert all(inside[corner] for corner in PUBLISHED_CORNERS)
    assert inside[0.5, 112] and inside[0.84, 120] and not inside[0.84, 112]
    assert not any(inside[ratio, batch] for ratio in (0.25, 0.5, 1.0) for batch in (96, 184))


def test_a_slanted_edge_includes_the_points_that_are_on_it_in_decimals():
    region = Polygon("x", "y", ((0, 0.1), (0.3, 0.4), (0.3, 0.1)))
    assert region({"x": 0.1, "y": 0.2}) and region({"x": 0.2, "y": 0.3})
    assert not region({"x": 0.1, "y": 0.21})
    with pytest.raises(InputError, match="polygon has 2 vertices"):
        Polygon("x", "y", ((0, 0), (1, 1)))


@pytest.mark.parametrize("name", ["exhaustive", "random", "coordinate_descent"])
def test_every_strategy_finds_a_single_peak(name):
    found = tune(grid, peak, name, seed=3)
    assert (found.best, found.best_value, found.stopped) == ({"x": 2, "y": 1.0}, 0.0, "finished")
    assert found.n_eval == len({json.dumps(one.point) for one in found.history}) <= found.n_space == 12


def test_the_same_seed_asks_for_the_same_points():
    once, again, other = (tune(grid, peak, "random", seed=seed).history for seed in (1, 1, 2))
    assert once == again != other


def test_unknown_strategies_are_named():
    with pytest.raises(UnknownNameError, match="expected coordinate_descent, exhaustive, frontier, random"):
        strategy_named("fronteer")
    assert set(STRATEGIES) == {"exhaustive", "random", "coordinate_descent", "frontier"}


def test_the_frontier_walks_along_the_border_of_memory():
    found = tune(batches, memory, "frontier")
    assert found.best_value == tune(batches, memory, "exhaustive").best_value
    assert found.n_eval <= 7 + 5 - 1
    path = [(one.point["global_batch_size"], one.point["ckpt_ratio"]) for one in found.history]
    assert path[:3] == [(14, 1.0), (12, 1.0), (12, 0.75)]
    assert all(
        later[0] <= earlier[0] and later[1] <= earlier[1] for earlier, later in itertools.pairwise(path)
    )


def test_patience_counts_batches_and_is_reported():
    def falling(point):
        status, value, info = memory(point)
        return status, value and 1.0 - value, info

    patient = tune(batches, falling, "frontier")
    hasty = tune(batches, falling, Frontier(), patience=1)
    assert hasty.n_eval < patient.n_eval
    assert (hasty.stopped, patient.stopped) == ("patience", "finished")
    batches_of = [one.point["global_batch_size"] for one in hasty.history]
    assert len(set(batches_of)) < len(batches_of)


def test_patience_does_not_run_out_before_anything_fits():
    def late(point):
        return ("ok", 1.0, {}) if point["global_batch_size"] == 2 else ("oom", None, {})

    assert tune(batches, late, "frontier", patience=1).best == {"global_batch_size": 2, "ckpt_ratio": 1.0}


def test_the_frontier_searches_a_space_that_is_no_rectangle():
    def triangle(space):
        batches(space)
        space.constrain(lambda point: point["global_batch_size"] > 6 or point["ckpt_ratio"] >= 0.75)

    found = tune(triangle, memory, "frontier")
    assert found.best_value == tune(triangle, memory, "exhaustive").best_value


def test_the_frontier_has_a_border_for_each_value_of_other_symbols():
    def declare(space):
        space.create_symbol("fused", [False, True])
        batches(space)

    def with_kernels(point):
        status, value, info = memory(point)
        return status, value and value * (1 + point["fused"]), info

    found = tune(declare, with_kernels, "frontier")
    assert found.best["fused"] is True
    assert found.n_eval <= 2 * (7 + 5 - 1)


def test_the_frontier_needs_its_two_symbols():
    with pytest.raises(InputError, match="the space has x, y; expected global_batch_size"):
        tune(grid, peak, "frontier")


def test_what_another_point_out_of_memory_implies_is_not_run(tmp_path):
    db = tmp_path / "known.jsonl"
    Database(db).append(Evaluation({"global_batch_size": 8, "ckpt_ratio": 0.25}, "oom", None, {}))
    asked = []

    def counted(point):
        asked.append((point["global_batch_size"], point["ckpt_ratio"]))
        return memory(point)

    tune(batches, counted, "frontier", db=db)
    assert not [(batch, ratio) for batch, ratio in asked if batch >= 8 and ratio <= 0.25]


class FakeOutOfMemoryError(RuntimeError):
    pass


FakeOutOfMemoryError.__name__ = "OutOfMemoryError"


@pytest.mark.parametrize(
    "error", [MemoryError(), FakeOutOfMemoryError("no"), RuntimeError("device says: Out of memory")]
)
def test_running_out_of_memory_is_a_normal_result(error):
    def fails_on_two(point):
        if point["x"] == 2:
            raise error
        return peak(point)

    found = tune(grid, fails_on_two, "exhaustive")
    assert (found.n_oom, found.n_eval, found.best["y"]) == (3, 12, 1.0)


def test_other_errors_pass():
    def broken(point):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        tune(grid, broken, "exhaustive")


def test_what_is_invalid_costs_no_evaluation():
    def odd(point):
        return ("invalid", None, {}) if point["x"] % 2 else peak(point)

    found = tune(grid, odd, "exhaustive", budget=7)
    assert (found.n_eval, len(found.history), found.stopped) == (6, 12, "finished")
    assert found.share == 0.5


@pytest.mark.parametrize(
    ("on_fail", "n_tried", "stopped"),
    [("skip", 12, "finished"), ("stop-symbol", 10, "finished"), ("stop-all", 4, "fail")],
)
def test_a_failure_skips_a_point_or_the_rest_of_its_symbol_or_all(on_fail, n_tried, stopped):
    def fails(point):
        return ("fail", None, {}) if point["x"] == 1 else peak(point)

    found = tune(grid, fails, "exhaustive", on_fail=on_fail)
    assert (len(found.history), found.stopped) == (n_tried, stopped)


def test_a_budget_ends_the_search_and_is_reported():
    found = tune(grid, peak, "random", budget=5)
    assert (found.n_eval, found.stopped) == (5, "budget")


@pytest.mark.parametrize(
    "answer", [("ok", None, {}), ("ok", float("nan"), {}), ("oom", 1.0, {}), ("fine", 1.0, {})]
)
def test_an_objective_that_contradicts_itself_is_refused(answer):
    with pytest.raises(InputError, match="expected ok with a finite number"):
        tune(grid, lambda point: answer, "exhaustive")


def test_an_empty_space_is_refused():
    with pytest.raises(InputError, match="space has no points"):
        tune(lambda space: space.create_symbol("x", []), peak, "exhaustive")


@pytest.mark.parametrize("strategy", ["exhaustive", "random", CoordinateDescent(2)])
def test_an_interrupted_search_continues_where_it_was(tmp_path, strategy):
    db, asked = tmp_path / "runs" / "db.jsonl", []

    def until_fifth(point):
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(point)
        return peak(point)

    with pytest.raises(KeyboardInterrupt):
        tune(grid, until_fifth, strategy, db=db, seed=1)
    assert len(db.read_text().splitlines()) == 5
    with db.open("a") as stream:
        stream.write('{"point": {"x": 3')  # killed while it wrote
    again = []

    def counted(point):
        again.append(point)
        return peak(point)

    found = tune(grid, counted, strategy, db=db, seed=1)
    assert not [point for point in again if point in asked]
    assert found == tune(grid, peak, strategy, seed=1)
    assert len(db.read_text().splitlines()) == found.n_eval
    assert tune(grid, until_fifth, strategy, db=db, seed=1) == found


def test_a_line_of_the_database_that_is_no_evaluation_is_named(tmp_path):
    db = tmp_path / "db.jsonl"
    db.write_text('{"point": {"x": 1}, "status": "ok", "value": 1.0, "info": {}}\n{"x": 2}\n')
    with pytest.raises(TraceError, match=r"db.jsonl: line 2: 'point'; expected an evaluation"):
        Database(db)


def test_equal_points_share_a_key_whatever_the_order_and_type(tmp_path):
    db = Database(tmp_path / "db.jsonl")
    db.append(Evaluation({"y": 1.0, "x": 2}, "ok", 5.0, {}))
    (found,) = Database(tmp_path / "db.jsonl").known([{"x": 2, "y": 1}]).values()
    assert found.value == 5.0


# --- noise, and what was not tried ----------------------------------------------------------------------


def noisy(values, spread):
    """Return an objective that is off by up to half of a spread, another time in another direction."""
    rng, seen = np.random.default_rng(3), []

    def measure(point):
        seen.append(point["x"])
        return "ok", values[point["x"]] + spread * (rng.random() - 0.5), {}

    return measure, seen


def line(space):
    space.create_symbol("x", range(6))


def test_what_noise_decides_is_measured_again_and_medians_choose(tmp_path):
    values = [1.0, 9.8, 10.0, 5.0, 2.0, 1.0]
    chosen = {0: [], 8: []}
    for repeats, found in chosen.items():
        for seed in range(20):
            rng = np.random.default_rng(seed)
            result = tune(
                line,
                lambda point, rng=rng: ("ok", values[point["x"]] + rng.normal(0, 0.15), {}),
                "exhaustive",
                repeats=repeats,
            )
            found.append(result.best["x"])
    assert chosen[8].count(2) > chosen[0].count(2)
    measure, seen = noisy(values, 1.0)
    result = tune(line, measure, "exhaustive", repeats=4, db=tmp_path / "db.jsonl")
    again = seen[len(values) :]
    assert set(again) == {1, 2} and 4 <= len(again) <= 8  # nobody else comes near
    assert 0 < result.spread <= 1.0 and result.n_eval == len(values)
    best = next(one for one in result.history if one.point == result.best)
    assert (
        best.value == pytest.approx(float(np.median(best.info["values"]))) and len(best.info["values"]) >= 3
    )
    measure, seen = noisy(values, 1.0)
    more = tune(line, measure, "exhaustive", repeats=4, db=tmp_path / "db.jsonl")
    assert not seen and more.best == result.best and more.best_value == result.best_value


def test_what_always_tells_the_same_is_repeated_once():
    asked = []

    def measure(point):
        asked.append(point)
        return peak(point)

    result = tune(grid, measure, "exhaustive", repeats=5)
    assert len(asked) == 14 and result.spread == 0.0 and result.best == {"x": 2, "y": 1.0}
    assert tune(grid, peak, "exhaustive").spread is None


def test_a_point_that_does_not_always_fit_is_not_the_best():
    tries = []

    def measure(point):
        tries.append(point["x"])
        if point["x"] == 5 and tries.count(5) > 1:
            return "oom", None, {}
        return "ok", float(point["x"]), {}

    result = tune(line, measure, "exhaustive", repeats=2)
    assert result.best == {"x": 4} and result.n_oom == 1


def test_a_search_says_what_its_best_point_is():
    def ridge(point):  # along each symbol alone it falls from the corner where everything is small
        x, y = point["x"], point["y"]
        return "ok", 10.0 * (x == y) + x, {}

    def square(space):
        space.create_symbol("x", range(8))
        space.create_symbol("y", range(8))

    one = CoordinateDescent(starts=1)
    local = tune(square, ridge, one, seed=1)
    assert (local.stopped, local.optimum) == ("finished", "local") and local.best_value < 17.0
    assert tune(square, ridge, "exhaustive").optimum == "best"
    assert tune(square, ridge, "random", budget=5).optimum == "unknown"
    assert tune(batches, memory, "frontier").optimum == "best"
    assert tune(grid, lambda point: ("oom", None, {}), "exhaustive").optimum == "unknown"


# --- measurements, and points that are evaluated at the same time ---------------------------------------


def steps(values, spread, n_steps=40):
    """Return an objective that measures a point in steps, and the points of all steps."""
    rng, seen = np.random.default_rng(5), []

    def measure(point):
        for _ in range(n_steps):
            seen.append(point["x"])
            yield values[point["x"]] * (1 + spread * rng.standard_normal()), {"fits": True}

    return measure, seen


def test_measurements_end_once_a_point_is_worse_or_known():
    measure, seen = steps([10.0, 5.0, 9.9, 10.1, 2.0, 1.0], 0.03)
    result = tune(line, measure, "exhaustive", precision=Precision(relative=0.01))
    ends = [evaluation.info["enough"] for evaluation in result.history]
    assert [ends[0], ends[1], *ends[4:]] == ["precise", "worse", "worse", "worse"]
    # Points that are far from the best need three steps, those near it as many as their noise takes.
    assert [seen.count(x) for x in (1, 4, 5)] == [3, 3, 3] and all(seen.count(x) > 10 for x in (0, 3))
    for evaluation in result.history:
        assert evaluation.value == float(np.median(evaluation.info["measured"])) and evaluation.info["fits"]
        assert len(evaluation.info["measured"]) == seen.count(evaluation.point["x"])
    calmer, fewer = steps([10.0, 5.0, 9.9, 10.1, 2.0, 1.0], 0.01)
    tune(line, calmer, "exhaustive", precision=Precision(relative=0.01))
    assert fewer.count(0) < seen.count(0)


def test_without_precision_all_measurements_are_taken():
    measure, seen = steps([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.0, n_steps=4)
    result = tune(line, measure, "exhaustive")
    assert len(seen) == 24 and result.best == {"x": 5} and result.best_value == 6.0
    known, seen = steps([1.0] * 6, 0.0)
    tune(line, known, "exhaustive", precision=Precision())
    assert len(seen) == 18  # three equal measurements leave no doubt


def test_a_generator_may_end_with_an_outcome_or_fail():
    def measure(point):
        if point["x"] == 1:
            raise MemoryError("full")
        yield 1.0
        if point["x"] == 2:
            return "invalid", None, {"why": "odd"}
        return None

    result = tune(line, measure, "exhaustive")
    assert [evaluation.status for evaluation in result.history] == ["ok", "oom", "invalid", "ok", "ok", "ok"]

    def nothing(point):
        yield from ()

    with pytest.raises(InputError, match="yields no measurement and returns no status"):
        tune(line, nothing, "exhaustive")


@pytest.mark.parametrize("wrong", [{"relative": -1}, {"confidence": 1.0}, {"fewest": 1}])
def test_a_precision_out_of_range_is_rejected(wrong):
    with pytest.raises(InputError, match="expected relative >= 0"):
        Precision(**wrong)


def test_the_interval_is_that_of_student():
    values = [1.0, 2.0, 4.0, 3.5]
    low, high = stats.t.interval(0.9, 3, np.mean(values), stats.sem(values))
    assert Precision(confidence=0.9).half_width(values) == pytest.approx((high - low) / 2)
    assert Precision().half_width([1.0]) == np.inf


@pytest.mark.parametrize("strategy", ["exhaustive", "random", "coordinate_descent", "frontier"])
@pytest.mark.parametrize("options", [{}, {"budget": 5}, {"patience": 2}, {"on_fail": "stop-symbol"}])
def test_points_that_run_together_give_the_history_of_points_in_turn(strategy, options, tmp_path):
    def odd(point):
        if point["ckpt_ratio"] == 0.5 and point["global_batch_size"] == 4:
            return "fail", None, {}
        return memory(point)

    files = [tmp_path / f"{workers}.jsonl" for workers in (1, 2, 3)]
    found = [
        tune(batches, odd, strategy, seed=2, workers=workers, db=file, **options)
        for workers, file in zip((1, 2, 3), files, strict=True)
    ]
    assert found[0] == found[1] == found[2]
    assert len({file.read_bytes() for file in files}) == 1
    with pytest.raises(InputError, match="workers is 0; expected a whole number >= 1"):
        tune(batches, odd, strategy, workers=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget is 0; expected a whole number >= 1"),
        ({"patience": "2"}, "patience is '2'; expected a whole number >= 1"),
        ({"on_fail": "halt"}, "unknown on_fail 'halt'; expected skip, stop-all, stop-symbol"),
        ({"strategy": None}, "strategy is None; expected one of .*frontier.*, or a Strategy"),
        ({"eval_fn": 3}, "eval_fn is 3; expected a function"),
    ],
)
def test_arguments_of_other_kinds_are_refused_before_a_point_is_evaluated(options, message):
    with pytest.raises(InputError, match=message):
        tune(**({"space_fn": batches, "eval_fn": memory, "strategy": "exhaustive"} | options))


def test_corners_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match=r"the vertices \(\(nan, 0\), .*; expected finite numbers"):
        Polygon("x", "y", ((float("nan"), 0), (1, 2), (3, 4)))


def test_points_of_a_list_run_at_the_same_time():
    together = threading.Barrier(2, timeout=60)

    def meets(point):
        together.wait()
        return "ok", float(point["x"]), {}

    assert tune(line, meets, "exhaustive", workers=2).best == {"x": 5}


def test_points_that_run_together_are_compared_with_the_best_before_them():
    measure, _ = steps([10.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.0)
    result = tune(line, measure, "exhaustive", precision=Precision(), workers=2)
    assert [evaluation.info["enough"] for evaluation in result.history] == ["precise"] * 2 + ["worse"] * 4
