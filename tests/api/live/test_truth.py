"""No sentence of a verdict contradicts a number that is shown beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Final

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.live.durations import span
from staged_pool.api.live.feed import PERIOD_S, LiveEvent, LiveFeed
from staged_pool.api.live.verdict import OVERLOADED, Verdict, judge
from staged_pool.api.live.view import CARDS, DoorView, ModelView, Moment, StageView
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.statistics import REJECTION_REASONS
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.stage import StageOptions
from tests.runtime.admission.test_waits import FORWARD_S, TOKEN_S, VirtualOffload
from tests.sim.clock import BACKENDS, Backend, run
from tests.support.model import LetterModel, letters

PARTS: Final = st.floats(0, 1) | st.sampled_from([0.0, 1e-9, 0.004, 0.005, 0.7, 0.85, 0.851, 1.0])
SECONDS: Final = st.floats(0, 100) | st.sampled_from([0.0, 1e-9, 1e-6, 0.02, 0.0201, 5.0])
COUNTS: Final = st.integers(0, 5000)


@st.composite
def stages(draw: st.DrawFn) -> StageView:
    name = draw(st.sampled_from([*CARDS, "preprocess_images", "batch_images"]))
    return StageView(
        name=name, card=name.removesuffix("_images"), waiting=draw(COUNTS), workers=draw(st.integers(1, 64)),
        busy=draw(PARTS), blocked=draw(PARTS), rate=draw(SECONDS), wait_s=draw(SECONDS), work_s=draw(SECONDS),
        oldest_s=draw(SECONDS), dropped=0, crashes=0,
    )  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> ModelView:
    lately = draw(st.dictionaries(st.sampled_from(REJECTION_REASONS), st.integers(1, 10_000), max_size=3))
    seconds, admitted = draw(st.floats(0.2, 3.0)), draw(COUNTS)
    rejected = sum(lately.values()) / seconds
    door = DoorView(
        offered=admitted / seconds + rejected, admitted=admitted / seconds, rejected=rejected, requests=draw(COUNTS),
        max_requests=draw(COUNTS), tokens=draw(COUNTS), max_tokens=draw(COUNTS), delay_s=draw(SECONDS),
        target_delay_s=draw(SECONDS), reasons=lately, lately=lately, offered_total=10**6,
    )  # fmt: skip
    return ModelView(
        seconds=seconds, phase="ready", fault=None, stall=None, dtype="float32", device="cpu", width=4, door=door,
        stages=draw(st.lists(stages(), min_size=1, max_size=6, unique_by=lambda stage: stage.name)), limiters={},
        answers=0.0, p50_s=None, p99_s=None, tokens=0.0, padding=0.0, full=0.0, batches=(), sizes={},
    )  # fmt: skip


def parts(text: str) -> list[str]:
    return re.findall(r"[0-9]+ %|under 1 %", text)


def spans(text: str) -> list[str]:
    return re.findall(r"[0-9.e+]+ (?:us|ms|s)\b", text)


def percent(part: float) -> str:
    return "under 1 %" if 0.0 < part < 0.005 else f"{100 * part:.0f} %"


def check(view: ModelView, verdict: Verdict) -> None:
    """Compare all claims and numbers of a verdict with its view."""
    door, text = view.door, f"{verdict.sentence} {verdict.why}"
    at = [stage for stage in view.stages if stage.card == verdict.at]
    window = span(view.seconds)
    of_stages = {percent(stage.busy) for stage in (at or view.stages)}
    if verdict.lead == OVERLOADED:
        assert door.rejected > 0
        assert parts(verdict.sentence) == [percent(door.rejected / door.offered)]
        assert set(parts(verdict.why)) <= of_stages
        assert spans(text) == [window], "only the window: what is in flight now is of another time"
        return
    assert set(parts(text)) <= of_stages
    if verdict.kind == "busy":
        assert verdict.at
        assert any(stage.busy > 0.5 for stage in at)
        assert set(spans(verdict.why)) <= {window} | {span(stage.wait_s) for stage in at}
        assert "waited 0 us" not in text
        return
    assert verdict.kind == "calm"
    assert door.rejected <= 0.01 * door.offered
    if verdict.lead == "Idle":
        assert (door.requests, door.offered) == (0, 0)
        assert not parts(text)
        return
    assert set(spans(verdict.why)) <= {window, span(max(stage.wait_s for stage in view.stages))}
    assert ("Nothing waited" in text) == all(stage.wait_s < 1e-6 for stage in view.stages)


@given(views(), st.none() | views())
def test_a_verdict_is_true_of_its_view(view: ModelView, before: ModelView | None) -> None:
    check(view, judge(view, None, None if before is None else judge(before, None)))


@given(views())
def test_a_verdict_that_was_told_stays_true_while_its_evidence_fades(view: ModelView) -> None:
    told = judge(view, None)
    for part in (1.0, 0.9, 0.8, 0.5, 0.0):
        fading = replace(view, stages=[replace(stage, busy=stage.busy * part) for stage in view.stages])
        told = judge(fading, None, told)
        check(fading, told)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_event_of_a_server_that_gets_idle_busy_and_overloaded_is_true(backend: Backend) -> None:
    events = events_of(backend)
    leads = [event.models["letters"].verdict.lead for event in events]
    assert {"Idle", "Calm", OVERLOADED, "The device"} <= set(leads)
    changes = sum(one != other for one, other in pairwise(leads))
    assert changes < len(leads) / 8, "it flickers"
    for event in events:
        check(event.models["letters"].view, event.models["letters"].verdict)


def events_of(backend: Backend) -> Sequence[LiveEvent]:
    """Return the events of a minute of virtual time: calm, a few clients, far too many, and none."""
    events: list[LiveEvent] = []

    def note(event: bytes) -> None:
        events.append(msgspec.json.decode(event, type=LiveEvent))

    async def main() -> None:
        quick = VirtualOffload(4, lambda _: 1e-4)
        device = VirtualOffload(1, lambda batch: FORWARD_S + TOKEN_S * sum(len(letters(each)) for each in batch))
        config = EngineConfig(coalesce=False, max_requests=64, target_delay_s=2.0)
        options = StageOptions(clock=anyio.current_time)
        async with run_engine(
            config, LetterModel(), device=device, preprocess=quick, offload=quick, options=options
        ) as engine:

            async def take() -> Moment:
                return Moment(anyio.current_time(), {"letters": engine.statistics()}, None)

            async def client(until: float, pause_s: float) -> None:
                while anyio.current_time() < until:
                    try:
                        await engine.embed(["a" * 64] * 8)
                    except Overloaded:
                        await anyio.sleep(0.1)
                    await anyio.sleep(pause_s)

            async def watch() -> None:
                async with aclosing(LiveFeed(take, lambda: "", clock=anyio.current_time).events()) as feed:
                    async for event in feed:
                        note(event)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                began = anyio.current_time()
                for clients, pause_s in ((1, 0.5), (3, 0.0), (200, 0.0), (0, 0.0), (40, 0.0), (0, 0.0)):
                    began += 10.0
                    async with anyio.create_task_group() as load:
                        for _ in range(clients):
                            load.start_soon(client, began, pause_s)
                        await anyio.sleep_until(began)
                await anyio.sleep(4 * PERIOD_S)
                tasks.cancel_scope.cancel()

    run(main, backend=backend, seed=1)
    return events
