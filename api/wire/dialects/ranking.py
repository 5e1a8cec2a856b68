"""Answers of `/score` and `/rerank`, with the fields that clients of six dialects read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import numpy as np

from staged_pool.api.wire.chunked_json import Pieces, dump_around, entry_values
from staged_pool.api.wire.exchange import listing, usage_fields
from staged_pool.api.wire.images import echo, plain
from staged_pool.runtime.requests import Content
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.score import rank

DOCUMENTS_A_SEARCH_UNIT: Final = 100
"""Documents of one of Cohere's billing units, which its clients add up."""


def encode_rerank(
    result: ScoreResult,
    /,
    documents: tuple[Content, ...] | None,
    top_n: int | None,
    version: Literal["1", "2"],
    kind: str,
    *,
    voyage: bool = False,
    infinity: bool = False,
    request_id: str,
    created: int,
) -> Pieces:
    """Write the documents, the best first; see `Write`.

    Args:
        result: Scores of the documents.
        documents: The documents to echo, see `echo`; None: echo none.
        top_n: Number of documents to write. 0 and None: all.
        version: See `read_rerank`.
        kind: See `read_rerank`.
        voyage: Write the ranking a second time, as `data`, with documents as texts.
        infinity: Write documents as texts.
        request_id: See `Write`.
        created: See `Write`.
    """
    # float32, so that a score has the same digits as in `/score`.
    ranking = rank(result, top_n).ranking
    write_document = plain if infinity else echo
    results = (ranked(found.index, np.float32(found.score), documents, write_document) for found in ranking)
    usage = usage_fields(result.usage)
    units = math.ceil(len(result.scores) / DOCUMENTS_A_SEARCH_UNIT)
    before = {
        "id": f"score-{request_id}",
        "object": kind,
        "created": created,
        "model": result.model,
        "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
    }
    meta = {"api_version": {"version": version}, "billed_units": {"search_units": units}}
    after: dict[str, object] = {"meta": meta}
    if voyage:
        after["data"] = [ranked(found.index, np.float32(found.score), documents, plain) for found in ranking]
    values = entry_values([document for document in documents or () if isinstance(document, str)])
    return dump_around(before, "results", results, after, item_values=values)


def ranked(
    index: int,
    score: object,
    documents: tuple[Content, ...] | None,
    write_document: Callable[[Content], object] = echo,
) -> dict[str, object]:
    """Return the entry of one document of a ranking."""
    echoed = {} if documents is None else {"document": write_document(documents[index])}
    return {"index": index, **echoed, "relevance_score": score}


def encode_score(result: ScoreResult, /, *, request_id: str, created: int, logits: bool = False) -> Pieces:
    """Write the scores in the order of the documents; see `Write`. `logits`: add the logit of each."""
    data = [*scored(range(len(result.scores)), result, logits=logits)]
    return listing("score", data, model=result.model, usage=result.usage, request_id=request_id, created=created)


def scored(places: Sequence[int], result: ScoreResult, *, logits: bool) -> Iterator[dict[str, object]]:
    """Yield the entries of some scores; `places` are the indexes of their documents."""
    for place, score, logit in zip(places, result.scores, result.sort_keys, strict=True):
        yield {"index": place, "object": "score", "score": score, **({"logit": logit} if logits else {})}
