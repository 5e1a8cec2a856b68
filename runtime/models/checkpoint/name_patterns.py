"""Regular expressions of a model folder for the names of its weights.

Python's engine tries ways to match one after the other, and no other thread runs meanwhile. So an expression is
rejected if it has too many ways for a name.
"""

from __future__ import annotations

import math
import re
from typing import Final

_MOST_CHARACTERS: Final = 1000
"""Most characters of an expression. Published ones have less than a hundred."""
_MOST_WAYS: Final = 10**6
"""Most ways to match a name. An engine needs a hundredth of a second for them."""
_TOKEN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[*+?][?+]?|\{[0-9,]+\}[?+]?|.", re.DOTALL)
_REPEATS: Final = ("*", "+", "{")


def fits_end(pattern: str, name: str) -> bool:
    """Return True if the end of a name, or all of it, matches an expression.

    Args:
        pattern: The expression. It must match whole parts of the name, which dots separate.
        name: The name.

    Raises:
        ValueError: It is no regular expression, or has too many ways to match the name. The message says which.
    """
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(f"too long a regular expression: at most {_MOST_CHARACTERS} characters are read")
    try:
        re.compile(pattern)
        ways = _ways(pattern, len(name))
        if ways > _MOST_WAYS:
            raise ValueError("a regular expression with too many ways to match a name: write several simpler ones")
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from error


def _ways(pattern: str, characters: int) -> float:
    """Return an upper bound of the ways to match a name.

    Args:
        pattern: The expression, which must be valid. The bound is infinite if it repeats a group.
        characters: Length of the name.
    """
    repeats, ways = 1, 1  # the part before the expression is a repeat, too
    branches = [1]
    before = ""
    for found in _TOKEN.finditer(pattern):
        token = found[0]
        if token.startswith("("):
            branches.append(1)
        elif token == ")" and len(branches) > 1:
            ways *= branches.pop()
        elif token == "|":
            branches[-1] += 1
        elif token.startswith("?"):
            ways *= 2
        elif token.startswith(_REPEATS) and before:
            if before == ")":
                return math.inf
            repeats += 1
        before = token
    # Repeats share the characters of a name, one behind the other.
    return math.comb(characters + repeats, repeats) * ways * math.prod(branches)
