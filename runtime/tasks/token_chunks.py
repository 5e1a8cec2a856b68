"""Late chunking by runs of tokens: conditions on a request, and the ranges of its chunks.

Each text is read in one forward, and each run of its tokens has one vector. The rules are vLLM's
(`vllm/entrypoints/pooling/late_chunking.py`), as are the first words of the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.payloads import Payload, TokenSequence
from staged_pool.runtime.requests import EmbedRequest, Output, Outputs, TextInput
from staged_pool.runtime.spans import Span
from staged_pool.stages.errors import InvalidInput, Unsupported

CHUNKED: Final[Outputs] = frozenset({Output.MULTI_VECTOR})
"""Outputs of a request whose texts are read in chunks."""

_LAST: Final = np.iinfo(np.int32).max


def check_chunks(request: EmbedRequest, card: ModelCard) -> None:
    """Check a request with `chunk_tokens`.

    Raises:
        Unsupported: The model gives no vectors of tokens.
        InvalidInput: A setting does not go with chunks, or an input is no text that is read as it is.
    """
    size = request.chunk_tokens
    if size is not None and size < 1:
        raise InvalidInput(f"$chunk_tokens must be at least 1, got {size}.", param="chunk_tokens")
    if Output.MULTI_VECTOR not in card.outputs:
        raise Unsupported(f"Late chunking requires token_embed: the model `{card.name}` gives no vectors of tokens.")
    if request.outputs != CHUNKED:
        message = "$chunk_tokens is for multi_vector alone: $outputs must be multi_vector."
        raise InvalidInput(message, param="outputs")
    if request.late_chunking:
        message = "Late chunking is either by $chunk_tokens or by the texts of $late_chunking: give one of them."
        raise InvalidInput(message, param="chunk_tokens")
    if request.dimensions is not None:
        message = "Late chunking does not support $dimensions: the vectors of chunks are whole. Leave it out."
        raise InvalidInput(message, param="dimensions")
    if request.offsets:
        message = "$offsets are of tokens, and $chunk_tokens gives those of chunks by itself. Leave $offsets out."
        raise InvalidInput(message, param="offsets")
    for index, given in enumerate(request.inputs):
        if not isinstance(given, TextInput) or not isinstance(given.source, str) or not given.source:
            raise InvalidInput(
                "Late chunking requires nonempty plain-text input. Send texts, not token ids, conversations or images.",
                param="input",
                index=index,
            )
        if given.max_tokens is not None or given.max_own_tokens is not None:
            raise InvalidInput(
                "Late chunking does not support input padding, truncation or renderer text normalization. Leave "
                "$max_tokens out, and send shorter texts.",
                param="max_tokens",
                index=index,
            )


def token_ranges(payload: Payload) -> NDArray[np.int32]:
    """Return the first token of each chunk, and the one behind its last: [chunks, 2]."""
    ends = np.array(list(accumulate(_counts(payload))), np.int32)
    return np.stack([np.concatenate([np.zeros(1, np.int32), ends[:-1]]), ends], axis=1)


def character_ranges(payload: Payload) -> NDArray[np.int32]:
    """Return the first character of each chunk, and the one behind its last: [chunks, 2].

    Both are 0 for a chunk that has no character, because its tokens are special or of a prompt.
    """
    counts, spans = _counts(payload), _spans(payload)
    pairs = np.array([(span.start, span.end) for span in spans], np.int32).reshape(-1, 2)
    starts, ends = pairs[:, 0], pairs[:, 1]
    has_text = starts < ends
    places = np.cumsum([0, *counts[:-1]])
    first = np.minimum.reduceat(np.where(has_text, starts, _LAST), places)
    behind = np.maximum.reduceat(np.where(has_text, ends, 0), places)
    return np.stack([np.where(behind > 0, first, 0), behind], axis=1).astype(np.int32)


def _counts(payload: Payload) -> Sequence[int]:
    assert isinstance(payload, TokenSequence)
    assert payload.chunks is not None
    return payload.chunks


def _spans(payload: Payload) -> Sequence[Span]:
    assert isinstance(payload, TokenSequence)
    assert payload.spans is not None
    return payload.spans
