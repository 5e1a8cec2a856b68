"""Token classification of the hub's client: `inputs` and `parameters` in, a bare list of entities out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec
import numpy as np

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chunked_json import Pieces, average, dump, dump_list
from staged_pool.api.wire.dialects import classify
from staged_pool.api.wire.dialects.tei import TruncationFields, empty
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Aggregation, TokenClassifyRequest
from staged_pool.runtime.results import Entity, TokenClassifyResult
from staged_pool.stages.errors import Words

_NO_ENTITY: Final = "O"


class EntityParameters(msgspec.Struct, kw_only=True):
    """Parameters of a token classification; those that are not named here are ignored."""

    aggregation_strategy: Aggregation | None = None
    """None: `simple`."""
    ignore_labels: list[str] | None = None
    """Labels whose entities are left out; `O` must be one of them. None: `O` alone."""
    stride: int | None = None
    """Rejected: a long text is cut, and not divided."""


class HubEntitiesBody(TruncationFields, kw_only=True):
    """Body of the hub's token classification; fields that are not named here are ignored."""

    inputs: str | list[str]
    parameters: EntityParameters | None = None


_BODY: Final = msgspec.json.Decoder(HubEntitiesBody)


def read_entities(body: Body, card: ModelCard, *, auto_truncate: bool) -> tuple[TokenClassifyRequest, Write]:
    """Read a body of the hub's client, or of `/classify_tokens` if it has no `inputs`; see `Read`.

    Args:
        body: See `Read`.
        card: See `Read`.
        auto_truncate: Truncate long texts of the hub's client if the request does not say.
    """
    if "inputs" not in json_decode.given_fields(body):
        return classify.read_classify_tokens(body, card)
    fields = json_decode.decode(_BODY, body)
    parameters = fields.parameters or EntityParameters()
    ignored = [_NO_ENTITY] if parameters.ignore_labels is None else parameters.ignore_labels
    if parameters.stride is not None:
        raise field_error("parameters.stride", "is not supported: a long text is cut at its end")
    if _NO_ENTITY not in ignored:
        raise field_error("parameters.ignore_labels", "expected `O` among them: tokens of no entity are left out")
    if not fields.inputs:
        raise empty("inputs")
    single = isinstance(fields.inputs, str)
    texts = [fields.inputs] if isinstance(fields.inputs, str) else fields.inputs
    names = {"input": "inputs", "max_tokens": "truncate", "aggregation": "parameters.aggregation_strategy"}
    request = TokenClassifyRequest(
        inputs=tuple(fields.text(text, auto_truncate) for text in texts),
        words=Words(names, InputPaths("inputs", several=not single)),
        aggregation=parameters.aggregation_strategy or "simple",
    )
    label = "entity" if request.aggregation == "none" else "entity_group"
    return request, partial(encode_entities, label=label, ignored=frozenset(ignored), single=single)


def encode_entities(
    result: TokenClassifyResult,
    /,
    label: str,
    ignored: frozenset[str],
    single: bool,
    *,
    request_id: str,
    created: int,
) -> Pieces:
    """Write the entities of each text; see `Write`.

    Args:
        result: The entities.
        label: Name of the field of the label.
        ignored: Labels whose entities are left out.
        single: The request had one text, and not a list of texts.
        request_id: See `Write`.
        created: See `Write`.
    """

    def rows() -> Iterator[list[dict[str, object]]]:
        for entities in result.entities:
            yield [_entity(each, label) for each in entities if each.label not in ignored]

    if single:
        return dump(next(rows()))
    return dump_list(rows(), item_values=average(4 * sum(map(len, result.entities)), len(result.entities)))


def _entity(entity: Entity, label: str) -> dict[str, object]:
    return {
        label: entity.label,
        "score": np.float32(entity.score),
        "word": entity.text,
        "start": entity.start,
        "end": entity.end,
    }
