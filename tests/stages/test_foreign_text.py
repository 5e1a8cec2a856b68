"""Text of others: its mark is left out, and whatever is wrong is named with its place."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.foreign_text import BadText, decoded, fault_of, lines_of, other_encoding, text_of, unmarked

NOT_UTF_8 = "it is not UTF-8, from byte {} of line {} on"
WIDE = "it is {}, but must be UTF-8"
CYRILLIC = "Привет, мир\nещё один текст\n"
CHINESE = "一个句子，另一个句子\n第三个\n"
REQUEST = '{"custom_id": "a"}'


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n")).map(lambda text: "a" + text))
def test_a_text_is_itself_with_and_without_a_mark(text: str) -> None:
    assert text_of(text.encode()) == text_of(codecs.BOM_UTF8 + text.encode()) == text


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]))), st.sampled_from(["\n", "\r\n"]), st.booleans()
)
def test_lines_have_either_end_and_the_last_one_needs_none(lines: list[str], end: str, is_ended: bool) -> None:
    content = end.join(lines) + (end if lines and (is_ended or not lines[-1]) else "")
    assert lines_of(content.encode()) == lines
    assert lines_of(codecs.BOM_UTF8 + content.encode()) == lines


def test_other_characters_end_no_line() -> None:
    assert lines_of("a\rb\u2028c\x0bd\x85e\n".encode()) == ["a\rb\u2028c\x0bd\x85e"]


@pytest.mark.parametrize(
    ("content", "byte", "line"),
    [
        (b"\xff", 1, 1),
        (b"ok \xff", 4, 1),
        (b"one\ntwo\r\nthree \xc3\nfour", 7, 3),
        (b"\xef\xbb\xbfa\xff", 2, 1),
        ("grün\nn".encode() + b"\xed\xa0\xbd", 2, 2),
        (b"a\n\xc3", 1, 2),
    ],
)
def test_bytes_that_are_not_utf_8_have_a_place(content: bytes, byte: int, line: int) -> None:
    message = NOT_UTF_8.format(byte, line)
    with pytest.raises(BadText) as raised:
        lines_of(content)
    assert str(raised.value) == fault_of(content) == message


def test_a_line_of_a_file_has_its_own_number() -> None:
    assert fault_of(b"a\xff", line=7) == NOT_UTF_8.format(2, 7)
    assert decoded(codecs.BOM_UTF8 + b"a", line=2) == "\ufeffa"  # a mark begins a text, and no other line


@pytest.mark.parametrize("text", ["plain\ntext\n", CYRILLIC, REQUEST, "a", "é\n", "\nb\n"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("is_marked", [False, True])
def test_another_encoding_is_named(text: str, encoding: str, is_marked: bool) -> None:
    content = (("\ufeff" if is_marked else "") + text).encode(encoding)
    assert fault_of(content) == WIDE.format(encoding[:6].upper())
    with pytest.raises(BadText, match=encoding[:6].upper()):
        unmarked(content)


def test_characters_without_nuls_are_told_by_their_line_ends_or_by_their_place() -> None:
    assert other_encoding(CHINESE.encode("utf-16-le")) == "UTF-16"
    assert fault_of(CHINESE[1:4].encode("utf-16-le")).startswith("it is not UTF-8, from byte ")


@pytest.mark.parametrize("content", [b"", b"\0", b"a\tb\0c\r\n" * 300, b"one\0two\0three\0", b"\0\0\0\0", b"ab\0"])
def test_a_nul_in_a_text_is_no_other_encoding(content: bytes) -> None:
    assert other_encoding(content) == ""
    assert text_of(content) == content.decode()


@pytest.mark.parametrize("text", [CYRILLIC, CHINESE, "grün " * 300, "\x1b[1mbold\x1b[0m\f\n"])
def test_utf_8_is_no_other_encoding(text: str) -> None:
    for cut in range(4):
        assert text_of(("x" * cut + text * 200).encode()) == "x" * cut + text * 200
