"""From layer times to pipeline templates, and from templates to pipelines on so many nodes."""

from makespan.papers.oobleck.planning._template import HybridPlan, Pipeline, PipelineTemplate, Stage

__all__ = ["HybridPlan", "Pipeline", "PipelineTemplate", "Stage"]
