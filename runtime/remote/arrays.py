"""Payloads and rows as plain values, with their arrays apart: these go through shared memory or a socket as they are.

Nothing is pickled. A block of arrays has one array behind the other; the plain values tell their types and shapes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, SparseVector, TokenSequence, Values
from staged_pool.runtime.remote.limits import PayloadLimits, require
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.wire import Bytes, WireError

_OUTPUTS: Final = tuple(Output)
_ID: Final = "i"
"""Type code of token ids in `array`: 32 bits, on every system that has shared memory without a name."""

ALIGNMENT: Final = 8
"""Each array of a block begins at a multiple of this many bytes.

That is enough for every type of numbers."""

MOST_DIMENSIONS: Final = 4
"""Dimensions of the largest arrays, which are tiles of images."""

Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A count. Larger ones are not exact as a float."""
FAR_S: Final = 1e9
"""Longest duration, in seconds. A deadline behind it is none."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=FAR_S)]
"""A duration; neither NaN nor infinite."""
Shape: TypeAlias = Annotated[list[Amount], msgspec.Meta(max_length=MOST_DIMENSIONS)]
OutputBits: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << len(_OUTPUTS))]
"""A set of outputs; see `pack_outputs`."""
OutputNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=len(_OUTPUTS))]


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Plain values in an array, without their names. The decoder checks their types."""


class PackedPixels(Packed, frozen=True):
    """See `Pixels`."""

    dtype: Literal["|u1", "<f4"]
    shape: Shape
    """Shape of the values, which are an array of the block."""
    grid: tuple[Amount, Amount] | None
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    step_s: Seconds | None


class PackedIds(Packed, frozen=True, tag=0):
    """A `TokenSequence` that has ids and outputs alone, as most have."""

    outputs: OutputBits
    ids: Amount
    """Number of ids, which are an array of the block."""


class PackedSequence(Packed, frozen=True, tag=1):
    """Any other `TokenSequence`. Its spans stay in the front, as no forward reads them."""

    outputs: OutputBits
    ids: Amount
    first_tokens: Amount | None
    prompt_tokens: Amount
    unseen_tokens: Amount
    kept: Amount | None
    """Number of kept places, which are an array of the block."""
    images: list[PackedPixels]
    looked_up: bool
    chunks: Amount | None
    """Number of chunks, whose tokens are an array of the block."""
    adapter: str | None


class PackedImage(Packed, frozen=True, tag=2):
    """See `PreparedImage`."""

    outputs: OutputBits
    tokens: Amount
    pixels: PackedPixels


PackedPayload: TypeAlias = PackedIds | PackedSequence | PackedImage


class PackedValues(Packed, frozen=True, tag=0):
    """One output of a row, an array of float32."""

    output: OutputNumber
    shape: Shape


class PackedSparse(Packed, frozen=True, tag=1):
    """A sparse vector of a row: an array of indices, and one of weights."""

    output: OutputNumber
    entries: Amount


PackedRow: TypeAlias = Annotated[list[PackedValues | PackedSparse], msgspec.Meta(max_length=len(_OUTPUTS))]


class Block:
    """A block of arrays, read from front to back. Arrays are views of it, which cannot be written to.

    In shared memory, the peer may write to it at any time. So numbers that are checked are copied before. Only those
    that may have any value stay there: pixels, weights and vectors.
    """

    def __init__(self, data: Bytes | NDArray[np.uint8]) -> None:
        self._bytes = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        self._place = 0

    def array(self, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        """Return the next array.

        Raises:
            WireError: The block ends before it, or no array has this shape.
        """
        kind = np.dtype(dtype)
        end = self._place + kind.itemsize * math.prod(shape)
        if end > len(self._bytes):
            raise WireError(f"the peer announces an array of {dtype} {list(shape)} that it has not sent")
        try:
            found = self._bytes[self._place : end].view(kind).reshape(shape)
        except ValueError as error:
            raise WireError(f"the peer sends an array of the shape {list(shape)}: {error}") from error
        self._place = end + -end % ALIGNMENT
        return found

    def numbers(self, count: int) -> NDArray[Any]:
        """Return the next array of whole numbers, as a copy: the peer may change the block after they are checked.

        Raises:
            WireError: The block ends before it.
        """
        return self.array("<i4", (count,)).copy()


def add(data: Bytes, parts: list[Bytes]) -> None:
    """Append an array to the parts of a block."""
    parts.append(data)
    if left := -len(data) % ALIGNMENT:
        parts.append(bytes(left))


def pack_payload(payload: Payload, parts: list[Bytes]) -> PackedPayload:
    """Return the plain values of a payload, and append its arrays to `parts`."""
    outputs = pack_outputs(payload.outputs)
    if isinstance(payload, PreparedImage):
        return PackedImage(outputs, payload.tokens, _pack_pixels(payload.pixels, parts))
    _add_numbers(payload.ids, parts)
    extras = (payload.first_tokens, payload.prompt_tokens, payload.unseen_tokens)
    rest = (payload.kept, payload.chunks, payload.adapter, payload.images, payload.looked_up)
    if extras == (None, 0, 0) and rest == (None, None, None, (), False):
        return PackedIds(outputs, len(payload.ids))
    return PackedSequence(
        outputs,
        len(payload.ids),
        *extras,
        _add_numbers(payload.kept, parts),
        [_pack_pixels(pixels, parts) for pixels in payload.images],
        payload.looked_up,
        _add_numbers(payload.chunks, parts),
        payload.adapter,
    )


def unpack_payload(packed: PackedPayload, block: Block, limits: PayloadLimits) -> Payload:
    """Return the payload of `pack_payload`. Its pixels are views of the block, and all else is a copy.

    Raises:
        WireError: The block does not have its arrays, or its numbers are beyond the limits.
    """
    payload = _unpack_payload(packed, block, limits)
    limits.check(payload)
    return payload


def _unpack_payload(packed: PackedPayload, block: Block, limits: PayloadLimits) -> Payload:
    outputs = unpack_outputs(packed.outputs)
    if isinstance(packed, PackedImage):
        return PreparedImage(_unpack_pixels(packed.pixels, block), outputs, packed.tokens)
    limits.check_count(packed.ids)
    found = block.numbers(packed.ids)
    limits.check_ids(found)
    ids = found.tolist()
    if isinstance(packed, PackedIds):
        return TokenSequence(ids, outputs)
    for field in ("kept", "chunks"):
        require((getattr(packed, field) or 0) <= packed.ids, field, "has more values than there are tokens")
    return TokenSequence(
        ids,
        outputs,
        packed.first_tokens,
        packed.prompt_tokens,
        packed.unseen_tokens,
        _numbers(packed.kept, block),
        images=tuple([_unpack_pixels(image, block) for image in packed.images]),
        looked_up=packed.looked_up,
        chunks=_numbers(packed.chunks, block),
        adapter=packed.adapter,
    )


def _add_numbers(numbers: Sequence[int] | None, parts: list[Bytes]) -> int | None:
    """Append whole numbers to the parts of a block. Returns how many there are; None if there is no list."""
    if numbers is None:
        return None
    add(array(_ID, numbers).tobytes(), parts)
    return len(numbers)


def _numbers(count: int | None, block: Block) -> tuple[int, ...] | None:
    return None if count is None else tuple(block.numbers(count).tolist())


def pack_row(values: Mapping[Output, Values], parts: list[Bytes]) -> PackedRow:
    """Return the plain values of a row, and append its arrays to `parts`."""
    packed: PackedRow = []
    for output, each in values.items():
        number = _OUTPUTS.index(output)
        if isinstance(each, SparseVector):
            packed.append(PackedSparse(number, len(each.indices)))
            add(_bytes_of(each.indices), parts)
            add(_bytes_of(each.values), parts)
        else:
            packed.append(PackedValues(number, list(each.shape)))
            add(_bytes_of(each.astype(np.float32, copy=False)), parts)
    return packed


def unpack_row(packed: PackedRow, block: Block) -> dict[Output, Values]:
    """Return the values of `pack_row`: weights are views of the block, indices a copy. See `RowLimits.check`.

    Raises:
        WireError: The block does not have its arrays, or it has two for one output.
    """
    values: dict[Output, Values] = {}
    for each in packed:
        if isinstance(each, PackedSparse):
            found: Values = SparseVector(block.numbers(each.entries), block.array("<f4", (each.entries,)))
        else:
            found = block.array("<f4", each.shape)
        values[_OUTPUTS[each.output]] = found
    require(len(values) == len(packed), "rows", "has two values of one output")
    return values


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


def _pack_pixels(pixels: Pixels, parts: list[Bytes]) -> PackedPixels:
    values = pixels.values
    add(_bytes_of(values), parts)
    dtype = cast('Literal["|u1", "<f4"]', values.dtype.str)
    return PackedPixels(dtype, list(values.shape), pixels.grid, pixels.steps, pixels.step_s)


def _unpack_pixels(packed: PackedPixels, block: Block) -> Pixels:
    return Pixels(block.array(packed.dtype, packed.shape), packed.grid, packed.steps, packed.step_s)


def _bytes_of(values: NDArray[Any]) -> Bytes:
    """Return the bytes of an array, without a copy if they lie in one piece."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
