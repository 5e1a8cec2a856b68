"""vLLM's `/score`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.dialects.ranking import encode_score, scored
from staged_pool.api.wire.dialects.score_fields import (
    PAIRS,
    CommonFields,
    Texts,
    contents_of,
    names_of,
    score_request,
)
from staged_pool.api.wire.exchange import Body, Write, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.ndjson import LineWriter
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.stages.errors import InvalidInput


class ScoreBody(CommonFields, kw_only=True):
    """Body of `/score`."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    return_logits: bool | None = None
    """Write the logit of each score, which ranks documents whose scores are all 1."""


_SCORE: Final = msgspec.json.Decoder(ScoreBody)


def read_score(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    request, fields = _read_score(body, card)
    return request, with_request_id(partial(encode_score, logits=fields.return_logits is True), fields.request_id)


def _read_score(body: Body, card: ModelCard) -> tuple[ScoreRequest, ScoreBody]:
    fields = read_body(_SCORE, body)
    names = _sides(fields)
    queries, documents = (contents_of(getattr(fields, name), name, fields) for name in names)
    if len(queries) not in (1, len(documents)):
        found = f"`{names[0]}` has {len(queries)}, `{names[1]}` has {len(documents)}"
        raise InvalidInput(f"Input lengths must be either 1:1, 1:N or N:N; {found}", param=names[0])
    activate = fields.use_activation is not False
    words = names_of(names, *(getattr(fields, name) for name in names))
    return score_request(fields, queries, documents, card, names=names, activate=activate, words=words), fields


def read_score_lines(body: Body, card: ModelCard) -> tuple[ScoreRequest, LineWriter]:
    """See `ReadLines`."""
    request, fields = _read_score(body, card)

    def write(places: Sequence[int], result: ScoreResult) -> Iterator[Mapping[str, object]]:
        return scored(places, result, logits=fields.return_logits is True)

    return request, LineWriter("score", fields.request_id, write)


def _sides(fields: ScoreBody) -> tuple[str, str]:
    """Return the request's names of queries and documents."""
    given = {name for pair in PAIRS for name in pair if getattr(fields, name) is not None}
    for pair in PAIRS:
        if given == set(pair):
            return pair
    for pair in PAIRS:
        if given and given < set(pair):
            [missing] = set(pair) - given
            raise field_error(missing, "this field is required")
    raise field_error(
        "queries", f"give one of the pairs {', '.join(f'{first} and {second}' for first, second in PAIRS)}"
    )
