"""Requests of `/rerank`, in the dialects of all clients that share this path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.dialects import tei, weaviate
from staged_pool.api.wire.dialects.rank_fields import texts_of
from staged_pool.api.wire.dialects.ranking import encode_rerank, ranked
from staged_pool.api.wire.dialects.score_fields import (
    CommonFields,
    Text,
    Texts,
    contents_of,
    names_of,
    score_request,
)
from staged_pool.api.wire.exchange import Body, Write, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.fields import Limit
from staged_pool.api.wire.ndjson import LineWriter
from staged_pool.api.wire.truncation import Direction, side_of
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Content, ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.stages.foreign_json import MOST_DEPTH


class RerankBody(CommonFields, kw_only=True):
    """Body of `/rerank`."""

    query: Text
    documents: Texts | None = None
    top_n: Limit | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None
    """Infinity's and TEI's field, the opposite of `use_activation`."""

    texts: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    """TEI's name of `documents`; if it is sent, the answer has TEI's form. The next three fields are also TEI's."""
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    top_k: Limit | None = None
    """Voyage's name of `top_n`; its clients read the ranking from `data`."""
    truncation: bool | None = None
    """Voyage's field: false rejects a text that is too long."""

    property: str | msgspec.UnsetType | None = msgspec.UNSET
    """Weaviate's field, which each of its requests has; the answer then has the scores in the order of the documents.

    Without `documents` it is the only document.
    """

    rank_fields: list[str] | None = None
    """Cohere's field: the fields that are read of documents that are objects, in this order."""


class _FieldedBody(RerankBody, kw_only=True):
    documents: Any = None  # objects with fields of any names


_RERANK: Final = msgspec.json.Decoder(RerankBody)
_FIELDED: Final = msgspec.json.Decoder(_FieldedBody)


def _decode_rerank(body: Body) -> RerankBody:
    if b'"rank_fields"' not in body:
        return read_body(_RERANK, body)
    fields = read_body(_FIELDED, body, most_depth=MOST_DEPTH)
    if not fields.rank_fields:
        return read_body(_RERANK, body)
    fields.documents = texts_of(fields.documents, fields.rank_fields, "documents")
    return fields


def read_rerank(
    body: Body, card: ModelCard, *, version: Literal["1", "2"], kind: str, auto_truncate: bool
) -> tuple[ScoreRequest, Write]:
    """See `Read`.

    Args:
        body: See `Read`.
        card: See `Read`.
        version: Version of Cohere's API, which the answer names.
        kind: The answer's `object`.
        auto_truncate: Truncate long texts of TEI's requests that do not say.
    """
    fields = _decode_rerank(body)
    if fields.documents is None and fields.texts is not msgspec.UNSET:
        return _read_tei_ranking(fields, card, auto_truncate)
    if fields.property is not msgspec.UNSET:
        return _read_weaviate_scores(fields, card)
    request, echoed = _read_ranking(fields, card)
    write = partial(
        encode_rerank,
        documents=echoed,
        top_n=fields.top_k if fields.top_n is None else fields.top_n,
        version=version,
        kind=kind,
        voyage=_is_voyages(fields),
        infinity=fields.raw_scores is not None,
    )
    return request, with_request_id(write, fields.request_id)


def read_rerank_lines(body: Body, card: ModelCard) -> tuple[ScoreRequest, LineWriter]:
    """See `ReadLines`. `top_n` is rejected: lines are in the order in which the scores are done."""
    fields = _decode_rerank(body)
    if fields.top_n or fields.top_k:
        raise field_error(
            "top_n" if fields.top_n else "top_k",
            "not possible in a stream: its lines are sent before all scores are known",
        )
    request, echoed = _read_ranking(fields, card)

    def write(places: Sequence[int], result: ScoreResult) -> Iterator[Mapping[str, object]]:
        for place, score in zip(places, result.scores, strict=True):
            yield ranked(place, score, echoed)

    return request, LineWriter("score", fields.request_id, write)


def _is_voyages(fields: RerankBody) -> bool:
    return fields.truncation is not None or (fields.top_k is not None and fields.top_n is None)


def _read_ranking(fields: RerankBody, card: ModelCard) -> tuple[ScoreRequest, tuple[Content, ...] | None]:
    """Return the request, and the documents to echo; None: echo none."""
    query = contents_of(fields.query, "query", fields)
    if fields.documents is None:
        raise field_error("documents", "this field is required")
    documents = contents_of(fields.documents, "documents", fields)
    activate = fields.use_activation is not False and not fields.raw_scores
    names = "query", "documents"
    limit = None if fields.truncation is None else {"max_tokens": "truncation"}
    words = names_of(names, fields.query, fields.documents, limit)
    cut = fields.truncation is not False
    request = score_request(fields, query, documents, card, names=names, activate=activate, words=words, cut=cut)
    echoes = not _is_voyages(fields) if fields.return_documents is None else fields.return_documents
    return request, documents if echoes else None


def _read_weaviate_scores(fields: RerankBody, card: ModelCard) -> tuple[ScoreRequest, Write]:
    given: Texts
    if fields.documents is not None:
        field, given = "documents", fields.documents
    elif isinstance(fields.property, str):
        field, given = "property", fields.property
    else:
        raise field_error("documents", "this field is required")
    query, documents = contents_of(fields.query, "query", fields), contents_of(given, field, fields)
    words = names_of(("query", field), fields.query, given)
    request = score_request(fields, query, documents, card, names=("query", field), activate=True, words=words)
    write = partial(weaviate.encode_scores, query=query[0], documents=documents, single=field == "property")
    return request, partial(write, sigmoid=card.activation == "sigmoid")


def _read_tei_ranking(fields: RerankBody, card: ModelCard, auto_truncate: bool) -> tuple[ScoreRequest, Write]:
    if not isinstance(texts := fields.texts, list):
        raise field_error("texts", "this field is required")
    query, documents = contents_of(fields.query, "query", fields), contents_of(texts, "texts", fields)
    cut = auto_truncate if fields.truncate is None else fields.truncate
    names, side = ("query", "texts"), side_of(fields.truncation_direction)
    words = names_of(names, fields.query, texts, {"max_tokens": "truncate"})
    activate = not fields.raw_scores
    request = score_request(
        fields, query, documents, card, names=names, activate=activate, words=words, cut=cut, side=side
    )
    return request, partial(tei.encode_rerank, texts=texts if fields.return_text else None)
