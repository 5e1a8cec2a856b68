"""Memory of answers: the rows that the device gives, and what is made of them until it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Final

from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.model import ModelCard, ModelInput
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import Overloaded, TooLarge

ROW_NUMBER_BYTES: Final = 4
"""A float32 as the device gives it. A score is made of such rows, and is small itself."""

RESULT_NUMBER_BYTES: Final = 8
"""A float32 as the device gives it, and once more in the result."""

WRITTEN_NUMBER_BYTES: Final = 21
"""The same, and its JSON: the shortest text that reads back as the same float32. With its comma it has 12.2 bytes on
average, measured on vectors of length 1 and width 384."""

RETRY_AFTER_S: Final = 1.0


class AnswerMemory:
    """The account of one answer; given back when the block ends, which is when the answer is sent or of no use.

    Args:
        account: Bytes of all answers.
        party: Tenant or client that it counts for.
        is_written: The result becomes JSON here. False: its caller gets it as arrays.
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
        """Take room for an answer before any of it is computed.

        Args:
            numbers: Numbers that its rows will hold, as far as is known.
            in_answer: The numbers are the answer. False: it is a few that are made of them.

        Raises:
            TooLarge: It would not fit if nothing else were there.
            Overloaded: Others hold too much.
        """
        if in_answer:
            self._number_bytes = WRITTEN_NUMBER_BYTES if self._is_written else RESULT_NUMBER_BYTES
        needed = numbers * self._number_bytes
        if needed > self._account.limit_bytes:
            raise TooLarge(
                f"The answer would take about {needed // 10**6} MB of memory; {self._account.limit_bytes // 10**6} MB "
                "are given to one at most: send fewer inputs in a request, or shorter ones."
            )
        if not self._fits(needed):
            raise _no_room()

    def delivered(self, numbers: int) -> Overloaded | None:
        """Count numbers of a row that is there. Returns the error of an answer that grows beyond the room for it."""
        self._numbers += numbers
        return None if self._fits(self._numbers * self._number_bytes) else _no_room()

    def made(self, count: int) -> None:
        """Count what was made of the rows, in bytes, and the rows no more."""
        self._holding.set(count)

    def give_back(self) -> None:
        """Hold nothing."""
        self._holding.give_back()
        self._numbers = 0

    def _fits(self, needed: int) -> bool:
        return needed <= self.held_bytes or self._holding.take(needed - self.held_bytes)


def expected_numbers(inputs: Iterable[ModelInput], tokens: float, card: ModelCard) -> int:
    """Estimate the numbers in the rows of inputs.

    Args:
        inputs: Those of one request.
        tokens: Tokens of all of them together, as far as is known.
        card: Of the model.
    """
    a_token = {
        Output.MULTI_VECTOR: card.token_width,
        Output.TOKEN_LABELS: len(card.labels),
        Output.TOKEN_WEIGHTS: 1,
        Output.SPARSE: 2,  # an index and a weight; SPLADE gives more, which are counted as they come
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
    message = "The server holds as many bytes of answers as it may. They are held until their clients have read them."
    return Overloaded(message, retry_after_s=RETRY_AFTER_S)
