"""Load of a request: its tokens, counted as its inputs move through the stages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from staged_pool.stages.errors import StagedPoolError


class RequestLoad(Protocol):
    """The tokens of one request by lane. Stages report to it; admission keeps the account."""

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        """Return True if `inputs` more inputs may go to preprocess.

        Enough of the lane must be left for other requests.
        """
        ...

    def tokens_of(self, lane: Hashable, inputs: int) -> int:
        """Estimate the tokens of inputs that are not tokenized yet; at least 1."""
        ...

    def fed(self, lane: Hashable, inputs: int) -> None:
        """Count inputs that go to preprocess."""

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        """Replace the estimate of one input by its true number of tokens."""

    def computed(self, lane: Hashable, tokens: int) -> None:
        """Count the tokens of an item that has left the device."""

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        """Subtract tokens that were coalesced; a negative number adds them back."""

    def cached(self, lane: Hashable, tokens: int) -> None:
        """Subtract tokens whose rows are cached."""

    def delivered(self, numbers: int, left: int) -> StagedPoolError | None:
        """Count the numbers of a row that is kept for the answer.

        Args:
            numbers: Count of numbers in the row.
            left: Rows of the request that are still to come.

        Returns:
            The error of an answer that has grown too large; None if it has not.
        """
