"""Comparing code of `perf.gpu.right`: it finds wrong results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from perf.gpu.findings import Finding, as_rows, compared, failed, guarded
from perf.gpu.right_tables import show
from perf.gpu.traffic import Ask, Outcome, Vectors, asks, judge
from perf.tools import report
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import Output

BOUND = 0.1


@pytest.fixture
def wanted() -> Vectors:
    return np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)


def _compared(found: Vectors, wanted: Vectors) -> Finding:
    return compared(
        "m", "float32, padded", "dense", found=torch.from_numpy(found), wanted=torch.from_numpy(wanted), bound=BOUND
    )


def test_rounding_is_right_and_another_vector_is_wrong(wanted: Vectors) -> None:
    assert _compared(wanted + np.float32(1e-3), wanted).right
    swapped = wanted[[1, 0, *range(2, len(wanted))]]
    finding = _compared(swapped, wanted)
    assert not finding.right
    assert finding.difference is not None
    assert finding.difference > BOUND


def test_nan_is_wrong(wanted: Vectors) -> None:
    found = wanted.copy()
    found[3, 4] = np.nan
    assert not _compared(found, wanted).right


def test_another_shape_is_wrong_and_is_said(wanted: Vectors) -> None:
    finding = _compared(wanted[:5], wanted)
    assert not finding.right
    assert "[5, 8]" in finding.line()
    assert "[12, 8]" in finding.line()


def test_sparse_vectors_are_compared_with_all_their_zeros() -> None:
    vectors = [
        SparseVector(np.array([1, 3], np.int32), np.array([2.0, 4.0], np.float32)),
        SparseVector(np.array([0], np.int32), np.array([1.0], np.float32)),
    ]
    assert as_rows(Output.SPARSE, vectors, 5).tolist() == [[0, 2, 0, 4, 0], [1, 0, 0, 0, 0]]


def test_outputs_of_tokens_have_a_row_for_each_token() -> None:
    tokens = [np.ones((2, 3), np.float32), np.zeros((4, 3), np.float32)]
    assert as_rows(Output.MULTI_VECTOR, tokens, 9).shape == (6, 3)
    assert as_rows(Output.TOKEN_WEIGHTS, [one[:, 0] for one in tokens], 9).shape == (6, 1)
    assert as_rows(Output.DENSE, [one[0] for one in tokens], 9).shape == (2, 3)


def test_a_check_that_raises_is_a_finding_and_keeps_those_before_it() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("m", "w", "first", right=True)
        raise ValueError("the second\nfailed")

    findings = list(guarded(check, lambda error: failed("m", "w", "second", error)))
    assert [finding.right for finding in findings] == [True, False]
    assert findings[1].note == "ValueError: the second failed"


def _outcomes(vectors: Vectors) -> list[Outcome]:
    """Answers to requests of two texts each, with these vectors."""
    return [Outcome(Ask((place, place + 1)), vectors[place : place + 2]) for place in range(0, len(vectors), 2)]


def _wrong(outcomes: list[Outcome], wanted: Vectors) -> list[str]:
    return [finding.subject for finding in judge("served", "float32", outcomes, wanted, BOUND) if not finding.right]


def test_own_answers_are_right_though_some_clients_left(wanted: Vectors) -> None:
    left = Outcome(Ask((1,), leaves_after_s=0.01))
    assert _wrong([*_outcomes(wanted + np.float32(1e-3)), left], wanted) == []


def test_answers_of_other_clients_are_found(wanted: Vectors) -> None:
    first, second, *others = _outcomes(wanted)
    mixed_up = [Outcome(first.ask, second.vectors), Outcome(second.ask, first.vectors), *others]
    subjects = _wrong(mixed_up, wanted)
    assert "4 of 12 vectors are those of other texts" in subjects
    assert "the worst of 12 vectors" in subjects


def test_lost_answers_are_found_with_their_error(wanted: Vectors) -> None:
    first, *others = _outcomes(wanted)
    findings = judge("served", "float32", [Outcome(first.ask, error="503 no memory"), *others], wanted, BOUND)
    assert not findings[0].right
    assert findings[0].line() == "served: float32, 5 of 6 answered, 0 clients left, 503 no memory"


def test_one_vector_with_nan_among_many_is_found(wanted: Vectors) -> None:
    spoiled = wanted.copy()
    spoiled[5, 0] = np.nan
    assert len(_wrong(_outcomes(spoiled), wanted)) == 3


def test_no_answer_at_all_is_wrong(wanted: Vectors) -> None:
    assert _wrong([Outcome(Ask((0,)), error="refused")], wanted) == ["0 of 1 answered, 0 clients left", "vectors"]


def test_requests_are_always_the_same_and_a_tenth_of_the_clients_leave() -> None:
    drawn = asks(1000, 50)
    assert drawn == asks(1000, 50)
    leaving = sum(ask.leaves_after_s is not None for ask in drawn)
    assert 70 < leaving < 130


def test_tables_end_with_what_is_wrong(wanted: Vectors) -> None:
    findings = [
        _compared(wanted, wanted),
        _compared(wanted[::-1].copy(), wanted),
        failed("other", "bfloat16, replayed", "texts", RuntimeError("an illegal address")),
    ]
    with report.console.capture() as printed:
        show(findings)
    *_, first, second, total = printed.get().splitlines()
    assert first.startswith("WRONG: m: float32, padded, dense, difference ")
    assert second == "WRONG: other: bfloat16, replayed, texts, RuntimeError: an illegal address"
    assert total == "3 checks, 2 wrong"
