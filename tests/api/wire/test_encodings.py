"""Every number type of an answer, read back within the step of its type."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray

from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.encodings import BITS, EmbedDType, Encoding, Endianness, stored
from staged_pool.stages.errors import InvalidInput

BYTE_ORDERS: dict[Endianness, str] = {"native": "=", "big": ">", "little": "<"}
STEPS: dict[EmbedDType, tuple[float, float]] = {
    "float32": (0.0, 0.0),
    "float16": (2**-11, 2**-25),
    "bfloat16": (2**-8, 2**-133),
    "fp8_e4m3": (2**-4, 2**-10),
    "fp8_e5m2": (2**-3, 2**-17),
}
"""Largest error of a value: relative, or absolute below the normal values."""

VECTORS = st_numpy.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 4).map(lambda eighths: 8 * eighths)),
    elements=st.floats(-400, 400, width=32),
)
ORDERS = st.sampled_from(sorted(BYTE_ORDERS))


def decoded(raw: bytes, dtype: EmbedDType, endianness: Endianness) -> NDArray[Any]:
    """Decode the bytes of one vector without our code."""
    order = BYTE_ORDERS[endianness]
    match dtype:
        case "float32" | "float16":
            return np.frombuffer(raw, np.dtype(f"{order}f{4 if dtype == 'float32' else 2}")).astype(np.float32)
        case "bfloat16":
            halves = np.frombuffer(raw, np.dtype(f"{order}u2")).astype(np.uint32)
            return (halves << 16).view(np.float32)
        case "fp8_e4m3" | "fp8_e5m2":
            kind = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
            numbers: NDArray[Any] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).float().numpy()
            return numbers
        case "int8":
            return np.frombuffer(raw, np.int8).astype(np.float32)
        case "uint8":
            return np.frombuffer(raw, np.uint8).astype(np.float32) - 128
        case "ubinary":
            return np.unpackbits(np.frombuffer(raw, np.uint8)).astype(np.float32)
        case "binary":
            signed = np.frombuffer(raw, np.int8).astype(np.int16) + 128
            return np.unpackbits(signed.astype(np.uint8)).astype(np.float32)


@pytest.mark.parametrize("dtype", STEPS)
@given(VECTORS, ORDERS)
def test_a_vector_comes_back_within_the_step_of_the_type(
    dtype: EmbedDType, vectors: NDArray[np.float32], endianness: Endianness
) -> None:
    relative, absolute = STEPS[dtype]
    for vector in vectors:
        text = json.loads(dump(Encoding("base64", dtype, endianness).value(vector)))
        got = decoded(base64.b64decode(text), dtype, endianness).astype(np.float64)
        wanted = vector.astype(np.float64)
        assert (np.abs(got - wanted) <= np.maximum(np.abs(wanted) * relative, absolute)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(VECTORS)
def test_rounded_numbers_are_those_that_the_type_holds(dtype: EmbedDType, vectors: NDArray[np.float32]) -> None:
    numbers = np.array(json.loads(dump(Encoding("float", dtype, rounded=True).value(vectors))), np.float32)
    np.testing.assert_array_equal(decoded(stored(vectors, dtype, "native").tobytes(), dtype, "native"), numbers.ravel())


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@given(VECTORS)
def test_eight_bits_come_back_within_half_a_step_of_the_vectors_scale(
    dtype: EmbedDType, vectors: NDArray[np.float32]
) -> None:
    encoding = Encoding("base64", dtype)
    for vector in vectors:
        text = json.loads(dump(encoding.value(vector)))
        step = encoding.scale(vector)["scale"]
        got = decoded(base64.b64decode(text), dtype, "native").astype(np.float64) * step
        assert np.abs(got - vector).max() <= step * (0.5 + 1e-4)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@given(VECTORS)
def test_each_row_of_a_matrix_has_a_scale_of_its_own(dtype: EmbedDType, vectors: NDArray[np.float32]) -> None:
    encoding = Encoding("float", dtype)
    scales = encoding.scale(vectors)["scale"]
    assert scales == [encoding.scale(vector)["scale"] for vector in vectors]
    numbers = np.array(json.loads(dump(encoding.value(vectors))), np.float64) - (128 if dtype == "uint8" else 0)
    steps = np.array(scales)[:, None]
    assert (np.abs(numbers * steps - vectors) <= steps * (0.5 + 1e-4)).all()


@given(VECTORS)
def test_bits_say_which_values_are_not_negative(vectors: NDArray[np.float32]) -> None:
    for vector in vectors:
        for dtype in BITS:
            raw = Encoding("bytes", dtype).raw(vector).tobytes()
            np.testing.assert_array_equal(decoded(raw, dtype, "native"), vector >= 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@given(st_numpy.arrays(np.float32, 64, elements=st.floats(-440, 440, width=32)))
def test_floats_are_rounded_as_torch_rounds_them(dtype: EmbedDType, vector: NDArray[np.float32]) -> None:
    kind = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }[dtype]
    wanted = torch.from_numpy(vector).to(kind).float().numpy()
    np.testing.assert_array_equal(decoded(stored(vector, dtype, "native").tobytes(), dtype, "native"), wanted)


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504), ("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_what_is_too_large_becomes_the_largest(dtype: EmbedDType, largest: float) -> None:
    huge = np.array([1e30, -1e30], np.float32)
    got = decoded(stored(huge, dtype, "native").tobytes(), dtype, "native")
    np.testing.assert_array_equal(got, [largest, -largest])


@pytest.mark.parametrize("dtype", get_args(EmbedDType))
def test_json_has_whole_numbers_for_the_types_that_are(dtype: EmbedDType) -> None:
    vector = np.array([0.5, -1, 0, 0.25, 1, 1, -0.125, 1], np.float32)
    got = json.loads(dump(Encoding("float", dtype).value(vector)))
    wanted: dict[str, list[Any]] = {
        "int8": [64, -127, 0, 32, 127, 127, -16, 127],
        "uint8": [192, 1, 128, 160, 255, 255, 112, 255],
        "ubinary": [0b10111101],
        "binary": [0b10111101 - 128],
    }
    assert got == wanted.get(dtype, vector.tolist())


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_values_that_do_not_fill_bytes_are_not_packed(dtype: EmbedDType) -> None:
    with pytest.raises(InvalidInput, match=f"{dtype} packs eight values into a byte, but the vectors have 12"):
        stored(np.zeros(12, np.float32), dtype, "native")


def test_native_is_the_order_of_this_machine() -> None:
    vector = np.array([1.0], np.float32)
    named: Endianness = "little" if sys.byteorder == "little" else "big"
    assert stored(vector, "float32", "native").tobytes() == stored(vector, "float32", named).tobytes()


def test_a_large_matrix_is_the_same_json_in_pieces() -> None:
    matrix = np.random.default_rng(0).standard_normal((900, 64)).astype(np.float32)
    np.testing.assert_array_equal(np.array(json.loads(dump(Encoding().value(matrix))), np.float32), matrix)


@pytest.mark.parametrize("values", [1, 49_151, 49_152, 49_153, 200_000])
def test_base64_in_parts_is_base64(values: int) -> None:
    array = np.random.default_rng(0).standard_normal(values, np.float32)
    text = json.loads(dump(Encoding("base64", endianness="little").value(array)))
    assert base64.b64decode(text, validate=True) == array.astype("<f4").tobytes()
