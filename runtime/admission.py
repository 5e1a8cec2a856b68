"""How much may be inside the engine. Decided at the door for a whole request, before any work is done on it.

Limits on requests, items, tokens and bytes bound the memory. What bounds the wait is delay: a request is refused when
the engine would not get to it within the target. The delay is predicted from the tokens that go before it and the
measured pace of the device, and corrected by how far recent predictions were from what happened, so that a bottleneck
elsewhere (an event loop with too much to do) counts too.

Requests share the device fairly, so that none of those inside gets more of it than a new one does until that is done: a
small request has little before it, whatever large ones are inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.statistics import AdmissionStatistics
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.pace import Pace

FIRST_BYTES_PER_TOKEN = 4.0
"""Until texts have been seen: English through a WordPiece tokenizer."""

_MARGIN = 0.65
"""A request is let in if it is expected within so much of the target delay: predictions are right on average only, and
at the beginning of a flood they rest on the pace from before it."""

_LEARN = 0.05
"""Weight of the newest observation in the running means: about the last twenty requests count."""


class Room:
    """What one request takes inside; `Admission.leave` gives it back whole.

    Its tokens are an estimate at first. As its items are tokenized the estimate becomes their true cost, and as they
    leave the device they are inside no more.
    """

    __slots__ = (
        "_admission",
        "_estimate",
        "_unprepared",
        "body_bytes",
        "entered_at",
        "expected_s",
        "inside",
        "items",
        "tokens",
    )

    def __init__(
        self, admission: Admission, *, body_bytes: int, tokens: float, entered_at: float, expected_s: float
    ) -> None:
        self._admission = admission
        self._estimate = tokens
        """Tokens of one item that is not tokenized yet."""
        self._unprepared = 1
        self.body_bytes = body_bytes
        self.items = 1
        self.tokens = tokens
        self.entered_at = entered_at
        self.expected_s = expected_s
        """How long it was predicted to take when it entered."""
        self.inside = True
        """Until it is given back: items of a caller who left move on for a while, and count no more."""

    def split(self, items: int) -> None:
        """It turned out to have so many items."""
        self._estimate = self.tokens / items
        self._unprepared = self.items = items

    def prepared(self, tokens: int) -> None:
        """One of its items is tokenized and has so many tokens."""
        if self._unprepared and self.inside:
            self._unprepared -= 1
            self._admission.correct(self, tokens - self._estimate)

    def computed(self, tokens: int) -> None:
        """One of its items has left the device."""
        if self.inside:
            self._admission.correct(self, -tokens)


class Admission:
    """Counts what is inside, and refuses what would exceed a limit. Never waits.

    Args:
        config: The limits.
        pace: The device's, measured elsewhere.
        clock: The event loop's, in seconds.
        batch_tokens: Of one batch at most.
    """

    def __init__(self, config: EngineConfig, pace: Pace, clock: Callable[[], float], *, batch_tokens: int) -> None:
        self._config = config
        self._batch_tokens = batch_tokens
        self._pace = pace
        self._clock = clock
        self._requests = 0
        self._items = 0
        self._tokens = 0.0
        self._body_bytes = 0
        self._admitted = 0
        self._refused: Counter[str] = Counter()
        self._bytes_per_token = FIRST_BYTES_PER_TOKEN
        self._lag_s = 0.0
        """How much longer than predicted requests have taken lately."""

    def enter(self, *, body_bytes: int, timeout_s: float) -> Room:
        """Let a request in.

        Args:
            body_bytes: Size of what it sent; its tokens are estimated from it.
            timeout_s: What its caller gives it.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            DeadlineExceeded: It could not be answered in time; nothing was counted.
            TooLarge: It exceeds a limit by itself.
        """
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        tokens = body_bytes / self._bytes_per_token
        expected_s = self._delay_s(tokens)
        if self._requests and expected_s + self._lag_s > timeout_s:
            self._refused["deadline"] += 1
            message = f"The request would take about {expected_s + self._lag_s:.3g} s: longer than its deadline allows."
            raise DeadlineExceeded(message, stage="door")
        if (overload := self.overload(body_bytes)) is not None:
            raise overload
        self._requests += 1
        self._items += 1
        self._tokens += tokens
        self._body_bytes += body_bytes
        self._admitted += 1
        return Room(self, body_bytes=body_bytes, tokens=tokens, entered_at=self._clock(), expected_s=expected_s)

    def overload(self, body_bytes: int) -> Overloaded | None:
        """Why a request of so many bytes is refused now, and counted as refused; None if it may enter."""
        if not self._requests:  # an empty engine takes anything: its predictions would never be put right otherwise
            return None
        config = self._config
        tokens = body_bytes / self._bytes_per_token
        for limit, wanted, allowed in (
            ("requests", self._requests + 1, config.max_requests),
            ("items", self._items + 1, config.max_items),
            ("tokens", self._tokens + tokens, config.max_tokens),
            ("bytes", self._body_bytes + body_bytes, config.max_bytes),
        ):
            if wanted > allowed:
                return self._refuse(limit, f"The server is at its limit of {allowed} {limit} in flight.")
        delay_s = self._delay_s(tokens) + self._lag_s
        if delay_s > _MARGIN * config.target_delay_s:
            return self._refuse("delay", f"The server is overloaded: this request would take about {delay_s:.3g} s.")
        return None

    def _delay_s(self, tokens: float) -> float:
        """How long a request of so many tokens would take: with what goes before it, and itself."""
        ahead = min(self._tokens, self._requests * tokens)
        return self._pace.drain_s(ahead + tokens, self._batch_tokens)

    def _refuse(self, limit: str, message: str) -> Overloaded:
        self._refused[limit] += 1
        return Overloaded(message, retry_after_s=self.drain_s())

    def count_items(self, room: Room, items: int) -> None:
        """A request that is inside turned out to have so many items.

        Raises:
            TooLarge: More than one request may have.
            Overloaded: All requests together would have too many.
        """
        limit = self._config.max_request_items
        if items > limit:
            raise TooLarge(f"The request has {items} inputs; at most {limit} are accepted.", param="input")
        allowed = self._config.max_items
        if self._requests > 1 and self._items + items - room.items > allowed:
            raise self._refuse("items", f"The server is at its limit of {allowed} items in flight.")
        self._items += items - room.items
        room.split(items)

    def correct(self, room: Room, tokens: float) -> None:
        """A request has so many tokens more inside than was thought."""
        room.tokens += tokens
        self._tokens += tokens

    def leave(self, room: Room, *, answered_tokens: int = 0) -> None:
        """Give back what `enter` took.

        Args:
            answered_tokens: What it really had, where it was answered: estimates are learned from it.
        """
        room.inside = False
        self._requests -= 1
        self._items -= room.items
        self._body_bytes -= room.body_bytes
        self._tokens = self._tokens - room.tokens if self._requests else 0.0  # no rounding error is carried on
        if answered_tokens:
            took_s = self._clock() - room.entered_at
            self._lag_s = max(0.0, self._lag_s + _LEARN * (took_s - room.expected_s - self._lag_s))
            if room.body_bytes:
                self._bytes_per_token += _LEARN * (room.body_bytes / answered_tokens - self._bytes_per_token)

    def drain_s(self) -> float:
        """How long the device needs for everything inside."""
        return self._pace.drain_s(self._tokens, self._batch_tokens)

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(
            requests=self._requests,
            max_requests=self._config.max_requests,
            items=self._items,
            max_items=self._config.max_items,
            tokens=round(self._tokens),
            max_tokens=self._config.max_tokens,
            body_bytes=self._body_bytes,
            max_bytes=self._config.max_bytes,
            admitted=self._admitted,
            refused=dict(self._refused),
            drain_s=self.drain_s(),
            lag_s=self._lag_s,
            bytes_per_token=self._bytes_per_token,
        )
