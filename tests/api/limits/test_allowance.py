"""The cost of a client: one account for all of its connections."""

from __future__ import annotations

import pytest

from staged_pool.api.limits.allowance import CLIENT_UNITS, CLIENT_UNITS_PER_S, CLIENTS, Allowances

EMPTY = CLIENT_UNITS + 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_client_that_has_spent_more_than_it_may_waits_as_long_as_that_is_worth() -> None:
    allowance = Allowances(Clock()).of(("10.0.0.1", 1))
    for _ in range(CLIENT_UNITS):
        allowance.spend(1)
        assert not allowance.owed_s
    for units in range(1, 4):
        allowance.spend(1)
        assert allowance.owed_s == pytest.approx(units / CLIENT_UNITS_PER_S)


def test_answers_pay_for_any_number_of_requests() -> None:
    allowances = Allowances(Clock())
    allowance = allowances.of(("10.0.0.1", 1))
    for _ in range(2 * CLIENT_UNITS):
        allowance.spend(10)
        allowance.earn(10)
    allowance.spend(CLIENT_UNITS)
    assert not allowance.owed_s


def test_nothing_is_saved_up() -> None:
    allowance = Allowances(Clock()).of(("10.0.0.1", 1))
    allowance.earn(10**9)
    allowance.spend(CLIENT_UNITS + 1)
    assert allowance.owed_s


def test_all_connections_of_a_client_have_one_account() -> None:
    allowances = Allowances(Clock())
    allowances.of(("10.0.0.1", 1)).spend(EMPTY)
    assert allowances.of(("10.0.0.1", 2)).owed_s
    assert not allowances.of(("10.0.0.2", 1)).owed_s  # a bystander


def test_it_comes_back_with_time() -> None:
    clock = Clock()
    allowance = Allowances(clock).of(("10.0.0.1", 1))
    allowance.spend(EMPTY)
    clock.now = allowance.owed_s
    assert allowance.owed_s == pytest.approx(0)
    clock.now = 10**6
    allowance.spend(CLIENT_UNITS)
    assert not allowance.owed_s


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("2001:db8:1:2::1", 1), ("2001:db8:1:2:ffff::9", 2), True),
        (("2001:db8:1:2::1", 1), ("2001:db8:1:3::1", 2), False),
        (("::ffff:10.0.0.1", 1), ("10.0.0.1", 2), True),
        (("::ffff:10.0.0.1", 1), ("::ffff:10.0.0.2", 2), False),
        (("fe80::1%eth0", 1), ("fe80::2%eth0", 2), True),
        (None, None, True),
        (None, ("10.0.0.1", 1), False),
        (("not an address", 1), ("another", 1), False),
    ],
)
def test_a_client_is_an_address_or_a_prefix_of_ipv6(
    one: tuple[str, int] | None, other: tuple[str, int] | None, *, same: bool
) -> None:
    allowances = Allowances(Clock())
    allowances.of(one).spend(EMPTY)
    assert bool(allowances.of(other).owed_s) is same


def test_clients_are_remembered_up_to_a_number_and_the_worst_the_longest() -> None:
    allowances = Allowances(Clock())
    allowances.of(("10.0.0.1", 1)).spend(EMPTY)
    for number in range(3 * CLIENTS):
        allowances.of((f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)).spend(1)
        assert len(allowances._spent) <= CLIENTS
    assert allowances.of(("10.0.0.1", 2)).owed_s
