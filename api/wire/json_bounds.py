"""A bound on what a JSON body may hold, counted before it is decoded and without the interpreter's lock.

A decoder makes a whole message in one call under the lock, and two bytes of JSON can become eighty of memory. So the
marks between values are counted first: numpy does that in slices, and gives the lock up meanwhile. Texts may hold any
number of them. Bodies of few bytes cannot hold many values, and are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from staged_pool.stages.errors import InvalidInput, TooLarge

Body: TypeAlias = bytes | bytearray
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

SLICE: Final = 2**19
"""Bytes that are looked at in one go; a few megabytes of memory meanwhile."""
VALUES_PER_ITEM: Final = 512
"""Of one input on average: a conversation of about 50 messages with parts has as many."""
LEAST_VALUES: Final = 2**16
"""Of a request, however few inputs it may have."""
MAX_DIGITS: Final = 64
"""Characters of one number: the decoder's time for an integer grows with the square of its digits."""

_ROW: Final = 16
_COMMA, _COLON, _QUOTE, _BACKSLASH = b',:"\\'


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold.

    Args:
        items: Inputs.
        tokens: Numbers, which stand for token ids.
    """

    items: int
    tokens: int

    @property
    def values(self) -> int:
        """Lists, objects, fields and texts. Each takes up to 80 bytes decoded: 89 MB for a limit of 2,048 inputs."""
        return LEAST_VALUES + VALUES_PER_ITEM * self.items


UNLIMITED: Final = Limits(items=2**31, tokens=2**40)


def is_small(body: Body, limits: Limits) -> bool:
    """True for a body that cannot hold too many values, as each needs a byte at least."""
    return len(body) <= min(limits.values, limits.tokens)


def check_bounds(body: Body, limits: Limits) -> None:
    """Reject JSON with more values than a request may have. It need not be valid.

    Raises:
        TooLarge: It has more.
        InvalidInput: A number in it is longer than `MAX_DIGITS`.
    """
    if is_small(body, limits):
        return
    whole = np.frombuffer(body, np.uint8)
    slices = [whole[first : first + SLICE] for first in range(0, len(whole), SLICE)]
    marks, long_digits = 0, False
    for part in slices:
        marks += int(np.count_nonzero(_is_mark(part)))
        long_digits = long_digits or _has_row_of_digits(part)
    if marks <= min(limits.values, limits.tokens) and not long_digits:
        return  # even if none of them is part of a text
    _check_outside_texts(slices, limits)


def _is_mark(part: Bytes) -> Flags:
    """Commas, colons and opening brackets: `[` and `{` differ in one bit, which no other ASCII character shares."""
    flags: Flags = (part == _COMMA) | (part == _COLON) | ((part | 0x20) == ord("{"))
    return flags


def _is_digit(part: Bytes) -> Flags:
    flags: Flags = (part - np.uint8(ord("0"))) < 10  # unsigned: what is below "0" is far above
    return flags


def _has_row_of_digits(part: Bytes) -> bool:
    """True if a number may be long: one of twice so many digits fills a whole row."""
    rows = part[: len(part) // _ROW * _ROW].reshape(-1, _ROW)
    return bool(_is_digit(rows).all(axis=1).any())


def _check_outside_texts(slices: list[Bytes], limits: Limits) -> None:
    reader = _Texts()
    values = numbers = run = 0
    last = 0
    for part in slices:
        outside = reader.outside(part)
        before = np.concatenate((np.array([last], np.uint8), part[:-1]))
        last = int(part[-1])
        between_numbers = outside & (part == _COMMA) & _is_digit(before)
        found = int(np.count_nonzero(between_numbers))
        numbers += found
        values += int(np.count_nonzero(outside & _is_mark(part))) - found
        if values > limits.values:
            what = "lists, objects, fields and texts"
            raise TooLarge(f"The body has more than {limits.values} {what}; send fewer inputs in one request")
        if numbers > limits.tokens:
            raise TooLarge(f"The body has more than {limits.tokens} numbers; send fewer token ids in one request")
        longest, run = _runs(outside & _is_digit(part), run)
        if longest > MAX_DIGITS:
            raise InvalidInput(f"The body has a number of more than {MAX_DIGITS} digits")


def _runs(flags: Flags, before: int) -> tuple[int, int]:
    """The longest run of set flags, and the length of the last.

    Args:
        flags: At least one.
        before: Set flags right before the first.
    """
    unset = np.flatnonzero(~flags)
    if not len(unset):
        return before + len(flags), before + len(flags)
    first, last = before + int(unset[0]), len(flags) - 1 - int(unset[-1])
    between = int(np.diff(unset).max()) - 1 if len(unset) > 1 else 0
    return max(first, between, last), last


class _Texts:
    """The texts of JSON that comes in slices."""

    def __init__(self) -> None:
        self._inside = False
        """The next slice begins within a text."""
        self._escaped = False
        """A backslash before it escapes its first character."""

    def outside(self, part: Bytes) -> Flags:
        """Flag each character that is not of a text; a closing quotation mark is none, either."""
        quotes = part == _QUOTE
        self._leave_out_escaped(part, quotes)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        if self._inside:
            inside ^= 1
        self._inside = bool(inside[-1])
        flags: Flags = inside == 0
        return flags

    def _leave_out_escaped(self, part: Bytes, quotes: Flags) -> None:
        """Unset the flags of quotation marks behind an odd number of backslashes."""
        slashes = part == _BACKSLASH
        if not self._escaped and not slashes.any():
            return
        places = np.arange(len(part), dtype=np.int32)
        others = np.maximum.accumulate(np.where(slashes, np.int32(-1), places))
        run = places - others  # backslashes that end here
        if self._escaped:
            run[others == -1] += 1
        odd = (run & 1).astype(bool)
        if self._escaped:
            quotes[0] = False
        quotes[1:] &= ~odd[:-1]
        self._escaped = bool(odd[-1])
