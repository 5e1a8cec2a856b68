"""The bytes that clients send over their connections, as one plain JSON value (see `tests.sim.world`)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.sim.draw import log_uniform, some
from tests.sim.world import TICK_S, read_part

Kind = Literal["alive", "embed", "many", "wrong", "nowhere", "chunked", "old", "close", "malformed"]
"""`many`: an answer that does not fit into the kernel. `old`: of HTTP/1.0. `malformed`: no request at all."""
Way = Literal["waits", "leaves", "resets"]
"""A client's action after its last byte: read on, close its side, or reset the connection."""

REST_BYTES = 10**9


@dataclass(slots=True)
class Piece:
    """Some bytes of a request, and the seconds between them and the piece before."""

    size: int = REST_BYTES
    """Number of bytes; a count beyond the request's end sends the rest."""
    after_s: float = 0.0


@dataclass(slots=True)
class RequestPlan:
    """One request, sent in pieces. If they do not cover it, it stays incomplete."""

    kind: Kind = "embed"
    text: str = "a"
    pieces: list[Piece] = field(default_factory=lambda: [Piece()], metadata={"of": Piece})
    is_ahead: bool = False
    """It is sent without waiting for the answers to those before it."""

    @property
    def data(self) -> bytes:
        """All bytes of the request."""
        match self.kind:
            case "alive":
                return b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            case "nowhere":
                return _post(b'{"input": "a"}', path=b"/nowhere")
            case "wrong":
                return _post(b'{"input": ')
            case "many":
                return _post(b'{"input": [%s]}' % b", ".join([self._text] * 20))
            case "chunked":
                body = b'{"input": %s}' % self._text
                return _post(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"transfer-encoding: chunked\r\n")
            case "close":
                return _post(b'{"input": %s}' % self._text, b"connection: close\r\n")
            case "old":
                return b"GET /health HTTP/1.0\r\nhost: x\r\n\r\n"
            case "malformed":
                return b"no request\r\n\r\n"
            case _:
                return _post(b'{"input": %s}' % self._text)

    @property
    def _text(self) -> bytes:
        return b'"%s"' % self.text.encode()

    @property
    def is_whole(self) -> bool:
        """True if the pieces cover the request."""
        return sum(piece.size for piece in self.pieces) >= len(self.data)

    @property
    def ends_connection(self) -> bool:
        """True if the server answers no request after it."""
        return self.kind in ("close", "old", "malformed")

    @property
    def status(self) -> int:
        """Status of the answer."""
        return {"nowhere": 404, "wrong": 400, "malformed": 400}.get(self.kind, 200)

    @property
    def texts(self) -> int:
        """Tokens of the request for the device."""
        return {"embed": 1, "chunked": 1, "close": 1, "many": 20}.get(self.kind, 0)


def _post(body: bytes, more: bytes = b"", path: bytes = b"/v1/embeddings") -> bytes:
    length = b"" if b"chunked" in more else b"content-length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s%s\r\n%s" % (path, more, length, body)


@dataclass(slots=True)
class ConnectionPlan:
    """One client's connection."""

    arrives_at: float = 0.0
    requests: list[RequestPlan] = field(default_factory=lambda: [RequestPlan()], metadata={"of": RequestPlan})
    then: Way = "waits"
    then_after_s: float = 0.0
    reads: bool = True
    """False: the client never reads its answers."""


@dataclass(kw_only=True)
class WebWorld:
    """One run. Limits are in virtual seconds, as all times."""

    seed: int = 0
    connections: list[ConnectionPlan] = field(default_factory=list, metadata={"of": ConnectionPlan})
    device_s: float = 0.0
    kernel_bytes: int = 2**16
    """Size of the kernel's buffer for bytes that a client does not read."""
    looks: bool = True
    """Arriving bytes are looked at within the call that receives them, as on asyncio; else as on trio."""
    keep_alive_s: float = 1.0
    head_timeout_s: float = 1.0
    body_timeout_s: float = 1.0
    write_timeout_s: float = 1.0
    ends_at: float | None = None
    """Time at which the server's shutdown begins."""


def from_json(given: Mapping[str, Any]) -> WebWorld:
    """The world that a JSON value describes; `tests.sim.world.to_json` makes it.

    Raises:
        ValueError: It does not describe one.
    """
    world: WebWorld = read_part(WebWorld, given)
    limits = (world.keep_alive_s, world.head_timeout_s, world.body_timeout_s, world.write_timeout_s)
    if min(limits) < TICK_S or world.kernel_bytes < 1:
        raise ValueError("limits must be a tick at least, and the kernel take a byte")
    if any(piece.size < 1 or piece.after_s < 0 for r in requests(world) for piece in r.pieces):
        raise ValueError("a piece has a byte at least, and comes after the one before")
    if any(not request.text for request in requests(world)):
        raise ValueError("a text has a character at least")
    return world


def requests(world: WebWorld) -> list[RequestPlan]:
    """Return the requests of all connections."""
    return [request for connection in world.connections for request in connection.requests]


KINDS: tuple[Kind, ...] = ("alive", "embed", "embed", "many", "wrong", "nowhere", "chunked")
LAST: tuple[Kind, ...] = ("close", "old", "malformed")


def draw(seed: int) -> WebWorld:
    """The world of a seed: each feature is in some of them only."""
    rng = random.Random(f"web {seed}")
    has = {
        name: rng.random() < 0.4 for name in ("pieces", "slow", "ahead", "lasts", "stalls", "leaves", "silent", "brink")
    }
    world = WebWorld(
        seed=seed,
        device_s=some(rng, 0.0, 0.0, 1.0, 5.0) * TICK_S,
        kernel_bytes=some(rng, 2**16, 2**16, 2048, 200),
        looks=rng.random() < 0.5,
        keep_alive_s=log_uniform(rng, 3, 100) * TICK_S,
        head_timeout_s=log_uniform(rng, 3, 50) * TICK_S,
        body_timeout_s=log_uniform(rng, 3, 50) * TICK_S,
        write_timeout_s=log_uniform(rng, 3, 50) * TICK_S,
    )
    count = 60 if has["silent"] and rng.random() < 0.1 else log_uniform(rng, 1, 8)
    for _ in range(count):
        plan = _connection(rng, has, is_silent=has["silent"] and rng.random() < 0.6)
        for request in plan.requests if has["brink"] else ():  # it comes when the connection's time is over
            if rng.random() < 0.4:
                request.pieces[0].after_s = world.keep_alive_s
            elif rng.random() < 0.3 and len(request.pieces) > 1:
                request.pieces[1].after_s = some(rng, world.head_timeout_s, world.body_timeout_s)
        world.connections.append(plan)
    if rng.random() < 0.1:
        world.ends_at = rng.randint(0, 40) * TICK_S
    return world


def _connection(rng: random.Random, has: Mapping[str, bool], *, is_silent: bool) -> ConnectionPlan:
    plan = ConnectionPlan(arrives_at=rng.randint(0, 10) * TICK_S, requests=[])
    for _ in range(1 if is_silent else log_uniform(rng, 1, 5)):
        request = RequestPlan(kind=rng.choice(KINDS), text="abcdefgh"[: rng.randint(1, 8)])
        if plan.requests and has["ahead"]:
            request.is_ahead = rng.random() < 0.7
        plan.requests.append(request)
    if has["lasts"] and rng.random() < 0.5:
        plan.requests.append(RequestPlan(kind=rng.choice(LAST)))
    for request in plan.requests:
        most = 60 if has["slow"] else 2
        first_s = rng.randint(0, most) * TICK_S
        if not has["pieces"]:
            request.pieces = [Piece(after_s=first_s)]
            continue
        cuts = sorted(rng.randint(1, len(request.data)) for _ in range(rng.randint(0, 3)))
        sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False) if b > a]
        request.pieces = [
            Piece(size, first_s if not n else rng.randint(0, most) * TICK_S) for n, size in enumerate(sizes)
        ]
        request.pieces.append(Piece(after_s=rng.randint(0, most) * TICK_S))
    last = plan.requests[-1]
    if is_silent or (has["stalls"] and rng.random() < 0.5):
        last.pieces = [Piece(rng.randint(1, len(last.data)), last.pieces[0].after_s)]
    if has["leaves"] and rng.random() < 0.6:
        plan.then = some(rng, "leaves", "resets")
        plan.then_after_s = some(rng, 0, 1, 3, 10) * TICK_S
    plan.reads = rng.random() < 0.9
    return plan
