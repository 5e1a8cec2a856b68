"""Frames with one wrong number each: every field of every message, and what a broken or hostile peer may put there."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import msgspec.inspect as types
import numpy as np

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import (
    PackedIds,
    PackedImage,
    PackedPixels,
    PackedSequence,
    pack_row,
)
from staged_pool.runtime.remote.messages import HEADS, Kind, Message, Welcome
from staged_pool.runtime.remote.packed_errors import pack_error
from staged_pool.runtime.requests import Output
from staged_pool.runtime.statistics import EngineLoad, LaneLoad
from staged_pool.runtime.version import VERSION
from staged_pool.stages.errors import InvalidInput, Overloaded
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.wire import Bytes, frame
from tests.servers.fronts import terms_of
from tests.support.model import LetterModel, expected

HOSTILE: Final[tuple[Any, ...]] = (
    -(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1, 0.0, -0.5, 1e-300, 1e308,
    math.nan, math.inf, -math.inf, True, None, "", "x", b"", b"x" * 28, [], {}, [-1], [2**62] * 4, [[[]]], {"text": -1},
)  # fmt: skip
"""Values that take the place of each value of a message."""

LOAD = EngineLoad(
    requests=1, running=1, requests_per_second=1.0, fullness=0.5, lanes={"text": LaneLoad(drain_s=0.1, utilization=0.5)}
)
PIXELS = PackedPixels("|u1", [2], (1, 1), 1, 1.0)
ARRAYS: Final = np.array([97, 98, 97, 98, 0, 1, 1, 1], "<i4").tobytes() + bytes(16)
"""Arrays of the items: ids, ids, kept places and chunks, and pixels."""

_ROW_PARTS: list[Bytes] = []
_ROW = pack_row(
    {Output.DENSE: expected("ab"), Output.SPARSE: SparseVector(np.array([1], np.int32), np.ones(1, np.float32))},
    _ROW_PARTS,
)
ROW_ARRAYS: Final = b"".join(map(bytes, _ROW_PARTS))


def items(*payloads: Any, block: messages.BlockName | None = None) -> messages.Items:
    """Return a list of items of request 1, whose arrays are `ARRAYS`."""
    keys = [(1, place, 0) for place in range(len(payloads))]
    identities: list[bytes | None] = [bytes([place]) * 16 for place in range(len(payloads))]
    return messages.Items(0, "text", 1, 0.5, block, len(ARRAYS), keys, identities, list(payloads))


SEQUENCE = PackedSequence(1, 2, 1, 1, 1, 2, [PIXELS], True, 2, "a")
TO_ENGINE: Final[list[Message]] = [
    messages.Hello(VERSION),
    messages.Admit(2, 0, 10, 5.0, Priority.BULK, "tenant", 1, True),
    messages.Count(2, {"text": 1}, bytes(24)),
    items(PackedIds(1, 2), SEQUENCE),
    items(PackedIds(1, 2), PackedSequence(1, 2, 1, 1, 0, 2, [], False, None, None)),
    items(PackedIds(1, 2), PackedImage(1, 2, PIXELS), block=0),
    items(PackedIds(1, 2), block=b"name"),
    messages.Leave(1, True, 0.5, False),
    messages.Free([0, b"name"]),
    messages.Clear(0, True),
]
"""Messages of a front. Together they have a value for each field."""

TO_FRONT: Final[list[Message | Welcome]] = [
    Welcome(VERSION, [terms_of(LetterModel(), EngineConfig())]),
    messages.Admitted(1),
    messages.Refused(1, pack_error(Overloaded("full", retry_after_s=1.5))),
    messages.Credit(0, "text", 1),
    messages.Rows(0, None, len(ROW_ARRAYS), [(1, 0, 0)], [_ROW], [0.5], [0.5], {"text": 1}),
    messages.Rows(0, 0, 16, [(1, 0, 0)], [_ROW[:1]], [0.5], [0.5], {"text": 1}),
    messages.Failed(1, 0, pack_error(InvalidInput("wrong", param="input", index=0))),
    messages.Free([0, b"name"]),
    messages.State(0, "a fault", "a stall", {"text": 1}, LOAD),
    messages.Clear(0, True),
    messages.Leaving(),
]
"""Messages of the engine process. Together they have a value for each field."""

DECODED_ONLY: Final = {"preparation"}
"""Fields without a value here: they are read when a model is opened, as the folder's own settings are."""


def structs() -> dict[type[msgspec.Struct], set[str]]:
    """Return each struct that a head may have, with its fields."""
    found: dict[type[msgspec.Struct], set[str]] = {}
    left = list(types.multi_type_info(HEADS.values()))
    while left:
        kind = left.pop()
        match kind:
            case types.StructType() if kind.cls not in found:
                found[kind.cls] = {field.name for field in kind.fields}
                left += [field.type for field in kind.fields]
            case types.UnionType():
                left += kind.types
            case types.ListType() | types.VarTupleType():
                left.append(kind.item_type)
            case types.TupleType():
                left += kind.item_types
            case types.DictType():
                left.append(kind.value_type)
            case _:
                pass
    return found


def sampled(value: object, into: dict[type[msgspec.Struct], set[str]]) -> None:
    """Note the fields of all structs in a value that hold something."""
    if isinstance(value, msgspec.Struct):
        known = into.setdefault(type(value), set())
        for name in value.__struct_fields__:
            each = getattr(value, name)
            if each is not None and each != []:
                known.add(name)
            sampled(each, into)
    elif isinstance(value, list | tuple):
        for each in value:
            sampled(each, into)


def kind_of(message: Message | Welcome) -> Kind:
    return next(kind for kind, head in HEADS.items() if head is type(message))


def raw_of(message: Message | Welcome) -> bytes:
    """Return the arrays that go in the frame of a message."""
    if getattr(message, "block", b"") is not None:
        return b""
    return ARRAYS if isinstance(message, messages.Items) else ROW_ARRAYS


def corrupted(message: Message | Welcome) -> Iterator[tuple[str, Any, bytes]]:
    """Yield a frame for each place of a message and each hostile value: the place, the value, and the bytes."""
    plain, kind, raw = _plain(message), kind_of(message), raw_of(message)
    for place in _places(plain):
        own = _at(plain, place)
        near = [own - 1, own + 1, own * 2] if type(own) in (int, float) else []
        if isinstance(own, list) and own:
            near = [own[:-1], own * 2, [own]]
        for value in (*HOSTILE, *near):
            if type(value) is type(own) and value == own:
                continue
            try:
                head = msgspec.msgpack.encode(_with(plain, place, value))
            except OverflowError:
                continue
            yield f"{kind.name} {list(place)}", value, b"".join(map(bytes, frame(kind, head, raw)))


def _plain(message: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (key,)
        yield from ((key, *rest) for rest in _places(each))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _with(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a value with another one at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[place[0]] = _with(copy[place[0]], place[1:], new)
    return copy


def plain_frame(message: Message | Welcome, raw: bytes = b"") -> bytes:
    """Return the bytes of a message and its arrays."""
    return b"".join(map(bytes, frame(*messages.encoded(message), raw)))


def corrupted_once(rng: random.Random, message: Message | Welcome, raw: bytes) -> bytes:
    """Return a frame with one wrong value, or one wrong byte."""
    plain, right = _plain(message), plain_frame(message, raw)
    places = [*_places(plain)]
    if not places or rng.random() < 0.3:
        wrong = bytearray(right)
        wrong[rng.randrange(len(wrong))] = rng.randrange(256)
        return bytes(wrong)
    head = msgspec.msgpack.encode(_with(plain, rng.choice(places), rng.choice(HOSTILE)))
    return b"".join(map(bytes, frame(kind_of(message), head, raw)))
