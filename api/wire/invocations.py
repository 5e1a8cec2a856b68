"""Paths for every task: SageMaker's `/invocations`, and the root of text-embeddings-inference.

What a body asks for shows in its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from staged_pool.api.wire import jsons
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.score import PAIRS
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import InvalidInput

_NAMES: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def candidates(body: Body) -> tuple[str, ...]:
    """The paths that a body may be meant for, in vLLM's order; the first that a served model can do is the one.

    Raises:
        InvalidInput: It is not JSON, or of no task.
    """
    names = jsons.decode(_NAMES, body).keys()
    found: list[str] = []
    if names & {"input", "messages"}:
        found += ["/v1/embeddings", "/classify"]
    if "query" in names:
        found.append("/v1/rerank")
    if any(names >= set(pair) for pair in PAIRS):
        found.append("/score")
    if names & {"input", "messages"}:
        found.append("/pooling")
    if not found:
        raise InvalidInput("The body has the fields of no task: `input`, `messages`, or a query and documents")
    return tuple(found)


def root_path(body: Body, cards: Sequence[ModelCard]) -> str:
    """The path of text-embeddings-inference that a body to its root is meant for.

    There, the root is the route of the model's kind. Here, the fields say what they can, and the first model that has
    a route for the rest decides.

    Args:
        body: Of the request.
        cards: Of the served models, in their order.

    Raises:
        InvalidInput: It is not JSON, or has neither `inputs` nor `query`.
    """
    fields = jsons.decode(_NAMES, body)
    if "query" in fields:
        return "/rerank"
    if "inputs" not in fields:
        raise InvalidInput("The body has neither `inputs`, nor `query` and `texts`", param="inputs")
    if jsons.shape(fields["inputs"]) == (0, b"{"):
        return "/similarity"
    paths = {Output.DENSE: "/embed", Output.LABELS: "/predict", Output.SPARSE: "/embed_sparse"}
    found = (path for card in cards for output, path in paths.items() if output in card.outputs)
    return next(found, "/embed")
