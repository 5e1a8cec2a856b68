"""Mixedbread's `/v1/reranking`; `openai` reads its `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump_around, entry_values
from staged_pool.api.wire.dialects.rank_fields import labelled, text_of
from staged_pool.api.wire.exchange import Body, Write, usage_fields
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths, QueryDocumentPaths
from staged_pool.api.wire.fields import Limit, RequestFields
from staged_pool.api.wire.images import with_options
from staged_pool.api.wire.parts import FIELDS, ContentPart, document
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.score import rank
from staged_pool.stages.errors import NoInputs, Words

Document: TypeAlias = str | dict[str, Any]


class MixedbreadRerankBody(RequestFields, kw_only=True):
    """Body of `/v1/reranking`; fields that are not named here are ignored."""

    query: str
    input: list[Document]
    """Texts, objects with fields of texts, or parts with an image."""
    rank_fields: list[str] | None = None
    """Fields of the objects that are read, in this order. None: `text`, or all of them."""
    top_k: Limit | None = None
    return_input: bool | None = None
    rewrite_query: bool | None = None
    """Rejected if it is true."""


_BODY: Final = msgspec.json.Decoder(MixedbreadRerankBody)


def read_reranking(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    fields = read_body(_BODY, body)
    if not fields.query:
        raise field_error("query", "the query is empty; expected a text")
    if not fields.input:
        raise NoInputs("`input` is empty; give at least one document", param="input")
    if fields.rewrite_query:
        raise field_error("rewrite_query", "not supported; expected false")
    options = fields.media_options()
    documents = (_content(given, fields.rank_fields, index) for index, given in enumerate(fields.input))
    request = ScoreRequest(
        queries=(fields.query,),
        documents=tuple(with_options(each, options) for each in documents),
        names=("query", "input"),
        words=Words({"input": "input"}, QueryDocumentPaths(InputPaths("query", several=False), InputPaths("input"))),
        model=fields.model,
        cache_salt=fields.cache_salt,
        max_tokens=MODEL_MAX,
    )
    return request, partial(encode_reranking, given=fields.input, top_k=fields.top_k, echoes=bool(fields.return_input))


def _content(given: Document, rank_fields: Sequence[str] | None, index: int) -> Content:
    where = f"input[{index}]"
    if isinstance(given, str):
        return given
    if rank_fields:
        return text_of(given, rank_fields, where, index)
    names = ContentPart.__struct_fields__
    if "type" in given or "text" in given or (given.keys() <= {*names} and given.keys() & {*FIELDS}):
        return document(ContentPart(**{name: given.get(name) for name in names}).read(where, index))
    if not given:
        raise field_error(where, "the object has no fields", index)
    return labelled(given)


def encode_reranking(
    result: ScoreResult,
    /,
    given: Sequence[Document],
    top_k: int | None,
    echoes: bool,
    *,
    request_id: str,
    created: int,
) -> Pieces:
    """Write the documents, the best first; see `Write`.

    Args:
        result: Scores of the documents.
        given: The documents as the client sent them.
        top_k: Number of entries. 0 and None: all.
        echoes: Echo the documents.
        request_id: See `Write`.
        created: See `Write`.
    """
    ranking = rank(result, top_k).ranking
    entries = (
        {
            "index": ranked.index,
            "score": np.float32(ranked.score),
            **({"input": given[ranked.index]} if echoes else {}),
            "object": "rank_result",
        }
        for ranked in ranking
    )
    after: Mapping[str, object] = {
        "usage": usage_fields(result.usage),
        "top_k": len(ranking),
        "return_input": echoes,
    }
    before = {"id": f"rerank-{request_id}", "object": "list", "model": result.model}
    texts = [each for each in given if isinstance(each, str)] if echoes else []
    return dump_around(before, "data", entries, after, item_values=entry_values(texts))
