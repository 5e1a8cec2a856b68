"""Payloads and rows as plain values, with their arrays apart: these go through shared memory or a socket as they are.

Nothing is pickled. A block of arrays has one array behind the other; the plain values tell their types and shapes.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import Payload, Pixels, PreparedImage, Span, SparseVector, TokenSequence, Values
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.wire import Bytes, WireError

_OUTPUTS: Final = tuple(Output)
_ID: Final = "i"
"""Type code of token ids in `array`: 32 bits, on every system that has shared memory without a name."""

_SEQUENCE: Final = 0
_IMAGE: Final = 1
_SPARSE: Final = "sparse"


ALIGNMENT: Final = 8
"""Each array of a block begins at a multiple of this many bytes.

That is enough for every type of numbers."""


class Block:
    """A block of arrays, read from front to back. Arrays are views of it, which cannot be written to."""

    def __init__(self, data: Bytes | NDArray[np.uint8]) -> None:
        self._bytes = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        self._place = 0

    def array(self, dtype: str, shape: list[int] | tuple[int, ...]) -> NDArray[Any]:
        """Return the next array.

        Raises:
            WireError: The block ends before it.
        """
        kind = np.dtype(dtype)
        size = kind.itemsize
        for edge in shape:
            size *= edge
        end = self._place + size
        if kind.hasobject or end > len(self._bytes):
            raise WireError(f"the peer announces an array of {dtype} {shape} that it has not sent")
        found = self._bytes[self._place : end].view(kind).reshape(shape)
        self._place = end + -end % ALIGNMENT
        return found


def add(data: Bytes, parts: list[Bytes]) -> None:
    """Append an array to the parts of a block."""
    parts.append(data)
    if left := -len(data) % ALIGNMENT:
        parts.append(bytes(left))


def pack_payload(payload: Payload, parts: list[Bytes]) -> list[Any]:
    """Return the plain values of a payload, and append its arrays to `parts`."""
    if isinstance(payload, PreparedImage):
        return [_IMAGE, pack_outputs(payload.outputs), payload.tokens, _pack_pixels(payload.pixels, parts)]
    add(array(_ID, payload.ids).tobytes(), parts)
    plain: list[Any] = [_SEQUENCE, pack_outputs(payload.outputs), len(payload.ids)]
    if (payload.first_tokens, payload.prompt_tokens, payload.unseen_tokens) != (None, 0, 0) or (
        payload.kept is not None or payload.spans is not None or payload.images
    ):
        spans = None if payload.spans is None else [(span.start, span.end, span.word) for span in payload.spans]
        images = [_pack_pixels(pixels, parts) for pixels in payload.images]
        plain += [payload.first_tokens, payload.prompt_tokens, payload.unseen_tokens, payload.kept, spans, images]
    return plain


def unpack_payload(plain: list[Any], block: Block) -> Payload:
    """Return the payload of `pack_payload`. Its pixels are views of the block.

    Raises:
        WireError: The values are not those of a payload.
    """
    try:
        kind, outputs, size, *rest = plain
        if kind == _IMAGE:
            return PreparedImage(_unpack_pixels(rest[0], block), unpack_outputs(outputs), size)
        ids = block.array("<i4", (size,)).tolist()
        if not rest:
            return TokenSequence(ids, unpack_outputs(outputs))
        first, prompt, unseen, kept, spans, images = rest
        return TokenSequence(
            ids,
            unpack_outputs(outputs),
            first,
            prompt,
            unseen,
            None if kept is None else tuple(kept),
            None if spans is None else tuple(Span(*span) for span in spans),
            tuple(_unpack_pixels(image, block) for image in images),
        )
    except (TypeError, ValueError, IndexError) as error:
        raise WireError(f"the peer sends a payload that cannot be read: {error}") from error


def pack_row(values: Mapping[Output, Values], parts: list[Bytes]) -> list[Any]:
    """Return the plain values of a row, and append its arrays to `parts`."""
    plain: list[Any] = []
    for output, each in values.items():
        if isinstance(each, SparseVector):
            plain.append((_OUTPUTS.index(output), _SPARSE, each.indices.size))
            add(_bytes_of(each.indices), parts)
            add(_bytes_of(each.values), parts)
        else:
            plain.append((_OUTPUTS.index(output), each.dtype.str, each.shape))
            add(_bytes_of(each), parts)
    return plain


def unpack_row(plain: list[Any], block: Block) -> dict[Output, Values]:
    """Return the values of `pack_row`, as views of the block.

    Raises:
        WireError: The values are not those of a row.
    """
    try:
        values: dict[Output, Values] = {}
        for output, dtype, shape in plain:
            if dtype == _SPARSE:
                values[_OUTPUTS[output]] = SparseVector(block.array("<i4", (shape,)), block.array("<f4", (shape,)))
            else:
                values[_OUTPUTS[output]] = block.array(dtype, shape)
        return values
    except (TypeError, ValueError, IndexError) as error:
        raise WireError(f"the peer sends a row that cannot be read: {error}") from error


def pack_outputs(outputs: Outputs) -> int:
    """Return a set of outputs as bits."""
    return sum(1 << place for place, output in enumerate(_OUTPUTS) if output in outputs)


_unpacked: Final[dict[int, Outputs]] = {}


def unpack_outputs(bits: int) -> Outputs:
    """Return the set of outputs with these bits. Equal sets are one object."""
    if (found := _unpacked.get(bits)) is None:
        found = frozenset(output for place, output in enumerate(_OUTPUTS) if bits >> place & 1)
        _unpacked[bits] = found
    return found


def pack_key(key: Hashable) -> bytes:
    """Return a batch key or an identity as bytes: equal for equal keys, in every process, and for no others."""
    return key if isinstance(key, bytes) else msgspec.msgpack.encode(_plain(key))


def _plain(key: Any) -> Any:
    if isinstance(key, frozenset):
        return pack_outputs(key)
    return [_plain(part) for part in key] if isinstance(key, tuple) else key


def _pack_pixels(pixels: Pixels, parts: list[Bytes]) -> list[Any]:
    add(_bytes_of(pixels.values), parts)
    return [pixels.values.dtype.str, pixels.values.shape, pixels.grid]


def _unpack_pixels(plain: list[Any], block: Block) -> Pixels:
    dtype, shape, grid = plain
    return Pixels(block.array(dtype, shape), None if grid is None else tuple(grid))


def _bytes_of(values: NDArray[Any]) -> Bytes:
    """Return the bytes of an array, without a copy if they lie in one piece."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
