"""Tables of the cost model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Final

from perf.scale.costs import UnitCosts, read_costs
from perf.scale.devices import Device, table_devices
from perf.scale.need import Need, Traffic, need
from perf.scale.shard import Arriving, Shard, simulate
from perf.scale.sweep import Level, capacity, knee, sweep
from perf.tools import report
from perf.tools.report import number
from perf.tools.texts import SHAPES, Shape
from staged_pool.runtime.config import EngineConfig

RATES: Final = (10_000.0, 100_000.0, 1_000_000.0)
"""Texts a second."""
TRAFFICS: Final[tuple[Shape, ...]] = ("s1", "m8")

NEED_COLUMNS: Final = (
    "model, load, texts/s", "engines", "devices", "busy", "fronts", "tokenizing", "line up", "down", "clients up",
    "down", "memory", "core s", "device s", "limit",
)  # fmt: skip
NEED_NOTE: Final = (
    "fronts: cores of event loops, and so is each engine; tokenizing: cores in threads of fronts; busy: of a device; "
    "bytes: MB/s; memory: GB of all processes, without the devices'; core s, device s: of a million texts"
)
LEVEL_COLUMNS: Final = (
    "of capacity", "texts/s", "p50 ms", "p99 ms", "rejected", "texts a batch", "front busy", "engine busy",
    "device busy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and the requests to it."""

    device: Device
    traffic: Traffic
    costs: UnitCosts

    @property
    def name(self) -> str:
        return f"{self.device.name}, {self.traffic.shape}"

    def need(self, texts_per_s: float, aim: float) -> Need:
        """Return what a rate needs."""
        chunk = EngineConfig().chunk_items
        return need(texts_per_s, self.costs, self.device, self.traffic, aim=aim, chunk_texts=chunk)

    def shard(self, needed: Need) -> Shard:
        """Return one of the equal engine processes of a rate, with its fronts and devices."""
        return Shard(
            costs=self.costs,
            device=replace(self.device, slots=needed.devices_per_engine),
            traffic=self.traffic,
            fronts=needed.fronts_per_engine,
        )


def targets(costs: UnitCosts) -> list[Target]:
    """Return the models and loads of the tables."""
    return [
        Target(device, Traffic.of(shape), costs.wider(device.width)) for device in table_devices() for shape in TRAFFICS
    ]


def show(*, aim: float, slower: float) -> None:
    """Print and record the needs of all rates, and loads of one shard of each.

    Args:
        aim: See `need`.
        slower: Times that a core takes as long as one of the machine where the costs were measured.
    """
    with report.recording("scale-needs", {"aim": aim, "slower": slower, "loads": SHAPES}) as record:
        costs = read_costs().slower(slower)
        _recorded(record, costs)
        rows, results = [], []
        for target in targets(costs):
            for rate in RATES:
                needed = target.need(rate, aim)
                rows.append(_need_row(f"{target.name}, {rate:,.0f}", needed))
                results.append({"model": target.device.name, "load": target.traffic.shape, **asdict(needed)})
            _simulate(record, target, target.need(RATES[-1], aim))
        record.results["needs"] = results
        report.show_table("Needs", NEED_COLUMNS, rows, f"{NEED_NOTE}; no loop or device is busier than {aim:.0%}")


RECORDED: Final[tuple[tuple[str, Shape, int], ...]] = (
    ("HTTP s1, 1", "s1", 1), ("HTTP s1, 64", "s1", 64), ("HTTP m8, 16", "m8", 16), ("HTTP m8, 64", "m8", 64),
)  # fmt: skip
"""Closed loops of one process that `gpu-speed.json` has, with their clients."""


def _recorded(record: report.Record, costs: UnitCosts) -> None:
    """Predict closed loops that were measured on a GPU: the cores of that machine are others."""
    device = table_devices()[0]
    cells = json.loads((report.RESULTS / "gpu-speed.json").read_text())["results"]["cells"]
    rows, results = [], []
    for load, shape, clients in RECORDED:
        (cell,) = (each for each in cells if (each["model"], each["load"]) == (device.name, load))
        shard = Shard(costs=costs.wider(device.width), device=device, traffic=Traffic.of(shape), fronts=0)
        outcome = simulate(shard, Arriving(requests=round(4_000 / shard.traffic.texts) + 200, clients=clients))
        rate, p50_ms = outcome.per_s * shard.traffic.texts, 1e3 * outcome.percentile_s(0.5)
        rows.append([load, *map(number, (cell["inputs_per_s"], rate, cell["ms"]["p50"], p50_ms))])
        results.append({"load": load, "predicted_texts_per_s": rate, "predicted_p50_ms": p50_ms})
    record.results["recorded"] = results
    note = f"measured: perf/results/gpu-speed.json, {device.name} in one process on an H200"
    report.show_table("Recorded and predicted", ("", "texts/s", "predicted", "p50 ms", "predicted"), rows, note)


def _need_row(name: str, needed: Need) -> list[str]:
    in_mb = (needed.up, needed.down, needed.requests, needed.answers)
    return [
        name, str(needed.engines), str(needed.devices), f"{needed.device_busy:.0%}", str(needed.fronts),
        number(needed.preprocess_cores), *(number(each / 1e6) for each in in_mb), number(needed.memory / 1e9),
        number(needed.core_s), number(needed.device_s), needed.limit,
    ]  # fmt: skip


def _simulate(record: report.Record, target: Target, needed: Need) -> None:
    shard = target.shard(needed)
    levels = sweep(shard)
    knees = knee([(level.load, level.p99_ms) for level in levels])
    most = capacity(shard) * target.traffic.texts
    title = f"{target.name}: one engine process, {shard.fronts} fronts, {shard.device.slots} devices"
    note = f"capacity {most:,.0f} texts/s; knee at {knees:.2f} of it; device: {target.device.source}"
    report.show_table(title, LEVEL_COLUMNS, [level_row(level, shard) for level in levels], note)
    record.results[target.name] = {
        "fronts": shard.fronts, "devices": shard.device.slots, "capacity_texts_per_s": most, "knee": knees,
        "levels": [level_result(level, shard) for level in levels],
    }  # fmt: skip


def level_row(level: Level, shard: Shard) -> list[str]:
    """Return the cells of a row with `LEVEL_COLUMNS`."""
    result = level_result(level, shard)
    parts = (result["rejected"], result["front_busy"], result["engine_busy"], result["device_busy"])
    rejected, *busy = (f"{part:.0%}" for part in parts)
    return [
        f"{level.load:.2f}", number(result["texts_per_s"]), number(level.p50_ms), number(level.p99_ms), rejected,
        number(result["batch_texts"]), *busy,
    ]  # fmt: skip


def level_result(level: Level, shard: Shard) -> dict[str, float]:
    """Return the figures of a simulated load for the JSON file."""
    outcome = level.outcome
    return {
        "of_capacity": level.load,
        "texts_per_s": outcome.per_s * shard.traffic.texts,
        "p50_ms": level.p50_ms,
        "p99_ms": level.p99_ms,
        "rejected": outcome.rejected / outcome.offered,
        "batch_texts": outcome.texts / outcome.batches,
        "front_busy": outcome.front_busy,
        "engine_busy": outcome.engine_busy,
        "device_busy": outcome.device_busy,
    }
