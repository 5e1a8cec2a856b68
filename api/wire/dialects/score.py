"""vLLM's `/score`, and the `/rerank` whose answer has what the clients of vLLM, Cohere, Jina and Infinity look for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.dialects import tei, weaviate
from staged_pool.api.wire.dialects.rank_fields import texts_of
from staged_pool.api.wire.dialects.ranking import encode_rerank, encode_score, ranked, scored
from staged_pool.api.wire.exchange import Body, Write, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import VLLM, InputPaths, QueryDocumentPaths
from staged_pool.api.wire.fields import Limit, MaxTokens, RequestFields
from staged_pool.api.wire.images import Part, document, with_options
from staged_pool.api.wire.inputs import check_max_tokens
from staged_pool.api.wire.ndjson import LineWriter
from staged_pool.api.wire.truncation import Direction, TruncationSide, side_of
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, Image, ScoreRequest, Side
from staged_pool.runtime.results import ScoreResult
from staged_pool.stages.errors import InvalidInput, NoInputs, Words

PAIRS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""What the two sides are called; each pair means the same."""
_FIRST: Final = frozenset({"query", *(first for first, _ in PAIRS)})


class Document(Part):
    """A part, or the parts of one document."""

    content: list[Part] | None = None


Text: TypeAlias = str | Document
Texts: TypeAlias = str | Document | list[str | Document]


class CommonFields(RequestFields, kw_only=True):
    """What both routes have; fields that are not named are ignored."""

    use_activation: bool | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Of it, an `instruction` that stands here goes before the other one."""
    truncate_prompt_tokens: MaxTokens | None = None
    """None: what the model takes. A long document is the usual case here, and not a mistake."""
    truncation_side: TruncationSide | None = None
    """The end that is cut off each of a pair, or off a text; None: as the model's folder says."""
    max_tokens_per_query: Limit | None = None
    max_tokens_per_doc: Limit | None = None


class ScoreBody(CommonFields, kw_only=True):
    """The body of a request for scores."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    return_logits: bool | None = None
    """Beside each score, the logit that it was made of: what ranks documents whose scores are all 1."""


class RerankBody(CommonFields, kw_only=True):
    """The body of a request for a ranking."""

    query: Text
    documents: Texts | None = None
    top_n: Limit | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None
    """Infinity's and TEI's for `use_activation`, the other way round."""

    texts: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    """TEI's for `documents`: what stands below is TEI's, too, and so is the answer."""
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    top_k: Limit | None = None
    """Voyage's for `top_n`; its clients read the ranking from `data`."""
    truncation: bool | None = None
    """Voyage's: false rejects what is too long."""

    property: str | msgspec.UnsetType | None = msgspec.UNSET
    """Weaviate's: in each of its requests, whose answer has scores in the order of the documents. Without `documents`,
    the one text to be scored."""

    rank_fields: list[str] | None = None
    """Cohere's: of documents that are objects, the fields that are read, in this order."""


class _FieldedBody(RerankBody, kw_only=True):
    documents: Any = None  # objects with fields of any names


_SCORE: Final = msgspec.json.Decoder(ScoreBody)
_RERANK: Final = msgspec.json.Decoder(RerankBody)
_FIELDED: Final = msgspec.json.Decoder(_FieldedBody)


def _decode_rerank(body: Body) -> RerankBody:
    if b'"rank_fields"' not in body:
        return json_decode.decode(_RERANK, body)
    fields = json_decode.decode(_FIELDED, body)
    if not fields.rank_fields:
        return json_decode.decode(_RERANK, body)
    fields.documents = texts_of(fields.documents, fields.rank_fields, "documents")
    return fields


def read_score(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    request, fields = _read_score(body, card)
    return request, with_request_id(partial(encode_score, logits=fields.return_logits is True), fields.request_id)


def _read_score(body: Body, card: ModelCard) -> tuple[ScoreRequest, ScoreBody]:
    fields = json_decode.decode(_SCORE, body)
    names = _names(fields)
    queries, documents = (_contents(getattr(fields, name), name, fields) for name in names)
    if len(queries) not in (1, len(documents)):
        found = f"`{names[0]}` has {len(queries)}, `{names[1]}` has {len(documents)}"
        raise InvalidInput(f"Input lengths must be either 1:1, 1:N or N:N; {found}", param=names[0])
    activate = fields.use_activation is not False
    words = _words(names, *(getattr(fields, name) for name in names))
    return _request(fields, queries, documents, card, names=names, activate=activate, words=words), fields


def read_score_lines(body: Body, card: ModelCard) -> tuple[ScoreRequest, LineWriter]:
    """See `ReadLines`."""
    request, fields = _read_score(body, card)

    def write(places: Sequence[int], result: ScoreResult) -> Iterator[Mapping[str, object]]:
        return scored(places, result, logits=fields.return_logits is True)

    return request, LineWriter("score", fields.request_id, write)


def read_rerank_lines(body: Body, card: ModelCard) -> tuple[ScoreRequest, LineWriter]:
    """See `ReadLines`. The lines are in the order in which the scores are known, so there are no first `top_n`."""
    fields = _decode_rerank(body)
    if fields.top_n or fields.top_k:
        raise field_error(
            "top_n" if fields.top_n else "top_k",
            "lines come as the scores do; which are the highest is not known before the last of them",
        )
    request, echoed = _read_ranking(fields, card)

    def write(places: Sequence[int], result: ScoreResult) -> Iterator[Mapping[str, object]]:
        for place, score in zip(places, result.scores, strict=True):
            yield ranked(place, score, echoed)

    return request, LineWriter("score", fields.request_id, write)


def read_rerank(
    body: Body, card: ModelCard, *, version: Literal["1", "2"], kind: str, auto_truncate: bool
) -> tuple[ScoreRequest, Write]:
    """See `Read`.

    Args:
        body: See `Read`.
        card: See `Read`.
        version: Of Cohere's API, for its clients.
        kind: The answer's `object`.
        auto_truncate: Whether TEI's requests are cut where they do not say.
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


def _is_voyages(fields: RerankBody) -> bool:
    return fields.truncation is not None or (fields.top_k is not None and fields.top_n is None)


def _read_ranking(fields: RerankBody, card: ModelCard) -> tuple[ScoreRequest, tuple[Content, ...] | None]:
    """The request, and the documents where they are to be echoed."""
    query = _contents(fields.query, "query", fields)
    if fields.documents is None:
        raise field_error("documents", "this field is required")
    documents = _contents(fields.documents, "documents", fields)
    activate = fields.use_activation is not False and not fields.raw_scores
    names = "query", "documents"
    limit = None if fields.truncation is None else {"max_tokens": "truncation"}
    words = _words(names, fields.query, fields.documents, limit)
    cut = fields.truncation is not False
    request = _request(fields, query, documents, card, names=names, activate=activate, words=words, cut=cut)
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
    query, documents = _contents(fields.query, "query", fields), _contents(given, field, fields)
    words = _words(("query", field), fields.query, given)
    request = _request(fields, query, documents, card, names=("query", field), activate=True, words=words)
    write = partial(weaviate.encode_scores, query=query[0], documents=documents, single=field == "property")
    return request, partial(write, sigmoid=card.activation == "sigmoid")


def _read_tei_ranking(fields: RerankBody, card: ModelCard, auto_truncate: bool) -> tuple[ScoreRequest, Write]:
    if not isinstance(texts := fields.texts, list):
        raise field_error("texts", "this field is required")
    query, documents = _contents(fields.query, "query", fields), _contents(texts, "texts", fields)
    cut = auto_truncate if fields.truncate is None else fields.truncate
    names, side = ("query", "texts"), side_of(fields.truncation_direction)
    words = _words(names, fields.query, texts, {"max_tokens": "truncate"})
    activate = not fields.raw_scores
    request = _request(fields, query, documents, card, names=names, activate=activate, words=words, cut=cut, side=side)
    return request, partial(tei.encode_rerank, texts=texts if fields.return_text else None)


def _names(fields: ScoreBody) -> tuple[str, str]:
    """What this request calls the two sides."""
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


def _words(
    names: tuple[str, str],
    queries: Texts | None,
    documents: Texts | Sequence[str] | None,
    fields: Mapping[str, str] | None = None,
) -> Words:
    """Words of a request that calls its two sides so, and further fields as `fields` has it by the engine's names."""
    sides = QueryDocumentPaths(_places(names[0], queries), _places(names[1], documents))
    return Words({**VLLM, "input": names[1], **(fields or {})}, sides)


def _places(field: str, given: Texts | Sequence[str] | None) -> InputPaths:
    several = isinstance(given, list)
    each = given if isinstance(given, list) else [given]
    if not any(isinstance(one, Document) for one in each):
        return InputPaths(field, several=several)
    return InputPaths(field, several=several, endings=[_ending(one) for one in each])


def _ending(given: object) -> str:
    """Path from a query or document to what it says or shows."""
    if not isinstance(given, Document):
        return ""
    names = ("content", "text", "image_url", "image")
    return next((f".{name}" for name in names if getattr(given, name) is not None), "")


def _contents(given: Texts | Sequence[Text], field: str, fields: CommonFields) -> tuple[Content, ...]:
    options = fields.image_options()
    if isinstance(given, str | Document):
        return (with_options(_content(given, field, field, None), options),)
    if not given:
        side = "text" if field in _FIRST else "text_pair"
        raise NoInputs(f"At least one {side} element must be given in `{field}`", param=field)
    return tuple(
        with_options(_content(each, field, f"{field}[{index}]", index), options) for index, each in enumerate(given)
    )


def _content(given: Text, field: str, where: str, index: int | None) -> Content:
    if isinstance(given, str):
        if not given and field in _FIRST:
            raise field_error(where, "a query is empty; it must say what is looked for", index)
        return given
    if given.content is None:
        return document([_part(given, where, index)])
    parts = enumerate(given.content)
    return document([_part(part, f"{where}.content[{place}]", index) for place, part in parts])


def _part(given: Part, where: str, index: int | None) -> str | Image:
    """A part that need not say what it is where only one of the fields can be meant."""
    has = [name for name in ("text", "image", "image_url") if getattr(given, name) is not None]
    if given.type is None and len(has) > 1:
        raise field_error(where, f"expected either `{has[0]}` or `{has[1]}`, or a `type`", index)
    return given.read(where, index, default=has[0] if has else "text")


def _request(
    fields: CommonFields,
    queries: tuple[Content, ...],
    documents: tuple[Content, ...],
    card: ModelCard,
    *,
    names: tuple[str, str],
    activate: bool,
    words: Words,
    cut: bool = True,
    side: Side | None = None,
) -> ScoreRequest:
    check_max_tokens(fields.truncate_prompt_tokens)
    given = (fields.chat_template_kwargs or {}).get("instruction", fields.instruction)
    if given is not None and not isinstance(given, str):
        raise field_error("chat_template_kwargs.instruction", "expected a text")
    longest = MODEL_MAX if cut else None
    return ScoreRequest(
        queries=queries,
        documents=documents,
        names=names,
        words=words,
        model=fields.model,
        cache_salt=fields.cache_salt,
        activate=activate,
        max_tokens=longest if fields.truncate_prompt_tokens is None else fields.truncate_prompt_tokens,
        max_query_tokens=_limit(fields.max_tokens_per_query, card),
        max_document_tokens=_limit(fields.max_tokens_per_doc, card),
        instruction=given,
        truncate_side=side_of(fields.truncation_side) if side is None else side,
    )


def _limit(value: int | None, card: ModelCard) -> int | None:
    """A limit on the tokens of one text. 0, and more than the model takes, stand for no limit."""
    return value if value and value < card.max_tokens else None
