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

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.estimates import Estimates, Guess
from staged_pool.runtime.inside import ANYBODY, LIMITS, Amounts, Asker, Inside, Part, Room
from staged_pool.runtime.model import Lane
from staged_pool.runtime.refusals import Refusal, Refusals
from staged_pool.runtime.statistics import AdmissionStatistics, LaneStatistics
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.pace import LanePace
from staged_pool.stages.turns import INTERACTIVE_PER_BULK
from staged_pool.stages.work import Priority

_MARGIN = 0.65
"""A request is let in if it is expected within so much of the target delay: predictions are right on average only, and
at the beginning of a flood they rest on the pace from before it."""

_TIMES_FREE: Final = 7
"""How much of a limit one tenant, or all bulk work, may have: so many times what it leaves free."""

_LEARN = 0.05
"""Weight of the newest observation in the running mean of the lag: about the last twenty requests count."""


class _LanePrediction:
    """How fast a lane is, and how far its predictions were off."""

    __slots__ = ("lag_s", "pace")

    def __init__(self, pace: LanePace) -> None:
        self.pace = pace
        self.lag_s = dict.fromkeys(Priority, 0.0)
        """How much longer than predicted requests of a priority have taken lately."""


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
        self._lanes = {lane: _LanePrediction(pace) for lane, pace in paces.items()}
        self._estimates = Estimates(tuple(paces))
        self.inside = Inside(paces, self._estimates)
        self._admitted = 0
        self._refusals = Refusals(clock)
        self._allowed = (config.max_requests, config.max_items, config.max_tokens, config.max_bytes)

    def enter(self, *, body_bytes: int, timeout_s: float, asker: Asker = ANYBODY, images: int | None = None) -> Room:
        """Let a request in.

        Args:
            body_bytes: Size of what it sent; its tokens are estimated from it.
            timeout_s: What its caller gives it.
            asker: How it stands to others.
            images: Images that the bytes of the request show. None: not known.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            DeadlineExceeded: It could not be answered in time; nothing was counted.
            TooLarge: It exceeds a limit by itself.
        """
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        guesses = self._estimates.guess(body_bytes, images)
        lane, expected_s = expected = self._quickest(guesses, asker)
        takes_s = expected_s + self._lanes[lane].lag_s[asker.priority]
        if self.inside.total.requests and takes_s > timeout_s:
            self._refusals.count("deadline")
            message = f"The request would take about {takes_s:.3g} s: longer than its deadline allows."
            raise DeadlineExceeded(message, stage="door")
        if (refusal := self._overload(body_bytes, guesses, expected, asker)) is not None:
            try:
                raise self._refusals.counted(refusal)
            finally:
                del refusal  # this frame is in the error's traceback now, and the refusal has the error
        self._admitted += 1
        return self.inside.enter(
            {of: Part(guess.tokens, int(of == lane)) for of, guess in guesses.items()},
            body_bytes=body_bytes,
            entered_at=self._clock(),
            lane=lane,
            expected_s=expected_s,
            asker=asker,
        )

    def overload(self, body_bytes: int, asker: Asker = ANYBODY, images: int | None = None) -> Overloaded | None:
        """Why a request of so many bytes is refused now, and counted as refused; None if it may enter."""
        guesses = self._estimates.guess(body_bytes, images)
        refusal = self._overload(body_bytes, guesses, self._quickest(guesses, asker), asker)
        return None if refusal is None else self._refusals.counted(refusal)

    def _overload(
        self, body_bytes: int, guesses: Mapping[Lane, Guess], expected: tuple[Lane, float], asker: Asker
    ) -> Refusal | None:
        if (
            not self.inside.total.requests
        ):  # an empty engine takes anything: its predictions would never be put right otherwise
            return None
        lane, expected_s = expected
        tokens = 0.0
        for guess in guesses.values():
            tokens += guess.tokens
        wanted = (1, 1, tokens, body_bytes)
        inside = self.inside.total.limited
        for place, allowed in enumerate(self._allowed):
            if inside[place] + wanted[place] > allowed:
                limit = LIMITS[place]
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
        parts: dict[str, list[Amounts]] = {}
        if asker.priority is Priority.BULK:
            parts["Bulk work"] = [self.inside.priorities[Priority.BULK]]
        if asker.tenant is not None:
            parts["This caller"] = [of[asker.tenant] for of in self.inside.tenants.values() if asker.tenant in of]
        for whose, counts in parts.items():
            for place, (allowed, has, more) in enumerate(zip(self._allowed, inside, wanted, strict=True)):
                own = sum([count.limited[place] for count in counts])
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
        total, others, allowed = self.inside.total, self.inside.total.requests - 1, self._config.max_items
        if others and total.items + items - room.items > allowed:
            message = f"The server is at its limit of {allowed} items in flight."
            raise self._refusals.counted(self._refuse("items", message, room.lane))
        self.inside.count_items(room, items)
        if len(inputs) == len(room.parts) == 1 and "text" in inputs and "text" in room.parts:
            self.inside.divide(room, "text", items)  # as it was guessed: there is nothing better to estimate by
            return
        guessed = room.tokens
        for lane in list(room.parts):
            self.inside.take(room, lane)
        known = self._estimates.known(room.body_bytes, inputs)
        expected = {
            lane: self._delay_s(lane, tokens, inputs[lane], room.asker, is_inside=True)
            for lane, tokens in known.items()
        }
        for lane, tokens in known.items():
            self.inside.put(room, lane, Part(tokens, inputs[lane]))
        if others and room.tokens > guessed and sum(total.tokens.values()) > self._config.max_tokens:
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

    def leave(self, room: Room, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
        """Give back what `enter` took.

        Args:
            answered: Estimates are learned from what it turned out to have.
            elsewhere_s: What it waited for that is not the engine's.
        """
        read = {lane: part.read for lane, part in room.parts.items() if part.read}
        self.inside.leave(room)
        if answered:
            lag_s = self._lanes[room.lane].lag_s
            took_s = self._clock() - room.entered_at - elsewhere_s
            expected_s, priority = room.expected_s, room.asker.priority
            if room.recalled_tokens:
                # What was known waited for no device: quick as it is, it says nothing of how late the others are.
                expected_s *= 1.0 - room.recalled_tokens / max(1, sum(read.values()))
            lag_s[priority] = max(0.0, lag_s[priority] + _LEARN * (took_s - expected_s - lag_s[priority]))
            self._estimates.learn(room.body_bytes, read)

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
        priority, tenants = self.inside.priorities[asker.priority], self.inside.tenants[asker.priority]
        before, others_have = tokens, priority.tokens[lane]
        if (own := tenants.get(asker.tenant)) is not None:
            before += min(own.tokens[lane], (own.requests - is_inside) * tokens)
            others_have -= own.tokens[lane]
        before += min(others_have, (len(tenants) - (own is not None)) * before)
        if asker.priority is Priority.INTERACTIVE:
            before += min(self.inside.priorities[Priority.BULK].tokens[lane], before / INTERACTIVE_PER_BULK)
        else:
            before += min(self.inside.priorities[Priority.INTERACTIVE].tokens[lane], before * INTERACTIVE_PER_BULK)
        others = self.inside.total.requests - is_inside
        return self._lanes[lane].pace.drain_s(before, min(self.inside.unprepared[lane], others * inputs) + inputs)

    def _too_late(self, lane: Lane, expected_s: float, priority: Priority) -> Refusal | None:
        delay_s = expected_s + self._lanes[lane].lag_s[priority]
        if delay_s <= _MARGIN * self._config.target_delay_s:
            return None
        return self._refuse("delay", f"The server is overloaded: this request would take about {delay_s:.3g} s.", lane)

    def _refuse(self, limit: str, message: str, lane: Lane) -> Refusal:
        return Refusal(limit, Overloaded(message, retry_after_s=self._drain_s(lane)))

    def _drain_s(self, lane: Lane) -> float:
        """How long a lane needs for all that is inside."""
        return self._lanes[lane].pace.drain_s(self.inside.total.tokens[lane], self.inside.unprepared[lane])

    def expects_refusals(self) -> bool:
        """Whether somebody was refused just now, and more of them are likely to be."""
        return self._refusals.are_expected()

    def requests_of(self, priority: Priority) -> int:
        """Inside."""
        return self.inside.priorities[priority].requests

    def statistics(self) -> AdmissionStatistics:
        total, config = self.inside.total, self._config
        lanes: dict[str, LaneStatistics] = {
            lane: LaneStatistics(
                tokens=round(total.tokens[lane]), drain_s=self._drain_s(lane), lag_s=max(prediction.lag_s.values())
            )
            for lane, prediction in self._lanes.items()
        }
        return AdmissionStatistics(
            requests=total.requests,
            max_requests=config.max_requests,
            items=total.items,
            max_items=config.max_items,
            tokens=round(sum(total.tokens.values())),
            max_tokens=config.max_tokens,
            body_bytes=total.body_bytes,
            max_bytes=config.max_bytes,
            admitted=self._admitted,
            refused=dict(self._refusals.counts),
            drain_s=max(lane.drain_s for lane in lanes.values()),
            lag_s=max(lane.lag_s for lane in lanes.values()),
            bytes_per_token=self._estimates.bytes_per_token,
            tenants=sum(map(len, self.inside.tenants.values())),
            lanes=lanes,
        )
