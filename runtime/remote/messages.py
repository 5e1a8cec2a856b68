"""Messages between a front and the engine process, and their encoding."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.models.preparation import Preparation
from staged_pool.runtime.remote.arrays import Amount, Packed, PackedPayload, PackedRow
from staged_pool.runtime.statistics import EngineLoad
from staged_pool.stages import errors
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.trace import TRACE_BYTES
from staged_pool.stages.wire import WireError

M = TypeVar("M", bound="Message")

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
BlockName: TypeAlias = int | bytes
"""Block of arrays: its start in a ring, or its name in a store."""
Key: TypeAlias = tuple[Amount, Amount, Amount]
"""Request, index of the input, and part of it."""


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


class PackedError(Packed, frozen=True):
    """An error as plain values."""

    name: str
    """Its class in `stages/errors.py`."""
    message: str
    fields: dict[str, Any]
    """Its further arguments, by name."""


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


class Admit(Message, frozen=True):
    """Front: may this request enter?"""

    request: int
    model: int
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

    request: int


class Refused(Message, frozen=True):
    """Engine: it has not entered, for this reason."""

    request: int
    error: PackedError


class Count(Message, frozen=True):
    """Front: its body is decoded, and has these inputs."""

    request: int
    inputs: Annotated[dict[Lane, Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(min_length=1)]
    trace: Annotated[bytes, msgspec.Meta(min_length=TRACE_BYTES, max_length=TRACE_BYTES)] | None = None
    """Ids of its trace and its span. None: it is not traced."""


class Items(Message, frozen=True):
    """Front: prepared items for the device. One credit of the lane stands for each message."""

    model: int
    lane: Lane
    preparing: Amount
    """Items of the lane that this front is preparing now."""
    call_s: Seconds
    """Mean seconds of its recent preprocess calls."""
    block: BlockName | None
    """Arrays in the memory of the front. None: they are in the frame."""
    block_bytes: int
    keys: list[Key]
    """The key of each item; further lists have the same length."""
    tokens: list[Amount]
    batch_keys: list[bytes]
    identities: list[bytes | None]
    payloads: list[PackedPayload]

    def __post_init__(self) -> None:
        _check_lengths(self.keys, self.tokens, self.batch_keys, self.identities, self.payloads)


class Credit(Message, frozen=True):
    """Engine: messages of a lane have left the channel."""

    model: int
    lane: Lane
    count: Amount


class Rows(Message, frozen=True):
    """Engine: rows of the device."""

    model: int
    block: BlockName | None
    """Arrays in the memory of the engine process. None: they are in the frame."""
    block_bytes: int
    keys: list[Key]
    """The key of each row; further lists have the same length."""
    rows: list[PackedRow]
    queue_s: list[float]
    """Seconds that each item has waited for the device."""
    device_s: list[float]
    """Seconds that each item was on the device."""
    fed: dict[Lane, int]
    """Tokens that all fronts have fed, by lane."""

    def __post_init__(self) -> None:
        _check_lengths(self.keys, self.rows, self.queue_s, self.device_s)


class Failed(Message, frozen=True):
    """Engine: a request has failed."""

    request: int
    index: Amount | None
    """Index of the input that has caused it. None: none has."""
    error: PackedError


class Leave(Message, frozen=True):
    """Front: a request has left. Work on it that has not begun is dropped."""

    request: int
    answered: bool
    elsewhere_s: float
    rejected: bool


class Free(Message, frozen=True):
    """Blocks of the peer's memory that are read."""

    blocks: list[BlockName]


class State(Message, frozen=True):
    """Engine: state of a model."""

    model: int
    fault: str | None
    """Reason for taking no requests; None while it takes them."""
    stall: str | None
    """Reason if a forward runs far longer than predicted; else None."""
    fed: dict[Lane, int]
    load: EngineLoad
    """Load of all fronts together."""


class Clear(Message, frozen=True):
    """Empty the caches of a model, in both directions: the peer passes it on."""

    model: int
    results: bool
    """True: cached rows, too. False: cached images alone."""


class Leaving(Message, frozen=True):
    """Engine: it takes no more requests, finishes those it has, and ends."""


def _check_lengths(keys: Sized, *others: Sized) -> None:
    """Reject lists of which one has more or fewer values than the others.

    Raises:
        ValueError: One has. The decoder makes an error of the frame of it.
    """
    if any(len(other) != len(keys) for other in others):
        raise ValueError(f"{len(keys)} keys, and not as many of everything else")


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


def _named_parameters(call: Callable[..., object]) -> tuple[str, ...]:
    return tuple(each.name for each in inspect.signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY)


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
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError(f"the peer sends a {Kind(kind).name} frame that cannot be read: {error}") from error


_ERRORS: Final[Mapping[str, type[StagedPoolError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, StagedPoolError)
}
_ERROR_FIELDS: Final = {name: _named_parameters(kind.__init__) for name, kind in _ERRORS.items()}
"""Names of an error's arguments behind its message: they are its attributes, too."""


def pack_error(error: StagedPoolError) -> PackedError:
    """Return an error as plain values. One of a plugin becomes one of the class that it is derived from."""
    name = next(base.__name__ for base in type(error).__mro__ if _ERRORS.get(base.__name__) is base)
    # Of an invalid input it is the message before its fields got the names of the engine.
    message = error._template if isinstance(error, InvalidInput) else str(error)
    return PackedError(name, message, {field: getattr(error, field) for field in _ERROR_FIELDS[name]})


def unpack_error(packed: PackedError) -> StagedPoolError:
    """Return the error of `pack_error`.

    Raises:
        WireError: No error class has this name, or it has other arguments.
    """
    if (kind := _ERRORS.get(packed.name)) is None:
        raise WireError(f"the peer sends an error of the unknown class {packed.name}")
    if packed.fields.keys() != set(_ERROR_FIELDS[packed.name]):
        raise WireError(f"the peer sends an error of {packed.name} with the arguments {sorted(packed.fields)}")
    return kind(packed.message, **packed.fields)
