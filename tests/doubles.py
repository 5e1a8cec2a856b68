"""A model whose answers are known and whose steps a test holds in its hand."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import structlog
from numpy.typing import NDArray
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from staged_pool.runtime.model import Lane, ModelCard, ModelInput, Payload, Row, Tokens, TokenSequence
from staged_pool.runtime.requests import Chat, Output, TextInput
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.stages import log
from staged_pool.stages.channel import Channel, Receiver, Sender
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.parse import Arrival
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.ticket import Item
from staged_pool.stages.work import Plan, Prepared

CARD = ModelCard(
    name="letters",
    architecture="LetterCounter",
    parameters=0,
    width=4,
    matryoshka=True,
    max_tokens=512,
    vocabulary=0x110000,
    pooling="mean",
    normalize=False,
    dtype="float32",
    device="cpu",
    attention="packed",
    torch_threads=1,
    forward_workers=1,
    load_s=0.0,
)


@contextmanager
def logs_to(processor: Processor) -> Iterator[None]:
    """Have all that this package logs end in `processor`, whatever its level."""

    def make(name: str) -> FilteringBoundLogger:
        made: FilteringBoundLogger = structlog.wrap_logger(
            structlog.testing.ReturnLogger(),
            processors=[processor],
            wrapper_class=structlog.make_filtering_bound_logger(0),
            context_class=dict,
        ).bind()
        return made

    was = log.use(make)
    try:
        yield
    finally:
        log.use(was)


@contextmanager
def captured_logs() -> Iterator[list[EventDict]]:
    """Collect the package's log events, as data."""
    capture = structlog.testing.LogCapture()
    with logs_to(capture):
        yield capture.entries


def vector(ids: Sequence[int]) -> NDArray[np.float32]:
    """The vector of `LetterModel` for ids: length, sum, first and last id. Differs for nearly all texts."""
    return np.array([len(ids), sum(ids), ids[0], ids[-1]], dtype=np.float32)


def expected(text: str) -> NDArray[np.float32]:
    return vector([ord(c) for c in text])


@dataclass
class LetterModel:
    """Model with one token a character. Thread-safe; it records its inputs."""

    card: ModelCard = CARD
    padded: bool = False

    on_preprocess: Callable[[Sequence[str]], None] = lambda texts: None
    on_forward: Callable[[Sequence[str]], None] = lambda texts: None
    preprocessed: list[list[str]] = field(default_factory=list)
    forwarded: list[list[str]] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)
    """The `at_once` argument of each forward."""
    warmed_up: list[tuple[Lane, str]] = field(default_factory=list)
    """Each time, and the name of the thread."""

    def warm_up(self, lane: Lane) -> None:
        self.warmed_up.append((lane, threading.current_thread().name))

    def pads(self, lane: Lane) -> bool:
        return self.padded

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Prepared[Payload] | InvalidInput]:
        texts = [f"{given.prompt}{_text(given)}" for given in inputs]
        self.preprocessed.append(texts)
        self.on_preprocess(texts)
        return [
            Prepared(TokenSequence([ord(c) for c in text], given.outputs), len(text))
            if text
            else InvalidInput("The input has no tokens.", param="input")
            for given, text in zip(inputs, texts, strict=True)
        ]

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        texts = ["".join(map(chr, sequence(payload).ids)) for payload in payloads]
        self.forwarded.append(texts)
        self.at_once.append(at_once)
        self.on_forward(texts)
        return [
            ModelFailed("NaN") if "NaN" in text else Row({Output.DENSE: vector(sequence(payload).ids)}, payload)
            for text, payload in zip(texts, payloads, strict=True)
        ]

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        text = source if isinstance(source, str) else rendered(source)
        return Tokens([ord(c) for c in text], list(text), [(place, place + 1) for place in range(len(text))])

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return []

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None

    def clear_image_cache(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """It has no processes."""


def sequence(payload: Payload) -> TokenSequence:
    """The payload of a text."""
    assert isinstance(payload, TokenSequence)
    return payload


def rendered(chat: Chat) -> str:
    """The chat template of `LetterModel`."""
    said = "".join(f"<{message['role']}>{message['content']}" for message in chat.messages)
    return said + ("<assistant>" if chat.add_generation_prompt else "")


def _text(given: ModelInput) -> str:
    assert isinstance(given.source, TextInput)
    source = given.source.source
    if isinstance(source, Chat):
        return rendered(source)
    return source if isinstance(source, str) else "".join(map(chr, source))


def a_plan(inputs: int) -> Plan[object]:
    """Plan of a request with `inputs` inputs; its result is the list of its rows."""
    return Plan(range(inputs), lambda rows, tokens: list(rows))


class NoLoad:
    """For tickets that no admission has let in."""

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        return True

    def tokens_of(self, lane: Hashable, inputs: int) -> int:
        return inputs

    def fed(self, lane: Hashable, inputs: int) -> None:
        """Nobody counts."""

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def computed(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def delivered(self, numbers: int) -> None:
        pass

    def cached(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""


class Gate:
    """Holds a thread until the test opens it; the test can wait until a thread has arrived."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._arrived = threading.Event()

    def __call__(self, _texts: object = None) -> None:
        self._arrived.set()
        if not self._open.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")

    def open(self) -> None:
        self._open.set()

    async def arrived(self) -> None:
        """Wait until a thread stands at the gate."""
        if not await anyio.to_thread.run_sync(self._arrived.wait, 30):
            raise TimeoutError("no thread came to the gate")


def acting_channels(act: Callable[[str], Awaitable[None]]) -> type[Channel[Any]]:
    """Channels between whose stages a test acts: for `StageOptions.channel`.

    Args:
        act: Awaited where a worker has taken a message (`take NAME`, of the stage) and where one is about to send one
            (`send NAME`, of the stage behind). An exception there crashes that worker while it holds the message.
    """

    class ActingSender(Sender[Any]):
        async def send(self, message: Any) -> None:
            await act(f"send {self.name}")
            await super().send(message)

        def clone(self) -> Sender[Any]:
            return ActingSender(self._stream.clone(), self._contents)

    class ActingReceiver(Receiver[Any]):
        async def __anext__(self) -> Any:
            message = await super().__anext__()
            try:
                with anyio.CancelScope(shield=True):  # or a cancellation would lose the message
                    await act(f"take {self._contents.name}")
            except Exception as error:  # noqa: BLE001  # it is raised again, in the worker
                return _TrappedArrival(message, error) if isinstance(message, Arrival) else _TrappedList(message, error)
            return message

    class ActingChannel(Channel[Any]):
        def __init__(self, name: str, capacity: int, size: Callable[[Any], int] = lambda _: 1) -> None:
            super().__init__(name, capacity, size)
            self.sender = ActingSender(self.sender._stream, self._contents)
            self.receiver = ActingReceiver(self.receiver._stream, self._contents)

    return ActingChannel


class _TrappedList(list[Any]):
    """A message that crashes its worker once custody of it is taken."""

    def __init__(self, message: Sequence[Any], error: Exception) -> None:
        super().__init__(message)
        self._error = error
        self._looks = 0

    def __iter__(self) -> Iterator[Any]:
        self._looks += 1
        if self._looks > 1:
            raise self._error
        return super().__iter__()


class _TrappedArrival:
    """As `_TrappedList`, for parse."""

    def __init__(self, message: Arrival, error: Exception) -> None:
        self.ticket = message.ticket
        self._error = error

    @property
    def sent_at(self) -> float:
        raise self._error


ITERATIONS = 100
"""Iterations of the event loop before it may rest: tasks alone have done their part by then."""


def wait_in(builder: BatchFormer[Any], items: Iterable[Item[Any]]) -> None:
    """Have items wait, of any requests."""
    for item in items:
        builder.queue.add(item)


async def until(condition: Callable[[], bool], *, within_s: float = 30) -> None:
    """Let the other tasks run until the condition holds; and threads, which need the lock of the interpreter for it."""
    with anyio.fail_after(within_s):
        iterations = 0
        while not condition():
            iterations += 1
            if iterations < ITERATIONS:
                await anyio.lowlevel.checkpoint()
            else:  # a loop that never rests slows a model's load down several times
                await anyio.sleep(0.001)
