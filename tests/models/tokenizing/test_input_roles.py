"""Queries and documents as lists of token ids: markers, lengths, expansion and omissions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.specs.model import RoleSettings
from staged_pool.runtime.models.tokenizing.input_roles import PLAIN, RoleSpec, resolve_roles, unknown_markers_to_prompts
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.tiny import word_piece

MULTI_VECTOR_ONLY = frozenset({Output.MULTI_VECTOR})


def resolved(
    settings: RoleSettings, *, max_tokens: int = 64, vocabulary: int = 10_000, **special_tokens: str
) -> RoleSpec:
    tokenizer: Tokenizer = word_piece(unused=2).backend_tokenizer
    return resolve_roles(
        {"query": settings},
        tokenizer,
        special_tokens=special_tokens,
        vocabulary=vocabulary,
        max_tokens=max_tokens,
    )["query"]


def test_without_a_role_ids_stay_as_they_are() -> None:
    sequence = PLAIN.sequence([2, 7, 3], MULTI_VECTOR_ONLY, expand=True)
    assert (sequence.ids, sequence.unseen_tokens, sequence.kept) == ([2, 7, 3], 0, None)
    assert PLAIN.limit(None, 64) == (None, 64)
    assert PLAIN.limit(10, 64) == (10, 64)


def test_a_short_query_is_filled_up_with_tokens_that_nobody_attends_to() -> None:
    sequence = RoleSpec(expand_to=6, expansion=4).sequence([2, 7, 3], MULTI_VECTOR_ONLY, expand=True)
    assert sequence.ids == [2, 7, 3, 4, 4, 4]
    assert sequence.unseen_tokens == 3
    assert sequence.kept is None


def test_a_model_that_attends_to_its_expansion_sees_all_of_it() -> None:
    spec = RoleSpec(expand_to=6, expansion=4, attend_to_expansion=True)
    sequence = spec.sequence([2, 7, 3], MULTI_VECTOR_ONLY, expand=True)
    assert (sequence.ids, sequence.unseen_tokens) == ([2, 7, 3, 4, 4, 4], 0)


def test_a_query_that_is_long_enough_is_not_filled_up() -> None:
    sequence = RoleSpec(expand_to=3, expansion=4).sequence([2, 7, 8, 3], MULTI_VECTOR_ONLY, expand=True)
    assert (sequence.ids, sequence.unseen_tokens) == ([2, 7, 8, 3], 0)


def test_token_ids_of_the_caller_are_not_filled_up_or_changed() -> None:
    own = [2, 7, 3]
    sequence = RoleSpec(expand_to=6, expansion=4).sequence(own, MULTI_VECTOR_ONLY, expand=False)
    assert sequence.ids == [2, 7, 3]
    RoleSpec(expand_to=6, expansion=4).sequence(own, MULTI_VECTOR_ONLY, expand=True)
    assert own == [2, 7, 3]


def test_skipped_tokens_are_read_but_not_given_back() -> None:
    sequence = RoleSpec(skipped=frozenset({9})).sequence([2, 9, 7, 9, 3], MULTI_VECTOR_ONLY, expand=True)
    assert sequence.ids == [2, 9, 7, 9, 3]
    assert sequence.kept == (0, 2, 4)


def test_a_token_can_be_left_out_where_it_stands_first() -> None:
    spec = RoleSpec(skipped_first=2)
    assert spec.sequence([2, 7, 2], MULTI_VECTOR_ONLY, expand=True).kept == (1, 2)
    assert spec.sequence([7, 2, 3], MULTI_VECTOR_ONLY, expand=True).kept is None


def test_nothing_is_chosen_where_no_vectors_of_tokens_are_wanted() -> None:
    assert RoleSpec(skipped_first=2).sequence([2, 7, 3], DENSE_ONLY, expand=True).kept is None


@pytest.mark.parametrize(
    ("spec", "asked", "wanted"),
    [
        (RoleSpec(max_tokens=32), None, (None, 32)),
        (RoleSpec(max_tokens=32), 64, (32, 32)),
        (RoleSpec(max_tokens=32), 20, (20, 32)),
        (RoleSpec(max_tokens=32, always_cut=True), None, (32, 32)),
        (RoleSpec(max_tokens=180), None, (None, 64)),
        (RoleSpec(max_tokens=180), 64, (64, 64)),
    ],
)
def test_an_input_is_bound_by_its_role_and_by_the_model(
    spec: RoleSpec, asked: int | None, wanted: tuple[int | None, int]
) -> None:
    assert spec.limit(asked, 64) == wanted


def test_a_marker_is_one_token_where_the_tokenizer_has_it_with_its_blank_or_without() -> None:
    assert len(resolved(RoleSettings(marker="[unused0]")).marker) == 1
    assert resolved(RoleSettings(marker="[unused0] ")).marker == resolved(RoleSettings(marker="[unused0]")).marker


def test_a_marker_that_is_no_token_goes_before_the_prompt(tiny_folder: TinyFolder) -> None:
    tokenizer = word_piece(unused=2).backend_tokenizer
    folder = replace(
        read_folder(tiny_folder("colbert-pylate")),
        prompts={"query": "look for: ", "document": ""},
        roles={"query": RoleSettings(marker="[Q] "), "document": RoleSettings(marker="[unused1]")},
    )
    found = unknown_markers_to_prompts(folder, tokenizer)
    assert found.prompts == {"query": "[Q] look for: ", "document": ""}
    assert found.default_prompt == ""
    assert (found.roles["query"].marker, found.roles["document"].marker) == ("", "[unused1]")
    assert unknown_markers_to_prompts(found, tokenizer) is found


def test_a_skipped_word_that_the_vocabulary_lacks_does_not_skip_unknown_tokens() -> None:
    tokenizer = word_piece(unused=2).backend_tokenizer
    spec = resolved(RoleSettings(skipped=(".", "surely not a token")))
    assert spec.skipped == {tokenizer.token_to_id(".")}


def test_a_query_is_filled_up_with_the_token_named_else_the_mask_else_the_end() -> None:
    tokenizer = word_piece(unused=2).backend_tokenizer
    special: dict[str, Any] = {"mask_token": "[MASK]", "eos_token": "[SEP]"}
    named = resolved(RoleSettings(expand_to=8, expansion="[UNK]"), **special)
    assert named.expansion == tokenizer.token_to_id("[UNK]")
    assert resolved(RoleSettings(expand_to=8), **special).expansion == tokenizer.token_to_id("[MASK]")
    assert resolved(RoleSettings(expand_to=8), eos_token="[SEP]").expansion == tokenizer.token_to_id("[SEP]")


@pytest.mark.parametrize(
    ("settings", "limits", "message"),
    [
        (
            RoleSettings(expand_to=65, expansion="[MASK]"),
            {},
            "a query is expanded to 65 tokens, but the model takes",
        ),
        (RoleSettings(expand_to=8, expansion="none such"), {}, "not in the vocabulary: none such"),
        (RoleSettings(expand_to=8), {}, "not in the vocabulary: none is named"),
        (RoleSettings(marker="[MASK]"), {"vocabulary": 2}, "marks or expands a query, but the model has only 2"),
    ],
)
def test_a_role_that_does_not_fit_the_model_is_rejected(
    settings: RoleSettings, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(settings, **limits)
