"""Foreign JSON: whatever is wrong with it is one error, which says where."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages import foreign_json
from staged_pool.stages.foreign_json import MOST_DEPTH, BadJson, check_depth, decode

READERS: tuple[Callable[[Any], Any], ...] = (json.loads, orjson.loads, msgspec.json.decode)

TEXTS = st.sampled_from(["", "[", "]]", "{", '"', '\\"[', "\\", "\\\\", "a\n{"])
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    """Count the lists and objects inside one another."""
    match value:
        case dict():
            return 1 + max(map(depth_of, value.values()), default=0)
        case list():
            return 1 + max(map(depth_of, value), default=0)
    return 0


@given(VALUES, st.integers(0, 4), st.sampled_from([None, 1]))
def test_exactly_what_is_too_deep_is_rejected(value: object, most: int, indent: int | None) -> None:
    content = json.dumps(value, indent=indent).encode()
    if depth_of(value) <= most:
        assert decode(content, most_depth=most) == value
    else:
        with pytest.raises(BadJson, match=f"more than {most} lists and objects"):
            decode(content, most_depth=most)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("opens", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("closes", [True, False])
def test_brackets_end_no_decoder(read: Callable[[Any], Any], opens: bytes, closes: bool) -> None:
    content = opens * 5000 + (b"]" * 5000 if closes and opens == b"[" else b"")
    with pytest.raises(BadJson, match=r"it is nested too deeply: more than 128 .*, from line 1, column"):
        decode(content, read)


@pytest.mark.parametrize("read", READERS)
def test_without_a_limit_a_decoder_that_recurses_too_deep_is_an_error_like_any_other(
    read: Callable[[Any], Any],
) -> None:
    with pytest.raises(BadJson):
        decode(b"[" * 200_000 + b"]" * 200_000, read, most_depth=None)


def test_the_place_of_the_fault_is_named() -> None:
    content = '{\n "brackets in a text": "[[[[",\n "deep": ' + "[" * 5 + "]" * 5 + "}"
    with pytest.raises(BadJson, match="more than 5 lists and objects inside one another, from line 3, column 14 on"):
        decode(content, most_depth=5)
    assert decode(content, most_depth=6)["deep"] == [[[[[]]]]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a" 1}', "Expecting ':' delimiter, in line 1, column 6"),
        (b"", "Expecting value"),
        (b'["\xff"]', "it is not UTF-8, from its byte 3 on"),
        (b'"' + b"a" * 100 + b'"', "it has 102 bytes, and 99 are allowed"),
    ],
)
def test_what_is_no_json_is_told(content: bytes, says: str) -> None:
    with pytest.raises(BadJson, match=says):
        decode(content, most_bytes=99)


def test_errors_of_a_decoder_with_types_pass() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        decode(b'["a"]', msgspec.json.Decoder(list[int]).decode)


@given(st.text('[]{}"\\\n a', max_size=40), st.integers(0, 3), st.integers(1, 7))
def test_the_place_of_the_fault_is_the_same_however_content_is_sliced(content: str, most: int, size: int) -> None:
    def told(slice_size: int) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(foreign_json, "_SLICE", slice_size)
            try:
                check_depth(content, most)
            except BadJson as error:
                return str(error)
        return None

    depth, in_text = 0, False
    found = None
    for part in re.finditer(r'\\["\\]|.', content, re.DOTALL):
        in_text ^= part[0] == '"'
        depth += 0 if in_text else {"[": 1, "{": 1, "]": -1, "}": -1}.get(part[0], 0)
        if depth > most:
            before = content[: part.start()]
            found = f"line {before.count(chr(10)) + 1}, column {part.start() - before.rfind(chr(10))} on"
            break
    assert told(size) == told(100)
    assert (told(size) or "").rpartition("from ")[2] == (found or "")


@pytest.mark.parametrize("quotes", [2**10, 2**19])
def test_a_long_text_of_quotes_in_front_of_the_fault_is_read_once(quotes: int) -> None:
    # To look again from each of these quotes would take days.
    content = b'["' + b'\\"' * quotes + b'x" ,' + b"[" * 200
    with pytest.raises(BadJson, match=f"inside one another, from line 1, column {len(content) - 200 + MOST_DEPTH} on"):
        decode(content)
    with pytest.raises(BadJson, match="Unterminated string"):
        decode(b"[]," * 200 + b'"' + b'\\"' * quotes, lambda _: json.loads('"'))


DENSE = {
    "texts": b'"",',
    "quotes": b'\\"',
    "backslashes": b"\\\\",
    "levels": b"[" * 100 + b"]" * 100 + b",",
    "lists": b"[],",
    "brackets in texts": b'["["],',
}


@pytest.mark.parametrize("kind", DENSE)
def test_a_check_of_the_depth_holds_little_beside_the_content(kind: str) -> None:
    quote = b'"' if kind in ("quotes", "backslashes") else b""
    dense = DENSE[kind] * (2**23 // len(DENSE[kind]))
    content = b"[" + b"[]," * 200 + quote + dense + quote + b"]"
    tracemalloc.start()
    try:
        check_depth(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(content) // 2


class Looks(str):
    """A string that notes how much of it is looked at."""

    __slots__ = ("sizes",)
    sizes: list[int]

    def __new__(cls, content: str) -> Looks:
        made = super().__new__(cls, content)
        made.sizes = []
        return made

    def __getitem__(self, place: Any) -> str:
        found = super().__getitem__(place)
        self.sizes.append(len(found))
        return found


def test_the_depth_is_checked_in_small_steps_each_over_new_content() -> None:
    content = Looks("[" + "[]," * 2**18 + '"' + '\\"' * 2**18 + '"]')
    check_depth(content)
    assert max(content.sizes) <= 2**16, "a call in C holds the interpreter's lock to its end"
    assert len(content) <= sum(content.sizes) <= len(content) + 2**17


def test_many_brackets_side_by_side_are_not_deep() -> None:
    content = json.dumps({"merges": [["a", "b"]] * 10_000, "objects": [{}] * 10_000}).encode()
    check_depth(content, 3)
    check_depth(b"[" + b"]" * 10_000 + b"[" * (MOST_DEPTH - 1))  # no JSON, and not deep either
    check_depth('"half of a pair: \ud800"' + "[]" * 200)
