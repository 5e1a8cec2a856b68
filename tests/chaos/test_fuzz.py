"""Hundreds of conversations that a grammar makes up, sensible in parts: each ends, and none harms the server.

A failing conversation is told by its seed: `conversation(http1 or http2, seed)` makes its bytes again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final

import anyio
import hpack
import pytest

from tests.chaos.harness import UnderFire
from tests.chaos.test_framing import PREFACE, SETTINGS, http2_frame
from tests.conftest import BACKENDS
from tests.servers.byte_client import statuses

pytestmark = pytest.mark.anyio

CASES: Final = 400
"""Conversations of each grammar; an event loop has every third of them."""
AT_ONCE: Final = 20
SENSIBLE: Final = frozenset({100, 200, 204, 400, 404, 405, 408, 413, 414, 415, 422, 429, 431, 501, 503, 505})

Logged = list[MutableMapping[str, Any]]
Grammar = Callable[[random.Random], bytes]


def http1(dice: random.Random) -> bytes:
    """Requests one after the other, most of them nearly right."""
    return b"".join(_request(dice) for _ in range(dice.choice((1, 1, 2, 5))))


def _request(dice: random.Random) -> bytes:
    end = dice.choices((b"\r\n", b"\n", b"\r", b""), (30, 1, 1, 1))[0]
    method = _mostly(dice, b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"PRI", b"", b"P\xffST")
    target = _mostly(
        dice, b"/v1/embeddings", b"/health", b"/tokenize", b"*", b"", b"//", b"/%00", b"/v1%2fembeddings",
        b"http://a/health", b"a:1", b"/?" + b"q" * 9000, "/é".encode(), b"/ x",
    )  # fmt: skip
    version = _mostly(dice, b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"")
    body = _mostly(dice, b'{"input":"a"}', b"", b'{"prompt":"a"}', b"{", b"[" * 1000, b"\xff" * 50, b'{"input":["a"]}')
    headers = [b"host: a"] * dice.choices((1, 0, 2), (20, 1, 1))[0] + [b"content-type: application/json"]
    if dice.random() < 0.2:
        chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _parts(dice, body))
        headers.append(dice.choice((b"transfer-encoding: chunked", b"transfer-encoding: Chunked, chunked")))
        body = dice.choice((chunked + b"0\r\n\r\n", chunked + b"0\r\nx: y\r\n\r\n", chunked, chunked + b"zz\r\n"))
    if dice.random() < 0.8:
        length = dice.choices((len(body), len(body) + 1, max(0, len(body) - 1), -1, 10**20), (30, 1, 2, 1, 1))[0]
        headers.append(b"content-length: %d" % length)
    headers += dice.sample((
        b"expect: 100-continue", b"connection: close", b"connection: keep-alive, upgrade", b"upgrade: h2c",
        b"upgrade: websocket", b"http2-settings: AAA", b"te: trailers", b"x-request-timeout: 1", b"x: " + b"y" * 3000,
        b"content-encoding: gzip", b"x-request-id: \xff", b"content-length: 3", b" folded", b"no colon", b": no name",
        b"x-null: \x00", b"prefer: wait=\"", b"host : a", b"accept: */*", b"transfer-encoding: identity",
    ), dice.choice((0, 0, 1, 2, 4)))  # fmt: skip
    dice.shuffle(headers)
    return end.join([b" ".join((method, target, version)), *headers, b"", body])


def http2(dice: random.Random) -> bytes:
    """Make a connection's beginning and some streams, with legal and illegal frames between them."""
    encoder = hpack.Encoder()
    sent = dice.choices((PREFACE + SETTINGS, PREFACE, PREFACE[:10]), (20, 2, 1))[0]
    for stream_id in range(1, dice.choice((4, 10, 20)), 2):
        sent += http2_frame(1, encoder.encode(_fields(dice)), flags=4, stream_id=stream_id)
        if dice.random() < 0.3:
            sent += _frame(dice, encoder)
        sent += http2_frame(0, b'{"input":"a"}', flags=1, stream_id=stream_id)
    return sent


def _frame(dice: random.Random, encoder: hpack.Encoder) -> bytes:
    stream_id = dice.choice((0, 1, 1, 3, 5, 7, 2, 2**31 - 1))
    kind = dice.choices(range(11), (6, 10, 2, 4, 3, 1, 3, 1, 4, 2, 1))[0]
    flags = dice.choice((0, 1, 4, 5, 5, 5, 8, 0x20, 0xFF))
    if kind == 1 and dice.random() < 0.9:
        payload = encoder.encode(_fields(dice))
        flags &= ~0x28  # neither padding nor priority, which the block does not have
    elif kind == 0:
        payload = dice.choice((b"", b'{"input":"a"}', b"x" * 16_384))
        flags &= ~0x08
    elif kind in (3, 8):
        payload = dice.choice((0, 1, 8, 2**31 - 1)).to_bytes(4, "big")
    elif kind == 4:
        payload = b"".join(dice.choice((0, 1, 3, 4, 5, 6, 99)).to_bytes(2, "big") + dice.randbytes(4) for _ in "ab")
        flags &= ~0x01
    else:
        payload = dice.randbytes(dice.choice((0, 4, 5, 8, 8, 17, 100)))
    return http2_frame(kind, payload, flags=flags, stream_id=stream_id)


def _fields(dice: random.Random) -> list[tuple[bytes, bytes]]:
    path = _mostly(dice, b"/v1/embeddings", b"/health", b"", b"*", b"/%00", "/é".encode())
    fields = [
        (b":method", _mostly(dice, b"POST", b"GET", b"CONNECT", b"P\xc3\xb6ST")),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"a"),
        (b"content-type", b"application/json"),
        (b"content-length", _mostly(dice, b"13", b"0", b"x")),
        (b"connection", b"close"),
        (b"x-Upper", b"a"),
        (b"cookie", b"c" * 200),
    ]
    chosen = fields[: dice.choices((5, 4, 6, 7, 8, 9), (20, 1, 1, 1, 1, 1))[0]]
    if dice.random() < 0.05:
        dice.shuffle(chosen)
    return chosen


def _mostly(dice: random.Random, right: bytes, *others: bytes) -> bytes:
    return right if dice.random() < 0.7 else dice.choice(others)


def _parts(dice: random.Random, body: bytes) -> Iterator[bytes]:
    while body:
        size = dice.randint(1, len(body))
        yield body[:size]
        body = body[size:]


def conversation(grammar: Grammar, seed: int) -> bytes:
    """Make the bytes of one client. One in four is damaged afterwards."""
    dice = random.Random(seed)
    sent = bytearray(grammar(dice))
    if dice.random() < 0.25 and sent:
        for _ in range(dice.choice((1, 1, 5))):
            place = dice.randrange(len(sent))
            damage = dice.choice(("flip", "cut", "insert", "repeat"))
            if damage == "flip":
                sent[place] ^= 1 << dice.randrange(8)
            elif damage == "cut":
                del sent[place : place + dice.choice((1, 10))]
            elif damage == "insert":
                sent[place:place] = dice.randbytes(dice.choice((1, 10)))
            else:
                sent[place:place] = sent[place : place + 20]
            if not sent:
                break
    return bytes(sent)


@pytest.mark.parametrize("grammar", [http1, http2])
async def test_a_made_up_conversation_ends_and_surprises_nobody(
    grammar: Grammar, anyio_backend: object, logged: Logged
) -> None:
    loops = [loop.values[0] for loop in BACKENDS]
    seeds = range(loops.index(anyio_backend), CASES, len(loops))
    async with UnderFire.opened(
        body_timeout_s=0.2, head_timeout_s=0.2, keep_alive_s=0.2, write_timeout_s=1, body_limit_bytes=100_000
    ) as fire:
        slots = anyio.Semaphore(AT_ONCE)
        answers: dict[int, bytes] = {}

        async def talk(seed: int) -> None:
            async with slots:
                answers[seed] = await fire.talk(conversation(grammar, seed))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for seed in seeds:
                    tasks.start_soon(talk, seed)
        await fire.assert_unharmed()
    assert [line for line in logged if line["event"] in ("request.crashed", "connection.failed")] == []
    assert [line for line in logged if line["log_level"] in ("error", "critical")] == []
    statuses_ = Counter(line["status"] for line in logged if line["event"] == "request.finished")
    assert set(statuses_) <= SENSIBLE | {499}
    assert statuses_[200] > len(seeds) / 20  # some of them are right
    if grammar is http1:
        assert {seed: statuses(answer) for seed, answer in answers.items() if set(statuses(answer)) - SENSIBLE} == {}
