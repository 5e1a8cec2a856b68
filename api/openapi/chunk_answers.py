"""Schemas of answers with vectors of the chunks of texts."""

from __future__ import annotations

from typing import Literal

from staged_pool.api.openapi.answers import AnswerSchema, Listing


class Chunk(AnswerSchema):
    """Place of one chunk in its text."""

    token_range: tuple[int, int]
    """Its first token, and the one behind its last; special tokens count."""
    char_range: tuple[int, int] | None
    """Its first character, and the one behind its last; null if it has no character."""


class LateChunking(AnswerSchema):
    """Chunks of one text."""

    chunk_size: int
    input_tokens: int
    """Tokens of the text, special tokens included."""
    chunks: list[Chunk]
    strategy: Literal["fixed_tokens"]


class ChunkEmbeddings(AnswerSchema):
    """Vectors of the chunks of one text."""

    index: int
    object: Literal["embedding"]
    embedding: list[list[float]]
    late_chunking: LateChunking


class ChunkedTexts(Listing):
    """Vectors of the chunks of each text: the answer to `late_chunking_params`."""

    data: list[ChunkEmbeddings]
