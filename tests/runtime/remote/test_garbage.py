"""Garbage on the socket of a line: the line ends with words, and nothing else happens."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.open_front import run_front_engine
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import PackedIds, pack_row
from staged_pool.runtime.remote.line import FrontLine, ModelsChanged
from staged_pool.runtime.remote.messages import MOST_HEAD_BYTES, Kind, Message, ModelTerms, Welcome, encoded
from staged_pool.runtime.remote.port import Rings
from staged_pool.runtime.remote.store import ArrayStore
from staged_pool.runtime.requests import Output
from staged_pool.runtime.statistics import EngineLoad
from staged_pool.runtime.version import VERSION
from staged_pool.stages import wire
from staged_pool.stages.channel import ENDED
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.ring import open_memory
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import Bytes, frame
from tests.servers.fronts import device_engine_on, terms_of
from tests.support.logs import captured_logs
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SEEDS = 40
"""Streams of garbage for each end."""


def data(message: Message | Welcome, *parts: Bytes) -> bytes:
    """Return the bytes of a message and its arrays."""
    return b"".join(map(bytes, frame(*encoded(message), *parts)))


def plain(kind: Kind, *values: Any, raw: bytes = b"") -> bytes:
    """Return the bytes of a message whose values may be of any type."""
    return b"".join(map(bytes, frame(kind, msgspec.msgpack.encode(values), raw)))


def admit(request: int = 1, model: int = 0, *, waits: bool = False) -> bytes:
    return data(messages.Admit(request, model, 10, None, Priority.INTERACTIVE, None, None, waits))


def items(**changed: Any) -> bytes:
    """Return the bytes of a list of one item, with some fields changed."""
    fields: dict[str, Any] = {
        "model": 0, "lane": "text", "preparing": 0, "call_s": 0.0, "block": None, "block_bytes": 8, "keys": [(1, 0, 0)],
        "identities": [None], "payloads": [PackedIds(1, 2)],
    }  # fmt: skip
    return plain(Kind.ITEMS, *(fields | changed).values(), raw=np.array([97, 98], np.int32).tobytes())


def header(kind: Kind, head_bytes: int, raw_bytes: int = 0) -> bytes:
    """Return the beginning of a frame, of which nothing more is sent."""
    return struct.pack("!BBIQ", wire.VERSION, kind, head_bytes, raw_bytes)


NO_UTF_8 = b"".join(map(bytes, frame(Kind.ADMIT, b"\x98\x01\x00\x01\xc0\xabinteractive\xa1\xff\xc0\xc2")))
HELLO = data(messages.Hello(VERSION))
COUNT = data(messages.Count(1, {"text": 1}))
TO_ENGINE = [HELLO, admit(), COUNT, items(), data(messages.Leave(1, answered=True, elsewhere_s=0.0, rejected=False))]
"""A whole request of a front."""


async def say(desk: FrontDesk, sent: bytes, *, rings: bool = False, store: ArrayStore | None = None) -> str:
    """Send bytes to the engine process as a front, and close. Returns the reason of the end that it sees."""
    ours, theirs = socket.socketpair()
    memory = [open_memory(1 << 16), open_memory(1 << 16)] if rings else []
    engine_end, front_end = UnixStream(theirs), UnixStream(ours)
    reasons: list[str] = []

    async def serve() -> None:
        reasons.append(await desk.serve(engine_end, Rings.mapped(*memory) if memory else None, store))

    async with anyio.create_task_group() as tasks, front_end:
        tasks.start_soon(serve)
        with anyio.move_on_after(30):
            with contextlib.suppress(*ENDED):
                await front_end.send(sent)
                front_end.send_eof()
            await until(lambda: bool(reasons))
    return reasons[0]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "version 71"),
        (b"\x01\x01\xff\xff\xff\xff" + bytes(8), "at most 1073741824 are read"),
        (HELLO[:-1], "ended within a frame"),
        (plain(Kind.HELLO, "0.0.0-other"), f"this engine process runs {VERSION}"),
        (admit(), "sends a Admit message, which this end does not take"),
        (HELLO + b"\x01\x63" + bytes(12), "unknown kind 99"),
        (HELLO + header(Kind.LEAVE, 1 << 29), "a head of 536870912 bytes in a frame of kind 11; at most 8388608 are"),
        (HELLO + header(Kind.ITEMS, MOST_HEAD_BYTES + 1), "at most 8388608 are read"),
        (HELLO + header(Kind.COUNT, 10, 1), "a block of arrays of 1 bytes in a frame of kind 6; at most 0 are read"),
        (HELLO + header(Kind.WELCOME, 1 << 29), "sends a Welcome message, which this end does not take"),
        (header(Kind.LEAVE, 10), "sends a Leave message, which this end does not take"),
        (HELLO + data(messages.Admitted(1)), "sends a Admitted message, which this end does not take"),
        (HELLO + plain(Kind.ADMIT, 1), "ADMIT frame that cannot be read"),
        (HELLO + plain(Kind.ADMIT, 1, 0, -1, None, "interactive", None, None, False), "cannot be read"),
        (HELLO + plain(Kind.ADMIT, 1, 0, 1, float("nan"), "interactive", None, None, True), "cannot be read"),
        (HELLO + NO_UTF_8, "ADMIT frame that cannot be read"),
        (HELLO + admit(model=1), "a model 1, which does not exist"),
        (HELLO + admit(model=-1), "ADMIT frame that cannot be read: Expected `int` >= 0 - at `model`"),
        (HELLO + admit() * 2, "asks twice for a request 1"),
        (HELLO + admit(waits=True) * 2, "asks twice for a request 1"),
        (HELLO + admit() + plain(Kind.COUNT, 1, {}), "cannot be read"),
        (HELLO + admit() + plain(Kind.COUNT, 1, {"text": 0}), "cannot be read"),
        (HELLO + admit() + plain(Kind.COUNT, 1, {"image": 1}), "a lane image, which model 0 does not have"),
        (HELLO + admit() + items(lane="image"), "a lane image, which model 0 does not have"),
        (HELLO + admit() + items(model=2), "a model 2, which does not exist"),
        (HELLO + admit() + COUNT * 2, "`inputs` are counted twice"),
        (HELLO + admit() + items(), "`keys` has no new item of its request"),
        (HELLO + admit() + COUNT + items(keys=[(1, 1, 0)]), "`keys` has no new item of its request"),
        (HELLO + admit() + COUNT + items() * 2, "`keys` has no new item of its request"),
        (HELLO + admit() + COUNT + items(keys=[(1, 0, 1)]), "`keys` has parts of an input that is not cut"),
        (HELLO + admit() + COUNT + items(keys=[(1, 0, 1024)]), "at `keys[0][2]`"),
        (HELLO + admit() + items(identities=[None] * 2), "1 keys, and not as many of everything else"),
        (HELLO + admit() + items(identities=[b"short"]), "cannot be read"),
        (HELLO + admit() + items(block_bytes=16), "`block_bytes` is not the size"),
        (HELLO + admit() + COUNT + items(payloads=[PackedIds(1, 0)]), "`ids` is no number of tokens"),
        (HELLO + admit() + COUNT + items(payloads=[PackedIds(2, 2)]), "`outputs` has one of another model"),
        (HELLO + data(messages.Leave(1, True, 0.0, False))[:-2] + b"\xc2\xc0", "LEAVE frame that cannot be read"),
        (HELLO + plain(Kind.LEAVE, 1, True, float("nan"), False), "at `elsewhere_s`"),
        (HELLO + admit() + items(keys=[(1, -1, 0)]), "cannot be read"),
        (HELLO + admit() + items(payloads=[PackedIds(1, 3)]), "has not sent"),
        (HELLO + admit() + items(block=0), "this line has none"),
        (HELLO + admit() + items(block=b"name"), "refers to a store, and this line has none"),
        (HELLO + plain(Kind.FREE, [b"name"]), "this line has none"),
        (HELLO + plain(Kind.FREE, [0]), "this line has none"),
        (HELLO + plain(Kind.CLEAR, 7, True), "a model 7, which does not exist"),
        (HELLO + admit() + items(keys=[(9, 0, 0)]) * 200, "without a credit"),
    ],
    ids=count(),
)
async def test_what_a_front_may_not_send_ends_its_line_with_words(sent: bytes, words: str) -> None:
    config, model = EngineConfig(), LetterModel()
    desk = FrontDesk()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        assert words in await say(desk, sent)
        await until(lambda: not device.statistics().admission.requests)
        assert not device.requests.open


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (items(block=0, block_bytes=1 << 17), "the ring has 65536"),
        (items(block=1 << 17), "the ring has 65536"),
        (items(block=-64), "cannot be read"),
        (items(block=8), "Expected `int` that's a multiple of 64"),
        (plain(Kind.FREE, [64]), "where there is none"),
    ],
    ids=count(),
)
async def test_memory_that_is_no_block_ends_the_line_with_words(sent: bytes, words: str) -> None:
    config, model = EngineConfig(), LetterModel()
    desk = FrontDesk()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        assert words in await say(desk, HELLO + admit() + sent, rings=True)
        assert not device.statistics().admission.requests


async def test_garbage_of_a_front_ends_its_line_alone() -> None:
    config, model = EngineConfig(), LetterModel()
    desk = FrontDesk()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        for sent in garbage(TO_ENGINE, keep=1):
            await say(desk, sent)
            await until(lambda: not device.statistics().admission.requests)
            assert not any(device.admission.in_flight.fed.values())
            assert not any(preparing.reports for preparing in device.stages.preparing.values())
        assert device.fault is None
        assert "closed it" in await say(desk, b"".join(TO_ENGINE))


def garbage(whole: list[bytes], *, keep: int) -> Iterator[bytes]:
    """Yield streams with some bytes wrong, messages left out, doubled or in another order.

    Args:
        whole: The messages of a right stream.
        keep: Messages at the beginning that are left as they are.
    """
    for seed in range(SEEDS):
        rng = random.Random(seed)
        sent = list(whole[keep:])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(sent))
            one = bytearray(sent[place])
            match rng.randrange(5):
                case 0 if one:  # one byte of the head or the arrays
                    one[rng.randrange(len(one))] = rng.randrange(256)
                case 1 if one:
                    del one[rng.randrange(len(one)) :]
                case 2:
                    one += rng.randbytes(rng.randint(1, 40))
                case 3:
                    sent.insert(rng.randrange(len(sent)), bytes(one))
                case _:
                    rng.shuffle(sent)
            sent[place] = bytes(one)
        yield b"".join(whole[:keep] + sent)


# ---- to a front ----

TERMS = terms_of(LetterModel(), EngineConfig())
WELCOME = data(Welcome(VERSION, [TERMS]))
NO_LOAD = EngineLoad(requests=0, running=0, requests_per_second=0.0, fullness=0.0, lanes={})
STATE = data(messages.State(0, None, None, {"text": 0}, NO_LOAD))


def rows(**changed: Any) -> bytes:
    parts: list[Bytes] = []
    packed = pack_row({Output.DENSE: expected("ab")}, parts)
    fields: dict[str, Any] = {
        "model": 0, "block": None, "block_bytes": 16, "keys": [(1, 0, 0)], "rows": [packed], "queue_s": [0.1],
        "device_s": [0.1], "fed": {"text": 0},
    }  # fmt: skip
    return plain(Kind.ROWS, *(fields | changed).values(), raw=b"".join(map(bytes, parts)))


TO_FRONT = [data(messages.Admitted(1)), data(messages.Credit(0, "text", 1)), rows()]


async def hear(sent: bytes, use: Callable[[FrontLine, list[str]], Any] | None = None) -> list[str]:
    """Send bytes to a front as the engine process. Returns the reason of the end that it sees.

    Args:
        sent: The bytes that follow the welcome.
        use: Called with the line once it is up. None: the bytes begin the line.
    """
    ours, theirs = socket.socketpair()
    engine_end, front_end = UnixStream(theirs), UnixStream(ours)
    line, reasons = FrontLine(StageOptions().clock), list[str]()

    async def run() -> None:
        reasons.append(await line.run(front_end, None))

    async with anyio.create_task_group() as tasks, engine_end:
        tasks.start_soon(run)
        if use is None:
            await engine_end.send(sent)
        else:
            await engine_end.send(WELCOME + STATE)
            with anyio.fail_after(30):
                await line.welcomed.wait()
            await use(line, reasons)(engine_end, sent)
        with contextlib.suppress(*ENDED):
            engine_end.send_eof()
        await until(lambda: bool(reasons))
    assert line.fault
    return reasons


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\x07", "version 7"),
        (data(Welcome("0.0.0-other", [])), "the engine process runs version 0.0.0-other"),
        (STATE, "sends a State message, which this end does not take"),
        (WELCOME + WELCOME, "sends a Welcome message, which this end does not take"),
        (WELCOME + header(Kind.STATE, 1 << 29), "a head of 536870912 bytes in a frame of kind 13; at most 8388608"),
        (WELCOME + header(Kind.ROWS, 10, (1 << 30) + 1), "a frame of 1073741835 bytes; at most 1073741824 are read"),
        (WELCOME + HELLO, "sends a Hello message, which this end does not take"),
        (WELCOME + data(messages.State(1, None, None, {}, NO_LOAD)), "a model 1, which does not exist"),
        (WELCOME + data(messages.State(-1, None, None, {}, NO_LOAD)), "STATE frame that cannot be read"),
        (WELCOME + data(messages.State(0, None, None, {"text": -1}, NO_LOAD)), "at `fed"),
        (WELCOME + data(messages.State(0, None, None, {}, replace(NO_LOAD, fullness=math.nan))), "`load.fullness`"),
        (WELCOME + data(messages.Clear(5, results=False)), "a model 5, which does not exist"),
        (WELCOME + plain(Kind.FREE, [0]), "this line has none"),
        (WELCOME + plain(Kind.REFUSED, 1, ["Overloaded", "full", {}]), "the arguments []"),
        (WELCOME + plain(Kind.REFUSED, 1, ["KeyError", "full", {}]), "the unknown class KeyError"),
        (WELCOME + plain(Kind.REFUSED, 1, ["Overloaded"]), "REFUSED frame that cannot be read"),
    ],
    ids=count(),
)
async def test_what_an_engine_process_may_not_send_ends_its_line_with_words(sent: bytes, words: str) -> None:
    assert words in (await hear(sent))[0]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (rows(keys=[]), "0 keys, and not as many of everything else"),
        (rows(fed={"image": 1}), "a lane image, which this model does not have"),
        (rows(block=0), "this line has none"),
        (rows(rows=[[[0, 0, [5]]]]), "has not sent"),
        (rows(rows=[[[0, 0, [3]]]]), "`rows` has dense of a wrong shape"),
        (rows(rows=[[[0, 0, [2, 2]]]]), "`rows` has dense of a wrong shape"),
        (rows(rows=[[]]), "`rows` has other outputs"),
        (rows(rows=[[[0, 1, [4]]]]), "`rows` has other outputs"),
        (rows(rows=[[[0, 0, [1]], [0, 0, [1]]]]), "`rows` has two values of one output"),
        (rows(rows=[[[1, 0, 1]]]), "`rows` has no values of dense"),
        (rows(queue_s=[-1.0]), "at `queue_s"),
        (rows(block_bytes=8), "`block_bytes` is not the size"),
        (rows(model=1), "a model 1, which does not exist"),
        (data(messages.Credit(0, "text", 99)), "99 credits of the batch stage"),
        (data(messages.Credit(0, "image", 1)), "a lane image, which this model does not have"),
        (plain(Kind.FAILED, 1, 1, ["ModelFailed", "NaN", {"index": None}]), "an input 1, which does not exist"),
    ],
    ids=count(),
)
async def test_what_does_not_fit_the_models_of_a_front_ends_its_line(sent: bytes, words: str) -> None:
    outcomes: list[object] = []
    reasons = await hear(data(messages.Admitted(1)) + sent, partial(asking, outcomes))
    assert words in reasons[0]
    assert len(outcomes) == 1


async def test_garbage_of_the_engine_process_ends_the_line_and_each_request_has_one_outcome() -> None:
    with captured_logs():
        for sent in garbage(TO_FRONT, keep=0):
            outcomes: list[object] = []
            await hear(sent, partial(asking, outcomes, patience_s=0.03))
            assert len(outcomes) == 1
    outcomes = []
    await hear(b"".join(TO_FRONT), partial(asking, outcomes))
    assert np.array_equal(np.asarray(outcomes[0]), [expected("ab")])


def asking(outcomes: list[object], line: FrontLine, reasons: list[str], *, patience_s: float = 10.0) -> Any:
    """Ask a front to embed a text, and let the engine process answer with bytes.

    Args:
        outcomes: Gets the outcome.
        line: The line of the front.
        reasons: Reasons for the end of the line.
        patience_s: Longest wait for the text to be sent, after the first message of the engine process.
    """

    async def use(peer: UnixStream, sent: bytes) -> None:
        model = LetterModel()
        async with run_front_engine(EngineConfig(), model, line) as engine:

            async def ask() -> None:
                try:
                    outcomes.append((await engine.embed(["ab"], normalize=False)).embeddings)
                except StagedPoolError as error:
                    outcomes.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await until(lambda: line.is_asked)
                with contextlib.suppress(*ENDED):
                    await peer.send(sent[: len(TO_FRONT[0])])
                    with anyio.move_on_after(patience_s):  # with other bytes it may never be sent
                        await until(lambda: bool(line.models[0].lane("text").waiting))
                    await peer.send(sent[len(TO_FRONT[0]) :])
                    peer.send_eof()
                await until(lambda: bool(outcomes))
            stage = line.models[0].lane("text")
            await until(lambda: stage.waiting == stage.pending_tokens == stage.credit.waiting == 0)
            assert engine.statistics().admission.requests == 0

    return use


async def test_an_engine_process_with_other_models_is_told_by_its_own_error() -> None:
    line = FrontLine(StageOptions().clock)
    line.terms = [TERMS]
    other = ModelTerms(card=replace(TERMS.card, width=5), preparation=None, fed_limits={}, secret=b"")
    ours, theirs = socket.socketpair()
    async with UnixStream(theirs) as engine_end:
        await engine_end.send(data(Welcome(VERSION, [other])))
        with pytest.raises(ModelsChanged, match="other models than before"):
            await line.run(UnixStream(ours), None)
    assert line.fault
