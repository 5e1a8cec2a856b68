"""Encodings of the numbers of an answer: data type, byte order, and JSON, base64 or binary form.

Types that cannot hold a float32 exactly:

- `float16`, `bfloat16`, `fp8_e4m3`, `fp8_e5m2`: rounded to nearest, ties to even. Values out of range become the
  largest value. float16 is IEEE 754's. The fp8 layouts are those of Micikevicius et al., 2022, FP8 Formats for Deep
  Learning, section 3 (e4m3 has no infinity; its largest value is 448).
- `int8`: q = round(127 v / s), from -127 to 127, where s is the largest absolute value of the vector. q s / 127
  restores the vector within s / 254. The cosine of two vectors needs no scale. A vector of length 1 is q / |q|.
- `uint8`: int8 plus 128: from 1 to 255, where 128 is 0.
- `ubinary`: one bit a value, set if the value is at least 0. The first of eight values is the highest bit of a byte.
- `binary`: ubinary minus 128, so that it fits int8.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.api.wire.chunked_json import STEP_VALUES, EncodedJson, dump_array, with_pauses
from staged_pool.stages.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float32]
EmbedDType: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]
Endianness: TypeAlias = Literal["native", "big", "little"]
Form: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]

INTEGERS: Final[frozenset[EmbedDType]] = frozenset({"int8", "uint8", "binary", "ubinary"})
"""Types that JSON writes as integers; the others are written as float32 with all digits, unless `rounded`."""

BITS: Final[frozenset[EmbedDType]] = frozenset({"binary", "ubinary"})
SCALED: Final[frozenset[EmbedDType]] = frozenset({"int8", "uint8"})

_BASE64_BYTES: Final = 3 * 2**16
"""Bytes that are encoded in one step, under the GIL; a multiple of 3, so that the parts join without padding."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of the arrays of one answer."""

    form: Form = "float"
    dtype: EmbedDType = "float32"
    endianness: Endianness = "native"
    rounded: bool = False
    """Round the numbers of JSON to float16 or bfloat16; with vLLM's `embed_dtype` they keep all digits."""

    @property
    def is_bytes(self) -> bool:
        """True if the answer is binary and not JSON."""
        return self.form in ("bytes", "bytes_only")

    def value(self, array: NDArray[Any]) -> NDArray[Any] | EncodedJson:
        """Return an array in a form that `dump` writes; in base64, several rows are one string.

        Args:
            array: [width] or [rows, width]. An integer array is written as int32, whatever the type.
        """
        if self.form == "base64":
            return _base64(self.raw(array))
        if array.dtype.kind in "iu" or self.dtype not in INTEGERS:
            values = _nearest(array, self.dtype) if self.rounded else array
            laid_out = np.ascontiguousarray(values, "<i4" if array.dtype.kind in "iu" else "<f4")
        else:
            laid_out = stored(array, self.dtype, "little")
        return laid_out if laid_out.size <= STEP_VALUES else dump_array(laid_out)

    def raw(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array whose memory holds the bytes to send."""
        if array.dtype.kind in "iu":
            return np.ascontiguousarray(array, _ordered("i4", self.endianness))
        return stored(array, self.dtype, self.endianness)

    def scale(self, array: NDArray[Any]) -> dict[str, Any]:
        """Return `{"scale": ...}` for int8 and uint8, an empty dictionary for other types.

        The value is s / 127 of a vector, or a list with that of each row.
        """
        if self.dtype not in SCALED:
            return {}
        return {"scale": (_scales(array)[..., 0].astype(np.float64) / 127).tolist()}


def check_bits(dtype: EmbedDType, width: int, field: str) -> None:
    """Reject a binary type for a width that does not fill whole bytes.

    Raises:
        InvalidInput: `width` is not a multiple of 8.
    """
    if dtype in BITS and width % 8:
        message = f"{field}: {dtype} packs eight values into a byte, but the vectors have {width}"
        raise InvalidInput(message, param=field)


def stored(array: Floats, dtype: EmbedDType, endianness: Endianness) -> NDArray[Any]:
    """Convert vectors to another type, each by itself.

    Args:
        array: [..., width].
        dtype: The type.
        endianness: Byte order of types of several bytes.

    Returns:
        [..., width]; for binary and ubinary [..., width / 8]. The bits of bfloat16 are in a uint16, those of fp8 in a
        uint8.

    Raises:
        InvalidInput: See `check_bits`.
    """
    match dtype:
        case "float32":
            return np.ascontiguousarray(array, _ordered("f4", endianness))
        case "float16":
            return _saturated(array, 65504.0).astype(_ordered("f2", endianness))
        case "bfloat16":
            return _rounded_bits(_saturated(array, 3.3895314e38), dropped=16).astype(_ordered("u2", endianness))
        case "fp8_e4m3":
            return _fp8(array, exponent_bits=4, mantissa_bits=3, largest=448.0)
        case "fp8_e5m2":
            return _fp8(array, exponent_bits=5, mantissa_bits=2, largest=57344.0)
        case "int8":
            return _quantized(array).astype(np.int8)
        case "uint8":
            return (_quantized(array) + np.float32(128)).astype(np.uint8)
        case "ubinary":
            return _packed(array, dtype)
        case "binary":
            return (_packed(array, dtype) ^ np.uint8(0x80)).view(np.int8)  # minus 128 in two's complement


def _ordered(kind: str, endianness: Endianness) -> np.dtype[Any]:
    return np.dtype({"native": "=", "big": ">", "little": "<"}[endianness] + kind)


def _saturated(array: Floats, largest: float) -> Floats:
    return np.clip(array, np.float32(-largest), np.float32(largest))


def _rounded_bits(array: Floats, *, dropped: int) -> NDArray[np.uint32]:
    """Drop the lowest `dropped` bits of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    rounded: NDArray[np.uint32] = (bits + half + ((bits >> np.uint32(dropped)) & np.uint32(1))) >> np.uint32(dropped)
    return rounded


def _nearest(array: Floats, dtype: EmbedDType) -> Floats:
    """Round values to float16 or bfloat16, as float32; other types keep the array."""
    if dtype == "float16":
        return stored(array, dtype, "native").astype(np.float32)
    if dtype == "bfloat16":
        return (stored(array, dtype, "native").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def _fp8(array: Floats, *, exponent_bits: int, mantissa_bits: int, largest: float) -> NDArray[np.uint8]:
    """Convert to 8-bit floats: a sign, an exponent and a mantissa."""
    bias = (1 << (exponent_bits - 1)) - 1
    magnitudes = np.minimum(np.abs(array), np.float32(largest))
    # The bias of float32 is 127: subtracting the difference of the biases gives the exponent of the small type.
    normal = _rounded_bits(magnitudes, dropped=23 - mantissa_bits).astype(np.int32) - ((127 - bias) << mantissa_bits)
    # Below the smallest exponent the values are evenly spaced; the highest of them is the first normal one.
    smallest = np.float32(2.0 ** (1 - bias))
    steps = np.rint(np.minimum(magnitudes, smallest) * np.float32(2.0 ** (bias - 1 + mantissa_bits))).astype(np.int32)
    codes = np.where(magnitudes < smallest, steps, normal)
    signs = np.signbit(array).astype(np.uint8) << np.uint8(7)
    result: NDArray[np.uint8] = codes.astype(np.uint8) | signs
    return result


def _scales(array: Floats) -> Floats:
    """Return the largest absolute value of each vector, [..., 1]; 1 for a vector of zeros."""
    largest = np.abs(array).max(axis=-1, keepdims=True, initial=0.0)
    return np.where(largest > 0, largest, 1).astype(np.float32)


def _quantized(array: Floats) -> Floats:
    rounded: Floats = np.rint(array / _scales(array) * np.float32(127))
    return rounded


def _packed(array: Floats, dtype: EmbedDType) -> NDArray[np.uint8]:
    check_bits(dtype, array.shape[-1], "embed_dtype")
    return np.packbits(array >= 0, axis=-1)


def _base64(raw: NDArray[Any]) -> EncodedJson:
    return EncodedJson((b'"', *with_pauses(_base64_parts(raw.reshape(-1).view(np.uint8).data)), b'"'))


def _base64_parts(raw: memoryview) -> Iterator[bytes]:
    for start in range(0, len(raw), _BASE64_BYTES):
        yield binascii.b2a_base64(raw[start : start + _BASE64_BYTES], newline=False)
