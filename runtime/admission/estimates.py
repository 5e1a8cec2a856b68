"""Estimates of a request's tokens at admission, learned from earlier bodies.

A base64 image has a thousand times more bytes for each token than a text, so no single rate fits all bodies. Bodies are
put into buckets by size, in powers of four. Within a bucket rates differ little, and there are few buckets to learn.
Pure: no clock, no await.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from staged_pool.runtime.card import Lane
from staged_pool.stages.scheduling.tuning import LEARNING_WEIGHT, RARE

FIRST_BYTES_PER_TOKEN: Final = 4.0
"""Bytes for each token before the first text: English through a WordPiece tokenizer."""

FIRST_IMAGE_TOKENS: Final = 256.0
"""Tokens of an image before the first one: 224 x 224 pixels in patches of 14 x 14."""

FIRST_PLUGIN_TOKENS: Final = 1.0
"""Tokens of a plugin's request before the first one."""

FIRST_TEXT_TOKENS: Final = 64.0
"""Tokens of a text beside images before the first one."""

IMAGE_BYTES: Final = 4096
"""Least size of a body with an image. Smaller bodies may hold the URL of one.

They count as texts until their bucket has learned better, and remain likely to be texts even then.
"""


class Mean:
    """A running mean: first observations have a large weight, later ones `LEARNING_WEIGHT`."""

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
    """Mean tokens of all bodies of its size; 0 for bodies that do not use the lane."""
    given_present: float
    """Tokens if the body uses the lane."""
    likely: bool
    """True if the body is likely to use the lane."""


@dataclass(slots=True)
class _SizeBucket:
    """Observed contents of bodies of one size."""

    used: dict[Lane, Mean] = field(default_factory=dict)
    """Part of the bodies that use a lane."""
    tokens_per_byte: dict[Lane, Mean] = field(default_factory=dict)
    text_only: Mean | None = None
    """Tokens for each byte of bodies that hold only texts."""


class Estimates:
    """Estimates the contents of requests from those of answered ones.

    Args:
        lanes: Lanes of the model.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._buckets: dict[int, _SizeBucket] = {}
        self._tokens_per_byte = Mean(1.0 / FIRST_BYTES_PER_TOKEN)
        """Tokens for each byte of all requests that hold only texts."""
        self._input_tokens: dict[Lane, Mean] = {
            "text": Mean(FIRST_TEXT_TOKENS),
            "image": Mean(FIRST_IMAGE_TOKENS),
            "plugin": Mean(FIRST_PLUGIN_TOKENS),
        }
        self.device_share = Mean(1.0)
        """Part of the tokens that the device computes; the rest is coalesced or cached."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes for each token of recent texts."""
        return 1.0 / self._tokens_per_byte.value if self._tokens_per_byte.value else FIRST_BYTES_PER_TOKEN

    def guess(self, body_bytes: int, images: int | None = None) -> dict[Lane, Estimate]:
        """Estimate the device work of a body, by lane.

        Args:
            body_bytes: Size of the body.
            images: Number of images in the body. None: unknown.
        """
        share = self.device_share.value
        return {
            lane: Estimate(guess.tokens * share, guess.given_present * share, guess.likely)
            for lane, guess in self._contents(body_bytes, images).items()
        }

    def _contents(self, body_bytes: int, images: int | None) -> dict[Lane, Estimate]:
        if len(self._lanes) == 1:
            tokens = self._only_tokens(self._lanes[0], body_bytes)
            return {self._lanes[0]: Estimate(tokens, tokens, likely=True)}
        if images is not None:
            lane: Lane = "image" if images else "text"
            tokens = images * self._input_tokens["image"].value if images else self._only_tokens("text", body_bytes)
            return {lane: Estimate(tokens, tokens, likely=True)}
        small = body_bytes < IMAGE_BYTES
        bucket = self._buckets.get(magnitude(body_bytes))
        if bucket is None:
            expected: Lane = "text" if small else "image"
            tokens = self._only_tokens(expected, body_bytes)
            return {expected: Estimate(tokens, tokens, likely=True)}
        guesses: dict[Lane, Estimate] = {}
        for lane, used in bucket.used.items():
            tokens = bucket.tokens_per_byte[lane].value * body_bytes
            guesses[lane] = Estimate(tokens, tokens / used.value if used.value > 0.0 else 0.0, used.value >= RARE)
        if small and not guesses["text"].likely:
            guesses["text"] = Estimate(guesses["text"].tokens, self._only_tokens("text", body_bytes), likely=True)
        return guesses

    def known(self, body_bytes: int, inputs: Mapping[Lane, int]) -> dict[Lane, float]:
        """Estimate the tokens of a request whose number of inputs is known, by lane."""
        share = self.device_share.value
        if len(inputs) == 1 and "text" in inputs:
            return {"text": share * self._only_tokens("text", body_bytes)}
        return {lane: share * count * self._input_tokens[lane].value for lane, count in inputs.items()}

    def tokenized(self, lane: Lane, tokens: int) -> None:
        """Learn the tokens of one input."""
        self._input_tokens[lane].observe(tokens)

    def learn(self, body_bytes: int, tokens: Mapping[Lane, int], device_share: float = 1.0) -> None:
        """Learn the tokens of an answered request.

        Args:
            body_bytes: Size of its body.
            tokens: Its tokens by lane, for the lanes that it used.
            device_share: Part of its tokens that the device computed.
        """
        self.device_share.observe(device_share)
        if not body_bytes:
            return
        bucket = self._buckets.setdefault(magnitude(body_bytes), _SizeBucket())
        for lane in self._lanes if self._lanes != ("text",) else ():  # with texts alone, the rate of texts is enough
            bucket.used.setdefault(lane, Mean(0.0)).observe(lane in tokens)
            bucket.tokens_per_byte.setdefault(lane, Mean(0.0)).observe(tokens.get(lane, 0) / body_bytes)
        if len(tokens) == 1 and "text" in tokens:
            rate = tokens["text"] / body_bytes
            self._tokens_per_byte.observe(rate)
            if bucket.text_only is None:
                bucket.text_only = Mean(rate)
            bucket.text_only.observe(rate)

    def _only_tokens(self, lane: Lane, body_bytes: int) -> float:
        """Estimate the tokens of a body that uses this lane only."""
        bucket = self._buckets.get(magnitude(body_bytes))
        if lane == "text":
            rate = bucket.text_only if bucket is not None else None
            return body_bytes * (rate if rate is not None else self._tokens_per_byte).value
        if bucket is None:
            return self._input_tokens[lane].value if body_bytes else 0.0
        return body_bytes * bucket.tokens_per_byte[lane].value


def magnitude(body_bytes: int) -> int:
    """Return the bucket of a size: the power of four that it lies below."""
    return (body_bytes.bit_length() + 1) // 2
