"""The names of requests are told apart, in few bytes each."""

from __future__ import annotations

from staged_pool.api.bulk.custom_ids import CustomIds


def test_each_id_keeps_its_first_line() -> None:
    ids, first = CustomIds(), dict[str, int]()
    for number in range(60_000):
        name = f"request {number * number % 40_009}"
        assert ids.first_line(name, number) == first.setdefault(name, number)
    assert 10_000 < len(first) < 40_009  # many are new, and many are not


def test_an_id_takes_few_bytes() -> None:
    ids = CustomIds()
    for number in range(100_000):
        ids.first_line(f"{'a long name ' * 20}{number}", number)
    assert ids.size <= 16 * 8 / 3 * 100_000


def test_ids_of_any_characters_differ() -> None:
    ids = CustomIds()
    names = ["", " ", "a", "A", "\0", "\ud800", "\ufffd", "é", "e\u0301", "\U0001f600"]
    assert [ids.first_line(name, number) for number, name in enumerate(names)] == list(range(len(names)))


def test_the_largest_line_number_is_kept() -> None:
    ids = CustomIds()
    assert [ids.first_line("a", 2**40 - 2), ids.first_line("a", 5)] == [2**40 - 2] * 2
