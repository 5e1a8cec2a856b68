"""How each server is asked for vectors and scores, and how its answers are read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perf import jpegs
from perf.client import post
from perf.texts import embeddings_body

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Requests are complete with their HTTP heads. None: the server cannot do that, or not with this model."""

    embed: Callable[[Sequence[str]], bytes]
    vectors: Callable[[bytes], Vectors]
    """The vectors of an answer, in the order of the texts."""
    rank: Callable[[str, Sequence[str]], bytes] | None = None
    """Asks `/rerank`; how its answers look is the same everywhere."""
    see: Callable[[Sequence[bytes]], bytes] | None = None
    """Asks for the vectors of images."""


def openai_vectors(body: bytes) -> Vectors:
    """Of an answer in OpenAI's form, as base64 or as numbers."""
    data: list[dict[str, Any]] = json.loads(body)["data"]
    return np.stack([_vector(entry["embedding"]) for entry in sorted(data, key=lambda entry: int(entry["index"]))])


def listed_vectors(body: bytes) -> Vectors:
    """Of an answer that is a bare list of them."""
    return np.stack([_vector(entry) for entry in json.loads(body)])


def scores(body: bytes) -> list[float]:
    """Of an answer of `/rerank`, in the order of the documents."""
    results: list[dict[str, Any]] = json.loads(body)["results"]
    return [float(entry["relevance_score"]) for entry in sorted(results, key=lambda entry: int(entry["index"]))]


def least_cosine(ours: Vectors, theirs: Vectors) -> float:
    """The worst agreement of a vector with its counterpart.

    Raises:
        ValueError: They are not as many, or not as long; or one of them is zero or no number.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{theirs.shape[0]} vectors of {theirs.shape[1]} values, expected {ours.shape}")
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    if not np.all(np.isfinite(lengths)) or not np.all(lengths > 0):
        raise ValueError("a vector is zero or holds what is no number")
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
