"""Requests for vectors and scores in each server's form, and decoding of its answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perf.tools import jpegs
from perf.tools.client import post
from perf.tools.texts import embeddings_body

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Functions that make complete requests and decode answers; None: the server cannot do that."""

    embed: Callable[[Sequence[str]], bytes]
    vectors: Callable[[bytes], Vectors]
    """Returns the vectors of an answer, in the order of the texts."""
    rank: Callable[[str, Sequence[str]], bytes] | None = None
    """Makes a request to `/rerank`, whose answers have the same form everywhere."""
    see: Callable[[Sequence[bytes]], bytes] | None = None
    """Makes a request for the vectors of images."""


def openai_vectors(body: bytes) -> Vectors:
    """Return the vectors of an answer in OpenAI's form, base64 or numbers."""
    data: list[dict[str, Any]] = json.loads(body)["data"]
    return np.stack([_vector(entry["embedding"]) for entry in sorted(data, key=lambda entry: int(entry["index"]))])


def listed_vectors(body: bytes) -> Vectors:
    """Return the vectors of an answer that is a bare list."""
    return np.stack([_vector(entry) for entry in json.loads(body)])


def scores(body: bytes) -> list[float]:
    """Return the scores of an answer of `/rerank`, in the order of the documents."""
    results: list[dict[str, Any]] = json.loads(body)["results"]
    return [float(entry["relevance_score"]) for entry in sorted(results, key=lambda entry: int(entry["index"]))]


def least_cosine(ours: Vectors, theirs: Vectors) -> float:
    """Return the lowest cosine similarity of a vector with its counterpart.

    Raises:
        ValueError: The shapes differ, or a vector is zero or not finite.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{theirs.shape[0]} vectors of {theirs.shape[1]} values, expected {ours.shape}")
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    if not np.all(np.isfinite(lengths)) or not np.all(lengths > 0):
        raise ValueError("a vector is zero or not finite")
    return float(np.min(np.sum(ours * theirs, axis=1) / lengths))


def _vector(entry: str | list[float]) -> Vectors:
    if isinstance(entry, str):
        return np.frombuffer(base64.b64decode(entry), np.float32)
    return np.asarray(entry, np.float32)


def _openai_embed(texts: Sequence[str]) -> bytes:
    return post("/v1/embeddings", embeddings_body(texts))


def _listed_embed(texts: Sequence[str]) -> bytes:
    return post("/v1/embeddings", json.dumps({"texts": list(texts)}).encode())


def _rank(query: str, documents: Sequence[str]) -> bytes:
    return post("/rerank", json.dumps({"query": query, "documents": list(documents)}).encode())


def _infinity_see(encoded: Sequence[bytes]) -> bytes:
    urls = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in encoded]
    return post(
        "/v1/embeddings", json.dumps({"input": urls, "modality": "image", "encoding_format": "base64"}).encode()
    )


OURS = Dialect(embed=_openai_embed, vectors=openai_vectors, rank=_rank, see=jpegs.embedding_request)
OPENAI = Dialect(embed=_openai_embed, vectors=openai_vectors)
VLLM = Dialect(embed=_openai_embed, vectors=openai_vectors, rank=_rank)
INFINITY = Dialect(embed=_openai_embed, vectors=openai_vectors, see=_infinity_see)
BENTOML = Dialect(embed=_listed_embed, vectors=listed_vectors)
