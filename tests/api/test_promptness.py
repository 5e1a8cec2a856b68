"""The event loop's thread asks for short slices, for itself alone."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

import pytest

from staged_pool.api import promptness
from staged_pool.api.promptness import SLICE_NS, run_promptly

linux = pytest.mark.skipif(promptness._attributes() is None, reason="the system has no such attributes")


def in_thread(function: Callable[[], None]) -> None:
    """What a thread asks for is its own: the one that runs the tests stays as it is."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def slice_ns() -> int:
    attributes = promptness._attributes()
    assert attributes is not None
    return int(attributes.slice_ns)


@linux
def test_a_thread_that_is_to_run_promptly_has_the_shortest_slices() -> None:
    def check() -> None:
        before = promptness._attributes()
        assert before is not None
        assert run_promptly()
        after = promptness._attributes()
        assert after is not None
        assert after.slice_ns in {SLICE_NS, before.slice_ns}  # the latter from a kernel without slices to choose
        assert (after.policy, after.nice) == (before.policy, before.nice)

    in_thread(check)


@linux
def test_threads_that_it_starts_are_as_others() -> None:
    usual = slice_ns()

    def check() -> None:
        assert run_promptly()
        others: list[int] = []
        in_thread(lambda: others.append(slice_ns()))
        assert others == [usual]

    in_thread(check)


def test_elsewhere_everything_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert not run_promptly()
