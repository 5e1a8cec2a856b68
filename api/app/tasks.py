"""Table of tasks: each path with the reader of its body and the models that support it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from staged_pool.api.app.call import ErrorFormat
from staged_pool.api.wire import json_decode
from staged_pool.api.wire.dialects import (
    classify,
    cohere,
    hub_entities,
    late_chunking,
    mixedbread,
    nim,
    ollama,
    openai,
    pooling,
    rerank,
    score,
    tei,
    tei_predict,
    voyage,
    weaviate,
    zero_shot,
)
from staged_pool.api.wire.dialects.tei_tokens import tei_error
from staged_pool.api.wire.errors import plain_error
from staged_pool.api.wire.exchange import Body, Read
from staged_pool.api.wire.image_count import count_images
from staged_pool.api.wire.ndjson import ReadLines
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import InvalidInput

_TEXTS: Final = re.compile(rb'"texts"\s*:')


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one path."""

    name: str
    """Name in rejections, as in vLLM."""
    able: Callable[[ModelCard], bool]
    """Tells if a model supports the task. A path that no served model supports is answered 404."""
    read: Read
    read_lines: ReadLines | None = None
    """Reads the body of a request for an answer line by line; None if the task cannot stream."""
    forms: bool = False
    """The body may be a form, with images as files."""
    error_format_of: Callable[[Body], ErrorFormat | None] | None = None
    """Returns the error format of a body's dialect, on a path that several dialects share; None for the usual one.

    The body may be malformed JSON.
    """
    any_type: bool = False
    """The body is read as JSON, regardless of its Content-Type."""
    immediate: Callable[[Body], bytes | None] | None = None
    """Returns the answer to a body that needs no model; None if it needs one."""
    model_of: Callable[..., str | None] | None = None
    """Returns the model that a body names, from `body` and the `served` names. None: the field `model` names it."""
    output: str = ""
    """Name of the task's output in errors; empty: the one in `_OUTPUTS`."""
    only_images: bool = False
    """Every input is an image."""
    takes_data: bool = False
    """The body may have data for a plugin instead."""
    narrow: Callable[[Body], pooling.Narrowed | None] | None = None
    """Reads a body's further requirements of a model; None if it has none."""
    read_invocation: Read | None = None
    """Reads a body at SageMaker's `/invocations`; None if it is read as at the path of the task."""
    other: OtherTask | None = None
    """Task of some bodies of the path, which other models support. None: all bodies are of this one."""

    @property
    def operation(self) -> str:
        """Name of the operation in traces (`gen_ai.operation.name`)."""
        return _OPERATIONS[self.name]

    @property
    def gives_vectors(self) -> bool:
        """True if the answer has a dense vector for each input."""
        return self.gives == _OUTPUTS["Embeddings"]

    @property
    def gives(self) -> str:
        """Name of the task's output, for errors."""
        return self.output or _OUTPUTS.get(self.name, self.name)

    def shown_images(self, card: ModelCard, body: Body, content_type: bytes) -> int | None:
        """Count the images in a body, for a model of texts and images; None if unknown."""
        if len(card.lanes) == 1:
            return None  # the model has one kind of input
        return count_images(body, content_type, only_images=self.only_images)

    def has_path(self, card: ModelCard) -> bool:
        """Tell if a model supports some bodies of the path."""
        return self.able(card) or (self.other is not None and self.other.task.able(card))

    def meant(self, card: ModelCard) -> bool:
        """Tell if a model was made for this task, beyond being able to do it."""
        preferred = _PREFERRED.get(self.name)
        return preferred is None or preferred(card)


@dataclass(frozen=True, slots=True)
class OtherTask:
    """Another task at the path of one, and the bodies that ask for it."""

    task: Task
    may_ask: Callable[[Body], bool]
    """Tells at a quick look if a body may ask for it."""
    asks: Callable[[Body], bool]
    """Tells if a body asks for it. Raises `InvalidInput` if the body is no JSON object."""


def _is_reranker(card: ModelCard) -> bool:
    return card.scoring == "cross-encoder"


def _is_classifier(card: ModelCard) -> bool:
    return card.scoring is None


_OUTPUTS: Final[Mapping[str, str]] = {
    "Embeddings": "vectors",
    "Score": "scores",
    "Rerank (Score)": "scores",
    "Classification": "labels",
    "Token Classification": "labels of tokens",
    "Pooling": "the output that `task` names",
}
_OPERATIONS: Final[Mapping[str, str]] = {
    "Embeddings": "embeddings",
    "Score": "score",
    "Rerank (Score)": "rerank",
    "Classification": "classify",
    "Token Classification": "classify_tokens",
    "Pooling": "pooling",
}
_PREFERRED: Final[Mapping[str, Callable[[ModelCard], bool]]] = {
    "Score": _is_reranker,
    "Rerank (Score)": _is_reranker,
    "Classification": _is_classifier,
}


_POOLING: Final = Task("Pooling", lambda card: True, pooling.read_pooling, narrow=pooling.narrowed)


def tasks(*, auto_truncate: bool) -> Mapping[str, Task]:
    """Return the tasks by path.

    Args:
        auto_truncate: See `ServerConfig`.
    """
    embeddings = Task(
        "Embeddings", _gives(Output.DENSE), openai.read_embeddings, openai.read_embedding_lines, forms=True
    )
    scores = Task("Score", _scores, score.read_score, score.read_score_lines)
    read_rerank = partial(rerank.read_rerank, auto_truncate=auto_truncate)
    ranking = Task("Rerank (Score)", _scores, partial(read_rerank, version="1", kind="list"), rerank.read_rerank_lines)
    embed = partial(tei.read_embed, auto_truncate=auto_truncate)
    entities = partial(hub_entities.read_entities, auto_truncate=auto_truncate)
    cutting = replace(
        embeddings,
        read=partial(openai.read_embeddings, cut=auto_truncate),
        read_lines=partial(openai.read_embedding_lines, cut=auto_truncate),
    )
    of_images = partial(openai.read_embeddings, cut=auto_truncate, modality="image")
    ollamas = Task("Embeddings", _gives(Output.DENSE), ollama.read_embed, any_type=True, model_of=ollama.model_of)
    vector = Task("Embeddings", _gives(Output.DENSE), weaviate.read_vector)
    return {
        "/v1/embeddings": _with_chunks(embeddings),
        "/embeddings": _with_chunks(cutting),
        "/embeddings_image": replace(embeddings, read=of_images, read_lines=None, only_images=True),
        "/v1/multimodalembeddings": Task("Embeddings", _gives(Output.DENSE), voyage.read_multimodal),
        "/api/embed": replace(ollamas, immediate=partial(ollama.answer_to_nothing, legacy=False)),
        "/api/embeddings": replace(
            ollamas, read=ollama.read_embeddings, immediate=partial(ollama.answer_to_nothing, legacy=True)
        ),
        "/vectors": vector,
        "/vectors/": vector,
        "/vectorize": Task("Embeddings", _gives(Output.DENSE), weaviate.read_vectors),
        "/v1/embed": Task("Embeddings", _gives(Output.DENSE), partial(cohere.read_embed, version="1")),
        "/v2/embed": Task("Embeddings", _gives(Output.DENSE), partial(cohere.read_embed, version="2")),
        "/pooling": replace(_POOLING, forms=True, takes_data=True),
        "/classify": Task(
            "Classification", _gives(Output.LABELS), classify.read_classify, forms=True, narrow=zero_shot.narrowed
        ),
        "/classify_tokens": Task("Token Classification", _gives(Output.TOKEN_LABELS), entities),
        "/score": scores,
        "/v1/score": scores,
        "/rerank": replace(
            ranking, read=partial(read_rerank, version="1", kind="rerank"), error_format_of=_dialect_of_ranking
        ),
        "/v1/rerank": ranking,
        "/v1/ranking": Task("Rerank (Score)", _scores, nim.read_ranking),
        "/v1/reranking": Task("Rerank (Score)", _scores, mixedbread.read_reranking),
        "/v2/rerank": replace(ranking, read=partial(read_rerank, version="2", kind="list")),
        "/embed": Task("Embeddings", _gives(Output.DENSE), partial(embed, output=Output.DENSE)),
        "/embed_all": Task(
            "Embeddings",
            _gives(Output.MULTI_VECTOR),
            partial(embed, output=Output.MULTI_VECTOR),
            output="vectors of tokens",
        ),
        "/embed_sparse": Task(
            "Embeddings", _gives(Output.SPARSE), partial(embed, output=Output.SPARSE), output="sparse vectors"
        ),
        "/predict": _predictions(auto_truncate=auto_truncate),
        "/similarity": Task(
            "Embeddings", _gives(Output.DENSE), partial(tei.read_similarity, auto_truncate=auto_truncate)
        ),
    }


def _with_chunks(embeddings: Task) -> Task:
    """Add bodies that ask for vectors of chunks, for models with those of tokens."""
    chunks = replace(embeddings, able=_gives(Output.MULTI_VECTOR), output="vectors of tokens")
    return replace(embeddings, other=OtherTask(chunks, late_chunking.may_ask_chunks, late_chunking.asks_chunks))


def _predictions(*, auto_truncate: bool) -> Task:
    read = partial(tei_predict.read_predict, auto_truncate=auto_truncate)
    return Task(
        "Classification",
        _gives(Output.LABELS),
        read,
        narrow=zero_shot.narrowed,
        read_invocation=partial(read, nested=False),
    )


def _dialect_of_ranking(body: Body) -> ErrorFormat | None:
    """Return the error format of a ranking's dialect, by the rule of `rerank.read_rerank`.

    For malformed JSON, only the names of its fields count.
    """
    texts, scores = _TEXTS.search(body) is not None, weaviate.is_scores(body)
    if not texts and not scores:
        return None
    try:
        fields = json_decode.fields_of(body)
    except InvalidInput:
        return tei_error if texts else plain_error
    if "texts" in fields and ("documents" not in fields or json_decode.is_null(fields["documents"])):
        return tei_error
    return plain_error if "property" in fields else None


def _gives(output: Output) -> Callable[[ModelCard], bool]:
    return lambda card: output in card.outputs


def _scores(card: ModelCard) -> bool:
    return card.scoring is not None


TASKS: Final = tasks(auto_truncate=True)
"""All tasks by path. Each is a POST that goes through the stages."""
