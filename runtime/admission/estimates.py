"""Estimates of a request's tokens before it has been read, learned from bodies of its size.

A base64 image has a thousand times the bytes of a text for each token, so one rate for all bodies would be wrong for
either. Sizes are told apart by powers of four: within one, rates differ little, and there are few enough to be learned
soon. Pure: no clock, no await.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from staged_pool.runtime.model import Lane
from staged_pool.stages.scheduling.tuning import LEARNING_WEIGHT, RARE

FIRST_BYTES_PER_TOKEN: Final = 4.0
"""Until texts have been seen: English through a WordPiece tokenizer."""

FIRST_IMAGE_TOKENS: Final = 256.0
"""Until images have been seen: one of 224 pixels a side, in patches of 14."""

FIRST_TEXT_TOKENS: Final = 64.0
"""Tokens of a text beside images, until one has been seen."""

IMAGE_BYTES: Final = 4096
"""Smaller bodies hold no image worth the name, but may hold the URL of one: they count as texts for as long as
nothing else is known, and may be texts whatever is known."""


class Mean:
    """A running mean that the first observations make quickly and later ones move slowly."""

    __slots__ = ("_seen", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self._seen = 0

    def observe(self, value: float) -> None:
        self._seen += 1
        self.value += max(LEARNING_WEIGHT, 1.0 / self._seen) * (value - self.value)


class Estimate(NamedTuple):
    """Estimated contents of a body for one lane."""

    tokens: float
    """On average over all bodies of its size, those that hold nothing for the lane included."""
    given_present: float
    """Tokens, if it holds something for the lane."""
    likely: bool
    """It may well hold something for the lane."""


@dataclass(slots=True)
class _SizeBucket:
    """Contents of bodies of one size, as they turned out."""

    used: dict[Lane, Mean] = field(default_factory=dict)
    """Part of them that have inputs of a lane."""
    tokens_per_byte: dict[Lane, Mean] = field(default_factory=dict)
    text_alone: Mean | None = None
    """Tokens for each byte of those that hold nothing but texts."""


class Estimates:
    """Learns from answered requests what the next ones are.

    Args:
        lanes: Of the model.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._habits: dict[int, _SizeBucket] = {}
        self._tokens_per_byte = Mean(1.0 / FIRST_BYTES_PER_TOKEN)
        """Rate of all requests that hold nothing but texts."""
        self._input_tokens = {"text": Mean(FIRST_TEXT_TOKENS), "image": Mean(FIRST_IMAGE_TOKENS)}
        self.device_share = Mean(1.0)
        """Part of the tokens that have to go through the device; the rest is coalesced, or kept from earlier."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes for each token of recent texts."""
        return 1.0 / self._tokens_per_byte.value if self._tokens_per_byte.value else FIRST_BYTES_PER_TOKEN

    def guess(self, body_bytes: int, images: int | None = None) -> dict[Lane, Estimate]:
        """Estimate what a body of so many bytes gives the device to do, by lane.

        Args:
            body_bytes: Size of the body.
            images: Images that its bytes show. None: not known.
        """
        share = self.device_share.value
        return {
            lane: Estimate(guess.tokens * share, guess.given_present * share, guess.likely)
            for lane, guess in self._contents(body_bytes, images).items()
        }

    def _contents(self, body_bytes: int, images: int | None) -> dict[Lane, Estimate]:
        if len(self._lanes) == 1:
            tokens = self._alone(self._lanes[0], body_bytes)
            return {self._lanes[0]: Estimate(tokens, tokens, likely=True)}
        if images is not None:
            lane: Lane = "image" if images else "text"
            tokens = images * self._input_tokens["image"].value if images else self._alone("text", body_bytes)
            return {lane: Estimate(tokens, tokens, likely=True)}
        small = body_bytes < IMAGE_BYTES
        habits = self._habits.get(magnitude(body_bytes))
        if habits is None:
            expected: Lane = "text" if small else "image"
            tokens = self._alone(expected, body_bytes)
            return {expected: Estimate(tokens, tokens, likely=True)}
        guesses: dict[Lane, Estimate] = {}
        for lane, used in habits.used.items():
            tokens = habits.tokens_per_byte[lane].value * body_bytes
            guesses[lane] = Estimate(tokens, tokens / used.value if used.value > 0.0 else 0.0, used.value >= RARE)
        if small and not guesses["text"].likely:
            guesses["text"] = Estimate(guesses["text"].tokens, self._alone("text", body_bytes), likely=True)
        return guesses

    def known(self, body_bytes: int, inputs: Mapping[Lane, int]) -> dict[Lane, float]:
        """The tokens of a request of which it is known how many inputs of each lane it has."""
        share = self.device_share.value
        if len(inputs) == 1 and "text" in inputs:
            return {"text": share * self._alone("text", body_bytes)}
        return {lane: share * count * self._input_tokens[lane].value for lane, count in inputs.items()}

    def tokenized(self, lane: Lane, tokens: int) -> None:
        """An input of a lane turned out to have so many tokens."""
        self._input_tokens[lane].observe(tokens)

    def learn(self, body_bytes: int, tokens: Mapping[Lane, int], device_share: float = 1.0) -> None:
        """A request turned out to have so many tokens: those of the lanes that it used, and of no others.

        Args:
            body_bytes: Size of its body.
            tokens: By lane.
            device_share: Part of them that had to go through the device.
        """
        self.device_share.observe(device_share)
        if not body_bytes:
            return
        habits = self._habits.setdefault(magnitude(body_bytes), _SizeBucket())
        for lane in self._lanes if self._lanes != ("text",) else ():  # then the rate of texts says it all
            habits.used.setdefault(lane, Mean(0.0)).observe(lane in tokens)
            habits.tokens_per_byte.setdefault(lane, Mean(0.0)).observe(tokens.get(lane, 0) / body_bytes)
        if len(tokens) == 1 and "text" in tokens:
            rate = tokens["text"] / body_bytes
            self._tokens_per_byte.observe(rate)
            if habits.text_alone is None:
                habits.text_alone = Mean(rate)
            habits.text_alone.observe(rate)

    def _alone(self, lane: Lane, body_bytes: int) -> float:
        """The tokens of a body that holds inputs of this lane only."""
        habits = self._habits.get(magnitude(body_bytes))
        if lane == "text":
            rate = habits.text_alone if habits is not None else None
            return body_bytes * (rate if rate is not None else self._tokens_per_byte).value
        if habits is None:
            return self._input_tokens[lane].value if body_bytes else 0.0
        return body_bytes * habits.tokens_per_byte[lane].value


def magnitude(body_bytes: int) -> int:
    """The power of four that a size lies below: bodies that have the same are expected to hold the same."""
    return (body_bytes.bit_length() + 1) // 2
