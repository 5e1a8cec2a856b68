"""Queries and documents of a request for scores, as `/score` and `/rerank` share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import VLLM, InputPaths, QueryDocumentPaths
from staged_pool.api.wire.fields import Limit, MaxTokens, RequestFields
from staged_pool.api.wire.images import with_options
from staged_pool.api.wire.inputs import check_max_tokens
from staged_pool.api.wire.parts import ContentPart, document, read_parts
from staged_pool.api.wire.truncation import TruncationSide, side_of
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, ScoreRequest, Side
from staged_pool.stages.errors import NoInputs, Words

PAIRS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Names of queries and documents; all pairs mean the same."""
_FIRST: Final = frozenset({"query", *(first for first, _ in PAIRS)})


class Document(ContentPart):
    """One part, or the parts of one document in `content`."""

    content: list[ContentPart] | None = None


Text: TypeAlias = str | Document
Texts: TypeAlias = str | Document | list[str | Document]


class CommonFields(RequestFields, kw_only=True):
    """Fields of both routes; fields that are not named here are ignored."""

    use_activation: bool | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Only its `instruction` is used; it takes precedence over the field `instruction`."""
    truncate_prompt_tokens: MaxTokens | None = None
    """Limit in tokens. None: truncate to the model's limit, because long documents are common."""
    truncation_side: TruncationSide | None = None
    """The end at which each text of a pair is cut; None: as the model's folder says."""
    max_tokens_per_query: Limit | None = None
    max_tokens_per_doc: Limit | None = None


def contents_of(given: Texts | Sequence[Text], field: str, fields: CommonFields) -> tuple[Content, ...]:
    options = fields.media_options()
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
            raise field_error(where, "the query is empty; expected a text", index)
        return given
    if given.content is None:
        return document(given.read(where, index))
    return document(read_parts(given.content, f"{where}.content", index))


def names_of(
    names: tuple[str, str],
    queries: Texts | None,
    documents: Texts | Sequence[str] | None,
    fields: Mapping[str, str] | None = None,
) -> Words:
    """Return the field names of a request.

    Args:
        names: Names of queries and documents.
        queries: Value of the queries.
        documents: Value of the documents.
        fields: Additional names, by the engine's.
    """
    sides = QueryDocumentPaths(_places(names[0], queries), _places(names[1], documents))
    return Words({**VLLM, "input": names[1], **(fields or {})}, sides)


def _places(field: str, given: Texts | Sequence[str] | None) -> InputPaths:
    several = isinstance(given, list)
    each = given if isinstance(given, list) else [given]
    if not any(isinstance(one, Document) for one in each):
        return InputPaths(field, several=several)
    return InputPaths(field, several=several, endings=[_ending(one) for one in each])


def _ending(given: object) -> str:
    """Return the path from a query or document to its text, image or parts."""
    if not isinstance(given, Document):
        return ""
    names = ["content"] if given.content is not None else given.given
    return f".{names[0]}" if len(names) == 1 else ""


def score_request(
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
    """Return a limit on the tokens of one text; None for 0 and for more than the model takes."""
    return value if value and value < card.max_tokens else None
