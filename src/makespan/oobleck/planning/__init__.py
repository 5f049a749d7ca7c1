"""From layer times to pipeline templates, and from templates to pipelines on so many nodes.

`read_profile` has the times of layers, `make_templates` finds a pipeline for each number of nodes, and
`choose_plan` says which of them, with how many microbatches, use the nodes that there are::

    profile = uniform24()
    templates = covering_templates(profile, n_nodes=13, f=1, n0=3)
    choice = choose_plan(templates, n_nodes=13, f=1, n_microbatches=512)
    plan = choice.best.on(range(13))
"""

from makespan.oobleck.planning._batches import (
    BatchMode,
    Estimator,
    distribute,
    least_time_by_program,
    microbatches,
)
from makespan.oobleck.planning._choice import Instantiation, PlanChoice, choose_plan, estimated_time_s
from makespan.oobleck.planning._cost import CostRule, MemoryLimit, StageTimes, pipeline_cost
from makespan.oobleck.planning._coverage import (
    GuaranteeUnsatisfiable,
    TemplateSet,
    check_guarantee,
    least_template_count,
    template_sizes,
)
from makespan.oobleck.planning._emulated import layer_times, paper_model, pipeline_workload
from makespan.oobleck.planning._enumeration import count_plans, enumerate_plans
from makespan.oobleck.planning._files import cached_templates, read_templates, template_rows, write_templates
from makespan.oobleck.planning._pricing import event_time_s, schedule_times_s
from makespan.oobleck.planning._profile import (
    LayerProfile,
    ModelProfile,
    random32,
    read_profile,
    uniform24,
    write_profile,
)
from makespan.oobleck.planning._search import (
    SearchMode,
    TemplateSearch,
    covering_templates,
    make_templates,
    smallest_node_count,
)
from makespan.oobleck.planning._template import HybridPlan, Pipeline, PipelineTemplate, Stage

__all__ = [
    "BatchMode",
    "CostRule",
    "Estimator",
    "GuaranteeUnsatisfiable",
    "HybridPlan",
    "Instantiation",
    "LayerProfile",
    "MemoryLimit",
    "ModelProfile",
    "Pipeline",
    "PipelineTemplate",
    "PlanChoice",
    "SearchMode",
    "Stage",
    "StageTimes",
    "TemplateSearch",
    "TemplateSet",
    "cached_templates",
    "check_guarantee",
    "choose_plan",
    "count_plans",
    "covering_templates",
    "distribute",
    "enumerate_plans",
    "estimated_time_s",
    "event_time_s",
    "layer_times",
    "least_template_count",
    "least_time_by_program",
    "make_templates",
    "microbatches",
    "paper_model",
    "pipeline_cost",
    "pipeline_workload",
    "random32",
    "read_profile",
    "read_templates",
    "schedule_times_s",
    "smallest_node_count",
    "template_rows",
    "template_sizes",
    "uniform24",
    "write_profile",
    "write_templates",
]
