"""Description of the routes of pipelines, which depend on the served ones, for `/openapi.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from staged_pool.api.openapi import answers
from staged_pool.api.openapi.answers import AnswerSchema
from staged_pool.api.openapi.operation import NDJSON, Operation, get, task
from staged_pool.api.wire.fields import ANY_JSON
from staged_pool.runtime.pipelines.pipeline import Pipeline

PIPELINES: Final = "/pipelines"
"""Path of the list of pipelines, and prefix of each."""

Json: Any = Annotated[Any, msgspec.Meta(extra_json_schema=ANY_JSON)]


class PipelineBody(msgspec.Struct):
    """Fields of a request to a pipeline. The list says which ones it reads."""

    data: Json
    """A list of items, or one item: texts, images as parts of a message, or what the first stage takes."""
    query: Json = None
    """A text or an image, for stages that compare items with it."""


class PipelineOutcome(AnswerSchema):
    """The output of an item."""

    index: int
    """Index among the items of the request."""
    value: Json
    parts: list[int] | None = None
    """Its number among those that each expanding stage made of one item."""


class PipelineAnswer(AnswerSchema):
    """Outcome of a request to a pipeline."""

    id: str
    object: str
    created: int
    pipeline: str
    items: list[PipelineOutcome]
    """In their order, or the best first behind a stage with `top_k`."""
    errors: list[Json]
    """Items that failed and were skipped: index, stage and error."""
    usage: answers.Usage


class PipelineEntry(AnswerSchema):
    """A served pipeline."""

    name: str
    items: str
    """Field of the request with the items."""
    fields: list[str]
    """Further fields that its stages read."""
    stages: list[str]


class PipelineList(AnswerSchema):
    """The served pipelines."""

    pipelines: list[PipelineEntry]


def path_of(name: str) -> str:
    """Return the path of a pipeline."""
    return f"{PIPELINES}/{name}"


def pipeline_operations(pipelines: Mapping[str, Pipeline]) -> Mapping[str, Mapping[str, Operation]]:
    """Return the operations of the routes of these pipelines, by path."""
    if not pipelines:
        return {}
    operations = {PIPELINES: get("The served pipelines", "Models", PipelineList)}
    for name, pipeline in pipelines.items():
        stages = ", ".join(stage.name for stage in pipeline.stages)
        fields = ", ".join(f"`{field}`" for field in (pipeline.items, *pipeline.fields))
        operations[path_of(name)] = task(
            f"The pipeline {name}",
            "Models",
            PipelineBody,
            PipelineAnswer,
            f"Stages: {stages}. It reads {fields}.",
            content_types=(NDJSON,),
        )
    return operations
