"""What can be asked of the engine over HTTP: each path, what reads its body, and which models can do it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from staged_pool.api.wire import classify, cohere, openai, pooling, score, tei
from staged_pool.api.wire.exchange import Body, Read
from staged_pool.api.wire.lines import ReadLines
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import Output

_TEXTS: Final = re.compile(rb'"texts"\s*:')


@dataclass(frozen=True, slots=True)
class Task:
    """What one path is for."""

    name: str
    """What a refusal calls it, in the words of vLLM."""
    able: Callable[[ModelCard], bool]
    """Whether a model can do it. A path that no served model can do is not there."""
    read: Read
    read_lines: ReadLines | None = None
    """Reads it where the answer is wanted line by line; None where it is not to be had."""
    forms: bool = False
    """Whether its body may be a form, with pictures as files."""
    mark: Callable[[Body], bool] | None = None
    """Where two dialects share a path: whether a body is one of text-embeddings-inference. It may be no JSON at all."""


def tasks(*, auto_truncate: bool) -> Mapping[str, Task]:
    """Every path of a task.

    Args:
        auto_truncate: See `ServerConfig`.
    """
    embeddings = Task(
        "Embeddings", _gives(Output.DENSE), openai.read_embeddings, openai.read_embedding_lines, forms=True
    )
    scores = Task("Score", _scores, score.read_score, score.read_score_lines)
    rerank = partial(score.read_rerank, auto_truncate=auto_truncate)
    ranking = Task("Rerank (Score)", _scores, partial(rerank, version="1", kind="list"), score.read_rerank_lines)
    embed = partial(tei.read_embed, auto_truncate=auto_truncate)
    return {
        "/v1/embeddings": embeddings,
        "/embeddings": embeddings,
        "/v1/embed": Task("Embeddings", _gives(Output.DENSE), partial(cohere.read_embed, version="1")),
        "/v2/embed": Task("Embeddings", _gives(Output.DENSE), partial(cohere.read_embed, version="2")),
        "/pooling": Task("Pooling", lambda card: True, pooling.read_pooling, forms=True),
        "/classify": Task("Classification", _gives(Output.LABELS), classify.read_classify, forms=True),
        "/classify_tokens": Task("Token Classification", _gives(Output.TOKEN_LABELS), classify.read_classify_tokens),
        "/score": scores,
        "/v1/score": scores,
        "/rerank": replace(ranking, read=partial(rerank, version="1", kind="rerank"), mark=_has_texts),
        "/v1/rerank": ranking,
        "/v2/rerank": replace(ranking, read=partial(rerank, version="2", kind="list")),
        "/embed": Task("Embeddings", _gives(Output.DENSE), partial(embed, output=Output.DENSE)),
        "/embed_all": Task("Embeddings", _gives(Output.MULTI_VECTOR), partial(embed, output=Output.MULTI_VECTOR)),
        "/embed_sparse": Task("Embeddings", _gives(Output.SPARSE), partial(embed, output=Output.SPARSE)),
        "/predict": Task(
            "Classification", _gives(Output.LABELS), partial(tei.read_predict, auto_truncate=auto_truncate)
        ),
        "/similarity": Task(
            "Embeddings", _gives(Output.DENSE), partial(tei.read_similarity, auto_truncate=auto_truncate)
        ),
    }


def _has_texts(body: Body) -> bool:
    return _TEXTS.search(body) is not None


def _gives(output: Output) -> Callable[[ModelCard], bool]:
    return lambda card: output in card.outputs


def _scores(card: ModelCard) -> bool:
    return card.scoring is not None
