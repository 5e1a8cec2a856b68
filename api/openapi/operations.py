"""What each route is for, what it reads and what it answers. A route without an entry fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from staged_pool.api.openapi import answers
from staged_pool.api.wire import classify, openai, pooling, score, tokens

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
    body: type | None = None
    """What a JSON body is read as. A route that has one is POST."""
    answer: Any = None
    """What the answer of status 200 is, as JSON; None: nothing, or something else than JSON."""
    content_type: str | None = None
    """Of an answer that is no JSON."""
    examples: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Bodies, by what they show. Each is answered with 200 by any model that has the route."""
    is_task: bool = False
    """Whether it goes through the four stages, and may fail in all the ways that they may."""
    unready: Any = None
    """What the answer of status 503 is, where it is no error object."""


def _task(summary: str, tag: Tag, body: type, answer: Any, text: str = "", **examples: Mapping[str, object]) -> Any:
    named = {name.replace("_", " "): example for name, example in examples.items()}
    return {
        "POST": Operation(summary=summary, tag=tag, text=text, body=body, answer=answer, examples=named, is_task=True)
    }


def _get(summary: str, tag: Tag = "Server", answer: Any = None, text: str = "", **more: Any) -> Mapping[str, Operation]:
    return {"GET": Operation(summary=summary, tag=tag, answer=answer, text=text, **more)}


_SCORE: Final = _task(
    "Score documents",
    "Scores",
    score.ScoreBody,
    answers.Scores,
    "One query and N documents, or N queries and N documents. The two sides may be called queries and documents, "
    "queries and items, text_1 and text_2, or data_1 and data_2.",
    one_query={"queries": "Who eats?", "documents": _TEXTS},
    pairs={"text_1": ["Who eats?", "Who plays?"], "text_2": _TEXTS},
)
_RERANK: Final = _task(
    "Rank documents",
    "Scores",
    score.RerankBody,
    answers.Ranking,
    "The documents in the order of how well they answer the query, the best first.",
    the_best={"query": "Who eats?", "documents": _TEXTS, "top_n": 1},
    without_texts={"query": "Who eats?", "documents": _TEXTS, "return_documents": False},
)

OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/v1/embeddings": _task(
        "Embed texts",
        "Vectors",
        openai.EmbeddingsBody,
        answers.Embeddings,
        "OpenAI's route: any client that lets you set a base URL works unchanged.",
        texts={"input": _TEXTS},
        base64={"input": _TEXTS[0], "encoding_format": "base64"},
        token_ids={"input": [[1, 2, 3], [4, 5]]},
    ),
    "/pooling": _task(
        "Whatever the model gives",
        "Vectors",
        pooling.PoolingBody,
        answers.Pooling,
        "Without `task` the first that the model has; a list of tasks gets several kinds of vectors from one forward.",
        default={"input": _TEXTS},
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
        answers.Classifications,
        texts={"input": _TEXTS},
        logits={"input": _TEXTS[0], "use_activation": False},
    ),
    "/classify_tokens": _task(
        "Find entities",
        "Labels",
        classify.ClassifyTokensBody,
        answers.TextEntities,
        entities={"input": "Ada lives in Rome."},
        tokens={"input": "Ada lives in Rome.", "aggregation_strategy": "none"},
    ),
    "/tokenize": {
        "POST": Operation(
            summary="Token ids of a text",
            tag="Tokens",
            body=tokens.TokenizeBody,
            answer=answers.TokenIds,
            examples={"text": {"prompt": _TEXTS[0]}, "strings": {"prompt": _TEXTS[0], "return_token_strs": True}},
        )
    },
    "/detokenize": {
        "POST": Operation(
            summary="The text of token ids",
            tag="Tokens",
            body=tokens.DetokenizeBody,
            answer=answers.Prompt,
            examples={"ids": {"tokens": [1, 2, 3]}},
        )
    },
    "/v1/models": _get("What is served", "Models", answers.Models),
    "/version": _get("Version of the server", "Models", answers.Version),
    "/health": _get("Whether the server is alive", text="Answers while models load, and under any load."),
    "/ping": {method: Operation(summary="The same as /health", tag="Server") for method in ("GET", "POST")},
    "/ready": _get("Whether requests are taken", answer=answers.Ready, unready=answers.NotReady),
    "/load": _get("Requests inside", answer=answers.Load),
    "/stages": _get("Every stage at this moment", answer=answers.Stages, text="What the page at / shows."),
    "/metrics": _get("Prometheus metrics", content_type="text/plain"),
    "/openapi.json": _get("This description", answer=answers.Anything),
    "/docs": _get("This description as a page", content_type="text/html"),
    "/": _get("The stages as a page", content_type="text/html"),
}
"""By path and method. The order is the one of the page."""
