"""What each route is for, what it reads and what it answers. A route without an entry fails a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from staged_pool.api.openapi import answers, served
from staged_pool.api.wire import classify, cohere, openai, pooling, score, tei, tei_tokens, tokens

Tag: TypeAlias = Literal["Vectors", "Scores", "Labels", "Tokens", "Models", "Server"]

TAGS: Final[Mapping[Tag, str]] = {
    "Vectors": "Texts, token ids or conversations to vectors.",
    "Scores": "How well documents answer a query.",
    "Labels": "Labels of texts, and of what is in them.",
    "Tokens": "Texts to token ids, and back.",
    "Models": "What is served.",
    "Server": "How the server is.",
}

_TEXTS: Final = ["A man is eating food.", "A woman is playing the violin."]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    summary: str
    tag: Tag
    text: str = ""
    """What else there is to know."""
    body: Sequence[Any] = ()
    """What a JSON body is read as: one of these. A route that has one is POST."""
    answer: Sequence[Any] = ()
    """What the answer of status 200 is, as JSON: one of these."""
    content_types: Sequence[str] = ()
    """Of answers that are no JSON."""
    errors: Sequence[Any] = (answers.Error,)
    """What the answer to a request that failed is: one of these."""
    examples: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Bodies, by what they show. Each is answered with 200 by any model that has the route."""
    forms: bool = False
    """Whether the body may also be a form, with files for pictures."""
    is_task: bool = False
    """Whether it goes through the four stages, and may fail in all the ways that they may."""
    unready: Any = None
    """What the answer of status 503 is, where it is no error object."""


BYTES: Final = ("application/octet-stream", "application/vnd.staged-pool.embeddings")
LINES: Final = "application/x-ndjson"
TEI: Final = (answers.TeiError,)
BOTH: Final = (answers.Error, answers.TeiError)


def _post(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    bodies = body if isinstance(body, tuple) else (body,)
    found = answer if isinstance(answer, tuple) else (answer,)
    return {"POST": Operation(summary=summary, tag=tag, text=text, body=bodies, answer=found, **more)}


def _task(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    return _post(summary, tag, body, answer, text, is_task=True, **more)


def _get(summary: str, tag: Tag = "Server", answer: Any = None, text: str = "", **more: Any) -> Mapping[str, Operation]:
    found = () if answer is None else (answer,)
    return {"GET": Operation(summary=summary, tag=tag, answer=found, text=text, **more)}


_EMBEDDINGS: Final = _task(
    "Embed texts",
    "Vectors",
    openai.EmbeddingsBody,
    answers.Embeddings,
    "OpenAI's, vLLM's and Jina's route: any client that lets you set a base URL works unchanged. Bytes are for "
    "`encoding_format` bytes, and a line for each vector as it is done is for `Accept: application/x-ndjson`.",
    content_types=(*BYTES, LINES),
    forms=True,
    examples={
        "texts": {"input": _TEXTS},
        "base64": {"input": _TEXTS[0], "encoding_format": "base64"},
        "bytes": {"input": _TEXTS, "encoding_format": "bytes", "embed_dtype": "float16"},
        "two types": {"input": _TEXTS[0], "embedding_type": ["float", "int8"]},
        "token ids": {"input": [[1, 2, 3], [4, 5]]},
    },
)
_COHERE: Final = _task(
    "Embed texts, for clients of Cohere",
    "Vectors",
    cohere.EmbedBody,
    answers.CohereEmbeddings,
    examples={
        "texts": {"texts": _TEXTS},
        "types": {"texts": _TEXTS, "embedding_types": ["float", "int8", "ubinary"], "input_type": "search_document"},
    },
)
_SCORE: Final = _task(
    "Score documents",
    "Scores",
    score.ScoreBody,
    answers.Scores,
    "One query and N documents, or N queries and N documents. The two sides may be called queries and documents, "
    "queries and items, text_1 and text_2, or data_1 and data_2.",
    content_types=(LINES,),
    examples={
        "one query": {"queries": "Who eats?", "documents": _TEXTS},
        "pairs": {"text_1": ["Who eats?", "Who plays?"], "text_2": _TEXTS},
    },
)
_RERANK: Final = _task(
    "Rank documents",
    "Scores",
    score.RerankBody,
    (answers.Ranking, list[answers.TeiRanked]),
    "The documents in the order of how well they answer the query, the best first: for clients of vLLM, Jina, Cohere "
    "and Infinity, and with `texts` for those of text-embeddings-inference.",
    content_types=(LINES,),
    examples={
        "the best": {"query": "Who eats?", "documents": _TEXTS, "top_n": 1},
        "without texts": {"query": "Who eats?", "documents": _TEXTS, "return_documents": False},
        "text-embeddings-inference": {"query": "Who eats?", "texts": _TEXTS, "return_text": True},
    },
    errors=BOTH,
)


def _tei(summary: str, tag: Tag, body: Any, answer: Any, **examples: Mapping[str, object]) -> Mapping[str, Operation]:
    text = "For clients of text-embeddings-inference."
    return _task(summary, tag, body, answer, text, errors=TEI, examples=examples)


OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/v1/embed": _COHERE,
    "/v2/embed": _COHERE,
    "/embed": _tei("Embed texts", "Vectors", tei.EmbedBody, list[list[float]], texts={"inputs": _TEXTS}),
    "/embed_all": _tei(
        "A vector for each token", "Vectors", tei.EmbedBody, list[list[list[float]]], texts={"inputs": _TEXTS}
    ),
    "/embed_sparse": _tei(
        "Sparse vectors", "Vectors", tei.EmbedBody, list[list[answers.TeiSparseValue]], texts={"inputs": _TEXTS}
    ),
    "/pooling": _task(
        "Whatever the model gives",
        "Vectors",
        pooling.PoolingBody,
        answers.Pooling,
        "Without `task` the first that the model has; a list of tasks gets several kinds of vectors from one forward.",
        content_types=BYTES,
        forms=True,
        examples={"default": {"input": _TEXTS}},
    ),
    "/similarity": _tei(
        "Compare a text with others",
        "Scores",
        tei.SimilarityBody,
        list[float],
        cosines={"inputs": {"source_sentence": "Somebody eats.", "sentences": _TEXTS}},
    ),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/classify": _task(
        "Label texts",
        "Labels",
        classify.ClassifyBody,
        (answers.Classifications, answers.InfinityClassifications),
        "With `raw_scores` the answer is Infinity's.",
        forms=True,
        examples={
            "texts": {"input": _TEXTS},
            "logits": {"input": _TEXTS[0], "use_activation": False},
            "by score": {"input": _TEXTS, "raw_scores": False},
        },
    ),
    "/classify_tokens": _task(
        "Find entities",
        "Labels",
        classify.ClassifyTokensBody,
        answers.TextEntities,
        examples={
            "entities": {"input": "Ada lives in Rome."},
            "tokens": {"input": "Ada lives in Rome.", "aggregation_strategy": "none"},
        },
    ),
    "/predict": _tei(
        "Label texts",
        "Labels",
        tei.PredictBody,
        (list[answers.LabelScore], list[list[answers.LabelScore]]),
        one={"inputs": _TEXTS[0]},
        many={"inputs": [[text] for text in _TEXTS]},
    ),
    "/invocations": _task(
        "Any of these",
        "Server",
        dict[str, Any],
        (
            *(answers.Embeddings, answers.Classifications, answers.InfinityClassifications, answers.Ranking),
            *(list[answers.TeiRanked], answers.Scores, answers.Pooling),
        ),
        "For SageMaker: what a body asks for is seen from its fields.",
        content_types=(*BYTES, LINES),
        errors=BOTH,
        examples={"texts": {"input": _TEXTS}},
    ),
    "/tokenize": _post(
        "Token ids of a text",
        "Tokens",
        (tokens.TokenizeBody, tei_tokens.TokenizeBody),
        (served.TokenIds, list[list[served.TeiToken]]),
        "With `inputs`, for clients of text-embeddings-inference.",
        errors=BOTH,
        examples={
            "text": {"prompt": _TEXTS[0]},
            "strings": {"prompt": _TEXTS[0], "return_token_strs": True},
            "text-embeddings-inference": {"inputs": _TEXTS},
        },
    ),
    "/detokenize": _post(
        "The text of token ids",
        "Tokens",
        tokens.DetokenizeBody,
        served.Prompt,
        examples={"ids": {"tokens": [1, 2, 3]}},
    ),
    "/decode": _post(
        "The texts of token ids",
        "Tokens",
        tei_tokens.DecodeBody,
        list[str],
        "For clients of text-embeddings-inference.",
        errors=TEI,
        examples={"ids": {"ids": [1, 2, 3]}},
    ),
    "/v1/models": _get("What is served", "Models", served.Models),
    "/models": _get("What is served, for clients of Infinity", "Models", served.InfinityModels),
    "/info": _get("The model, for clients of text-embeddings-inference", "Models", served.TeiInfo, errors=TEI),
    "/version": _get("Version of the server", "Models", served.Version),
    "/health": _get("Whether the server is alive", text="Answers while models load, and under any load."),
    "/ping": {method: Operation(summary="The same as /health", tag="Server") for method in ("GET", "POST")},
    "/ready": _get("Whether requests are taken", answer=served.Ready, unready=served.NotReady),
    "/load": _get("Requests inside", answer=served.Load),
    "/stages": _get("Every stage at this moment", answer=served.Stages, text="What the page at / shows."),
    "/flush_cache": {
        "POST": Operation(
            summary="Forget what is kept of earlier requests",
            tag="Server",
            text="Prepared pictures (`--image-cache-mb`) and results (`--result-cache-mb`) of all models. What is in "
            "work goes to its requests.",
        )
    },
    "/reset_mm_cache": {
        "POST": Operation(
            summary="Forget prepared pictures", tag="Server", text="As /flush_cache, and results are kept."
        )
    },
    "/metrics": _get("Prometheus metrics", content_types=("text/plain",)),
    "/openapi.json": _get("This description", answer=served.Anything),
    "/docs": _get("This description as a page", content_types=("text/html",)),
    "/": _get("The stages as a page", content_types=("text/html",)),
}
"""By path and method. The order is the one of the page."""
