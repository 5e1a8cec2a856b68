"""Types of the server's answers, and their conversion to arrays.

Vectors come in base64 where possible, so that no Python number is made for each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from staged_pool.client.errors import BadAnswer, ErrorObject
from staged_pool.stages import foreign_json

T = TypeVar("T")


class UsageObject(msgspec.Struct):
    prompt_tokens: int = 0


class VectorObject(msgspec.Struct):
    """One vector: little-endian float32 in base64."""

    embedding: bytes
    index: int


class VectorsBody(msgspec.Struct):
    data: list[VectorObject]
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class ChunkObject(msgspec.Struct):
    """Tokens and characters of one chunk of a text."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunkingObject(msgspec.Struct):
    chunks: list[ChunkObject]


class ChunkedObject(msgspec.Struct):
    """Vectors of the chunks of one text."""

    embedding: list[list[float]]
    index: int
    late_chunking: LateChunkingObject


class ChunkedBody(msgspec.Struct):
    data: list[ChunkedObject]
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class SparseObject(msgspec.Struct):
    """One sparse vector: numbers, or little-endian int32 and float32 in base64."""

    indices: bytes | list[int]
    values: bytes | list[float]


class OutputsObject(msgspec.Struct):
    """Outputs of one input, by task."""

    embed: bytes | list[float] | None = None
    sparse: SparseObject | None = None
    token_embed: list[list[float]] | None = None
    token_classify: bytes | list[float] | None = None


class OffsetsObject(msgspec.Struct):
    """Characters of the tokens of one input, by task."""

    token_embed: list[list[int]] | None = None


class PooledObject(msgspec.Struct):
    data: OutputsObject
    index: int
    offsets: OffsetsObject | None = None


class PooledBody(msgspec.Struct):
    data: list[PooledObject]
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class ScoreObject(msgspec.Struct):
    score: float
    index: int
    logit: float | None = None


class ScoresBody(msgspec.Struct):
    data: list[ScoreObject]
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class LabelsObject(msgspec.Struct):
    probs: list[float]
    index: int


class LabelsBody(msgspec.Struct):
    data: list[LabelsObject]
    labels: list[str] = msgspec.field(default_factory=list)
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class EntityObject(msgspec.Struct):
    label: str
    score: float
    start: int
    end: int
    text: str


class EntitiesObject(msgspec.Struct):
    entities: list[EntityObject]
    index: int


class EntitiesBody(msgspec.Struct):
    data: list[EntitiesObject]
    model: str = ""
    usage: UsageObject = msgspec.field(default_factory=UsageObject)


class TokensBody(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class TextBody(msgspec.Struct):
    prompt: str


class ModelObject(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    staged_pool: dict[str, Any] = msgspec.field(default_factory=dict)


class ModelsBody(msgspec.Struct):
    data: list[ModelObject]


class ReadyBody(msgspec.Struct):
    ready: bool
    reason: str = ""


class StreamLine(msgspec.Struct):
    """One line of a stream: a vector, the usage of the request, or an error."""

    embedding: bytes | None = None
    index: int | None = None
    usage: UsageObject | None = None
    model: str = ""
    error: ErrorObject | None = None


VECTORS: Final = msgspec.json.Decoder(VectorsBody)
CHUNKED: Final = msgspec.json.Decoder(ChunkedBody)
POOLED: Final = msgspec.json.Decoder(PooledBody)
SCORES: Final = msgspec.json.Decoder(ScoresBody)
LABELS: Final = msgspec.json.Decoder(LabelsBody)
ENTITIES: Final = msgspec.json.Decoder(EntitiesBody)
TOKENS: Final = msgspec.json.Decoder(TokensBody)
TEXT: Final = msgspec.json.Decoder(TextBody)
MODELS: Final = msgspec.json.Decoder(ModelsBody)
READY: Final = msgspec.json.Decoder(ReadyBody)
LINE: Final = msgspec.json.Decoder(StreamLine)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode an answer.

    Raises:
        BadAnswer: The body is not of the expected type; the message says where.
    """
    try:
        return foreign_json.decode(body, decoder.decode, most_bytes=foreign_json.ANY_SIZE, most_depth=None)
    except (msgspec.DecodeError, foreign_json.BadJson) as error:
        raise BadAnswer(f"The answer cannot be decoded: {error}") from None


def in_order(data: Sequence[T], indices: Sequence[int], count: int) -> list[T]:
    """Sort the objects of an answer into the order of the inputs.

    Args:
        data: The objects.
        indices: The index of the input of each object.
        count: Number of inputs.

    Raises:
        BadAnswer: There is not exactly one object for each input.
    """
    if sorted(indices) != list(range(count)):
        raise BadAnswer(f"The answer does not have exactly one result for each of the {count} inputs")
    if list(indices) == list(range(count)):
        return list(data)
    return [entry for _, entry in sorted(zip(indices, data, strict=True), key=lambda pair: pair[0])]


def floats(value: bytes | Sequence[float]) -> NDArray[np.float32]:
    """Convert a vector to float32 [width], from little-endian bytes or from numbers.

    Raises:
        BadAnswer: The number of bytes is not a multiple of 4.
    """
    if isinstance(value, bytes):
        if len(value) % 4:
            raise BadAnswer(f"The answer has a vector of {len(value)} bytes; expected a multiple of 4 (float32)")
        return np.frombuffer(value, "<f4").astype(np.float32)
    return np.asarray(value, np.float32)


def integers(value: bytes | Sequence[int]) -> NDArray[np.int32]:
    """Convert a vector to int32 [width]; see `floats`."""
    if isinstance(value, bytes):
        if len(value) % 4:
            raise BadAnswer(f"The answer has a vector of {len(value)} bytes; expected a multiple of 4 (int32)")
        return np.frombuffer(value, "<i4").astype(np.int32)
    return np.asarray(value, np.int32)


def matrix(rows: Sequence[bytes | Sequence[float]]) -> NDArray[np.float32]:
    """Stack vectors of the same length, float32 [rows, width].

    Raises:
        BadAnswer: The vectors have different lengths.
    """
    if len({len(row) for row in rows}) > 1:
        raise BadAnswer("The answer has vectors of different lengths")
    if rows and all(isinstance(row, bytes) for row in rows):
        return floats(b"".join(row for row in rows if isinstance(row, bytes))).reshape(len(rows), -1)
    return np.asarray(rows, np.float32)
