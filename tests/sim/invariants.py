"""What must hold in every world: watched while it runs, and checked when it has ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from staged_pool.runtime.engine import Engine
from staged_pool.runtime.inside import LIMITS, Room
from staged_pool.runtime.lanes import IMAGE_CHUNK_ITEMS
from staged_pool.runtime.model import Lane, Payload, Picture
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.statistics import Phase
from staged_pool.stages.errors import (
    Abandoned,
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    MediaUnavailable,
    ModelFailed,
    OutOfMemory,
    Overloaded,
    StageFailed,
    TooLarge,
    UnusableMedia,
)
from staged_pool.stages.ticket import Ticket, Timeline
from staged_pool.stages.work import Batch
from tests.sim.clock import clock
from tests.sim.world import ClientPlan, World

IDLE_S = 60.0
"""A world in which nothing has happened for so long must have nothing unsettled."""

HANG_S = 300.0
"""A world that lasts longer has hung."""

EPSILON = 1e-6

Name: TypeAlias = tuple[int, int]
"""An item: the number of its client, and its index there."""


class Left:
    """The outcome of a client that left."""


LEFT = Left()
Outcome: TypeAlias = object | Exception | Left


def vector(name: Name, cost: int) -> list[float]:
    """What the model answers for an item; no two items of a world have the same, but for those that repeat others."""
    return [name[0], name[1], cost, name[0] * 1000 + name[1]]


def payload_name(payload: Payload) -> Name:
    """Which item a payload is of."""
    ids = payload.pixels.values.tolist() if isinstance(payload, Picture) else payload.ids
    return int(ids[0]), int(ids[1])


Scope: TypeAlias = tuple[str | None, str | None]
"""Tenant and salt of a client, as far as they keep it apart from others."""


class WatchedTicket(Ticket):
    """A ticket that says when it settles. Stages see no difference."""

    __slots__ = ("times", "watch")

    watch: Watch
    times: list[float]

    def _settle(self) -> None:
        self.times.append(self.watch.now())
        super()._settle()
        if len(self.times) > 1:
            self.watch.fail("a ticket has settled twice")
        if self._error is None:
            self.watch.resolved(self)


@dataclass
class Watch:
    """One run under observation. Everything that is wrong becomes a line of `violations`."""

    world: World
    verbose: bool = False
    now: Callable[[], float] = field(default_factory=clock)
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    engine: Engine | None = None
    tickets: dict[int, WatchedTicket] = field(default_factory=dict)
    """By the identity of their timelines, which the clients know."""
    timelines: dict[int, Timeline] = field(default_factory=dict)
    """By client."""
    rooms: dict[int, Room] = field(default_factory=dict)
    """Everything that admission counts as inside, by identity."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    settled_at: dict[int, float] = field(default_factory=dict)
    """When each client had its outcome."""
    crashed_at: dict[str, list[float]] = field(default_factory=dict)
    """Injected crashes of each stage."""
    busy_until: float = 0.0
    """The last moment at which anything is known to happen."""
    all_done: anyio.Event = field(default_factory=anyio.Event)
    device_calls: int = 0
    on_device: Counter[Lane] = field(default_factory=Counter)
    fetching: Counter[int] = field(default_factory=Counter)
    """Fetches that run, by client."""
    device_lost_at: float = math.inf
    most_items: dict[Lane, int] = field(default_factory=lambda: {"text": 10**9, "image": 10**9})
    """Of a batch of a lane, as the device's memory has taught."""
    preprocess_calls: int = 0
    preprocessing: int = 0
    started: set[Name] = field(default_factory=set)
    """Items that preprocess has begun."""
    stopping_at: float = math.inf
    """When the host first asked the engine to drain, to end or to stop."""
    drains_until: float = math.inf
    """Until when the host gives those inside time to be done."""
    cancelled_at: float = math.inf
    """When the host's block was left by an error or a cancellation."""
    ended: bool = False
    """Whether the engine's block has been left."""
    worked_on: set[tuple[Scope, Name]] = field(default_factory=set)
    """Items that went into a batch, each with the scope that its row may be shared in."""

    def note(self, text: str, *values: object) -> None:
        """A line of the trace, with the time in milliseconds. The text has a {} for each value."""
        if self.verbose:
            self.trace.append(f"{self.now() * 1000:10.0f}  {text.format(*values)}")

    def fail(self, text: str) -> None:
        self.violations.append(f"{text} (at {self.now() * 1000:.0f} ms)")
        self.note("VIOLATION: {}", text)

    def active(self, for_s: float = 0.0) -> None:
        """Something happens, and goes on for so long."""
        self.busy_until = max(self.busy_until, self.now() + for_s)

    # ---- what the harness tells while the world runs ----

    def ticket_made(self, ticket: WatchedTicket) -> None:
        self.tickets[id(ticket.timeline)] = ticket

    def ticket_of(self, number: int) -> WatchedTicket | None:
        timeline = self.timelines.get(number)
        return None if timeline is None else self.tickets.get(id(timeline))

    def resolved(self, ticket: WatchedTicket) -> None:
        """It is answered: all its items have left the device, so none of its tokens may be inside."""
        room = ticket.load
        if isinstance(room, Room) and abs(room.tokens) > EPSILON:
            self.fail(f"an answered request still counts {room.tokens:g} tokens")

    def refused(self, error: Exception, others: int) -> None:
        """Admission says no: that takes somebody else to be inside."""
        if isinstance(error, Overloaded) and not others:
            self.fail(f"an empty engine refuses: {error}")

    def fetch_starts(self, name: Name) -> None:
        if self._unwanted(name[0]):
            self.fail(f"a fetch began for item {name}, which nobody waits for")
        if self.ended:
            self.fail("a fetch began after the engine had ended")
        most = self.world.config.media_limit * 3  # pictures of an input
        if sum(self.fetching.values()) >= most:
            self.fail(f"more than {most} fetches at once")

    def preprocess_starts(self, names: Sequence[Name], is_of_one_lane: bool, lane: Lane) -> None:
        if not is_of_one_lane:
            self.fail(f"{names} are not all for the {lane} lane")
        if lane == "image" and len(names) > IMAGE_CHUNK_ITEMS:
            self.fail(f"{len(names)} pictures in one call")
        for name in names:
            if name in self.started:
                continue  # a repetition, because another item of the call has failed
            self.started.add(name)
            if self._unwanted(name[0]):
                self.fail(f"preprocess began item {name}, which nobody waits for")
        if self.ended:
            self.fail("preprocess began after the engine had ended")

    def batch_formed(self, lane: Lane, batch: Batch[Payload], waiting_cost: int, *, in_hand: int) -> None:
        items, config = batch.items, self.world.config
        if in_hand > self.world.slots + 1:  # one is handed to postprocess while the device goes on with another
            self.fail(f"a batch was cut while {in_hand} others were in hand")
        for item in items:
            if item.ticket.settled or item.ticket.deadline < self.now() - EPSILON:
                self.fail(f"item {payload_name(item.payload)} entered a batch, and nobody waits for it")
        work = {(self._scope_of(item.ticket), payload_name(item.payload)) for item in items}
        self.worked_on |= work
        if config.coalesce and len(work) < len(items):
            self.fail("a batch has the same work twice")
        costs = [item.cost for item in items]
        cost = max(costs) * len(costs) if self.world.pads else sum(costs)
        if cost != batch.cost or (cost > config.batch_tokens("cpu") and len(items) > 1):
            self.fail(f"a batch of {cost} tokens; it says {batch.cost}, and {config.batch_tokens('cpu')} are allowed")
        if len(items) > min(config.max_batch_items, self.most_items[lane]):
            self.fail(f"a batch of {len(items)} items")
        if len({item.batch_key for item in items}) > 1:
            self.fail("a batch of several keys")
        list_cost = 2 * config.chunk_items * 6
        if waiting_cost > config.waiting_tokens + list_cost:
            self.fail(f"{waiting_cost} tokens in the waiting room")

    def _scope(self, client: ClientPlan) -> Scope:
        return None if self.world.config.share_between_tenants else client.tenant, client.salt

    def _scope_of(self, ticket: Ticket) -> Scope:
        timelines = self.timelines.items()
        return next(self._scope(self.world.clients[k]) for k, timeline in timelines if timeline is ticket.timeline)

    def _unwanted(self, number: int) -> bool:
        ticket = self.ticket_of(number)
        return ticket is None or ticket.settled or ticket.deadline < self.now() - EPSILON

    def device_starts(self, lane: Lane) -> None:
        if self.on_device[lane] >= self.world.slots:
            self.fail(f"{self.on_device[lane] + 1} batches on the device")
        if self.now() > self.cancelled_at + EPSILON:
            self.fail("a forward began after the engine had been stopped")
        if self.ended:
            self.fail("a forward began after the engine had ended")

    def outcome(self, client: ClientPlan, outcome: Outcome) -> None:
        """A client has its outcome: the only one, in time, and one that this world explains."""
        number = client.number
        self.note("client {}: {}", number, _Named(outcome))
        self.active()
        if number in self.outcomes:
            self.fail(f"client {number} has two outcomes")
        self.outcomes[number] = outcome
        if self.fetching[number]:
            self.fail(f"client {number} has its outcome, and {self.fetching[number]} fetches of it run on")
        self.settled_at[number] = self.now()
        if not client.tokenizes:
            self._in_time(client)
            ticket = self.ticket_of(number)
            if ticket is not None:
                if not ticket.settled:
                    self.fail(f"client {number} has its outcome, and its ticket is open")
                elif self.now() > ticket.times[0] + EPSILON:
                    self.fail(f"client {number} heard of its outcome after {self.now() - ticket.times[0]:g} s")
        if wrong := self._unexplained(client, outcome):
            self.fail(f"client {number}: {_Named(outcome)}: {wrong}")
        self.admission_adds_up()
        if len(self.outcomes) == len(self.world.clients):
            self.all_done.set()

    def _in_time(self, client: ClientPlan) -> None:
        began = client.arrives_at
        latest = min(began + client.timeout_s, began + client.host_timeout_s, client.leaves_at)
        if self.now() > latest + EPSILON:
            self.fail(f"client {client.number} had to wait until after {latest * 1000:.0f} ms")

    def _unexplained(self, client: ClientPlan, outcome: Outcome) -> str | None:
        """Why this outcome is wrong; None if it is right."""
        match outcome:
            case EmbedResult():
                return self._wrong_answer(client, outcome)
            case Left():
                return None if self.now() >= client.leaves_at - EPSILON else "it has not left"
            case DeadlineExceeded():
                return self._wrong_deadline(client, outcome)
            case TimeoutError():
                return None if self._past(client.arrives_at + client.host_timeout_s) else "too early"
            case TooLarge():
                config = self.world.config
                most = max(len(client.items), sum(item.pictures for item in client.items))
                large = most > config.max_request_items or client.body_bytes > config.max_bytes
                return None if large else "it is small"
            case InvalidInput(index=None):
                return None if "refuses" in (client.decode, client.encode) else "it is valid"
            case InvalidInput(index=index) | ModelFailed(index=index) | MediaUnavailable(index=index):
                return self._wrong_culprit(client, index, outcome)
            case OutOfMemory():
                faults = [item.fault for item in client.items]
                return None if "out of memory" in faults else "a smaller batch fits"
            case Overloaded():
                return None  # see `refused`
            case StageFailed(stage=stage):
                return self._wrong_crash(client, stage)
            case DeviceLost():
                return None if self._past(self.device_lost_at) else "the device is well"
            case EngineStopped():
                return self._wrong_stop(client, outcome)
            case Abandoned():
                return "it is for nobody's eyes"
            case str() if client.tokenizes:
                return None if outcome == f"tokens {client.number}" else "of another text"
            case _:
                return "never expected"

    def _past(self, moment: float) -> bool:
        return self.now() >= moment - EPSILON

    def _wrong_answer(self, client: ClientPlan, result: EmbedResult) -> str | None:
        faults = [fetch.fault for item in client.items for fetch in item.fetches.values()]
        if any(faults) or any(item.fault for item in client.items) or client.decode or client.encode:
            return "it must fail"
        if client.arrives_at > self.stopping_at + EPSILON:
            return "it came too late to be taken"
        names = [item.like or (client.number, index) for index, item in enumerate(client.items)]
        if any((self._scope(client), name) not in self.worked_on for name in names):
            return "a row was made for another tenant, or for another salt"
        want = [vector(item.like or (client.number, index), item.cost) for index, item in enumerate(client.items)]
        if (got := result.embeddings.tolist()) != want:
            return f"{got} instead of {want}"
        if result.usage.prompt_tokens != sum(item.cost for item in client.items):
            return f"counts {result.usage.prompt_tokens} tokens"
        return None

    def _wrong_deadline(self, client: ClientPlan, error: DeadlineExceeded) -> str | None:
        deadline = client.arrives_at + client.timeout_s
        if deadline == math.inf:
            return "it has none: a host's own scope cancels and raises nothing"
        if not self._past(deadline) and error.stage not in ("door", "preprocess", "preprocess_images"):
            return f"{error.stage} was not asked to predict"
        return None

    def _wrong_culprit(self, client: ClientPlan, index: int | None, error: Exception) -> str | None:
        if index is None:
            return "names no item"
        item = client.items[index]
        fetch_faults = [fetch.fault for fetch in item.fetches.values()]
        match error:
            case UnusableMedia():
                explained = "unusable" in fetch_faults
            case MediaUnavailable():
                explained = "unavailable" in fetch_faults
            case InvalidInput():
                explained = item.fault == "invalid"
            case _:
                explained = item.fault in ("preprocess raises", "forward raises", "nan")
        return None if explained else f"item {index} is healthy"

    def _wrong_crash(self, client: ClientPlan, stage: str) -> str | None:
        if stage == "fetch":
            faults = [fetch.fault for item in client.items for fetch in item.fetches.values()]
            return None if "raises" in faults else "every fetch was well"
        if (client.decode if stage == "parse" else client.encode if stage == "postprocess" else None) == "raises":
            return None
        ticket = self.ticket_of(client.number)
        if ticket is None or not any(abs(t - ticket.times[0]) < EPSILON for t in self.crashed_at.get(stage, ())):
            return f"{stage} has not crashed"
        return None

    def _wrong_stop(self, client: ClientPlan, error: EngineStopped) -> str | None:
        engine = self.engine
        if "of this kind" in str(error) and len(self.world.lanes) > 1 and self.world.slow_preprocess:
            return None  # one lane is held up
        patient = not self.ended and not self._past(min(self.drains_until, self.cancelled_at))
        if patient and self.ticket_of(client.number) is not None and engine is not None and engine.fault is None:
            return "it was inside, and there was time"
        if engine is None or self.ended or self._past(self.stopping_at) or engine.fault is not None:
            return None
        return None if self.may_be_broken() else "the engine runs"

    def may_be_broken(self) -> bool:
        """Whether there is a reason for the engine to give up."""
        return self._past(self.device_lost_at) or self.broken_at() < math.inf

    def broken_at(self) -> float:
        """When a stage has crashed once too often within the window; infinite if none has."""
        most, window_s = self.world.restarts.max_crashes, self.world.restarts.window_s
        return min(
            (
                last
                for times in self.crashed_at.values()
                for first, last in zip(times, times[most:], strict=False)
                if last - first < window_s
            ),
            default=math.inf,
        )

    def admission_adds_up(self) -> None:
        """What admission counts is the sum of what the requests inside have taken."""
        engine = self.engine
        if engine is None:
            return
        counted = engine._admission.inside
        inside: defaultdict[str, float] = defaultdict(float)
        for room in self.rooms.values():
            priority = room.asker.priority
            inside["requests"] += 1
            inside["items"] += room.items
            inside["bytes"] += room.body_bytes
            inside["tokens"] += room.tokens
            inside[f"requests of {priority} work"] += 1
            inside[f"tokens of {priority} work"] += room.tokens
            for lane, part in room.parts.items():
                inside[f"unprepared inputs of the {lane} lane"] += part.unprepared
        totals: dict[str, float] = {
            **dict(zip(LIMITS, counted.total.limited, strict=True)),
            "tenants": sum(map(len, counted.tenants.values())),
        }
        inside["tenants"] = len({room.asker for room in self.rooms.values()})
        for lane, unprepared in counted.unprepared.items():
            totals[f"unprepared inputs of the {lane} lane"] = unprepared
        for priority, of_tenants in counted.tenants.items():
            totals[f"requests of {priority} work"] = sum([one.requests for one in of_tenants.values()])
            totals[f"tokens of {priority} work"] = sum([sum(one.tokens.values()) for one in of_tenants.values()])
        for what, total in totals.items():
            if abs(total - inside[what]) > EPSILON:
                self.fail(f"admission counts {total:g} {what}, and {inside[what]:g} are inside")
        if unknown := inside.keys() - totals:
            self.fail(f"admission does not count {unknown}, which are inside")

    def drained(self, began_at: float, timeout_s: float) -> None:
        """`Engine.drain` has returned: nothing is open, and it has waited no longer than it had to."""
        self.note("drain has returned")
        engine = self.engine
        if engine is None:
            return
        if any(not ticket.settled for ticket in engine._tickets):
            self.fail("drained, and a request is open")
        latest = began_at + timeout_s
        if not engine._tickets:  # every caller has left already
            latest = min(latest, max([began_at, *(t.times[0] for t in self.tickets.values() if t.times)]))
        if self.now() > latest + EPSILON:
            self.fail(f"a drain took {self.now() - began_at:g} s")

    def check_quiet(self) -> None:
        """Nothing has happened for a minute of virtual time."""
        if unsettled := [c.number for c in self.world.clients if c.number not in self.outcomes]:
            self.fail(f"idle for {IDLE_S:g} s, and clients {unsettled} still wait")
        if self.engine is not None and self.may_be_broken() and self.engine.phase is not Phase.STOPPED:
            self.fail("the engine goes on, though it is broken")

    # ---- when all is over ----

    def check_engine_ended(self) -> None:
        """The engine's block has just been left."""
        self.ended = True
        engine = self.engine
        if engine is None:
            self.fail("the engine never started")
            return
        if engine.phase is not Phase.STOPPED:
            self.fail(f"the engine has ended and is {engine.phase}")
        if any(not ticket.settled for ticket in self.tickets.values()):
            self.fail("the engine has ended, and a ticket is open")
        if self.on_device.total() and self.device_lost_at == math.inf:
            self.fail("the engine has ended with a batch on the device")
        if self.preprocessing:
            self.fail("the engine has ended with preprocess at work")
        for channel in engine._pipeline.channels:
            statistics = channel.outlet._stream.statistics()
            if statistics.current_buffer_used or channel.waiting:
                self.fail(f"something is left in front of {channel.name}")
            if statistics.open_send_streams or statistics.open_receive_streams:
                self.fail(f"the channel in front of {channel.name} is open")
        if running := sum(stage.running for stage in engine._pipeline.batch.values()):
            self.fail(f"{running} batches are thought to be on the device")
        if tokens := sum(stage.running_tokens for stage in engine._pipeline.batch.values()):
            self.fail(f"{tokens} tokens are thought to be on the device")
        if self.cancelled_at == math.inf and not self.may_be_broken():
            for batch in engine._pipeline.batch.values():
                if batch.waiting or batch._flights._flights or batch._builder.cost:
                    self.fail(f"everything has passed, and {batch.meter.name} holds something")
        for stage in engine._pipeline.stages:
            injected = len(self.crashed_at.get(stage.meter.name, ()))
            if stage.meter.crashes != injected:
                self.fail(f"{stage.meter.name} crashed {stage.meter.crashes} times, and was made to {injected} times")
            if stage.meter.busy:
                self.fail(f"{stage.meter.name} counts {stage.meter.busy} busy workers")

    def check_world_ended(self, tokens_borrowed: int) -> None:
        """Every task has ended."""
        for client in self.world.clients:
            if client.number not in self.outcomes:
                self.fail(f"client {client.number} has no outcome")
        if tokens_borrowed:
            self.fail(f"{tokens_borrowed} limiter tokens are gone")
        if self.engine is None:
            return
        if self.engine._tickets:
            self.fail("tickets are left")
        inside = self.engine._admission.inside
        if any(abs(each) > EPSILON for each in (*inside.total.limited, *inside.unprepared.values())) or self.rooms:
            self.fail("the engine is empty, and admission counts something")
        if self.fetching.total() or self.engine._pipeline.errands.fetching:
            self.fail("all clients have their outcomes, and fetches run on")

    def tally(self) -> Counter[str]:
        """How often each kind of outcome came about."""
        return Counter(_kind(outcome) for outcome in self.outcomes.values())


def _kind(outcome: Outcome) -> str:
    match outcome:
        case EmbedResult() | str():
            return "answered"
        case Left():
            return "left"
        case _:
            return type(outcome).__name__


class _Named:
    """Says what an outcome is, if anybody asks."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __str__(self) -> str:
        outcome = self._outcome
        return f"{_kind(outcome)}: {outcome}" if isinstance(outcome, Exception) else _kind(outcome)
