"""Binary answers: the bytes of the vectors one after the other, with metadata in a header.

Three layouts:

- `bytes`, with metadata of at most 8 KiB: the body is the vectors. The header `metadata` is a JSON object, as in vLLM.
- `bytes`, with more metadata, which HTTP clients would reject as a header (content type
  `application/vnd.staged-pool.embeddings`): the length of the metadata in bytes (uint32, little-endian), the metadata,
  and the vectors. `start` and `end` count from the first byte of the vectors.
- `bytes_only`: the vectors, without metadata.

The metadata hold `id`, `created`, `model`, `usage` and `data`. `data` has an entry for each array: `index`,
`embed_dtype`, `endianness`, `start` and `end` (in bytes), `shape`, and for int8 and uint8 `scale`.
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
"""Maximum size of metadata in a header, in bytes."""

_CHUNK_BYTES: Final = 2**18
_ENTRY_VALUES: Final = 50
"""Cost of one entry of the metadata; the unit is the time to write one number."""


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
    """Write one array for each input; see `listing` for the arguments."""
    arrays = list(arrays)
    stored = [encoding.raw(array) for array in with_pauses(arrays)]
    content = tuple(with_pauses(_copied(stored)))
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
    # HTTP headers are ASCII; the served name may not be.
    if len(metadata) <= HEADER_BYTES and metadata.isascii():
        return Written(content, OCTETS, ((b"metadata", metadata),))
    return Written((len(metadata).to_bytes(4, "little") + metadata, *content), FRAMED)


def _copied(arrays: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """Yield the memory of the arrays in pieces, copied once."""
    gathered: list[memoryview] = []
    size = 0
    for array in arrays:
        memory = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(memory), _CHUNK_BYTES):
            gathered.append(memory[start : start + _CHUNK_BYTES])
            size += len(gathered[-1])
            if size >= _CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
