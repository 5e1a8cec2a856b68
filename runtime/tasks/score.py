"""The score task: a score of each document for its query, by the model's method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import ModelCard, Role, Scoring, Similarity
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Row, SparseVector
from staged_pool.runtime.requests import (
    DENSE_ONLY,
    Chat,
    Content,
    Image,
    ImagePair,
    Output,
    Outputs,
    PairInput,
    Parts,
    ScoreRequest,
    TextInput,
)
from staged_pool.runtime.results import Ranked, RerankResult, ScoreResult, Usage
from staged_pool.runtime.tasks.classify import LABELS_ONLY, activated, label_logits
from staged_pool.runtime.tasks.embed import PROMPTS_OF, array, normalized
from staged_pool.stages.errors import InvalidInput, InvalidSetting, Unsupported
from staged_pool.stages.work import Plan

_OUTPUTS: Final[Mapping[Scoring, Outputs]] = {
    "bi-encoder": DENSE_ONLY,
    "sparse": frozenset({Output.SPARSE}),
    "late-interaction": frozenset({Output.MULTI_VECTOR}),
}
"""Outputs that each method compares."""


def plan(request: ScoreRequest, card: ModelCard) -> Plan[ModelInput]:
    """Plan one model input for each pair (cross-encoder), or for each text.

    A query of several documents is computed once.

    Raises:
        Unsupported: The model cannot compare texts.
        InvalidInput: The queries and documents do not match in number, or a limit does not fit the model.
    """
    if card.scoring is None:
        raise Unsupported(f"The model `{card.name}` cannot score pairs of texts.")
    _check(request, card)
    if card.scoring == "cross-encoder":
        return Plan(_pairs(request, card), partial(_finish_pairs, request, card), partial(_some_pairs, request, card))
    if request.instruction is not None:
        raise InvalidSetting(f"The model `{card.name}` takes no $instruction.", param="instruction")
    queries = [_alone(content, "query", request, card) for content in request.queries]
    documents = [_alone(content, "document", request, card) for content in request.documents]
    return Plan(
        queries + documents,
        partial(_finish_texts, request, card),
        partial(_some_texts, request, card),
        partial(_locate, request),
    )


def rank(result: ScoreResult, top_n: int | None) -> RerankResult:
    """Order documents by their scores, the best first.

    Equal scores are ordered by their logits, if known. Equal documents keep the order of the request. NaN comes last.

    Args:
        result: Scores of documents.
        top_n: Number of documents to keep. None and 0: all.

    Raises:
        InvalidInput: See `check_top_n`.
    """
    check_top_n(top_n)
    order = np.argsort(-result.sort_keys, kind="stable")[: top_n or None]
    ranking = tuple(Ranked(int(index), float(result.scores[index])) for index in order)
    return RerankResult(ranking=ranking, usage=result.usage, model=result.model)


def check_top_n(top_n: int | None) -> None:
    """Reject a wrong `top_n` before any work is done.

    Raises:
        InvalidInput: It is negative.
    """
    if top_n is not None and top_n < 0:
        raise InvalidInput("$top_n must be at least 0.", param="top_n")


def _check(request: ScoreRequest, card: ModelCard) -> None:
    query, document = request.names
    if not request.queries:
        raise InvalidInput("The request has no query; one is needed.", param=query)
    if "" in request.queries:
        index = request.queries.index("")
        raise InvalidInput("A query is empty; it must say what is looked for.", param=query, index=index)
    if not request.documents:
        raise InvalidInput("The request has no documents; at least one is needed.", param=document)
    if len(request.queries) not in (1, len(request.documents)):
        raise InvalidInput(
            f"There are {len(request.queries)} queries and {len(request.documents)} documents: "
            "give one query, or as many as documents.",
            param=query,
        )
    for name in ("max_query_tokens", "max_document_tokens"):
        value: int | None = getattr(request, name)
        if value is not None and not 1 <= value < card.max_tokens:
            message = f"${name}={value} is out of range: `{card.name}` allows 1 to {card.max_tokens - 1}."
            raise InvalidInput(message, param=name)


def _pairs(request: ScoreRequest, card: ModelCard) -> list[ModelInput]:
    queries = request.queries if len(request.queries) > 1 else request.queries * len(request.documents)
    return [
        ModelInput(
            _pair(
                _parts(query, request.names[0], card),
                _parts(document, request.names[1], card),
                max_tokens=request.max_tokens,
                max_first_tokens=request.max_query_tokens,
                max_second_tokens=request.max_document_tokens,
                instruction=request.instruction,
                truncate_side=request.truncate_side,
            ),
            LABELS_ONLY,
            card.default_prompt,
        )
        for query, document in zip(queries, request.documents, strict=True)
    ]


def _pair(first: Parts, second: Parts, **settings: Any) -> PairInput | ImagePair:
    """Return a pair of texts, or one with images."""
    if any(isinstance(part, Image) for part in (*first, *second)):
        return ImagePair(first=first, second=second, **settings)
    texts = ["".join(part for part in parts if isinstance(part, str)) for parts in (first, second)]
    return PairInput(first=texts[0], second=texts[1], **settings)


def _parts(content: Content, param: str, card: ModelCard) -> Parts:
    """Return the texts and images of a query or a document.

    Raises:
        Unsupported: The model reads pairs of texts only.
        InvalidInput: It is a conversation of several messages.
    """
    if isinstance(content, str):
        return (content,)
    if "image" not in card.lanes:
        raise Unsupported(f"The model `{card.name}` reads pairs of texts, and no images or conversations.")
    if isinstance(content, Image):
        return (content,)
    if len(content.messages) != 1:
        raise InvalidInput(
            f"A query or a document is one message of texts and images, not {len(content.messages)} messages.",
            param=param,
        )
    given = content.messages[0].get("content")
    parts = given if isinstance(given, tuple) else (given,)
    return tuple(part for part in parts if isinstance(part, str | Image))


def _alone(content: Content, role: Role, request: ScoreRequest, card: ModelCard) -> ModelInput:
    """Return the input of a single query or document, with its prompt."""
    outputs = _OUTPUTS[card.scoring or "bi-encoder"]
    name = next((name for name in PROMPTS_OF[role] if name in card.prompts), None)
    prompt = card.default_prompt if name is None else card.prompts[name]
    adapter = card.adapters.get(name or "", card.adapters.get(""))
    if isinstance(content, Image):
        return ModelInput(content, outputs, prompt, role)
    own = request.max_query_tokens if role == "query" else request.max_document_tokens
    added = not isinstance(content, Chat)  # the chat template writes the special tokens
    source = TextInput(content, request.max_tokens, request.truncate_side, max_own_tokens=own, add_special_tokens=added)
    return ModelInput(source, outputs, prompt, role, adapter=adapter)


def _locate(request: ScoreRequest, index: int) -> tuple[str, int]:
    """Return the field and the index of an input of a plan without pairs; see `Plan.locate`."""
    (query, document), queries = request.names, len(request.queries)
    return (query, index) if index < queries else (document, index - queries)


def _finish_pairs(request: ScoreRequest, card: ModelCard, rows: Sequence[object], tokens: int) -> ScoreResult:
    logits = label_logits(rows)
    if not request.activate:
        return ScoreResult(scores=logits[:, 0], usage=Usage(tokens), model=card.name)
    scores = activated(logits, card.activation)
    return ScoreResult(scores=scores[:, 0], usage=Usage(tokens), model=card.name, logits=logits[:, 0])


def _some_pairs(
    request: ScoreRequest, card: ModelCard, rows: Sequence[object], fresh: Sequence[int]
) -> tuple[Sequence[int], ScoreResult]:
    return fresh, _finish_pairs(request, card, [rows[index] for index in fresh], 0)


def _finish_texts(request: ScoreRequest, card: ModelCard, rows: Sequence[object], tokens: int) -> ScoreResult:
    return _compared(rows[: len(request.queries)], rows[len(request.queries) :], card, tokens)


def _some_texts(
    request: ScoreRequest, card: ModelCard, rows: Sequence[object], fresh: Sequence[int]
) -> tuple[Sequence[int], ScoreResult | None]:
    """Score documents of which both rows are there, and one is new."""
    count, new = len(request.queries), set(fresh)
    pairs = [
        (query, count + place)
        for place in range(len(request.documents))
        for query in (place if count > 1 else 0,)
        if not new.isdisjoint((query, count + place)) and rows[query] is not None and rows[count + place] is not None
    ]
    if not pairs:
        return (), None
    queries = [rows[query] for query, _ in pairs]
    documents = [rows[document] for _, document in pairs]
    return [document - count for _, document in pairs], _compared(queries, documents, card, 0)


def _compared(queries: Sequence[object], documents: Sequence[object], card: ModelCard, tokens: int) -> ScoreResult:
    if card.scoring == "bi-encoder":
        scores = _similarities(queries, documents, card)
    elif card.scoring == "sparse":
        scores = _sparse_similarities(queries, documents, card.similarity)
    else:
        scores = _late_interaction(queries, documents)
    return ScoreResult(scores=scores, usage=Usage(tokens), model=card.name)


def _similarities(queries: Sequence[object], documents: Sequence[object], card: ModelCard) -> NDArray[np.float32]:
    """Return the similarity of each document's vector with its query's, in float32.

    Distances are negated, so that higher is better. The scale and bias by which CLIP and SigLIP make logits of cosines
    are left out: they do not change the order.
    """
    similarity = card.similarity
    q = np.stack([array(row, Output.DENSE) for row in queries])
    d = np.stack([array(row, Output.DENSE) for row in documents])
    if similarity == "cosine" or card.normalize:
        q, d = normalized(q), normalized(d)
    if similarity in ("cosine", "dot"):
        # Not `d @ q`, whose order of summation depends on the number of rows.
        products = np.einsum("ij,j->i", d, q[0]) if len(q) == 1 else np.einsum("ij,ij->i", q, d)
        return np.asarray(products, np.float32)
    distances = np.linalg.norm(q - d, ord=2 if similarity == "euclidean" else 1, axis=1)
    return np.asarray(-distances, np.float32)


def _sparse_similarities(
    queries: Sequence[object], documents: Sequence[object], similarity: Similarity
) -> NDArray[np.float32]:
    """Return the dot product of each sparse vector with its query's.

    For cosine, it is divided by the product of their lengths.
    """
    qs, ds = (
        [cast("SparseVector", cast(Row, row).values[Output.SPARSE]) for row in rows] for rows in (queries, documents)
    )
    if len(qs) == 1:
        qs *= len(ds)
    scores = np.array([_sparse_dot(q, d) for q, d in zip(qs, ds, strict=True)], np.float32)
    if similarity == "cosine":
        lengths = [np.linalg.norm(q.values) * np.linalg.norm(d.values) for q, d in zip(qs, ds, strict=True)]
        scores /= np.maximum(np.array(lengths, np.float32), 1e-12)
    return scores


def _sparse_dot(one: SparseVector, other: SparseVector) -> float:
    _, ones, others = np.intersect1d(one.indices, other.indices, assume_unique=True, return_indices=True)
    return float(one.values[ones] @ other.values[others])


def _late_interaction(queries: Sequence[object], documents: Sequence[object]) -> NDArray[np.float32]:
    """Return the MaxSim of each document with its query."""
    qs = [normalized(array(row, Output.MULTI_VECTOR)) for row in queries]
    ds = [normalized(array(row, Output.MULTI_VECTOR)) for row in documents]
    if len(qs) == 1:
        qs *= len(ds)
    return np.array([max_sim(q, d) for q, d in zip(qs, ds, strict=True)], np.float32)


def max_sim(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Return the MaxSim of one document with its query, each [tokens, width] of length 1.

    It is the sum over the query's tokens of the largest cosine with a token of the document (Khattab and Zaharia, 2020,
    ColBERT, equation 3).
    """
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0
