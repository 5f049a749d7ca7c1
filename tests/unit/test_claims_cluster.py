"""Checks of statements about the cluster simulation: each holds, fails, or is not run."""

import math

import pandas as pd
import pytest
from ledgers import finding

from makespan.claims import judge
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.comparisons import paired

LEDGER = PAPER.ledger()
SAME = "identical from run to run"


def table4(**changes):
    """Return a comparison in which everything holds; a change sets the JCT of a policy."""
    jct = {
        "morphling": 3000.0,
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
            "idle_s": 1700.0 if trace == "mt" else 60.0,
            "n_repeats": int(policy == "morphling-lookahead"),
            "n_identical": int(policy == "morphling-lookahead"),
        }
        for trace in ("base", "bp", "mt")
        for delay_s in (260.0, 78.0)
        for policy, value in jct.items()
    ]
    return pd.DataFrame(rows)


def lists(n_lists=10, **changes):
    """Return simulations of many lists in which everything holds; a change sets the JCT of a policy on MT."""
    jct = {"morphling": 14.0, "morphling-n": 30.0, "morphling-work": 11.0, "sia": 40.0, "tiresias": 21.0}
    jct |= {"srtf": 18.0}
    sla = {"sia": 0.5, "tiresias": 0.9, "srtf": 1.0}
    rows = [
        {"trace": trace, "draw": draw, "seed": seed, "gpus": gpus, "restart_delay_s": 260.0, "policy": policy}
        | {"jobs": 406, "avg_jct_s": value * (1 + 0.01 * seed), "makespan_s": 100.0}
        | {"sla_attainment": sla.get(policy, 1.0) if trace == "mt" else math.nan}
        for trace in ("base", "mt")
        for draw in ("shifted", "subsampled")
        for seed in range(n_lists // 2)
        for gpus in (64, 128)
        for policy, own in jct.items()
        for value in [changes.get(policy.replace("-", "_"), own) if trace == "mt" else own]
    ]
    table = pd.DataFrame(rows)
    # A rival that is 2 % ahead on one list and 2 % behind on another.
    swings = table["seed"].map(lambda seed: 1.02 if seed % 2 else 0.98)
    table.loc[table["policy"] != "morphling", "makespan_s"] = 130.0
    table.loc[table["policy"] == "morphling-work", "makespan_s"] *= swings
    return {
        "lists": table,
        "lists_pairs": paired(table, ["trace", "gpus", "restart_delay_s"], ["draw", "seed"]),
    }


def knowledge(requests=0.99, exact=0.96, lists=10):
    rows = [
        {"trace": trace, "policy": "sia", "mode": mode, "lists": lists, "jct_ratio_mean": str(ratio)}
        for trace in ("base", "mt")
        for mode, ratio in (("sampled", 1.0), ("requests", requests), ("exact", exact))
    ]
    return {"knowledge": pd.DataFrame(rows)}


def study(parameter, **changes):
    jct = {"morphling-lookahead": 14.0, "morphling-work": 11.0, "sia": 20.0, "srtf": 12.0} | {
        name.replace("_", "-"): value for name, value in changes.items()
    }
    rows = [
        {"policy": policy, parameter: value, "seed": seed, "avg_jct_s": jct[policy], "makespan_s": 100.0}
        for policy in jct
        for value in (0.5, 1.0)
        for seed in range(10)
    ]
    return pd.DataFrame(rows)


def cells():
    rows = [("naive", 895.6), ("base", 3638.0), ("bp", 3638.0), ("mt", 4017.0)]
    table = pd.DataFrame(rows, columns=["trace", "published_avg_jct_s"])
    return table.assign(restart_delay_s=260.0, interval_s=60.0)


def verdict(check, subject, tables):
    rows = LEDGER.statements()
    asked = (rows["check"] == check) & (rows["subject"] == subject) & rows["table"].isin(["", *tables])
    (place,) = rows.index[asked]
    found = judge(LEDGER, tables, "published", {}).loc[place]
    return found["verdict"], found["reproduced"], found["note"]


def test_a_lead_on_lists_is_one_over_every_rival_of_no_more_knowledge():
    found, text, note = verdict("leads_on_lists", "morphling base jct_ratio", lists())
    assert (found, text) == ("holds", "1.50x to 2.86x, ahead in 2 of 2 comparisons on 10 lists each")
    assert note == "the paper's scheduler"
    assert verdict("leads_on_lists", "morphling-work base jct_ratio", lists())[1].startswith("1.64x to 3.64x")
    lost, _, note = verdict("leads_on_lists", "morphling mt jct_ratio", lists(tiresias=7.0))
    assert lost == "fails" and "tiresias 0.50x (0.50 to 0.50) at 260 s, keeps 90.0 % of guarantees" in note


def test_a_lead_among_those_that_keep_all_guarantees_asks_for_no_others():
    ahead = lists(tiresias=7.0, srtf=9.0)
    assert verdict("leads_on_lists", "morphling mt jct_ratio keeping", ahead)[0] == "not run"
    assert verdict("leads_on_lists", "morphling-work mt jct_ratio keeping", ahead)[0] == "fails"
    assert verdict("leads_on_lists", "morphling-work mt jct_ratio keeping", lists(sia=1.0))[0] == "holds"


def test_a_lead_is_undecided_within_the_interval_and_on_few_lists():
    found, _, note = verdict("leads_on_lists", "morphling-work base makespan_ratio", lists())
    assert found == "undecided" and "srtf 1.00x (0.99 to 1.02) at 260 s" in note
    found, _, note = verdict("leads_on_lists", "morphling base jct_ratio", lists(n_lists=8))
    assert found == "undecided" and "at least 10 lists decide" in note
    alone = {"lists_pairs": lists()["lists_pairs"].iloc[:0]}
    assert verdict("leads_on_lists", "morphling base jct_ratio", alone)[0] == "not run"


def test_other_sizes_are_judged_by_the_share_of_lists_on_which_a_policy_is_ahead():
    found, text, note = verdict("wins_on_other_sizes", "morphling-work base", lists())
    assert (found, text) == ("holds", "30 of 30 cases (100.0 %)") and "srtf" not in note
    lost, text, note = verdict("wins_on_other_sizes", "morphling-work mt", lists(srtf=11.0, sia=1.0))
    assert (lost, text) == ("fails", "0 of 10 cases (0.0 %)") and "srtf on 128 GPUs at 260 s: 0 of 10" in note
    table = lists()["lists_pairs"]
    small = {"lists_pairs": table[table["gpus"] == 64]}
    assert verdict("wins_on_other_sizes", "morphling-work base", small)[0] == "not run"


def test_reconfiguring_is_judged_beside_the_best_policy_that_reconfigures_nothing():
    one_size = {name: table[table["gpus"] == 64] for name, table in lists().items()}
    one_size["lists"] = one_size["lists"][
        (one_size["lists"]["trace"] == "base") | (one_size["lists"]["policy"] != "morphling-n")
    ]
    found, text, _ = verdict("worth_of_reconfiguring", "morphling", one_size)
    assert (found, text) == ("holds", "1.50x over tiresias; -N 2.14x")
    assert verdict("worth_of_reconfiguring", "morphling-work", one_size)[0] == "not run"


def test_guarantees_and_repetitions():
    tables = {"table4": table4(), "lists": lists()["lists"]}
    assert verdict("guarantees", "", tables)[:2] == ("holds", "100.0 % at least, 72 schedules")
    broken = tables["lists"].assign(sla_attainment=tables["lists"]["sla_attainment"] * 0.99)
    assert verdict("guarantees", "", tables | {"lists": broken})[0] == "fails"
    only_base = {name: table[table["trace"] == "base"] for name, table in tables.items()}
    assert verdict("guarantees", "", only_base)[0] == "not run"
    assert finding(LEDGER, tables, "published", SAME)[:2] == ("holds", "6 of 6 repetitions")
    assert finding(LEDGER, {"table4": table4().assign(n_identical=0)}, "published", SAME)[0] == "fails"
    assert finding(LEDGER, {"table4": table4().assign(n_repeats=0)}, "published", SAME)[0] == "not run"


@pytest.mark.parametrize(("name", "parameter"), [("load", "load_factor"), ("large_models", "large_share")])
def test_the_lead_in_a_study_is_judged_at_every_point(name, parameter):
    found, text, _ = verdict("leads", "morphling-lookahead", {name: study(parameter)})
    assert (found, text) == ("holds", "1.43x to 1.43x, ahead in 2 of 2 comparisons on 10 lists each")
    behind = verdict("leads", "morphling-lookahead", {name: study(parameter, sia=13.0)})
    assert behind[0] == "fails" and "sia 0.93x (0.93 to 0.93) at 0.5; sia" in behind[2]
    assert verdict("leads", "morphling-work", {name: study(parameter)})[0] == "holds"
    assert verdict("leads", "morphling-work", {name: study(parameter, srtf=10.0)})[0] == "fails"
    rows = study(parameter)
    assert (
        verdict("leads", "morphling-lookahead", {name: rows[rows["policy"] == "morphling-lookahead"]})[0]
        == "not run"
    )
    few = {name: rows[rows["seed"] < 9]}
    assert verdict("leads", "morphling-lookahead", few)[0] == "undecided"


def test_half_a_cluster_may_be_idle_for_half_an_hour():
    tables = {"table4": table4()}
    found, text, note = verdict("no_idle_devices", "morphling-work", tables)
    assert (found, text) == ("holds", "28 min at most, 6 schedules") and "longest on mt" in note
    longer = table4().assign(idle_s=lambda rows: rows["idle_s"] * 2)
    assert verdict("no_idle_devices", "morphling-work", {"table4": longer})[0] == "fails"
    unseen = {"table4": table4().assign(idle_s=math.nan)}
    assert verdict("no_idle_devices", "morphling-work", unseen)[0] == "not run"


def test_what_the_released_simulator_prints_is_undercut():
    tables = {
        "table4": table4(),
        "table4_published": cells(),
        "getting_started": table4().assign(trace="naive"),
    }
    found, text, note = verdict("undercuts_released", "base", tables)
    assert (found, text) == ("holds", "1400.0 s and 64.0 ks")
    assert "morphling: 3000.0 s and 64.0 ks" in note and "nothing here can check them" in note
    assert verdict("undercuts_released", "naive", tables)[0] == "fails"
    assert verdict("undercuts_released", "mt", tables | {"table4": table4().iloc[:0]})[0] == "not run"
    assert (
        verdict("undercuts_released", "mt", tables | {"table4_published": cells().iloc[:0]})[0] == "not run"
    )


@pytest.mark.parametrize(
    ("subject", "values", "expected", "text"),
    [
        ("more", {}, "holds", "0.990x at worst"),
        ("more", {"requests": 1.06}, "fails", "1.060x at worst"),
        ("more", {"exact": 1.06}, "fails", "1.060x at worst"),
        ("more", {"lists": 9}, "undecided", "0.990x at worst"),
        ("less", {"requests": 2.0}, "holds", "1.042x at worst"),
        ("less", {"exact": 0.8}, "fails", "1.250x at worst"),
    ],
)
def test_what_knowing_more_or_less_costs_is_judged_at_its_worst(subject, values, expected, text):
    found = verdict("knowledge", subject, knowledge(**values))
    assert found[:2] == (expected, text)
    assert "sia on base" in found[2] and f"{values.get('lists', 10)} lists" in found[2]
    assert verdict("knowledge", subject, {"knowledge": knowledge()["knowledge"].iloc[:1]})[0] == "not run"
