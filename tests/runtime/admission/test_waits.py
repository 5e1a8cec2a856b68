"""Predicted waits beside seen ones: in virtual time a device has a known speed, so all errors are of predictions."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar, cast

import anyio
import pytest

from staged_pool.runtime.admission.accounting import Reservation, UsageTotals
from staged_pool.runtime.admission.controller import Admission, LimitReached
from staged_pool.runtime.admission.delays import Delays
from staged_pool.runtime.admission.prediction import Headroom
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.run import run_engine
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.stage import StageOptions
from tests.sim.clock import BACKENDS, Backend, run
from tests.support.model import LetterModel, letters

A = TypeVar("A")
T = TypeVar("T")

Ask = Callable[[list[str]], Coroutine[Any, Any, None]]
Load = Callable[[Ask], Coroutine[Any, Any, None]]

TOKEN_S: Final = 85e-6
FORWARD_S: Final = 0.01
RANKING: Final = (100, 100)
"""Texts and tokens of a ranking. Alone it takes 1.05 s, in 20 small batches."""
RANKING_S: Final = 100 * 100 * TOKEN_S + 20 * FORWARD_S
SMALL: Final = (8, 64)
SMALL_S: Final = 8 * 64 * TOKEN_S + FORWARD_S


class VirtualOffload:
    """An offload whose calls take virtual time.

    Args:
        limit: Calls at once.
        seconds: Returns the seconds of a call.
    """

    def __init__(self, limit: int, seconds: Callable[[Any], float]) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._seconds = seconds

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        async with self._limiter:
            await anyio.sleep(self._seconds(argument))
            return function(argument)


class Waits(list[tuple[float, float]]):
    """Predicted and seen seconds of the answered requests, and all rejections."""

    def __init__(self) -> None:
        self.rejected: list[str] = []

    @property
    def ratios(self) -> list[float]:
        """Predicted to seen, sorted, without the first third: predictions are learned."""
        return sorted(predicted / seen for predicted, seen in self[len(self) // 3 :])

    @property
    def seen(self) -> list[float]:
        """Seen seconds, sorted, without the first third."""
        return sorted(seen for _, seen in self[len(self) // 3 :])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cast(Backend, request.param)


def steady() -> float:
    """Return the slowness of a device that always takes as long."""
    return 1.0


def waits_of(
    load: Load,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    slowness: Callable[[], float] = steady,
    **settings: Any,
) -> Waits:
    """Run a load on an engine whose device has a known speed, times a slowness."""
    waits, predicted = Waits(), dict[Reservation, tuple[float, float]]()
    try_enter, leave = Admission.try_enter, Admission.leave

    def watched_entry(self: Admission, **keywords: Any) -> Reservation | LimitReached:
        entered = try_enter(self, **keywords)
        if isinstance(entered, Reservation):
            lag_s = self._delays.lag_s(entered.lane, entered.request_class)
            predicted[entered] = entered.expected_s + lag_s, anyio.current_time()
        return entered

    def watched_end(self: Admission, reservation: Reservation, **keywords: Any) -> None:
        seconds, began = predicted.pop(reservation)
        if keywords.get("answered"):
            waits.append((seconds, anyio.current_time() - began))
        leave(self, reservation, **keywords)

    monkeypatch.setattr(Admission, "try_enter", watched_entry)
    monkeypatch.setattr(Admission, "leave", watched_end)

    async def main() -> None:
        device = VirtualOffload(
            1, lambda batch: slowness() * (FORWARD_S + TOKEN_S * sum(len(letters(each)) for each in batch))
        )
        quick = VirtualOffload(4, lambda _: 1e-4)
        config = EngineConfig(coalesce=False, **settings)
        async with run_engine(
            config,
            LetterModel(),
            device=device,
            preprocess=quick,
            offload=quick,
            options=StageOptions(clock=anyio.current_time),
        ) as engine:

            async def ask(texts: list[str]) -> None:
                try:
                    await engine.embed(texts)
                except Overloaded as error:
                    waits.rejected.append(str(error))
                    await anyio.sleep(error.retry_after_s)

            await load(ask)

    run(main, backend=backend, seed=1)
    return waits


def texts(shape: tuple[int, int]) -> list[str]:
    return ["a" * shape[1]] * shape[0]


def closed(clients: int, shape: tuple[int, int], requests: int) -> Load:
    """Clients that each wait for their answer before they ask again."""

    async def load(ask: Ask) -> None:
        async def client() -> None:
            for _ in range(requests):
                await ask(texts(shape))

        async with anyio.create_task_group() as tasks:
            for _ in range(clients):
                tasks.start_soon(client)

    return load


def opened(per_s: float, shape: tuple[int, int], requests: int) -> Load:
    """Random arrivals, whatever was answered so far."""
    pauses = random.Random(1)

    async def load(ask: Ask) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(requests):
                tasks.start_soon(ask, texts(shape))
                await anyio.sleep(pauses.expovariate(per_s))

    return load


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_few_clients_that_rank_are_never_rejected(
    clients: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waits_of(closed(clients, RANKING, 8), backend, monkeypatch)
    assert not waits.rejected
    assert waits.seen[-1] == pytest.approx(clients * RANKING_S, rel=0.05)
    assert waits.ratios[0] > 0.9
    assert waits.ratios[-1] < 1.1


def test_clients_whose_wait_is_just_within_the_target_are_not_rejected(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waits_of(closed(8, RANKING, 8), backend, monkeypatch, target_delay_s=1.04 * 8 * RANKING_S)
    assert not waits.rejected
    assert waits.seen[-1] == pytest.approx(8 * RANKING_S, rel=0.05)


@pytest.mark.parametrize(("clients", "requests"), [(1, 20), (4, 20), (16, 20), (64, 8)], ids=["1", "4", "16", "64"])
def test_the_wait_of_closed_loops_is_predicted(
    clients: int, requests: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waits_of(closed(clients, SMALL, requests), backend, monkeypatch)
    assert not waits.rejected
    assert 1 / 1.5 < median(waits.ratios) < 1.5


@pytest.mark.parametrize("target_delay_s", [1.0, 5.0])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_the_wait_of_an_overloaded_device_is_predicted_and_answers_are_in_time(
    times: int, target_delay_s: float, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = opened(times / SMALL_S, SMALL, 400 * times)
    waits = waits_of(load, backend, monkeypatch, target_delay_s=target_delay_s)
    ratios, seen = waits.ratios, waits.seen
    assert 1 / 1.5 < median(ratios) < 1.5
    assert seen[int(0.98 * len(seen))] <= (1.02 if times > 1 else 1.1) * target_delay_s
    if times > 1:  # the queue is as long as it may be, and no arrival changes that
        assert ratios[len(ratios) // 20] > 1 / 1.5
        assert ratios[19 * len(ratios) // 20] < 1.5
        assert median(seen) > 0.8 * target_delay_s, "it rejects no more than it must"
        assert any("for the work of the lane `text` ahead of it" in message for message in waits.rejected)


def test_answers_of_a_device_of_changing_speed_are_in_time_too(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = random.Random(1)
    slow: list[float] = []

    def slowness() -> float:
        if len(slow) % 10 == 0:  # it keeps a speed for ten forwards
            slow.append(changing.choice([0.8, 1.0, 1.2]))
        else:
            slow.append(slow[-1])
        return slow[-1]

    waits = waits_of(opened(2 / SMALL_S, SMALL, 1600), backend, monkeypatch, slowness, target_delay_s=1.0)
    assert waits.seen[int(0.98 * len(waits.seen))] <= 1.12


def only_what_is_left(self: UsageTotals, lane: Lane) -> float:
    return self.tokens[lane]


def in_full_batches(self: LaneServiceTime, tokens: float, inputs: float, requests: int) -> float:
    return self.device.drain_s(tokens, self.budget.tokens)


def nothing(*_: object) -> None:
    pass


def always(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("of", "name", "bug", "noticed_by"),
    [
        (UsageTotals, "whole", only_what_is_left, partial(test_few_clients_that_rank_are_never_rejected, 4)),
        (LaneServiceTime, "drain_s", in_full_batches, partial(test_few_clients_that_rank_are_never_rejected, 1)),
        (Delays, "are_known", always, test_clients_whose_wait_is_just_within_the_target_are_not_rejected),
        (Headroom, "learn", nothing, test_answers_of_a_device_of_changing_speed_are_in_time_too),
    ],
    ids=["left", "batches", "cold start", "headroom"],
)
def test_a_planted_bug_is_noticed(
    of: type, name: str, bug: object, noticed_by: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, bug)
    with pytest.raises(AssertionError):
        noticed_by(backend="trio", monkeypatch=monkeypatch)
