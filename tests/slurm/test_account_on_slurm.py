"""Whom Slurm charges: the account that is named, else the one that the executor finds."""

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

RULES = """
rule guessed:
    output: "guessed.txt"
    resources: mem_mb=100, runtime=7
    shell: "touch {output}"

rule named:
    output: "named.txt"
    resources: mem_mb=100, runtime=7, slurm_account="ours"
    shell: "touch {output}"
"""
# This cluster keeps no accounts; these answer as where it does.
ANSWERS = {"sacct": "theirs", "sacctmgr": "theirs\nours"}


def test_a_named_account_is_charged_and_else_the_one_that_sacct_names(clone):
    (clone.root / "account.smk").write_text(RULES)
    for name, answer in ANSWERS.items():
        program = clone.cluster.root / "bin" / name
        program.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
        program.chmod(0o755)
    try:
        output = clone.snakemake("guessed.txt", "named.txt", "--snakefile", "account.smk")
    finally:
        for name in ANSWERS:
            (clone.cluster.root / "bin" / name).unlink()
    assert "Guessed SLURM account: theirs" in output
    assert sorted(job["Account"] for job in clone.jobs()) == ["ours", "theirs"]
