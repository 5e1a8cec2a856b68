"""Every field of every frame with every kind of wrong number: no crash, no large allocation, and a clear end."""

from __future__ import annotations

import contextlib
import random
import socket
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.open_front import run_front_engine
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import Block, unpack_payload, unpack_row
from staged_pool.runtime.remote.limits import PayloadLimits, RowLimits
from staged_pool.runtime.remote.line import FrontLine, ModelsChanged
from staged_pool.runtime.remote.messages import Message, Welcome, decoded, encoded, limits_of
from staged_pool.runtime.requests import Output
from staged_pool.runtime.statistics import Phase
from staged_pool.runtime.version import VERSION
from staged_pool.stages.channel import ENDED
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import Frame, FrameReader, WireError, frame
from tests.runtime.remote.hostile import (
    ARRAYS,
    DECODED_ONLY,
    LOAD,
    TO_ENGINE,
    TO_FRONT,
    corrupted,
    raw_of,
    sampled,
    structs,
)
from tests.runtime.remote.test_garbage import say
from tests.servers.fronts import device_engine_on, terms_of
from tests.support.cards import BOTH_LANES
from tests.support.logs import captured_logs
from tests.support.model import LetterModel
from tests.support.stores import two_ends
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

MOST_BYTES = 4 << 20
"""Most memory for the reading of a frame of a few hundred bytes."""
STEP = 3
"""Number of event loops: on a socket, each has its part of the frames."""
SEEDS = 300
"""Frames with random bytes for each direction."""
BYTES_OF_HEADER = 14


def data(message: Message | Welcome, raw: bytes = b"") -> bytes:
    return b"".join(map(bytes, frame(*encoded(message), raw)))


GREETING = data(messages.Hello(VERSION))
ADMITTED = [
    messages.Admit(1, 0, 10, None, Priority.INTERACTIVE, None, None, False),
    messages.Count(1, {"text": 2}),
]


def test_the_messages_here_have_a_value_for_each_field() -> None:
    found: dict[Any, set[str]] = {}
    for message in (*TO_ENGINE, *TO_FRONT):
        sampled(message, found)
    for struct, fields in structs().items():
        assert fields - DECODED_ONLY == found.get(struct, set()), struct


# ---- decoding alone ----


def read(frames: bytes) -> None:
    """Read frames to the last array, as both ends do."""
    for one in FrameReader(limits_of).feed(frames):
        message = decoded(one.kind, one.head)
        if isinstance(message, messages.Items):
            block, limits = Block(one.raw), PayloadLimits.of(message.lane, BOTH_LANES, None)
            for payload in message.payloads:
                unpack_payload(payload, block, limits)
        elif isinstance(message, messages.Rows):
            _read_rows(message, one)


def _read_rows(message: messages.Rows, one: Frame) -> None:
    block, payload = Block(one.raw), TokenSequence([1, 2], frozenset({Output.DENSE, Output.SPARSE}))
    for row in message.rows:
        RowLimits(BOTH_LANES).check(unpack_row(row, block), payload)


def test_right_messages_are_read() -> None:
    for message in (TO_ENGINE[1], TO_ENGINE[2], TO_ENGINE[4], TO_ENGINE[7], *TO_FRONT[:5], *TO_FRONT[6:]):
        read(data(message, raw_of(message)))


@pytest.mark.parametrize("message", [*TO_ENGINE, *TO_FRONT], ids=lambda message: type(message).__name__)
def test_a_wrong_number_is_an_error_of_the_wire_or_harmless_and_takes_no_memory(message: Message | Welcome) -> None:
    tracemalloc.start()
    try:
        for place, value, sent in corrupted(message):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(WireError):
                read(sent)
            assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES, (place, value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("message", [*TO_ENGINE, *TO_FRONT], ids=lambda message: type(message).__name__)
def test_random_bytes_in_a_frame_are_an_error_of_the_wire_or_harmless(message: Message | Welcome) -> None:
    for sent in shaken(data(message, raw_of(message)), seeds=SEEDS):
        with contextlib.suppress(WireError):
            read(sent)


def shaken(sent: bytes, *, seeds: int) -> Iterator[bytes]:
    """Yield a frame with some bytes changed, but for its header, always the same ones."""
    for seed in range(seeds):
        rng, wrong = random.Random(seed), bytearray(sent)
        for _ in range(rng.randint(1, 3)):
            if len(wrong) > BYTES_OF_HEADER:
                wrong[rng.randrange(BYTES_OF_HEADER, len(wrong))] = rng.choice(
                    [0, 1, 127, 128, 255, rng.randrange(256)]
                )
        yield bytes(wrong)


# ---- to the engine process ----


def at_rest(device: DeviceEngine) -> bool:
    """Return True if nothing of any front is counted."""
    account = device.admission.in_flight
    return not (
        account.total.requests
        or any(account.total.limited)
        or any(account.fed.values())
        or any(account.unprepared.values())
        or device.requests.open
        or device.entrance.waiting
        or any(preparing.reports for preparing in device.stages.preparing.values())
    )


def every(anyio_backend: Any, cases: Sequence[Any]) -> Sequence[Any]:
    """Return the cases of one event loop."""
    name, options = anyio_backend
    return cases[
        [("asyncio", False), ("asyncio", True), ("trio", False)].index((name, "loop_factory" in options)) :: STEP
    ]


async def test_no_front_ends_the_engine_process_or_leaves_something_in_its_accounts(anyio_backend: Any) -> None:
    config, model = EngineConfig(), LetterModel(card=BOTH_LANES)
    desk = FrontDesk()
    before = GREETING + b"".join(map(data, ADMITTED))
    cases = [each for message in TO_ENGINE for each in corrupted(message)]
    with captured_logs() as logs:
        async with device_engine_on(model, config, desk) as device:
            desk.add(device, terms_of(model, config))
            for place, value, sent in every(anyio_backend, cases):
                front, engine = two_ends()
                front.blocks[b"name"] = np.frombuffer(ARRAYS, np.uint8)
                is_hello = sent[1] == messages.Kind.HELLO
                reason = await say(desk, sent if is_hello else before + sent, rings=True, store=engine)
                assert reason
                assert "crashed" not in reason, (place, value, reason)
                await until(lambda: at_rest(device))
            assert device.statistics().phase is Phase.READY
            for each in device.stages.stages:
                assert each.meter.crashes == 0
            assert "closed it" in await say(desk, before)
    assert not [entry for entry in logs if entry["event"] in ("front.crashed", "stage.lost_request")]


# ---- to a front ----


async def test_no_engine_process_ends_a_front_or_leaves_a_caller_without_an_outcome(anyio_backend: Any) -> None:
    cases = [each for message in TO_FRONT for each in corrupted(message)]
    config, model = EngineConfig(), LetterModel()
    welcome = data(Welcome(VERSION, [terms_of(model, config)])) + data(messages.State(0, None, None, {}, LOAD))
    with captured_logs() as logs:
        line = FrontLine(StageOptions().clock, patience_s=0.0)
        async with await _Peer.of(line) as peer:
            await peer.say(welcome)
            with anyio.fail_after(30):
                await line.welcomed.wait()
            async with run_front_engine(config, model, line) as engine:
                await peer.close()
                for place, value, sent in every(anyio_backend, cases):
                    async with await _Peer.of(line) as again:
                        if sent[1] == messages.Kind.WELCOME:
                            await again.say(sent)
                            await again.close()
                            continue
                        await again.say(welcome)
                        await until(lambda: not line.fault or again.has_ended)
                        outcomes: list[object] = []

                        async def ask(outcomes: list[object] = outcomes) -> None:
                            try:
                                outcomes.append(await engine.embed(["ab"], normalize=False))
                            except StagedPoolError as error:
                                outcomes.append(error)

                        async with anyio.create_task_group() as asking:
                            asking.start_soon(ask)
                            await until(lambda: line.is_asked)
                            number = next(iter(line._asked))
                            await again.say(data(messages.Admitted(number)))
                            await until(lambda: bool(line.models[0].lane("text").waiting))
                            await again.say(sent)
                            await again.close()
                        assert len(outcomes) == 1, (place, value)
                        assert not line.requests, (place, value)
                statistics = engine.statistics()
                assert (statistics.phase, statistics.admission.requests) == (Phase.READY, 0)
    assert not [entry for entry in logs if entry["event"] in ("stage.crashed", "stage.lost_request")]


class _Peer:
    """The engine process's end of a line, which says what a test wants."""

    def __init__(self, line: FrontLine, ours: UnixStream, theirs: UnixStream) -> None:
        self._line, self._ours, self._theirs = line, ours, theirs
        self._tasks = anyio.create_task_group()
        self.has_ended = False

    @classmethod
    async def of(cls, line: FrontLine) -> _Peer:
        ours, theirs = socket.socketpair()
        return cls(line, UnixStream(ours), UnixStream(theirs))

    async def __aenter__(self) -> _Peer:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._tasks.__aexit__(*error)

    async def _run(self) -> None:
        try:
            with contextlib.suppress(ModelsChanged):  # it starts the front anew
                await self._line.run(self._theirs, None)
        finally:
            self.has_ended = True

    async def say(self, sent: bytes) -> None:
        with contextlib.suppress(*ENDED):
            await self._ours.send(sent)

    async def close(self) -> None:
        await self._ours.aclose()
        await until(lambda: self.has_ended)
