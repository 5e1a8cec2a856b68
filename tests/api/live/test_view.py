"""The view of a server: rates, waits and sizes between two moments."""

from __future__ import annotations

import random

import numpy as np
import pytest

from staged_pool.api.live.view import Moment, quantile, view_model
from staged_pool.stages.meter import BUCKETS_S, Histogram, HistogramSnapshot
from tests.servers.engines import engine_on
from tests.support.model import LetterModel

pytestmark = pytest.mark.anyio

NOTHING = Histogram().snapshot()


def durations(*seconds: float) -> HistogramSnapshot:
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    return histogram.snapshot()


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile(NOTHING, NOTHING, 0.5) is None
    assert quantile(durations(1.0), durations(1.0), 0.5) is None, "it is older than the window"


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_a_quantile_is_in_the_bucket_of_the_true_one(part: float) -> None:
    rng = random.Random(7)
    seconds = [10 ** rng.uniform(-4, 1) for _ in range(500)]
    found = quantile(durations(*seconds), NOTHING, part)
    true = float(np.quantile(seconds, part, method="inverted_cdf"))
    place = next(place for place, bound in enumerate(BUCKETS_S) if true <= bound)
    assert found is not None
    assert (BUCKETS_S[place - 1] if place else 0.0) <= found <= BUCKETS_S[place]


def test_what_is_above_all_buckets_counts_as_the_last_one() -> None:
    assert quantile(durations(1000.0), NOTHING, 0.5) == BUCKETS_S[-1]


async def test_rates_are_those_between_the_moments() -> None:
    async with engine_on(LetterModel()) as engine:
        await engine.embed("earlier")
        before = Moment(100.0, {"letters": engine.statistics()}, None)
        for _ in range(4):
            await engine.embed(["ab", "cde"])
        now = Moment(102.0, {"letters": engine.statistics()}, None)
    view = view_model(now, before, "letters")
    stages = {stage.name: stage for stage in view.stages}
    assert (view.answers, view.door.offered, view.door.admitted, view.door.rejected) == (2.0, 2.0, 2.0, 0.0)
    assert view.tokens == 10.0
    assert {name: stage.rate for name, stage in stages.items()} == {
        "parse": 2.0, "preprocess": 4.0, "batch": 4.0, "postprocess": 4.0,
    }  # fmt: skip
    assert sum(view.sizes.values()) == sum(now.engines["letters"].device.batches.values()) - 1
    assert view.batches[-1].items <= 2
    assert view.p50_s is not None
    assert 0 < view.p50_s < 30


async def test_a_model_that_was_not_there_before_has_no_rates() -> None:
    async with engine_on(LetterModel()) as engine:
        await engine.embed("a")
        now = Moment(102.0, {"letters": engine.statistics()}, None)
    view = view_model(now, Moment(100.0, {}, None), "letters")
    assert (view.answers, view.tokens, view.p50_s, view.sizes) == (0.0, 0.0, None, {})
