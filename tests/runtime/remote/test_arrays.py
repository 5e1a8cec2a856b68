"""Payloads, rows and errors cross a line unchanged; anything else is an error of the wire."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staged_pool.runtime.models.tokenizing.lone_images import ImageTokens
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, SparseVector, TokenSequence, Values
from staged_pool.runtime.remote.arrays import (
    Block,
    PackedImage,
    PackedPayload,
    PackedPixels,
    PackedRow,
    pack_key,
    pack_outputs,
    pack_payload,
    pack_row,
    unpack_outputs,
    unpack_payload,
    unpack_row,
)
from staged_pool.runtime.remote.limits import PayloadLimits, PixelLimits
from staged_pool.runtime.remote.packed_errors import PackedError, pack_error, unpack_error
from staged_pool.runtime.requests import Output
from staged_pool.runtime.spans import Span
from staged_pool.stages import errors
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.wire import Bytes, WireError

VOCABULARY, IMAGE_TOKEN = 1000, 5000
COUNTS = st.integers(0, 10**6)
OUTPUTS = st.frozensets(st.sampled_from(Output), min_size=1)
TEXTS = PayloadLimits(
    lane="text",
    outputs=frozenset(Output),
    max_tokens=40,
    token_ids=VOCABULARY,
    adapters=frozenset({None, "a", "b"}),
)
"""Limits of a lane of texts."""
LONE = replace(TEXTS, lane="image")
"""Limits of images, whatever their shape."""
PLANES = PixelLimits(layout="planes", size=None, edge=None, frames=1, merge=1, patches=None)
SEEING = replace(
    LONE,
    pixels=PLANES,
    layout=ImageLayout(image_token=IMAGE_TOKEN, merge=None, tokens=2, grid_positions=False),
)
"""Limits of images between texts."""


def arrays(*dtypes: Any) -> st.SearchStrategy[NDArray[Any]]:
    """Arrays of any shape and any bytes, also such as are no number."""

    def array(dtype: Any, shape: list[int], seed: int) -> NDArray[Any]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(random.Random(seed).randbytes(size), dtype).reshape(shape)

    shapes = st.lists(st.integers(0, 5), max_size=4)
    return st.builds(array, st.sampled_from(dtypes), shapes, st.integers(0, 1000))


def sizes(low: int = 1) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, 5), st.integers(low, 5))


def picture(size: tuple[int, int], dtype: Any) -> Pixels:
    return Pixels(np.full((3, *size), size[0] + size[1], dtype))


def own_form(values: NDArray[Any], grid: tuple[int, int] | None, outputs: frozenset[Output]) -> PreparedImage:
    return PreparedImage(Pixels(values, grid), outputs, min(values.size, 3))


pictures = st.builds(picture, sizes(), st.sampled_from([np.uint8, np.float32]))
images = st.builds(own_form, arrays(np.uint8, np.float32).filter(lambda each: each.size), st.none() | sizes(), OUTPUTS)


@st.composite
def sequences(draw: st.DrawFn, *, with_images: bool = False) -> TokenSequence:
    """A sequence that a preprocess stage may make."""
    seen = tuple(draw(st.lists(pictures, min_size=1, max_size=3))) if with_images else ()
    words = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
    ids = draw(st.permutations([*words, *[IMAGE_TOKEN] * 2 * len(seen)]))
    tokens, places = len(ids), st.integers(0, len(ids) - 1)
    ends = sorted(draw(st.sets(st.integers(1, tokens), max_size=4)) | {tokens})
    chunks = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    some = st.sets(places).map(lambda some: tuple(sorted(some)))
    kept, chunks_or_none = draw(st.sampled_from([(None, None), (None, chunks), (draw(some), None)]))
    return TokenSequence(
        list(ids),
        draw(OUTPUTS),
        draw(st.none() | places),
        draw(COUNTS),
        draw(places),
        kept,
        images=seen,
        chunks=chunks_or_none,
        adapter=draw(st.sampled_from([None, "a", "b"])),
    )


plain_sequences = st.builds(TokenSequence, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), OUTPUTS)
looked_up = plain_sequences.map(lambda each: replace(each, outputs=frozenset({Output.SPARSE}), looked_up=True))
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


LANES: list[tuple[PayloadLimits, st.SearchStrategy[Any]]] = [
    (TEXTS, sequences() | plain_sequences | looked_up),
    (LONE, images),
    (SEEING, sequences(with_images=True)),
]


@given(lane=st.sampled_from(LANES), data=st.data())
def test_every_payload_arrives_as_it_was_sent(lane: tuple[PayloadLimits, Any], data: st.DataObject) -> None:
    limits, payloads = lane[0], data.draw(st.lists(lane[1], max_size=4))
    parts: list[Bytes] = []
    packed = [pack_payload(payload, parts) for payload in payloads]
    block = Block(b"".join(parts))
    arrived = [unpack_payload(each, block, limits) for each in over_the_wire(packed, list[PackedPayload])]
    assert same(arrived, payloads)
    assert all(not each.pixels.values.flags.writeable for each in arrived if isinstance(each, PreparedImage))


def test_spans_stay_in_the_front() -> None:
    sequence = TokenSequence([1, 2], frozenset({Output.DENSE}), spans=(Span(0, 1, 0), Span(1, 2, 0)))
    parts: list[Bytes] = []
    packed = pack_payload(sequence, parts)
    assert same(unpack_payload(packed, Block(b"".join(parts)), TEXTS), replace(sequence, spans=None))


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


@given(lane=st.sampled_from(LANES), data=st.data(), cut=st.integers(1, 64))
def test_a_block_without_all_arrays_is_an_error(lane: tuple[PayloadLimits, Any], data: st.DataObject, cut: int) -> None:
    payload: Payload = data.draw(lane[1])
    parts: list[Bytes] = []
    packed = pack_payload(payload, parts)
    sent = b"".join(parts)
    assume(len(sent) >= cut + 8)
    with pytest.raises(WireError, match="has not sent"):
        unpack_payload(packed, Block(sent[: -cut - 8]), lane[0])  # the last 7 bytes may be padding


@pytest.mark.parametrize("shape", [[1 << 50, 1 << 50], [0, 1 << 53, 1 << 53], [0, 1 << 53, 1 << 53, 1 << 53]])
def test_no_shape_is_more_than_an_error(shape: list[int]) -> None:
    packed = over_the_wire(PackedImage(1, 1, PackedPixels("|u1", shape, None, 1, None)), PackedPayload)
    with pytest.raises(WireError):
        unpack_payload(packed, Block(b"12345678"), LONE)


@pytest.mark.parametrize(
    "plain",
    [
        [3, 1, 1],
        [0, -1, 1],
        [0, 1 << len(Output), 1],
        [0, 1, -1],
        [0, 1, "1"],
        [2, 1, 1, ["|O8", [1], None, 1, None]],
        [2, 1, 1, ["<f4", [-1, -4], None, 1, None]],
        [2, 1, 1, ["<f4", ["abc"], None, 1, None]],
        [2, 1, 1, ["<f4", [1] * 5, None, 1, None]],
        [2, 1, 1, ["<f4", [1], [1], 1, None]],
        [2, 1, 1, ["<f4", [1], None, 0, None]],
        [2, 1, 1, ["<f4", [1], None, 1, math.nan]],
        [1, 1, 1, None, 0, 0, None, []],
        [1, 1, 1, None, -1, 0, None, [], False, None, None],
        [],
        {},
    ],
)
def test_plain_values_of_another_shape_are_no_payload(plain: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(plain, PackedPayload)


# ---- beyond the limits of a model ----

SEQUENCE = TokenSequence([1, 2, 3], frozenset({Output.DENSE}))
WRONG_SEQUENCES = {
    "no token": replace(SEQUENCE, ids=[]),
    "too many tokens": replace(SEQUENCE, ids=[1] * 41),
    "an id behind the vocabulary": replace(SEQUENCE, ids=[1, VOCABULARY]),
    "an id below 0": replace(SEQUENCE, ids=[1, -1]),
    "an image token": replace(SEQUENCE, ids=[1, IMAGE_TOKEN]),
    "no output": replace(SEQUENCE, outputs=frozenset[Output]()),
    "a first segment behind the end": replace(SEQUENCE, first_tokens=4),
    "tokens that see nothing": replace(SEQUENCE, unseen_tokens=3),
    "a kept token behind the end": replace(SEQUENCE, kept=(0, 3)),
    "a kept token before the start": replace(SEQUENCE, kept=(-1, 2)),
    "kept tokens in no order": replace(SEQUENCE, kept=(2, 0)),
    "a token kept twice": replace(SEQUENCE, kept=(1, 1)),
    "more kept tokens than there are": replace(SEQUENCE, kept=(0, 1, 2, 3)),
    "chunks that sum to more": replace(SEQUENCE, chunks=(1, 3)),
    "chunks that sum to less": replace(SEQUENCE, chunks=(1, 1)),
    "a chunk below 0": replace(SEQUENCE, chunks=(4, -1)),
    "an empty chunk": replace(SEQUENCE, chunks=(3, 0)),
    "no chunk": replace(SEQUENCE, chunks=()),
    "chunks of kept tokens": replace(SEQUENCE, chunks=(2, 1), kept=(0, 1)),
    "chunks of 2^31 tokens": replace(SEQUENCE, chunks=(2**31 - 1, -(2**31) + 4)),
    "an unknown adapter": replace(SEQUENCE, adapter="c"),
    "a look-up of a vector": replace(SEQUENCE, looked_up=True),
    "an image": replace(SEQUENCE, images=(picture((1, 1), np.uint8),)),
}


def arrives(payload: Payload, limits: PayloadLimits) -> Payload:
    parts: list[Bytes] = []
    packed = over_the_wire(pack_payload(payload, parts), PackedPayload)
    return unpack_payload(packed, Block(b"".join(parts)), limits)


@pytest.mark.parametrize("wrong", WRONG_SEQUENCES.values(), ids=WRONG_SEQUENCES)
def test_a_sequence_beyond_the_limits_is_an_error(wrong: TokenSequence) -> None:
    with pytest.raises(WireError, match=r"wrong number: `[a-z_]+` "):
        arrives(wrong, TEXTS)


# ---- in memory that the peer writes to ----


def changing(memory: NDArray[np.uint8]) -> type[PayloadLimits]:
    """Return limits whose checks are followed by a change of every number in the memory."""

    class Changing(PayloadLimits):
        def check_ids(self, ids: NDArray[np.int32]) -> None:
            super().check_ids(ids)
            memory[:] = 255

    return Changing


@given(lane=st.sampled_from(LANES[::2]), data=st.data())
def test_a_number_of_a_payload_is_the_one_that_was_checked(
    lane: tuple[PayloadLimits, Any], data: st.DataObject
) -> None:
    limits, payload = lane[0], data.draw(lane[1])
    parts: list[Bytes] = []
    packed = over_the_wire(pack_payload(payload, parts), PackedPayload)
    memory = np.frombuffer(b"".join(parts), np.uint8).copy()
    found = unpack_payload(packed, Block(memory), limits)
    memory[:] = 255
    numbers = ("ids", "kept", "chunks")
    assert all(same(getattr(found, name), getattr(payload, name)) for name in numbers)

    memory = np.frombuffer(b"".join(parts), np.uint8).copy()
    fields = {name: getattr(limits, name) for name in type(limits).__slots__}
    try:
        found = unpack_payload(packed, Block(memory), changing(memory)(**fields))
    except WireError:
        return  # the lists behind the ids are wrong by then, and were checked after they were read
    assert same(found.ids, payload.ids)  # type: ignore[union-attr]


@given(values=sparse)
def test_an_index_of_a_row_is_the_one_that_was_checked(values: SparseVector) -> None:
    parts: list[Bytes] = []
    packed = over_the_wire(pack_row({Output.SPARSE: values}, parts), PackedRow)
    memory = np.frombuffer(b"".join(parts), np.uint8).copy()
    found = unpack_row(packed, Block(memory))[Output.SPARSE]
    memory[:] = 255
    assert isinstance(found, SparseVector)
    assert same(found.indices, values.indices)


def test_no_sequence_is_one_of_a_lane_of_images_and_the_reverse() -> None:
    image = PreparedImage(picture((2, 2), np.uint8), frozenset({Output.DENSE}), 1)
    arrives(image, LONE)
    for payload, limits in ((image, TEXTS), (image, SEEING), (SEQUENCE, LONE), (SEQUENCE, SEEING)):
        with pytest.raises(WireError, match="wrong number"):
            arrives(payload, limits)


def of_shape(*shape: int, grid: tuple[int, int] | None = None, steps: int = 1, step_s: float | None = None) -> Pixels:
    return Pixels(np.zeros(shape, np.uint8), grid, steps, step_s)


SIZED = replace(PLANES, size=(4, 6))
TILES = replace(PLANES, layout="tiles", edge=4)
PATCHES = replace(PLANES, layout="channels first", edge=2, frames=2, merge=2, patches=16)
RIGHT_PIXELS = [
    (PLANES, of_shape(3, 5, 7)),
    (SIZED, of_shape(3, 4, 6)),
    (TILES, of_shape(1, 3, 4, 4)),
    (TILES, of_shape(1, 3, 4, 4, grid=(1, 1))),
    (TILES, of_shape(7, 3, 4, 4, grid=(2, 3))),
    (PATCHES, of_shape(8, 12, grid=(2, 4))),
    (PATCHES, of_shape(16, 24, grid=(2, 4), steps=2, step_s=0.5)),
]
WRONG_PIXELS = [
    (PLANES, of_shape(3, 0, 7)),
    (PLANES, of_shape(1, 5, 7)),
    (PLANES, of_shape(3, 35)),
    (PLANES, of_shape(3, 5, 7, grid=(5, 7))),
    (PLANES, of_shape(3, 5, 7, steps=2)),
    (SIZED, of_shape(3, 6, 4)),
    (TILES, of_shape(2, 3, 4, 4)),
    (TILES, of_shape(6, 3, 4, 4, grid=(2, 3))),
    (TILES, of_shape(7, 3, 4, 5, grid=(2, 3))),
    (TILES, of_shape(1, 3, 4, 4, step_s=1.0)),
    (PATCHES, of_shape(8, 12)),
    (PATCHES, of_shape(8, 12, grid=(2, 3))),
    (PATCHES, of_shape(9, 12, grid=(3, 3))),
    (PATCHES, of_shape(8, 13, grid=(2, 4))),
    (PATCHES, of_shape(20, 12, grid=(2, 10))),
    (PATCHES, of_shape(8, 12, grid=(2, 4), steps=2)),
    (PATCHES, of_shape(8, 24, grid=(2, 4), steps=2, step_s=0.5)),
    (PATCHES, of_shape(16, 12, grid=(2, 4), steps=2, step_s=0.5)),
]


@pytest.mark.parametrize(("limits", "pixels"), RIGHT_PIXELS)
def test_pixels_of_a_model_arrive(limits: PixelLimits, pixels: Pixels) -> None:
    arrives(PreparedImage(pixels, frozenset({Output.DENSE}), 1), replace(LONE, pixels=limits))


@pytest.mark.parametrize(("limits", "pixels"), WRONG_PIXELS)
def test_pixels_of_another_shape_are_an_error(limits: PixelLimits, pixels: Pixels) -> None:
    with pytest.raises(WireError, match=r"wrong number: `(values|grid|steps|step_s)`"):
        arrives(PreparedImage(pixels, frozenset({Output.DENSE}), 1), replace(LONE, pixels=limits))


def test_the_tokens_of_an_image_are_those_of_its_pixels() -> None:
    lone = replace(LONE, lone=ImageTokens(patch=(2, 2), extra=1))
    arrives(PreparedImage(of_shape(3, 4, 6), frozenset({Output.DENSE}), 7), lone)
    for tokens in (0, 6, 8):
        with pytest.raises(WireError, match="`tokens`"):
            arrives(PreparedImage(of_shape(3, 4, 6), frozenset({Output.DENSE}), tokens), lone)
    with pytest.raises(WireError, match="does not have the tokens of its images"):
        arrives(replace(SEQUENCE, ids=[1, IMAGE_TOKEN], images=(of_shape(3, 4, 6),)), SEEING)


def test_payloads_that_may_not_share_a_batch_have_different_keys() -> None:
    wide, tall = (PreparedImage(of_shape(3, *size), frozenset({Output.DENSE}), 1) for size in ((2, 4), (4, 2)))
    sized = replace(LONE, pixels=PLANES)
    assert sized.batch_key(wide) != sized.batch_key(tall)
    assert LONE.batch_key(wide) == LONE.batch_key(tall)
    others = [replace(SEQUENCE, adapter="a"), replace(SEQUENCE, outputs=frozenset({Output.SPARSE}))]
    assert len({TEXTS.batch_key(each) for each in (SEQUENCE, *others)}) == 3


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
        (PackedError("Overloaded", "full", {"retry_after_s": "soon"}), "`error.retry_after_s` is a str in Overloaded"),
        (PackedError("ModelFailed", "NaN", {"index": 0.5}), "`error.index` is a float in ModelFailed"),
        (PackedError("StageFailed", "x", {"stage": None}), "`error.stage` is a NoneType in StageFailed"),
    ],
)
def test_an_error_that_cannot_be_made_is_an_error_of_the_wire(packed: PackedError, words: str) -> None:
    with pytest.raises(WireError, match=words):
        unpack_error(packed)
