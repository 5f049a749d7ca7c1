"""The ledger judges from tables alone: each check holds, fails, or is not run."""

import numpy as np
import pandas as pd
from ledgers import finding

from makespan.claims import judge
from makespan.papers.morphling import PAPER
from makespan.throughput import SOURCE_NAMES

LEDGER = PAPER.ledger()


def table2(**errors):
    rows = [("vit", "DP", "extended", 4.0), ("vit", "GC", "extended", 6.0), ("vit", "GC", "published", 30.0)]
    rows += [("t5", "DP+TP+PP", "extended", np.nan), ("t5", "DP", "extended", 5.0)]
    table = pd.DataFrame(rows, columns=["model", "plan_family", "form", "avg_error_pct"])
    return table.assign(
        avg_error_pct=[errors.get(m, e) for m, e in zip(table.model, table.avg_error_pct, strict=False)]
    )


def fig7(**changes):
    times = {
        "Morphling": [1.165, 1.803, 5.107, 66.0, 46.0],
        "TP+DP": [1.306, 2.372, 5.704, 0.0, 0.0],
    }
    stages = ["4x8", "4x4", "1x4", "1x1", "1x1 2xCPU"]
    plans = changes.get("plans", ["244", "441", "221", "zero-offload+gc", "zero-offload+gc"])
    rows = []
    for strategy, values in times.items():
        used = changes.get("times", values) if strategy == "Morphling" else values
        for k, value in enumerate(used):
            rows.append(
                (
                    strategy,
                    stages[k],
                    [32, 16, 4, 1, 1][k],
                    plans[k],
                    value,
                    16 / value if value else 0.0,
                    [2, 2, 2, 2, 4][k],
                    values[k],
                )
            )
    columns = (
        "strategy stage gpus plan iter_time_s throughput_samples_per_s cpu_threads published_iter_time_s"
    )
    # Columns that no schema names come as text from a file.
    return pd.DataFrame(rows, columns=columns.split()).astype({"cpu_threads": str})


def fig8(speedups=(0.534, 0.251, 0.5454, 0.8852), gpus=(2, 2, 1, 3), clean=(0.534, 0.251, 0.21, 0.8852)):
    return pd.DataFrame(
        {
            "scheduler": ["Simple", "Simple", "Morphling", "Morphling"],
            "job": ["roberta", "t5_3B"] * 2,
            "gpus": gpus,
            "speedup": speedups,
            "published_speedup": [0.53, 0.25, 0.55, 0.89],
            "clean_speedup": [str(value) for value in clean],
        }
    )


def curves(n_changing):
    models = [f"m{k}" for k in range(4)]
    plans = [
        (m, g, "ga" if g == 1 or k >= n_changing else "gc") for k, m in enumerate(models) for g in (1, 2)
    ]
    curve = pd.DataFrame(plans, columns=["model", "gpus", "best_plan"]).assign(throughput_samples_per_s=1.0)
    families = pd.DataFrame(
        [(m, p, f) for m in models for p, f in (("ga", "DP"), ("gc", "GC"))],
        columns=["model", "plan", "plan_family"],
    )
    return {"sensitivity": curve, "sensitivity_families": families}


def stated(part, tables, source="published"):
    """Return verdict, value and note of the statement that has this part."""
    return finding(LEDGER, tables, source, part)


def judged(check, tables, subject="", source="published", form="extended"):
    """Return verdict, value and note of the statement with that check and subject."""
    rows = LEDGER.statements()
    (place,) = rows.index[(rows["check"] == check) & (rows["subject"] == subject)]
    found = judge(LEDGER, tables, source, {"form": form}).loc[place]
    return found["verdict"], found["reproduced"], found["note"]


def test_statements_name_sources_that_there_are():
    rows = LEDGER.statements()
    assert set(" ".join([*rows["sources"], *rows["fails_on"]]).split()) <= set(SOURCE_NAMES)


def test_without_tables_every_statement_says_what_is_missing():
    result = judge(LEDGER, {}, "emulated", {"form": "extended"})
    assert set(result["paper"]) == {"Morphling"}
    assert set(result["verdict"]) == {"not run"}
    assert (result["note"] != "").all()
    assert judged("summed_gain", {}, "speedup")[2] == "no table fig8 of the paper's models"


def test_worst_family_of_the_experiments_form_decides():
    assert judged("worst_family_error", {"table2": table2()}, "vit")[:2] == (
        "holds",
        "worst 6.000 % (GC, 2 families)",
    )
    assert judged("worst_family_error", {"table2": table2()}, "vit", form="published")[0] == "fails"
    assert judged("worst_family_error", {"table2": table2(vit=10.01)}, "vit")[0] == "fails"
    assert judged("worst_family_error", {"table2": table2(vit=10.0)}, "vit")[0] == "holds"
    verdict, _, note = judged("worst_family_error", {"table2": table2()}, "t5")
    assert (verdict, note) == ("holds", "no held-out rows: DP+TP+PP")
    assert judged("worst_family_error", {"table2": table2()}, "gpt2")[0] == "not run"


def test_never_slower():
    assert judged("never_slower", {"fig7": fig7()})[:2] == ("holds", "5 of 5 stages")
    slow = fig7(times=[1.4, 1.803, 5.107, 66.0, 46.0])
    verdict, reproduced, note = judged("never_slower", {"fig7": slow})
    assert (verdict, reproduced) == ("fails", "4 of 5 stages")
    assert note == "4x8: 0.933 of the best"


def test_fig7_always_runs():
    assert stated("runs at every stage", {"fig7": fig7()})[0] == "holds"
    stopped = fig7(times=[1.165, 1.803, 5.107, 0.0, 46.0])
    assert stated("runs at every stage", {"fig7": stopped})[:2] == ("fails", "4 of 5 stages")


def test_plan_changes():
    verdict, reproduced, note = judged("plan_changes", {"fig7": fig7()})
    assert (verdict, reproduced) == ("holds", "3 changes")
    assert note.startswith("244 -> 441 -> 221")
    assert judged("plan_changes", {"fig7": fig7(plans=["244", "244", "221", "ga", "ga"])})[0] == "fails"


def test_cpu_speedup():
    for last, verdict in [(46.0, "holds"), (55.0, "holds"), (55.1, "fails")]:
        table = fig7(times=[1.165, 1.803, 5.107, 66.0, last])
        assert judged("cpu_speedup", {"fig7": table})[0] == verdict


def test_cpu_speedup_needs_a_run_to_compare_with():
    table = fig7(times=[1.165, 1.803, 5.107, 0.0, 46.0])
    assert judged("cpu_speedup", {"fig7": table})[0] == "not run"


def test_equality_with_the_paper_is_exact_for_times_and_rounded_for_speedups():
    assert stated("all iteration times equal", {"fig7": fig7()})[:2] == ("holds", "10 of 10 cells")
    off = fig7(times=[1.1650001, 1.803, 5.107, 66.0, 46.0])
    assert stated("all iteration times equal", {"fig7": off})[:2] == ("fails", "9 of 10 cells")
    assert stated("all speed-ups equal", {"fig8": fig8()})[:2] == ("holds", "4 of 4 cells")
    assert stated("all speed-ups equal", {"fig8": fig8((0.54, 0.251, 0.5454, 0.8852))})[0] == "fails"
    assert stated("all iteration times equal", {"fig7": fig7()}, source="emulated")[0] == "not run"


def test_fig8_division_and_gain():
    tables = {"fig8": fig8()}
    assert stated("gives T5 3B more GPUs", tables)[:2] == ("holds", "3 and 1")
    assert stated("gives T5 3B more GPUs", {"fig8": fig8(gpus=(2, 2, 2, 2))})[0] == "fails"
    assert judged("summed_gain", tables, "speedup")[:2] == ("holds", "1.82x (1.43 against 0.79)")
    assert judged("summed_gain", tables, "clean_speedup")[0] == "fails"
    gap = {"fig8": fig8(clean=(0.534, 0.251, "", 0.8852))}
    assert judged("summed_gain", gap, "clean_speedup")[0] == "not run"


def test_best_family_changes():
    for n_changing, verdict in [(4, "holds"), (2, "holds"), (1, "fails")]:
        found = judged("best_family_changes", curves(n_changing))
        assert found[:2] == (verdict, f"{n_changing} of 4 models")
