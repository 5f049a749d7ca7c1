"""Checks of statements about the cluster simulation: each holds, fails, or is not run."""

import pandas as pd
import pytest

from makespan.claims import judge
from makespan.papers.morphling import LEDGER


def table4(**changes):
    """Return a comparison in which everything holds; a change sets the JCT of a policy."""
    jct = {
        "morphling-lookahead": 1400.0,
        "morphling-work": 1100.0,
        "sia": 4200.0,
        "synergy": 6600.0,
        "antman": 6600.0,
        "sjf": 2400.0,
        "srtf": 1900.0,
        "morphling-work-e": 2200.0,
        "morphling-work-r": 1600.0,
        "morphling-work-n": 2100.0,
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    rows = [
        {
            "trace": trace,
            "policy": policy,
            "restart_delay_s": delay_s,
            "interval_s": 60.0,
            "avg_jct_s": value,
            "makespan_s": 64_000.0 * (1.0 if policy.startswith("morphling") else 1.2),
            "sla_attainment": 1.0 if trace == "mt" else float("nan"),
            "n_repeats": str(int(policy == "morphling-lookahead")),
            "n_identical": str(int(policy == "morphling-lookahead")),
        }
        for trace in ("base", "bp", "mt")
        for delay_s in (260.0, 78.0)
        for policy, value in jct.items()
    ]
    return pd.DataFrame(rows)


def perturbed(jct=1100.0, sla=1.0):
    rows = [
        {"trace": trace, "policy": policy, "restart_delay_s": 260.0, "avg_jct_s": jct, "avg_jct_std_s": "50"}
        | {"makespan_s": 64_000.0, "makespan_std_s": 100.0, "sla_attainment": sla if trace == "mt" else None}
        for trace in ("base", "bp", "mt")
        for policy in ("morphling-lookahead", "morphling-work")
    ]
    return pd.DataFrame(rows)


def study(parameter, **changes):
    jct = {"morphling-lookahead": 14.0, "morphling-work": 11.0, "sia": 20.0, "srtf": 12.0} | {
        name.replace("_", "-"): value for name, value in changes.items()
    }
    rows = [
        {"policy": policy, parameter: value, "seed": seed, "avg_jct_s": jct[policy]}
        for policy in jct
        for value in (0.5, 1.0)
        for seed in (1, 2)
    ]
    return pd.DataFrame(rows)


def cells():
    rows = [("naive", 895.6), ("base", 3638.0), ("bp", 3638.0), ("mt", 4017.0)]
    table = pd.DataFrame(rows, columns=["trace", "published_avg_jct_s"])
    return table.assign(reading="printed", restart_delay_s=260.0, interval_s=60.0)


def verdict(check, subject, tables):
    rows = LEDGER.statements()
    (place,) = rows.index[(rows["check"] == check) & (rows["subject"] == subject)]
    found = judge(LEDGER, tables, "published", {}).loc[place]
    return found["verdict"], found["reproduced"], found["note"]


def test_rivals_are_beaten_on_every_trace_or_not():
    found, text, note = verdict("beats_rivals", "avg_jct_s", {"table4": table4()})
    assert (found, text) == ("holds", "up to 4.71x, 18 of 18 comparisons")
    assert "least 3.00x sia on base at 260 s" in note
    lost = verdict("beats_rivals", "avg_jct_s", {"table4": table4(sia=1400.0)})
    assert lost[:2] == ("fails", "up to 4.71x, 12 of 18 comparisons")
    assert verdict("beats_rivals", "makespan_s", {"table4": table4()})[0] == "holds"
    alone = table4()
    alone = alone[alone["policy"].str.startswith("morphling")]
    assert verdict("beats_rivals", "avg_jct_s", {"table4": alone})[0] == "not run"


def test_guarantees_and_repetitions():
    tables = {"table4": table4(), "perturbed": perturbed()}
    assert verdict("guarantees", "", tables)[:2] == ("holds", "100.0 % at least, 6 cells")
    assert verdict("guarantees", "", tables | {"perturbed": perturbed(sla=0.99)})[0] == "fails"
    only_base = {name: table[table["trace"] == "base"] for name, table in tables.items()}
    assert verdict("guarantees", "", only_base)[0] == "not run"
    assert verdict("identical", "", tables)[:2] == ("holds", "6 of 6 repetitions")
    assert verdict("identical", "", {"table4": table4().assign(n_identical="0")})[0] == "fails"
    assert verdict("identical", "", {"table4": table4().assign(n_repeats=0)})[0] == "not run"


@pytest.mark.parametrize(("name", "parameter"), [("load", "load_factor"), ("large_models", "large_share")])
def test_the_lead_is_judged_against_rivals_that_know_as_much(name, parameter):
    assert verdict("leads", name, {name: study(parameter)})[:2] == ("holds", "2 of 2 points")
    behind = verdict("leads", name, {name: study(parameter, sia=13.0)})
    assert (
        behind[:2] == ("fails", "0 of 2 points") and "sia is ahead of morphling-lookahead at 0.5" in behind[2]
    )
    assert verdict("leads", name, {name: study(parameter, srtf=10.0)})[0] == "fails"
    rows = study(parameter)
    assert verdict("leads", name, {name: rows[rows["policy"] == "morphling-lookahead"]})[0] == "not run"


def test_what_the_released_simulator_prints_is_undercut():
    tables = {
        "table4": table4(),
        "table4_published": cells(),
        "getting_started": table4().assign(trace="naive"),
    }
    found, text, note = verdict("undercuts_released", "base", tables)
    assert (found, text) == ("holds", "1100.0 s and 64.0 ks")
    assert "impossible" in note
    assert verdict("undercuts_released", "naive", tables)[0] == "fails"
    assert verdict("undercuts_released", "mt", tables | {"table4": table4().iloc[:0]})[0] == "not run"
    assert (
        verdict("undercuts_released", "mt", tables | {"table4_published": cells().iloc[:0]})[0] == "not run"
    )
