"""vLLM's `/score`, and the `/rerank` that Jina, Cohere and vLLM have in common."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from staged_pool.api.wire import jsons
from staged_pool.api.wire.exchange import Body, Write, dump, listing, usage_fields
from staged_pool.api.wire.inputs import MaxTokens, ModelName, check_max_tokens
from staged_pool.api.wire.pictures import ImageFields, Part, document, echo, with_options
from staged_pool.api.wire.refusals import wrong
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, Image, ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.score import rank

PAIRS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""What the two sides are called; each pair means the same."""

Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Document(Part):
    """A part, or the parts of one document."""

    content: list[Part] | None = None


Text: TypeAlias = str | Document
Texts: TypeAlias = str | Document | list[str | Document]


class CommonFields(ImageFields, kw_only=True):
    """What both routes have; fields that are not named are ignored."""

    model: ModelName | None = None
    use_activation: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: MaxTokens | None = None
    """None: what the model takes. A long document is the usual case here, and not a mistake."""
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


class RerankBody(CommonFields, kw_only=True):
    """The body of a request for a ranking."""

    query: Text
    documents: list[Text]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool | None = None


_SCORE: Final = msgspec.json.Decoder(ScoreBody)
_RERANK: Final = msgspec.json.Decoder(RerankBody)


def read_score(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    fields = jsons.decode(_SCORE, body)
    names = _names(fields)
    queries, documents = (_contents(getattr(fields, name), name, fields) for name in names)
    if len(queries) not in (1, len(documents)):
        found = f"found {len(queries)} and {len(documents)}"
        raise wrong(names[0], f"{names[0]} and {names[1]} must be 1:1, 1:N or N:N texts; {found}")
    return _request(fields, queries, documents, card), encode_score


def read_rerank(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    fields = jsons.decode(_RERANK, body)
    queries, documents = (_contents(getattr(fields, name), name, fields) for name in ("query", "documents"))
    kept = None if fields.return_documents is False else documents
    write = partial(encode_rerank, documents=kept, top_n=fields.top_n)
    return _request(fields, queries, documents, card), write


def _names(fields: ScoreBody) -> tuple[str, str]:
    """What this request calls the two sides."""
    given = {name for pair in PAIRS for name in pair if getattr(fields, name) is not None}
    for pair in PAIRS:
        if given == set(pair):
            return pair
    for pair in PAIRS:
        if given and given < set(pair):
            [missing] = set(pair) - given
            raise wrong(missing, "this field is required")
    raise wrong("queries", f"give one of the pairs {', '.join(f'{first} and {second}' for first, second in PAIRS)}")


def _contents(given: Texts | list[Text], field: str, fields: CommonFields) -> tuple[Content, ...]:
    options = fields.image_options()
    if not isinstance(given, list):
        return (with_options(_content(given, field, None), options),)
    if not given:
        raise wrong(field, "at least one text is needed")
    return tuple(with_options(_content(each, f"{field}[{index}]", index), options) for index, each in enumerate(given))


def _content(given: Text, where: str, index: int | None) -> Content:
    if isinstance(given, str):
        return given
    if given.content is None:
        return document([_part(given, where, index)])
    parts = enumerate(given.content)
    return document([_part(part, f"{where}.content[{place}]", index) for place, part in parts])


def _part(given: Part, where: str, index: int | None) -> str | Image:
    """A part that need not say what it is where only one of the fields can be meant."""
    has = [name for name in ("text", "image", "image_url") if getattr(given, name) is not None]
    if given.type is None and len(has) > 1:
        raise wrong(where, f"expected either `{has[0]}` or `{has[1]}`, or a `type`", index)
    return given.read(where, index, default=has[0] if has else "text")


def _request(
    fields: CommonFields, queries: tuple[Content, ...], documents: tuple[Content, ...], card: ModelCard
) -> ScoreRequest:
    check_max_tokens(fields.truncate_prompt_tokens)
    return ScoreRequest(
        queries=queries,
        documents=documents,
        model=fields.model,
        activate=fields.use_activation is not False,
        max_tokens=MODEL_MAX if fields.truncate_prompt_tokens is None else fields.truncate_prompt_tokens,
        max_query_tokens=_limit("max_tokens_per_query", fields.max_tokens_per_query, card),
        max_document_tokens=_limit("max_tokens_per_doc", fields.max_tokens_per_doc, card),
        instruction=fields.instruction,
    )


def _limit(field: str, value: int | None, card: ModelCard) -> int | None:
    """0 stands for no limit."""
    if value and value >= card.max_tokens:
        raise wrong(field, f"expected less than the {card.max_tokens} tokens that the model takes")
    return value or None


def encode_score(result: ScoreResult, /, *, request_id: str, created: int) -> bytes:
    """Write the scores, in the order of the documents; see `Write`."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(result.scores)]
    return listing("score", data, model=result.model, usage=result.usage, request_id=request_id, created=created)


def encode_rerank(
    result: ScoreResult,
    /,
    documents: tuple[Content, ...] | None,
    top_n: int | None,
    *,
    request_id: str,
    created: int,
) -> bytes:
    """Write the documents, the best first; see `Write`.

    Args:
        result: Scores of the documents.
        documents: As they are echoed, see `echo`; None leaves them out.
        top_n: How many to write. 0 and None: all of them.
        request_id: See `Write`.
        created: See `Write`.
    """
    results: list[dict[str, object]] = []
    for ranked in rank(result, top_n).ranking:
        document = {} if documents is None else {"document": echo(documents[ranked.index])}
        score = np.float32(ranked.score)  # printed as `/score` prints it
        results.append({"index": ranked.index, **document, "relevance_score": score})
    usage = usage_fields(result.usage)
    usage = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
    return dump({"id": f"score-{request_id}", "model": result.model, "usage": usage, "results": results})
