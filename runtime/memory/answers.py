"""Memory of answers: rows of the device, and encoded answers until they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Final

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import Overloaded, TooLarge

ROW_NUMBER_BYTES: Final = 4
"""Bytes of a number in a row: a float32. For answers that are small beside their rows, such as scores."""

RESULT_NUMBER_BYTES: Final = 8
"""Bytes of a number in a row and once more in the result."""

WRITTEN_NUMBER_BYTES: Final = 21
"""Bytes of a number in a row, in the result, and in JSON.

In JSON a float32 has 12.2 bytes on average with its comma (vectors of length 1 and width 384)."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After of rejected requests, in seconds."""


class AnswerMemory:
    """Memory of one answer. It is released at the end of the block, when the answer is sent or dropped.

    Args:
        account: Account of all answers, in bytes.
        party: Tenant or client that the answer counts for.
        is_written: The result becomes JSON here. False: the caller gets arrays.
    """

    __slots__ = ("_account", "_holding", "_is_written", "_number_bytes", "_numbers")

    def __init__(self, account: ByteAccount, party: Hashable = None, *, is_written: bool = False) -> None:
        self._account = account
        self._holding = account.hold(party)
        self._is_written = is_written
        self._number_bytes = ROW_NUMBER_BYTES
        self._numbers = 0

    def __enter__(self) -> AnswerMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    @property
    def held_bytes(self) -> int:
        return self._holding.held_bytes

    def expect(self, numbers: int, *, in_answer: bool) -> None:
        """Reserve memory for an answer before it is computed.

        Args:
            numbers: Estimated count of numbers in its rows.
            in_answer: The numbers are the answer. False: a few numbers computed from them are.

        Raises:
            TooLarge: The answer would not fit even if it were the only one.
            Overloaded: Other answers hold too much.
        """
        if in_answer:
            self._number_bytes = WRITTEN_NUMBER_BYTES if self._is_written else RESULT_NUMBER_BYTES
        needed = numbers * self._number_bytes
        if needed > self._account.limit_bytes:
            raise TooLarge(
                f"The answer would take about {needed // 10**6} MB of memory; the limit is "
                f"{self._account.limit_bytes // 10**6} MB: send fewer inputs in a request, or shorter ones."
            )
        if not self._fits(needed):
            raise _no_room()

    def delivered(self, numbers: int) -> Overloaded | None:
        """Count the numbers of a computed row. Returns an error if the answer no longer fits."""
        self._numbers += numbers
        return None if self._fits(self._numbers * self._number_bytes) else _no_room()

    def encoded(self, count: int) -> None:
        """Count the bytes of the encoded answer instead of its rows."""
        self._holding.set(count)

    def give_back(self) -> None:
        """Release all bytes."""
        self._holding.give_back()
        self._numbers = 0

    def _fits(self, needed: int) -> bool:
        return needed <= self.held_bytes or self._holding.take(needed - self.held_bytes)


def expected_numbers(inputs: Iterable[ModelInput], tokens: float, card: ModelCard) -> int:
    """Estimate the numbers in the rows of inputs.

    Args:
        inputs: Inputs of one request.
        tokens: Estimated tokens of all inputs together.
        card: Card of the model.
    """
    a_token = {
        Output.MULTI_VECTOR: card.token_width,
        Output.TOKEN_LABELS: len(card.labels),
        Output.TOKEN_WEIGHTS: 1,
        Output.SPARSE: 2,  # an index and a weight a token; further ones of SPLADE are counted when they are computed
    }
    an_input = {Output.DENSE: card.width, Output.LABELS: len(card.labels)}
    kinds = Counter(given.outputs for given in inputs)
    tokens_each = tokens / max(1, kinds.total())
    numbers = 0.0
    for outputs, count in kinds.items():
        for output in outputs:
            each = an_input[output] if output in an_input else tokens_each * a_token[output]
            numbers += count * each
    return round(numbers)


def _no_room() -> Overloaded:
    message = "The server is at its limit of memory for answers, which it holds until clients have read them."
    return Overloaded(message, retry_after_s=RETRY_AFTER_S)
