"""Paths that take every task: SageMaker's `/invocations`, and the root of text-embeddings-inference.

The fields of the body select the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.dialects.plugin import PLUGIN_TASK
from staged_pool.api.wire.dialects.pooling import NAMES
from staged_pool.api.wire.dialects.score_fields import PAIRS
from staged_pool.api.wire.dialects.zero_shot import has_parameters
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import InvalidInput

_ANY: Final = msgspec.json.Decoder(Any)
_TASK_PATHS: Final = {"score": "/score", "rerank": "/v1/rerank"}


def candidates(body: Body) -> tuple[str, ...]:
    """Return the paths whose fields a body has, in vLLM's order.

    The caller takes the first one that a served model can do. A `task` of `/pooling`, or `score` or `rerank`, decides
    alone. `inputs`, and `texts` with a query, belong to text-embeddings-inference.

    Raises:
        InvalidInput: The body is not JSON, or has the fields of no task.
    """
    fields = json_decode.given_fields(body)
    names = fields.keys()
    if (path := _path_of_task(fields.get("task"))) is not None:
        return (path,)
    found: list[str] = []
    if "data" in names:
        found.append("/pooling")
    if names & {"input", "messages"}:
        found += ["/classify"] if "candidate_labels" in names else ["/v1/embeddings", "/classify"]
    if "query" in names:
        found.append("/rerank" if "texts" in names and "documents" not in names else "/v1/rerank")
    if any(names >= set(pair) for pair in PAIRS):
        found.append("/score")
    if names & {"input", "messages"}:
        found.append("/pooling")
    if names & {"texts", "images"} and "query" not in names:
        found.append("/v2/embed")
    if "inputs" in names:
        is_comparison = json_decode.shape(fields["inputs"]) == (0, b"{")
        found += (
            ["/predict"]
            if has_parameters(fields) or "candidate_labels" in names
            else ["/similarity"]
            if is_comparison
            else ["/embed", "/predict", "/embed_sparse", "/embed_all", "/classify_tokens"]
        )
    if not found:
        raise InvalidInput(
            "The body has the fields of no task: `input`, `messages`, `inputs`, `texts`, or a query and documents"
        )
    return tuple(found)


def root_path(body: Body, cards: Sequence[ModelCard]) -> str:
    """Return the path of text-embeddings-inference for a body sent to its root.

    A `query`, `candidate_labels`, or `inputs` that are an object, decide alone. For other `inputs` it is the route of
    the first model that has one.

    Args:
        body: Body of the request.
        cards: Descriptions of the served models, in their order.

    Raises:
        InvalidInput: The body is not JSON, or has neither `inputs` nor `query`.
    """
    fields = json_decode.given_fields(body)
    if "query" in fields:
        if not fields.keys() & {"texts", "documents"}:
            raise InvalidInput("texts: this field is required", param="texts")
        return "/rerank"
    if "inputs" not in fields:
        raise InvalidInput("The body has neither `inputs`, nor `query` and `texts`", param="inputs")
    if has_parameters(fields) or "candidate_labels" in fields:
        return "/predict"
    if json_decode.shape(fields["inputs"]) == (0, b"{"):
        return "/similarity"
    paths = {
        **{Output.DENSE: "/embed", Output.LABELS: "/predict", Output.SPARSE: "/embed_sparse"},
        Output.TOKEN_LABELS: "/classify_tokens",
    }
    found = (path for card in cards for output, path in paths.items() if output in card.outputs)
    return next(found, "/embed")


def _path_of_task(raw: msgspec.Raw | None) -> str | None:
    """Return the path of a `task`; None for an unknown one, such as one of Jina's."""
    if raw is None:
        return None
    task = json_decode.decode(_ANY, raw, root="task")
    if isinstance(task, list) and task and all(each in NAMES for each in task if isinstance(each, str)):
        return "/pooling"
    if not isinstance(task, str):
        return None
    return "/pooling" if task in NAMES or task == PLUGIN_TASK else _TASK_PATHS.get(task)
