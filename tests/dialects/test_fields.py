"""Fields of other servers' interfaces: each is served, rejected by its name, or named in a header as ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import pytest

from staged_pool.api.wire import body_fields
from staged_pool.api.wire.body_fields import HEADER, MEANINGS, headers_of, noting, read_body
from staged_pool.stages.errors import InvalidInput
from tests.dialects.answers import rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
RERANKER = "ce-bert-1label"
CLASSIFIER = "ce-nli-3label"

Outcome: TypeAlias = Literal["served", "rejected", "without effect"]


class Route(NamedTuple):
    model: str
    body: Mapping[str, Any]
    """The least body."""


ROUTES: Final[Mapping[str, Route]] = {
    "/v1/embeddings": Route(EMBEDDER, {"input": "a module"}),
    "/pooling": Route(EMBEDDER, {"input": "a module"}),
    "/api/embed": Route(EMBEDDER, {"input": "a module"}),
    "/api/embeddings": Route(EMBEDDER, {"prompt": "a module"}),
    "/v2/embed": Route(EMBEDDER, {"texts": ["a module"], "input_type": "search_query"}),
    "/v1/multimodalembeddings": Route(EMBEDDER, {"inputs": [{"content": [{"type": "text", "text": "a module"}]}]}),
    "/embed": Route(EMBEDDER, {"inputs": "a module"}),
    "/vectors": Route(EMBEDDER, {"text": "a module"}),
    "/rerank": Route(RERANKER, {"query": "a", "documents": ["a module"]}),
    "/v2/rerank": Route(RERANKER, {"query": "a", "documents": ["a module"]}),
    "/score": Route(RERANKER, {"text_1": "a", "text_2": "a module"}),
    "/v1/ranking": Route(RERANKER, {"query": {"text": "a"}, "passages": [{"text": "a module"}]}),
    "/v1/reranking": Route(RERANKER, {"query": "a", "input": ["a module"]}),
    "/classify": Route(CLASSIFIER, {"input": "a module"}),
    "/predict": Route(CLASSIFIER, {"inputs": "a module"}),
}

VLLM: Final = {
    "user": "u", "truncate_prompt_tokens": 5, "truncation_side": "left", "request_id": "r", "priority": 0,
    "mm_processor_kwargs": None, "cache_salt": "s", "padding": "do_not_pad",
}  # fmt: skip
VLLM_TEXTS: Final = {**VLLM, "add_special_tokens": True}
VLLM_VECTORS: Final = {
    **VLLM_TEXTS, "encoding_format": "base64", "embed_dtype": "float16", "endianness": "little", "dimensions": 8,
    "use_activation": False,
}  # fmt: skip
SGLANG: Final = {"user": "u", "priority": 1}

PEERS: Final[Mapping[tuple[str, str], Mapping[Outcome, Mapping[str, Any]]]] = {
    ("vLLM 0.33", "/v1/embeddings"): {
        "served": VLLM_VECTORS,
        "rejected": {"normalize": False},
    },
    ("vLLM 0.33", "/pooling"): {"served": VLLM_VECTORS, "rejected": {"late_chunking_params": {"chunk_size": 2}}},
    ("vLLM 0.33", "/classify"): {"served": {**VLLM_TEXTS, "use_activation": False}},
    ("vLLM 0.33", "/score"): {"served": {**VLLM, "use_activation": False}},
    ("vLLM 0.33", "/rerank"): {"served": {**VLLM, "use_activation": False, "top_n": 1}},
    ("SGLang", "/v1/embeddings"): {
        "served": {**SGLANG, "dimensions": 8, "encoding_format": "float"},
        "rejected": {"lora_path": "adapter"},
        "without effect": {"rid": "r"},
    },
    ("SGLang", "/score"): {
        "served": SGLANG,
        "rejected": {"label_token_ids": [1, 2], "apply_softmax": True, "item_first": True},
        "without effect": {"rid": "r"},
    },
    ("SGLang", "/rerank"): {"served": {"top_n": 1, "return_documents": True}, "rejected": {"instruct": "judge"}},
    ("text-embeddings-inference", "/embed"): {
        "served": {
            "truncate": True, "truncation_direction": "Left", "prompt_name": None, "normalize": False, "dimensions": 8,
        },
    },
    ("text-embeddings-inference", "/predict"): {
        "served": {"truncate": True, "truncation_direction": "Left", "raw_scores": True},
    },
    ("text-embeddings-inference", "/rerank"): {
        "served": {"truncate": True, "truncation_direction": "Left", "raw_scores": True},
    },
    ("PyLate", "/v1/embeddings"): {
        "rejected": {"is_query": False, "pool_factor": 2}, "without effect": {"protected_tokens": 1},
    },
    ("Cohere", "/v2/embed"): {
        "served": {
            "output_dimension": 8, "embedding_types": ["float"], "truncate": "END", "max_tokens": 5, "priority": 1,
        },
    },
    ("Cohere", "/v2/rerank"): {"served": {"top_n": 1, "max_tokens_per_doc": 4, "priority": 1}},
    ("Jina", "/v1/embeddings"): {
        "served": {
            "embedding_type": "float", "normalized": False, "late_chunking": False, "dimensions": 8, "truncate": True,
        },
        "rejected": {"return_multivector": True},
    },
    ("Jina", "/rerank"): {
        "served": {"top_n": 1, "return_documents": True}, "without effect": {"return_embeddings": True},
    },
    ("Voyage", "/v1/embeddings"): {
        "served": {"truncation": True, "output_dimension": 8, "output_dtype": "float", "input_type": None},
        "rejected": {"chunk_size": 100, "enable_auto_chunking": True},
    },
    ("Voyage", "/v1/multimodalembeddings"): {
        "served": {"truncation": True, "output_dimension": 8, "output_dtype": "float", "input_type": None},
    },
    ("Voyage", "/rerank"): {"served": {"top_k": 1, "return_documents": True, "truncation": True}},
    ("Ollama", "/api/embed"): {
        "served": {"truncate": True, "dimensions": 8, "options": {"num_ctx": 9}},
        "rejected": {"images": ["AAAA"], "truncate_dim": 8},
        "without effect": {"keep_alive": "5m"},
    },
    ("Ollama", "/api/embeddings"): {
        "served": {"options": {"num_ctx": 9}},
        "rejected": {"dimensions": 8, "images": ["AAAA"]},
        "without effect": {"keep_alive": "5m"},
    },
    ("sentence-transformers", "/v1/embeddings"): {
        "served": {"prompt": "q: "},
        "rejected": {"truncate_dim": 8, "normalize_embeddings": False, "max_seq_length": 5, "precision": "int8"},
        "without effect": {
            "batch_size": 32, "show_progress_bar": True, "normalize_embeddings": True, "precision": "float32",
        },
    },
    ("llama.cpp", "/v1/embeddings"): {
        "rejected": {"embd_normalize": -1, "pooling": "cls"}, "without effect": {"embd_normalize": 2},
    },
    ("DashScope", "/v1/embeddings"): {"rejected": {"text_type": "query", "instruct": "find"}},
    ("FlagEmbedding", "/v1/embeddings"): {"rejected": {"return_sparse": True, "max_length": 5}},
    ("NIM", "/v1/ranking"): {"served": {"truncate": "END"}, "rejected": {"instruction": "judge"}},
    ("Mixedbread", "/v1/reranking"): {
        "served": {"top_k": 1, "return_input": True}, "rejected": {"instruction": "judge"},
    },
    ("Google", "/v1/embeddings"): {"rejected": {"taskType": "RETRIEVAL_QUERY", "outputDimensionality": 8}},
    ("Weaviate", "/vectors"): {"served": {"config": {"task_type": "query"}}, "rejected": {"dimensions": 8}},
}  # fmt: skip
"""Fields of each server's route beside the least body, by what becomes of them here."""

IGNORED: Final = HEADER.decode()


@pytest.mark.parametrize(("peer", "route"), PEERS)
def test_each_field_of_a_peer_is_served_rejected_or_named(peer: str, route: str, client_of: ClientOf) -> None:
    model, least = ROUTES[route]
    client = client_of(model)
    for outcome, fields in PEERS[peer, route].items():
        for name, value in fields.items():
            if outcome == "rejected":
                assert name in str(rejection(client, route, 400, **least, **{name: value}))
                continue
            found = client.post(route, json={**least, name: value})
            assert found.status_code == 200, (name, found.text)
            assert found.headers.get(IGNORED) == (name if outcome == "without effect" else None), name


@pytest.mark.parametrize("route", ROUTES)
def test_a_misspelt_field_is_named_by_each_route(route: str, client_of: ClientOf) -> None:
    model, least = ROUTES[route]
    found = client_of(model).post(route, json={**least, "dimesnions": 3, "x": None})
    assert found.status_code == 200
    assert found.headers[IGNORED] == "dimesnions, x"
    assert IGNORED not in client_of(model).post(route, json=least).headers


def test_lines_have_the_header_too(client_of: ClientOf) -> None:
    headers = {"accept": "application/x-ndjson"}
    found = client_of(EMBEDDER).post("/v1/embeddings", json={"input": ["a", "b"], "dimesnions": 3}, headers=headers)
    assert found.headers[IGNORED] == "dimesnions"
    assert found.text.count("\n") == 3


def test_a_field_without_a_value_asks_for_nothing(client_of: ClientOf) -> None:
    nothing = {"pool_factor": 1, "images": [], "lora_path": None, "return_sparse": False, "max_length": None}
    found = client_of(EMBEDDER).post("/v1/embeddings", json={"input": "a", **nothing})
    assert found.status_code == 200
    assert found.headers[IGNORED] == ", ".join(nothing)


@pytest.mark.parametrize(
    ("route", "name", "remedy"),
    [
        ("/v1/embeddings", "truncate_dim", "send `dimensions`"),
        ("/v2/embed", "truncate_dim", "send `output_dimension`"),
        ("/api/embeddings", "dimensions", "whole vectors"),
        ("/v1/embeddings", "max_length", "send `truncate_prompt_tokens`"),
        ("/v2/embed", "max_length", "send `max_tokens`"),
        ("/v1/embeddings", "lora_path", "as `model`"),
    ],
)
def test_the_message_says_what_to_send(route: str, name: str, remedy: str, client_of: ClientOf) -> None:
    model, least = ROUTES[route]
    assert remedy in str(rejection(client_of(model), route, 400, **least, **{name: 5}))


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["a", "b"], b"a, b"),
        ([f"f{number}" for number in range(12)], b"f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, +2"),
        (["a\r\nset-cookie: b", "ä", "x" * 65, "", "ok"], b"ok, +4"),
        (["\r\n"], b"+1"),
    ],
)
def test_the_header_is_short_and_repeats_no_odd_name(names: list[str], value: bytes) -> None:
    assert headers_of(names) == ((HEADER, value),)
    assert headers_of([]) == ()


class _Body(msgspec.Struct, kw_only=True):
    input: str
    other: int = msgspec.field(default=0, name="dimensions")


def test_a_body_is_decoded_with_and_without_further_fields() -> None:
    decoder = msgspec.json.Decoder(_Body)
    with noting() as noted:
        plain = read_body(decoder, b'{"input": "a", "dimensions": 3}')
        assert isinstance(plain, _Body)
        assert (plain.input, plain.other, list(noted)) == ("a", 3, [])
        more = read_body(decoder, b'{"z": [{}], "input": "a", "other": 1, "z": 2}')
        assert (more.other, list(noted)) == (0, ["z", "other"])
        with pytest.raises(InvalidInput, match="input: this field is required"):
            read_body(decoder, b'{"z": 1}')
        with pytest.raises(InvalidInput, match="truncate_dim: is no field of this route; send `dimensions`"):
            read_body(decoder, b'{"input": "a", "truncate_dim": 3}')
    read_body(decoder, b'{"input": "a", "z": 1}')  # outside of a request, nobody wants the names
    assert list(noted) == ["z", "other"]


def test_a_field_has_one_meaning() -> None:
    names = [name for meaning in MEANINGS for name in meaning.fields]
    assert len(names) == len(set(names)) == len(body_fields._MEANING_OF)
