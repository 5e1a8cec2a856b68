"""Operations of all routes: summary, body, answers and examples. A route without an entry fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from staged_pool.api.addresses import ONE_MODEL
from staged_pool.api.openapi import answers, chunk_answers, dialects, served
from staged_pool.api.openapi.operation import (
    BINARY,
    BOTH,
    NDJSON,
    PLAIN_ERROR,
    SHARED_ERROR,
    TAGS,
    TEI,
    Operation,
    Tag,
    get,
    post,
    task,
)
from staged_pool.api.openapi.plugin import PluginOutput
from staged_pool.api.wire.dialects import (
    classify,
    cohere,
    hub_entities,
    openai,
    pooling,
    rerank,
    score,
    tei,
    tei_predict,
    tei_tokens,
    tokens,
)

__all__ = ["BINARY", "OPERATIONS", "TAGS", "Operation", "Tag"]

_TEXTS: Final = ["A man is eating food.", "A woman is playing the violin."]

_EMBEDDINGS: Final = task(
    "Embed texts",
    "Vectors",
    openai.EmbeddingsBody,
    (answers.Embeddings, chunk_answers.ChunkedTexts),
    "The route of OpenAI, vLLM, Jina, Voyage, NIM and Mixedbread: any of their clients with a base URL setting works. "
    "`encoding_format` bytes gives a binary answer. `Accept: application/x-ndjson` gives a line for each vector as "
    "soon as it is done. An input that is too long is rejected here; /embeddings, Infinity's route, truncates it.",
    content_types=(*BINARY, NDJSON),
    forms=True,
    errors=SHARED_ERROR,
    examples={
        "texts": {"input": _TEXTS},
        "for Voyage": {"input": _TEXTS, "input_type": "query", "truncation": True, "output_dtype": "int8"},
        "for Mixedbread": {"input": _TEXTS, "normalized": True, "encoding_format": ["float", "ubinary"]},
        "for NIM": {"input": _TEXTS, "input_type": "passage", "truncate": "END"},
        "base64": {"input": _TEXTS[0], "encoding_format": "base64"},
        "bytes": {"input": _TEXTS, "encoding_format": "bytes", "embed_dtype": "float16"},
        "two types": {"input": _TEXTS[0], "embedding_type": ["float", "int8"]},
        "token ids": {"input": [[1, 2, 3], [4, 5]]},
        "chunks of each text": {"input": _TEXTS, "late_chunking_params": {"chunk_size": 4}},
    },
)
_COHERE: Final = task(
    "Embed texts, for clients of Cohere",
    "Vectors",
    cohere.EmbedBody,
    answers.CohereEmbeddings,
    examples={
        "texts": {"texts": _TEXTS},
        "types": {"texts": _TEXTS, "embedding_types": ["float", "int8", "ubinary"], "input_type": "search_document"},
    },
)
_SCORE: Final = task(
    "Score documents",
    "Scores",
    score.ScoreBody,
    answers.Scores,
    "One query and N documents, or N queries and N documents. Their fields are queries and documents, queries and "
    "items, text_1 and text_2, or data_1 and data_2.",
    content_types=(NDJSON,),
    examples={
        "one query": {"queries": "Who eats?", "documents": _TEXTS},
        "pairs": {"text_1": ["Who eats?", "Who plays?"], "text_2": _TEXTS},
    },
)
_RERANK: Final = task(
    "Rank documents",
    "Scores",
    rerank.RerankBody,
    (answers.Ranking, list[answers.TeiRanked], dialects.WeaviateScores),
    "The documents by their scores for the query, the best first. For clients of vLLM, Jina, Cohere, Voyage and "
    "Infinity; with `texts` for those of text-embeddings-inference, and with `property` for Weaviate.",
    content_types=(NDJSON,),
    examples={
        "the best": {"query": "Who eats?", "documents": _TEXTS, "top_n": 1},
        "without texts": {"query": "Who eats?", "documents": _TEXTS, "return_documents": False},
        "text-embeddings-inference": {"query": "Who eats?", "texts": _TEXTS, "return_text": True},
        "Voyage": {"query": "Who eats?", "documents": _TEXTS, "top_k": 1, "truncation": True},
        "Infinity": {"query": "Who eats?", "documents": _TEXTS, "raw_scores": False},
        "Weaviate": {"query": "Who eats?", "documents": _TEXTS, "property": ""},
    },
    errors=(*BOTH, *SHARED_ERROR, *PLAIN_ERROR),
)


def _tei(summary: str, tag: Tag, body: Any, answer: Any, **examples: Mapping[str, object]) -> Mapping[str, Operation]:
    text = "For clients of text-embeddings-inference."
    return task(summary, tag, body, answer, text, errors=TEI, examples=examples)


OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    **dialects.TASK_OPERATIONS,
    "/v1/embed": _COHERE,
    "/v2/embed": _COHERE,
    "/embed": _tei("Embed texts", "Vectors", tei.EmbedBody, list[list[float]], texts={"inputs": _TEXTS}),
    "/embed_all": _tei(
        "A vector for each token", "Vectors", tei.EmbedBody, list[list[list[float]]], texts={"inputs": _TEXTS}
    ),
    "/embed_sparse": _tei(
        "Sparse vectors",
        "Vectors",
        tei.EmbedBody,
        list[list[answers.TeiSparseValue]],
        texts={"inputs": _TEXTS},
        largest={"inputs": _TEXTS, "max_active_dims": 8},
    ),
    "/pooling": task(
        "Any output of the model",
        "Vectors",
        pooling.PoolingBody,
        (answers.Pooling, PluginOutput),
        "Without `task` it is the model's first one. A list of tasks gives several kinds of vectors from one forward. "
        "With `data` instead of inputs, the answer is the output of a plugin.",
        content_types=BINARY,
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
    "/classify": task(
        "Label texts",
        "Labels",
        classify.ClassifyBody,
        (answers.Classifications, answers.InfinityClassifications),
        "With `raw_scores` the answer has Infinity's form. With `candidate_labels`, a model of natural language "
        "inference chooses among the labels of the caller (zero-shot classification).",
        forms=True,
        examples={
            "texts": {"input": _TEXTS},
            "logits": {"input": _TEXTS[0], "use_activation": False},
            "by score": {"input": _TEXTS, "raw_scores": False},
            "zero-shot": {"input": _TEXTS, "candidate_labels": ["food", "music"], "multi_label": True},
        },
    ),
    "/classify_tokens": task(
        "Find entities",
        "Labels",
        (classify.ClassifyTokensBody, hub_entities.HubEntitiesBody),
        (answers.TextEntities, list[dialects.HubEntity], list[list[dialects.HubEntity]]),
        "With `inputs`, for the hub's client.",
        examples={
            "hub": {"inputs": "Ada lives in Rome.", "parameters": {"aggregation_strategy": "simple"}},
            "entities": {"input": "Ada lives in Rome."},
            "tokens": {"input": "Ada lives in Rome.", "aggregation_strategy": "none"},
        },
    ),
    "/predict": _tei(
        "Label texts",
        "Labels",
        tei_predict.PredictBody,
        (list[answers.LabelScore], list[list[answers.LabelScore]]),
        one={"inputs": _TEXTS[0]},
        many={"inputs": [[text] for text in _TEXTS]},
        zero_shot={"inputs": _TEXTS, "parameters": {"candidate_labels": ["food", "music"]}},
        hub={"inputs": _TEXTS[0], "parameters": {"top_k": 1, "function_to_apply": "softmax"}},
    ),
    "/invocations": task(
        "Any task",
        "Server",
        dict[str, Any],
        (
            *(answers.Embeddings, answers.Classifications, answers.InfinityClassifications, answers.Ranking),
            *(list[answers.TeiRanked], dialects.WeaviateScores, answers.Scores, answers.Pooling, PluginOutput),
            *(answers.CohereEmbeddings, list[answers.LabelScore], list[list[answers.LabelScore]]),
            *(list[float], list[list[float]], list[list[list[float]]], list[list[answers.TeiSparseValue]]),
            *(answers.TextEntities, list[dialects.HubEntity], list[list[dialects.HubEntity]]),
            chunk_answers.ChunkedTexts,
        ),
        "For SageMaker. The fields of the body select the task, or its `task`: one of /pooling, score or rerank.",
        content_types=(*BINARY, NDJSON),
        errors=BOTH,
        examples={"texts": {"input": _TEXTS}},
    ),
    "/tokenize": post(
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
    "/detokenize": post(
        "The text of token ids",
        "Tokens",
        tokens.DetokenizeBody,
        served.Prompt,
        examples={"ids": {"tokens": [1, 2, 3]}},
    ),
    "/decode": post(
        "The texts of token ids",
        "Tokens",
        tei_tokens.DecodeBody,
        list[str],
        "For clients of text-embeddings-inference.",
        errors=TEI,
        examples={"ids": {"ids": [1, 2, 3]}},
    ),
    **dialects.LISTINGS,
    "/v1/models": get("List the served models", "Models", served.Models),
    ONE_MODEL: get("One served model", "Models", served.ServedModel),
    "/models": get("List the served models, for clients of Infinity", "Models", served.InfinityModels),
    "/info": get("The model, for clients of text-embeddings-inference", "Models", served.TeiInfo, errors=TEI),
    "/version": get("Version of the server", "Models", served.Version),
    "/health": get(
        "Liveness of the server", answer=served.Alive, text="It answers while models load, and under any load."
    ),
    "/ping": {
        method: Operation(summary="The same as /health", tag="Server", answer=(served.Alive,))
        for method in ("GET", "POST")
    },
    "/ready": get("Readiness of the server", answer=served.Ready, unready=served.NotReady),
    "/load": get("Load of the server, for a router", answer=served.Load),
    "/stages": get("State of every stage", answer=served.Stages),
    "/stages/live": get(
        "Rates of every stage, four times a second",
        content_types=("text/event-stream",),
        text="Server-sent events, which the page at / shows. Each is a whole JSON object. The answer never ends.",
    ),
    "/flush_cache": {
        "POST": Operation(
            summary="Clear all caches",
            tag="Server",
            text="Clears the caches of preprocessed images (`--image-cache-mb`) and results (`--result-cache-mb`) "
            "of all models. Requests in progress are not affected.",
        )
    },
    "/reset_mm_cache": {
        "POST": Operation(summary="Clear the image cache", tag="Server", text="As /flush_cache, but results are kept.")
    },
    "/metrics": get("Prometheus metrics", content_types=("text/plain",)),
    "/openapi.json": get("This description", answer=served.Anything),
    "/docs": get("This description as a page", content_types=("text/html",)),
    "/": {
        **get("The stages as a page", content_types=("text/html",), errors=TEI),
        **task(
            "Any of text-embeddings-inference's tasks",
            "Server",
            dict[str, Any],
            (
                *(list[list[float]], list[answers.TeiRanked], list[float]),
                *(list[answers.LabelScore], list[list[answers.LabelScore]], list[list[answers.TeiSparseValue]]),
            ),
            "For clients that know no path: the fields of the body and the kind of the model select the task.",
            errors=TEI,
        ),
    },
}
"""Operations by path and method, in the order of the page."""
