"""Memory of answers: rows of the device, and encoded answers until they are sent or on the disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from functools import partial
from types import TracebackType
from typing import Final

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.runtime.memory.value_bytes import bytes_of, plain_bytes
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import Overloaded, TooLarge
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.user_code import user_code

ROW_NUMBER_BYTES: Final = 4
"""Bytes of a number in a row: a float32. For answers that are small beside their rows, such as scores."""

RESULT_NUMBER_BYTES: Final = 8
"""Bytes of a number in a row and once more in the result."""

WRITTEN_NUMBER_BYTES: Final = 21
"""Bytes of a number in a row, in the result, and in JSON.

In JSON a float32 has 12.2 bytes on average with its comma (vectors of length 1 and width 384)."""

ESTIMATE_ERROR: Final = 2
"""Factor by which an estimate of tokens or of rows may be too large."""

KEPT_NUMBER_BYTES: Final = 17
"""Bytes of a kept number without its row, and of the same in JSON."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After of rejected requests, in seconds."""


class AnswerMemory:
    """Memory of one answer, from its first row to its last byte.

    Every door of an engine has one. It is released at the end of its block, or by `give_back`.

    Args:
        account: Account of all answers, in bytes.
        party: Tenant or client that the answer counts for.
        is_written: The result becomes JSON here. False: the caller gets arrays.
        is_patient: The caller waits for room, see `gather`. The estimate of an answer that may fit is no reason to
            reject it: whether it fits is known once it is computed.
    """

    __slots__ = (
        "_account",
        "_expected_bytes",
        "_holding",
        "_is_over",
        "_is_patient",
        "_is_written",
        "_least_bytes",
        "_number_bytes",
        "_numbers",
        "_others",
        "_party",
        "_rows",
    )

    def __init__(
        self, account: ByteAccount, party: Hashable = None, *, is_written: bool = False, is_patient: bool = False
    ) -> None:
        self._account = account
        self._party = party
        self._holding = account.hold(party)
        self._is_written = is_written
        self._is_patient = is_patient
        self._number_bytes = ROW_NUMBER_BYTES
        self._numbers = self._rows = 0
        self._expected_bytes = 0
        """Bytes that are held whatever the rows so far are: by an estimate, or gathered."""
        self._least_bytes = 0
        """Bytes that an earlier try has found to be needed, and did not get."""
        self._others: set[AnswerMemory] = set()
        self._is_over = False

    def __enter__(self) -> AnswerMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    @property
    def held_bytes(self) -> int:
        return self._holding.held_bytes

    @property
    def is_over(self) -> bool:
        """True once all bytes have been released, after which nobody releases them again."""
        return self._is_over

    @property
    def lacks_room(self) -> bool:
        """True: the last try was rejected because other answers hold too much; see `gather`."""
        return self._least_bytes > self.held_bytes

    def another(self, account: ByteAccount | None = None) -> AnswerMemory:
        """Return the memory of one more answer of the same caller; it is released with this one, or before.

        If this one is over, the caller releases the other.

        Args:
            account: Its account. None: the same one.
        """
        other = AnswerMemory(account or self._account, self._party, is_written=self._is_written)
        if not self._is_over:
            self._others.add(other)
        return other

    def drop(self, other: AnswerMemory) -> None:
        """Release what `another` has returned."""
        other.give_back()
        self._others.discard(other)

    def begin(self) -> None:
        """Begin a try to answer. An earlier one may have counted rows, which are gone."""
        self._numbers = self._rows = 0

    def expect(self, numbers: int, *, in_answer: bool) -> None:
        """Reserve memory for an answer before it is computed.

        Args:
            numbers: Estimated count of numbers in its rows.
            in_answer: The numbers are the answer. False: a few numbers computed from them are.

        Raises:
            TooLarge: By the estimate, the answer would not fit even if it were the only one.
            Overloaded: Other answers hold too much, or the load of a model does.
        """
        if in_answer:
            self._number_bytes = WRITTEN_NUMBER_BYTES if self._is_written else RESULT_NUMBER_BYTES
        needed, most = numbers * self._number_bytes, self._account.most_bytes
        if self._is_patient and most < needed <= ESTIMATE_ERROR * most:
            needed = most
        if (error := self._grow(needed)) is not None:
            raise error
        self._expected_bytes = self.held_bytes

    def delivered(self, numbers: int, left: int = 0) -> Overloaded | TooLarge | None:
        """Count the numbers of a computed row. Returns an error if the answer no longer fits.

        There may be more than was expected, as of a plugin that tells nothing before. Then room is taken for the rows
        to come as well, by the mean of these, and some is left for others. So of several answers that do not fit
        together, one goes on, and others end early. Each further row corrects the guess.

        Args:
            numbers: Count of numbers in the row.
            left: Rows of the answer that are still to come.
        """
        self._numbers += numbers
        return self._count(left)

    def _count(self, left: int) -> Overloaded | TooLarge | None:
        self._rows += 1
        needed, held = self._numbers * self._number_bytes, self.held_bytes
        guess = needed + left * needed // self._rows
        if needed <= held:
            if (keeps := max(guess, self._expected_bytes) if left else needed) < held:
                self._holding.set(keeps)
            return None
        account = self._account
        wanted = max(needed, min(guess, held + account.room(self._party)))
        if needed <= account.most_bytes and min(guess, account.limit_bytes) > ESTIMATE_ERROR * wanted:
            error: Overloaded | TooLarge | None = self._overloaded(needed)
        else:
            error = self._grow(wanted)
        if isinstance(error, Overloaded):
            # The rest is a guess. Each further try has twice the room, so there are few of them.
            self._least_bytes = min(account.most_bytes, max(self._least_bytes, 2 * needed))
        return error

    async def gather(self, priority: Priority) -> None:
        """Wait for the room that the last try has lacked, and hold it.

        A caller that waits never computes rows again and again, for which there is no room: see `Holding.gather`.
        """
        self._holding.give_back()
        await self._holding.gather(min(self._least_bytes, self._account.most_bytes), priority)
        self._expected_bytes = self.held_bytes

    async def bytes_of(self, value: object, offload: Offload) -> int:
        """Estimate the bytes of a user's value that is kept for the answer.

        Values that are large, or of classes of users, are counted in a thread.

        Args:
            value: The value; see `value_bytes.bytes_of`.
            offload: Runs the count.

        Raises:
            Exception: A method of the value has raised it, or a `Panic` stands for that.
        """
        number_bytes = KEPT_NUMBER_BYTES if self._is_written else RESULT_NUMBER_BYTES
        if (count := plain_bytes(value, number_bytes)) is not None:
            return count
        async with user_code():
            return await offload(partial(bytes_of, number_bytes=number_bytes, most=self._account.most_bytes), value)

    def keep(self, count: int, left: int = 0) -> None:
        """Count a value that is kept for the answer, with the others so far. The first ones take room for the rest.

        Args:
            count: Its bytes; see `bytes_of`.
            left: Values of the answer that are still to come.

        Raises:
            TooLarge: The answer would not fit even if it were the only one.
            Overloaded: Other answers hold too much, or the load of a model does.
        """
        self._numbers += count
        self._number_bytes = 1
        if (error := self._count(left)) is not None:
            raise error

    async def part(self, count: int, priority: Priority) -> Holding:
        """Wait for room for a value beside the others, and hold it. The caller gives it back.

        Args:
            count: Its bytes; see `bytes_of`.
            priority: Urgency of the request.

        Raises:
            TooLarge: It would not fit even if it were the only one.
        """
        if count > self._account.most_bytes:
            raise self._too_large(count)
        held = self._account.hold(self._party)
        await held.gather(count, priority)
        return held

    def encoded(self, count: int) -> None:
        """Count the bytes of the encoded answer instead of its rows."""
        self._holding.set(count)

    def give_back(self) -> None:
        """Release all bytes."""
        self._is_over = True
        self._holding.give_back()
        for other in self._others:
            other.give_back()
        self._others.clear()

    def _grow(self, needed: int) -> Overloaded | TooLarge | None:
        """Hold at least `needed` bytes, or return the reason why that cannot be."""
        if needed > self._account.most_bytes:
            return self._too_large(needed)
        more = needed - self.held_bytes
        if more <= 0 or self._holding.take_alone(more) or self._holding.take(more):
            return None
        return self._overloaded(needed)

    def _too_large(self, needed: int) -> TooLarge:
        return TooLarge(
            f"The answer would take about {needed // 10**6} MB of memory; the limit is "
            f"{self._account.most_bytes // 10**6} MB: send fewer inputs in a request, or shorter ones."
        )

    def _overloaded(self, needed: int) -> Overloaded:
        """Return the error of an answer that lacks room now, and note its bytes."""
        self._least_bytes = max(self._least_bytes, needed)
        message = "The server is at its limit of memory for answers, which it holds until clients have read them."
        if needed > self._account.limit_bytes:
            message = "The server has too little memory for this answer until it has loaded a model."
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)


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
    kinds = Counter((given.outputs, given.chunk_tokens) for given in inputs)
    tokens_each = tokens / max(1, kinds.total())
    numbers = 0.0
    for (outputs, chunk_tokens), count in kinds.items():
        rows_each = tokens_each if chunk_tokens is None else math.ceil(tokens_each / chunk_tokens)
        for output in outputs:
            each = an_input[output] if output in an_input else rows_each * a_token[output]
            numbers += count * each
    return round(numbers)
