"""Limits on the values of a JSON body, checked before the body is decoded.

The decoder holds the GIL for the whole body, and 2 bytes of JSON can become 80 bytes of memory. So the marks that
separate values (`,`, `:`, `[`, `{`) are counted first. numpy counts them in slices, without the GIL. Marks inside
texts do not count. A small body cannot hold too many values, and is not scanned.
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
"""Bytes that are scanned in one step, which takes a few megabytes of temporary memory."""
VALUES_PER_ITEM: Final = 512
"""Average number of values allowed for one input: enough for a conversation of about 50 messages with parts."""
LEAST_VALUES: Final = 2**16
"""Number of values that any request may have, even if it may have few inputs."""
MAX_DIGITS: Final = 64
"""Maximum digits of one number: the time to decode an integer grows with the square of its digits."""

_ROW: Final = 16
_COMMA, _COLON, _QUOTE, _BACKSLASH = b',:"\\'


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on the values of one JSON body.

    Args:
        items: Maximum number of inputs.
        tokens: Maximum number of numbers, which stand for token ids.
    """

    items: int
    tokens: int

    @property
    def values(self) -> int:
        """Maximum number of lists, objects, fields and texts together.

        Each takes up to 80 bytes decoded: 89 MB for a limit of 2,048 inputs.
        """
        return LEAST_VALUES + VALUES_PER_ITEM * self.items


UNLIMITED: Final = BodyLimits(items=2**31, tokens=2**40)


def is_small(body: Body, limits: BodyLimits) -> bool:
    """Return True if the body is too short to exceed a limit: each value takes at least one byte."""
    return len(body) <= min(limits.values, limits.tokens)


def check_bounds(body: Body, limits: BodyLimits) -> None:
    """Reject JSON with more values than a request may have; the JSON need not be valid.

    Raises:
        TooLarge: The body has too many values.
        InvalidInput: A number has more than `MAX_DIGITS` digits.
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
        return  # within the limits, even if no mark is part of a text
    _check_outside_texts(slices, limits)


def _is_mark(part: Bytes) -> Flags:
    """Flag commas, colons and opening brackets.

    `[` and `{` differ in one bit only, and no other ASCII character becomes `{` by setting it.
    """
    flags: Flags = (part == _COMMA) | (part == _COLON) | ((part | 0x20) == ord("{"))
    return flags


def _is_digit(part: Bytes) -> Flags:
    flags: Flags = (part - np.uint8(ord("0"))) < 10  # unsigned: characters below "0" wrap to large values
    return flags


def _has_row_of_digits(part: Bytes) -> bool:
    """Return True if a number may be long: one with 2 * `_ROW` digits fills a whole row."""
    rows = part[: len(part) // _ROW * _ROW].reshape(-1, _ROW)
    return bool(_is_digit(rows).all(axis=1).any())


def _check_outside_texts(slices: list[Bytes], limits: BodyLimits) -> None:
    scanner = _TextScanner()
    values = numbers = run = 0
    last = 0
    for part in slices:
        outside = scanner.outside(part)
        before = np.concatenate((np.array([last], np.uint8), part[:-1]))
        last = int(part[-1])
        between_numbers = outside & (part == _COMMA) & _is_digit(before)
        found = int(np.count_nonzero(between_numbers))
        numbers += found
        values += int(np.count_nonzero(outside & _is_mark(part))) - found
        if values > limits.values:
            counted = "lists, objects, fields and texts"
            raise TooLarge(f"The body has more than {limits.values} {counted}; send fewer inputs in one request")
        if numbers > limits.tokens:
            raise TooLarge(f"The body has more than {limits.tokens} numbers; send fewer token ids in one request")
        longest, run = _runs(outside & _is_digit(part), run)
        if longest > MAX_DIGITS:
            raise InvalidInput(f"The body has a number of more than {MAX_DIGITS} digits")


def _runs(flags: Flags, before: int) -> tuple[int, int]:
    """Measure the longest run of set flags, and the run at the end.

    Args:
        flags: At least one flag.
        before: Length of the run that ends right before the first flag.
    """
    unset = np.flatnonzero(~flags)
    if not len(unset):
        return before + len(flags), before + len(flags)
    first, last = before + int(unset[0]), len(flags) - 1 - int(unset[-1])
    between = int(np.diff(unset).max()) - 1 if len(unset) > 1 else 0
    return max(first, between, last), last


class _TextScanner:
    """Scanner that tells which characters of JSON slices are inside a text."""

    def __init__(self) -> None:
        self._inside = False
        """The next slice begins inside a text."""
        self._escaped = False
        """A backslash escapes the first character of the next slice."""

    def outside(self, part: Bytes) -> Flags:
        """Flag each character outside texts, closing quotation marks included."""
        quotes = part == _QUOTE
        self._leave_out_escaped(part, quotes)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        if self._inside:
            inside ^= 1
        self._inside = bool(inside[-1])
        flags: Flags = inside == 0
        return flags

    def _leave_out_escaped(self, part: Bytes, quotes: Flags) -> None:
        """Clear the flags of quotation marks that follow an odd number of backslashes."""
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
