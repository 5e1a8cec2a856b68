"""Encoding formats found in a body."""

from __future__ import annotations

import json

import pytest

from staged_pool.api.tracing.encoding_formats import MAX_BYTES, encoding_formats


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("base64", ["base64"]),
        (["float", "int8"], ["float", "int8"]),
        (["float", "a secret"], ["float"]),
        ("secret", []),
        (None, []),
        (5, []),
        ({"base64": 1}, []),
    ],
)
def test_known_values_of_the_field_are_found(given: object, found: list[str]) -> None:
    assert encoding_formats(json.dumps({"input": "a", "encoding_format": given}).encode()) == found


def test_a_text_that_looks_like_the_field_is_none() -> None:
    text = '"encoding_format": "base64"'
    assert encoding_formats(json.dumps({"input": text}).encode()) == []


def test_a_long_body_is_not_searched() -> None:
    field = b'{"encoding_format":"base64"}'
    assert encoding_formats(field.ljust(MAX_BYTES)) == ["base64"]
    assert encoding_formats(field.ljust(MAX_BYTES + 1)) == []
