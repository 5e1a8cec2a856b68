"""One engine under observation: what must hold while it runs, and when it has ended."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.lanes import IMAGE_CHUNK_ITEMS
from staged_pool.runtime.payloads import Payload, PreparedImage
from staged_pool.runtime.statistics import Phase
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.scheduling.entries import Batch
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.timeline import Timeline
from tests.sim import internals
from tests.sim.clock import clock
from tests.sim.internals import EPSILON
from tests.sim.world import SHARED_CORES, TICK_S, ClientPlan, Name, World

IDLE_S = 60.0
"""Idle seconds after which no ticket may be open."""

UNATTENDED_S = 0.0025
"""Maximum seconds that anything waits while nothing runs."""


class Left:
    """The outcome of a client that left."""


LEFT = Left()
Outcome: TypeAlias = object | Exception | Left

Scope: TypeAlias = tuple[str | None, str | None]
"""Return a client's tenant and salt, as far as they separate it from others."""


def payload_name(payload: Payload) -> Name:
    """Return the item that a payload is of."""
    ids = payload.pixels.values.tolist() if isinstance(payload, PreparedImage) else payload.ids
    return int(ids[0]), int(ids[1])


def payload_part(payload: Payload) -> int:
    """Return the part of its item that a payload is."""
    return 0 if isinstance(payload, PreparedImage) else payload.ids[2]


@dataclass(slots=True)
class WatchedTimeline(Timeline):
    """The timeline of one client, which identifies its ticket."""

    watch: Watch | None = None
    client: int = 0


def client_of(ticket: Ticket) -> int:
    """The number of the client whose ticket it is."""
    assert isinstance(ticket.timeline, WatchedTimeline)
    return ticket.timeline.client


class WatchedTicket(Ticket):
    """A ticket that reports when it settles. Stages see no difference."""

    __slots__ = ("times",)

    times: list[float]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.times = []
        self.watch.ticket_made(self)

    @property
    def watch(self) -> Watch:
        timeline = self.timeline
        assert isinstance(timeline, WatchedTimeline)
        assert timeline.watch is not None
        return timeline.watch

    def _settle(self) -> None:
        watch = self.watch
        self.times.append(watch.now())
        super()._settle()
        if len(self.times) > 1:
            watch.fail("a ticket has settled twice")
        watch.settled(self)


@dataclass
class Watch:
    """Observations of one engine. Each fault becomes a line of `violations`."""

    world: World
    verbose: bool = False
    now: Callable[[], float] = field(default_factory=clock)
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    engine: Engine | None = None
    tickets: dict[int, WatchedTicket] = field(default_factory=dict)
    """Last ticket of each client."""
    all_tickets: list[WatchedTicket] = field(default_factory=list)
    reservations: dict[int, object] = field(default_factory=dict)
    """Requests that admission counts as in flight, by identity."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    settled_at: dict[int, float] = field(default_factory=dict)
    """Time of each client's outcome."""
    left_at: dict[int, float] = field(default_factory=dict)
    """Time at which a client was made to leave while its items were handed over."""
    crashed_at: dict[str, list[float]] = field(default_factory=dict)
    """Injected crashes of each stage."""
    unsupervised: set[float] = field(default_factory=set)
    """Times of crashes of feeders. These are not restarted, and do not count against the limit."""
    busy_until: float = 0.0
    """The last moment at which anything is known to happen."""
    all_done: anyio.Event = field(default_factory=anyio.Event)
    device_calls: int = 0
    on_device: Counter[Lane] = field(default_factory=Counter)
    fetching: Counter[int] = field(default_factory=Counter)
    """Fetches that run, by client."""
    device_lost_at: float = math.inf
    too_much: dict[Lane, tuple[int, float]] = field(default_factory=dict)
    """Tokens of a lane that did not fit into the device's memory, and when. Cleared when the next batch is cut, or when
    another batch fits."""
    no_room_for: dict[int, Payload] = field(default_factory=dict)
    """Payloads of batches that the device had no room for, by identity."""
    preprocess_calls: int = 0
    preprocessing: int = 0
    started: set[tuple[int, int]] = field(default_factory=set)
    """Items that preprocess has begun: client and index."""
    stopping_at: float = math.inf
    """Time of the host's first request to drain, to end or to stop."""
    drains_until: float = math.inf
    """Time at which the host's grace for requests in flight ends."""
    cancelled_at: float = math.inf
    """Time at which an error or a cancellation left the host's block."""

    @property
    def stops_at(self) -> float:
        """The latest time at which the engine stops: it waits for what runs then, but not for ever."""
        return min(self.drains_until, self.cancelled_at)

    ended: bool = False
    """The engine's block has been left."""
    worked_on: set[tuple[Scope, Name]] = field(default_factory=set)
    """Items that went into a batch, each with the sharing scope of its row."""
    at_hand: int = 0
    """Calls, fetches and delays that run."""
    open: int = 0
    """Tickets."""
    unattended_since: float = math.inf
    """Time since which tickets are open and nothing runs; infinite otherwise."""
    device_idle_since: float = 0.0
    most_wanted: int = 0
    """Maximum of tokens that waited for the device and belonged to open tickets."""
    image_calls: int = 0
    """Calls that prepare images."""
    core_free_since: float = 0.0

    def note(self, text: str, *values: object) -> None:
        """A line of the trace, with the time in milliseconds. The text has a {} for each value."""
        if self.verbose:
            self.trace.append(f"{self.now() * 1000:10.1f}  {text.format(*values)}")

    def fail(self, text: str) -> None:
        self.violations.append(f"{text} (at {self.now() * 1000:.0f} ms)")
        self.note("VIOLATION: {}", text)

    def active(self, for_s: float = 0.0) -> None:
        """Note an event that lasts for some seconds."""
        self.busy_until = max(self.busy_until, self.now() + for_s)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Something runs, or is held up on purpose: until the end of the block nobody can say that nothing happens."""
        self.active()
        self.at_hand += 1
        self._look()
        try:
            yield
        finally:
            self.at_hand -= 1
            self._look()
            self.active()

    def _look(self) -> None:
        """Check for open tickets while nothing runs."""
        now = self.now()
        if self.at_hand or not self.open:
            if now - self.unattended_since > UNATTENDED_S + self._pauses_s() + EPSILON:
                self.fail(f"requests waited for {now - self.unattended_since:.3g} s while nothing ran")
            self.unattended_since = math.inf
        elif self.unattended_since == math.inf:
            self.unattended_since = now

    def _pauses_s(self) -> float:
        """Sum the pauses of crashed workers before their restarts, in seconds.

        After each a batch may wait for what was lost with the worker.
        """
        first_s = self.world.first_delay_s
        return sum(
            min(2.0, first_s * 2.0**n) + self._batch_wait_s()
            for times in self.crashed_at.values()
            for n in range(len(times))
        )

    def _batch_wait_s(self) -> float:
        """Longest wait of a batch for more items: less than a forward takes, which ends on the grid of the world."""
        return self.world.forward_s + (self.world.device_ticks + self.world.align_ticks) * TICK_S

    # ---- what the doubles tell while the world runs ----

    def ticket_made(self, ticket: WatchedTicket) -> None:
        self.tickets[client_of(ticket)] = ticket
        self.all_tickets.append(ticket)
        self.open += 1
        self._look()

    def settled(self, ticket: WatchedTicket) -> None:
        """Check a ticket at its outcome. An answered one has no tokens on the device."""
        self.open -= 1
        self._look()
        if ticket.error is None and abs(tokens := internals.tokens_of(ticket)) > EPSILON:
            self.fail(f"an answered request still counts {tokens:g} tokens")

    def rejected(self, error: Exception, others: int) -> None:
        """Check a rejection: another request must be in flight."""
        if isinstance(error, Overloaded) and not others:
            self.fail(f"an empty engine rejects: {error}")

    def fetch_starts(self, number: int) -> None:
        if self._unwanted(number):
            self.fail(f"a fetch began for client {number}, which does not wait")
        if self.ended:
            self.fail("a fetch began after the engine had ended")
        most = self.world.config.media_limit * 3  # images of an input
        if sum(self.fetching.values()) >= most:
            self.fail(f"more than {most} fetches at once")

    def fetch_ends(self, number: int) -> None:
        """Check the end of a fetch: at the latest with its request."""
        times = self.tickets[number].times
        if times and self.now() > times[0] + EPSILON:
            self.fail(f"client {number} had its outcome, and a fetch of it ran on for {self.now() - times[0]:g} s")

    def preprocess_starts(self, items: Sequence[tuple[int, int]], is_of_one_lane: bool, lane: Lane) -> None:
        if not is_of_one_lane:
            self.fail(f"{items} are not all for the {lane} lane")
        if lane == "image" and len(items) > IMAGE_CHUNK_ITEMS:
            self.fail(f"{len(items)} images in one call")
        for item in items:
            if item in self.started:
                continue  # a repetition, because another item of the call has failed
            self.started.add(item)
            if self._unwanted(item[0]):
                self.fail(f"preprocess began item {item}, which nobody waits for")
        if self.ended:
            self.fail("preprocess began after the engine had ended")

    def batch_formed(self, lane: Lane, batch: Batch[Item[Payload]], waiting_tokens: int, *, in_hand: int) -> None:
        items, config, now = batch.items, self.world.config, self.now()
        if in_hand > self.world.slots:
            self.fail(f"a batch was cut while {in_hand} others were in hand")
        for item in items:
            if item.ticket.settled or item.ticket.deadline < now - EPSILON:
                self.fail(f"item {payload_name(item.payload)} entered a batch, and nobody waits for it")
        work = {
            (item.ticket, payload_name(item.payload), payload_part(item.payload), item.payload.outputs)
            for item in items
        }
        self.worked_on |= {(self.scope_of(ticket), name) for ticket, name, _, _ in work}
        if config.coalesce and len(work) < len(items):
            self.fail("a batch has the same work of a request twice")
        token_counts = [item.tokens for item in items]
        tokens = max(token_counts) * len(token_counts) if self.world.pads else sum(token_counts)
        if tokens != batch.tokens or (tokens > config.batch_tokens("cpu") and len(items) > 1):
            self.fail(
                f"a batch of {tokens} tokens; it says {batch.tokens}, and {config.batch_tokens('cpu')} are allowed"
            )
        if len(items) > config.max_batch_items:
            self.fail(f"a batch of {len(items)} items")
        too_much, since = self.too_much.get(lane, (math.inf, now))
        if now > since + EPSILON and not in_hand:  # that batch is over
            if tokens >= too_much and len(items) > 1:
                self.fail(f"a batch of {tokens} tokens, when the device has just had no room for {too_much}")
            del self.too_much[lane]
        if len({item.batch_key for item in items}) > 1:
            self.fail("a batch of several keys")
        if waiting_tokens > config.waiting_tokens + self._underestimated():
            self.fail(f"{waiting_tokens} tokens wait for the device")
        # Answers that take their time hold up the device, through bounded channels, as they are meant to.
        if self.world.liveness and not self.world.codec_ticks and not self.on_device.total():
            since = max(self.device_idle_since, min(item.sent_at for item in items))
            if self.world.shares_cores and lane == "image":
                since = max(since, self.core_free_since)
            if now - since > UNATTENDED_S + self._batch_wait_s():
                self.fail(f"an item waited for {now - since:.3g} s while the device was idle")

    def unwanted_tokens(self, waits: int, wanted: int) -> None:
        """Note the tokens that wait for the device, and those of them that are wanted."""
        self.most_wanted = max(self.most_wanted, wanted)
        if waits > 2 * max(self.world.config.waiting_tokens, self.most_wanted) + self._underestimated():
            self.fail(f"{waits} tokens wait for the device, of which {wanted} are wanted")

    def _underestimated(self) -> int:
        """Tokens of inputs on their way to the device: estimates of them may be too low so far."""
        config = self.world.config
        most = max((item.tokens * item.parts for item in self.world.contents.values()), default=0)
        lists = 2 * config.channel_capacity + config.preprocess_limit + config.image_preprocess_threads + 2
        return lists * config.chunk_items * most

    def scope(self, client: ClientPlan) -> Scope:
        return None if self.world.config.share_between_tenants else client.tenant, client.salt

    def scope_of(self, ticket: Ticket) -> Scope:
        return self.scope(self.world.by_number[client_of(ticket)])

    def suffix_of(self, items: object) -> str:
        """Return the suffix of the stage names of the items' lane."""
        assert isinstance(items, Sequence)
        item = items[0]
        client = self.world.by_number[client_of(item.ticket)]
        return "_images" if client.items[item.index].images else ""

    def _unwanted(self, number: int) -> bool:
        ticket = self.tickets.get(number)
        return ticket is None or ticket.settled or ticket.deadline < self.now() - EPSILON

    def device_starts(self, lane: Lane) -> None:
        if self.on_device[lane] >= self.world.slots:
            self.fail(f"{self.on_device[lane] + 1} batches on the device")
        if self.now() > self.cancelled_at + EPSILON:
            self.fail("a forward began after the engine had been stopped")
        if self.ended:
            self.fail("a forward began after the engine had ended")
        self.on_device[lane] += 1

    def device_ends(self, lane: Lane) -> None:
        self.on_device[lane] -= 1
        self.device_idle_since = self.now()

    @contextlib.contextmanager
    def preparing_images(self) -> Iterator[None]:
        """A call that prepares images, and has one of the cores."""
        self.image_calls += 1
        try:
            yield
        finally:
            if self.image_calls + self.on_device["image"] >= SHARED_CORES:
                self.core_free_since = self.now()
            self.image_calls -= 1

    def most_payloads(self) -> int | None:
        """Most payloads of a forward that the device has room for now; None for any number."""
        world = self.world
        return world.out_of_memory_above if world.memory_short_from <= self.now() < world.memory_short_until else None

    def out_of_memory(self, lane: Lane, tokens: int, payloads: Sequence[Payload]) -> None:
        """Note a batch that did not fit into memory, though each of its items does.

        The budget follows from the whole batch, so its halves, which come later, count for nothing.
        """
        if self._is_part(payloads):
            return
        too_much, _ = self.too_much.get(lane, (tokens, 0.0))
        self.too_much[lane] = max(too_much, tokens), self.now()
        self.no_room_for |= {id(payload): payload for payload in payloads}

    def had_room(self, lane: Lane, payloads: Sequence[Payload]) -> None:
        """A forward succeeded. If it was no part of one that failed, the budget may be as large as before."""
        if lane in self.too_much and not self._is_part(payloads):
            del self.too_much[lane]

    def _is_part(self, payloads: Sequence[Payload]) -> bool:
        """True for a part of a batch that the device had no room for."""
        return all(id(payload) in self.no_room_for for payload in payloads)

    def past(self, moment: float) -> bool:
        return self.now() >= moment - EPSILON

    def may_be_broken(self) -> bool:
        """True if the engine has a reason to break."""
        return self.past(self.device_lost_at) or self.broken_at() < math.inf

    def broken_at(self) -> float:
        """Time at which a stage crashed once too often within the window; infinite if none has."""
        restarts = self.world.restarts
        most, window_s = restarts.max_crashes, restarts.window_s
        return min(
            (
                last
                for each in self.crashed_at.values()
                for times in [[time for time in each if time not in self.unsupervised]]
                for first, last in zip(times, times[most:], strict=False)
                if last - first < window_s
            ),
            default=math.inf,
        )

    def admission_adds_up(self) -> None:
        """Check that the count of admission is the sum over the requests in flight."""
        if self.engine is not None:
            for wrong in internals.admission_differs(self.engine, self.reservations):
                self.fail(wrong)

    def drained(self, began_at: float, timeout_s: float) -> None:
        """`Engine.drain` has returned: nothing is open, and it has waited no longer than it had to."""
        self.note("drain has returned")
        engine = self.engine
        if engine is None:
            return
        left = internals.tickets_of(engine)
        if any(not ticket.settled for ticket in left):
            self.fail("drained, and a request is open")
        latest = began_at + timeout_s
        if not left and not any(client.tokenizes for client in self.world.clients):  # every caller has left already
            latest = min(latest, max([began_at, *(t.times[0] for t in self.all_tickets if t.times)]))
        if self.now() > latest + EPSILON:
            self.fail(f"a drain took {self.now() - began_at:g} s")

    def check_quiet(self) -> None:
        """Check the world after a minute of virtual time without events."""
        if unsettled := [c.number for c in self.world.clients if c.number not in self.outcomes]:
            self.fail(f"idle for {IDLE_S:g} s, and clients {unsettled} still wait")
        if self.engine is not None and self.may_be_broken() and self.engine.phase is not Phase.STOPPED:
            self.fail("the engine goes on, though it is broken")

    # ---- when all is over ----

    def check_engine_ended(self) -> None:
        """Check the engine at the end of its block."""
        self.ended = True
        engine = self.engine
        if engine is None:
            self.fail("the engine never started")
            return
        if engine.phase is not Phase.STOPPED:
            self.fail(f"the engine has ended and is {engine.phase}")
        if any(not ticket.settled for ticket in self.all_tickets):
            self.fail("the engine has ended, and a ticket is open")
        config = self.world.config
        lowered = [budget for budget in internals.budgets(engine) if budget != config.batch_tokens("cpu")]
        if lowered and self.world.out_of_memory_above is None and config.target_batch_s is None:
            self.fail(f"batches may have {lowered} tokens, and no batch was too large")
        latest = self.stops_at + max(config.preprocess_alarm_s, config.watchdog_s) + config.watchdog_s
        if self.now() > latest + EPSILON:
            self.fail(f"the engine's end took {self.now() - self.stops_at:g} s")
        if self.on_device.total() and self.device_lost_at == math.inf:
            self.fail("the engine has ended with a batch on the device")
        if self.preprocessing:
            self.fail("the engine has ended with preprocess at work")
        for wrong in (*internals.left_in_channels(engine), *internals.left_on_device(engine)):
            self.fail(wrong)
        if self.cancelled_at == math.inf and not self.may_be_broken():
            for name in internals.left_waiting(engine):
                self.fail(f"everything has passed, and {name} holds something")
        for name, crashes in internals.crashes(engine).items():
            times = self.crashed_at.get(name, ())
            least = sum(time not in self.unsupervised for time in times)  # two tasks of a feeder are one crash
            if not least <= crashes <= len(times):
                self.fail(f"{name} crashed {crashes} times, and was made to {len(times)} times")
        for name, busy in internals.busy_workers(engine).items():
            if busy:
                self.fail(f"{name} counts {busy} busy workers")

    def check_world_ended(self) -> None:
        """Check the engine after the end of every task."""
        for client in self.world.clients:
            if client.number not in self.outcomes:
                self.fail(f"client {client.number} has no outcome")
        if self.engine is None:
            return
        if internals.tickets_of(self.engine):
            self.fail("tickets are left")
        if waiting := internals.left_in_front(self.engine):
            self.fail(f"all clients have their outcomes, and {waiting} requests wait for room")
        if internals.left_in_admission(self.engine) or self.reservations:
            self.fail("the engine is empty, and admission counts something")
        if self.fetching.total() or internals.fetches_left(self.engine):
            self.fail("all clients have their outcomes, and fetches run on")
