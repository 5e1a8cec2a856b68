"""How the numbers of an answer are written: as which type, in which order of bytes, as JSON, as base64 or as they are.

Types that cannot hold a float32 exactly:

- `float16`, `bfloat16`, `fp8_e4m3`, `fp8_e5m2`: the nearest value of the type, the even one of two; what is too large
  becomes its largest. The layouts are IEEE 754's, and those of Micikevicius et al., 2022, FP8 Formats for Deep
  Learning, section 3 (e4m3 has no infinity; its largest value is 448).
- `int8`: round(127 v / s), where s, the scale, is the largest absolute value of that one vector; -127 to 127. A vector
  is q s / 127 again, within s / 254. The cosine of two vectors needs no scale; a vector that had length 1 is q / |q|.
- `uint8`: the same plus 128: 1 to 255, with 128 for 0.
- `ubinary`: one bit a value, 1 where it is at least 0; eight to a byte, the first the highest. `binary`: the same less
  128, so that it fits int8.
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
DType: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]
Endianness: TypeAlias = Literal["native", "big", "little"]
Form: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]

INTEGERS: Final[frozenset[DType]] = frozenset({"int8", "uint8", "binary", "ubinary"})
"""Types whose values are written as whole numbers in JSON; the others are written as float32, all of its digits,
unless they are `rounded`."""

BITS: Final[frozenset[DType]] = frozenset({"binary", "ubinary"})
SCALED: Final[frozenset[DType]] = frozenset({"int8", "uint8"})

_BASE64_BYTES: Final = 3 * 2**16
"""Encoded at a time, with the interpreter's lock held. A multiple of 3, so that the parts join without padding."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one answer writes its arrays."""

    form: Form = "float"
    dtype: DType = "float32"
    endianness: Endianness = "native"
    rounded: bool = False
    """Whether numbers in JSON are the nearest that float16 and bfloat16 can hold. Beside vLLM's `embed_dtype` they
    have all digits."""

    @property
    def is_bytes(self) -> bool:
        """Whether the answer is no JSON at all."""
        return self.form in ("bytes", "bytes_only")

    def value(self, array: NDArray[Any]) -> NDArray[Any] | EncodedJson:
        """An array as `dump` can write it; in base64 an array of several rows is one string.

        Args:
            array: [width] or [rows, width]. One of whole numbers is written as int32, whatever the type.
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
        """An array of which the memory is what is to be sent."""
        if array.dtype.kind in "iu":
            return np.ascontiguousarray(array, _ordered("i4", self.endianness))
        return stored(array, self.dtype, self.endianness)

    def scale(self, array: NDArray[Any]) -> dict[str, Any]:
        """What a client needs to undo int8 and uint8: an entry `scale`, the s / 127 of a vector, or a list of those of
        the rows of a matrix; else nothing."""
        if self.dtype not in SCALED:
            return {}
        return {"scale": (_scales(array)[..., 0].astype(np.float64) / 127).tolist()}


def check_bits(dtype: DType, width: int, field: str) -> None:
    """Refuse to pack vectors whose values do not fill whole bytes.

    Raises:
        InvalidInput: Says so.
    """
    if dtype in BITS and width % 8:
        message = f"{field}: {dtype} packs eight values to a byte, and the vectors have {width}"
        raise InvalidInput(message, param=field)


def stored(array: Floats, dtype: DType, endianness: Endianness) -> NDArray[Any]:
    """Vectors in another type, each by itself.

    Args:
        array: [..., width].
        dtype: Which type.
        endianness: Order of the bytes of types that have several.

    Returns:
        [..., width]; for binary and ubinary [..., width / 8]. bfloat16 as the uint16, and fp8 as the uint8, that has
        its bits.

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
            return (_packed(array, dtype) ^ np.uint8(0x80)).view(np.int8)  # less 128, in two's complement


def _ordered(kind: str, endianness: Endianness) -> np.dtype[Any]:
    return np.dtype({"native": "=", "big": ">", "little": "<"}[endianness] + kind)


def _saturated(array: Floats, largest: float) -> Floats:
    return np.clip(array, np.float32(-largest), np.float32(largest))


def _rounded_bits(array: Floats, *, dropped: int) -> NDArray[np.uint32]:
    """The bits of float32 values without the lowest `dropped`, rounded to the nearest, of two to the even one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    rounded: NDArray[np.uint32] = (bits + half + ((bits >> np.uint32(dropped)) & np.uint32(1))) >> np.uint32(dropped)
    return rounded


def _nearest(array: Floats, dtype: DType) -> Floats:
    """The values of float16 or bfloat16 that are nearest, as float32; of other types, the array."""
    if dtype == "float16":
        return stored(array, dtype, "native").astype(np.float32)
    if dtype == "bfloat16":
        return (stored(array, dtype, "native").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def _fp8(array: Floats, *, exponent_bits: int, mantissa_bits: int, largest: float) -> NDArray[np.uint8]:
    """Floats of eight bits: a sign, an exponent and a mantissa."""
    bias = (1 << (exponent_bits - 1)) - 1
    magnitudes = np.minimum(np.abs(array), np.float32(largest))
    # In float32 the bias is 127: what is left of its bits is the same number, with another exponent.
    normal = _rounded_bits(magnitudes, dropped=23 - mantissa_bits).astype(np.int32) - ((127 - bias) << mantissa_bits)
    # Below the smallest exponent the values are even steps; the highest of them is the first of the normal ones.
    smallest = np.float32(2.0 ** (1 - bias))
    steps = np.rint(np.minimum(magnitudes, smallest) * np.float32(2.0 ** (bias - 1 + mantissa_bits))).astype(np.int32)
    codes = np.where(magnitudes < smallest, steps, normal)
    signs = np.signbit(array).astype(np.uint8) << np.uint8(7)
    result: NDArray[np.uint8] = codes.astype(np.uint8) | signs
    return result


def _scales(array: Floats) -> Floats:
    """[..., 1]: the largest absolute value of each vector; 1 for a vector of zeros, which any scale gives back."""
    largest = np.abs(array).max(axis=-1, keepdims=True, initial=0.0)
    return np.where(largest > 0, largest, 1).astype(np.float32)


def _quantized(array: Floats) -> Floats:
    rounded: Floats = np.rint(array / _scales(array) * np.float32(127))
    return rounded


def _packed(array: Floats, dtype: DType) -> NDArray[np.uint8]:
    check_bits(dtype, array.shape[-1], "embed_dtype")
    return np.packbits(array >= 0, axis=-1)


def _base64(raw: NDArray[Any]) -> EncodedJson:
    return EncodedJson((b'"', *with_pauses(_base64_parts(raw.reshape(-1).view(np.uint8).data)), b'"'))


def _base64_parts(raw: memoryview) -> Iterator[bytes]:
    for start in range(0, len(raw), _BASE64_BYTES):
        yield binascii.b2a_base64(raw[start : start + _BASE64_BYTES], newline=False)
