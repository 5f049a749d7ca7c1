"""The verbs that list what there is: ``policies``, ``clusters``, ``workloads`` and ``claims``."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from makespan.cli.options import PAPER_NAMES, check_default, form_options, say, say_rows
from makespan.errors import InputError
from makespan.units import format_bytes

if TYPE_CHECKING:
    from makespan.sim import Policy

_WIDTH = 100
_VERDICTS = ("holds", "fails", "undecided", "not run")


@click.command("policies")
@form_options
def policies_command(form: str | None) -> None:
    """List the scheduling policies.

    This shows name, title, requirements, guarantees and paper of each, or the error of a broken policy.
    """
    from makespan.policies import REGISTRY
    from makespan.sim import PolicyError

    width, rows = max(map(len, REGISTRY)), []
    for name in REGISTRY:
        try:
            entry = REGISTRY[name]
        except PolicyError as error:
            rows.append(_policy_row(name, None, str(error)))
            if form is None:
                say(f"{name:<{width}}  broken: {error}")
            continue
        rows.append(_policy_row(name, entry, ""))
        if form is None:
            traits = ["knows the steps left" if entry.is_clairvoyant else "knows nothing of the steps left"]
            if entry.interval_s is not None:
                traits.append(f"rounds of {entry.interval_s:g} s")
            if entry.honours_guarantees:
                traits.append("keeps guarantees")
            say(f"{entry.name:<{width}}  {entry.title}: {', '.join(traits)}")
            for reference in entry.references:
                say(_indented(reference, width + 2))
    if form is not None:
        say_rows(rows, form)


def _policy_row(name: str, entry: "Policy | None", broken: str) -> dict[str, Any]:
    return {
        "policy": name,
        "title": entry.title if entry else "",
        "is_clairvoyant": entry.is_clairvoyant if entry else None,
        "interval_s": entry.interval_s if entry else None,
        "honours_guarantees": entry.honours_guarantees if entry else None,
        "references": "; ".join(entry.references) if entry else "",
        "broken": broken,
    }


def _indented(text: str, indent: int) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


@click.command("clusters")
@form_options
def clusters_command(form: str | None) -> None:
    """List the clusters of the catalogue.

    This shows nodes, devices and network of each, and whether policies can decide by a fitted model there.
    """
    from makespan.hardware import cluster, cluster_names
    from makespan.perf import environment_names

    rows: list[dict[str, Any]] = []
    for name in cluster_names():
        found = cluster(name)
        nodes = found.kinds
        rows.append(
            {
                "cluster": name,
                "n_nodes": found.n_nodes,
                "n_gpus": found.n_gpus,
                "gpus_per_node": "+".join(str(node.n_gpus) for node in nodes),
                "gpu": "+".join(node.gpu_type for node in nodes),
                "gpu_memory_bytes": min(node.gpu.memory_bytes for node in nodes),
                "nic_bandwidth_bytes_per_s": min(
                    node.nic_bandwidth_bytes_per_s * node.n_nics for node in nodes
                ),
                "has_fitted_model": name in environment_names(),
            }
        )
    if form is not None:
        say_rows(rows, form)
        return
    for row in rows:
        what = f"{row['n_nodes']} node(s), {row['n_gpus']} x {row['gpu']} ({row['gpus_per_node']} a node)"
        memory, card = (format_bytes(row[key]) for key in ("gpu_memory_bytes", "nic_bandwidth_bytes_per_s"))
        model = ", fitted model" if row["has_fitted_model"] else ""
        say(f"{row['cluster']:<18} {what}: at least {memory} a GPU, {card}/s a node{model}")


@click.command("workloads")
@form_options
def workloads_command(form: str | None) -> None:
    """List the workloads that jobs can train.

    Small workloads can be profiled and trained on this machine; times of others are emulated or published.
    """
    from makespan.workloads import small_workload_keys, workload, workload_keys

    small = small_workload_keys()
    rows: list[dict[str, Any]] = []
    for key in (*workload_keys(), *(key for key in small if key not in workload_keys())):
        found = workload(key)
        rows.append(
            {
                "workload": key,
                "title": found.model.title,
                "parameters": found.model.parameters,
                "global_batch_size": found.global_batch_size,
                "families": " ".join(found.families),
                "aliases": " ".join(found.aliases),
                "is_small": key in small,
            }
        )
    if form is not None:
        say_rows(rows, form)
        return
    width = max(len(row["workload"]) for row in rows)
    for row in rows:
        also = f"; also {row['aliases']}" if row["aliases"] else ""
        size = f"{row['parameters'] / 1e6:,.1f} M parameters, batch {row['global_batch_size']}"
        say(f"{row['workload']:<{width}}  {row['title']}: {size}{', small' * row['is_small']}{also}")


_LEDGER = Path("results/claims.csv")


@click.command("claims")
@click.option("--paper", metavar="NAME", shell_complete=PAPER_NAMES, help="Statements of this paper only.")
@click.option("--fails", is_flag=True, help="Show only statements that do not hold.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    default=_LEDGER,
    show_default=True,
    help="Ledger that the workflow wrote.",
)
@form_options
def claims_command(paper: str | None, fails: bool, ledger: Path, form: str | None) -> None:
    """Print the statements of the papers with their verdicts.

    This shows the published value, the value of each source, and why a statement does not hold or is open.
    """
    from makespan.tables import JOINED_CLAIMS, read_csv

    check_default(
        ledger,
        _LEDGER,
        "write it with 'snakemake --cores all claims', or name another with --ledger",
    )
    table = read_csv(ledger, JOINED_CLAIMS).fillna("")
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    papers = list(dict.fromkeys(str(row["paper"]) for row in rows))
    if paper is not None and paper.lower() not in map(str.lower, papers):
        raise InputError(f"--paper {paper!r}: not in {ledger}; expected {', '.join(papers)}")
    kept = [
        row
        for row in rows
        if (paper is None or str(row["paper"]).lower() == paper.lower())
        and (not fails or row["verdict"] == "fails")
    ]
    if form is not None:
        say_rows(kept, form)
        return
    head: tuple[object, ...] = ()
    for row in kept:
        if (row["paper"], row["artifact"]) != head:
            head = row["paper"], row["artifact"]
            say(f"\n{row['paper']}, {row['artifact']}")
        statement = f"{row['verdict']:<9} {row['statement']}"
        say(textwrap.fill(statement, _WIDTH, initial_indent="  ", subsequent_indent=" " * 12))
        values = [("published", row["published"])]
        values += [
            (name.removeprefix("reproduced_"), value)
            for name, value in row.items()
            if name.startswith("reproduced_") and value
        ]
        notes = [row["note"]] if row["verdict"] != "holds" else []
        for text in ("; ".join(f"{name}: {value}" for name, value in values if value), *notes):
            if text:
                say(_indented(str(text), 12))
    verdicts = [row["verdict"] for row in kept]
    say("\n" + ", ".join(f"{verdicts.count(name)} {name}" for name in _VERDICTS))
