"""Run of one world of connections, with the expected answers and their deadlines."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from staged_pool.api.app.app import Application
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.accept import Acceptor
from staged_pool.api.http.connection_lifecycle import Service
from staged_pool.api.http.connections import FAST_BODY_S, Connection
from staged_pool.api.http.fast_path import FastPath
from staged_pool.api.http.general_path import GeneralPath
from staged_pool.api.http.server import Server
from staged_pool.api.limits.server_state import GRACE_S
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.stages.stage import StageOptions
from tests.sim.clock import Backend, Stuck, clock, run
from tests.sim.running import LOGGED, SLIPS, Report, run_block, slips
from tests.sim.web.plan import ConnectionPlan, RequestPlan, WebWorld, draw, from_json, requests
from tests.sim.web.wire import FakeSocket, FakeTransport, Wire
from tests.sim.world import TICK_S
from tests.support.model import LetterModel

A = TypeVar("A")
T = TypeVar("T")

SLACK_S = 0.02
"""Slack of every bound: some iterations of the event loop, and the batch delay."""

HANG_S = 300.0


async def _at_once(function: Callable[[A], T], argument: A, /) -> T:
    await anyio.lowlevel.checkpoint()
    return function(argument)


@dataclass
class Sent:
    """A request that a client has sent, or part of it."""

    plan: RequestPlan
    begun_at: float
    offset: int
    """Bytes of the connection before it."""
    whole_at: float = math.inf
    """Time at which its last byte was delivered."""
    head_at: float = math.inf
    answered_at: float = math.inf


@dataclass
class Client:
    """One client at its connection."""

    number: int
    plan: ConnectionPlan
    wire: Wire
    now: Callable[[], float]
    violations: list[str]
    sent: list[Sent] = field(default_factory=list)
    answers: int = 0
    closed_at: float = math.inf
    last_byte_at: float = 0.0
    delivered: int = 0
    answered: anyio.Event = field(default_factory=anyio.Event)

    def fail(self, text: str) -> None:
        self.violations.append(f"connection {self.number}: {text} (at {self.now() * 1000:.0f} ms)")

    async def write(self) -> None:
        """Send every request, then act as planned."""
        for plan in self.plan.requests:
            while not plan.is_ahead and self.answers < len(self.sent) and not self.wire.is_closed and self.plan.reads:
                await self.answered.wait()
            if self.wire.is_closed:
                break
            await self._write_one(plan)
            if not plan.is_whole:
                break
        if self.plan.then != "waits":
            await anyio.sleep(self.plan.then_after_s)
            self.wire.end(by_reset=self.plan.then == "resets")

    async def _write_one(self, plan: RequestPlan) -> None:
        data, head_bytes = plan.data, plan.data.find(b"\r\n\r\n") + 4
        start = 0
        for number, piece in enumerate(plan.pieces):
            await anyio.sleep(piece.after_s)
            if self.wire.is_closed:
                return
            if number == 0:
                self.sent.append(Sent(plan, self.now(), self.delivered))
            part = data[start : start + piece.size]
            start += len(part)
            if start >= head_bytes:
                self.sent[-1].head_at = min(self.sent[-1].head_at, self.now())
            if start >= len(data):
                self.sent[-1].whole_at = self.now()
            self.last_byte_at = self.now()
            self.delivered += len(part)
            self.wire.deliver(part)
            if start >= len(data):
                return

    async def read(self) -> None:
        """Read answers, until the connection is closed."""
        left = b""
        while self.plan.reads:
            data = await self.wire.read()
            if not data:
                break
            left += data
            while (answer := _answer(left)) is not None:
                status, body, size = answer
                left = left[size:]
                self._take(status, body)
        while not self.wire.is_closed and not self.wire.is_reset:
            await self.wire.moves()
        self.closed_at = self.now()
        self.answered.set()
        if left and not self.wire.is_cut and not self.wire.is_reset:
            self.fail(f"it was closed within an answer: {left[:60]!r}")

    def _take(self, status: int, body: bytes) -> None:
        if self.answers >= len(self.sent):
            if status != 408:
                self.fail(f"an answer to no request: {status}")
            self.answers += 1
            return
        sent = self.sent[self.answers]
        self.answers += 1
        sent.answered_at = self.now()
        plan = sent.plan
        if sent.whole_at == math.inf and plan.kind != "malformed":
            if status not in (400, 408):
                self.fail(f"an answer of {status} to a request that is not whole")
        elif status != plan.status and not self._is_late(sent, status):
            self.fail(f"a request of kind {plan.kind} was answered {status}: {body[:100]!r}")
        elif status == 200 and plan.texts:
            self._check_vectors(plan, body)
        answered, self.answered = self.answered, anyio.Event()
        answered.set()

    def _is_late(self, sent: Sent, status: int) -> bool:
        return status in (408, 503)

    def _check_vectors(self, plan: RequestPlan, body: bytes) -> None:
        want = [len(plan.text), sum(map(ord, plan.text)), ord(plan.text[0]), ord(plan.text[-1])]
        got = [each["embedding"] for each in json.loads(body)["data"]]
        if got != [want] * plan.texts:
            self.fail(f"the vectors of {plan.text!r} are {got[:2]}")


def _answer(data: bytes) -> tuple[int, bytes, int] | None:
    """The first answer: its status, its body, and its bytes; None while it is not whole."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(headers.get(b"content-length", b"0"))
    if len(rest) < length:
        return None
    return int(head.split(b" ")[1]), rest[:length], len(head) + 4 + length


async def _serve(world: WebWorld, violations: list[str], clients: list[Client]) -> None:
    now = clock()

    async def device(function: Callable[[A], T], argument: A, /) -> T:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(world.device_s)
        return function(argument)

    config = EngineConfig(max_batch_items=4)
    options = StageOptions(clock=now)
    async with run_engine(
        config, LetterModel(), device=device, preprocess=_at_once, offload=_at_once, options=options
    ) as engine:
        server, service = _build_server(world, engine)
        async with anyio.create_task_group() as tasks:
            if world.ends_at is not None:
                tasks.start_soon(_end, world.ends_at, server)
            for number, plan in enumerate(world.connections):
                client = Client(number, plan, Wire(world.kernel_bytes), now, violations)
                clients.append(client)
                tasks.start_soon(_connect, client, service)
        _check_end(world, server, engine, violations)
    for client in clients:
        _check(world, client)


async def _end(at: float, server: Server) -> None:
    await anyio.sleep(at)
    server.registry.close("the server is draining")
    server.state.end()


async def _connect(client: Client, service: Service) -> None:
    await anyio.sleep(client.plan.arrives_at)
    async with anyio.create_task_group() as tasks:
        accepted: Any = FakeSocket(client.wire)
        tasks.start_soon(Connection(service).run, accepted)
        tasks.start_soon(client.read)
        with anyio.move_on_after(HANG_S) as hang:
            await client.write()
            while not client.wire.is_closed:
                await client.wire.moves()
        if hang.cancelled_caught:
            client.fail("it is never closed")
            tasks.cancel_scope.cancel()


def _build_server(world: WebWorld, engine: Engine) -> tuple[Server, Service]:
    """Build the real server with its limits, on simulated connections."""
    config = ServerConfig(
        keep_alive_s=world.keep_alive_s,
        head_timeout_s=world.head_timeout_s,
        body_timeout_s=world.body_timeout_s,
        write_timeout_s=world.write_timeout_s,
        access_log=False,
    )
    server = Server(config, [EngineConfig()])
    server.registry.open(engine)
    application = Application(server.registry, server.state, config)
    settings = server._hypercorn_config()
    fast_path = FastPath(application, lambda: settings.response_headers("h11"))
    acceptor = Acceptor(GeneralPath.before(application), fast_path, settings, None)
    opener: Any = FakeTransport.opener(looks=world.looks)
    return server, replace(acceptor._service, open=opener)


def _check_end(world: WebWorld, server: Server, engine: Engine, violations: list[str]) -> None:
    """Check, after the last connection, that everything it held is freed."""
    state = server.state
    for what, count in (
        ("connections", state.connections),
        ("requests", state.requests),
        ("bytes of bodies", state.body_bytes),
        ("requests in the engine", engine.statistics().admission.requests),
    ):
        if count:
            violations.append(f"all connections are closed, and {count} {what} are counted")


def engine_s(world: WebWorld) -> float:
    """Return the time of the engine for all requests together, in seconds."""
    return SLACK_S + world.device_s * (sum(request.texts for request in requests(world)) + 2)


def _check(world: WebWorld, client: Client) -> None:
    """Check that each request that was whole in time has an answer. The connection closed in time, too."""
    plan, bound_s = client.plan, engine_s(world)
    ends_at = math.inf if world.ends_at is None else world.ends_at
    if plan.then == "waits" and plan.reads:  # else its answers are unknown
        _check_answers(world, client, bound_s, ends_at)
    limits = world.keep_alive_s, world.head_timeout_s, world.body_timeout_s + FAST_BODY_S + GRACE_S
    timeout_s = max(limits) + (world.write_timeout_s + bound_s) * (len(client.sent) + 1)
    if client.closed_at > max(client.last_byte_at, plan.arrives_at) + timeout_s:
        client.fail(f"it was closed {client.closed_at - client.last_byte_at:g} s after its last byte")
    if client.closed_at > ends_at + GRACE_S * 2 + timeout_s:
        client.fail("it outlived the server's end")


def _check_answers(world: WebWorld, client: Client, bound_s: float, ends_at: float) -> None:
    """Check a client's answers. Behind a timeout, only received requests must be answered."""
    ready_at = client.plan.arrives_at
    for number, sent in enumerate(client.sent):
        in_time = (
            sent.begun_at - ready_at <= world.keep_alive_s - TICK_S / 2
            and sent.head_at - sent.begun_at <= world.head_timeout_s - TICK_S / 2
            and sent.whole_at - max(sent.head_at, ready_at) <= world.body_timeout_s - TICK_S / 2
        )
        received = client.wire.received >= sent.offset + len(sent.plan.data)
        if sent.whole_at == math.inf or not (in_time or received):
            return
        latest = max(sent.whole_at, ready_at) + bound_s
        if sent.answered_at > latest and ends_at > latest:
            after = (
                "has no answer"
                if sent.answered_at == math.inf
                else f"waited for {sent.answered_at - sent.whole_at:g} s"
            )
            client.fail(f"request {number} of kind {sent.plan.kind} {after}")
        if sent.plan.ends_connection or sent.answered_at == math.inf:
            return
        ready_at = max(sent.answered_at, sent.whole_at)


def run_web(world: WebWorld, backend: Backend) -> Report:
    """Run a world of connections. Call it inside `prepared()`."""
    violations: list[str] = []
    clients: list[Client] = []

    async def main() -> None:
        with anyio.fail_after(HANG_S * 2):
            await _serve(world, violations, clients)

    LOGGED.clear()
    SLIPS.clear()
    try:
        violations += [f"never retrieved: {error}" for error in run(main, backend=backend, seed=world.seed)]
    except (Stuck, Exception) as error:  # noqa: BLE001  # whatever leaves the program is a finding
        SLIPS.extend(slips(error))
        violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    if failed := LOGGED["connection.failed"]:
        violations.append(f"{failed} connections failed")
    violations += [f"a slip: {slip}" for slip, _ in SLIPS]
    own_errors = tuple(slip for slip, is_of_a_mutant in SLIPS if is_of_a_mutant)
    answers = Counter({"answered": sum(client.answers for client in clients)})
    return Report(world.seed, backend, tuple(violations), (), answers, own_errors)


def run_web_seed(seed: int, backend: Backend) -> Report:
    """Run the world of a seed."""
    return run_web(draw(seed), backend)


def run_web_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_web(from_json(given), backend)


def run_web_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, run_web_seed)
