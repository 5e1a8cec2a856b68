"""Errors name the caller's field and the place of the fault, in every dialect."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.dialects.answers import rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "nomic-matryoshka"
PLAIN = "bert-mean"
RANKER = "ce-bert-1label"
CLASSIFIER = "seqcls-multiclass"
TAGGER = "tokcls-ner"

LONG = "the statement yields a module " * 500
BAD = [10**6]
DOCS = ["a", LONG]

ENGINES = re.compile(
    r"\b(prompt_name|dimensions|max_tokens|max_query_tokens|max_document_tokens|truncate_prompt_tokens|outputs|input)\b"
)

CASES: list[tuple[str, str, dict[str, Any], str | None, str]] = [
    # OpenAI's and vLLM's
    (EMBEDDER, "/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "prompt_name is not one of"),
    (EMBEDDER, "/v1/embeddings", {"input": "a", "task": "x"}, "task", "task: "),
    (EMBEDDER, "/v1/embeddings", {"input": "a", "dimensions": 999}, "dimensions", "dimensions"),
    (EMBEDDER, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 10**6}, None, "truncate_prompt_tokens value"),
    (EMBEDDER, "/v1/embeddings", {"input": LONG}, "input", "or set truncate_prompt_tokens"),
    (EMBEDDER, "/v1/embeddings", {"input": ["a", LONG]}, "input", "input[1]: "),
    (EMBEDDER, "/v1/embeddings", {"input": [[1], BAD]}, "input", "input[1]: Token id"),
    (EMBEDDER, "/v1/embeddings", {"input": ["a", {"text": LONG}]}, "input", "input[1].text: "),
    (EMBEDDER, "/v1/embeddings", {"input": {"text": LONG}}, "input", "input.text: "),
    (EMBEDDER, "/v1/embeddings", {"input": ["a"] * 3000}, "input", "3000 inputs"),
    (EMBEDDER, "/pooling", {"input": ["a", LONG]}, "input", "input[1]: "),
    (EMBEDDER, "/pooling", {"input": "a", "prompt_name": "x"}, "prompt_name", "prompt_name is not one of"),
    (PLAIN, "/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions", "--matryoshka"),
    (CLASSIFIER, "/classify", {"input": ["a", LONG]}, "input", "input[1]: "),
    (CLASSIFIER, "/classify", {"input": [["a", "b"], ["a", LONG]]}, "input", "input[1]: "),
    (CLASSIFIER, "/classify", {"input": [["a", "b"], ["a", 1]]}, "input", "input[1][1]: "),
    (TAGGER, "/classify_tokens", {"input": ["a", LONG]}, "input", "input[1]: "),
    (TAGGER, "/classify_tokens", {"input": "a", "aggregation_strategy": "x"}, None, "aggregation_strategy: "),
    (RANKER, "/score", {"text_1": "a", "text_2": ["b"], "truncate_prompt_tokens": 10**6}, None, "truncate_prompt"),
    (RANKER, "/score", {"queries": "a", "items": ["b", {"text": 7}]}, "items", "items[1].text: "),
    (RANKER, "/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", "instruction"),
    (RANKER, "/rerank", {"query": "a", "documents": ["a"] * 3000}, "documents", "3000 inputs"),
    # Cohere's
    (EMBEDDER, "/v2/embed", {"texts": ["a"], "input_type": "x"}, "input_type", "input_type"),
    (EMBEDDER, "/v2/embed", {"texts": ["a"], "output_dimension": 999}, "output_dimension", "output_dimension"),
    (PLAIN, "/v1/embed", {"texts": ["a"], "output_dimension": 8}, "output_dimension", "output_dimension must be"),
    (EMBEDDER, "/v2/embed", {"texts": ["a"], "max_tokens": 10**6}, "max_tokens", "max_tokens value is greater"),
    (EMBEDDER, "/v2/embed", {"texts": DOCS, "truncate": "NONE"}, "texts", "texts[1]: "),
    (EMBEDDER, "/v1/embed", {"texts": [LONG], "truncate": "NONE"}, "texts", "or set truncate."),
    (EMBEDDER, "/v2/embed", {"inputs": [{"content": "a"}, {"content": LONG}], "truncate": "NONE"}, "inputs",
     "inputs[1].content: "),
    (EMBEDDER, "/v2/embed", {"texts": ["a"] * 3000}, "texts", "3000 inputs"),
    # Jina's
    (PLAIN, "/v1/embeddings", {"input": ["a"], "task": "x"}, "task", "task: "),
    # text-embeddings-inference's
    (EMBEDDER, "/embed", {"inputs": "a", "prompt_name": "x"}, None, "prompt_name is not one of"),
    (EMBEDDER, "/embed", {"inputs": DOCS, "truncate": False}, None, "inputs[1]: "),
    (EMBEDDER, "/embed", {"inputs": LONG, "truncate": False}, None, "or set truncate."),
    (EMBEDDER, "/embed", {"inputs": [[1], BAD]}, None, "inputs[1]: Token id"),
    (EMBEDDER, "/embed_all", {"inputs": [1, "a"]}, None, "inputs[1]: "),
    (EMBEDDER, "/similarity", {"inputs": {"source_sentence": "a", "sentences": DOCS},
                               "parameters": {"truncate": False}}, None, "inputs.sentences[1]: "),
    (EMBEDDER, "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]},
                               "parameters": {"prompt_name": "x"}}, None, "parameters.prompt_name is not"),
    (EMBEDDER, "/similarity", {"inputs": {"sentences": ["b"]}}, None, "inputs.source_sentence: this field is required"),
    (EMBEDDER, "/decode", {"ids": [[1], BAD]}, None, "ids[1]: Token id"),
    (EMBEDDER, "/decode", {"ids": BAD}, None, "ids: Token id"),
    (EMBEDDER, "/rerank", {"query": "a", "texts": DOCS, "truncate": False}, None, "texts[1]: "),
    (CLASSIFIER, "/predict", {"inputs": [["a", "b"], ["a", LONG]], "truncate": False}, None, "inputs[1]: "),
    (CLASSIFIER, "/predict", {"inputs": [["a", "b"], ["a", 1]]}, None, "inputs[1][1]: "),
    (CLASSIFIER, "/predict", {"inputs": ["a", "b", "c"]}, None, "inputs: "),
    # Infinity's
    (EMBEDDER, "/embeddings", {"input": ["a", LONG], "truncate": False}, "input", "input[1]: "),
    # SageMaker's
    (EMBEDDER, "/invocations", {"input": ["a", LONG]}, "input", "input[1]: "),
    (RANKER, "/invocations", {"query": "a", "documents": ["a"] * 3000}, "documents", "3000 inputs"),
    # vLLM's tokens
    (EMBEDDER, "/detokenize", {"tokens": BAD}, "tokens", "Token id"),
    (EMBEDDER, "/tokenize", {"inputs": ["a", 1]}, None, "inputs[1]: "),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "body", "param", "said"), CASES)
def test_errors_name_what_the_caller_sent(  # noqa: PLR0917  # one case
    kind: str, path: str, body: dict[str, Any], param: str | None, said: str, client_of: ClientOf
) -> None:
    response = client_of(kind).post(path, json=body)
    assert 400 <= response.status_code < 500, response.text
    found = response.json()["error"]
    message = found if isinstance(found, str) else found["message"]
    assert said in message
    if not isinstance(found, str) and param is not None:
        assert found["param"] == param
    sent = {*body, *body.get("parameters", {})}
    named = set(ENGINES.findall(re.sub(r"(length of the|your|The|of an) input( prompt)?", "", message)))
    hinted = {"truncate_prompt_tokens"} if path in VLLM else set()
    assert named <= sent | hinted, message


VLLM = ("/v1/embeddings", "/pooling", "/classify", "/classify_tokens", "/embeddings", "/invocations")
"""Routes whose hints may name a field that could have been sent."""


def test_an_error_of_one_input_has_its_index(client_of: ClientOf) -> None:
    error = rejection(client_of(EMBEDDER), "/v2/embed", 400, texts=["a", "b", LONG], truncate="NONE")["error"]
    assert (error["param"], error["index"]) == ("texts", 2)
    assert error["message"].startswith("texts[2]: This model's maximum context length")
