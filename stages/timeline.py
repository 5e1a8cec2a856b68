"""The timeline of a request: its time in each stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from staged_pool.stages.trace import Trace


@dataclass(slots=True)
class Timeline:
    """Times of one request in seconds, filled in as it moves.

    Items of a request pass a stage side by side, so each field is the longest time of any one of them.
    """

    parse_s: float = 0.0
    """Decoding, checking and cutting the request into items, including the wait for parse."""
    fetch_s: float = 0.0
    """Fetching the images that are URLs, including the wait for other fetches."""
    preprocess_s: float = 0.0
    """The preprocess call, including the wait for it."""
    queue_s: float = 0.0
    """Waiting for the device."""
    device_s: float = 0.0
    """Collating and the forward."""
    postprocess_s: float = 0.0
    """Making the answer from rows, including the wait for it."""
    hooks: dict[str, float] = field(default_factory=dict)
    """Seconds in each hook of a plugin, without the wait for its limiter. Empty: no plugin was used."""
    items: int = 0
    """Number of items."""
    images: int = 0
    """Number of images in them."""
    tokens: int = 0
    """Tokens of all items after truncation, special tokens included."""
    trace: Trace | None = None
    """Trace of the request. None: it is not traced."""
