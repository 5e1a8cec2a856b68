"""Each number of `tuning.py` is needed: a property holds with it, and fails where it is taken out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest

from staged_pool.runtime.admission import controller, estimates, prediction
from staged_pool.runtime.admission.accounting import RequestClass
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import lanes
from staged_pool.stages import postprocess
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.scheduling import batch_budget, fair_queue, service_time, tuning
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.stages.test_postprocess import longest_run
from tests.support.tickets import NoLoad, wait_in


def bulk_work_waits_for_interactive_work() -> bool:
    former = BatchFormer[Item[int]](max_items=1, max_batch_tokens=10, pads=False)
    for priority in Priority:
        ticket = Ticket(Request, lambda result: None, NoLoad(), priority=priority)
        wait_in(former, [Item(ticket, place, place, 0.0, 10) for place in range(40)])
    batches = [former.take(lambda item: True) for _ in range(40)]
    return sum(batch is not None and batch.items[0].ticket.priority is Priority.BULK for batch in batches) <= 8


def a_queue_is_several_batches() -> bool:
    former = BatchFormer[Item[int]](max_items=1000, max_batch_tokens=1000, min_batch_tokens=10, pads=False)
    for _ in range(80):
        wait_in(former, [Item(Ticket(Request, lambda result: None, NoLoad()), 0, 0, 0.0, 10)])
    return former.budget <= former.queue.waiting.tokens / 4


def a_budget_grows_in_small_steps() -> bool:
    budget = Budget(1000, start=100, target_s=1.0)
    budget.observe(100, 0.1, was_limit=True)
    return 100 < budget.tokens < 200


def a_slow_batch_lowers_the_budget() -> bool:
    budget = Budget(1000, start=1000, target_s=1.0)
    budget.observe(1000, 2.0, was_limit=True)
    return 500 < budget.tokens < 1000


def one_slow_batch_changes_no_prediction_much() -> bool:
    model = ServiceTimeModel()
    for _ in range(200):
        model.observe(100, 1.0)
    model.observe(100, 10.0)
    return model.drain_s(100, 100) < 2.0


def no_batch_of_many_makes_a_prediction_jump() -> bool:
    noise = random.Random(1)
    model, predicted = ServiceTimeModel(), list[float]()
    for _ in range(3000):
        tokens = noise.choice([400, 500, 600])
        model.observe(tokens, (0.001 + tokens * 8e-5) * noise.uniform(0.6, 1.4))
        predicted.append(model.drain_s(5120, 1024))
    return all(0.9 < after / before < 1.1 for before, after in pairwise(predicted[300:]))


def sizes_that_hardly_differ_have_no_slope() -> bool:
    model = ServiceTimeModel()
    for number in range(200):
        model.observe(100 + number % 2, 1.2 if number % 2 else 0.8)
    return model.drain_s(1000, 1000) < 2.0


def few_images_wait_decoded() -> bool:
    limits = lanes.LaneLimits.of("image", EngineConfig(), 1000)
    return limits.fed_tokens < EngineConfig().waiting_tokens / 2


def an_answer_in_time_hardly_lowers_the_headroom() -> bool:
    headroom = prediction.Headroom(5.0)
    headroom.learn(6.0, 0.0)
    headroom.learn(4.0, 0.0)
    return 0.9 < headroom.seconds < 1.0


def one_tenant_leaves_room_for_others() -> bool:
    admission = admission_of(ServiceTimeModel(), max_requests=80)
    mine = RequestClass(tenant="mine")
    try:
        for _ in range(80):
            admission.enter(body_bytes=100, timeout_s=inf, request_class=mine)
    except Overloaded:
        return admission.overload(100, RequestClass(tenant="another")) is None
    return False


def one_odd_body_changes_no_estimate_much() -> bool:
    mean = estimates.Mean(0.0)
    for _ in range(100):
        mean.observe(1.0)
    mean.observe(11.0)
    return 1.2 < mean.value < 3.0


def a_lane_that_is_hardly_ever_used_is_not_expected() -> bool:
    both = estimates.Estimates(("text", "image"))
    for number in range(200):
        both.learn(100_000, {"image": 500} if number % 50 == 0 else {"text": 20_000})
    return both.guess(100_000)["text"].likely and not both.guess(100_000)["image"].likely


class Use(NamedTuple):
    """One constant, in one of the modules that use it."""

    name: str
    module: ModuleType
    without: object
    """Value that takes the constant out."""
    holds: Callable[[], bool]


def admission_of(model: ServiceTimeModel, **limits: Any) -> controller.Admission:
    service_times: Mapping[Lane, LaneServiceTime] = {"text": LaneServiceTime(budget=Budget(2048), device=model)}
    return controller.Admission(EngineConfig(**limits), service_times, {"text": 131_072}, lambda: 0.0)


USES: Final = (
    Use("WEIGHTS", fair_queue, dict.fromkeys(Priority, 1), bulk_work_waits_for_interactive_work),
    Use("QUEUE_IN_BATCHES", batch_budget, 1, a_queue_is_several_batches),
    Use("BUDGET_STEPS", batch_budget, 1, a_budget_grows_in_small_steps),
    Use("BUDGET_DECREASE", batch_budget, 1.0, a_slow_batch_lowers_the_budget),
    Use("SERVICE_TIME_BATCHES", service_time, 1.0, one_slow_batch_changes_no_prediction_much),
    Use(
        "SERVICE_SHAPE_BATCHES",
        service_time,
        tuning.SERVICE_TIME_BATCHES,
        no_batch_of_many_makes_a_prediction_jump,
    ),
    Use("LEAST_VARIATION", service_time, 1e-9, sizes_that_hardly_differ_have_no_slope),
    Use("IMAGE_WAITING_BATCHES", lanes, 1_000_000, few_images_wait_decoded),
    Use("LATE_SHARE", prediction, 1.0, an_answer_in_time_hardly_lowers_the_headroom),
    Use("TIMES_FREE", controller, inf, one_tenant_leaves_room_for_others),
    Use("LEARNING_WEIGHT", estimates, 1.0, one_odd_body_changes_no_estimate_much),
    Use("RARE", estimates, 0.0, a_lane_that_is_hardly_ever_used_is_not_expected),
)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_what_a_constant_is_for_fails_without_it(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use.holds()
    monkeypatch.setattr(use.module, use.name, use.without)
    assert not use.holds()


@pytest.mark.anyio
async def test_others_wait_for_all_answers_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await longest_run(60) < 10
    monkeypatch.setattr(postprocess, "ANSWERING_S", inf)
    assert await longest_run(60) >= 30


def test_every_constant_is_named_here_and_there_are_few() -> None:
    names = {name for name in vars(tuning) if name.isupper()}
    tested = {use.name for use in USES} - {"WEIGHTS"} | {
        "INTERACTIVE_WEIGHT",
        "ANSWERING_S",
        "CORE_TIMEOUT_S",
        "CORE_TURN_S",
    }
    assert names == tested  # those of cores are held by `tests/runtime/test_cores.py`
    assert len(names) <= 15
