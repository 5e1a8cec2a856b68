"""Messages between a front and the engine process, and their encoding."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from staged_pool.runtime.caching.fingerprints import IDENTITY_BYTES
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.models.preparation import Preparation
from staged_pool.runtime.remote.arrays import Amount, Packed, PackedPayload, PackedRow, Seconds
from staged_pool.runtime.remote.limits import require
from staged_pool.runtime.remote.packed_errors import PackedError
from staged_pool.runtime.statistics import EngineLoad
from staged_pool.stages.ring import ALIGNMENT
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.trace import TRACE_BYTES
from staged_pool.stages.wire import MOST_BYTES, FrameLimits, WireError

M = TypeVar("M", bound="Message")

MOST_HEAD_BYTES: Final = 8 << 20
"""Longest head of a frame, but the welcome, which has the tokenizers of all models.

A decoder makes some tens of times as many bytes of it. A longer one is not even held: see `limits_of`.
"""

ROUNDING: Final = 1e-6
"""Sums of differences may be below 0 by less than this."""

MOST_PARTS: Final = 1024
"""Most parts that preprocess cuts an input into."""

BlockName: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=0, multiple_of=ALIGNMENT)] | Annotated[bytes, msgspec.Meta(max_length=4096)]
)
"""Block of arrays: its start in a ring, or its name in a store."""
BlockBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""Size of a block of arrays."""
Key: TypeAlias = tuple[Amount, Amount, Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTS)]]
"""Request, index of the input, and part of it."""
Identity: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=IDENTITY_BYTES)]
"""Identity of an item within its scope, as `arrays.pack_key` packs it."""


class Kind(enum.IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    ADMIT = 3
    ADMITTED = 4
    REFUSED = 5
    COUNT = 6
    ITEMS = 7
    CREDIT = 8
    ROWS = 9
    FAILED = 10
    LEAVE = 11
    FREE = 12
    STATE = 13
    CLEAR = 14
    LEAVING = 15


class Message(Packed, frozen=True):
    """Head of a frame. Models are numbered in the order of the settings, requests by their front."""

    def check(self) -> None:
        """Check what its types do not say. Called once it is decoded.

        Raises:
            WireError: Its numbers do not fit each other.
        """


class Hello(Message, frozen=True):
    """First message of a front."""

    version: str
    """Version of the package: both processes must run the same one."""


class ModelTerms(msgspec.Struct, frozen=True):
    """A model of the engine process, for fronts."""

    card: ModelCard
    preparation: Preparation | None
    """Values that preprocess needs beside the model folder. None: the front has its own."""
    fed_limits: dict[Lane, int]
    """See `LaneLimits.fed_tokens`, by lane."""
    secret: bytes
    """Key of identities and scopes: equal inputs of two fronts must have equal identities."""


class Welcome(msgspec.Struct, frozen=True):
    """First message of the engine process."""

    version: str
    models: list[ModelTerms]

    def check(self) -> None:
        """See `Message.check`."""
        for terms in self.models:
            _check_amounts("models", (terms.card, terms.fed_limits))


class Admit(Message, frozen=True):
    """Front: may this request enter?"""

    request: Amount
    model: Amount
    body_bytes: Amount
    left_s: Seconds | None
    """Seconds until its deadline. None: it has none."""
    priority: Priority
    tenant: str | None
    images: Amount | None
    waits: bool
    """Its caller waits for room, and must not be rejected for overload."""


class Admitted(Message, frozen=True):
    """Engine: it has entered."""

    request: Amount


class Refused(Message, frozen=True):
    """Engine: it has not entered, for this reason."""

    request: Amount
    error: PackedError


class Count(Message, frozen=True):
    """Front: its body is decoded, and has these inputs."""

    request: Amount
    inputs: Annotated[dict[Lane, Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]], msgspec.Meta(min_length=1)]
    trace: Annotated[bytes, msgspec.Meta(min_length=TRACE_BYTES, max_length=TRACE_BYTES)] | None = None
    """Ids of its trace and its span. None: it is not traced."""


class Items(Message, frozen=True):
    """Front: prepared items for the device. One credit of the lane stands for each message."""

    model: Amount
    lane: Lane
    preparing: Amount
    """Items of the lane that this front is preparing now."""
    call_s: Seconds
    """Mean seconds of its recent preprocess calls."""
    block: BlockName | None
    """Arrays in the memory of the front. None: they are in the frame."""
    block_bytes: BlockBytes
    keys: list[Key]
    """The key of each item; further lists have the same length."""
    identities: list[Identity | None]
    payloads: list[PackedPayload]

    def check(self) -> None:
        _check_lengths(self.keys, self.identities, self.payloads)


class Credit(Message, frozen=True):
    """Engine: messages of a lane have left the channel."""

    model: Amount
    lane: Lane
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Rows(Message, frozen=True):
    """Engine: rows of the device."""

    model: Amount
    block: BlockName | None
    """Arrays in the memory of the engine process. None: they are in the frame."""
    block_bytes: BlockBytes
    keys: list[Key]
    """The key of each row; further lists have the same length."""
    rows: list[PackedRow]
    queue_s: list[Seconds]
    """Seconds that each item has waited for the device."""
    device_s: list[Seconds]
    """Seconds that each item was on the device."""
    fed: dict[Lane, Amount]
    """Tokens that all fronts have fed, by lane."""

    def check(self) -> None:
        _check_lengths(self.keys, self.rows, self.queue_s, self.device_s)


class Failed(Message, frozen=True):
    """Engine: a request has failed."""

    request: Amount
    index: Amount | None
    """Index of the input that has caused it. None: none has."""
    error: PackedError


class Leave(Message, frozen=True):
    """Front: a request has left. Work on it that has not begun is dropped."""

    request: Amount
    answered: bool
    elsewhere_s: Seconds
    rejected: bool


class Free(Message, frozen=True):
    """Blocks of the peer's memory that are read."""

    blocks: list[BlockName]


class State(Message, frozen=True):
    """Engine: state of a model."""

    model: Amount
    fault: str | None
    """Reason for taking no requests; None while it takes them."""
    stall: str | None
    """Reason if a forward runs far longer than predicted; else None."""
    fed: dict[Lane, Amount]
    load: EngineLoad
    """Load of all fronts together."""

    def check(self) -> None:
        _check_amounts("load", self.load)


class Clear(Message, frozen=True):
    """Empty the caches of a model, in both directions: the peer passes it on."""

    model: Amount
    results: bool
    """True: cached rows, too. False: cached images alone."""


class Leaving(Message, frozen=True):
    """Engine: it takes no more requests, finishes those it has, and ends."""


def _check_lengths(keys: Sized, *others: Sized) -> None:
    """Reject lists of which one has more or fewer values than the others.

    Raises:
        WireError: One has.
    """
    if any(len(other) != len(keys) for other in others):
        raise WireError(f"the peer sends {len(keys)} keys, and not as many of everything else")


def _check_amounts(name: str, value: object) -> None:
    """Reject plain values with a number that is no amount: negative, infinite or NaN.

    Args:
        name: Name of the value.
        value: Numbers, strings, dataclasses, mappings and tuples of them.

    Raises:
        WireError: It has one.
    """
    if isinstance(value, int | float):
        require(-ROUNDING < value < 1e18, name, f"is {value}")
    elif is_dataclass(value):
        for field in fields(value):
            _check_amounts(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_amounts(f"{name}.{key}", each)
    elif isinstance(value, tuple):
        for each in value:
            _check_amounts(name, each)


HEADS: Final[Mapping[Kind, type[Any]]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.ADMIT: Admit,
    Kind.ADMITTED: Admitted,
    Kind.REFUSED: Refused,
    Kind.COUNT: Count,
    Kind.ITEMS: Items,
    Kind.CREDIT: Credit,
    Kind.ROWS: Rows,
    Kind.FAILED: Failed,
    Kind.LEAVE: Leave,
    Kind.FREE: Free,
    Kind.STATE: State,
    Kind.CLEAR: Clear,
    Kind.LEAVING: Leaving,
}


_PLACE: Final = re.compile(r"\$\[(\d+)\]")
"""Place of a field of a message in the decoder's words."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final = {int(kind): msgspec.msgpack.Decoder(head) for kind, head in HEADS.items()}
_kinds: Final = {head: int(kind) for kind, head in HEADS.items()}


def encoded(message: Message | Welcome) -> tuple[int, bytes]:
    """Return the kind and the head of a message."""
    return _kinds[type(message)], _encoder.encode(message)


def limits_of(kind: int) -> FrameLimits:
    """Return the limits of the frames of a kind.

    Raises:
        WireError: The kind is unknown.
    """
    if kind not in _decoders:
        raise WireError(f"the peer sends a frame of the unknown kind {kind}")
    has_arrays = kind in (Kind.ITEMS, Kind.ROWS)
    return FrameLimits(MOST_BYTES if kind == Kind.WELCOME else MOST_HEAD_BYTES, MOST_BYTES if has_arrays else 0)


def decoded(kind: int, head: bytes) -> Any:
    """Return the message of a frame of a known kind.

    Raises:
        WireError: The head is not one of its kind. It names the field.
    """
    try:
        message: Message | Welcome = _decoders[kind].decode(head)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        words = _PLACE.sub(lambda found: HEADS[Kind(kind)].__struct_fields__[int(found[1])], str(error))
        raise WireError(f"the peer sends a {Kind(kind).name} frame that cannot be read: {words}") from error
    message.check()
    return message
