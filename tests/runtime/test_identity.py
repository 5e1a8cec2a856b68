"""Fingerprints of inputs: everything that the device reads, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staged_pool.runtime.caching.fingerprints import IDENTITY_BYTES, Identities, SharingScopes
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, Output, TextInput
from staged_pool.runtime.spans import Span
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

IDENTITIES = Identities()
ALL = frozenset({Output.DENSE, Output.SPARSE})
PIXELS = Pixels(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
SEQUENCE = TokenSequence([1, 2, 3], DENSE_ONLY)
IMAGE = PreparedImage(PIXELS, DENSE_ONLY, 4)

SEQUENCES: Sequence[TokenSequence] = [
    SEQUENCE,
    replace(SEQUENCE, ids=[1, 2]),
    replace(SEQUENCE, ids=[1, 3, 2]),
    replace(SEQUENCE, ids=[1, 2, 3, 0]),
    replace(SEQUENCE, outputs=ALL),
    replace(SEQUENCE, first_tokens=0),
    replace(SEQUENCE, first_tokens=2),
    replace(SEQUENCE, prompt_tokens=2),
    replace(SEQUENCE, unseen_tokens=2),
    replace(SEQUENCE, looked_up=True),
    replace(SEQUENCE, kept=()),
    replace(SEQUENCE, kept=(0, 2)),
    replace(SEQUENCE, kept=(0, 1)),
    replace(SEQUENCE, spans=()),
    replace(SEQUENCE, spans=(Span(0, 0, None), Span(0, 3, 0), Span(3, 4, 0))),
    replace(SEQUENCE, spans=(Span(0, 0, None), Span(0, 3, 0), Span(4, 5, 1))),
    replace(SEQUENCE, chunks=(1, 2)),
    replace(SEQUENCE, chunks=(2, 1)),
    replace(SEQUENCE, adapter="query"),
    replace(SEQUENCE, adapter=""),
    replace(SEQUENCE, images=(PIXELS,)),
    replace(SEQUENCE, images=(PIXELS, PIXELS)),
    replace(SEQUENCE, images=(replace(PIXELS, grid=(1, 2)),)),
]
IMAGES: Sequence[PreparedImage] = [
    IMAGE,
    replace(IMAGE, outputs=ALL),
    replace(IMAGE, tokens=5),
    replace(IMAGE, pixels=replace(PIXELS, grid=(2, 2))),
    replace(IMAGE, pixels=Pixels(PIXELS.values.reshape(3, 4, 1))),
    replace(IMAGE, pixels=Pixels(PIXELS.values.astype(np.float32))),
    replace(IMAGE, pixels=Pixels(PIXELS.values + np.uint8(1))),
]


def test_any_difference_makes_another_identity() -> None:
    payloads: list[Payload] = [*SEQUENCES, *IMAGES]
    made = [IDENTITIES.of(payload) for payload in payloads]
    assert len(set(made)) == len(made)
    assert {len(identity) for identity in made} == {IDENTITY_BYTES}


@pytest.mark.parametrize(("kind", "examples"), [(TokenSequence, SEQUENCES), (PreparedImage, IMAGES)])
def test_every_field_that_a_payload_has_is_among_those_that_are_told_apart(
    kind: type[Any], examples: Sequence[Any]
) -> None:
    first, *others = examples
    differing = {
        field.name
        for field in fields(kind)
        for other in others
        if repr(getattr(other, field.name)) != repr(getattr(first, field.name))
    }
    assert differing == {field.name for field in fields(kind)}, "a new field must be hashed, too"


numbers = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    spans = st.builds(Span, st.integers(0, 2), st.integers(0, 2), st.none() | st.integers(0, 1))
    return TokenSequence(
        draw(numbers),
        draw(st.sampled_from([DENSE_ONLY, ALL])),
        draw(st.none() | st.integers(0, 2)),
        draw(st.integers(0, 2)),
        draw(st.integers(0, 2)),
        draw(st.none() | numbers.map(tuple)),
        draw(st.none() | st.lists(spans, max_size=2).map(tuple)),
    )


@given(sequences(), sequences())
def test_identities_are_equal_where_payloads_are(one: TokenSequence, other: TokenSequence) -> None:
    assert (IDENTITIES.of(one) == IDENTITIES.of(other)) == (one == other)
    assert IDENTITIES.of(one) == IDENTITIES.of(replace(one, ids=list(one.ids)))


def test_pixels_that_lie_otherwise_in_memory_are_the_same() -> None:
    turned: NDArray[np.uint8] = np.asfortranarray(PIXELS.values, np.uint8)
    assert not turned.flags.c_contiguous
    assert IDENTITIES.of(replace(IMAGE, pixels=Pixels(turned))) == IDENTITIES.of(IMAGE)


def test_an_identity_means_nothing_elsewhere() -> None:
    assert Identities().of(SEQUENCE) != Identities().of(SEQUENCE)


TENANTS = st.none() | st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.text(max_size=1))


@given(TENANTS, TENANTS, st.none() | st.text(min_size=1), st.none() | st.text(min_size=1), st.booleans())
def test_scopes_are_equal_where_tenants_and_salts_are(
    one: object, other: object, salt: str | None, pepper: str | None, between: bool
) -> None:
    scopes = SharingScopes(between_tenants=between)
    same = (between or one == other) and salt == pepper
    assert (scopes.scope(one, salt) == scopes.scope(other, pepper)) == same
    assert scopes.scope(one, salt) == scopes.scope(one, salt)


def test_a_scope_holds_no_salt_and_a_request_of_neither_has_none() -> None:
    scopes = SharingScopes(between_tenants=False)
    assert "pepper" not in repr(scopes.scope("a", "pepper"))
    assert scopes.scope("a", "pepper") != SharingScopes(between_tenants=False).scope("a", "pepper")
    assert scopes.scope(None, None) is None
    assert SharingScopes(between_tenants=True).scope("a", None) is None


def test_preprocess_gives_identities_to_payloads_and_parts_and_leaves_errors_alone() -> None:
    error = InvalidInput("wrong")
    whole: Prepared[Payload] = Prepared(SEQUENCE, 3, "key")
    part: Prepared[Payload] = Prepared(replace(SEQUENCE, ids=[4]), 1)

    def preprocess(inputs: Sequence[ModelInput]) -> list[Any]:
        return [whole, error, (whole, part)]

    given_identities = IDENTITIES.given_to(preprocess)([ModelInput(TextInput("a"), DENSE_ONLY)] * 3)
    identified = replace(whole, identity=IDENTITIES.of(SEQUENCE))
    assert given_identities == [identified, error, (identified, replace(part, identity=IDENTITIES.of(part.payload)))]
