"""The budget that keeps forwards to a target, against devices of a known pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.scheduling.batch_budget import Budget


def run(budget: Budget, batches: int, *, each_s: float, fixed_s: float = 0.0) -> list[int]:
    """Full batches on a device of this pace; the budget after each."""
    budgets = []
    for _ in range(batches):
        tokens = budget.tokens
        budget.observe(tokens, fixed_s + tokens * each_s, was_limit=True)
        budgets.append(budget.tokens)
    return budgets


def test_without_a_target_it_is_the_most_there_may_be() -> None:
    budget = Budget(1024, start=512)
    assert run(budget, 10, each_s=1.0) == [1024] * 10


@given(st.integers(64, 20_000), st.floats(1e-6, 1e-3), st.floats(0.0, 0.02), st.floats(0.03, 0.5))
def test_it_comes_to_what_the_target_allows_and_stays_there(
    most: int, each_s: float, fixed_s: float, target_s: float
) -> None:
    budget = Budget(most, start=most // 8, target_s=target_s)
    right = min(most, (target_s - fixed_s) / each_s)
    step = max(1, most // 32)
    settled = run(budget, 200, each_s=each_s, fixed_s=fixed_s)[100:]
    assert max(settled) <= right + step
    assert min(settled) >= min(step, 0.8 * right - 1, right)


def test_a_device_that_becomes_slower_gets_smaller_batches_and_larger_ones_when_that_is_over() -> None:
    budget = Budget(1000, target_s=0.1)
    assert run(budget, 5, each_s=0.0001)[-1] == 1000
    slow = run(budget, 30, each_s=0.0002)[-10:]
    assert 350 <= min(slow) <= max(slow) <= 540
    assert run(budget, 40, each_s=0.0001)[-1] == 1000


@pytest.mark.parametrize(
    ("tokens", "seconds", "was_limit", "what"),
    [
        (400, 9.0, True, "of less than half of it"),
        (1200, 9.0, True, "cut under a larger one"),
        (800, 0.01, False, "quick, but there was no more"),
        (800, 0.1, False, "in time to the second"),
    ],
)
def test_some_batches_say_nothing_of_it(tokens: int, seconds: float, was_limit: bool, what: str) -> None:
    budget = Budget(2000, start=1000, target_s=0.1)
    budget.observe(tokens, seconds, was_limit=was_limit)
    assert budget.tokens == 1000, what


def test_it_never_falls_so_low_that_it_could_not_rise() -> None:
    budget = Budget(1000, target_s=0.1)
    assert run(budget, 100, each_s=1.0)[-1] == 1000 // 32
    assert run(budget, 100, each_s=0.0)[-1] == 1000


@pytest.mark.parametrize("target_s", [None, 10.0])
def test_a_want_of_memory_halves_it_and_full_batches_bring_it_back(target_s: float | None) -> None:
    budget = Budget(1000, target_s=target_s)
    budget.out_of_memory(800)
    assert budget.tokens == 400
    budgets = run(budget, 50, each_s=0.0)
    assert budgets[:2] == [431, 462], "step by step"
    assert budgets[-1] == 1000
    budget.out_of_memory(1)
    assert budget.tokens == 1


def test_a_budget_below_every_single_item_grows_all_the_same() -> None:
    budget = Budget(1000)
    budget.out_of_memory(100)
    assert budget.tokens == 50
    for _ in range(50):
        budget.observe(max(300, budget.tokens), 0.1, was_limit=True)
    assert budget.tokens == 1000
