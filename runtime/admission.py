"""How much may be inside the engine. Decided at the door for a whole request, before any work is done on it.

Limits on requests, items, tokens and bytes bound the memory. What bounds the wait is delay: a request is refused when
the engine would not get to it within the target. The delay is predicted from what goes before it in its lane and the
measured pace of the lane, and corrected by how far recent predictions were from what happened, so that a bottleneck
elsewhere (an event loop with too much to do) counts too.

Which lane a request will use is not known at the door, only what bodies of its size have turned out to be. Where that
leaves a choice, the door believes in the quicker lane, and the request is judged again when it has been decoded.

The device is shared as `stages/turns.py` and `stages/tenants.py` say, and the delay predicted accordingly. Of its own
tenant's requests each gets no more of it than a new one does until that is done: a small request has little before it,
whatever large ones are inside. Each other tenant gets no more than its own does meanwhile: it has little before it as
well, whatever backlog another tenant has. Interactive work waits for no more of bulk work than is due, and bulk work
for no more of interactive work than leaves it its part. What is refused for other limits must not depend on a backlog
of others either: see `_beyond_part`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.estimates import Estimates, Guess
from staged_pool.runtime.model import Lane
from staged_pool.runtime.refusals import Refusal, Refusals, Standing
from staged_pool.runtime.statistics import AdmissionStatistics, LaneStatistics
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.pace import LanePace
from staged_pool.stages.turns import INTERACTIVE_PER_BULK
from staged_pool.stages.work import Priority

_MARGIN = 0.65
"""A request is let in if it is expected within so much of the target delay: predictions are right on average only, and
at the beginning of a flood they rest on the pace from before it."""

_LIMITS: Final = ("requests", "items", "tokens", "bytes")

_TIMES_FREE: Final = 7
"""How much of a limit one tenant, or all bulk work, may have: so many times what it leaves free."""

_LEARN = 0.05
"""Weight of the newest observation in the running mean of the lag: about the last twenty requests count."""


class _Part:
    """What one request has in one lane."""

    __slots__ = ("estimate", "read", "tokens", "unprepared")

    def __init__(self, tokens: float, inputs: int) -> None:
        self.tokens = tokens
        self.unprepared = inputs
        self.estimate = tokens / inputs if inputs else 0.0
        """Tokens of one input that is not prepared yet."""
        self.read = 0
        """Tokens of the inputs that are."""


class _LaneInside:
    """What all requests have in one lane."""

    __slots__ = ("inputs", "lag_s", "pace", "tokens")

    def __init__(self, pace: LanePace) -> None:
        self.pace = pace
        self.tokens = 0.0
        self.inputs = 0
        """That are not prepared yet."""
        self.lag_s = dict.fromkeys(Priority, 0.0)
        """How much longer than predicted requests of a priority have taken lately."""

    @property
    def drain_s(self) -> float:
        return self.pace.drain_s(self.tokens, self.inputs)


class _Inside:
    """What the requests of a priority have, or those of one tenant in it."""

    __slots__ = ("body_bytes", "items", "requests", "tokens")

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.requests = 0
        self.items = 0
        self.body_bytes = 0
        self.tokens = dict.fromkeys(lanes, 0.0)

    @property
    def amounts(self) -> tuple[float, ...]:
        """In the order of the limits."""
        return self.requests, self.items, sum(self.tokens.values()), self.body_bytes


class Asker(NamedTuple):
    """How a request stands to others."""

    priority: Priority = Priority.INTERACTIVE
    tenant: Hashable = None
    """Whose it is. None: nobody's in particular; all of these are one tenant."""


class Room:
    """What one request takes inside; `Admission.leave` gives it back whole.

    Its tokens are an estimate at first. As its inputs are prepared the estimate becomes their true cost, and as they
    leave the device they are inside no more.
    """

    __slots__ = (
        "_admission",
        "asker",
        "body_bytes",
        "counts",
        "entered_at",
        "expected_s",
        "inside",
        "items",
        "lane",
        "parts",
        "recalled_tokens",
    )

    def __init__(
        self,
        admission: Admission,
        *,
        body_bytes: int,
        entered_at: float,
        lane: Lane,
        expected_s: float,
        asker: Asker,
        counts: tuple[_Inside, _Inside],
    ) -> None:
        self._admission = admission
        self.asker = asker
        self.counts = counts
        """Of its priority, and of its tenant in that."""
        self.body_bytes = body_bytes
        self.items = 1
        self.parts: dict[Lane, _Part] = {}
        """By lane."""
        self.entered_at = entered_at
        self.lane = lane
        """The one that decides how long it takes."""
        self.expected_s = expected_s
        """How long it was predicted to take when it entered."""
        self.recalled_tokens = 0
        self.inside = True
        """Until it is given back: items of a caller who left move on for a while, and count no more."""

    @property
    def tokens(self) -> float:
        return sum([part.tokens for part in self.parts.values()])

    def prepared(self, lane: Hashable, tokens: int) -> None:
        """One of its inputs is prepared and has so many tokens."""
        if self.inside:
            self._admission.prepared(self, cast(Lane, lane), tokens)

    def computed(self, lane: Hashable, tokens: int) -> None:
        """One of its items has left the device."""
        if self.inside:
            self._admission.correct(self, cast(Lane, lane), -tokens)

    def spared(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens are not for the device; negative: they are, after all."""
        if self.inside:
            self._admission.correct(self, cast(Lane, lane), -tokens)

    def recalled(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens are not for the device: what it would give for them is known."""
        self.recalled_tokens += tokens
        self.spared(lane, tokens)


ANYBODY: Final = Asker()
"""Interactive work of no tenant: there is nobody that it has to leave room to."""


class Admission:
    """Counts what is inside, and refuses what would exceed a limit. Never waits.

    Args:
        config: The limits.
        paces: Of each lane that the model has, measured elsewhere.
        clock: The event loop's, in seconds.
    """

    def __init__(self, config: EngineConfig, paces: Mapping[Lane, LanePace], clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._lanes = {lane: _LaneInside(pace) for lane, pace in paces.items()}
        self._priorities = {priority: _Inside(paces) for priority in Priority}
        self._tenants: dict[Priority, dict[Hashable, _Inside]] = {priority: {} for priority in Priority}
        """Only those that have something inside."""
        self._estimates = Estimates(tuple(paces))
        self._requests = 0
        self._items = 0
        self.tokens = 0.0
        """Inside, of all lanes."""
        self._body_bytes = 0
        self._admitted = 0
        self._refusals = Refusals(clock, config.target_delay_s)
        self._allowed = (config.max_requests, config.max_items, config.max_tokens, config.max_bytes)

    def enter(self, *, body_bytes: int, timeout_s: float, asker: Asker = ANYBODY) -> Room:
        """Let a request in.

        Args:
            body_bytes: Size of what it sent; its tokens are estimated from it.
            timeout_s: What its caller gives it.
            asker: How it stands to others.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            DeadlineExceeded: It could not be answered in time; nothing was counted.
            TooLarge: It exceeds a limit by itself.
        """
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        guesses = self._estimates.guess(body_bytes)
        lane, expected_s = expected = self._quickest(guesses, asker)
        takes_s = expected_s + self._lanes[lane].lag_s[asker.priority]
        if self._requests and takes_s > timeout_s:
            self._refusals.count("deadline")
            message = f"The request would take about {takes_s:.3g} s: longer than its deadline allows."
            raise DeadlineExceeded(message, stage="door")
        if (refusal := self._overload(body_bytes, guesses, expected, asker)) is not None:
            try:
                raise self._refusals.counted(refusal)
            finally:
                del refusal  # this frame is in the error's traceback now, and the refusal has the error
        tenants = self._tenants[asker.priority]
        if (of_tenant := tenants.get(asker.tenant)) is None:
            of_tenant = tenants[asker.tenant] = _Inside(self._lanes)
        room = Room(
            self,
            body_bytes=body_bytes,
            entered_at=self._clock(),
            lane=lane,
            expected_s=expected_s,
            asker=asker,
            counts=(self._priorities[asker.priority], of_tenant),
        )
        self._requests += 1
        self._items += 1
        self._body_bytes += body_bytes
        for inside in room.counts:
            inside.requests += 1
            inside.items += 1
            inside.body_bytes += body_bytes
        self._admitted += 1
        for of, guess in guesses.items():
            self._put(room, of, _Part(guess.tokens, int(of == lane)))
        return room

    def overload(self, body_bytes: int, asker: Asker = ANYBODY) -> Standing | None:
        """Why a request of so many bytes is refused now, and counted as refused; None if it may enter."""
        if (standing := self._refusals.again(asker, body_bytes)) is not None:
            return standing
        guesses = self._estimates.guess(body_bytes)
        refusal = self._overload(body_bytes, guesses, self._quickest(guesses, asker), asker)
        return None if refusal is None else self._refusals.stand(refusal, asker, body_bytes)

    def _overload(
        self, body_bytes: int, guesses: Mapping[Lane, Guess], expected: tuple[Lane, float], asker: Asker
    ) -> Refusal | None:
        if not self._requests:  # an empty engine takes anything: its predictions would never be put right otherwise
            return None
        lane, expected_s = expected
        tokens = 0.0
        for guess in guesses.values():
            tokens += guess.tokens
        wanted = (1, 1, tokens, body_bytes)
        inside = (self._requests, self._items, self.tokens, self._body_bytes)
        for place, allowed in enumerate(self._allowed):
            if inside[place] + wanted[place] > allowed:
                limit = _LIMITS[place]
                return self._refuse(limit, f"The server is at its limit of {allowed} {limit} in flight.", lane)
        if asker != ANYBODY and (whose := self._beyond_part(inside, wanted, asker)) is not None:
            return self._refuse("part", f"{whose} takes up its part of what the server has in flight at most.", lane)
        return self._too_late(lane, expected_s, asker.priority)

    def _beyond_part(self, inside: Sequence[float], wanted: Sequence[float], asker: Asker) -> str | None:
        """Whether a tenant, or bulk work, would have more of a limit than its part: which of these, if so.

        The part is seven times what it leaves free: a dynamic threshold, by which switches share their buffers
        (Choudhury and Hahne, 1998). One that is alone can have seven eighths of a limit, two seven fifteenths each, and
        whoever comes next always finds some room.
        """
        parts: dict[str, list[_Inside]] = {}
        if asker.priority is Priority.BULK:
            parts["Bulk work"] = [self._priorities[Priority.BULK]]
        if asker.tenant is not None:
            parts["This caller"] = [of[asker.tenant] for of in self._tenants.values() if asker.tenant in of]
        for whose, counts in parts.items():
            for place, (allowed, has, more) in enumerate(zip(self._allowed, inside, wanted, strict=True)):
                own = sum([count.amounts[place] for count in counts])
                if own and own + more > _TIMES_FREE * (allowed - has - more):
                    return whose
        return None

    def count_items(self, room: Room, inputs: Mapping[Lane, int]) -> None:
        """A request that is inside turned out to have so many items of each lane.

        Raises:
            TooLarge: More than one request may have.
            Overloaded: All requests together would have too many; or it uses a lane that the door did not judge it by,
                and would wait there for too long.
        """
        items, limit = sum(inputs.values()), self._config.max_request_items
        if items > limit:
            raise TooLarge(f"The request has {items} inputs; at most {limit} are accepted.", param="input")
        others, allowed = self._requests - 1, self._config.max_items
        if others and self._items + items - room.items > allowed:
            message = f"The server is at its limit of {allowed} items in flight."
            raise self._refusals.counted(self._refuse("items", message, room.lane))
        self._items += items - room.items
        for inside in room.counts:
            inside.items += items - room.items
        room.items = items
        if len(inputs) == len(room.parts) == 1 and "text" in inputs and "text" in room.parts:
            part = room.parts["text"]  # as it was guessed: there is nothing better to estimate by
            self._lanes["text"].inputs += items - part.unprepared
            part.unprepared, part.estimate = items, part.tokens / items
            return
        guessed = room.tokens
        for lane in list(room.parts):
            self._take(room, lane)
        known = self._estimates.known(room.body_bytes, inputs)
        expected = {
            lane: self._delay_s(lane, tokens, inputs[lane], room.asker, is_inside=True)
            for lane, tokens in known.items()
        }
        for lane, tokens in known.items():
            self._put(room, lane, _Part(tokens, inputs[lane]))
        if others and room.tokens > guessed and self.tokens > self._config.max_tokens:
            allowed = self._config.max_tokens
            message = f"The server is at its limit of {allowed} tokens in flight."
            raise self._refusals.counted(self._refuse("tokens", message, room.lane))
        if tuple(inputs) == (room.lane,):
            return
        for lane, expected_s in expected.items():
            if (
                others
                and lane != room.lane
                and (refusal := self._too_late(lane, expected_s, room.asker.priority)) is not None
            ):
                raise self._refusals.counted(refusal)
        room.lane, room.expected_s = max(expected.items(), key=lambda pair: pair[1])

    def prepared(self, room: Room, lane: Lane, tokens: int) -> None:
        """One of a request's inputs is prepared and has so many tokens."""
        part = room.parts.get(lane)
        if part is not None and part.unprepared:
            part.unprepared -= 1
            part.read += tokens
            self._lanes[lane].inputs -= 1
            self._estimates.prepared(lane, tokens)
            part.tokens += tokens - part.estimate
            self._count(room, lane, tokens - part.estimate)

    def correct(self, room: Room, lane: Lane, tokens: float) -> None:
        """A request has so many tokens more inside than was thought."""
        if (part := room.parts.get(lane)) is not None:
            part.tokens += tokens
            self._count(room, lane, tokens)

    def leave(self, room: Room, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
        """Give back what `enter` took.

        Args:
            answered: Estimates are learned from what it turned out to have.
            elsewhere_s: What it waited for that is not the engine's.
        """
        room.inside = False
        self._refusals.lapse()
        self._requests -= 1
        self._items -= room.items
        self._body_bytes -= room.body_bytes
        for of in room.counts:
            of.requests -= 1
            of.items -= room.items
            of.body_bytes -= room.body_bytes
        read: dict[Lane, int] = {}
        for lane, part in room.parts.items():
            if part.read:
                read[lane] = part.read
            self._count(room, lane, -part.tokens)
            self._lanes[lane].inputs -= part.unprepared
        room.parts.clear()
        if not self._requests:
            self.tokens = 0.0  # no rounding error is carried on
            for inside in self._lanes.values():
                inside.tokens = 0.0
        if not room.counts[0].requests:
            room.counts[0].tokens = dict.fromkeys(self._lanes, 0.0)
        if not room.counts[1].requests:
            del self._tenants[room.asker.priority][room.asker.tenant]
        if answered:
            lag_s = self._lanes[room.lane].lag_s
            took_s = self._clock() - room.entered_at - elsewhere_s
            expected_s, priority = room.expected_s, room.asker.priority
            if room.recalled_tokens:
                # What was known waited for no device: quick as it is, it says nothing of how late the others are.
                expected_s *= 1.0 - room.recalled_tokens / max(1, sum(read.values()))
            lag_s[priority] = max(0.0, lag_s[priority] + _LEARN * (took_s - expected_s - lag_s[priority]))
            self._estimates.learn(room.body_bytes, read)

    def _put(self, room: Room, lane: Lane, part: _Part) -> None:
        room.parts[lane] = part
        self._count(room, lane, part.tokens)
        self._lanes[lane].inputs += part.unprepared

    def _take(self, room: Room, lane: Lane) -> None:
        part = room.parts.pop(lane)
        self._count(room, lane, -part.tokens)
        self._lanes[lane].inputs -= part.unprepared

    def _count(self, room: Room, lane: Lane, tokens: float) -> None:
        self.tokens += tokens
        self._lanes[lane].tokens += tokens
        of_priority, of_tenant = room.counts
        of_priority.tokens[lane] += tokens
        of_tenant.tokens[lane] += tokens

    def _quickest(self, guesses: Mapping[Lane, Guess], asker: Asker) -> tuple[Lane, float]:
        """Of the lanes that a request may well use, the one that would be done with it first; and when."""
        if len(guesses) == 1:
            ((lane, guess),) = guesses.items()
            return lane, self._delay_s(lane, guess.if_any, 1, asker)
        delays = [
            (lane, self._delay_s(lane, guess.if_any, 1, asker))
            for lane, guess in guesses.items()
            if guess.likely or not any(each.likely for each in guesses.values())  # such bodies have held nothing so far
        ]
        return min(delays, key=lambda pair: pair[1] + self._lanes[pair[0]].lag_s[asker.priority])

    def _delay_s(self, lane: Lane, tokens: float, inputs: int, asker: Asker, *, is_inside: bool = False) -> float:
        """How long a request of so many tokens would take in a lane: with what goes before it, and itself.

        Preprocess knows no tenants: those who feed it go in turns, however many each tenant has.
        """
        priority, tenants = self._priorities[asker.priority], self._tenants[asker.priority]
        before, others_have = tokens, priority.tokens[lane]
        if (own := tenants.get(asker.tenant)) is not None:
            before += min(own.tokens[lane], (own.requests - is_inside) * tokens)
            others_have -= own.tokens[lane]
        before += min(others_have, (len(tenants) - (own is not None)) * before)
        if asker.priority is Priority.INTERACTIVE:
            before += min(self._priorities[Priority.BULK].tokens[lane], before / INTERACTIVE_PER_BULK)
        else:
            before += min(self._priorities[Priority.INTERACTIVE].tokens[lane], before * INTERACTIVE_PER_BULK)
        inside, others = self._lanes[lane], self._requests - is_inside
        return inside.pace.drain_s(before, min(inside.inputs, others * inputs) + inputs)

    def _too_late(self, lane: Lane, expected_s: float, priority: Priority) -> Refusal | None:
        delay_s = expected_s + self._lanes[lane].lag_s[priority]
        if delay_s <= _MARGIN * self._config.target_delay_s:
            return None
        return self._refuse("delay", f"The server is overloaded: this request would take about {delay_s:.3g} s.", lane)

    def _refuse(self, limit: str, message: str, lane: Lane) -> Refusal:
        return Refusal(limit, Overloaded(message, retry_after_s=self._lanes[lane].drain_s))

    def expects_refusals(self) -> bool:
        """Whether somebody was refused just now, and more of them are likely to be."""
        return self._refusals.are_expected()

    def requests_of(self, priority: Priority) -> int:
        """Inside."""
        return self._priorities[priority].requests

    def statistics(self) -> AdmissionStatistics:
        lanes = self._lanes.values()
        return AdmissionStatistics(
            requests=self._requests,
            max_requests=self._config.max_requests,
            items=self._items,
            max_items=self._config.max_items,
            tokens=round(self.tokens),
            max_tokens=self._config.max_tokens,
            body_bytes=self._body_bytes,
            max_bytes=self._config.max_bytes,
            admitted=self._admitted,
            refused=dict(self._refusals.counts),
            drain_s=max(lane.drain_s for lane in lanes),
            lag_s=max(max(lane.lag_s.values()) for lane in lanes),
            bytes_per_token=self._estimates.bytes_per_token,
            tenants=sum(map(len, self._tenants.values())),
            lanes={
                name: LaneStatistics(tokens=round(lane.tokens), drain_s=lane.drain_s, lag_s=max(lane.lag_s.values()))
                for name, lane in self._lanes.items()
            },
        )
