"""The cost model: fronts, engine processes, devices, bytes and memory that a rate of texts needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from perf.scale.costs import UnitCosts
from perf.scale.devices import Device
from perf.scale.linear import Linear, Work
from perf.tools.texts import Shape, token_counts


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one shape."""

    shape: Shape
    sizes: Sequence[Sequence[int]]
    """Tokens of each text, of requests that are equally likely."""

    @staticmethod
    def of(shape: Shape) -> Traffic:
        """Return the requests of a load of the measurements."""
        return Traffic(shape, token_counts(shape))

    @property
    def texts(self) -> float:
        """Mean texts of a request."""
        return fmean(map(len, self.sizes))

    @property
    def tokens(self) -> float:
        """Mean tokens of a text."""
        return sum(map(sum, self.sizes)) / sum(map(len, self.sizes))

    def work(self, texts: float, batch_texts: float) -> Work:
        """Return the work of some texts in batches of a size."""
        return Work(texts / self.texts, texts, texts * self.tokens, texts / batch_texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds that one text of some traffic takes of each resource. Its inverse is the most texts a second of one."""

    front_loop: float
    preprocess: float
    """Core seconds of tokenizing."""
    engine_loop: float
    device: float
    front_batch: float
    """Seconds of one front's loop for each text of the *engine process*: each batch brings rows to each front."""

    def limit(self, devices: int = 1) -> str:
        """Return the limit of an engine process: more fronts can always be started.

        Args:
            devices: Devices of the engine process.
        """
        return "engine loop" if self.engine_loop >= self.device / devices else "device"


def busy(costs: UnitCosts, device: Device, traffic: Traffic, *, chunk_texts: int) -> Busy:
    """Return the seconds that one text takes of each resource.

    Batches have the least token budget. A batch has B texts, and a request n. So a loop needs
    `requests / n + texts + batches / B` seconds for a text; see `Linear`. A call of preprocess takes what waits,
    `chunk_texts` or less: counted are n.

    Args:
        costs: Unit costs.
        device: The device.
        traffic: The requests.
        chunk_texts: Texts of a call of preprocess at most.
    """
    batch = device.batch_texts(traffic.tokens)
    work = traffic.work(1.0, batch)
    in_calls = traffic.work(1.0, min(traffic.texts, chunk_texts))
    alone = Linear(costs.front_loop.requests, costs.front_loop.texts, costs.front_loop.tokens)
    per_slot = device.forward.of(work)
    return Busy(
        front_loop=alone.of(work),
        front_batch=costs.front_loop.batches / batch,
        preprocess=costs.front_preprocess.of(in_calls),
        engine_loop=costs.engine_loop.of(work),
        device=per_slot if device.cores is None else per_slot / device.cores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Resources for a rate, of which none is busier than the aim."""

    texts_per_s: float
    engines: int
    devices: int
    fronts: int
    """Fronts of all engine processes together: cores for their event loops."""
    preprocess_cores: float
    """Cores that tokenize, in the threads of all fronts."""
    device_busy: float
    """Part of the time in which a device computes."""
    limit: str
    """Limit of an engine process with its devices."""
    up: float
    """Bytes a second from fronts to engine processes."""
    down: float
    requests: float
    """Bytes a second from clients."""
    answers: float
    memory: float
    """Bytes of all processes, without requests in flight and the devices' own memory."""
    core_s: float
    """Core seconds of a million texts: loops and preprocess."""
    device_s: float
    """Device seconds of a million texts."""

    @property
    def fronts_per_engine(self) -> int:
        """Fronts of one engine process."""
        return ceil(self.fronts / self.engines)

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine process."""
        return ceil(self.devices / self.engines)


def need(
    texts_per_s: float, costs: UnitCosts, device: Device, traffic: Traffic, *, aim: float, chunk_texts: int
) -> Need:
    """Return the resources for a rate of texts.

    The number of engine processes follows from their loops, and that of devices from their forwards. Each engine
    process has a device at least. Each front belongs to one engine process, and is busy with its own texts and with a
    frame of rows of each batch. So with r texts a second of the engine process, f fronts are each busy for
    `r x front_loop / f + r x front_batch` of the time.

    Args:
        texts_per_s: The rate.
        costs: Unit costs, for vectors of the width of the device's model.
        device: One device.
        traffic: The requests.
        aim: Largest part of the time in which an event loop or a device is busy. Above it queues grow: see the knee.
        chunk_texts: See `busy`.
    """
    each = busy(costs, device, traffic, chunk_texts=chunk_texts)
    engines = max(1, ceil(texts_per_s * each.engine_loop / aim))
    devices = max(engines, ceil(texts_per_s * each.device / aim))
    rate = texts_per_s / engines
    left = aim - rate * each.front_batch
    if left <= 0.0:
        raise ValueError(f"a front is busy for {rate * each.front_batch:.0%} of the time with frames of rows alone")
    fronts = engines * max(1, ceil(rate * each.front_loop / left))
    work = traffic.work(texts_per_s, device.batch_texts(traffic.tokens))
    loops_s = each.front_loop + each.front_batch * fronts / engines + each.engine_loop
    return Need(
        texts_per_s=texts_per_s,
        engines=engines,
        devices=devices,
        fronts=fronts,
        preprocess_cores=texts_per_s * each.preprocess,
        device_busy=texts_per_s * each.device / devices,
        limit=each.limit(ceil(devices / engines)),
        up=costs.up.of(work),
        down=costs.down.of(work),
        requests=costs.request.of(work),
        answers=costs.answer.of(work),
        memory=fronts * costs.front_bytes + engines * costs.engine_bytes,
        core_s=1e6 * (loops_s + each.preprocess),
        device_s=1e6 * each.device,
    )
