"""SageMaker's `/invocations`: one path for every task; what a body asks for is seen from its fields."""

from __future__ import annotations

from typing import Final

import msgspec

from staged_pool.api.wire import jsons
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.score import PAIRS
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
