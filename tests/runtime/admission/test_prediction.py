"""Lag and headroom of a lane's predictions: learned by class, and forgotten by those that are idle."""

from __future__ import annotations

import pytest

from staged_pool.runtime.admission.accounting import RequestClass
from staged_pool.runtime.admission.prediction import LanePrediction
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel

TARGET_S = 5.0
BUSY, NEW = RequestClass(tenant="busy"), RequestClass(tenant="new")


def a_prediction() -> LanePrediction:
    return LanePrediction(LaneServiceTime(budget=Budget(512), device=ServiceTimeModel()), TARGET_S)


def learn(prediction: LanePrediction, request_class: RequestClass, late_s: float, *, was_alone: bool) -> None:
    for _ in range(200):
        prediction.learn_lag(request_class, late_s, was_alone=was_alone)


def test_the_lag_of_a_tenant_is_its_own() -> None:
    prediction = a_prediction()
    learn(prediction, BUSY, 2.0, was_alone=False)
    assert prediction.lag_s(BUSY) == pytest.approx(2.0, rel=0.01)
    assert prediction.lag_s(NEW) == 0.0
    assert prediction.most_lag_s == prediction.lag_s(BUSY)


def test_a_newcomer_lags_as_those_who_came_alone_with_its_priority() -> None:
    prediction = a_prediction()
    learn(prediction, BUSY, 1.0, was_alone=True)
    assert prediction.lag_s(NEW) == pytest.approx(1.0, rel=0.01)
    assert prediction.lag_s(RequestClass(Priority.BULK, "new")) == 0.0


def test_an_early_answer_makes_no_lag_below_zero() -> None:
    prediction = a_prediction()
    learn(prediction, BUSY, -3.0, was_alone=True)
    assert (prediction.lag_s(BUSY), prediction.lag_s(NEW)) == (0.0, 0.0)


def test_a_class_that_has_nothing_in_flight_is_forgotten_and_then_lags_as_a_newcomer() -> None:
    prediction = a_prediction()
    learn(prediction, BUSY, 2.0, was_alone=False)
    prediction.catch_up(BUSY)
    assert prediction.lag_s(BUSY) == 0.0


def test_an_idle_engine_lags_for_nobody() -> None:
    prediction = a_prediction()
    learn(prediction, BUSY, 2.0, was_alone=True)
    prediction.catch_up()
    assert (prediction.lag_s(BUSY), prediction.lag_s(NEW), prediction.most_lag_s) == (0.0, 0.0, 0.0)


def test_late_answers_raise_the_headroom_of_their_class_to_their_excess_and_no_further() -> None:
    prediction = a_prediction()
    for _ in range(10):
        prediction.learn_headroom(BUSY, TARGET_S + 0.5, admitted_with_s=0.0)
    assert prediction.headroom_s(BUSY) == 0.5
    prediction.learn_headroom(BUSY, TARGET_S + 0.2, admitted_with_s=0.5)
    assert prediction.headroom_s(BUSY) == pytest.approx(0.7)
    assert prediction.headroom_s(NEW) == 0.0
    assert prediction.most_headroom_s == prediction.headroom_s(BUSY)


def test_answers_in_time_lower_the_headroom_slowly() -> None:
    prediction = a_prediction()
    prediction.learn_headroom(BUSY, TARGET_S + 1.0, admitted_with_s=0.0)
    for _ in range(100):
        prediction.learn_headroom(BUSY, TARGET_S, admitted_with_s=1.0)
    assert 0.3 < prediction.headroom_s(BUSY) < 0.4


def test_a_stall_leaves_half_of_the_target_delay() -> None:
    prediction = a_prediction()
    prediction.learn_headroom(BUSY, 60.0, admitted_with_s=0.0)
    assert prediction.headroom_s(BUSY) == TARGET_S / 2


def test_answers_in_time_need_no_headroom_and_idle_classes_have_none() -> None:
    prediction = a_prediction()
    prediction.learn_headroom(BUSY, TARGET_S, admitted_with_s=0.0)
    assert prediction.headroom_s(BUSY) == 0.0
    prediction.learn_headroom(BUSY, 2 * TARGET_S, admitted_with_s=0.0)
    prediction.catch_up(BUSY)
    assert prediction.headroom_s(BUSY) == 0.0
