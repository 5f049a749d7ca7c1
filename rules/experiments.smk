# The experiments of all papers: one rule per experiment, from throughput tables and printed cells to result tables.


def experiment_outputs(experiment):
    """Return the sources of an experiment by the tables that it writes for them."""
    outputs = {}
    for source in SOURCES:
        tables = tuple(experiment.tables_of(source, profiled_workloads(SETTINGS, source)))
        if tables:
            outputs.setdefault(tables, []).append(source)
    return outputs


def experiment_inputs(paper, experiment, source):
    """Return the files that an experiment reads for a source, by name."""
    files = {"times": throughput_tables(source, timed_workloads(experiment, source))}
    files |= {f"published_{name}": f"config/published/{paper}_{name}.csv" for name in experiment.cells}
    files |= {name: f"results/{source}/{paper}/{name}.csv" for name in experiment.reads}
    files |= {"options": named_files(json.loads(experiment.to_json()))}
    if source == PROFILED and experiment.is_timed:
        records = expand(rules.profile_collect.output.record, workload=PROFILE.workloads)
        files |= {"records": records, "environment": ENVIRONMENT_FILE}
    if experiment.reads_files and source == "published":
        files |= {"files": registered("paper_files", paper)}
    return files


def columns_of(paper, tables, experiment):
    """Return the columns of what an experiment writes and reads, which are data of the paper."""
    names = [*tables, *experiment.reads, *(f"published_{name}" for name in experiment.cells)]
    return [str(paper_named(paper).schema_of(name).columns) for name in names]


def timed_workloads(experiment, source):
    """Return the workloads whose throughput tables an experiment reads for a source."""
    return list(experiment.timed_workloads(source, profiled_workloads(SETTINGS, source)))


for paper in EXPERIMENTS:
    for experiment in EXPERIMENTS[paper].values():
        outputs = experiment_outputs(experiment)
        for number, (tables, sources) in enumerate(outputs.items()):
            name = f"{paper}_{experiment.name}" + (f"_{sources[0]}" if number else "")
            kind = f"{type(experiment).__module__}:{type(experiment).__name__}"

            rule:
                name:
                    name
                input:
                    unpack(
                        lambda wildcards, paper=paper, experiment=experiment: experiment_inputs(
                            paper, experiment, wildcards.source
                        )
                    ),
                output:
                    [f"results/{{source}}/{paper}/{table}.csv" for table in tables],
                log:
                    f"logs/{{source}}/{paper}/{name}.log",
                benchmark:
                    f"benchmarks/results/{{source}}/{paper}/{name}.tsv"
                wildcard_constraints:
                    source="|".join(sources),
                # What takes several cores goes first and figures last: small jobs fill up cores in the end.
                priority: 1 + (experiment.n_threads(2) > 1)
                group:
                    experiment.group or None
                localrule: experiment.is_local
                conda:
                    GPU if experiment.trains else CPU
                threads: experiment.n_threads(all_cores(1))
                resources:
                    **(profile_gpus(gpu=experiment.n_gpus()) if experiment.n_gpus() else {}),
                    **asks(experiment.minutes, experiment.mem_mb),
                params:
                    paper=paper,
                    experiment=kind,
                    options=experiment.to_json(),
                    tables=tables,
                    columns=columns_of(paper, tables, experiment),
                    workloads=lambda wildcards, experiment=experiment: timed_workloads(
                        experiment, wildcards.source
                    ),
                    published=lambda wildcards, experiment=experiment: (
                        [str(published_directory(SETTINGS)), SETTINGS.throughput.published.register_file]
                        if experiment.reads_files and wildcards.source == "published"
                        else None
                    ),
                    code=code_hash("run_experiment", kind, chosen=experiment.policies_run()),
                script:
                    "../workflow/scripts/run_experiment.py"
