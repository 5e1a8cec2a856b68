"""The cost model by hand, and the simulation beside closed forms of queueing theory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from math import factorial, inf
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perf.commands import scale_command  # noqa: F401  # it registers the command
from perf.commands.command_line import main
from perf.scale import costs as costs_module
from perf.scale import tables
from perf.scale.costs import NotMeasured, UnitCosts, costs_of, no_costs, read_costs
from perf.scale.device_stage import DeviceStage, Request, Text
from perf.scale.devices import H100_FLOPS, Device, computed_gpu, measured_gpu, utilized
from perf.scale.events import Credits, Events, Gathering, Station
from perf.scale.linear import NOTHING, Linear, Work, fit
from perf.scale.need import Traffic, busy, need
from perf.scale.shard import WARM_UP, Arriving, Outcome, Shard, simulate
from perf.scale.sweep import capacity, knee, sweep

SHORT = Traffic("s1", [[12]])
LISTS = Traffic("m8", [[64] * 8, [64] * 8])
COSTS = replace(
    no_costs(),
    one_loop=Linear(requests=200e-6, texts=30e-6, batches=400e-6),
    one_preprocess=Linear(texts=20e-6, batches=50e-6),
    front_loop=Linear(requests=160e-6, texts=20e-6, batches=256e-6),
    front_preprocess=Linear(texts=20e-6, tokens=1e-6, batches=50e-6),
    engine_loop=Linear(requests=10e-6, texts=20e-6, batches=256e-6),
    up=Linear(requests=100.0, texts=50.0, tokens=4.0),
    down=Linear(requests=100.0, texts=1536.0),
    request=Linear(requests=150.0, tokens=7.0),
    answer=Linear(requests=300.0, texts=2048.0),
    front_bytes=100e6,
    engine_bytes=1e9,
    width=384,
)
GPU = Device(name="GPU", forward=Linear(tokens=1e-6, batches=2e-3), width=384)


# ---- costs ----


def test_a_cost_is_the_sum_of_its_parts() -> None:
    assert Linear(1.0, 2.0, 3.0, 4.0).of(Work(10.0, 20.0, 30.0, 40.0)) == 10 + 40 + 90 + 160
    assert Linear(1.0, 2.0, 3.0, 4.0).times(2.0) == Linear(2.0, 4.0, 6.0, 8.0)


def test_a_fit_finds_the_cost_that_the_measurements_have() -> None:
    cost = Linear(requests=2e-4, texts=3e-5, batches=7e-4)
    works = [Work(100, 100, 1200, 100), Work(100, 100, 1200, 10), Work(50, 400, 9000, 60), Work(20, 1280, 60_000, 90)]
    found = fit([(work, cost.of(work)) for work in works], ("requests", "texts", "batches"))
    assert asdict(found.cost) == pytest.approx(asdict(cost))
    assert found.worst < 1e-9


def test_a_fit_has_no_negative_part_and_says_how_far_it_is_off() -> None:
    """Plain least squares would give a text a negative cost."""
    measured = [(Work(requests=1, texts=1), 10.0), (Work(requests=1, texts=2), 9.0)]
    found = fit(measured, ("requests", "texts"))
    assert found.cost.texts == 0.0
    assert 9.0 < found.cost.requests < 10.0
    assert found.worst == pytest.approx(max(1 - found.cost.requests / 10.0, found.cost.requests / 9.0 - 1))


def test_costs_survive_their_file(tmp_path: Path) -> None:
    (tmp_path / costs_module.RESULT).write_text(json.dumps({"results": {"costs": asdict(COSTS)}}))
    assert read_costs(tmp_path) == COSTS == costs_of(asdict(COSTS))


def test_wider_vectors_and_slower_cores_change_what_they_should() -> None:
    wide = COSTS.wider(1024)
    assert wide.down.texts == 1536 + 4 * 640
    assert wide.answer.texts == pytest.approx(2048 + 4 * 640 * 4 / 3)
    assert wide.up == COSTS.up
    slow = COSTS.slower(2.0)
    assert slow.engine_loop == COSTS.engine_loop.times(2.0)
    assert slow.down == COSTS.down


# ---- the model ----


def test_the_seconds_of_a_text_are_those_computed_by_hand() -> None:
    each = busy(COSTS, GPU, SHORT, chunk_texts=16)
    assert GPU.batch_texts(12) == 256  # by the item limit: 4,096 tokens would be 341 texts
    assert each.front_loop == pytest.approx(180e-6)
    assert each.front_batch == pytest.approx(1e-6)
    assert each.engine_loop == pytest.approx(31e-6)
    assert each.preprocess == pytest.approx(20e-6 + 12e-6 + 50e-6)
    assert each.device == pytest.approx(12e-6 + 2e-3 / 256)
    lists = busy(COSTS, GPU, LISTS, chunk_texts=16)
    assert GPU.batch_texts(64) == 64
    assert lists.front_loop == pytest.approx(160e-6 / 8 + 20e-6)
    assert lists.engine_loop == pytest.approx(10e-6 / 8 + 20e-6 + 4e-6)
    assert lists.preprocess == pytest.approx(20e-6 + 64e-6 + 50e-6 / 8)


def test_a_rate_needs_what_is_computed_by_hand() -> None:
    found = need(100_000.0, COSTS, GPU, SHORT, aim=0.5, chunk_texts=16)
    assert found.engines == 7  # 100,000 x 31 us = 3.1 loops, each half busy
    assert found.devices == 7  # one for each engine process; 1.98 would do
    assert found.limit == "engine loop"
    rate = 100_000 / 7
    assert found.fronts_per_engine == 6  # 14,286 x 180 us = 2.57 loops; each also has 1.4 % of frames
    assert rate * 180e-6 / 6 + rate * 1e-6 < 0.5 < rate * 180e-6 / 5 + rate * 1e-6
    assert found.device_busy == pytest.approx(100_000 * (12e-6 + 2e-3 / 256) / 7)
    assert found.up == pytest.approx(100_000 * (100 + 50 + 48))
    assert found.down == pytest.approx(100_000 * 1636)
    assert found.answers == pytest.approx(100_000 * 2348)
    assert found.memory == pytest.approx(42 * 100e6 + 7e9)
    assert found.core_s == pytest.approx(180 + 6 + 31 + 82)


def test_a_slow_device_takes_several_devices_for_each_engine_process() -> None:
    slow = replace(GPU, forward=Linear(tokens=20e-6))
    found = need(10_000.0, COSTS, slow, SHORT, aim=0.5, chunk_texts=16)
    assert (found.engines, found.devices, found.limit) == (1, 5, "device")


def test_more_texts_never_need_less() -> None:
    needs = [need(rate, COSTS, GPU, LISTS, aim=0.6, chunk_texts=16) for rate in (1e3, 1e4, 1e5, 1e6)]
    for less, more in pairwise(needs):
        assert less.fronts <= more.fronts
        assert less.engines <= more.engines
        assert less.devices <= more.devices


def test_frames_of_rows_alone_can_be_too_much_for_a_front() -> None:
    heavy = replace(COSTS, front_loop=Linear(batches=1.0))
    with pytest.raises(ValueError, match="frames of rows alone"):
        need(100_000.0, heavy, GPU, SHORT, aim=0.5, chunk_texts=16)


def test_a_gpu_is_read_from_two_measured_forwards(tmp_path: Path) -> None:
    cells = [
        {"model": "m", "load": "bare m8", "batch_tokens": 16_000.0, "tokens_per_s": 640_000.0},
        {"model": "m", "load": "engine s1, 1", "batch_tokens": 12.0, "inputs_per_s": 250.0, "use": {"idle": 0.5}},
    ]
    (tmp_path / "gpu-speed.json").write_text(json.dumps({"results": {"cells": cells}}))
    gpu = measured_gpu("m", 1024, tmp_path)
    assert gpu.forward.of(Work(tokens=16_000, batches=1)) == pytest.approx(0.025)
    assert gpu.forward.of(Work(tokens=12, batches=1)) == pytest.approx(0.002)


def test_flops_give_the_utilization_that_they_were_computed_from() -> None:
    device = computed_gpu("small", 384, 10**7, like=GPU, utilization=0.25, layers=0.5)
    assert utilized(device, 10**7) == pytest.approx(0.25)
    assert device.forward.tokens == pytest.approx(2e7 / (0.25 * H100_FLOPS))
    assert device.forward.batches == pytest.approx(1e-3)


def test_a_forward_has_all_cores_if_it_is_alone_and_not_short() -> None:
    cpu = Device(name="CPU", forward=Linear(tokens=1e-3), width=384, slots=2, cores=1.5, short_tokens=100)
    assert cpu.seconds(Work(tokens=150), alone=True) == pytest.approx(0.1)
    assert cpu.seconds(Work(tokens=150), alone=False) == pytest.approx(0.2)
    assert cpu.seconds(Work(tokens=75), alone=True) == pytest.approx(0.1)


# ---- the simulation, beside closed forms ----


def mean_sojourn(rate: float, service: Callable[[random.Random], float], servers: int = 1) -> float:
    """Return the mean seconds of Poisson arrivals in a station."""
    events, rng = Events(), random.Random(7)
    station, sojourns = Station(events, servers), []

    def arrive(left: int) -> None:
        began = events.now
        station.submit(service(rng), lambda: sojourns.append(events.now - began))
        if left:
            events.after(rng.expovariate(rate), lambda: arrive(left - 1))

    arrive(25_000)
    events.run()
    return sum(sojourns) / len(sojourns)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_exponential_service_is_mm1(load: float) -> None:
    assert mean_sojourn(load, lambda rng: rng.expovariate(1.0)) == pytest.approx(1 / (1 - load), rel=0.05)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_constant_service_is_md1(load: float) -> None:
    """The formula of Pollaczek and Khinchine."""
    assert mean_sojourn(load, lambda _: 1.0) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.03)


def test_several_servers_are_mmc() -> None:
    """The C formula of Erlang: the part of the arrivals that wait."""
    servers, offered = 3, 2.1
    last = offered**servers / factorial(servers) / (1 - offered / servers)
    waits = last / (sum(offered**count / factorial(count) for count in range(servers)) + last)
    expected = 1 + waits / (servers - offered)
    assert mean_sojourn(offered, lambda rng: rng.expovariate(1.0), servers) == pytest.approx(expected, rel=0.05)


def shard(**changes: object) -> Shard:
    """Return a shard of two fronts on a GPU."""
    return replace(Shard(costs=COSTS, device=GPU, traffic=SHORT, fronts=2), **changes)  # type: ignore[arg-type]


def test_a_shard_with_a_device_of_single_texts_alone_is_md1() -> None:
    device = replace(GPU, forward=Linear(batches=1e-3), most_items=1)
    only_device = shard(costs=no_costs(), device=device)
    outcome = simulate(only_device, Arriving(requests=3_000, per_s=400.0, seed=1))
    mean_s = sum(outcome.latencies_s) / len(outcome.latencies_s)
    assert mean_s == pytest.approx(1e-3 * (1 + 0.4 / (2 * 0.6)), rel=0.03)


def test_light_load_takes_the_sum_of_the_parts() -> None:
    outcome = simulate(shard(), Arriving(requests=200, per_s=1.0))
    loops_s = (160 + 20 + 256 + 10 + 20 + 256) * 1e-6
    expected_s = loops_s + (20 + 12 + 50) * 1e-6 + 2e-3 + 12e-6
    assert outcome.percentile_s(0.5) == pytest.approx(expected_s)
    assert outcome.texts == outcome.batches == outcome.answered == 200


def test_one_process_pays_the_loop_once() -> None:
    outcome = simulate(shard(fronts=0), Arriving(requests=200, per_s=1.0))
    assert outcome.percentile_s(0.5) == pytest.approx((200 + 30 + 400 + 20 + 50) * 1e-6 + 2e-3 + 12e-6)


def test_a_closed_loop_of_one_client_is_never_faster_than_its_latency() -> None:
    outcome = simulate(shard(), Arriving(requests=300, clients=1))
    assert outcome.per_s == pytest.approx(1 / outcome.percentile_s(0.5))


def test_no_shard_answers_more_than_its_busiest_loop_can() -> None:
    engine_bound = shard(costs=replace(no_costs(), engine_loop=Linear(texts=1e-4)), max_requests=100)
    assert capacity(engine_bound) == pytest.approx(10_000)
    outcome = simulate(engine_bound, Arriving(requests=2_500, per_s=15_000.0))
    assert outcome.per_s == pytest.approx(10_000, rel=0.02)
    assert outcome.engine_busy > 0.98
    assert outcome.rejected > 400


def test_the_capacity_is_that_of_the_first_resource_that_is_full() -> None:
    assert capacity(shard(fronts=2)) == pytest.approx(1 / (180e-6 / 2 + 1e-6))
    assert capacity(shard(fronts=100)) == pytest.approx(1 / 31e-6)
    slow = replace(GPU, forward=Linear(tokens=20e-6), slots=3)
    assert capacity(shard(device=slow, fronts=100)) == pytest.approx(3 / (12 * 20e-6))
    assert capacity(shard(fronts=0)) == pytest.approx(1 / (230e-6 + 400e-6 / 256))


@pytest.mark.parametrize("traffic", [SHORT, LISTS, Traffic("day", [[9], [200], [30] * 40])], ids=["s1", "m8", "mixed"])
@pytest.mark.parametrize("fronts", [0, 1, 3])
@pytest.mark.parametrize("load", [0.6, 2.0])
def test_nothing_is_lost_and_no_bound_is_exceeded(traffic: Traffic, fronts: int, load: float) -> None:
    tight = shard(traffic=traffic, fronts=fronts, max_requests=40, credits=1)
    requests = round(500 / traffic.texts) + 20
    outcome = simulate(tight, Arriving(requests=requests, per_s=load * capacity(tight), seed=5))
    assert outcome.offered == requests == outcome.answered + outcome.rejected
    assert outcome.most_in_flight <= 40
    assert outcome.most_credits == 1
    assert len(outcome.latencies_s) <= requests * (1 - WARM_UP)
    assert outcome.answered <= outcome.texts
    if traffic is SHORT:
        assert outcome.texts == outcome.answered
    assert 0 < outcome.device_busy <= 1
    assert outcome.front_busy <= 1
    assert outcome.engine_busy <= 1


def test_the_same_seed_gives_the_same_figures_and_another_one_does_not() -> None:
    def figures(seed: int) -> Outcome:
        return simulate(shard(traffic=LISTS), Arriving(requests=60, per_s=500.0, seed=seed))

    assert figures(1) == figures(1)
    assert figures(1).latencies_s != figures(2).latencies_s


def test_credits_are_given_in_order_and_never_beyond_their_number() -> None:
    line, taken = Credits(2), list[int]()
    for place in range(5):
        line.take(lambda place=place: taken.append(place))  # type: ignore[misc]
    assert (taken, line.out) == ([0, 1], 2)
    line.give_back()
    line.give_back()
    assert (taken, line.out, line.most_out) == ([0, 1, 2, 3], 2, 2)


def test_preprocess_takes_all_lists_that_wait_up_to_a_chunk() -> None:
    events, calls = Events(), list[list[int]]()
    workers = Gathering[int](events, 1, 4, lambda items: 1.0, calls.append)
    for items in ([1], [2, 3], [4], [5, 6], [7]):
        workers.add(items)
    events.run()
    assert calls == [[1], [2, 3, 4, 5, 6], [7]]
    assert workers.busy_s == 3.0


def batches_of(device: Device, sizes: list[int]) -> list[list[int]]:
    """Return the tokens of each batch: all but the first text come during its forward."""
    events, made = Events(), list[list[int]]()
    stage = DeviceStage(
        events,
        device,
        loop=Station(events),
        batch_s=0.0,
        preparing=lambda: 0,
        ready_s=lambda: 0.0,
        done=lambda texts: made.append([text.tokens for text in texts]),
    )
    texts = [Text(Request(place, 0, 0.0, 1), tokens) for place, tokens in enumerate(sizes)]
    stage.add(texts[:1])
    events.after(1e-9, lambda: stage.add(texts[1:]))
    events.run()
    assert stage.texts == len(sizes)
    return made


def test_batches_follow_the_budgets_of_the_batch_former() -> None:
    device = replace(GPU, most_items=4, least_tokens=100, most_tokens=1_000)
    assert batches_of(device, [10] * 10) == [[10], [10] * 4, [10] * 4, [10]]
    assert batches_of(device, [10, 60, 60, 30]) == [[10], [30, 60], [60]]
    many = batches_of(replace(device, most_items=256), [50] * 41)  # 2,000 tokens wait: an eighth is the budget
    assert [len(batch) for batch in many[:3]] == [1, 5, 4]


def test_the_knee_lies_between_the_loads_around_it() -> None:
    assert knee([(0.3, 10.0), (0.6, 14.0), (0.8, 18.0), (0.9, 22.0), (1.0, 90.0)]) == pytest.approx(0.85)
    assert knee([(0.3, 10.0), (1.0, 20.0)]) == inf


def test_p99_grows_with_the_load_and_the_knee_is_within_the_capacity() -> None:
    levels = sweep(shard(), loads=(0.3, 0.8, 1.2), texts=1_000)
    p99_ms = [level.p99_ms for level in levels]
    assert p99_ms == sorted(p99_ms)
    assert 0.3 < knee([(level.load, level.p99_ms) for level in levels]) < 1.2
    assert levels[0].outcome.texts / levels[0].outcome.batches < levels[1].outcome.texts / levels[1].outcome.batches


# ---- the command ----


def test_the_recorded_costs_give_every_row_of_the_tables() -> None:
    costs = read_costs()
    for name, cost in asdict(costs).items():
        assert all(value >= 0 for value in (cost.values() if isinstance(cost, dict) else [cost])), name
    for name in ("front_loop", "engine_loop", "one_loop", "front_preprocess", "cpu_device", "up", "down"):
        assert getattr(costs, name) != NOTHING
    for target in tables.targets(costs):
        rows = [target.need(rate, 0.6) for rate in tables.RATES]
        assert all(0 < row.device_busy <= 0.6 for row in rows)
        assert target.shard(rows[-1]).fronts == rows[-1].fronts_per_engine


def test_the_command_says_what_to_measure_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> UnitCosts:
        return read_costs(tmp_path)

    monkeypatch.setattr(tables, "read_costs", missing)
    with pytest.raises(NotMeasured, match="run `python -m perf scale --measure`"):
        missing()
    said = CliRunner().invoke(main, ["scale"])
    assert said.exit_code == 2
    assert "--measure" in said.output
