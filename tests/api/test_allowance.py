"""What a client may cost: one account for a connection, and one for all connections of a client."""

from __future__ import annotations

import pytest

from staged_pool.api.allowance import CLIENT_UNITS, CLIENT_UNITS_PER_S, CLIENTS, CONNECTION_UNITS, Allowances

ALL = CONNECTION_UNITS + CLIENT_UNITS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_connection_ends_when_its_own_units_and_its_clients_are_spent() -> None:
    credit = Allowances(Clock()).of(("10.0.0.1", 1))
    assert all(credit.spend(1) for _ in range(ALL))
    assert not credit.spend(1)


def test_answers_pay_for_any_number_of_requests() -> None:
    allowances = Allowances(Clock())
    credit = allowances.of(("10.0.0.1", 1))
    for _ in range(2 * ALL):
        assert credit.spend(10)
        credit.earn(10)
    assert allowances.of(("10.0.0.1", 2)).spend(ALL)  # nothing of it was taken from the client


def test_what_a_connection_saves_up_is_bounded() -> None:
    credit = Allowances(Clock()).of(("10.0.0.1", 1))
    credit.earn(10**9)
    assert credit.spend(CLIENT_UNITS)
    assert not credit.spend(CLIENT_UNITS + 1)


def test_a_client_does_not_get_it_anew_with_each_connection() -> None:
    allowances = Allowances(Clock())
    assert allowances.of(("10.0.0.1", 1)).spend(ALL)
    next_one = allowances.of(("10.0.0.1", 2))
    assert next_one.spend(CONNECTION_UNITS)  # a few requests until the first answer
    assert not next_one.spend(1)
    assert allowances.of(("10.0.0.2", 1)).spend(ALL)  # a bystander


def test_it_comes_back_with_time() -> None:
    clock = Clock()
    allowances = Allowances(clock)
    allowances.of(("10.0.0.1", 1)).spend(ALL)
    clock.now = 2.0
    assert allowances.of(("10.0.0.1", 2)).spend(CONNECTION_UNITS + 2 * CLIENT_UNITS_PER_S)
    clock.now = 10**6
    assert allowances.of(("10.0.0.1", 3)).spend(ALL)
    assert not allowances.of(("10.0.0.1", 4)).spend(CONNECTION_UNITS + 1)


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
    allowances.of(one).spend(ALL)
    assert allowances.of(other).spend(CONNECTION_UNITS + 1) is not same


def test_clients_are_remembered_up_to_a_number_and_the_worst_the_longest() -> None:
    allowances = Allowances(Clock())
    allowances.of(("10.0.0.1", 1)).spend(ALL)
    for number in range(3 * CLIENTS):
        allowances.of((f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)).spend(CONNECTION_UNITS + 1)
        assert len(allowances._spent) <= CLIENTS
    assert not allowances.of(("10.0.0.1", 2)).spend(CONNECTION_UNITS + 1)
