"""vLLM's `late_chunking_params` on `/v1/embeddings`: vectors of the chunks of each text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.encodings import Encoding
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.field_errors import field_error
from staged_pool.runtime.results import EmbedResult

FIELD: Final = "late_chunking_params"


class LateChunkingParams(msgspec.Struct, forbid_unknown_fields=True):
    """Rule that cuts the tokens of a text into chunks."""

    chunk_size: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of each chunk, special tokens included; the last one may have fewer."""


class _Asked(msgspec.Struct):
    late_chunking_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_ASKED: Final = msgspec.json.Decoder(_Asked)
_PLAIN: Final = Encoding()


def may_ask_chunks(body: Body) -> bool:
    """Return True if a body may ask for chunks. It is a quick look, for bodies of any size."""
    return FIELD.encode() in body


def asks_chunks(body: Body) -> bool:
    """Return True if a body asks for chunks.

    Raises:
        InvalidInput: The body is not a JSON object.
    """
    found = json_decode.decode(_ASKED, body).late_chunking_params
    return isinstance(found, msgspec.Raw) and not json_decode.is_null(found)


def check_answer(encodings: Mapping[str, Encoding], padding: str | None) -> None:
    """Reject an answer that vLLM does not give for chunks.

    Args:
        encodings: Encodings of each vector.
        padding: Field of the body.

    Raises:
        InvalidInput: The numbers are not written as floats, or the inputs are padded.
    """
    if list(encodings.values()) != [_PLAIN]:
        raise field_error("encoding_format", "Late chunking requires float: leave out other forms and types of numbers")
    if padding == "max_length":
        raise field_error(
            "padding",
            "Late chunking does not support input padding, truncation or renderer text normalization; leave it out",
        )


def chunk_entries(result: EmbedResult, chunk_size: int) -> Iterator[Mapping[str, object]]:
    """Yield the object of each input: its vectors, and the tokens and characters of each.

    Args:
        result: Has `multi_vector`, `chunks` and `offsets`.
        chunk_size: The caller's.
    """
    columns = zip(result.multi_vector or (), result.chunks or (), result.offsets or (), strict=True)
    for index, (vectors, tokens, characters) in enumerate(columns):
        assert characters is not None
        pairs: Sequence[tuple[Any, Any]] = list(zip(tokens.tolist(), characters.tolist(), strict=True))
        yield {
            "index": index,
            "object": "embedding",
            "embedding": _PLAIN.value(vectors),
            "late_chunking": {
                "chunk_size": chunk_size,
                "input_tokens": pairs[-1][0][1],
                "chunks": [
                    {"token_range": token_range, "char_range": char_range if char_range[0] < char_range[1] else None}
                    for token_range, char_range in pairs
                ],
                "strategy": "fixed_tokens",
            },
        }
