"""Messages between a front and the engine process, and their encoding."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from staged_pool.runtime.model import Lane
from staged_pool.stages import errors
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.wire import WireError

M = TypeVar("M", bound="Message")


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


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Head of a frame. Models are numbered in the order of the settings, requests by their front."""


class Hello(Message, frozen=True):
    """First message of a front."""

    version: str
    """Version of the package: both processes must run the same one."""


class ModelTerms(msgspec.Struct, frozen=True):
    """A model of the engine process, for fronts."""

    card: Mapping[str, Any]
    """A `ModelCard`, as plain values."""
    preparation: Mapping[str, Any]
    """Values that preprocess needs beside the model folder."""
    fed_limits: Mapping[str, int]
    """See `LaneLimits.fed_tokens`, by lane."""
    secret: bytes
    """Key of identities and scopes: equal inputs of two fronts must have equal identities."""


class Welcome(msgspec.Struct, frozen=True):
    """First message of the engine process."""

    version: str
    models: list[ModelTerms]


class Admit(Message, frozen=True):
    """Front: may this request enter?"""

    request: int
    model: int
    body_bytes: int
    left_s: float | None
    """Seconds until its deadline. None: it has none."""
    priority: Priority
    tenant: str | None
    images: int | None
    waits: bool
    """Its caller waits for room, and must not be rejected for overload."""


class Admitted(Message, frozen=True):
    """Engine: it has entered."""

    request: int


class Refused(Message, frozen=True):
    """Engine: it has not entered, for this reason."""

    request: int
    error: list[Any]


class Count(Message, frozen=True):
    """Front: its body is decoded, and has these inputs."""

    request: int
    inputs: dict[Lane, int]


class Items(Message, frozen=True):
    """Front: prepared items for the device. One credit of the lane stands for each message."""

    model: int
    lane: Lane
    preparing: int
    """Items of the lane that this front is preparing now."""
    call_s: float
    """Mean seconds of its recent preprocess calls."""
    block: int | None
    """Start of the arrays in the front's ring. None: they are in the frame."""
    block_bytes: int
    keys: list[tuple[int, int, int]]
    """Request, index of the input, and part of it, for each item."""
    tokens: list[int]
    batch_keys: list[bytes]
    identities: list[bytes | None]
    payloads: list[list[Any]]
    """See `arrays.pack_payload`."""


class Credit(Message, frozen=True):
    """Engine: messages of a lane have left the channel."""

    model: int
    lane: Lane
    count: int


class Rows(Message, frozen=True):
    """Engine: rows of the device."""

    model: int
    block: int | None
    """Start of the arrays in the ring of the engine process. None: they are in the frame."""
    block_bytes: int
    keys: list[tuple[int, int, int]]
    rows: list[list[Any]]
    """See `arrays.pack_row`."""
    queue_s: list[float]
    """Seconds that each item has waited for the device."""
    device_s: list[float]
    """Seconds that each item was on the device."""
    fed: dict[Lane, int]
    """Tokens that all fronts have fed, by lane."""


class Failed(Message, frozen=True):
    """Engine: a request has failed."""

    request: int
    index: int | None
    """Index of the input that has caused it. None: none has."""
    error: list[Any]


class Leave(Message, frozen=True):
    """Front: a request has left. Work on it that has not begun is dropped."""

    request: int
    answered: bool
    elsewhere_s: float
    rejected: bool


class Free(Message, frozen=True):
    """Blocks of the peer's ring that are read."""

    starts: list[int]


class State(Message, frozen=True):
    """Engine: state of a model."""

    model: int
    fault: str | None
    """Reason for taking no requests; None while it takes them."""
    fed: dict[Lane, int]


class Clear(Message, frozen=True):
    """Empty the caches of a model, in both directions: the peer passes it on."""

    model: int
    results: bool
    """True: cached rows, too. False: cached images alone."""


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
}

_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final = {int(kind): msgspec.msgpack.Decoder(head) for kind, head in HEADS.items()}
_kinds: Final = {head: int(kind) for kind, head in HEADS.items()}


def encoded(message: Message | Welcome) -> tuple[int, bytes]:
    """Return the kind and the head of a message."""
    return _kinds[type(message)], _encoder.encode(message)


def decoded(kind: int, head: bytes) -> Any:
    """Return the message of a frame.

    Raises:
        WireError: The kind is unknown, or the head is not one of its kind.
    """
    if (decoder := _decoders.get(kind)) is None:
        raise WireError(f"the peer sends a frame of the unknown kind {kind}")
    try:
        return decoder.decode(head)
    except msgspec.MsgspecError as error:
        raise WireError(f"the peer sends a {Kind(kind).name} frame that cannot be read: {error}") from error


def pack_error(error: StagedPoolError) -> list[Any]:
    """Return an error as plain values: its class, its arguments and its attributes."""
    cls = type(error)
    if getattr(errors, cls.__name__, None) is not cls:  # of a plugin: its class is not known everywhere
        return [StagedPoolError.__name__, [str(error)], {}]
    return [cls.__name__, list(error.args), dict(error.__dict__)]


def unpack_error(packed: list[Any]) -> StagedPoolError:
    """Return the error of `pack_error`.

    Raises:
        WireError: No error class has this name.
    """
    name, args, fields = packed
    cls = getattr(errors, name, None)
    if not (isinstance(cls, type) and issubclass(cls, StagedPoolError)):
        raise WireError(f"the peer sends an error of the unknown class {name}")
    error = cls.__new__(cls, *args)
    error.args = tuple(args)
    error.__dict__.update(fields)
    return error
