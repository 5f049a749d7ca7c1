"""Templates by hand, so that what happens to pipelines is tested without the planner."""

from itertools import pairwise

from makespan.oobleck.plan import Pipeline, PipelineTemplate, Stage


def even_template(n_nodes, n_layers, gpus_per_node=1, gpus_per_stage=1):
    """Cut equal layers as evenly as can be, the longer stages first."""
    n_stages = n_nodes * gpus_per_node // gpus_per_stage
    ends = [-(-index * n_layers // n_stages) for index in range(n_stages + 1)]
    stages = tuple(Stage(a, b, gpus_per_stage, (b - a) * 0.01 / gpus_per_stage) for a, b in pairwise(ends))
    return PipelineTemplate(n_nodes, gpus_per_node, stages, 0.04 * n_layers)


def even_templates(n_layers, sizes, **how):
    """Return a template for each number of nodes."""
    return {size: even_template(size, n_layers, **how) for size in sizes}


def pipelines_of(groups, templates, n_microbatches=4):
    """Put nodes into the templates of their number."""
    return [Pipeline(tuple(nodes), templates[len(nodes)], n_microbatches) for nodes in groups]


def layers_by_node(pipelines):
    """Return the layers of every node, where each has one GPU."""
    return {
        node: set(stage.layers)
        for one in pipelines
        for node, stage in zip(one.nodes, one.template.stages, strict=True)
    }
