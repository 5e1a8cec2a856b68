"""The differential of both ways of HTTP/1.1: for odd requests, the fast and the general path answer the same.

The requests are made up from a seed, which a failure prints: `STAGED_POOL_TEST_SEED=$RANDOM` tries others, and
`STAGED_POOL_TEST_HEADS=10000` more of them. CI's nightly run does both.
"""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from typing import Any, Final

import anyio
import pytest

from tests.servers.byte_client import post, statuses
from tests.servers.on_socket import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

SEED: Final = int(os.environ.get("STAGED_POOL_TEST_SEED", "1"))
HEADS: Final = int(os.environ.get("STAGED_POOL_TEST_HEADS", "200"))
TOGETHER: Final = 20

BODY: Final = b'{"input": "a"}'
LAST: Final = b"GET /ready HTTP/1.1\r\nhost: last\r\nconnection: close\r\n\r\n"
"""Sent behind each: it shows where the server took the end of the one before to be."""

METHODS = [*["POST"] * 6, *["GET"] * 4, "get", "Post", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "BREW", ""]
TARGETS = [
    *["/v1/embeddings"] * 6, *["/health"] * 4, "/v1/models", "/none", "/v1/%65mbeddings", "http://a/health", "*", "x",
    "/health#a", "//health", "/health?a=b", "/v1/embeddings/", "/hëalth", "/health\t", "/a b",
]  # fmt: skip
VERSIONS = [*["HTTP/1.1"] * 12, "HTTP/1.0", "HTTP/1.2", "HTTP/9.9", "HTTP/2.0", "http/1.1", "HTTP/1.1 ", "HTTP/1", ""]
HOSTS = [
    *["host: a"] * 12, "host: a:80", "host:", "host: [::1]:80", "host: a b", "host: a@b", "host: a/b", "host: a, b",
    "Host:a", "host : a", "host: a\r\nhost: a", "x: y", "host: a:99999999", "host: ü", "host: \ta\t",
]  # fmt: skip
LENGTHS = [
    *[f"content-length: {len(BODY)}"] * 12, "content-length: 14, 14", "content-length: 14\r\ncontent-length: 14",
    "content-length: 14\r\ncontent-length: 15", "content-length: +14", "content-length: 0x0e", "content-length: 014",
    "content-length: ", "content-length: 0", "content-length: 3", "content-length: 99999999999", "Content-Length:14",
    "transfer-encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 14", "transfer-encoding: identity",
    "content-length: 1 4", "content-length: 14;", "content-length: -1", "content-length: 18446744073709551630", "a: b",
]  # fmt: skip
OTHERS = [
    "accept: */*", "connection: keep-alive", "connection: close", "connection: Keep-Alive, x", "x: a\x07b", "x: ",
    "content-type: application/json", "authorization: Bearer a", "x : y", " folded", "x: a\rb", "no colon", ": a",
    "expect: 100-continue", "upgrade: h2c", "accept-encoding: gzip", "content-encoding: gzip", "origin: https://a",
    "x-request-id: mine", "x-request-timeout: 5", "x-request-timeout: x", "x-priority: bulk", "x: é", "x;y: z",
    "trailer: x", "te: trailers", "accept: application/x-ndjson", "cookie: a=b; c=d", "x: " + "a" * 9000,
]  # fmt: skip
ENDS = [*["\r\n"] * 40, "\n", "\r", "\r\n\r\n", "\n\r"]
BODIES = [
    *[BODY] * 12, b"", BODY + b"\r\n", b"e\r\n" + BODY + b"\r\n0\r\n\r\n", b"e;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n" + BODY, b"e\r\n" + BODY + b"0\r\n\r\n", b"e \r\n" + BODY + b"\r\n0\r\n\r\n",
    b"0\r\n\r\n", b"e\r\n" + BODY + b"\r\n0\r\nx: y\r\n\r\n", b"{", b'{"input": []}', b"\x00" * 14,
]  # fmt: skip
BEFORE = [*[b""] * 12, b"\r\n", b"\r\n\r\n", b"\r\n" * 9, b"\n", b" ", b"\r"]

VARIES = re.compile(
    rb'"(?:id|created|request_id|unix)":(?:"[^"]*"|[\d.]+)|\r\n(?:x-request-id|date|server-timing): [^\r]*',
    re.IGNORECASE,
)


def made_up(choice: random.Random) -> bytes:
    def end() -> str:
        return choice.choice(ENDS)

    first = f"{choice.choice(METHODS)} {choice.choice(TARGETS)} {choice.choice(VERSIONS)}"
    lines = [choice.choice(HOSTS), *choice.sample(OTHERS, choice.choice([0, 0, 1, 1, 2, 3]))]
    if choice.random() < 0.8 and not first.startswith("GET"):
        lines.append(choice.choice(LENGTHS))
    if choice.random() < 0.1:
        lines.append(choice.choice(LENGTHS))
    choice.shuffle(lines)
    head = "".join(line + end() for line in [first, *lines]) + end()
    body = b"" if first.startswith("GET") and choice.random() < 0.8 else choice.choice(BODIES)
    return choice.choice(BEFORE) + head.encode("latin-1") + body


async def answers(served: Served, sent: bytes) -> bytes:
    """Return the server's answer without variable parts, until it closes or waits for a second."""
    received = b""
    async with await served.connect() as stream:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream), anyio.move_on_after(20):
            await stream.send(sent + LAST)
            while True:
                received += await stream.receive()
    return VARIES.sub(b"", received)


async def test_both_paths_answer_odd_requests_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = random.Random(SEED)
    sent = [post(BODY), *(made_up(choice) for _ in range(HEADS))]
    said: dict[bytes, list[bytes]] = {request: [] for request in sent}
    limits: dict[str, Any] = {"body_timeout_s": 0.5, "head_timeout_s": 1.0, "keep_alive_s": 5.0}
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.05)
    for has_fast_path in (True, False):
        if not has_fast_path:
            monkeypatch.setattr("staged_pool.api.http.server.FastPath", lambda *args: None)
        async with serving(**limits) as served:

            async def ask(requests: list[bytes], served: Served = served) -> None:
                for request in requests:
                    said[request].append(await answers(served, request))

            async with anyio.create_task_group() as tasks:
                for first in range(TOGETHER):
                    tasks.start_soon(ask, list(said)[first::TOGETHER])
            await served.assert_alive()
    for request, (fast, general) in said.items():
        assert statuses(fast) == statuses(general), (SEED, request, fast, general)
        assert sorted(fast.splitlines()) == sorted(general.splitlines()), (SEED, request, fast, general)
        assert statuses(fast), (SEED, request)
    found = {status for fast, _ in said.values() for status in statuses(fast)}
    assert {200, 400, 501} <= found, (SEED, found)
