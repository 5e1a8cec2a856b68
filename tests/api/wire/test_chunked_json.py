"""JSON in pieces is the JSON of the whole."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire import chunked_json as pieces
from staged_pool.api.wire.chunked_json import EncodedJson, dump, dump_any, dump_around, dump_array, dump_list, joined
from staged_pool.api.wire.encodings import Encoding, Form

ITEMS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=40)


def whole(written: pieces.Pieces) -> Any:
    return json.loads(written if isinstance(written, bytes) else b"".join(written))


@given(ITEMS, st.integers(1, 3 * pieces.STEP_VALUES))
def test_a_list_is_the_same_in_any_number_of_pieces(items: list[list[int]], item_values: int) -> None:
    assert whole(dump_list(iter(items), item_values=item_values)) == items


@given(ITEMS, st.integers(1, 3 * pieces.STEP_VALUES))
def test_so_is_an_object_with_a_list_in_it(items: list[list[int]], item_values: int) -> None:
    written = dump_around({"a": 1}, "b", iter(items), {"c": 2, "d": None}, item_values=item_values)
    assert whole(written) == {"a": 1, "b": items, "c": 2, "d": None}
    assert list(whole(written)) == ["a", "b", "c", "d"]


def test_no_piece_holds_much_more_than_it_may() -> None:
    rows = np.zeros((2048, 1024), np.float32) + 0.1234567
    written = dump_list(rows, item_values=1024)
    assert isinstance(written, tuple)
    assert max(map(len, written)) < pieces.JSON_CHUNK_BYTES + 13 * pieces.STEP_VALUES
    assert min(map(len, written[:-1])) >= pieces.JSON_CHUNK_BYTES
    np.testing.assert_array_equal(np.array(whole(written), np.float32), rows)


@pytest.mark.parametrize("shape", [(40_000,), (3, 20_000), (40_000, 1), (2, 3)])
def test_a_large_array_is_the_same(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert json.loads(dump({"x": dump_array(array)}))["x"] == array.tolist()


TEXTS = st.lists(st.text("base64", max_size=9), max_size=40)


def spelled(text: str) -> EncodedJson:
    return EncodedJson((b'"', *(letter.encode() for letter in text), b'"'))


@given(TEXTS, st.integers(1, 3 * pieces.STEP_VALUES))
def test_what_is_spelled_already_may_stand_in_any_item(texts: list[str], item_values: int) -> None:
    assert whole(dump_list(map(spelled, texts), item_values=item_values)) == texts
    items = [{"a": 1, "b": spelled(text), "c": [None]} for text in texts]
    assert whole(dump_list(items, item_values=item_values)) == [{"a": 1, "b": text, "c": [None]} for text in texts]
    assert json.loads(dump({"a": {"b": [spelled(text) for text in texts]}})) == {"a": {"b": texts}}


def test_a_list_may_hold_both() -> None:
    assert whole(dump_list([spelled("a"), {}, {"b": spelled("c")}, 1.5], item_values=1)) == ["a", {}, {"b": "c"}, 1.5]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_answer_is_made_in_little_more_memory_than_it_has_itself(form: Form) -> None:
    rows = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    encoding = Encoding(form)
    tracemalloc.start()
    written = dump_list(({"embedding": encoding.value(row)} for row in rows), item_values=1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(written, tuple)
    assert peak < 1.5 * sum(map(len, written))


@given(st.lists(st.binary(max_size=9) | st.lists(st.binary(max_size=9), min_size=2).map(tuple), min_size=1))
def test_joined_contents_are_all_of_them(parts: list[Any]) -> None:
    flat = b"".join(part if isinstance(part, bytes) else b"".join(part) for part in parts)
    written = joined(parts)
    assert (written if isinstance(written, bytes) else b"".join(written)) == flat


class Pair(NamedTuple):
    first: Any
    second: Any


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**40) | st.text(max_size=40) | st.just(np.arange(3.0)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3), inner, max_size=5)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=40,
)


@given(ANY, st.integers(1, 20))
def test_any_value_is_the_same_in_steps_of_any_length(value: object, step_values: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "STEP_VALUES", step_values)
        written = dump_any(value)
    assert (written if isinstance(written, bytes) else b"".join(written)) == dump(value)


SMALL = {"label": "x", "score": 0.5, "n": 7}


@pytest.mark.parametrize(
    ("value", "most_steps"),
    [
        pytest.param({"data": [SMALL] * 100_000}, 200, id="objects"),
        pytest.param({str(number): SMALL for number in range(100_000)}, 200, id="named objects"),
        pytest.param([[1, 2.5]] * 100_000, 100, id="lists"),
        pytest.param([(1, [2, {"a": None}])] * 50_000, 100, id="mixed"),
        pytest.param([[0.5] * 1024] * 500, 300, id="rows"),
        pytest.param([["x" * 100_000] * 2, "y" * 200_000, *[SMALL] * 100], 10, id="long texts"),
        pytest.param([{"a": [SMALL] * 5000, "b": 1}, *[SMALL] * 5000], 40, id="one large"),
        pytest.param([{}, [], (), {"a": {}}] * 10_000, 40, id="empty"),
    ],
)
def test_small_entries_share_a_step_that_stays_short(
    value: object, most_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step costs a Python call, and holds up the event loop until it ends."""
    steps: list[bytes] = []

    def recorded(step: object) -> bytes:
        steps.append(dump(step))
        return steps[-1]

    monkeypatch.setattr(pieces, "dump", recorded)
    written = dump_any(value)
    assert (written if isinstance(written, bytes) else b"".join(written)) == dump(value)
    assert len(steps) <= most_steps
    assert max(map(len, steps)) <= 16 * pieces.STEP_VALUES or max(map(len, steps)) == len(dump("y" * 200_000))
