"""Answers that are no JSON: vectors as they lie in memory, one after the other, and where each of them stands.

`bytes` has a header `metadata`, a JSON object, as vLLM has it: `id`, `created`, `model`, `usage`, and `data` with the
`index`, `embed_dtype`, `endianness`, `start`, `end` (in bytes) and `shape` of each array, and its `scale` where
int8 or uint8 needs it. Clients of HTTP read no header of any length: metadata of more than 8 KiB stand in front of the
vectors instead, as the content type says: their length in bytes as an unsigned number of four bytes, the lowest first;
the object; the vectors, of whose first byte `start` and `end` are counted. `bytes_only` has no metadata at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.api.wire.chunked_json import dump_around, with_pauses
from staged_pool.api.wire.encodings import Encoding
from staged_pool.api.wire.exchange import Written, usage_fields
from staged_pool.runtime.results import Usage

OCTETS: Final = b"application/octet-stream"
FRAMED: Final = b"application/vnd.staged-pool.embeddings"
HEADER_BYTES: Final = 8192
"""Of metadata in a header."""

_PIECE_BYTES: Final = 2**18
_ENTRY_VALUES: Final = 50
"""Numbers that take as long to write as one entry of the metadata to make."""


def write_raw(
    arrays: Iterable[NDArray[Any]],
    encoding: Encoding,
    *,
    kind: str,
    model: str,
    usage: Usage,
    request_id: str,
    created: int,
) -> Written:
    """An answer of one array for each input; see `listing` for the arguments."""
    arrays = list(arrays)
    stored = [encoding.raw(array) for array in with_pauses(arrays)]
    content = tuple(with_pauses(_pieces(stored)))
    if encoding.form == "bytes_only":
        return Written(content, OCTETS)
    ends = list(accumulate(array.nbytes for array in stored))
    entries = (
        {
            "index": index,
            "embed_dtype": encoding.dtype,
            "endianness": encoding.endianness,
            "start": end - array.nbytes,
            "end": end,
            "shape": array.shape,
            **encoding.scale(given),
        }
        for index, (given, array, end) in enumerate(zip(arrays, stored, ends, strict=True))
    )
    about = {"id": f"{kind}-{request_id}", "created": created, "model": model}
    pieces = dump_around(about, "data", entries, {"usage": usage_fields(usage)}, item_values=_ENTRY_VALUES)
    metadata = pieces if isinstance(pieces, bytes) else b"".join(pieces)
    # A header of HTTP is ASCII; the served name may not be.
    if len(metadata) <= HEADER_BYTES and metadata.isascii():
        return Written(content, OCTETS, ((b"metadata", metadata),))
    return Written((len(metadata).to_bytes(4, "little") + metadata, *content), FRAMED)


def _pieces(arrays: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """The memory of the arrays, copied once."""
    gathered: list[memoryview] = []
    size = 0
    for array in arrays:
        memory = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(memory), _PIECE_BYTES):
            gathered.append(memory[start : start + _PIECE_BYTES])
            size += len(gathered[-1])
            if size >= _PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
