"""Payloads, rows and errors cross a line unchanged; anything else is an error of the wire."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, SparseVector, TokenSequence, Values
from staged_pool.runtime.remote.arrays import (
    Block,
    PackedArray,
    PackedImage,
    PackedPayload,
    PackedRow,
    pack_key,
    pack_outputs,
    pack_payload,
    pack_row,
    unpack_outputs,
    unpack_payload,
    unpack_row,
)
from staged_pool.runtime.remote.messages import PackedError, pack_error, unpack_error
from staged_pool.runtime.requests import Output
from staged_pool.runtime.spans import Span
from staged_pool.stages import errors
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.wire import Bytes, WireError

IDS = st.integers(-(2**31), 2**31 - 1)
COUNTS = st.integers(0, 10**6)
OUTPUTS = st.frozensets(st.sampled_from(Output))
GRIDS = st.none() | st.tuples(st.integers(0, 100), st.integers(0, 100))


def arrays(*dtypes: Any) -> st.SearchStrategy[NDArray[Any]]:
    """Arrays of any shape and any bytes, also such as are no number."""

    def array(dtype: Any, shape: list[int], seed: int) -> NDArray[Any]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(random.Random(seed).randbytes(size), dtype).reshape(shape)

    shapes = st.lists(st.integers(0, 5), max_size=4)
    return st.builds(array, st.sampled_from(dtypes), shapes, st.integers(0, 1000))


pixels = st.builds(Pixels, arrays(np.uint8, np.float32), GRIDS)
images = st.builds(PreparedImage, pixels, OUTPUTS, COUNTS)
sequences = st.builds(
    TokenSequence,
    st.lists(IDS, max_size=40),
    OUTPUTS,
    st.none() | COUNTS,
    COUNTS,
    COUNTS,
    st.none() | st.lists(COUNTS, max_size=5).map(tuple),
    st.none() | st.lists(st.builds(Span, COUNTS, COUNTS, st.none() | COUNTS), max_size=5).map(tuple),
    st.lists(pixels, max_size=3).map(tuple),
    st.booleans(),
)
plain_sequences = st.builds(TokenSequence, st.lists(IDS, max_size=40), OUTPUTS)
sparse = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 9, width=32)), max_size=9).map(
    lambda pairs: SparseVector(
        np.array([index for index, _ in pairs], np.int32), np.array([weight for _, weight in pairs], np.float32)
    )
)
rows = st.dictionaries(st.sampled_from(Output), arrays(np.float32) | sparse, max_size=4)


def same(left: Any, right: Any) -> bool:
    """Compare values that hold arrays: their types, shapes and bytes."""
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, Pixels | PreparedImage | TokenSequence | SparseVector | Span):
        names = type(left).__slots__
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return isinstance(right, type(left)) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def over_the_wire(packed: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=kind)


@given(payloads=st.lists(images | sequences | plain_sequences, max_size=4))
def test_every_payload_arrives_as_it_was_sent(payloads: list[Payload]) -> None:
    parts: list[Bytes] = []
    packed = [pack_payload(payload, parts) for payload in payloads]
    block = Block(b"".join(parts))
    arrived = [unpack_payload(each, block) for each in over_the_wire(packed, list[PackedPayload])]
    assert same(arrived, payloads)
    assert all(not each.pixels.values.flags.writeable for each in arrived if isinstance(each, PreparedImage))


@given(given_rows=st.lists(rows, max_size=4))
def test_every_row_arrives_as_it_was_sent(given_rows: list[dict[Output, Values]]) -> None:
    parts: list[Bytes] = []
    packed = [pack_row(row, parts) for row in given_rows]
    block = Block(b"".join(parts))
    assert same([unpack_row(each, block) for each in over_the_wire(packed, list[PackedRow])], given_rows)


def test_arrays_that_do_not_lie_in_one_piece_arrive_as_they_are() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    parts: list[Bytes] = []
    packed = pack_row({Output.DENSE: values}, parts)
    assert same(unpack_row(packed, Block(b"".join(parts)))[Output.DENSE], np.array(values))


@given(payload=images | sequences, cut=st.integers(1, 64))
def test_a_block_without_all_arrays_is_an_error(payload: Payload, cut: int) -> None:
    parts: list[Bytes] = []
    packed = pack_payload(payload, parts)
    data = b"".join(parts)
    assume(len(data) >= cut + 8)
    with pytest.raises(WireError, match="has not sent"):
        unpack_payload(packed, Block(data[: -cut - 8]))  # the last 7 bytes may be padding


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), (0, *(1,) * 70), (0, 1 << 62, 1 << 62)])
def test_no_shape_is_more_than_an_error(shape: tuple[int, ...]) -> None:
    packed = PackedImage(1, 1, over_the_wire([PackedArray("|u1", shape), None, 1, None], Any))
    packed = over_the_wire(packed, PackedPayload)
    with pytest.raises(WireError):
        unpack_payload(packed, Block(b"12345678"))


@pytest.mark.parametrize(
    "plain",
    [
        [3, 1, 1],
        [0, -1, 1],
        [0, 1 << len(Output), 1],
        [0, 1, -1],
        [0, 1, "1"],
        [2, 1, 1, [["|O8", [1]], None]],
        [2, 1, 1, [["<f4", [-1, -4]], None]],
        [2, 1, 1, [["<f4", ["abc"]], None]],
        [2, 1, 1, [["<f4", [1]], [1]]],
        [1, 1, 1, None, 0, 0, None, [[0, 1]], []],
        [],
        {},
    ],
)
def test_plain_values_of_another_shape_are_no_payload(plain: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(plain, PackedPayload)


@given(outputs=OUTPUTS)
def test_equal_outputs_are_one_object(outputs: frozenset[Output]) -> None:
    assert unpack_outputs(pack_outputs(outputs)) == outputs
    assert unpack_outputs(pack_outputs(outputs)) is unpack_outputs(pack_outputs(frozenset(list(outputs))))


keys = st.recursive(
    st.none() | st.booleans() | st.integers(2, 10**6) | st.text(max_size=4) | st.binary(max_size=4) | OUTPUTS,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(left=st.tuples(keys, keys), right=st.tuples(keys, keys))
def test_keys_are_equal_as_bytes_if_and_only_if_they_are_equal(left: Any, right: Any) -> None:
    def typed(key: Any) -> Any:
        """Tell a set of outputs from a number: a place in a key has one or the other."""
        return [typed(each) for each in key] if isinstance(key, tuple) else type(key)

    if typed(left) == typed(right):
        assert (pack_key(left) == pack_key(right)) == (left == right)


ERRORS = sorted(
    (each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, StagedPoolError)),
    key=lambda each: each.__name__,
)


def made(kind: type[StagedPoolError]) -> StagedPoolError:
    fields: dict[str, Any] = {"stage": "batch", "retry_after_s": 2.5, "index": 3, "param": "input"}
    fields |= {"plugin": "p", "hook": "h"}
    names = inspect.signature(kind.__init__).parameters
    return kind("the `$dimensions` are wrong", **{name: value for name, value in fields.items() if name in names})


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_arrives_as_it_was_sent(kind: type[StagedPoolError]) -> None:
    error = made(kind)
    arrived = unpack_error(over_the_wire(pack_error(error), PackedError))
    assert type(arrived) is kind
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


def test_an_error_of_a_plugin_arrives_as_the_one_that_it_is_derived_from() -> None:
    class TooPurple(InvalidInput):
        """Known to one process alone."""

    arrived = unpack_error(pack_error(TooPurple("it is too purple", param="input", index=1)))
    assert type(arrived) is InvalidInput
    assert (str(arrived), arrived.param, arrived.index) == ("it is too purple", "input", 1)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (PackedError("SystemExit", "1", {}), "unknown class SystemExit"),
        (PackedError("Final", "1", {}), "unknown class Final"),
        (PackedError("Overloaded", "full", {}), r"Overloaded with the arguments \[\]"),
        (PackedError("Unsupported", "x", {"args": 1}), r"Unsupported with the arguments \['args'\]"),
    ],
)
def test_an_error_that_cannot_be_made_is_an_error_of_the_wire(packed: PackedError, words: str) -> None:
    with pytest.raises(WireError, match=words):
        unpack_error(packed)
